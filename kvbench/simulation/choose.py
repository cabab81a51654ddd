"""Chooses what a simulation runs, by its workload and its machine."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvbench.capacity.gpus import parse_gpus
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.common.option_rules import flag
from kvbench.common.text import data_size, listing
from kvbench.runs.results import Manifest, MeasuredTarget
from kvbench.simulation.cost.cost_model import CostCalibration, read_calibration
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench.simulation.cost.tables import find_tables, read_tables
from kvbench.simulation.cost.unit_costs import THIS_CPU, this_cpu
from kvbench.simulation.instrument import BACKEND, SimulatedInstrument, SimulatedTarget, checked
from kvbench.simulation.request import SimulateRequest
from kvbench.simulation.wording import sentence
from kvbench.sweep.instruments import SweepInstrument
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
    """Names the workload's profile that is simulated: the one asked for, else the one for such a device."""
    return request.profile or ("cpu" if request.device == THIS_CPU else "gpu")


class SimulatedSweep(SweepInstrument):
    """The instrument of ``sweep --simulate``, which simulates the built-in engine on a machine."""

    def profile(self, request: SweepRequest) -> str:
        return profile_of(request)

    def choose(self, workload: Workload, request: SweepRequest, stored: Manifest, begun: bool) -> ChosenTarget:
        if others := [flag(name) for name in _OTHERS_ONLY if getattr(request, name)]:
            raise UsageError(sentence("choose.measured_only", option=others[0]))
        if not begun:
            return simulated_target(*simulated_workload(workload, request, request.changes))
        for name in OPTIONS:
            if getattr(request, name):
                raise UsageError(sentence("choose.begun", option=flag(name)))
        return simulated_target(workload)


SWEEP = SimulatedSweep(SimulatedInstrument)


def simulated_workload(
    workload: Workload, request: SweepRequest | SimulateRequest, overrides: Sequence[str]
) -> tuple[Workload, tuple[str, ...]]:
    """Returns ``workload`` as it runs on the machine of ``request`` and its own section, and notes on what differs.

    ``overrides``: those of -o, which win over what a simulation would leave out. Raises UsageError.
    """
    data = copy.deepcopy(dict(workload.resolved))
    given = {name: getattr(request, name) for name in OPTIONS if getattr(request, name)}
    given |= {name: str(value.resolve()) for name, value in given.items() if isinstance(value, Path)}
    section = _section(workload.simulate, given)
    notes, model = [], section.pop("model", None)
    if model is not None:
        config = str(Path(model).resolve())
        if not (Path(model).suffix == ".json" or Path(model).is_dir()):
            config = plan_model(model).name
        data["model"] = {"config": config}
    else:
        dtype, own = workload.model.dtype, plan_model(str(workload.engine["model"])).spec.default_dtype
        if dtype not in (None, "auto", own):
            data["model"] = {key: value for key, value in data["model"].items() if key != "dtype"}
            notes.append(sentence("choose.own_dtype", own=own, dtype=dtype))
    keys = {override.partition("=")[0].strip() for override in overrides}
    keeps_budget = bool(keys & {"engine", "engine.kv_budget"}) or not given.keys() & _MACHINE
    keeps_budget |= section["device"] == THIS_CPU  # where the workload's own budget for a CPU is meant
    notes += _leave_out(data, keeps_budget=keeps_budget)
    data |= {"simulate": section, "max_minutes": None}
    made = resolve(data, profile=workload.profile, source=None, where=str(workload.source or workload.name))
    return dataclasses.replace(made, source=workload.source), tuple(notes)


def _section(stored: SimulateSection | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the ``simulate`` section of what is stored in the workload and ``given`` as options. Raises UsageError."""
    section = {"device": None, "tensor_parallel": 1}
    section |= (stored.model_dump(exclude_unset=True) if stored else {}) | given
    if not section["device"]:
        raise UsageError(sentence("choose.no_device"))
    if section["device"].strip().lower() == THIS_CPU:
        return section | {"device": THIS_CPU}
    count, gpu = parse_gpus(section["device"])
    if count == 1:
        return section | {"device": gpu.name}
    gpus = given.get("tensor_parallel", count)
    if gpus != count:
        words = {"device": section["device"], "count": count, "gpus": gpus, "gpu": gpu.name}
        raise UsageError(sentence("choose.two_counts", **words))
    return section | {"device": gpu.name, "tensor_parallel": count}


def _leave_out(data: dict[str, Any], *, keeps_budget: bool) -> list[str]:
    """Takes what a simulated engine does not have out of ``data``; a sentence on each."""
    engine, notes = data["engine"], []
    if swept := [name for name in data["sweep"] if name in _OF_THE_HOST]:
        raise UsageError(sentence("choose.swept", name=swept[0]))
    if dropped := [name for name in _OF_THE_HOST if engine.pop(name, None) is not None]:
        notes.append(sentence("choose.dropped", names=listing(dropped)))
    if not keeps_budget and (budget := engine.pop("kv_budget", None)):
        size = budget if isinstance(budget, str) else data_size(budget)
        notes.append(sentence("choose.no_budget", size=size))
    if data["load"].pop("canaries", None):
        notes.append(sentence("choose.no_canaries"))
    return notes


def machine_of(section: SimulateSection, model: str) -> Machine:
    """Makes the machine with the operator times and the calibration that ``section`` names.

    Raises UsageError for an unknown device or model, with the nearest names, for heads that do not divide, and for
    files that are not what they should be.
    """
    ops, calibration = (Path(file) if file else None for file in (section.ops, section.calibration))
    if section.device == THIS_CPU:
        return this_cpu(model, calibration)
    fitted = read_calibration(calibration) if calibration else None
    return gpu_machine(section.device, model, section.tensor_parallel, ops, fitted)


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
    files = [Path(section.calibration)] if section.calibration else []
    if machine.tables:
        files = [*sorted(machine.tables.folder.glob("*.csv")), *files]
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
    """Makes the target of a workload with its ``simulate`` section. Raises UsageError where the model does not fit."""
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
