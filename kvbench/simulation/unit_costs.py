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
    """Measured steps of one load.

    works: their work, in order; ends: when each ended [s], NaN where nothing arrived at its end; began: before the
    first one [s].
    """

    kv_cache_dtype: str
    works: Sequence[StepWork]
    ends: np.ndarray
    began: float


def fit_unit_costs(loads: Iterable[MeasuredSteps]) -> UnitCosts:
    """The unit costs that explain the loads' step times best; disturbed steps count less.

    Costs are scaled at the end so that the loads' total time is met: an interruption is a part of it. Raises ValueError
    where there is no step to fit.
    """
    loads = list(loads)
    dtypes = sorted({load.kv_cache_dtype for load in loads})
    rows, seconds = [], []
    for load in loads:
        last, pending = load.began, np.zeros(len(UNITS) + len(dtypes))
        for work, end in zip(load.works, load.ends, strict=True):
            pending[: len(UNITS)] += units_of(work)
            pending[len(UNITS) + dtypes.index(load.kv_cache_dtype)] += work.decode_context
            if np.isfinite(end):  # else its time is in that of the next step with an end
                rows.append(pending)
                seconds.append(max(0.0, end - last))
                last, pending = end, np.zeros_like(pending)
    if not rows:
        raise ValueError("no step of these loads has a measured end")
    costs = _robust_nnls(np.array(rows), np.array(seconds)).tolist()
    return UnitCosts(dict(zip(UNITS, costs, strict=False)), dict(zip(dtypes, costs[len(UNITS) :], strict=True)))


def _robust_nnls(rows: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Non-negative costs with Huber's weights (Huber, Robust Estimation of a Location Parameter, 1964)."""
    scale = rows.max(axis=0)
    scale[scale == 0] = 1.0
    weights = np.ones(len(seconds))
    for _ in range(_ROUNDS):
        costs, _ = nnls(rows / scale * weights[:, None], seconds * weights)
        residual = np.abs(seconds - rows / scale @ costs)
        typical = max(float(np.median(residual)), 1e-9)
        weights = np.sqrt(np.minimum(1.0, _OUTLIER * typical / np.maximum(residual, 1e-12)))
    return costs / scale * (seconds.sum() / float((rows / scale @ costs).sum()))
