"""A step's time as a sum of unit costs, which are fitted to measured loads.

The steps of the built-in engine in a closed loop depend on the requests and not on how fast they are computed. So a
replay of a measured load through the same scheduler gives the work of each of its steps, and the arrival of each token
gives the time at which its step ended. The costs are then a non-negative least-squares problem (Lawson and Hanson,
Solving Least Squares Problems, 1974, chapter 23; scipy.optimize.nnls).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from scipy.optimize import nnls

from kvbench.capacity.gpus import GPU
from kvbench.capacity.model import plan_model
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.schema import explain
from kvbench.runs.model import Run
from kvbench.simulation.cost.machine import Machine
from kvbench.simulation.wording import sentence
from kvbench_engine.config import DEFAULT_CPU_BUDGET, EngineConfig
from kvbench_engine.execution.simulated_executor import StepTime, StepWork
from kvbench_engine.kv.budget import KVShape

THIS_CPU, FORMAT = "this-cpu", "kvbench-unit-costs/1"

UNITS = ("step", "token", "token beyond 8", "token beyond 64", "prefill pair", "drawn token", "prompt", "moved slot")
"""What a step's time is made of, beside the context that its decodes read.

token, token beyond 8, token beyond 64: the linear layers, whose time a token changes with the number of tokens
prefill pair: a token of a prompt and a token that it attends to
prompt: a chunk of one, whatever its length; moved slot: copied or swapped
"""
_CLASSES = {
    "step": "host", "token": "gemm", "token beyond 8": "gemm", "token beyond 64": "gemm", "prefill pair": "attention",
    "drawn token": "head", "prompt": "launches", "moved slot": "move",
}  # fmt: skip
_ROUNDS = 10  # of reweighting; the weights settle in four or five
_OUTLIER = 2.0  # a residual of so many typical ones counts half as much


def units_of(work: StepWork) -> tuple[float, ...]:
    """Counts each of ``UNITS`` in a step."""
    tokens = work.tokens
    pairs = sum(count * (before + (count + 1) / 2) for count, before in work.prefills)
    moved = work.copied + work.swapped_out + work.swapped_in
    return (1, tokens, max(0, tokens - 8), max(0, tokens - 64), pairs, work.drawn, len(work.prefills), moved)


@dataclass(frozen=True)
class UnitCosts:
    """The seconds of each of ``UNITS``, and by KV dtype of a token of context that a decode reads."""

    units: Mapping[str, float]
    context: Mapping[str, float]


class UnitCostModel:
    """A step's time from its work. ``seconds``: of all steps so far, by the classes of ``cost_model.CLASSES``."""

    def __init__(self, costs: UnitCosts, kv_cache_dtype: str) -> None:
        self.seconds = dict.fromkeys(_CLASSES.values(), 0.0)
        self._costs = [(_CLASSES[name], costs.units[name]) for name in UNITS]
        self._notes: list[str] = []
        if kv_cache_dtype not in costs.context:
            measured = next(iter(costs.context))
            self._notes.append(sentence("unit_costs.other_kv", dtype=kv_cache_dtype, measured=measured))
            kv_cache_dtype = measured
        self._context = costs.context[kv_cache_dtype]

    def notes(self) -> list[str]:
        """Returns what a reader of the results must know of how they came about."""
        return self._notes

    def __call__(self, work: StepWork) -> StepTime:
        seconds = self.seconds
        context = self._context * work.decode_context
        seconds["attention"] += context
        total = context
        for (name, cost), count in zip(self._costs, units_of(work), strict=True):
            if count:
                part = cost * count
                seconds[name] += part
                total += part
        return StepTime(total, execute=total)


@dataclass(frozen=True)
class MeasuredSteps:
    """The measured steps of one load with ``kv_cache_dtype``.

    amounts: float64 [steps, units + 1]: how many of each of ``UNITS``, and the context that its decodes read
    seconds: float64 [steps]
    """

    kv_cache_dtype: str
    amounts: np.ndarray
    seconds: np.ndarray


def measured(kv_cache_dtype: str, works: Sequence[StepWork], ends: np.ndarray, began: float) -> MeasuredSteps:
    """Makes measured steps from their work in order and when each ended [s]; ``began``: before the first one [s].

    Where nothing arrived at a step's end (NaN), its time is in that of the next step with an end.
    """
    amounts = np.array([(*units_of(work), work.decode_context) for work in works], dtype=float)
    ended = np.flatnonzero(np.isfinite(ends))
    if not len(ended):
        return MeasuredSteps(kv_cache_dtype, amounts[:0], np.zeros(0))
    sums = np.add.reduceat(amounts[: ended[-1] + 1], np.append(0, ended[:-1] + 1), axis=0)
    return MeasuredSteps(kv_cache_dtype, sums, np.maximum(0.0, np.diff(ends[ended], prepend=began)))


def fit_unit_costs(loads: Iterable[MeasuredSteps]) -> UnitCosts:
    """Fits the unit costs that explain the loads' step times best; disturbed steps count less.

    Costs are scaled at the end so that the loads' total time is met: an interruption is a part of it. Raises UsageError
    where there is no step to fit.
    """
    loads = [load for load in loads if len(load.seconds)]
    if not loads:
        raise UsageError(sentence("unit_costs.no_steps"))
    dtypes, units = sorted({load.kv_cache_dtype for load in loads}), len(UNITS)
    matrix = np.zeros((sum(len(load.seconds) for load in loads), units + len(dtypes)))
    row = 0
    for load in loads:
        rows = slice(row, row := row + len(load.seconds))
        matrix[rows, :units] = load.amounts[:, :units]
        matrix[rows, units + dtypes.index(load.kv_cache_dtype)] = load.amounts[:, units]
    seconds = np.concatenate([load.seconds for load in loads])
    costs = robust_nnls(matrix, seconds)
    costs *= seconds.sum() / float((matrix @ costs).sum())
    values = costs.tolist()
    return UnitCosts(dict(zip(UNITS, values, strict=False)), dict(zip(dtypes, values[units:], strict=True)))


def robust_nnls(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Fits non-negative x with ``matrix`` @ x near ``values``; outliers count less.

    Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964). A least-squares problem is that of the
    triangle of its QR decomposition, which is small however many rows there are.
    """
    scale = matrix.max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    matrix, weights = matrix / scale, np.ones(len(values))
    for _ in range(_ROUNDS):
        triangle = np.linalg.qr(np.column_stack([matrix, values]) * weights[:, None], mode="r")
        solution, _ = nnls(triangle[:, :-1], triangle[:, -1])
        residual = np.abs(values - matrix @ solution)
        typical = max(float(np.median(residual)), 1e-12)
        weights = np.sqrt(np.minimum(1.0, _OUTLIER * typical / np.maximum(residual, 1e-15)))
    return solution / scale


class _UnitCostFile(BaseModel):
    """The file of unit costs. ``dtype``: of weights and KV; ``num_threads``: of the engine that was measured."""

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
    """The CPU of this machine, with ``costs`` of a step; ``measured``: on what, by which run."""

    device: ClassVar[str] = "cpu"
    overlaps: ClassVar[bool] = False
    costs: UnitCosts = field(default_factory=lambda: UnitCosts({}, {}))
    dtype: str = "float32"
    measured: str = ""

    def __post_init__(self) -> None:
        """Checks nothing: no data sheet is needed."""

    @property
    def cost_model(self) -> str:
        return sentence("unit_costs.source", measured=self.measured)

    def _kv_budget(self, config: EngineConfig) -> int:
        return DEFAULT_CPU_BUDGET if config.kv_budget is None else config.kv_budget

    def kv_shape(self) -> KVShape:
        return self.model.spec.kv_shape(self.dtype)

    def step_timer(self, config: EngineConfig) -> UnitCostModel:
        return UnitCostModel(self.costs, config.kv_cache_dtype)


def write_unit_costs(path: Path, costs: UnitCosts, run: Run) -> None:
    """Writes them for ``--calibration`` of a simulation on this CPU; ``run``: what they were fitted to."""
    manifest = run.manifest
    stored = _UnitCostFile(
        format=FORMAT, model=(manifest.model or {})["name"], dtype=manifest.dtype, cpu=manifest.cpu.model,
        num_threads=manifest.num_threads, run=run.folder.name, **dataclasses.asdict(costs),
    )  # fmt: skip
    write_json(path, stored.model_dump())


def this_cpu(model: str, calibration: Path | None) -> ThisCPU:
    """Makes this machine from its unit costs. Raises UsageError without them, and for those of another model."""
    if calibration is None:
        raise UsageError(sentence("unit_costs.no_file"))
    stored = read_json(calibration)
    if isinstance(stored, dict) and ("format" not in stored or stored["format"] != FORMAT):
        raise UsageError(sentence("unit_costs.other_file", path=calibration))
    try:
        fitted = _UnitCostFile.model_validate(stored)
    except ValidationError as error:
        raise UsageError(sentence("unit_costs.damaged", path=calibration, why=explain(error, "")[0])) from None
    if missing := [name for name in UNITS if name not in fitted.units]:
        raise UsageError(sentence("unit_costs.missing", path=calibration, unit=missing[0]))
    planned = plan_model(model)
    if planned.name.lower() != fitted.model.lower():
        names = {"fitted": fitted.model, "model": planned.name}
        raise UsageError(sentence("unit_costs.other_model", path=calibration, **names))
    return ThisCPU(
        planned,
        GPU(THIS_CPU, memory_bytes=0, bytes_per_s=0.0, fp8=False),
        costs=UnitCosts(fitted.units, fitted.context),
        dtype=fitted.dtype,
        measured=sentence("unit_costs.measured", run=fitted.run, n=fitted.num_threads, cpu=fitted.cpu),
    )
