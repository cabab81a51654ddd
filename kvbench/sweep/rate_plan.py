"""What ``--find-max-rate`` measures: conditions, bounds, how long a run is, and the load at another rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.metrics.latency import QUANTILES
from kvbench.sweep.load_options import LoadOptions, choose_load
from kvbench.sweep.rate_search import Bounds, Condition, arrivals_to_detect, detectable_share, parse_conditions
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.load_section import LoadConfig, Slo

_FIRST_RATE = 1.0  # of a closed-loop workload, which has none
_BELOW, _ABOVE = 64.0, 1024.0  # how far from the first rate the search goes by itself
_INCLUDE_THE_WAIT = ("ttft_ms", "ttfo_ms", "e2el_ms")
_REACHED = {**QUANTILES, "max": 1.0}  # share of the longest wait, as waits grow evenly; the mean is half of it


@dataclass(frozen=True)
class RunLength:
    """How long a run is: at least ``least`` requests and ``seconds`` of arrivals.

    ``enough``: also as many requests as the percentiles of the SLO need, and as a rate ``overload`` (a share) above
    the capacity needs to show (by ``patience_s``, see that function, or by the number of arrivals); False with
    --num-prompts.
    ``fixed``: exactly ``least``, the requests of a trace.
    ``unit``: what is counted, requests or conversations.
    """

    least: int
    seconds: float
    enough: bool = True
    overload: float = 1.0
    patience_s: float = math.inf
    fixed: bool = False
    unit: str = "requests"

    def requests(self, rate: float, conditions: Sequence[Condition]) -> int:
        """Requests of a run at ``rate`` [1/s]."""
        if self.fixed:
            return self.least
        counts = [self.least, math.ceil(rate * self.seconds)]
        if self.enough:
            counts += [c.samples_needed for c in conditions]
            by_number = arrivals_to_detect(self.overload)
            counts.append(math.ceil(min(rate * self.patience_s / self.overload, by_number)))
        return max(counts)

    def seconds_of(self, rate: float, conditions: Sequence[Condition]) -> float:
        """Seconds for which a run at ``rate`` [1/s] sends."""
        return self.requests(rate, conditions) / rate

    def detectable_overload(self, rate: float, requests: int) -> float:
        """The least overload, as a share of the capacity, that a run of so many requests at ``rate`` [1/s] shows."""
        return min(rate * self.patience_s / max(requests, 1), detectable_share(requests))


def patience_s(conditions: Sequence[Condition], slo: Slo | None) -> float:
    """Seconds T after which an overload of 100 % breaks the SLO; an overload of a share x needs T / x.

    After T seconds the last requests wait T, so the quantile q of a latency that includes the wait is q * T: it
    reaches its limit at T = limit / q. Infinite where no latency of the SLO includes the wait.
    """
    found = [math.inf]
    for condition in conditions:
        if condition.metric in _INCLUDE_THE_WAIT:
            found.append(condition.limit / 1000.0 / _REACHED.get(condition.stat, 0.5))
        elif condition.metric == "goodput" and slo is not None:
            limits = [limit for name in _INCLUDE_THE_WAIT if (limit := getattr(slo, name)) is not None]
            found += [limit / 1000.0 / condition.limit for limit in limits]
    return min(found)


@dataclass(frozen=True)
class SearchPlan:
    """The options of a search; two searches with equal ones are one search."""

    slo: str
    start: float | None
    min_rate: float | None
    max_rate: float | None
    tolerance: float
    max_runs: int
    run_seconds: float
    num_prompts: int | None
    max_minutes: float

    @property
    def conditions(self) -> tuple[Condition, ...]:
        try:
            return parse_conditions(self.slo)
        except ValueError as error:
            raise UsageError(f"--find-max-rate: {error}") from None

    def bounds(self, start: float | None) -> Bounds:
        """``start``: the workload's own rate [1/s]. Raises UsageError for rates that do not fit each other."""
        named = {"--min-rate": self.min_rate, "--request-rate": self.start, "--max-rate": self.max_rate}
        given = [(name, rate) for name, rate in named.items() if rate is not None]
        for (one, below), (other, above) in pairwise(given):
            if below > above:
                raise UsageError(f"{one} {below:g} is above {other} {above:g}: change one of them")
        first = self.start or start or _FIRST_RATE
        first = min(first, self.max_rate or first)  # an option wins over what the file begins with
        first = max(first, self.min_rate or first)
        low, high = self.min_rate or first / _BELOW, self.max_rate or first * _ABOVE
        return Bounds(first, low, high, self.tolerance, self.max_runs)

    def run_length(self, load: LoadConfig, least: int | None) -> RunLength:
        """``least``: requests of ``load``, or of a trace."""
        return RunLength(
            self.num_prompts or least or 1,
            self.run_seconds,
            enough=self.num_prompts is None,
            overload=self.bounds(None).overload,
            patience_s=patience_s(self.conditions, load.slo),
            fixed=load.arrivals == "trace",
            unit="requests" if load.sessions is None else "conversations",
        )


def plan_search(
    path: str, slo: str, chosen: LoadOptions, how: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Workload, LoadPoint, SearchPlan]:
    """The workload in open loop, its load point, and the search. Raises UsageError."""
    if chosen.request_rate is not None and math.isinf(chosen.request_rate):
        raise UsageError("--find-max-rate begins at a finite --request-rate: leave inf out")
    names = ("min_rate", "max_rate", "tolerance", "max_runs", "run_seconds", "num_prompts", "max_minutes")
    plan = SearchPlan(slo, chosen.request_rate, **{name: options[name] for name in names})
    conditions = plan.conditions
    workload, point = choose_load(path, replace(chosen, request_rate=None, burstiness=None), **how)
    if workload.load.arrivals in ("ramp", "step"):
        raise UsageError(
            f"--find-max-rate needs one rate a run, and this load's arrivals are a {workload.load.arrivals}: use "
            "poisson, constant, gamma or a trace (-o load.arrivals=poisson)"
        )
    if any(c.metric == "goodput" for c in conditions) and workload.load.slo is None:
        raise UsageError("a goodput condition needs an SLO: give --goodput 'ttft:200 tpot:50', or load.slo in the file")
    if workload.load.arrivals != "trace":  # which is played faster or slower, gaps and all
        rate = plan.bounds(point.request_rate).start
        workload, point = choose_load(path, replace(chosen, request_rate=rate), **how)
    plan.bounds(point.request_rate)
    return workload, point, plan


def at_rate(load: LoadConfig, rate: float, count: int, native_rate: float | None = None) -> LoadConfig:
    """``load`` with ``count`` requests (or conversations) at ``rate`` [1/s].

    A trace has its own requests and gaps: it is played ``rate / native_rate`` times as fast as ``load`` plays it, at
    ``native_rate`` [1/s].
    """
    if load.arrivals == "trace":
        assert native_rate is not None
        scale = load.prompts.rate_scale * rate / native_rate
        return load.model_copy(update={"prompts": load.prompts.model_copy(update={"rate_scale": scale})})
    update: dict[str, Any] = {"request_rate": (rate,), "duration_s": None}
    if load.sessions is None:
        update["num_requests"] = (count,)
    else:
        update["sessions"] = load.sessions.model_copy(update={"num_sessions": (count,)})
    return load.model_copy(update=update)


def mean_rate(requests: Sequence[Any]) -> float:
    """Arrivals a second of requests with times of their own. Raises UsageError where no time passes."""
    times = [r.arrival_s for r in requests if r.arrival_s is not None]
    span = max(times, default=0.0) - min(times, default=0.0)
    if span <= 0:
        raise UsageError("--find-max-rate needs arrivals at different times, and these are all at once")
    return (len(times) - 1) / span
