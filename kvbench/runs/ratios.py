"""Ratios of two configurations, paired by repeat, and the one rule of the verdict on them. Pure.

The unit is the repeat: one fresh server of each configuration under identical requests. The rule, which sentences,
tables and figures follow:

- level: from 3 repeats on, when every repeat's ratio lies within 5 % of 1;
- higher or lower (ahead, behind): from 3 repeats on, when it is not level and the 95 % t interval of the mean log
  ratio excludes 1;
- unclear ("not told apart"): everything else. The run does not show a difference, nor that there is none.

Three repeats on one side of 1 happen by chance one time in four, so the spread alone makes no verdict.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kvbench.common.stats import detectable_shift, t_interval

LEVEL = 0.05  # how far from 1 a repeat's ratio may lie where all are called level
FEWEST = 3  # repeats for a verdict
HIGHER, LOWER, SAME, UNCLEAR = "higher", "lower", "level", "unclear"


@dataclass(frozen=True)
class RepeatSpread:
    """Median, minimum and maximum over repeats."""

    median: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Ratio(RepeatSpread):
    """Paired ratios a/b, one a repeat; ``ci``: 95 % t interval of the mean log ratio, back-transformed."""

    values: tuple[float, ...]
    ci: tuple[float, float] | None

    @property
    def verdict(self) -> str:
        """HIGHER, LOWER, SAME or UNCLEAR, by the rule in this module's docstring."""
        if self.ci is None:
            return UNCLEAR
        if self.low >= 1 - LEVEL and self.high <= 1 + LEVEL:
            return SAME
        if self.ci[0] <= 1.0 <= self.ci[1]:
            return UNCLEAR
        return HIGHER if self.median > 1.0 else LOWER

    @property
    def detectable(self) -> float | None:
        """The smallest effect that these repeats could have shown, as a share of 1; None: too few for a verdict."""
        return float(np.expm1(detectable_shift(np.log(self.values)))) if self.n >= FEWEST else None


def contradicts(paired: float, shown: float, decimals: int = 2) -> bool:
    """Whether ``shown``, the ratio of the two values beside a paired ratio, is visibly another one.

    That is one on the other side of 1 as both are written, with so many ``decimals``, or more than ``LEVEL`` away.
    """
    sides = (round(paired, decimals) - 1) * (round(shown, decimals) - 1)
    return sides < 0 or abs(np.log(shown / paired)) > np.log1p(LEVEL)


def paired_ratio(a: Mapping[int, float], b: Mapping[int, float]) -> Ratio | None:
    """a/b per repeat that both have with positive values; None when there is no such repeat."""
    values = tuple(a[r] / b[r] for r in sorted(a.keys() & b.keys()) if a[r] > 0 and b[r] > 0)
    if not values:
        return None
    low, high = np.exp(t_interval(np.log(values)))
    ci = (float(low), float(high)) if len(values) >= FEWEST else None
    return Ratio(float(np.median(values)), min(values), max(values), len(values), values, ci)
