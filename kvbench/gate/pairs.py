"""The pairs of a comparison as one table, and the hypotheses that are made of it.

A *pair* is one launch of the base and one of the candidate under the same load, in random order. Its number for a cell
and a metric is log(candidate / base). A pair counts with all its cells or not at all: which pairs are missing may
depend on how they went, and the flips of signflip.py turn a whole pair at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.gate.rules import CELL, CLASS, OVERALL, MetricRule


@dataclass(frozen=True)
class PairTable:
    """``log_ratio`` [pairs, cells, metrics] = log(candidate / base); ``classes``: the class of each cell.

    All NaN for a metric of a cell: the cell has no such metric (answers of one token have no ITL). ValueError where
    it has one in some of the pairs only.
    """

    log_ratio: np.ndarray
    cells: tuple[str, ...]
    classes: tuple[str, ...]
    metrics: tuple[MetricRule, ...]

    def __post_init__(self) -> None:
        y = self.log_ratio
        if y.ndim != 3 or y.shape[1:] != (len(self.cells), len(self.metrics)) or len(self.classes) != len(self.cells):
            raise ValueError(
                f"a table of shape {y.shape} for {len(self.cells)} cells, {len(self.classes)} classes of cells and "
                f"{len(self.metrics)} metrics: it must be [pairs, cells, metrics]"
            )
        if len(set(self.cells)) != len(self.cells):
            raise ValueError("a cell is there twice: names of cells must differ")
        if np.isinf(y).any():
            raise ValueError(f"{self._where(np.isinf(y))} is infinite: a value of 0 or below cannot be compared")
        gaps = np.isnan(y) & ~np.isnan(y).all(axis=0)
        if gaps.any():
            raise ValueError(f"{self._where(gaps)} is missing: leave that pair out, or repeat it")

    @classmethod
    def from_values(
        cls,
        base: np.ndarray,
        candidate: np.ndarray,
        cells: Sequence[str],
        classes: Sequence[str],
        metrics: Sequence[MetricRule],
    ) -> PairTable:
        """From what was measured, each [pairs, cells, metrics] in the metrics' units; NaN: not there."""
        base, candidate = (np.asarray(x, dtype=np.float64) for x in (base, candidate))
        with np.errstate(divide="ignore", invalid="ignore"):
            y = np.log(candidate) - np.log(base)
        impossible = (base <= 0) | (candidate <= 0)
        return cls(np.where(impossible, np.inf, y), tuple(cells), tuple(classes), tuple(metrics))

    @property
    def pairs(self) -> int:
        return len(self.log_ratio)

    def first(self, pairs: int) -> PairTable:
        """The table of the first so many pairs."""
        return PairTable(self.log_ratio[:pairs], self.cells, self.classes, self.metrics)

    def _where(self, which: np.ndarray) -> str:
        pair, cell, metric = np.argwhere(which)[0]
        return f"{self.metrics[metric].name} of {self.cells[cell]} in pair {pair + 1}"


@dataclass(frozen=True)
class Hypothesis:
    """One thing that may have become worse: ``metric`` at ``level`` over ``cells`` (places in the table).

    ``where``: the name of the cell or the class, empty for overall.
    """

    level: str
    where: str
    metric: MetricRule
    metric_index: int
    cells: tuple[int, ...]

    @property
    def id(self) -> str:
        return "/".join(part for part in (self.level, self.where, self.metric.name) if part)

    @property
    def title(self) -> str:
        """Such as ``p95 TTFT of mixed/paged-p16-c32``, ``p95 TTFT of class mixed``, ``p95 TTFT over all cells``."""
        place = {CELL: f"of {self.where}", CLASS: f"of class {self.where}", OVERALL: "over all cells"}
        return f"{self.metric.title} {place[self.level]}"

    @property
    def floor(self) -> float:
        """[log ratio]"""
        return self.metric.harm_of(self.metric.floor)

    @property
    def margin(self) -> float:
        """[log ratio]"""
        return self.metric.harm_of(self.metric.margins[self.level])


@dataclass(frozen=True)
class Hypotheses:
    """``harm`` [pairs, hypotheses]: log ratio, signed so that worse is positive. ``notes``: what was left out."""

    each: tuple[Hypothesis, ...]
    harm: np.ndarray
    notes: tuple[str, ...] = ()

    def log_ratio(self) -> np.ndarray:
        """[pairs, hypotheses] log(candidate / base), not turned."""
        return self.harm * np.array([-1.0 if h.metric.higher_is_better else 1.0 for h in self.each])


def hypotheses(table: PairTable) -> Hypotheses:
    """Each metric overall, per class and per cell; means over cells are means of log ratios.

    A class is left out where there is only one (it is the whole) or where it has only one cell (it is that cell), the
    whole where there is only one cell.
    """
    made: list[Hypothesis] = []
    notes: list[str] = []
    for index, metric in enumerate(table.metrics):
        there = [c for c in range(len(table.cells)) if not np.isnan(table.log_ratio[:, c, index]).any()]
        notes += [f"{name} has no {metric.title}" for c, name in enumerate(table.cells) if c not in there]
        groups: dict[str, list[int]] = {}
        for c in there:
            groups.setdefault(table.classes[c], []).append(c)
        if len(there) > 1:
            made.append(Hypothesis(OVERALL, "", metric, index, tuple(there)))
        if len(groups) > 1:
            made += [Hypothesis(CLASS, name, metric, index, tuple(g)) for name, g in groups.items() if len(g) > 1]
        made += [Hypothesis(CELL, table.cells[c], metric, index, (c,)) for c in there]
    made.sort(key=lambda h: (OVERALL, CLASS, CELL).index(h.level))  # stable: metrics stay in their order
    columns = [
        table.log_ratio[:, h.cells, h.metric_index].mean(axis=1) * (-1.0 if h.metric.higher_is_better else 1.0)
        for h in made
    ]
    harm = np.stack(columns, axis=1) if columns else np.empty((table.pairs, 0))
    return Hypotheses(tuple(made), harm, tuple(notes))
