"""The highest request rate that meets an SLO: its conditions, why a run missed it, and which rate to run next.

Pure functions. ``next_step(trials, bounds)`` says what to run next or what the answer is, from nothing but the runs so
far: a search that was interrupted goes on from its stored runs. It doubles (or halves) from the first rate until one
run met the SLO and another missed it. Then runs are made by turns at the 10 % and the 90 % quantile of what is known of
the threshold, until its 95 % interval is as narrow as the tolerance.

Runs at one rate do not all end alike: arrivals are drawn anew and the machine's speed changes. The highest rate that
meets the SLO is the one at which half of the runs meet it. A run at rate r meets it with probability
(1 - LAPSE) * Phi(log(threshold / r) / spread), a probit curve in the logarithm of the rate (Finney, Probit Analysis,
3rd ed. 1971, with the lapses of Wichmann and Hill, Perception & Psychophysics 63, 2001). ``spread``, the standard
deviation of a run's own log threshold, is not known either: it is summed out on a grid. The interval holds the middle
95 % of the posterior. It does not depend on why the runs were made at these rates or when they were stopped, so it
holds for a sequential search (Kontsevich and Tyler, Vision Research 39, 1999); how often it covers the true rate is
simulated in tests/unit/sweep/test_max_rate_threshold.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from kvbench.metrics.definitions import STATISTICS, latencies
from kvbench.metrics.latency import QUANTILES, samples_needed
from kvbench.metrics.model import LoadMetrics
from kvbench.metrics.steady_window import in_system

LATENCIES = tuple(metric.name for metric in latencies())
ATTEMPTS = 2  # runs in a row at one rate that are too short, or too much for the client, before that is believed
INVALID_ATTEMPTS = 6  # in a row that other work disturbed, before the search gives up: it comes and goes
_TURNS = (0.1, 0.9)  # quantiles of the threshold at which runs are made: apart, so that they show the spread too

CONFIDENCE = 0.95
LAPSE = 0.03  # share of the runs that miss at any rate, by something that lasts as long as a run and is not noticed
_MOST_SPREAD, _SPREADS = 0.5, 10  # up to 50 % of the rate; in as many classes, evenly in the logarithm, alike likely
_LEAST_SPREAD = 1 / 20  # of the tolerance: what is smaller changes nothing
_STEP = 1 / 10  # of the tolerance: the grid of log thresholds
_BEYOND = 2.0  # how far beyond the rates that may be run the threshold may lie

INVALID = "invalid"  # why a run tells nothing: it was disturbed
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

    def value(self, metrics: LoadMetrics) -> float | None:
        """The measured value [ms, or a share of the requests sent]; None when nothing was measured."""
        if self.metric == "goodput":
            return metrics.goodput_share
        quantile, completed, without = QUANTILES.get(self.stat), metrics.completed, metrics.without_output
        waits = self.metric == "ttfo_ms" and quantile is not None and without > 0
        if waits and math.ceil(quantile * (completed - 1)) >= completed - without:
            return math.inf  # a request without an output waits for ever
        return metrics.value(f"{self.metric}.{self.stat}")

    def met(self, metrics: LoadMetrics) -> bool:
        """Tests whether the limit is kept; what was not measured is not kept."""
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
        """The head of a column: ``p95 ttft ms``, ``goodput``."""
        return self.metric if self.metric == "goodput" else f"{self.stat} {self.metric.removesuffix('_ms')} ms"

    @property
    def samples_needed(self) -> int:
        """The requests that its percentile needs at 99 % confidence (``metrics.samples_needed``); gaps are many."""
        quantile = QUANTILES.get(self.stat)
        return 1 if quantile is None or self.metric in ("goodput", "itl_ms") else samples_needed(quantile)


def parse_conditions(text: str) -> tuple[Condition, ...]:
    """Parses ``p95_ttft<=500ms,p99_itl<=50ms``, ``goodput>=95%``. Raises ValueError with the offending part."""
    parts = [part.strip().lower() for part in text.split(",") if part.strip()]
    if not parts:
        raise ValueError(f"the SLO {text!r} has no condition; {_EXAMPLE}.")
    return tuple(_condition(part) for part in parts)


def _condition(part: str) -> Condition:
    match = _GOODPUT.fullmatch(part) or _LATENCY.fullmatch(part)
    if match is None:
        raise ValueError(f"{part!r} is no condition; {_EXAMPLE}.")
    try:
        value = float(match["value"])
    except ValueError:
        value = 0.0
    if value <= 0:
        raise ValueError(f"{part!r}: {match['value']} is not a number above 0; {_EXAMPLE}.")
    if match.re is _GOODPUT:
        share = value / (100.0 if match["unit"] else 1.0)
        if share > 1:
            raise ValueError(f"{part!r}: a share of the requests is at most 1 or 100%; write for example goodput>=95%.")
        return Condition(part, "goodput", "", share)
    for what, allowed in (("stat", STATISTICS), ("metric", LATENCIES)):
        if match[what] not in allowed:
            raise ValueError(f"{part!r}: {match[what]!r} is not known; use one of {', '.join(allowed)}.")
    limit = value * (1000.0 if match["unit"] == "s" else 1.0)
    return Condition(part, f"{match['metric']}_ms", STATISTICS[match["stat"]], limit)


# A run cannot show every overload: one of a share x of the capacity lets the queue grow by x of the arrivals, while the
# number of n arrivals of a Poisson process itself swings by sqrt(n). So x shows from about 1/x^2 arrivals on
# (``arrivals_to_detect`` takes three times as many).
GROWTH_SHARE = 0.05  # of the arrivals meanwhile: fewer were served than came
GROWTH_DEVIATIONS = 3.0  # of a Poisson count: how far the number in flight of a server that keeps up swings
_CERTAINTY = 3.0  # a settled part of 3/4 has then 1.5 deviations, and two of three runs decide
_SETTLED_QUANTILE = 0.95  # of the times in the system: the number in flight climbs until the long ones end, too


def arrivals_to_detect(share: float) -> float:
    """The arrivals of a run that shows an overload of ``share`` of the capacity by their number alone."""
    return _CERTAINTY / share**2


def detectable_share(arrivals: int) -> float:
    """The least overload that so many arrivals show: the inverse of ``arrivals_to_detect``."""
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
        """Tests whether fewer than (1 - tolerance) of what came was served, by numbers that can tell so much."""
        return self.came >= 1.0 / tolerance**2 and self.ended < (1.0 - tolerance) * self.came

    @property
    def grows(self) -> bool:
        """Tests whether more came than was served: a longer run would show a higher latency.

        The growth must be beyond what the number in flight of a server that keeps up swings by (Poisson, as in an
        M/G/inf queue), and a share of the arrivals.
        """
        growth = self.late - self.early
        return growth > GROWTH_SHARE * self.arrivals and growth > GROWTH_DEVIATIONS * math.sqrt(max(self.early, 1.0))


def filling_s(starts: Sequence[float], ends: Sequence[float]) -> float:
    """The seconds until as many are in flight as will be: the median time of the first quarter of the arrivals."""
    return float(np.median(_first_times(*_ordered(starts, ends))))


def queue_growth(starts: Sequence[float], ends: Sequence[float]) -> QueueGrowth | None:
    """Measures how the queue of an open loop grew, from intended starts and ends [s], each [requests].

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
    """The seconds in the system of the first quarter of the arrivals."""
    first = max(1, len(start) // 4)
    return end[:first] - start[:first]


@dataclass(frozen=True)
class Miss:
    """The reason why a run missed the SLO. ``cause``: in a word or two, for a table; ``text``: with the figures."""

    cause: str
    text: str


def misses(
    conditions: Sequence[Condition], metrics: LoadMetrics, growth: QueueGrowth | None, overload: float
) -> list[Miss]:
    """Lists why a valid run does not meet the SLO; empty when it does.

    A rate that is more than ``overload`` (a share) above what the server serves is a miss, whatever the conditions.
    """
    missed = [_condition_miss(c, metrics) for c in conditions if not c.met(metrics)]
    if metrics.too_many_failed:
        missed.append(Miss("failures", f"{metrics.failed} of {metrics.sent} requests failed"))
    if growth is not None and growth.grows:
        text = f"the queue grew: {growth.early:.1f} in flight early in the run, {growth.late:.1f} when the last came"
        missed.append(Miss("queue grew", text))
    elif growth is not None and growth.falls_behind(overload):
        text = f"the server fell behind: {growth.ended} requests ended while {growth.came} came"
        missed.append(Miss("fell behind", text))
    return missed


def _condition_miss(condition: Condition, metrics: LoadMetrics) -> Miss:
    """A condition that is not met; of a goodput also how many requests missed which limit (some several)."""
    value = condition.value(metrics)
    text = f"{condition.text}: {'not measured' if value is None else condition.format(value, ' ms')}"
    if condition.metric != "goodput":
        return Miss(condition.title.removesuffix(" ms"), text)
    limits = {name.removesuffix("_ms"): n for name, n in metrics.slo_misses.items() if n}
    limits |= {"failed": metrics.failed} if metrics.failed else {}
    if not limits:
        return Miss("goodput", text)
    counts = ", ".join(f"{name} {n}" for name, n in sorted(limits.items(), key=lambda limit: -limit[1]))
    return Miss(f"goodput ({counts})", f"{text} (requests over their limit: {counts})")


@dataclass(frozen=True)
class Trial:
    """One run at ``rate`` [arrivals/s]. ``met``: None for a run that cannot be judged; ``reasons``: of None and False.

    ``cause`` of one that cannot be judged: INVALID, TOO_SHORT or CLIENT_LIMIT. ``missed``: why in a few words each,
    where the run missed. ``values``: by condition. ``backlog``: requests in the system early and late in the run.
    ``seconds``: how long a run must be to be judged. ``arrivals``: requests, or conversations.
    """

    rate: float
    met: bool | None
    reasons: tuple[str, ...] = ()
    cause: str | None = None
    missed: tuple[str, ...] = ()
    values: Mapping[str, float | None] = field(default_factory=dict)
    backlog: Mapping[str, float] | None = None
    seconds: float | None = None
    arrivals: int = 0


@dataclass(frozen=True)
class Bounds:
    """Rates in requests/s. ``tolerance``: how wide the interval may be at the end, relative to its lower end."""

    start: float
    low: float
    high: float
    tolerance: float = 0.1
    max_runs: int = 40

    @property
    def overload(self) -> float:
        """The overload, as a share of the capacity, that one run must show: half the interval's width."""
        return self.tolerance / 2


@dataclass(frozen=True)
class SearchAnswer:
    """The end of a search. ``interval``: None when no run could be judged. ``reason``: why it stopped short."""

    outcome: str
    interval: RateInterval | None
    reason: str = ""


def next_step(trials: Sequence[Trial], bounds: Bounds) -> float | SearchAnswer:
    """Returns the rate [1/s] to run next, or the answer."""
    met, missed = _rates(trials, True), _rates(trials, False)
    ceiling = _client_limit(trials)
    highest = bounds.high if ceiling is None else _below_ceiling(ceiling.rate, [*met, *missed], bounds)
    likely, threshold = _threshold(trials, bounds)
    if (given_up := _given_up(trials)) is not None:
        outcome, reason = given_up
        return SearchAnswer(outcome, threshold, reason)
    limit = ""
    if ceiling is not None:
        limit = f"at {ceiling.rate:g}/s the client, not the server, was the limit ({'; '.join(ceiling.reasons)})"
    if highest is None:
        return SearchAnswer(CLIENT_LIMIT, threshold, limit)
    if threshold is not None and _narrow(threshold, bounds, highest):
        if threshold.high is None:
            return SearchAnswer(CLIENT_LIMIT, threshold, limit) if limit else SearchAnswer(ALWAYS, threshold)
        return SearchAnswer(NEVER if threshold.low is None else FOUND, threshold)
    if len(trials) >= bounds.max_runs:
        return SearchAnswer(OUT_OF_RUNS, threshold, f"{bounds.max_runs} runs were allowed (--max-runs)")
    return _next_rate(met, missed, likely, bounds, highest)  # the same again after one that is not judged


def interval_so_far(trials: Sequence[Trial], bounds: Bounds) -> RateInterval | None:
    """The 95 % interval of the runs so far; None when none could be judged."""
    return _threshold(trials, bounds)[1]


def _threshold(trials: Sequence[Trial], bounds: Bounds) -> tuple[Posterior, RateInterval | None]:
    met, missed, ceiling = _rates(trials, True), _rates(trials, False), _client_limit(trials)
    likely = posterior(met, missed, bounds.low, bounds.high, bounds.tolerance)
    highest = min(bounds.high, ceiling.rate) if ceiling else bounds.high
    return likely, interval(likely, met, missed, bounds.low, highest) if met or missed else None


def _rates(trials: Sequence[Trial], met: bool) -> list[float]:
    return [t.rate for t in trials if t.met is met]


def _narrow(threshold: RateInterval, bounds: Bounds, highest: float) -> bool:
    """Tests whether the interval is within the tolerance; an open end counts as the last rate that may be run."""
    if threshold.low is None and threshold.high is None:
        return False
    low = bounds.low if threshold.low is None else threshold.low
    return (highest if threshold.high is None else threshold.high) <= low * (1 + bounds.tolerance)


def _next_rate(
    met: Sequence[float], missed: Sequence[float], likely: Posterior, bounds: Bounds, highest: float
) -> float:
    """Chooses the next rate to try.

    It is at most twice a rate that met the SLO: a higher one would only pile up a queue.
    """
    if not met:
        rate = bounds.start if not missed else min(missed) / 2
    elif not missed:
        rate = max(met) * 2
    else:
        share = _TURNS[(len(met) + len(missed)) % len(_TURNS)]
        rate = min(likely.quantile(share), max(met) * 2)
    return min(highest, max(bounds.low, float(f"{rate:.4g}")))  # in figures that can be typed


def _below_ceiling(ceiling: float, judged: Sequence[float], bounds: Bounds) -> float | None:
    """The highest rate to run where the client cannot send ``ceiling``, bisected; None where there is none."""
    if ceiling <= bounds.low:
        return None
    below = max((rate for rate in judged if rate < ceiling), default=None)
    if below is None:
        return max(bounds.low, ceiling / 2)
    return below if ceiling <= below * (1 + bounds.overload) else float(f"{math.sqrt(below * ceiling):.4g}")


def _client_limit(trials: Sequence[Trial]) -> Trial | None:
    """The run at the lowest rate that was too much for the client ``ATTEMPTS`` times in a row."""
    groups = [trials[i - ATTEMPTS : i] for i in range(ATTEMPTS, len(trials) + 1)]
    limits = [group[-1] for group in groups if all(t.cause == CLIENT_LIMIT and t.rate == group[-1].rate for t in group)]
    return min(limits, key=lambda t: t.rate, default=None)


def _given_up(trials: Sequence[Trial]) -> tuple[str, str] | None:
    """The outcome and the reason, when none of the last runs could be judged, which ends the search.

    Where the client was the limit, lower rates are tried.
    """
    causes = {t.cause for t in trials[-ATTEMPTS:]}
    attempts = ATTEMPTS if causes == {TOO_SHORT} else INVALID_ATTEMPTS
    last = trials[-attempts:]
    if len(last) < attempts or any(t.met is not None for t in last) or all(t.cause == CLIENT_LIMIT for t in last):
        return None
    reasons = "; ".join(last[-1].reasons)
    if causes == {TOO_SHORT}:
        return TOO_SHORT, f"{len(last)} runs at {last[-1].rate:g}/s were too short to tell: {reasons}"
    return INVALID, f"{len(last)} runs in a row were invalid, the last because {reasons}"


@dataclass(frozen=True)
class RateInterval:
    """The rates [1/s] between which the threshold lies with 95 % confidence; None: open, then without a ``rate``."""

    low: float | None
    rate: float | None
    high: float | None


@dataclass(frozen=True)
class Posterior:
    """The likelihood of each threshold. ``log_rates`` [cells], ascending; ``weights`` [cells], of sum 1."""

    log_rates: np.ndarray
    weights: np.ndarray

    def quantile(self, share: float) -> float:
        """The rate [1/s] below which the threshold lies with probability ``share``."""
        return math.exp(float(np.interp(share, np.cumsum(self.weights), self.log_rates)))


def posterior(met: Sequence[float], missed: Sequence[float], low: float, high: float, tolerance: float) -> Posterior:
    """Computes what is known of the threshold after runs at the rates ``met`` and ``missed`` [1/s].

    Before any run every log rate from half of ``low`` to twice ``high`` is as likely as another. ``tolerance``: the
    relative width that the interval is to reach.
    """
    log_rates, spreads = _grid(low, high, tolerance)
    likelihood = np.zeros((len(spreads), len(log_rates)))
    for rates, outcome in ((met, True), (missed, False)):
        for rate in rates:
            likelihood += _log_chance(rate, outcome, low, high, tolerance)
    weights = np.exp(likelihood - likelihood.max()).sum(axis=0)
    return Posterior(log_rates, weights / weights.sum())


def _grid(low: float, high: float, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    step = math.log1p(tolerance) * _STEP
    log_rates = np.arange(math.log(low / _BEYOND), math.log(high * _BEYOND) + step, step)
    classes = np.geomspace(tolerance * _LEAST_SPREAD, _MOST_SPREAD, _SPREADS + 1)
    return log_rates, np.sqrt(classes[1:] * classes[:-1])


@lru_cache(maxsize=64)
def _log_chance(rate: float, met: bool, low: float, high: float, tolerance: float) -> np.ndarray:
    """The log probability that a run at ``rate`` ends so. [spreads, thresholds]"""
    from scipy.special import ndtr  # slow to import

    log_rates, spreads = _grid(low, high, tolerance)
    chance = (1 - LAPSE) * ndtr((log_rates - math.log(rate)) / spreads[:, None])
    return np.log(np.maximum(chance, 1e-300)) if met else np.log1p(-chance)


def interval(likely: Posterior, met: Sequence[float], missed: Sequence[float], low: float, high: float) -> RateInterval:
    """Computes the 95 % interval of the rate.

    low, high: the rates that may be run; an end beyond them is open, and so is an end that no run on its side shows
    The lower end is never above a rate that was met, the upper end never below one that was missed.
    """
    tail = (1 - CONFIDENCE) / 2
    lower = min(likely.quantile(tail), max(met)) if met else None
    upper = max(likely.quantile(1 - tail), min(missed)) if missed else None
    lower = None if lower is None or lower < low else lower
    upper = None if upper is None or upper > high else upper
    return RateInterval(lower, None if lower is None or upper is None else likely.quantile(0.5), upper)
