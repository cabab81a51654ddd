"""Effects between engines that took turns step by step, with intervals over launches: pure functions on plain arrays.

Within a launch. Engines in turns meet the same machine speed, so it drops out of the ratio of their totals, (tokens of
B / seconds of B) / (tokens of A / seconds of A). Its standard error comes from *shares*: the engine times in which A
and B made the same share of their tokens, linearised as for every ratio estimator (Cochran, Sampling Techniques, 1977,
chapter 6; of batch means: Alexopoulos and Seila, Output data analysis, in the Handbook of Simulation, 1998). Engines
that do different work spend their time at different shares: what recurs in every launch of the same work is not
scatter, and is taken out. Shares begin short and are joined two by two until one tells nothing about the next (their
lag-1 autocorrelation lies within the 95 % limits of none) or only ``FEWEST_SHARES`` are left. What autocorrelation
remains is taken into the error as that of a first-order autoregression (as Tafazzoli and Wilson, Skart, IIE
Transactions 43, 2011).

Over launches. A launch has its own memory layout, which moves its ratio by up to 1 %: more steps of one launch do not
average that away, so launches are what is counted. The interval is Student's t of their log ratios. That of a
configuration alone is never narrower than the 80 % interval of the errors within the launches: three launches that
agree by chance prove nothing that their steps deny. Not the 95 % interval of those errors: the larger of the two would
cover 98 %. Of one launch there are only the errors within it, so that it has an interval and no call.

Two launches. Their own scatter says next to nothing (t of one degree of freedom: 12.7), so it is moderated. A launch is
expected to scatter by twice the square of the error within it, and by 1.5 % for what makes launches differ. Engines of
different speeds scatter by a tenth of their log ratio besides, since the machine changes; launches side by side share
that. What is expected counts as ``_OF_TWO_FREEDOM`` degrees of freedom (Smyth 2004, below). In 69 comparisons of two
runs of `kvbench claims` launches scattered by 0.9 times that error's square where speeds were alike, by 1.9 times it
elsewhere. In simulations on machines as below, for effects up to 90 % and launches that differ by up to 2 %, such
intervals cover 93 % or more and are half as wide.

Launches side by side. They meet the same machine in the same seconds, which moves the ratio of engines that run at
quite different speeds: contiguous to paged at 32 users, 4 to 9 % between rounds and 1 to 6 % within one. So the error
of an effect with noise of its own is never below that of the means of its rounds. Effects of less than 20 % scatter
within a round as between rounds (three sittings of 4 launches on 2 cores: variances of 2.7 and 2.8 squared percent).

Many configurations. Those of one process are a randomised block design: launches are the blocks, and what is left of
the log throughputs after the means of launches and configurations is the noise, much the same for all (Montgomery,
Design and Analysis of Experiments, 4.1). So few launches of one configuration say too little of its own scatter, and
its variance is moderated: the common one counts as ``_COMMON_FREEDOM`` degrees of freedom, beside those of its own
(Smyth, Linear models and empirical Bayes methods, Statistical Applications in Genetics and Molecular Biology 3, 2004),
and both together never as more than all launches hold.
A configuration has an interval of its own where it runs more than 50 % faster or slower, since it then meets another
machine for part of the time, or where it scatters much more than the others (F test at 1 %). All have their own where
the baseline scatters much more than they do. Three launches show that only if it is gross: a baseline with twice the
noise of the others would leave the intervals at 89 %.

Percentiles. A p95 of few requests hangs on two or three of them, so its interval also holds how much it would change
with other requests (``for_other_requests``). Throughput is of these requests.

Stopping. A sitting stops once every question is decided, and not before this many launches:

    noise in common with enough others    3
    own noise, several questions          5
    own noise, one question               6

Stopping when an interval happens to be narrow makes it cover too little, most of all where the noise is known from few
launches: hence the larger numbers for a question's own noise. From 3 launches on it is answered early if its 99 %
interval is narrow, as that of a large effect may be; in simulations that cost such intervals half a point of coverage,
1.2 at most. On machines that drift, burst and change their speed: tests/benchmarks/lockstep_coverage.md.

Interrupted steps. No step is left out for its length: what is long may be what an engine does worse. But launches that
compute the same requests compute the same steps, and what an engine does worse it does worse in each of them. So a step
counts as at most ``RECURS`` times what the same step takes in the median launch and what the machine's speed is around
it (``as_it_recurs``). A program that interrupts one step by ten or a hundred times its length then moves nothing; a
step that is slow in more than half of the launches counts in full. What slows an engine at other steps in every launch
is taken for interruptions, if it makes a step more than ``RECURS`` times as long. Without the machine's speed the limit
would tie the launches together, and intervals would cover too little.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import scipy  # its parts load when they are used: stats takes a second

from kvbench.common.stats import detectable_errors
from kvbench.effects.comparison import Call, Comparison, call_of
from kvbench.metrics.definitions import ENGINE, THROUGHPUT

POOLED = "pooled"
"""The basis of a comparison whose noise is known from other configurations too."""
CONFIDENCE = 0.95
EARLY_CONFIDENCE = 0.99  # of the intervals that answer a question before its fewest launches
TARGET = 0.015  # half width of an interval that is narrow enough
FEWEST_LAUNCHES = 5  # before the first decision to stop
FEWEST_POOLED = 3  # launches, where the noise is known from at least ``POOLED_FREEDOM`` degrees of freedom
POOLED_FREEDOM = 6
RECURS = 1.3  # times what it would take: a longer step was interrupted
_AROUND = 9  # steps, of which a step is the middle
_LIKE = math.log(1.5)  # configurations at most this much faster or slower than the baseline have noise in common
_COMMON_FREEDOM = 6
_LAYOUT_SD = 0.015  # of a launch's log ratio, by where its memory lies and whatever else makes launches differ
_OF_TWO_FREEDOM = 4  # degrees of freedom that what is expected of two launches counts as
_MACHINE_SHARE = 0.1  # of a log ratio, by which it changes with the machine
_SCATTERS_MORE = 0.01
FEWEST_SHARES, MOST_SHARES = 8, 32  # powers of two; with more, both reach the same share at different moments
_STEPS_A_SHARE = 2  # at least
_DRAWS = 400  # of the bootstrap over requests
_WITHIN_LAUNCHES = 0.80  # confidence of the errors within launches that the interval over launches may not undercut


@dataclass(frozen=True)
class Steps:
    """The steps of one engine in one launch, in order.

    seconds: [steps] the engine time of each, above 0
    tokens: [steps] its output tokens; 0 of a step that only prefills
    """

    seconds: np.ndarray
    tokens: np.ndarray


@dataclass(frozen=True)
class LaunchRatio:
    """The ratio of throughputs of two engines in one launch; arrays where it was made of several launches.

    log_ratio: log of (tokens per second of the other / of the base)
    error: its standard error from the scatter within the launch; NaN if that is not known
    shares: how many shares the error comes from, 0 if it is not known
    """

    log_ratio: float
    error: float
    shares: int


def is_decided(comparison: Comparison) -> bool:
    """Tests whether a comparison has a call and a narrow interval: ``TARGET`` to a side, or a fifth of the effect."""
    return comparison.decided and comparison.half_width <= max(TARGET, abs(comparison.ratio - 1) / 5)


def as_it_recurs(seconds: np.ndarray) -> np.ndarray:
    """Limits each of ``seconds`` [launches, ..., steps] of the same steps by its median and its neighbours.

    The limit is ``RECURS`` times its median over the launches, times how much longer than theirs its neighbours took.
    """
    median = np.median(seconds, axis=0)
    longer = seconds / median
    around = scipy.ndimage.median_filter(longer, size=(1,) * median.ndim + (_AROUND,), mode="nearest")
    return np.minimum(longer, RECURS * around) * median


def launch_ratios(bases: Sequence[Steps], others: Sequence[Steps], same_work: bool = False) -> list[LaunchRatio]:
    """The ratio of throughputs in each launch. ``same_work``: every launch computed the same steps."""
    steps = [*bases, *others]
    tokens = [math.log(np.sum(other.tokens) / np.sum(base.tokens)) for base, other in zip(bases, others, strict=True)]
    shortest = min(np.count_nonzero(launch.tokens) for launch in steps)
    if shortest < FEWEST_SHARES * _STEPS_A_SHARE:
        totals = np.log([launch.seconds.sum() for launch in steps]).reshape(2, -1)
        return [LaunchRatio(log_ratio, math.nan, 0) for log_ratio in (tokens + totals[0] - totals[1]).tolist()]
    shares = min(MOST_SHARES, 2 ** int(math.log2(shortest // _STEPS_A_SHARE)))
    parts = np.diff([share_ends(launch, shares) for launch in steps]).reshape(2, len(bases), shares)
    ratio = ratio_of_totals(*parts, same_work=same_work)
    return list(map(LaunchRatio, (tokens + ratio.log_ratio).tolist(), ratio.error.tolist(), ratio.shares.tolist()))


def share_ends(steps: Steps, shares: int) -> np.ndarray:
    """The engine times [s], from 0, at which each of ``shares`` equal shares of the tokens was made. [shares + 1]

    Between the ends of steps by interpolation. A step without tokens belongs to the next one that has some, or after
    the last of them to that.
    """
    makes = np.asarray(steps.tokens) > 0
    clock = np.cumsum(steps.seconds)
    made, at = np.cumsum(steps.tokens)[makes], clock[makes]
    at[-1] = clock[-1]
    return np.interp(np.linspace(0, made[-1], shares + 1), np.append(0, made), np.append(0, at))


def ratio_of_totals(base: np.ndarray, other: np.ndarray, same_work: bool = False) -> LaunchRatio:
    """The log of sum(base) / sum(other) with its standard error.

    ``base`` and ``other`` [launches, ..., shares]: seconds of each share, their number a power of two and at least
    ``FEWEST_SHARES``. ``same_work``: every launch computed the same steps. Arrays [launches, ...] come back.
    """
    totals = [x.sum(axis=-1, keepdims=True) for x in (base, other)]
    residual = base / totals[0] - other / totals[1]  # of each share; they sum to 0
    if same_work and (n := len(residual)) > 1:
        residual = (residual - residual.mean(axis=0)) * math.sqrt(n / (n - 1))
    error, shares = np.full(base.shape[:-1], np.nan), np.zeros(base.shape[:-1], dtype=int)
    while (n := residual.shape[-1]) >= FEWEST_SHARES:
        squares = (residual**2).sum(axis=-1)
        lagged = (residual[..., 1:] * residual[..., :-1]).sum(axis=-1)
        r = np.divide(lagged, squares, out=np.zeros_like(squares), where=squares > 0)
        fits = (shares == 0) & ((np.abs(r) <= 1.96 / math.sqrt(n)) | (n == FEWEST_SHARES))
        phi = np.clip(r + 1 / n, -0.9, 0.9)  # the mean r of independent shares is -1 / n
        error = np.where(fits, np.sqrt(n / (n - 1) * squares * (1 + phi) / (1 - phi)), error)
        shares = np.where(fits, n, shares)
        residual = residual.reshape(*residual.shape[:-1], n // 2, 2).sum(axis=-1)
    return LaunchRatio(np.log(totals[0] / totals[1])[..., 0], error, shares)


def effect(launches: Sequence[LaunchRatio], at_once: int = 1) -> Comparison:
    """The ratio of throughputs over launches, with the interval that this module's docstring describes.

    ``at_once``: launches that computed side by side.
    """
    y = [launch.log_ratio for launch in launches]
    if len(y) == 1:
        return _comparison(THROUGHPUT, y[0], launches[0].error, launches[0].shares - 1, 1)
    errors = np.array([launch.error for launch in launches])
    if len(y) == 2 and not np.isnan(errors).any():
        error = _error_of_two(np.array(y), errors, at_once)
        return _comparison(THROUGHPUT, np.mean(y), error, _OF_TWO_FREEDOM + 1, 2)
    error = error_over_launches(np.array(y), np.nan_to_num(errors), at_once)
    return _comparison(THROUGHPUT, np.mean(y), error, len(y) - 1, len(y))


def _error_of_two(log_ratios: np.ndarray, within: np.ndarray, at_once: int) -> float:
    """The error of the mean of two ``log_ratios``, moderated by what is expected; ``within``: their errors within."""
    by_launch = 2 * np.mean(within**2) + _LAYOUT_SD**2
    by_machine = (_MACHINE_SHARE * log_ratios.mean()) ** 2
    expected = by_launch / 2 + by_machine / max(1, 2 // at_once)
    own = np.var(log_ratios, ddof=1) / 2
    return math.sqrt((_OF_TWO_FREEDOM * expected + own) / (_OF_TWO_FREEDOM + 1))


def pooled_effects(alone: Mapping[str, Comparison], log_ratios: Mapping[str, Sequence[float]]) -> dict[str, Comparison]:
    """The effects of several configurations on one load, from their own noise and that which they have in common.

    alone: the effect of each by itself, which those keep that do not share the noise, and all where only one is left
        or the noise is known from fewer than ``POOLED_FREEDOM`` degrees of freedom
    log_ratios: of each to the baseline, by launch; all of the same launches
    """
    names = [name for name, y in log_ratios.items() if abs(np.mean(y)) <= _LIKE]
    while len(names) > 1:
        y = np.array([log_ratios[name] for name in names]).T
        square, freedom = noise(y)
        if freedom < POOLED_FREEDOM or not square > 0:
            return dict(alone)
        variances = np.var(y, axis=0, ddof=1)
        widest = int(np.argmax(variances))
        rest, of_rest = noise(np.delete(y, widest, axis=1))
        own, limit = len(y) - 1, _SCATTERS_MORE / len(names)
        if not of_rest or scipy.stats.f.sf(variances[widest] / (2 * rest), own, of_rest) > limit:
            if _baseline_scatters_more(y):
                return dict(alone)
            moderated = (_COMMON_FREEDOM * 2 * square + own * variances) / (_COMMON_FREEDOM + own)
            errors = dict(zip(names, np.sqrt(moderated / len(y)), strict=True))
            known_from, pooled = min(_COMMON_FREEDOM + own, freedom), dict(alone)
            for name in names:
                mean = float(np.mean(log_ratios[name]))
                pooled[name] = _comparison(alone[name].metric, mean, errors[name], known_from, len(y), POOLED)
            return pooled
        names.pop(widest)
    return dict(alone)


def _baseline_scatters_more(y: np.ndarray) -> bool:
    """Tests whether the baseline scatters more than ``y`` [launches, configurations], log ratios to it: F test at 1 %.

    Its noise is in all ratios of a launch alike, so it shows in their mean, and not in how they differ.
    """
    square, freedom = noise(y[:, 1:] - y[:, :1])  # of the others: the baseline drops out
    expected = square * (1 + 1 / y.shape[1])  # if the baseline is like them
    return bool(np.var(y.mean(axis=1), ddof=1) > scipy.stats.f.isf(_SCATTERS_MORE, len(y) - 1, freedom) * expected)


def noise(y: np.ndarray) -> tuple[float, int]:
    """The mean square of the noise of one configuration in one launch, and its degrees of freedom.

    ``y`` [launches, configurations]: log ratios to the baseline, which is a configuration too.
    """
    x = np.column_stack([np.zeros(len(y)), y])
    residual = x - x.mean(axis=0) - x.mean(axis=1, keepdims=True) + x.mean()
    freedom = (len(y) - 1) * y.shape[1]
    return float((residual**2).sum() / freedom) if freedom else math.nan, freedom


def effect_of_values(
    base: Iterable[float], other: Iterable[float], metric: str = "", at_once: int = 1
) -> Comparison:
    """The ratio of a percentile, from each launch's value of the base and the other engine, all above 0.

    at_once: launches that computed side by side
    metric: empty for a time that is none of METRICS, so that its comparison has no call
    """
    y = np.log(np.asarray(list(other), dtype=float)) - np.log(np.asarray(list(base), dtype=float))
    error = error_over_launches(y, np.zeros(len(y)), at_once) if len(y) > 1 else math.nan
    return _comparison(metric, y.mean(), error, len(y) - 1, len(y))


def for_other_requests(
    comparison: Comparison, base: Sequence[np.ndarray], other: Sequence[np.ndarray], quantile: float
) -> Comparison:
    """The effect on a percentile, with an interval for other requests of the same kind, and not for these alone.

    base, other: [requests] of float64 [values], above 0: what each request had in one launch of either engine.
    A p95 of 50 requests hangs on two or three of them. How much its ratio would change with others is told by the
    bootstrap over requests, the same for both (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter
    6). That variance and the variance over launches add up.
    """
    if comparison.low is None or comparison.high is None or comparison.smallest is None:
        return comparison
    counts = np.random.default_rng(0).multinomial(len(base), np.full(len(base), 1 / len(base)), size=_DRAWS)
    drawn = [np.log(_weighted_quantile(requests, counts, quantile)) for requests in (base, other)]
    error = float(np.std(drawn[1] - drawn[0]))
    center, low, high = (math.log(x) for x in (comparison.ratio, comparison.low, comparison.high))
    seen = math.hypot(math.log1p(comparison.smallest), sum(scipy.stats.norm.ppf([(1 + CONFIDENCE) / 2, 0.8])) * error)
    half = math.hypot((high - low) / 2, scipy.stats.norm.ppf((1 + CONFIDENCE) / 2) * error)
    ends = math.exp(center - half), math.exp(center + half)
    return replace(_with_interval(comparison, *ends), smallest=math.expm1(seen))


def _weighted_quantile(values: Sequence[np.ndarray], counts: np.ndarray, quantile: float) -> np.ndarray:
    """The quantile [draws] of the values, each request's taken as often as ``counts`` [draws, requests] says."""
    owner = np.repeat(np.arange(len(values)), [len(request) for request in values])
    pooled = np.concatenate(values)
    order = np.argsort(pooled)
    quantiles = np.empty(len(counts))
    for draw, count in enumerate(counts):  # all at once would take gigabytes for half a million values
        reached = np.cumsum(count[owner[order]])
        quantiles[draw] = pooled[order[np.searchsorted(reached, quantile * reached[-1])]]
    return quantiles


def error_over_launches(log_ratios: np.ndarray, within: np.ndarray, at_once: int = 1) -> np.ndarray:
    """The error of the mean of ``log_ratios`` [launches, ...] whose t quantile is half of the interval.

    ``within`` [launches, ...]: their standard errors within launches, below whose 80 % interval the half never is.
    ``at_once``: so many computed side by side and met the same machine; never below the error of their rounds' means.
    """
    n = len(log_ratios)
    between = np.std(log_ratios, axis=0, ddof=1) / math.sqrt(n)
    if at_once > 1 and (rounds := n // at_once) > 1:
        means = log_ratios[: rounds * at_once].reshape(rounds, at_once, *log_ratios.shape[1:]).mean(axis=1)
        between = np.maximum(between, np.std(means, axis=0, ddof=1) / math.sqrt(rounds))
    least = scipy.stats.norm.ppf((1 + _WITHIN_LAUNCHES) / 2) * np.sqrt((within**2).sum(axis=0)) / n
    return np.maximum(between, least / _quantile(n - 1))


def _comparison(
    metric: str, log_ratio: float, error: float, freedom: int, launches: int, basis: str = ""
) -> Comparison:
    """Makes a comparison; ``error``: half of its interval over the t quantile, NaN where the scatter is not known."""
    without = Comparison(metric, ENGINE, math.exp(log_ratio), None, None, launches, Call.UNDECIDED, basis=basis)
    if math.isnan(error):
        return without
    half = _quantile(freedom) * error
    comparison = _with_interval(without, math.exp(log_ratio - half), math.exp(log_ratio + half))
    return replace(comparison, smallest=math.expm1(detectable_errors(freedom) * error))


def _with_interval(comparison: Comparison, low: float, high: float) -> Comparison:
    """The comparison with this interval and its call; one launch has none, since launches differ."""
    has_call = comparison.metric and comparison.n > 1
    call = call_of(comparison.metric, ENGINE, low, high) if has_call else Call.UNDECIDED
    return replace(comparison, low=low, high=high, call=call)


@functools.cache
def _quantile(freedom: int) -> float:
    return float(scipy.stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def with_confidence(comparison: Comparison, confidence: float) -> Comparison:
    """The effect with an interval of another confidence than 95 %, where its noise is known from its own launches."""
    ratio, freedom = comparison.ratio, comparison.n - 1
    if not freedom or comparison.low is None or comparison.high is None:
        return comparison
    wider = float(scipy.stats.t.ppf((1 + confidence) / 2, freedom)) / _quantile(freedom)
    return _with_interval(comparison, *(ratio * (end / ratio) ** wider for end in (comparison.low, comparison.high)))


def fewest_launches(configurations: int) -> int:
    """The fewest launches that may decide the effects of so many configurations; one more for a single one."""
    if configurations * (FEWEST_POOLED - 1) >= POOLED_FREEDOM:
        return FEWEST_POOLED
    return FEWEST_LAUNCHES + (configurations == 1)


def goes_on(effects: Iterable[Comparison]) -> bool:
    """Tests whether another launch is needed: a question is undecided, or has too few launches."""
    questions = list(effects)
    fewest = {POOLED: FEWEST_POOLED, "": FEWEST_LAUNCHES + (len(questions) == 1)}
    return not all(_is_answered(question, fewest[question.basis]) for question in questions)


def _is_answered(question: Comparison, fewest: int) -> bool:
    """Tests whether a question is decided, with fewer launches than ``fewest`` at ``EARLY_CONFIDENCE``.

    A strict early look, after Haybittle 1971 and Peto et al. 1976, for large effects whose noise is their own.
    """
    if question.n < FEWEST_POOLED:
        return False
    return is_decided(question if question.n >= fewest else with_confidence(question, EARLY_CONFIDENCE))
