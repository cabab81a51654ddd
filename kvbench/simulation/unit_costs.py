"""A step's time as a sum of unit costs, which are fitted to measured loads.

The steps of the built-in engine in a closed loop depend on the requests and not on how fast they are computed. So a
replay of a measured load through the same scheduler gives the work of each of its steps, and the arrival of each token
gives the time at which its step ended. The costs are then a non-negative least-squares problem (Lawson and Hanson,
Solving Least Squares Problems, 1974, chapter 23; scipy.optimize.nnls).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from engine.execution.simulated_executor import StepTime, StepWork
from kvbench.common.errors import UsageError

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
    """How many of each of ``UNITS`` a step has."""
    tokens = work.tokens
    pairs = sum(count * (before + (count + 1) / 2) for count, before in work.prefills)
    moved = work.copied + work.swapped_out + work.swapped_in
    return (1, tokens, max(0, tokens - 8), max(0, tokens - 64), pairs, work.drawn, len(work.prefills), moved)


@dataclass(frozen=True)
class UnitCosts:
    """Seconds of each of ``UNITS``, and by KV dtype of a token of context that a decode reads."""

    units: Mapping[str, float]
    context: Mapping[str, float]

    def timer(self, kv_cache_dtype: str) -> UnitCostModel:
        """The cost model for an engine with such a KV."""
        return UnitCostModel(self, kv_cache_dtype)

    def knows(self, kv_cache_dtype: str) -> bool:
        """Whether a load with such a KV was measured."""
        return kv_cache_dtype in self.context


class UnitCostModel:
    """A step's time from its work. ``seconds``: of all steps so far, by the classes of ``cost_model.CLASSES``."""

    def __init__(self, costs: UnitCosts, kv_cache_dtype: str) -> None:
        self.seconds = dict.fromkeys(_CLASSES.values(), 0.0)
        self._costs = [(_CLASSES[name], costs.units[name]) for name in UNITS]
        measured = costs.knows(kv_cache_dtype)
        self._context = costs.context[kv_cache_dtype if measured else next(iter(costs.context))]
        self._note = None if measured else (
            f"no measured load had a KV in {kv_cache_dtype}, so reading it is charged as in {next(iter(costs.context))}"
        )  # fmt: skip

    def notes(self) -> list[str]:
        """What a reader of the results must know of how they came about."""
        return [self._note] if self._note else []

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
    """Measured steps of one load with ``kv_cache_dtype``.

    amounts: float64 [steps, units + 1]: how many of each of ``UNITS``, and the context that its decodes read
    seconds: float64 [steps]
    """

    kv_cache_dtype: str
    amounts: np.ndarray
    seconds: np.ndarray


def measured(kv_cache_dtype: str, works: Sequence[StepWork], ends: np.ndarray, began: float) -> MeasuredSteps:
    """From the work of all steps in order and when each ended [s]; ``began``: before the first one [s].

    Where nothing arrived at a step's end (NaN), its time is in that of the next step with an end.
    """
    amounts = np.array([(*units_of(work), work.decode_context) for work in works], dtype=float)
    known = np.flatnonzero(np.isfinite(ends))
    if not len(known):
        return MeasuredSteps(kv_cache_dtype, amounts[:0], np.zeros(0))
    sums = np.add.reduceat(amounts[: known[-1] + 1], np.append(0, known[:-1] + 1), axis=0)
    return MeasuredSteps(kv_cache_dtype, sums, np.maximum(0.0, np.diff(ends[known], prepend=began)))


def fit_unit_costs(loads: Iterable[MeasuredSteps]) -> UnitCosts:
    """The unit costs that explain the loads' step times best; disturbed steps count less.

    Costs are scaled at the end so that the loads' total time is met: an interruption is a part of it. Raises UsageError
    where there is no step to fit.
    """
    loads = [load for load in loads if len(load.seconds)]
    if not loads:
        raise UsageError("no step of these loads has a measured end, so the simulator cannot be calibrated on them")
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
    found = costs.tolist()
    return UnitCosts(dict(zip(UNITS, found, strict=False)), dict(zip(dtypes, found[units:], strict=True)))


def robust_nnls(matrix: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Non-negative x with ``matrix`` @ x near ``values``, in which outliers count less.

    Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964). A least-squares problem is that of the
    triangle of its QR decomposition, which is small however many rows there are.
    """
    scale = matrix.max(axis=0, initial=0.0)
    scale[scale == 0] = 1.0
    matrix, weights = matrix / scale, np.ones(len(values))
    for _ in range(_ROUNDS):
        triangle = np.linalg.qr(np.column_stack([matrix, values]) * weights[:, None], mode="r")
        found, _ = nnls(triangle[:, :-1], triangle[:, -1])
        residual = np.abs(values - matrix @ found)
        typical = max(float(np.median(residual)), 1e-12)
        weights = np.sqrt(np.minimum(1.0, _OUTLIER * typical / np.maximum(residual, 1e-15)))
    return found / scale
