"""When the requests of one load start: the workload's arrivals, put onto its requests."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from kvbench.requests.arrivals import draw_arrivals, plateaus, spread_ticks
from kvbench.requests.request import RequestSpec
from kvbench.workload.load_section import LoadConfig


def draw_times(load: LoadConfig, rate: float | None, count: int | None, rng: np.random.Generator) -> np.ndarray:
    """Arrivals [s] of an open-loop load that is no trace; ``count`` of them unless time says how many. float64 [n]"""
    if rate is not None and math.isinf(rate):
        return np.zeros(count or 0)
    counted = load.counted_by_time
    return draw_arrivals(
        load.profile(rate, count),
        rng,
        count=None if counted else count,
        duration_s=load.duration_s,
        burstiness=load.gap_shape,
    )


def with_times(requests: Sequence[RequestSpec], times: Iterable[float] | None) -> list[RequestSpec]:
    """The requests that start at ``times``, in their order; None: closed loop, none has a time of its own.

    Later turns of a conversation start when the one before has ended. More times than requests are left unused.
    """
    if times is None:
        return [dataclasses.replace(request, arrival_s=None) for request in requests]
    left = iter(times)
    return [dataclasses.replace(r, arrival_s=None if r.turn else float(next(left))) for r in requests]


def recorded_times(load: LoadConfig, requests: Sequence[RequestSpec], rng: np.random.Generator) -> np.ndarray:
    """The times that a trace's requests bring, ticks spread where the workload says so. float64 [n]"""
    times = np.array([float(r.arrival_s or 0.0) for r in requests if not r.turn])
    return times if load.tick_spread is None else spread_ticks(times, load.tick_spread, rng)


def notes_of(load: LoadConfig, rate: float | None, times: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """What the metrics must know of a rate that changes: ``plateaus``, each [start_s, end_s, requests/s]."""
    if load.arrivals not in ("ramp", "step") or not len(times):
        return {}
    last = sum(step.seconds for step in load.steps or ()) or load.duration_s or float(times[-1])
    return {"arrivals": load.arrivals, "plateaus": [list(p) for p in plateaus(load.profile(rate, len(times)), last)]}
