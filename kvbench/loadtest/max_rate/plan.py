"""What ``--find-max-rate`` is asked: conditions, bounds, how long a run is, and the load at another rate."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.loadtest.max_rate.queue_growth import arrivals_to_tell, share_told
from kvbench.loadtest.max_rate.search import Bounds, Condition, parse_conditions
from kvbench.loadtest.options import Asked, shaped
from kvbench.metrics.latency import QUANTILES
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import Workload
from kvbench.workload.load_section import LoadConfig, Slo

_FIRST_RATE = 1.0  # of a closed-loop workload, which has none
_BELOW, _ABOVE = 64.0, 1024.0  # how far from the first rate the search goes by itself
_HOLD_THE_WAIT = ("ttft_ms", "e2el_ms")
_REACHED = {**QUANTILES, "max": 1.0}  # share of the longest wait, which grows evenly; the mean reaches half of it


@dataclass(frozen=True)
class Sizes:
    """How long a run is: at least ``least`` requests and ``seconds`` of arrivals, and whatever the answer needs.

    That is as many requests as the percentiles asked for need, and a run that shows a rate of more than ``tolerance``
    above what the server serves: by ``patience_s`` (see there), or by the number of arrivals alone. ``enough`` False:
    not these, --num-prompts says how many. ``fixed``: exactly ``least``, as a trace has its own. ``unit``: of what is
    counted.
    """

    least: int
    seconds: float
    enough: bool = True
    tolerance: float = 1.0
    patience_s: float = math.inf
    fixed: bool = False
    unit: str = "requests"

    def requests(self, rate: float, conditions: Sequence[Condition]) -> int:
        """Requests of a run at ``rate`` [1/s]."""
        if self.fixed:
            return self.least
        return max(count for count, _ in self._needed(rate, conditions))

    def _needed(self, rate: float, conditions: Sequence[Condition]) -> list[tuple[int, str]]:
        """Each need, and what it is for."""
        needed = [(math.ceil(rate * self.seconds), ""), (self.least, f"the workload has {self.least}")]
        if self.enough:
            told = math.ceil(min(rate * self.patience_s / self.tolerance, arrivals_to_tell(self.tolerance)))
            needed += [(c.samples_needed, f"{c.stat} needs {c.samples_needed}") for c in conditions]
            needed.append((told, f"an overload of {self.tolerance:.0%} shows after {told}"))
        return needed

    def why_longer(self, rate: float, conditions: Sequence[Condition]) -> str:
        """Why a run at ``rate`` [1/s] sends for longer than ``seconds``; empty where it does not, or was told to."""
        count = self.requests(rate, conditions)
        if self.fixed or not self.enough or not self.seconds or count <= math.ceil(rate * self.seconds):
            return ""
        why = next(why for needed, why in self._needed(rate, conditions) if needed == count)
        return f"--run-seconds {self.seconds:g} are only {math.ceil(rate * self.seconds)} arrivals, but {why}"

    def seconds_of(self, rate: float, conditions: Sequence[Condition]) -> float:
        """Seconds for which a run at ``rate`` [1/s] sends."""
        return self.requests(rate, conditions) / rate

    def overload_told(self, rate: float, requests: int) -> float:
        """The least overload, as a share of the capacity, that a run of so many requests at ``rate`` [1/s] shows."""
        return min(rate * self.patience_s / max(requests, 1), share_told(requests))


def patience_s(conditions: Sequence[Condition], slo: Slo | None) -> float:
    """Seconds T after which an overload of 100 % breaks the SLO; one of a share x of the capacity needs T / x.

    By then the last requests wait T: a percentile q of a latency that holds the wait reaches its limit at limit / q.
    Infinite where no latency holds it (tokens do not come later because others queue).
    """
    found = [math.inf]
    for condition in conditions:
        if condition.metric in _HOLD_THE_WAIT:
            found.append(condition.limit / 1000.0 / _REACHED.get(condition.stat, 0.5))
        elif condition.metric == "goodput" and slo is not None:
            limits = [limit for name in _HOLD_THE_WAIT if (limit := getattr(slo, name)) is not None]
            found += [limit / 1000.0 / condition.limit for limit in limits]
    return min(found)


@dataclass(frozen=True)
class SearchPlan:
    """The command's words; two searches with equal ones are one search."""

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
    def parsed(self) -> tuple[Condition, ...]:
        try:
            return parse_conditions(self.slo)
        except ValueError as error:
            raise UsageError(f"--find-max-rate: {error}") from None

    @property
    def limit_s(self) -> float:
        return self.max_minutes * 60.0

    def bounds(self, start: float | None) -> Bounds:
        """``start``: the workload's own rate [1/s]. Raises UsageError for rates that do not fit each other."""
        named = {"--min-rate": self.min_rate, "--request-rate": self.start, "--max-rate": self.max_rate}
        given = [(name, rate) for name, rate in named.items() if rate is not None]
        for (one, below), (other, above) in pairwise(given):
            if below > above:
                raise UsageError(f"{one} {below:g} is above {other} {above:g}: change one of them")
        first = self.start or start or _FIRST_RATE
        first = min(first, self.max_rate or first)  # what was asked for wins over what the file begins with
        first = max(first, self.min_rate or first)
        low, high = self.min_rate or first / _BELOW, self.max_rate or first * _ABOVE
        try:
            return Bounds(first, low, high, self.tolerance, max_runs=self.max_runs)
        except ValueError as error:
            raise UsageError(str(error)) from None

    def sizes(self, load: LoadConfig, least: int | None) -> Sizes:
        """``least``: requests of ``load``, or of a trace."""
        return Sizes(
            self.num_prompts or least or 1,
            self.run_seconds,
            enough=self.num_prompts is None,
            tolerance=self.tolerance,
            patience_s=patience_s(self.parsed, load.slo),
            fixed=load.arrivals == "trace",
            unit="requests" if load.sessions is None else "conversations",
        )


def plan_search(
    path: str, slo: str, asked: Asked, how: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[Workload, LoadPoint, SearchPlan]:
    """The workload in open loop, its load point, and the search. Raises UsageError."""
    if asked.request_rate is not None and math.isinf(asked.request_rate):
        raise UsageError("--find-max-rate begins at a finite --request-rate: leave inf out")
    names = ("min_rate", "max_rate", "tolerance", "max_runs", "run_seconds", "num_prompts", "max_minutes")
    plan = SearchPlan(slo, asked.request_rate, **{name: options[name] for name in names})
    conditions = plan.parsed
    workload, point = shaped(path, replace(asked, request_rate=None, burstiness=None), **how)
    if workload.load.arrivals != "trace":  # which is played faster or slower, gaps and all
        rate = plan.bounds(point.request_rate).start
        workload, point = shaped(path, replace(asked, request_rate=rate), **how)
    require_searchable(workload.load, conditions)
    plan.bounds(point.request_rate)
    return workload, point, plan


def require_searchable(load: LoadConfig, conditions: Sequence[Condition]) -> None:
    """Raises UsageError for a load whose rate is not one number, or an SLO that cannot be judged."""
    if load.arrivals in ("ramp", "step"):
        raise UsageError(
            f"--find-max-rate needs one rate a run, and this load's arrivals are a {load.arrivals}: use poisson, "
            "constant, gamma or a trace (-o load.arrivals=poisson)"
        )
    if any(c.metric == "goodput" for c in conditions) and load.slo is None:
        raise UsageError("a goodput condition needs an SLO: give --goodput 'ttft:200 tpot:50', or load.slo in the file")


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
