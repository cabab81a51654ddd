"""The CPU of this machine as a simulated device: unit costs, fitted to a sweep of the built-in engine on it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config import DEFAULT_CPU_BUDGET, EngineConfig
from engine.kv.budget import KVShape
from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.schema import explain
from kvbench.runs.model import Run
from kvbench.simulation.machine import Machine
from kvbench.simulation.unit_costs import UNITS, UnitCostModel, UnitCosts

NAME, FORMAT = "this-cpu", "kvbench-unit-costs/1"


class _File(BaseModel):
    """Unit costs as JSON. ``dtype``: of weights and KV; ``num_threads``: of the engine that was measured."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)
    format: str = Field(pattern=f"^{FORMAT}$")
    model: str
    dtype: str
    cpu: str
    num_threads: int = Field(ge=1)
    run: str
    units: dict[str, float]
    context: dict[str, float] = Field(min_length=1)


@dataclass(frozen=True)
class ThisCPU(Machine):
    """``costs``: of a step of ``model`` in ``dtype``; ``measured``: on what, by which run."""

    device: ClassVar[str] = "cpu"
    overlaps: ClassVar[bool] = False
    costs: UnitCosts = field(default_factory=lambda: UnitCosts({}, {}))
    dtype: str = "float32"
    measured: str = ""

    def check(self) -> None:
        """There is nothing that a data sheet would have to know."""

    @property
    def cost_model(self) -> str:
        return f"unit costs fitted to {self.measured}"

    def _room(self, config: EngineConfig) -> int:
        return DEFAULT_CPU_BUDGET

    def _check_budget(self, config: EngineConfig) -> None:
        """Host memory is not looked at."""

    def kv_shape(self) -> KVShape:
        return self.model.spec.kv_shape(self.dtype)

    def step_timer(self, config: EngineConfig) -> UnitCostModel:
        return self.costs.timer(config.kv_cache_dtype)


def write_unit_costs(path: Path, costs: UnitCosts, run: Run) -> None:
    """As ``--calibration`` of a simulation on this CPU; ``run``: what they were fitted to."""
    known = run.manifest
    facts = {"model": known["model"]["name"], "dtype": known["dtype"], "cpu": known["cpu"]["model"]}
    facts |= {"num_threads": known["num_threads"], "run": run.folder.name}
    write_json(path, {"format": FORMAT, **facts, **dataclasses.asdict(costs)})


def this_cpu(model: str, calibration: Path | None) -> ThisCPU:
    """Raises UsageError without unit costs, and for those of another model."""
    if calibration is None:
        raise UsageError(
            f"--device {NAME} needs unit costs: measure this machine with `kvbench sweep WORKLOAD`, fit them with "
            f"`kvbench calibrate-model RESULTS --output FILE`, and give --calibration FILE"
        )
    try:
        stored = read_json(calibration)
        if isinstance(stored, dict) and stored.get("format") != FORMAT:
            raise UsageError(
                f"{calibration} has no unit costs of a CPU: fit them with `kvbench calibrate-model RESULTS`"
            )
        found = _File.model_validate(stored)
    except UsageError:
        raise
    except ValidationError as error:
        raise UsageError(f"{calibration} has no unit costs: {explain(error, '')[0]}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"no unit costs can be read: {error}") from None
    if missing := [name for name in UNITS if name not in found.units]:
        raise UsageError(f"{calibration} has no cost of a {missing[0]}: fit it again with `kvbench calibrate-model`")
    planned = plan_model(model)
    if planned.name.lower() != found.model.lower():
        raise UsageError(
            f"{calibration} is of the model {found.model}, and {planned.name} is to be simulated: give --model "
            f"{found.model}, or measure {planned.name}"
        )
    gpu = GPU(NAME, 0, 0.0, bfloat16=True, fp8=False)
    costs = UnitCosts(found.units, found.context)
    measured = f"{found.run} on {found.num_threads} {'threads' if found.num_threads > 1 else 'thread'} of {found.cpu}"
    return ThisCPU(planned, gpu, costs=costs, dtype=found.dtype, measured=measured)
