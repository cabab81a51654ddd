"""The timing gate's metrics with their floors and margins, and its looks.

Floors and margins are relative changes for the worse: 0.03 of a latency is 3 % longer, 0.03 of a throughput is 3 %
less. The statistics work on log(candidate / base), where a change and its reverse are equally far from 0, pairs average
to a ratio of geometric means, and a class is the mean of its cells; ``MetricRule.harm_of`` and ``relative_of`` convert
between the two (log 1.03 = 0.0296, -log 0.97 = 0.0305).

A FAIL needs an effect of at least the *floor* (the smallest that matters) besides its p-value; a PASS needs every
effect to be shown to be below its *margin* (the largest that may go unnoticed). Margins are wider for one cell than for
the whole, since the mean over many cells is known better; the only cell of a comparison has those of the whole
(kvbench/gate/timing/pairs.py). How they make a verdict: kvbench/gate/timing/judge.py.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvbench.common.errors import UsageError
from kvbench.common.stats import bounded_log
from kvbench.metrics.definitions import figure

OVERALL, CLASS, CELL = "overall", "class", "cell"
LEVELS = (OVERALL, CLASS, CELL)
MOST_PAIRS = 20  # all 2^20 sign flips of a hundred hypotheses take seconds, one more pair doubles them


@dataclass(frozen=True)
class MetricRule:
    """A judged metric. ``floor`` and ``margins`` (by level): relative changes for the worse, 0.03 is 3 %."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    floor: float
    margins: Mapping[str, float]

    def __post_init__(self) -> None:
        shares = (self.floor, *self.margins.values())
        if set(self.margins) != set(LEVELS) or not all(0 <= share < 1 for share in shares):
            raise UsageError(f"{self.name}: a floor and the margins of {', '.join(LEVELS)} are shares from 0 to 1")

    @classmethod
    def of(cls, name: str, floor: float, margins: Mapping[str, float]) -> MetricRule:
        judged = figure(name)
        title = judged.title if judged.statistic else judged.metric.title
        return cls(name, title, judged.unit, judged.higher_is_better, floor, margins)

    def margin_at(self, levels: Iterable[str]) -> float:
        return min(self.margins[level] for level in levels)

    def harm_of(self, relative: float) -> float:
        """A relative change for the worse (0.03: 3 % longer, 3 % less) as a distance in log(candidate / base)."""
        return -math.log1p(-relative) if self.higher_is_better else math.log1p(relative)

    def relative_of(self, harm: float) -> float | None:
        """The relative change for the worse of a distance in log(candidate / base); None of an infinite one."""
        if not math.isfinite(harm):
            return None
        return -math.expm1(-harm) if self.higher_is_better else math.expm1(bounded_log(harm))


@dataclass(frozen=True)
class Look:
    """A look at the pairs so far: ``alpha`` is what a FAIL may spend here, ``alpha_pass`` what a PASS may."""

    pairs: int
    alpha: float
    alpha_pass: float


@dataclass(frozen=True)
class TimingRules:
    """Metrics and looks. ``classes``: name -> globs over cells' names; None: the class of a cell is its workload."""

    metrics: tuple[MetricRule, ...]
    looks: tuple[Look, ...]
    classes: Mapping[str, tuple[str, ...]] | None = None

    def __post_init__(self) -> None:
        if not self.metrics or not self.looks:
            raise UsageError("a timing gate needs at least one metric and one look at its pairs")
        pairs = [look.pairs for look in self.looks]
        if pairs != sorted(set(pairs)):
            raise UsageError(f"looks after {pairs} pairs: write them in ascending order")
        for look in self.looks:
            for name, alpha in (("alpha", look.alpha), ("alpha_pass", look.alpha_pass)):
                if not 2.0**-look.pairs <= alpha < 0.5:
                    raise UsageError(
                        f"{name} of {alpha} after {look.pairs} pairs: the smallest p of {look.pairs} pairs is "
                        f"{2.0**-look.pairs:.2g}, so it could never be met (or it is above 0.5): look after more pairs"
                    )

    @property
    def alpha(self) -> float:
        """The largest chance of a false alarm in a whole comparison: the sum over the looks."""
        return sum(look.alpha for look in self.looks)

    @property
    def fewest_to_fail(self) -> int:
        """Pairs from which on the first look, taken early, can fail: the smallest p of n pairs is 2^-n."""
        return math.ceil(-math.log2(self.looks[0].alpha))

    @property
    def fewest_to_pass(self) -> int:
        """Pairs from which on the first look, taken early, can pass."""
        return math.ceil(-math.log2(self.looks[0].alpha_pass))

    def look_for(self, pairs: int) -> Look:
        """The first look that takes at least so many pairs, or the last one."""
        return next((look for look in self.looks if look.pairs >= pairs), self.looks[-1])

    def class_of(self, cell: str) -> str:
        """The first class whose globs match the cell's name, or its workload (the name up to the first slash)."""
        for name, globs in (self.classes or {}).items():
            if any(fnmatch.fnmatchcase(cell, glob) for glob in globs):
                return name
        return cell.split("/", 1)[0]

    def empty_classes(self, cells: Iterable[str]) -> list[str]:
        """The classes that none of the cells belongs to."""
        used = {self.class_of(cell) for cell in cells}
        return [name for name in self.classes or {} if name not in used]


# Floors, margins and looks: the project's design, simulated in tests/benchmarks/gate_power.md. Three looks that spend
# 0.004 + 0.0025 + 0.0025 and 0.001 of the served check keep false alarms of a comparison at 1 % at most (union bound).
# A PASS may err in 5 %.
DEFAULT_RULES = TimingRules(
    metrics=(
        MetricRule.of("output_throughput", 0.01, {OVERALL: 0.02, CLASS: 0.03, CELL: 0.04}),
        MetricRule.of("p95_ttft_ms", 0.02, {OVERALL: 0.04, CLASS: 0.05, CELL: 0.10}),
        MetricRule.of("p95_itl_ms", 0.01, {OVERALL: 0.03, CLASS: 0.03, CELL: 0.06}),
    ),
    looks=(Look(8, 0.004, 0.02), Look(12, 0.0025, 0.015), Look(16, 0.0025, 0.015)),
)
