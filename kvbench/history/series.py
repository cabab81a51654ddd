"""Series of stored runs: one metric of one cell on one machine over time."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvbench.metrics.definitions import Figure
from kvbench.runs.stored import StoredRun, trend_figures

VALID, INVALID, INCOMPLETE = "valid", "invalid", "incomplete"


def title_of(shown: Figure) -> str:
    """The title of a series: p95 TTFT; output throughput (whole run)."""
    title = shown.metric.title
    if shown.statistic:
        title = shown.title
    return title + " (whole run)" * (shown.metric.steady and not shown.steady)


@dataclass(frozen=True, eq=False)
class TrendPoint:
    """A figure of a cell in one run. Only the state ``valid`` counts. ``values``: one for each repeat."""

    run: StoredRun
    state: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median over the repeats."""
        return statistics.median(self.values)


@dataclass(frozen=True)
class SeriesKey:
    """The identity of a series."""

    workload: str
    place: tuple[tuple[str, str], ...]
    cell: str
    definition: str
    figure: Figure

    def of_steady(self) -> SeriesKey:
        return replace(self, figure=self.figure.of_steady(True))

    @property
    def machine(self) -> str:
        return ", ".join(value for _, value in self.place)


@dataclass(frozen=True, eq=False)
class Series:
    """A figure of one cell on one machine, oldest run first, without runs that did not measure it."""

    key: SeriesKey
    points: tuple[TrendPoint, ...]

    @property
    def figure(self) -> Figure:
        return self.key.figure

    @property
    def counted(self) -> tuple[TrendPoint, ...]:
        """The valid cells of complete runs."""
        return tuple(point for point in self.points if point.state == VALID)

    @property
    def change(self) -> float | None:
        """The change between the last two counted runs: new / old - 1, None where old is 0."""
        last = [point.value for point in self.counted[-2:]]
        if len(last) < 2 or not last[0]:
            return None
        return last[1] / last[0] - 1


def all_series(runs: Iterable[StoredRun]) -> list[Series]:
    """Every figure of every cell that has a value in any run, by workload, machine, cell and definition.

    The whole run is left out where every run has the steady window; else it is there of all, to compare like with like.
    """
    points: dict[SeriesKey, list[TrendPoint]] = {}
    ranks_of_figures = {shown: rank for rank, shown in enumerate(trend_figures())}
    ranks: dict[str, int] = {}  # of definitions, by when they were first seen
    for run in runs:
        for name, cell in run.cells.items():
            state = VALID if cell.valid else INVALID
            if not run.complete:
                state = INCOMPLETE
            ranks.setdefault(cell.definition, len(ranks))
            for shown, values in cell.values.items():
                key = SeriesKey(run.workload, run.place, name, cell.definition, shown)
                points.setdefault(key, []).append(TrendPoint(run, state, values))

    def order(key: SeriesKey) -> tuple[Any, ...]:
        parts = re.split(r"(\d+)", key.cell)
        natural = tuple((int(part), "") if part.isdecimal() else (-1, part) for part in parts)  # c4 < c32
        return key.workload, key.place, natural, ranks[key.definition], ranks_of_figures[key.figure]

    return [
        Series(key, tuple(points[key]))
        for key in sorted(points, key=order)
        if key.of_steady() == key or len(points.get(key.of_steady(), ())) < len(points[key])
    ]
