"""The highest request rate that meets an SLO: conditions, and the search over rates as a pure function of its trials.

``advance(trials, bounds)`` says what to run next or what the answer is, from nothing but the runs so far: a search
that was interrupted goes on from its stored runs. It doubles (or halves) from the first rate until one rate meets the
SLO and a higher one does not, and then bisects the ratio of the two down to the tolerance. A rate meets the SLO when
every valid run of it does; the answer is run again with other requests, and a rate that fails then is no answer.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.backlog import Backlog
from kvbench.metrics import QUANTILES, samples_needed

LATENCIES = ("ttft", "ttft_send", "tpot", "itl", "e2el", "client_queue")
STATISTICS = {**{name: name for name in QUANTILES}, "median": "p50", "mean": "mean", "max": "max"}
MAX_FAILED_SHARE = 0.01
INVALID_ATTEMPTS = 2  # at one rate, one after the other
_LATENCY = re.compile(
    r"(?P<stat>[a-z]+\d*)_(?P<metric>[a-z0-9_]+?)(?:_ms)?\s*<=?\s*(?P<value>[\d.]+)\s*(?P<unit>ms|s|)"
)
_GOODPUT = re.compile(r"goodput\s*>=?\s*(?P<value>[\d.]+)\s*(?P<unit>%|)")
_EXAMPLE = "write for example `p95_ttft<=500ms,p99_itl<=50ms` or `goodput>=95%`"


@dataclass(frozen=True)
class Condition:
    """One limit. ``metric`` in ms (``ttft_ms``) with its ``stat`` (``p95``), or ``goodput`` with a share 0..1."""

    text: str
    metric: str
    stat: str
    limit: float

    def value(self, metrics: Mapping[str, Any]) -> float | None:
        """The measured value [ms, or a share of the requests sent]; None when nothing was measured."""
        if self.metric == "goodput":
            return metrics.get("goodput_share")
        return (metrics.get(self.metric) or {}).get(self.stat)

    def met(self, metrics: Mapping[str, Any]) -> bool:
        """Whether the limit is kept; what was not measured is not kept."""
        value = self.value(metrics)
        if value is None:
            return False
        return value >= self.limit if self.metric == "goodput" else value <= self.limit

    @property
    def title(self) -> str:
        """For the head of a column: ``p95 ttft ms``, ``goodput``."""
        return self.metric if self.metric == "goodput" else f"{self.stat} {self.metric.removesuffix('_ms')} ms"

    @property
    def samples_needed(self) -> int:
        """Requests that its percentile needs at 99 % confidence (``metrics.samples_needed``); gaps are many."""
        quantile = QUANTILES.get(self.stat)
        return 1 if quantile is None or self.metric in ("goodput", "itl_ms") else samples_needed(quantile)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """``p95_ttft<=500ms,p99_itl<=50ms``, ``goodput>=95%``. Raises ValueError with the offending part."""
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"the SLO {text!r} has no condition; {_EXAMPLE}.")
    return tuple(_condition(part) for part in parts)


def _condition(part: str) -> Condition:
    if found := _GOODPUT.fullmatch(part):
        share = _positive(found["value"], part) / (100.0 if found["unit"] else 1.0)
        if share > 1:
            raise ValueError(f"{part!r}: a share of the requests is at most 1 or 100%; write for example goodput>=95%.")
        return Condition(part, "goodput", "", share)
    found = _LATENCY.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is no condition; {_EXAMPLE}.")
    if found["stat"] not in STATISTICS:
        raise ValueError(f"{part!r}: there is no statistic {found['stat']!r}; use one of {', '.join(STATISTICS)}.")
    if found["metric"] not in LATENCIES:
        raise ValueError(f"{part!r}: there is no latency {found['metric']!r}; use one of {', '.join(LATENCIES)}.")
    limit = _positive(found["value"], part) * (1000.0 if found["unit"] == "s" else 1.0)
    return Condition(part, f"{found['metric']}_ms", STATISTICS[found["stat"]], limit)


def _positive(text: str, part: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ValueError(f"{part!r}: {text} is not a number above 0; {_EXAMPLE}.")
    return value


def unmet(conditions: Sequence[Condition], metrics: Mapping[str, Any], backlog: Backlog | None) -> list[str]:
    """Why a valid run does not meet the SLO, one phrase each; empty when it does."""
    reasons = []
    for condition in conditions:
        if not condition.met(metrics):
            value = condition.value(metrics)
            reasons.append(f"{condition.text}: {_shown(condition, value)}")
    failed, completed = int(metrics.get("failed") or 0), int(metrics.get("completed") or 0)
    if failed > MAX_FAILED_SHARE * (failed + completed):
        reasons.append(f"{failed} of {failed + completed} requests failed")
    if backlog is not None and backlog.grows:
        reasons.append(
            f"the backlog grew: {backlog.early:.1f} in flight early in the run, {backlog.late:.1f} when the last came"
        )
    return reasons


def _shown(condition: Condition, value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.1%}" if condition.metric == "goodput" else f"{value:.1f} ms"


@dataclass(frozen=True)
class Trial:
    """One run at ``rate`` [requests/s]. ``met``: None for an invalid run; ``reasons``: why not met, or invalid."""

    rate: float
    met: bool | None
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class Bounds:
    """Rates in requests/s. ``tolerance``: of the answer, relative; ``confirmations``: further runs of it."""

    start: float
    low: float
    high: float
    tolerance: float = 0.05
    confirmations: int = 1
    max_runs: int = 24

    def __post_init__(self) -> None:
        if not 0 < self.low <= self.start <= self.high:
            raise ValueError(
                f"the rates do not fit: min {self.low:g} <= start {self.start:g} <= max {self.high:g} must hold; "
                "change --min-rate, --request-rate or --max-rate."
            )
        if not 0 < self.tolerance < 1:
            raise ValueError(f"the tolerance {self.tolerance:g} must lie between 0 and 1; 0.05 is 5 %.")
        if self.max_runs < 1:
            raise ValueError(f"the number of runs {self.max_runs} is too small; the least is 1.")


@dataclass(frozen=True)
class Ask:
    """Run this rate next; ``confirms``: it has met the SLO before and is run again with other requests."""

    rate: float
    confirms: bool = False


FOUND, ALWAYS, NEVER, INVALID, OUT_OF_RUNS = "found", "always met", "never met", "invalid", "out of runs"


@dataclass(frozen=True)
class Answer:
    """The end. ``met``: the highest rate all of whose runs met the SLO (None: none did), below ``unmet``: the lowest
    that did not (None: all did). ``confirmed``: whether ``met`` has had its further runs. ``reason``: why a search
    ended without a result, else empty.
    """

    outcome: str
    met: float | None
    unmet: float | None
    confirmed: bool
    reason: str = ""


def advance(trials: Sequence[Trial], bounds: Bounds) -> Ask | Answer:
    """What to run next, or the answer."""
    met, unmet_rate = bracket(trials)
    runs_of_met = sum(t.rate == met and t.met is True for t in trials)
    confirmed = met is not None and runs_of_met > bounds.confirmations
    if (reason := _given_up(trials)) is not None:
        return Answer(INVALID, met, unmet_rate, confirmed, reason)
    ask = _next(met, unmet_rate, bounds)
    if ask is None and met is not None and not confirmed:
        ask = Ask(met, confirms=True)
    if ask is None:
        outcome = NEVER if met is None else ALWAYS if unmet_rate is None else FOUND
        return Answer(outcome, met, unmet_rate, confirmed)
    if len(trials) >= bounds.max_runs:
        return Answer(OUT_OF_RUNS, met, unmet_rate, confirmed, f"{bounds.max_runs} runs were allowed (--max-runs)")
    return ask  # after an invalid run, which tells nothing, the same rate again


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(highest met rate below every unmet one, lowest unmet rate); a rate is met when all its valid runs are.

    A rate that was met above one that was not is luck, and no answer.
    """
    unmet_rates = [t.rate for t in trials if t.met is False]
    lowest = min(unmet_rates, default=None)
    below = [t.rate for t in trials if t.met is True and (lowest is None or t.rate < lowest)]
    return max(below, default=None), lowest


def _next(met: float | None, unmet_rate: float | None, bounds: Bounds) -> Ask | None:
    if met is None and unmet_rate is None:
        return Ask(bounds.start)
    if met is None:
        assert unmet_rate is not None
        return Ask(max(bounds.low, unmet_rate / 2)) if unmet_rate > bounds.low else None
    if unmet_rate is None:
        return Ask(min(bounds.high, met * 2)) if met < bounds.high else None
    middle = float(f"{math.sqrt(met * unmet_rate):.4g}")  # of their ratio, in figures that can be typed
    return Ask(middle) if unmet_rate / met > 1 + bounds.tolerance and met < middle < unmet_rate else None


def _given_up(trials: Sequence[Trial]) -> str | None:
    """Why the last run ends the search: it was invalid, and so was the one before at the same rate."""
    last = trials[-INVALID_ATTEMPTS:]
    if len(last) == INVALID_ATTEMPTS and all(t.met is None and t.rate == last[-1].rate for t in last):
        return f"{INVALID_ATTEMPTS} runs at {last[-1].rate:g} requests/s were invalid: {'; '.join(last[-1].reasons)}"
    return None
