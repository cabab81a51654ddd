"""The highest request rate that meets an SLO: conditions, and the search over rates as a pure function of its trials.

``advance(trials, bounds)`` says what to run next or what the answer is, from nothing but the runs so far: a search
that was interrupted goes on from its stored runs. It doubles (or halves) from the first rate until one rate meets the
SLO and a higher one does not, and then bisects the ratio of the two down to the tolerance. Then both rates are run
again with other requests: one run may miss, or meet, by chance. Where two runs of a rate disagree a third decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.loadtest.folder import INVALID
from kvbench.loadtest.max_rate.queue_growth import Backlog
from kvbench.metrics.latency import QUANTILES, samples_needed, too_many_failed

LATENCIES = ("ttft", "ttft_send", "tpot", "itl", "e2el", "client_queue")
STATISTICS = {**{name: name for name in QUANTILES}, "median": "p50", "mean": "mean", "max": "max"}
ATTEMPTS = 2  # at one rate, one after the other, which tell nothing
INVALID_ATTEMPTS = 3  # where something disturbed them: other work comes and goes
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


def unmet(
    conditions: Sequence[Condition], metrics: Mapping[str, Any], backlog: Backlog | None, tolerance: float
) -> list[str]:
    """Why a valid run does not meet the SLO, one phrase each; empty when it does.

    A rate that is more than ``tolerance`` above what the server serves is not met, whatever the conditions.
    """
    reasons = []
    for condition in conditions:
        if not condition.met(metrics):
            value = condition.value(metrics)
            reasons.append(f"{condition.text}: {_shown(condition, value)}")
    if too_many_failed(metrics):
        failed, completed = metrics["failed"], int(metrics.get("completed") or 0)
        reasons.append(f"{failed} of {failed + completed} requests failed")
    if backlog is not None and backlog.grows:
        reasons.append(
            f"the backlog grew: {backlog.early:.1f} in flight early in the run, {backlog.late:.1f} when the last came"
        )
    elif backlog is not None and backlog.falls_behind(tolerance):
        reasons.append(f"the server fell behind: {backlog.ended} requests ended while {backlog.came} came")
    return reasons


def _shown(condition: Condition, value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.1%}" if condition.metric == "goodput" else f"{value:.1f} ms"


@dataclass(frozen=True)
class Trial:
    """One run at ``rate`` [arrivals/s]. ``met``: None for a run that tells nothing; ``reasons``: of None and False.

    ``cause`` of one that tells nothing: INVALID, TOO_SHORT or CLIENT_LIMIT.
    """

    rate: float
    met: bool | None
    reasons: tuple[str, ...] = ()
    cause: str | None = None


@dataclass(frozen=True)
class Bounds:
    """Rates in requests/s. ``tolerance``: of the answer, relative; ``confirmations``: further runs of both its ends."""

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
    """Run this rate next; ``confirms``: it has been run before and is run again with other requests."""

    rate: float
    confirms: bool = False


FOUND, ALWAYS, NEVER = "found", "always met", "never met"
OUT_OF_RUNS, TOO_SHORT = "out of runs", "too short to tell"
CLIENT_LIMIT = "the client was the limit"


@dataclass(frozen=True)
class Answer:
    """The end. ``met``: the highest rate that met the SLO (None: none did), below ``unmet``: the lowest that did not
    (None: all did). ``confirmed``: whether those two have had their further runs. ``reason``: why a search ended
    without a result, else empty.
    """

    outcome: str
    met: float | None
    unmet: float | None
    confirmed: bool
    reason: str = ""


def advance(trials: Sequence[Trial], bounds: Bounds) -> Ask | Answer:
    """What to run next, or the answer."""
    met, missed = bracket(trials)
    ceiling = _client_limit(trials)
    limited = ceiling is not None and (missed is None or ceiling.rate <= missed)
    unconfirmed = [rate for rate in (met, None if limited else missed) if not _confirmed(trials, rate, bounds)]

    def answer(outcome: str, reason: str = "") -> Answer:
        return Answer(outcome, met, missed, not unconfirmed, reason)

    if (why := _given_up(trials)) is not None:
        return answer(*why)
    ask = _undecided(trials, ceiling) or _next(met, ceiling.rate if limited and ceiling else missed, bounds)
    if ask is None and unconfirmed:
        ask = Ask(unconfirmed[0], confirms=True)
    if ask is None and limited and ceiling:
        return answer(
            CLIENT_LIMIT,
            f"at {ceiling.rate:g}/s the client, not the server, was the limit ({'; '.join(ceiling.reasons)})",
        )
    if ask is None:
        return answer(NEVER if met is None else ALWAYS if missed is None else FOUND)
    if len(trials) >= bounds.max_runs:
        return answer(OUT_OF_RUNS, f"{bounds.max_runs} runs were allowed (--max-runs)")
    return ask  # after a run that tells nothing, the same rate again


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(highest met rate below every unmet one, lowest unmet rate); a rate's runs decide by their majority.

    A rate that was met above one that was not is luck, and no answer; nor is one that the client could not bear twice.
    """
    margins = _margins(trials)
    lowest = min((rate for rate, margin in margins.items() if margin < 0), default=None)
    ceiling = _client_limit(trials)
    below = min((rate for rate in (lowest, ceiling.rate if ceiling else None) if rate is not None), default=math.inf)
    return max((rate for rate, margin in margins.items() if margin > 0 and rate < below), default=None), lowest


def _margins(trials: Sequence[Trial]) -> dict[float, int]:
    """Runs that met the SLO less those that did not, by rate, of those that tell."""
    margins: dict[float, int] = {}
    for trial in trials:
        if trial.met is not None:
            margins[trial.rate] = margins.get(trial.rate, 0) + (1 if trial.met else -1)
    return margins


def _undecided(trials: Sequence[Trial], ceiling: Trial | None) -> Ask | None:
    """Another run of the rate whose runs disagree."""
    ties = [rate for rate, margin in _margins(trials).items() if margin == 0]
    return next((Ask(rate, confirms=True) for rate in ties if ceiling is None or rate < ceiling.rate), None)


def _confirmed(trials: Sequence[Trial], rate: float | None, bounds: Bounds) -> bool:
    """Whether a rate has had its further runs; there is nothing to confirm where there is no rate."""
    told = [t.met for t in trials if t.rate == rate and t.met is not None]
    return rate is None or max(told.count(True), told.count(False)) > bounds.confirmations


def _client_limit(trials: Sequence[Trial]) -> Trial | None:
    """A run at the lowest rate that the client did not bear as often as a rate is tried."""
    groups = [trials[i - ATTEMPTS : i] for i in range(ATTEMPTS, len(trials) + 1)]
    borne = [group[-1] for group in groups if _tells_nothing(group) and all(t.cause == CLIENT_LIMIT for t in group)]
    return min(borne, key=lambda t: t.rate, default=None)


def _tells_nothing(group: Sequence[Trial]) -> bool:
    return all(t.met is None and t.rate == group[-1].rate for t in group)


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


def _given_up(trials: Sequence[Trial]) -> tuple[str, str] | None:
    """Outcome and reason, when the last run ends the search: it told nothing, nor did those before at its rate.

    Where that was the client's fault lower rates are tried.
    """
    causes: set[str | None] = {t.cause for t in trials[-ATTEMPTS:]}
    if causes == {CLIENT_LIMIT}:
        return None
    last = trials[-(ATTEMPTS if causes == {TOO_SHORT} else INVALID_ATTEMPTS) :]
    if len(last) < ATTEMPTS or (causes != {TOO_SHORT} and len(last) < INVALID_ATTEMPTS) or not _tells_nothing(last):
        return None
    at, reasons = f"{len(last)} runs at {last[-1].rate:g}/s", "; ".join(last[-1].reasons)
    if causes == {TOO_SHORT}:
        return TOO_SHORT, f"{at} were too short to tell: {reasons}"
    return INVALID, f"{at} were invalid, the last because {reasons}"
