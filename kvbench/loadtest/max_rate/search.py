"""The highest request rate that meets an SLO: its conditions, whether a run met them, and which rate to run next.

Pure functions. ``next_step(trials, bounds)`` says what to run next or what the answer is, from nothing but the runs so
far: a search that was interrupted goes on from its stored runs. It doubles (or halves) from the first rate until one
rate meets the SLO and a higher one does not, and then bisects the ratio of the two down to the tolerance. Then both
rates are run again with other requests: one run may miss, or meet, by chance. Where two runs of a rate disagree a third
decides.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.loadtest.folder import INVALID
from kvbench.metrics.latency import QUANTILES, samples_needed, too_many_failed
from kvbench.metrics.steady_window import in_system

LATENCIES = ("ttft", "ttft_send", "tpot", "itl", "e2el", "client_queue")
STATISTICS = {**{name: name for name in QUANTILES}, "median": "p50", "mean": "mean", "max": "max"}
ATTEMPTS = 2  # runs in a row at one rate that cannot be judged, before the search gives up
INVALID_ATTEMPTS = 3  # where other work disturbed them: it comes and goes

FOUND, ALWAYS, NEVER = "found", "always met", "never met"
OUT_OF_RUNS, OUT_OF_TIME, TOO_SHORT = "out of runs", "out of time", "too short to tell"
CLIENT_LIMIT = "the client was the limit"

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

    def format(self, value: float | None, unit: str = "") -> str:
        if value is None:
            return "-"
        return f"{value:.1%}" if self.metric == "goodput" else f"{value:.1f}{unit}"

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
    found = _GOODPUT.fullmatch(part) or _LATENCY.fullmatch(part)
    if found is None:
        raise ValueError(f"{part!r} is no condition; {_EXAMPLE}.")
    try:
        value = float(found["value"])
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{part!r}: {found['value']} is not a number above 0; {_EXAMPLE}.")
    if found.re is _GOODPUT:
        share = value / (100.0 if found["unit"] else 1.0)
        if share > 1:
            raise ValueError(f"{part!r}: a share of the requests is at most 1 or 100%; write for example goodput>=95%.")
        return Condition(part, "goodput", "", share)
    for what, known in (("stat", STATISTICS), ("metric", LATENCIES)):
        if found[what] not in known:
            raise ValueError(f"{part!r}: {found[what]!r} is not known; use one of {', '.join(known)}.")
    limit = value * (1000.0 if found["unit"] == "s" else 1.0)
    return Condition(part, f"{found['metric']}_ms", STATISTICS[found["stat"]], limit)


# A run cannot show every overload: one of a share x of the capacity lets the queue grow by x of the arrivals, while the
# number of n arrivals of a Poisson process itself swings by sqrt(n). So x shows from about 1/x^2 arrivals on
# (``arrivals_to_detect`` takes three times as many).
GROWTH_SHARE = 0.05  # of the arrivals meanwhile: fewer were served than came
GROWTH_DEVIATIONS = 3.0  # of a Poisson count: how far the number in flight of a server that keeps up swings
_CERTAINTY = 3.0  # a settled part of 3/4 has then 1.5 deviations, and two of three runs decide
_SETTLED_QUANTILE = 0.95  # of the times in the system: the number in flight climbs until the long ones end, too


def arrivals_to_detect(share: float) -> float:
    """Arrivals of a run that shows an overload of ``share`` of the capacity by their number alone."""
    return _CERTAINTY / share**2


def detectable_share(arrivals: int) -> float:
    """The inverse of ``arrivals_to_detect``: the least overload that so many arrivals show."""
    return math.sqrt(_CERTAINTY / max(arrivals, 1))


@dataclass(frozen=True)
class QueueGrowth:
    """Requests in flight, time averages over an ``early`` and a ``late`` part of the arrivals.

    ``arrivals``: from the middle of the one part to the middle of the other. ``came`` and ``ended``: requests between
    the moment at which even the long ones of the beginning had ended and the last arrival; both 0 where that was
    after the middle of the run.
    """

    early: float
    late: float
    arrivals: int
    came: int = 0
    ended: int = 0

    def falls_behind(self, tolerance: float) -> bool:
        """Whether fewer than (1 - tolerance) of what came was served, by numbers that can tell so much."""
        return self.came >= 1.0 / tolerance**2 and self.ended < (1.0 - tolerance) * self.came

    @property
    def grows(self) -> bool:
        """More came than was served: such a run has no latency of its own, a longer one would show a higher one.

        The growth must be beyond what the number in flight of a server that keeps up swings by (Poisson, as in an
        M/G/inf queue), and a share of the arrivals.
        """
        growth = self.late - self.early
        return growth > GROWTH_SHARE * self.arrivals and growth > GROWTH_DEVIATIONS * math.sqrt(max(self.early, 1.0))


def filling_s(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Seconds until as many are in flight as will be: the median time of the first quarter of the arrivals."""
    return float(np.median(_first_times(*_ordered(starts, ends))))


def queue_growth(starts: Sequence[float], ends: Sequence[float]) -> QueueGrowth | None:
    """How the queue of an open loop grew, from intended starts and ends [s], each [requests].

    The first quarter of the arrivals is left out, and ``filling_s``; of the rest the first third is compared with the
    last. None when that cannot be known: under 8 arrivals, or in less than twice ``filling_s``. An end that is not
    known (NaN) is one after the last arrival.
    """
    if len(starts) < 8:
        return None
    start, end = _ordered(starts, ends)
    begin, last = float(start[0]), float(start[-1])
    quarter, middle = begin + (last - begin) / 4, begin + (last - begin) / 2
    settled = max(quarter, begin + filling_s(starts, ends))
    if settled >= middle:
        return None
    third = (last - settled) / 3
    meanwhile = int(((start > settled + third / 2) & (start <= last - third / 2)).sum())
    early, _, late = in_system(start, end, np.array([settled, settled + third, last - third, last]))
    long = float(np.quantile(_first_times(start, end), _SETTLED_QUANTILE, method="lower"))
    counted_from = max(quarter, begin + long)
    if counted_from > middle:
        return QueueGrowth(float(early), float(late), meanwhile)
    came, ended = (int(((times > counted_from) & (times <= last)).sum()) for times in (start, end))
    return QueueGrowth(float(early), float(late), meanwhile, came, ended)


def _ordered(starts: Sequence[float], ends: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.asarray(starts, dtype=float), kind="stable")
    end = np.asarray(ends, dtype=float)[order]
    return np.asarray(starts, dtype=float)[order], np.where(np.isfinite(end), end, np.inf)


def _first_times(start: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Seconds in the system of the first quarter of the arrivals."""
    first = max(1, len(start) // 4)
    return end[:first] - start[:first]


def unmet(
    conditions: Sequence[Condition], metrics: Mapping[str, Any], growth: QueueGrowth | None, tolerance: float
) -> list[str]:
    """Why a valid run does not meet the SLO, one phrase each; empty when it does.

    A rate that is more than ``tolerance`` above what the server serves is not met, whatever the conditions.
    """
    reasons = [
        f"{c.text}: {'not measured' if c.value(metrics) is None else c.format(c.value(metrics), ' ms')}"
        for c in conditions
        if not c.met(metrics)
    ]
    if too_many_failed(metrics):
        failed, completed = metrics["failed"], int(metrics.get("completed") or 0)
        reasons.append(f"{failed} of {failed + completed} requests failed")
    if growth is not None and growth.grows:
        reasons.append(
            f"the queue grew: {growth.early:.1f} in flight early in the run, {growth.late:.1f} when the last came"
        )
    elif growth is not None and growth.falls_behind(tolerance):
        reasons.append(f"the server fell behind: {growth.ended} requests ended while {growth.came} came")
    return reasons


@dataclass(frozen=True)
class Trial:
    """One run at ``rate`` [arrivals/s]. ``met``: None for a run that cannot be judged; ``reasons``: of None and False.

    ``cause`` of one that cannot be judged: INVALID, TOO_SHORT or CLIENT_LIMIT.
    """

    rate: float
    met: bool | None
    reasons: tuple[str, ...] = ()
    cause: str | None = None


@dataclass(frozen=True)
class Bounds:
    """Rates in requests/s. ``tolerance``: of the answer, relative."""

    start: float
    low: float
    high: float
    tolerance: float = 0.05
    max_runs: int = 24


@dataclass(frozen=True)
class NextRun:
    """Run this rate next; ``confirms``: it has been run before and is run again with other requests."""

    rate: float
    confirms: bool = False


@dataclass(frozen=True)
class Answer:
    """The end. ``met``: the highest rate that met the SLO (None: none did), below ``unmet``: the lowest that did not
    (None: all did). ``confirmed``: whether both have been run again. ``reason``: why a search ended without a result,
    else empty.
    """

    outcome: str
    met: float | None
    unmet: float | None
    confirmed: bool
    reason: str = ""


def next_step(trials: Sequence[Trial], bounds: Bounds) -> NextRun | Answer:
    """What to run next, or the answer."""
    met, missed = bracket(trials)
    ceiling = _client_limit(trials)
    limited = ceiling is not None and (missed is None or ceiling.rate <= missed)
    unconfirmed = [rate for rate in (met, None if limited else missed) if not _confirmed(trials, rate)]

    def answer(outcome: str, reason: str = "") -> Answer:
        return Answer(outcome, met, missed, not unconfirmed, reason)

    if (why := _given_up(trials)) is not None:
        return answer(*why)
    run = _undecided(trials, ceiling) or _bisected(met, ceiling.rate if limited and ceiling else missed, bounds)
    if run is None and unconfirmed:
        run = NextRun(unconfirmed[0], confirms=True)
    if run is None and limited and ceiling:
        return answer(
            CLIENT_LIMIT,
            f"at {ceiling.rate:g}/s the client, not the server, was the limit ({'; '.join(ceiling.reasons)})",
        )
    if run is None:
        return answer(NEVER if met is None else ALWAYS if missed is None else FOUND)
    if len(trials) >= bounds.max_runs:
        return answer(OUT_OF_RUNS, f"{bounds.max_runs} runs were allowed (--max-runs)")
    return run  # after a run that cannot be judged, the same rate again


def bracket(trials: Sequence[Trial]) -> tuple[float | None, float | None]:
    """(highest met rate below every unmet one, lowest unmet rate); a rate's runs decide by their majority.

    A rate that was met above one that was not is luck and does not count; nor does one above what the client can send.
    """
    margins = _margins(trials)
    lowest = min((rate for rate, margin in margins.items() if margin < 0), default=None)
    ceiling = _client_limit(trials)
    below = min((rate for rate in (lowest, ceiling.rate if ceiling else None) if rate is not None), default=math.inf)
    return max((rate for rate, margin in margins.items() if margin > 0 and rate < below), default=None), lowest


def _margins(trials: Sequence[Trial]) -> dict[float, int]:
    """By rate, runs that met the SLO less those that did not."""
    margins: dict[float, int] = {}
    for trial in trials:
        if trial.met is not None:
            margins[trial.rate] = margins.get(trial.rate, 0) + (1 if trial.met else -1)
    return margins


def _undecided(trials: Sequence[Trial], ceiling: Trial | None) -> NextRun | None:
    """Another run of the rate whose runs disagree."""
    ties = [rate for rate, margin in _margins(trials).items() if margin == 0]
    return next((NextRun(rate, confirms=True) for rate in ties if ceiling is None or rate < ceiling.rate), None)


def _confirmed(trials: Sequence[Trial], rate: float | None) -> bool:
    """Whether two runs of a rate agree; there is nothing to confirm where there is no rate."""
    judged = [t.met for t in trials if t.rate == rate and t.met is not None]
    return rate is None or max(judged.count(True), judged.count(False)) > 1


def _client_limit(trials: Sequence[Trial]) -> Trial | None:
    """The run at the lowest rate that was too much for the client ``ATTEMPTS`` times in a row."""
    groups = [trials[i - ATTEMPTS : i] for i in range(ATTEMPTS, len(trials) + 1)]
    limits = [group[-1] for group in groups if _unjudged(group) and all(t.cause == CLIENT_LIMIT for t in group)]
    return min(limits, key=lambda t: t.rate, default=None)


def _unjudged(group: Sequence[Trial]) -> bool:
    return all(t.met is None and t.rate == group[-1].rate for t in group)


def _bisected(met: float | None, missed: float | None, bounds: Bounds) -> NextRun | None:
    if met is None and missed is None:
        return NextRun(bounds.start)
    if met is None:
        assert missed is not None
        return NextRun(max(bounds.low, missed / 2)) if missed > bounds.low else None
    if missed is None:
        return NextRun(min(bounds.high, met * 2)) if met < bounds.high else None
    middle = float(f"{math.sqrt(met * missed):.4g}")  # of their ratio, in figures that can be typed
    return NextRun(middle) if missed / met > 1 + bounds.tolerance and met < middle < missed else None


def _given_up(trials: Sequence[Trial]) -> tuple[str, str] | None:
    """Outcome and reason, when the last runs end the search: none of them at this rate could be judged.

    Where the client was the limit, lower rates are tried.
    """
    causes = {t.cause for t in trials[-ATTEMPTS:]}
    attempts = ATTEMPTS if causes == {TOO_SHORT} else INVALID_ATTEMPTS
    last = trials[-attempts:]
    if causes == {CLIENT_LIMIT} or len(last) < attempts or not _unjudged(last):
        return None
    runs, reasons = f"{len(last)} runs at {last[-1].rate:g}/s", "; ".join(last[-1].reasons)
    if causes == {TOO_SHORT}:
        return TOO_SHORT, f"{runs} were too short to tell: {reasons}"
    return INVALID, f"{runs} were invalid, the last because {reasons}"
