"""What a simulated sweep runs, chosen by its workload and its machine."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvbench.capacity.gpus import parse_gpus
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.common.option_rules import flag
from kvbench.common.text import data_size, listing
from kvbench.runs.results import MeasuredTarget
from kvbench.simulation.cost.cost_model import CostCalibration, read_calibration
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench.simulation.cost.tables import find_tables, read_tables
from kvbench.simulation.cost.unit_costs import THIS_CPU, this_cpu
from kvbench.simulation.instrument import BACKEND, SimulatedTarget, checked
from kvbench.simulation.request import SimulateRequest
from kvbench.sweep.requests import SweepRequest
from kvbench.targets.choose import STORED, ChosenTarget
from kvbench.workload.file import SimulateSection, Workload, resolve

OPTIONS = ("device", "model", "tensor_parallel", "ops", "calibration")
"""Options of a simulation, with the names of the workload's ``simulate`` section."""
_MACHINE = frozenset({"device", "model", "tensor_parallel"})
_OF_THE_HOST = (
    "device", "kernel_backend", "num_threads", "torch_compile", "fused_layers", "cuda_graphs", "async_scheduling"
)  # fmt: skip
"""Engine settings that say how this machine computes; a simulated engine has a cost model in their place."""
_OTHERS_ONLY = (
    "target", "serve_cmd", "preset", "exact", "target_python", "target_args", "vocab_size", "max_model_len",
    "tokenizer", "api_key_env", "tls_ca_file", "no_tls_verify", "port", "start_timeout", "lockstep_minutes",
)  # fmt: skip
_START_GUESS_S = 0.1


def profile_of(request: SweepRequest | SimulateRequest) -> str:
    """The workload's profile that is simulated: the one asked for, else the one for such a device."""
    return request.profile or ("cpu" if request.device == THIS_CPU else "gpu")


def check_options(request: SweepRequest | SimulateRequest, *, simulates: bool, begun: bool) -> None:
    """Raises UsageError for an option that means nothing here. ``begun``: a run that has begun goes on."""
    given = [flag(name) for name in OPTIONS if getattr(request, name)]
    if not simulates:
        for name in given:
            if name != "--model":
                raise UsageError(f"{name} goes with --simulate only: add it, or leave {name} out")
        return
    if others := [flag(name) for name in _OTHERS_ONLY if getattr(request, name)]:
        raise UsageError(f"{others[0]} goes with an engine that is measured: leave it out, or leave --simulate out")
    if begun and given:
        raise UsageError(
            f"{given[0]} cannot change a run that has begun: leave it out, or start a new run without --resume"
        )


def simulated_workload(
    workload: Workload, request: SweepRequest | SimulateRequest, overrides: Sequence[str]
) -> tuple[Workload, tuple[str, ...]]:
    """Returns ``workload`` as it runs on the machine of ``request`` and its own section, and notes on what differs.

    ``overrides``: those of -o, which win over what a simulation would leave out. Raises UsageError.
    """
    data = copy.deepcopy(dict(workload.resolved))
    given = {name: getattr(request, name) for name in OPTIONS if getattr(request, name)}
    given |= {name: str(value.resolve()) for name, value in given.items() if isinstance(value, Path)}
    stored = workload.simulate.model_dump(exclude_unset=True) if workload.simulate else {}
    section = {"device": None, "tensor_parallel": 1, **stored, **given}
    if not section["device"]:
        raise UsageError(
            "a simulation needs a device: give for example --device H200 (with --tensor-parallel 4: four of them), or "
            "a section `simulate: {device: H200}` in the workload"
        )
    count, device = 1, THIS_CPU
    if section["device"].strip().lower() != THIS_CPU:
        count, gpu = parse_gpus(section["device"])
        device = gpu.name
    if count > 1 and "tensor_parallel" in given and given["tensor_parallel"] != count:
        raise UsageError(
            f"--device {section['device']} is {count} GPUs, and --tensor-parallel is {given['tensor_parallel']}: write "
            f"--device {device}"
        )
    section |= {"device": device} | ({"tensor_parallel": count} if count > 1 else {})
    notes, asked = [], section.pop("model", None)
    if asked is not None:
        is_path = Path(asked).suffix == ".json" or Path(asked).is_dir()
        data["model"] = {"config": str(Path(asked).resolve()) if is_path else plan_model(asked).name}
    else:
        dtype, own = workload.model.dtype, plan_model(str(workload.engine["model"])).spec.default_dtype
        if dtype not in (None, "auto", own):
            data["model"] = {key: value for key, value in data["model"].items() if key != "dtype"}
            notes.append(f"weights and KV are counted in {own}, the model's own dtype, not in {dtype}")
    keys = {override.partition("=")[0].strip() for override in overrides}
    keeps_budget = bool(keys & {"engine", "engine.kv_budget"}) or not given.keys() & _MACHINE
    keeps_budget |= device == THIS_CPU  # where the workload's own budget for a CPU is meant
    notes += _leave_out(data, keeps_budget=keeps_budget)
    data |= {"simulate": section, "max_minutes": None}
    made = resolve(data, profile=workload.profile, source=None, where=str(workload.source or workload.name))
    return dataclasses.replace(made, source=workload.source), tuple(notes)


def _leave_out(data: dict[str, Any], *, keeps_budget: bool) -> list[str]:
    """Takes what a simulated engine does not have out of ``data``; a sentence on each."""
    engine, notes = data["engine"], []
    if swept := [name for name in data["sweep"] if name in _OF_THE_HOST]:
        raise UsageError(
            f"sweep.{swept[0]} changes nothing in a simulation, whose step times come from a cost model: take it out "
            "of the sweep"
        )
    if dropped := [name for name in _OF_THE_HOST if engine.pop(name, None) is not None]:
        notes.append(f"a simulated engine has no {listing(dropped)}: left out")
    if not keeps_budget and (budget := engine.pop("kv_budget", None)):
        size = budget if isinstance(budget, str) else data_size(budget)
        notes.append(
            f"the workload's kv_budget of {size} is left out: KV has what the device leaves beside the weights "
            "(-o engine.kv_budget=SIZE sets it)"
        )
    if data["load"].pop("canaries", None):
        notes.append("canaries are left out: a simulated engine computes no answers")
    return notes


def machine_of(section: SimulateSection, model: str) -> Machine:
    """The machine with the operator times and the calibration that ``section`` names.

    Raises UsageError for an unknown device or model, with the nearest names, for heads that do not divide, and for
    files that are not what they should be.
    """
    calibrated = Path(section.calibration) if section.calibration else None
    if section.device == THIS_CPU:
        return this_cpu(model, calibrated)
    ops = Path(section.ops) if section.ops else None
    calibration = read_calibration(calibrated) if calibrated else None
    return gpu_machine(section.device, model, section.tensor_parallel, ops, calibration)


def gpu_machine(
    device: str, model: str, gpus: int | None, ops: Path | None, calibration: CostCalibration | None = None
) -> Machine:
    """Makes a machine of so many ``gpus``; None: as many as ``device`` says, as 4xA100-80GB. Raises UsageError."""
    count, gpu = parse_gpus(device)
    planned, gpus = plan_model(model), gpus or count
    tables = read_tables(find_tables(ops, gpu.name, planned.name, gpus)) if ops else None
    return Machine(planned, gpu, gpus, tables, calibration)


def machine_facts(machine: Machine, section: SimulateSection) -> dict[str, Any]:
    """Returns what results say of the machine, with a digest of its operator tables and calibration."""
    files = sorted(machine.tables.folder.glob("*.csv")) if machine.tables else []
    files += [Path(section.calibration)] if section.calibration else []
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest() if files else None
    return {
        "device": machine.gpu.name,
        "tensor_parallel": machine.gpus,
        "model": machine.model.name,
        "cost_model": machine.cost_model,
        "ops": section.ops,
        "calibration": section.calibration,
        "files_sha256": digest,
    }


def simulated_target(workload: Workload, notes: Sequence[str] = ()) -> ChosenTarget:
    """The target of a workload with a ``simulate`` section. Raises UsageError, also where the model does not fit."""
    assert workload.simulate is not None
    machine = machine_of(workload.simulate, str(workload.engine["model"]))
    machine.step_timer(machine.settle(workload.engine)[0])
    facts = machine_facts(machine, workload.simulate)

    def refusal(settings: SettingsByName) -> str | None:
        """Returns why a configuration is left out: the tables do not have its KV."""
        config, _ = machine.settle(settings)
        try:
            machine.step_timer(config)
        except UsageError as error:
            return str(error)
        return None

    return ChosenTarget(
        workload,
        lambda: SimulatedTarget(machine, facts),
        lambda settings: checked(machine, settings),
        MeasuredTarget(**dict.fromkeys(STORED), backend=BACKEND, shared_machine=False, simulated=facts),
        refuses=refusal,
        notes=tuple(notes),
        start_guess_s=_START_GUESS_S,
    )
