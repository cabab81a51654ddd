"""What stored runs are made of, and the series that they make: one metric of one cell on one machine over time."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

VALID, INVALID, INCOMPLETE = "valid", "invalid", "incomplete"


@dataclass(frozen=True)
class Metric:
    """What is followed, named as in kvbench/runs/metric_names.py. ``better``: +1 when more is, -1 less, 0 neither."""

    name: str
    title: str
    unit: str
    better: int


METRICS = (
    Metric("output_throughput", "output throughput", "tokens/s", +1),
    Metric("p95_ttft_ms", "p95 TTFT", "ms", -1),
    Metric("p95_itl_ms", "p95 ITL", "ms", -1),
    Metric("kv_cache_usage_perc", "peak KV use", "share", 0),
    Metric("kv_waste_share", "reserved, empty KV", "share", -1),
    Metric("prefix_cache_hit_rate", "prefix hit rate", "share", +1),
)


@dataclass(frozen=True)
class Measured:
    """A cell in one run: metric name -> its value in each repeat that has one.

    ``definition``: a fingerprint of its settings, its load and the workload's requests: what is asked of the engine.
    """

    valid: bool
    definition: str
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run. ``place``: what it was measured on, by name: values of two places are never compared."""

    folder: Path
    workload: str
    started: datetime
    complete: bool
    sha: str | None
    dirty: bool
    release: str | None
    versions: Mapping[str, str]
    place: tuple[tuple[str, str], ...]
    cells: Mapping[str, Measured]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commit(self) -> str:
        """Short, with a + where files differed from it."""
        return f"{self.sha[:7] if self.sha else 'no commit'}{'+' if self.dirty else ''}"


@dataclass(frozen=True, eq=False)
class Point:
    """A metric of a cell in one run. ``state``: only ``valid`` counts; ``values``: one a repeat."""

    run: StoredRun
    state: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median over the repeats."""
        return statistics.median(self.values)


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one cell on one machine, oldest run first. No point: the run did not measure it."""

    workload: str
    cell: str
    metric: Metric
    place: tuple[tuple[str, str], ...]
    definition: str
    points: tuple[Point, ...]

    @property
    def counted(self) -> tuple[Point, ...]:
        """What a trend is made of: valid cells of complete runs."""
        return tuple(point for point in self.points if point.state == VALID)

    @property
    def machine(self) -> str:
        return place_words(self.place)

    @property
    def change(self) -> float | None:
        """Of the last counted run against the one before: new / old - 1."""
        return relative(*(point.value for point in self.counted[-2:])) if len(self.counted) > 1 else None


def relative(old: float, new: float) -> float | None:
    """new / old - 1; None where the old one is 0."""
    return new / old - 1 if old else None


def place_words(place: Iterable[tuple[str, str]]) -> str:
    return ", ".join(value for _, value in place)


def all_series(runs: Iterable[StoredRun]) -> list[Series]:
    """Every metric of every cell that any run has a value of, machine by machine, in the order first met."""
    points: dict[tuple[Any, ...], list[Point]] = {}
    for run in runs:
        for cell, measured in run.cells.items():
            state = INCOMPLETE if not run.complete else VALID if measured.valid else INVALID
            for metric in METRICS:
                if values := measured.values.get(metric.name):
                    key = (run.workload, run.place, cell, measured.definition, metric.name)
                    points.setdefault(key, []).append(Point(run, state, values))
    names = [metric.name for metric in METRICS]
    found = [
        Series(workload, cell, METRICS[names.index(name)], place, definition, tuple(each))
        for (workload, place, cell, definition, name), each in points.items()
    ]
    first = {series.definition: rank for rank, series in reversed(list(enumerate(found)))}

    def order(series: Series) -> tuple[Any, ...]:
        cell = _natural(series.cell)
        return series.workload, series.place, cell, first[series.definition], names.index(series.metric.name)

    return sorted(found, key=order)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts c4 before c32."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
