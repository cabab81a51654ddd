"""The pairs of a comparison as one table, and the hypotheses that are made of it.

A *pair* is one launch of the base and one of the candidate under the same load, in random order; its value for a cell
and a metric is log(candidate / base). A pair counts with all its cells or not at all: which cells are missing may
depend on how the pair went, and signflip.py flips a whole pair at once.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.rules import CELL, CLASS, LEVELS, OVERALL, MetricRule


@dataclass(frozen=True)
class OneSided:
    """A metric of a cell (indices in the table) that one side has in all pairs, and ``lacking`` in none."""

    lacking: str
    cell: int
    metric: int


@dataclass(frozen=True)
class PairTable:
    """The log ratios of all pairs, cells and metrics.

    A metric of a cell is NaN in all pairs if neither side has it (answers of one token have no ITL) or only one side (a
    candidate that sends answers in one piece has no ITL). Raises ValueError if it is NaN in some.

    log_ratio [pairs, cells, metrics]: log(candidate / base); classes: of the cells
    one_sided: metrics of cells that only one side has
    base, candidate [pairs, cells, metrics]: what was measured, where that is known, in the metrics' units
    """

    log_ratio: np.ndarray
    cells: tuple[str, ...]
    classes: tuple[str, ...]
    metrics: tuple[MetricRule, ...]
    one_sided: tuple[OneSided, ...] = ()
    base: np.ndarray | None = None
    candidate: np.ndarray | None = None

    def __post_init__(self) -> None:
        y = self.log_ratio
        gaps = np.isnan(y) & ~np.isnan(y).all(axis=0)
        for wrong, what in (
            (np.isinf(y), "is infinite: a value of 0 or below cannot be compared"),
            (gaps, "is missing: leave that pair out, or repeat it"),
        ):
            if wrong.any():
                pair, cell, metric = np.argwhere(wrong)[0]
                raise ValueError(f"{self.metrics[metric].name} of {self.cells[cell]} in pair {pair + 1} {what}")

    @classmethod
    def from_values(
        cls,
        base: np.ndarray,
        candidate: np.ndarray,
        cells: Sequence[str],
        classes: Sequence[str],
        metrics: Sequence[MetricRule],
    ) -> PairTable:
        """The table of measured values [pairs, cells, metrics], NaN where there is none. Raises ValueError."""
        base, candidate = (np.asarray(x, dtype=np.float64) for x in (base, candidate))
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.log(candidate) - np.log(base)
        one_sided = []
        for cell, metric in itertools.product(range(y.shape[1]), range(y.shape[2])):
            lacking = []
            for side, values in ((BASE, base), (CANDIDATE, candidate)):
                missing = np.isnan(values[:, cell, metric])
                if missing.any() and not missing.all():
                    where = f"{metrics[metric].name} of {cells[cell]} in pair {missing.argmax() + 1}"
                    raise ValueError(f"{where} is missing ({side}): leave that pair out, or repeat it")
                if len(y) and missing.all():
                    lacking.append(side)
            if len(lacking) == 1:
                one_sided.append(OneSided(lacking[0], cell, metric))
        y = np.where((base <= 0) | (candidate <= 0), np.inf, y)
        return cls(y, tuple(cells), tuple(classes), tuple(metrics), tuple(one_sided), base, candidate)

    @property
    def pairs(self) -> int:
        return len(self.log_ratio)

    def first(self, pairs: int) -> PairTable:
        base, candidate = (None if x is None else x[:pairs] for x in (self.base, self.candidate))
        return replace(self, log_ratio=self.log_ratio[:pairs], base=base, candidate=candidate)

    def means(self, cells: Sequence[int], metric: int) -> dict[str, float]:
        """The geometric mean over the pairs and ``cells`` by side; empty without values."""
        if self.base is None or self.candidate is None:
            return {}
        values = {BASE: self.base, CANDIDATE: self.candidate}
        means = {side: float(np.exp(np.log(x[:, cells, metric]).mean())) for side, x in values.items()}
        return {side: mean for side, mean in means.items() if not np.isnan(mean)}


@dataclass(frozen=True)
class HarmHypothesis:
    """The hypothesis that a metric became worse at a level, over ``cells`` (indices in the table).

    where: the name of the cell or the class, empty for overall
    stands_for: the levels that it covers, its own among them: an only cell is also its class and the whole
    """

    level: str
    where: str
    metric: MetricRule
    metric_index: int
    cells: tuple[int, ...]
    stands_for: tuple[str, ...]

    @property
    def id(self) -> str:
        return "/".join(part for part in (self.level, self.where, self.metric.name) if part)

    @property
    def title(self) -> str:
        """A title such as ``p95 TTFT of class mixed`` or ``p95 TTFT over all cells``."""
        return f"{self.metric.title} {in_words(self.level, self.where)}"

    @property
    def sign(self) -> float:
        """The sign of a log ratio for the worse."""
        return -1.0 if self.metric.higher_is_better else 1.0

    @property
    def floor(self) -> float:
        """The floor as a log ratio."""
        return self.metric.harm_of(self.metric.floor)

    @property
    def margin_share(self) -> float:
        """The tightest margin of the levels that it stands for, as a relative change for the worse (0.03: 3 %)."""
        return self.metric.margin_at(self.stands_for)

    @property
    def margin(self) -> float:
        """The margin as a log ratio."""
        return self.metric.harm_of(self.margin_share)


def in_words(level: str, where: str) -> str:
    return {CELL: f"of {where}", CLASS: f"of class {where}", OVERALL: "over all cells"}[level]


@dataclass(frozen=True)
class Hypotheses:
    """All hypotheses with their ``harm`` [pairs, hypotheses], the log ratio signed so that worse is positive.

    notes: what was left out
    """

    each: tuple[HarmHypothesis, ...]
    harm: np.ndarray
    notes: tuple[str, ...] = ()

    def log_ratio(self) -> np.ndarray:
        """The log(candidate / base) [pairs, hypotheses]."""
        return self.harm * np.array([h.sign for h in self.each])


def hypotheses(table: PairTable) -> Hypotheses:
    """Makes the hypotheses: each metric overall, per class and per cell, as means of log ratios.

    No test is made twice: a class is left out if it is the only one or has one cell, and overall if there is one cell.
    The hypothesis that remains then has the tightest of their margins, so that one cell is judged as strictly as the
    whole.
    """
    made: list[HarmHypothesis] = []
    notes: list[str] = []
    one_sided = {(entry.cell, entry.metric) for entry in table.one_sided}
    for index, metric in enumerate(table.metrics):
        groups: dict[str, list[int]] = {}
        for c, name in enumerate(table.cells):
            if not np.isnan(table.log_ratio[:, c, index]).any():
                groups.setdefault(table.classes[c], []).append(c)
            elif (c, index) not in one_sided:
                notes.append(f"{name} has no {metric.title}")
        cells = tuple(sorted(c for group in groups.values() for c in group))
        if len(cells) > 1:
            stands_for = (OVERALL,)
            if len(groups) == 1:
                stands_for = (OVERALL, CLASS)
            made.append(HarmHypothesis(OVERALL, "", metric, index, cells, stands_for))
        for name, group in groups.items():
            if len(groups) > 1 and len(group) > 1:
                made.append(HarmHypothesis(CLASS, name, metric, index, tuple(group), (CLASS,)))
            stands_for = (CLASS, CELL) if len(group) == 1 else (CELL,)
            if len(cells) == 1:
                stands_for = LEVELS
            made += [HarmHypothesis(CELL, table.cells[c], metric, index, (c,), stands_for) for c in group]
    made.sort(key=lambda h: (LEVELS.index(h.level), h.metric_index, h.cells))
    harm = np.empty((table.pairs, len(made)))
    for i, h in enumerate(made):
        harm[:, i] = h.sign * table.log_ratio[:, h.cells, h.metric_index].mean(axis=1)
    return Hypotheses(tuple(made), harm, tuple(notes))
