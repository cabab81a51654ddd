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
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvbench.requests.request import Notes
from kvbench.workload.load_section import LoadConfig

Strategy = Literal["linear", "exponential"]
_MOST_ARRIVALS = 10_000_000  # a request is drawn and stored for each


@dataclass(frozen=True)
class Segment:
    """A span of ``seconds`` (may be inf) in which the rate goes from ``start_rps`` to ``end_rps`` [requests/s].

    ``linear``: at a constant slope in time. ``exponential``: by a constant factor a second.
    """

    seconds: float
    start_rps: float
    end_rps: float
    strategy: Strategy = "linear"

    @property
    def constant(self) -> bool:
        """Tests whether the rate stays the same."""
        return self.start_rps == self.end_rps

    @property
    def mean_rps(self) -> float:
        """Mean rate over the segment."""
        if self.constant:
            return self.start_rps
        if self.strategy == "linear":
            return (self.start_rps + self.end_rps) / 2
        return (self.end_rps - self.start_rps) / math.log(self.end_rps / self.start_rps)

    @property
    def mass(self) -> float:
        """Expected arrivals over the segment: the integral of the rate."""
        return 0.0 if self.mean_rps == 0 else self.seconds * self.mean_rps

    def inverse(self, mass: np.ndarray) -> np.ndarray:
        """The seconds from the segment's start until ``mass`` arrivals [0, ``mass``] are due. float64 [n]"""
        if self.constant:
            return mass / self.start_rps
        if self.strategy == "linear":  # s t + a t^2 / 2 = mass, in the form that does not cancel for small a
            slope = (self.end_rps - self.start_rps) / self.seconds
            root = np.sqrt(np.maximum(self.start_rps**2 + 2 * slope * mass, 0.0))
            return np.divide(2 * mass, self.start_rps + root, out=np.zeros_like(mass), where=mass > 0)
        growth = math.log(self.end_rps / self.start_rps) / self.seconds
        return np.log1p(mass * growth / self.start_rps) / growth


def ramp(
    start_rps: float, end_rps: float, strategy: Strategy, *, seconds: float | None = None, count: int | None = None
) -> tuple[Segment, ...]:
    """A rate that changes over ``seconds``, or until ``count`` arrivals are expected, and then stays.

    The rate is a function of time. vLLM's ``--ramp-up-strategy`` of the same names makes it one of the request's
    number, so that its ``linear`` is exponential in time and its ``exponential`` steeper still.
    """
    if seconds is None:
        assert count is not None
        seconds = count / Segment(1.0, start_rps, end_rps, strategy).mean_rps
    return (Segment(seconds, start_rps, end_rps, strategy), Segment(math.inf, end_rps, end_rps))


def profile_of(load: LoadConfig, rate: float | None, count: int | None) -> tuple[Segment, ...]:
    """The rate over time of a load without a trace, of finite ``rate``; ``count``: its requests, where known."""
    if load.arrivals == "step":
        return tuple(Segment(step.seconds, step.rate, step.rate) for step in load.steps or ())
    if load.arrivals == "ramp":
        seconds = load.ramp_up_s or load.duration_s
        start, end = float(load.ramp_up_start_rps or 0.0), float(load.ramp_up_end_rps or 0.0)
        return ramp(start, end, load.ramp_up_strategy or "linear", seconds=seconds, count=count)
    assert rate is not None
    return (Segment(math.inf, rate, rate),)


def draw_times(load: LoadConfig, rate: float | None, count: int | None, rng: np.random.Generator) -> np.ndarray:
    """Arrivals [s] of an open-loop load that is no trace: ``count``, or as many as its seconds give. float64 [n]"""
    if rate is not None and math.isinf(rate):
        return np.zeros(count or 0)
    return draw_arrivals(
        profile_of(load, rate, count),
        rng,
        count=None if load.counted_by_time else count,
        duration_s=load.duration_s,
        burstiness=math.inf if load.arrivals == "constant" else load.burstiness or 1.0,
    )


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

    def gaps(number: int) -> np.ndarray:
        """Draws gaps of mean 1."""
        return np.ones(number) if math.isinf(burstiness) else rng.gamma(burstiness, 1.0 / burstiness, size=number)

    ends = np.cumsum([segment.mass for segment in profile])
    starts = np.concatenate([[0.0], np.cumsum([segment.seconds for segment in profile])[:-1]])
    if count is None:
        last = math.inf if duration_s is None else duration_s
        # Cut off is at most a constant rate: a ramp has ended by then.
        horizon = sum(
            min(s.seconds, last - start) * s.mean_rps for s, start in zip(profile, starts, strict=True) if start < last
        )
        if not 0 < horizon < math.inf:
            raise ValueError(
                f"{horizon:g} arrivals are expected of these rates; give rates above 0 and an end: duration_s or steps."
            )
        if horizon > _MOST_ARRIVALS:
            raise ValueError(f"about {horizon:.3g} arrivals are more than {_MOST_ARRIVALS:,}, the limit; end earlier.")
        mass = np.zeros(1)
        while mass[-1] < horizon:
            mass = np.concatenate([mass, mass[-1] + np.cumsum(gaps(int(horizon - mass[-1]) + 16))])
        mass = mass[mass < horizon * (1 - 1e-12)]  # not one more for a horizon such as 3 * 0.1 * 10: 3 but for rounding
    else:
        if count < 1:
            raise ValueError(f"{count} arrivals are too few; the least is 1.")
        steps = gaps(count)
        steps[0] = 0.0
        mass = np.cumsum(steps)
        if mass[-1] >= ends[-1]:
            raise ValueError(f"the rates end after about {ends[-1]:g} arrivals, before the {count} wanted.")
    which = np.searchsorted(ends, mass, side="right")
    out = np.empty(len(mass))
    for number, segment in enumerate(profile):
        inside = which == number
        if inside.any():
            out[inside] = starts[number] + segment.inverse(mass[inside] - (ends[number - 1] if number else 0.0))
    return out


def plateaus(profile: Sequence[Segment], last_s: float) -> list[tuple[float, float, float]]:
    """The stretches of constant rate up to ``last_s``: start [s], end [s], rate. Equal neighbours are one."""
    stretches: list[tuple[float, float, float]] = []
    start = 0.0
    for segment in profile:
        end = min(start + segment.seconds, last_s)
        if segment.constant and segment.start_rps > 0 and end > start:
            if stretches and stretches[-1][1:] == (start, segment.start_rps):
                start, _, _ = stretches.pop()
            stretches.append((start, end, segment.start_rps))
        start = end
    return stretches


def notes_of(load: LoadConfig, rate: float | None, times: Sequence[float] | np.ndarray) -> Notes:
    """Notes on a rate that changes, for the metrics: ``plateaus``, each [start_s, end_s, requests/s]."""
    if load.arrivals not in ("ramp", "step") or not len(times):
        return {}
    last = sum(step.seconds for step in load.steps or ()) or load.duration_s or float(times[-1])
    profile = profile_of(load, rate, len(times))
    return {"arrivals": load.arrivals, "plateaus": [list(p) for p in plateaus(profile, last)]}


def recorded_times(load: LoadConfig, recorded: Sequence[float | None], rng: np.random.Generator) -> np.ndarray:
    """The arrival times of a trace; its clock's ticks are spread where the workload asks for it. float64 [n]

    ``recorded``: of the requests that begin something: first turns, and requests without a session.
    """
    if any(time is None for time in recorded):
        raise ValueError("arrivals: trace, but the trace has no arrival times; use e.g. poisson and request_rate.")
    times = np.array(recorded, dtype=float)
    if not load.spread_ticks:
        return times
    return spread_ticks(times, "uniform" if load.spread_ticks is True else load.spread_ticks, rng)


def spread_ticks(times: np.ndarray, how: Literal["even", "uniform"], rng: np.random.Generator) -> np.ndarray:
    """Spreads arrivals [s, ascending] that share a tick of a coarse clock over that tick; the order stays. float64 [n]

    The tick is the first decile of the gaps between different times (one stray time would spoil their minimum); with a
    single time nothing is spread. ``even``: equal gaps from the tick's beginning. ``uniform``: as a Poisson process has
    so many arrivals in a tick (order statistics of uniforms; Cinlar 1975, ch. 4.5). No arrival moves past the next
    recorded time.
    """
    stamps, first, counts = np.unique(times, return_index=True, return_counts=True)
    if len(stamps) < 2:
        return times
    gaps = np.diff(stamps)
    tick = float(np.quantile(gaps, 0.1, method="lower"))
    widths = np.minimum(tick, np.append(gaps, tick))
    share = (np.arange(len(times)) - np.repeat(first, counts)) / np.repeat(counts, counts)
    if how == "uniform":
        draws = rng.random(len(times))
        share = draws[np.lexsort((draws, np.repeat(stamps, counts)))]
        share[np.repeat(counts, counts) == 1] = 0.0  # a time of its own stays what was recorded
    return times + share * np.repeat(widths, counts)
