"""Stored runs, and the series made of them: one metric of one cell on one machine over time."""

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
    """A followed metric, named as in kvbench/runs/metric_names.py. ``better``: +1 when more is, -1 less, 0 neither."""

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
class StoredCell:
    """A cell in one run. ``values``: metric name -> one value a repeat.

    ``definition``: hash of its settings, its load and the workload's requests.
    """

    valid: bool
    definition: str
    values: Mapping[str, tuple[float, ...]]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """One run of a sweep. ``place``: machine, device and model as (name, value); places are never compared."""

    folder: Path
    workload: str
    started: datetime
    complete: bool
    sha: str | None
    dirty: bool
    release: str | None
    versions: Mapping[str, str]
    place: tuple[tuple[str, str], ...]
    cells: Mapping[str, StoredCell]

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def commit(self) -> str:
        """Seven digits, with a + where files differed from the commit."""
        return f"{self.sha[:7] if self.sha else 'no commit'}{'+' if self.dirty else ''}"


@dataclass(frozen=True, eq=False)
class TrendPoint:
    """A metric of a cell in one run. Only the state ``valid`` counts. ``values``: one a repeat."""

    run: StoredRun
    state: str
    values: tuple[float, ...]

    @property
    def value(self) -> float:
        """The median over the repeats."""
        return statistics.median(self.values)


@dataclass(frozen=True, eq=False)
class Series:
    """One metric of one cell on one machine, oldest run first; a run that did not measure it has no point."""

    workload: str
    cell: str
    metric: Metric
    place: tuple[tuple[str, str], ...]
    definition: str
    points: tuple[TrendPoint, ...]

    @property
    def counted(self) -> tuple[TrendPoint, ...]:
        """Valid cells of complete runs."""
        return tuple(point for point in self.points if point.state == VALID)

    @property
    def machine(self) -> str:
        return ", ".join(value for _, value in self.place)

    @property
    def key(self) -> tuple[object, ...]:
        """The same for this series and a part of it."""
        return (self.workload, self.place, self.cell, self.definition, self.metric.name)

    @property
    def change(self) -> float | None:
        """Of the last counted run against the one before: new / old - 1; None without two, or where old is 0."""
        old, new = [None, None, *(point.value for point in self.counted[-2:])][-2:]
        return new / old - 1 if old and new is not None else None


def all_series(runs: Iterable[StoredRun]) -> list[Series]:
    """Every metric of every cell that has a value in any run, by workload, machine, cell and definition."""
    points: dict[tuple[Any, ...], list[TrendPoint]] = {}
    first_seen: dict[str, int] = {}  # definition -> rank
    for run in runs:
        for cell, stored in run.cells.items():
            state = INCOMPLETE if not run.complete else VALID if stored.valid else INVALID
            rank = first_seen.setdefault(stored.definition, len(first_seen))
            for number, metric in enumerate(METRICS):
                if values := stored.values.get(metric.name):
                    key = (run.workload, run.place, _natural(cell), rank, number, cell, stored.definition)
                    points.setdefault(key, []).append(TrendPoint(run, state, values))
    return [
        Series(workload, cell, METRICS[number], place, definition, tuple(found))
        for (workload, place, _, _, number, cell, definition), found in sorted(points.items(), key=lambda item: item[0])
    ]


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    """Sorts c4 before c32."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name))
