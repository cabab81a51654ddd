"""Comparison: the one answer to whether a configuration is better or worse than another in a metric. Pure.

The unit is what was launched afresh: a repeat, a launch, a run. A ratio is that of the configuration to the baseline.

- level: every value lies within the clock's margin of 1 (of repeats), or the interval does (of launches and runs);
- better or worse: it is not level and the 95 % interval excludes 1, on the good or the bad side of the metric;
- undecided: everything else. The run does not show a difference, nor that there is none.

Fewer than ``FEWEST`` repeats decide nothing: three on one side of 1 happen by chance one time in four, so the spread
alone makes no call.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from kvbench.common.stats import bounded_log, detectable_shift, t_interval, welch_interval
from kvbench.metrics.definitions import ENGINE, SERVED, SIMULATED, figure

FEWEST = 3  # repeats for a call
MARGINS = {ENGINE: 0.02, SERVED: 0.05, SIMULATED: 0.05}
"""How far from 1 a ratio may lie that is called level, by clock."""


class Call(StrEnum):
    """The words of a comparison on the configuration."""

    BETTER = "better"
    WORSE = "worse"
    LEVEL = "level"
    UNDECIDED = "undecided"


_OPPOSITE = {Call.BETTER: Call.WORSE, Call.WORSE: Call.BETTER}
_FORMER_CALLS = {"ahead": Call.BETTER, "behind": Call.WORSE, "open": Call.UNDECIDED}


def stored_call(word: str) -> Call:
    """The call that a file holds, in today's words or those of older versions. Raises ValueError for another word."""
    return _FORMER_CALLS.get(word) or Call(word)


@dataclass(frozen=True)
class Comparison:
    """One metric of a configuration as a ratio to another's under the same load.

    metric: the name of a figure (``p95_ttft_ms``); clock: SERVED, ENGINE or SIMULATED
    ratio: 1 is no effect; low, high: its 95 % interval, None where the scatter is not known
    n: repeats, launches or runs; values: their ratios, where they are paired
    smallest: the least relative change that they find in 4 of 5 cases; None where it is not known
    basis: how the interval was made, where that must be said
    """

    metric: str
    clock: str
    ratio: float
    low: float | None
    high: float | None
    n: int
    call: Call
    values: tuple[float, ...] = ()
    smallest: float | None = None
    basis: str = ""

    @property
    def decided(self) -> bool:
        return self.call != Call.UNDECIDED

    @property
    def half_width(self) -> float:
        """Half of the interval, as a relative change; infinite where the scatter is not known."""
        return math.inf if self.low is None or self.high is None else math.sqrt(self.high / self.low) - 1

    @property
    def spread(self) -> tuple[float, float]:
        """The least and the largest of the paired ratios; the ratio itself without any."""
        return min(self.values, default=self.ratio), max(self.values, default=self.ratio)

    def inverse(self) -> Comparison:
        """The other configuration against this one."""
        low, high = (None if end is None else 1 / end for end in (self.high, self.low))
        values = tuple(1 / value for value in self.values)
        call = _OPPOSITE.get(self.call, self.call)
        return replace(self, ratio=1 / self.ratio, low=low, high=high, call=call, values=values)


def call_of(metric: str, clock: str, low: float | None, high: float | None) -> Call:
    """The call of an interval: level within the clock's margin, better or worse where it excludes 1."""
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return Call.UNDECIDED
    margin = MARGINS[clock]
    if low >= 1 - margin and high <= 1 + margin:
        return Call.LEVEL
    return Call.UNDECIDED if low <= 1.0 <= high else _side(metric, low > 1)


def _side(metric: str, above: bool) -> Call:
    """The call of a ratio above or below 1; UNDECIDED for a metric without a better direction."""
    if not figure(metric).metric.better:
        return Call.UNDECIDED
    return Call.BETTER if above == figure(metric).higher_is_better else Call.WORSE


def paired(metric: str, clock: str, values: Mapping[int, float], base: Mapping[int, float]) -> Comparison | None:
    """The median ratio over repeats of both, with Student's t interval of the mean log ratio; None without a pair."""
    both = sorted(values.keys() & base.keys())
    ratios = tuple(values[r] / base[r] for r in both if values[r] > 0 and base[r] > 0)
    if not ratios:
        return None
    median, n, margin = float(np.median(ratios)), len(ratios), MARGINS[clock]
    if n < FEWEST:
        return Comparison(metric, clock, median, None, None, n, Call.UNDECIDED, ratios)
    low, high = (float(end) for end in np.exp(bounded_log(t_interval(np.log(ratios)))))
    if min(ratios) >= 1 - margin and max(ratios) <= 1 + margin:
        call = Call.LEVEL
    elif low <= 1.0 <= high:
        call = Call.UNDECIDED
    else:
        call = _side(metric, median > 1)
    smallest = float(np.expm1(bounded_log(detectable_shift(np.log(ratios)))))
    return Comparison(metric, clock, median, low, high, n, call, ratios, smallest)


def independent(metric: str, clock: str, values: Sequence[float], base: Sequence[float]) -> Comparison | None:
    """Compares repeats that are not paired, such as those of two runs, by the ratio of their geometric means.

    None where a value is 0. Its interval is Welch's, on logarithms; None with fewer than two values on a side. Fewer
    than ``FEWEST`` on a side decide nothing.
    """
    if not values or not base or min(*values, *base) <= 0:
        return None
    old, new = (np.log(np.asarray(side, dtype=float)) for side in (base, values))
    ratio, n = math.exp(bounded_log(new.mean() - old.mean())), min(len(values), len(base))
    low, high = (math.exp(bounded_log(end)) for end in welch_interval(old, new))
    if math.isnan(low):
        return Comparison(metric, clock, ratio, None, None, n, Call.UNDECIDED)
    call = Call.UNDECIDED if n < FEWEST else call_of(metric, clock, low, high)
    return Comparison(metric, clock, ratio, low, high, n, call)


def contradicts(paired_ratio: float, shown: float, decimals: int = 2, margin: float = MARGINS[SERVED]) -> bool:
    """Tests whether ``shown``, the ratio of the two values beside a paired ratio, is visibly another one.

    That is one on the other side of 1 as both are written, with so many ``decimals``, or more than ``margin`` away.
    """
    sides = (round(paired_ratio, decimals) - 1) * (round(shown, decimals) - 1)
    return sides < 0 or abs(math.log(shown / paired_ratio)) > math.log1p(margin)
