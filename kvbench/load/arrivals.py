"""Arrival times of an open-loop load, drawn before the run."""

from __future__ import annotations

import numpy as np


def constant_arrivals(rate: float, count: int) -> np.ndarray:
    """``count`` arrivals [s], one every 1/rate seconds, the first at 0. float64 [count]"""
    _check(rate, count)
    return np.arange(count) / rate


def poisson_arrivals(rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` arrivals [s] of a Poisson process of ``rate`` per second, the first at 0. float64 [count]

    The gaps are independent exponentials; nothing is rescaled, so the rate reached varies as it must.
    """
    _check(rate, count)
    gaps = rng.exponential(1.0 / rate, size=count)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def arrivals(kind: str, rate: float, count: int, rng: np.random.Generator) -> np.ndarray:
    """Arrivals [s] of the kind that the workload names. ValueError for another kind."""
    if kind == "constant":
        return constant_arrivals(rate, count)
    if kind == "poisson":
        return poisson_arrivals(rate, count, rng)
    raise ValueError(f"arrivals {kind!r} cannot be drawn; use poisson or constant.")


def _check(rate: float, count: int) -> None:
    if not rate > 0 or not np.isfinite(rate):
        raise ValueError(f"a rate of {rate} requests/s is impossible; it must be above 0.")
    if count < 1:
        raise ValueError(f"{count} arrivals are too few; the least is 1.")
