"""Arrival times of an open-loop load, drawn before the run.

One scheme gives them all: the events of a renewal process of rate 1 (gaps of a gamma distribution of mean 1) are moved
onto the clock by the inverse of the cumulated rate, t = L^-1(s), with L(t) the integral of the rate over [0, t]. For
exponential gaps this is the inversion method for non-homogeneous Poisson processes (Cinlar, "Introduction to Stochastic
Processes", 1975, ch. 4.7; Lewis and Shedler, Naval Research Logistics Quarterly 26, 1979); for other gaps it is that of
Gerhardt and Nelson, "Transforming Renewal Processes for Simulation of Nonstationary Arrival Processes", INFORMS Journal
on Computing 21(4), 2009, which keeps the process's index of dispersion. Nothing is rescaled afterwards, so the rate
that a finite load reaches varies as it must. The first arrival is at the first moment with a rate above 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np

from kvbench.workload.arrivals_section import Segment

_MOST_ARRIVALS = 10_000_000  # a request is drawn and stored for each


def draw_arrivals(
    profile: Sequence[Segment],
    rng: np.random.Generator,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    burstiness: float = 1.0,
) -> np.ndarray:
    """Arrivals [s] of a rate ``profile``, ascending: ``count`` of them, or those before ``duration_s`` or its end.

    ``burstiness``: the shape of the gamma distribution of the gaps, as in ``vllm bench serve``: 1 is a Poisson process,
    below 1 comes in bursts, above 1 is more regular (coefficient of variation 1/sqrt(burstiness)), inf is evenly
    spaced. ValueError when nothing arrives or the profile has no room for ``count``. float64 [n]
    """
    masses = np.array([segment.mass for segment in profile])
    ends = np.cumsum(masses)
    total = float(ends[-1])
    if count is None:
        horizon = _mass_before(profile, math.inf if duration_s is None else duration_s)
        if not 0 < horizon < math.inf:
            raise ValueError(
                f"{horizon:g} arrivals are expected of these rates; give rates above 0 and an end: duration_s or steps."
            )
        if horizon > _MOST_ARRIVALS:
            raise ValueError(f"about {horizon:.3g} arrivals are more than {_MOST_ARRIVALS:,}, the limit; end earlier.")
        mass = _renewals_before(horizon, burstiness, rng)
    else:
        mass = _renewals(count, burstiness, rng)
        if mass[-1] >= total:
            raise ValueError(f"the rates end after about {total:g} arrivals, before the {count} asked for.")
    which = np.searchsorted(ends, mass, side="right")
    starts = np.concatenate([[0.0], np.cumsum([segment.seconds for segment in profile])[:-1]])
    out = np.empty(len(mass))
    for number, segment in enumerate(profile):
        inside = which == number
        if inside.any():
            out[inside] = starts[number] + segment.inverse(mass[inside] - (ends[number - 1] if number else 0.0))
    return out


def plateaus(profile: Sequence[Segment], last_s: float) -> list[tuple[float, float, float]]:
    """The stretches of constant rate up to ``last_s``: start [s], end [s], rate. Equal neighbours are one."""
    found: list[tuple[float, float, float]] = []
    start = 0.0
    for segment in profile:
        end = min(start + segment.seconds, last_s)
        if segment.constant and segment.start_rps > 0 and end > start:
            if found and found[-1][1:] == (start, segment.start_rps):
                found[-1] = (found[-1][0], end, segment.start_rps)
            else:
                found.append((start, end, segment.start_rps))
        start += segment.seconds
    return found


def spread_ticks(times: np.ndarray, how: Literal["even", "uniform"], rng: np.random.Generator) -> np.ndarray:
    """Arrivals [s, ascending] that a coarse clock put onto one tick, spread over the tick; the order stays.

    The tick is the distance between different times that a tenth of them do not exceed (not the least, which a single
    stray time would make; without a second time nothing is spread). ``even``: equal gaps from the tick's beginning.
    ``uniform``: where a Poisson process would have them, given how many they are (order statistics of uniforms; Cinlar
    1975, ch. 4.5). Nothing is moved past the next time that was recorded. float64 [n]
    """
    stamps, first, counts = np.unique(times, return_index=True, return_counts=True)
    if len(stamps) < 2:
        return times
    gaps = np.diff(stamps)
    tick = float(np.quantile(gaps, 0.1, method="lower"))
    widths = np.minimum(tick, np.append(gaps, tick))
    rank = np.arange(len(times)) - np.repeat(first, counts)
    share = rank / np.repeat(counts, counts)
    if how == "uniform":
        draws = rng.random(len(times))
        share = draws[np.lexsort((draws, np.repeat(stamps, counts)))]
        share[np.repeat(counts, counts) == 1] = 0.0  # a time of its own stays what was recorded
    return times + share * np.repeat(widths, counts)


def _mass_before(profile: Sequence[Segment], duration_s: float) -> float:
    """Expected arrivals before ``duration_s``."""
    total, start = 0.0, 0.0
    for segment in profile:
        seconds = min(segment.seconds, max(0.0, duration_s - start))
        if seconds == segment.seconds:
            total += segment.mass
        elif seconds > 0:
            end = _rate_at(segment, seconds)
            total += Segment(seconds, segment.start_rps, end, segment.strategy).mass
        start += segment.seconds
    return total


def _rate_at(segment: Segment, seconds: float) -> float:
    if segment.constant:
        return segment.start_rps
    part = seconds / segment.seconds
    if segment.strategy == "linear":
        return segment.start_rps + part * (segment.end_rps - segment.start_rps)
    return segment.start_rps * (segment.end_rps / segment.start_rps) ** part


def _gaps(count: int, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """Gaps of mean 1. float64 [count]"""
    if math.isinf(burstiness):
        return np.ones(count)
    return rng.gamma(burstiness, 1.0 / burstiness, size=count)


def _renewals(count: int, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """``count`` events of the process of rate 1, the first at 0. float64 [count]"""
    if count < 1:
        raise ValueError(f"{count} arrivals are too few; the least is 1.")
    gaps = _gaps(count, burstiness, rng)
    gaps[0] = 0.0
    return np.cumsum(gaps)


def _renewals_before(horizon: float, burstiness: float, rng: np.random.Generator) -> np.ndarray:
    """The events of the process of rate 1 in [0, horizon), the first at 0. float64 [n]"""
    times = np.zeros(1)
    while times[-1] < horizon:
        more = _gaps(int(horizon - times[-1]) + 16, burstiness, rng)
        times = np.concatenate([times, times[-1] + np.cumsum(more)])
    # Not one more for a horizon such as 3 * 0.1 * 10, which is 3 but for rounding.
    return times[times < horizon * (1 - 1e-12)]
