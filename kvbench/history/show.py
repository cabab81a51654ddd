"""A history shown: which runs and series, as tables in a terminal and as JSON. The page is page.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvbench.common import text as words
from kvbench.common.console import make_table
from kvbench.common.errors import UsageError
from kvbench.history.drift import (
    DRIFTED,
    UNCLEAR,
    WITHIN,
    Drift,
    Releases,
    drift_sentence,
    find_drifts,
    find_releases,
)
from kvbench.history.runs import (
    METRICS,
    VALID,
    Metric,
    Series,
    StoredRun,
    TrendPoint,
    all_series,
    find_runs,
    read_runs,
)

NARROWEST = 0.05  # of the middle value: a smaller spread is drawn within this range, so that noise looks small


@dataclass(frozen=True)
class Selection:
    """Which series to show; an empty tuple selects all. ``last``: at most so many runs of a series."""

    workloads: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    last: int | None = None
    release: str | None = None

    def __post_init__(self) -> None:
        known = [metric.name for metric in METRICS]
        for name in self.metrics:
            if not any(fnmatchcase(each, name) for each in known):
                raise UsageError(f"--metric {name!r} matches none of {', '.join(known)}")

    def selects(self, series: Series) -> bool:
        def matches(patterns: Sequence[str], *names: str) -> bool:
            return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

        return (
            matches(self.workloads, series.workload)
            and matches(self.cells, series.cell, f"{series.workload}/{series.cell}")
            and matches(self.metrics, series.metric.name)
            and matches([f"*{text.lower()}*" for text in self.machines], series.machine.lower())
        )


@dataclass(frozen=True)
class View:
    """What is shown. ``groups``: the series of one workload on one machine each, by cell.

    ``has_release``: a selected series has a counted run of a release, even if it is older than what is shown.
    """

    runs: Sequence[StoredRun]
    groups: Sequence[Sequence[Series]]
    drifts: Sequence[Drift]
    releases: Releases
    has_release: bool
    notes: Sequence[str] = ()

    @property
    def drift_sentence(self) -> str:
        return drift_sentence(self.drifts, self.has_release)

    def drift(self, series: Series) -> Drift | None:
        return self._drift_by_key.get(series.key)

    def release_of(self, series: Series) -> TrendPoint | None:
        """The release's run, which may be older than what is shown."""
        found = self.releases.of(series)
        drift = self.drift(series)
        return drift.release if drift else found[1] if found else None

    def cell_name(self, series: Series) -> str:
        """With the hash of its definition where several definitions have this name."""
        key = (series.workload, series.place, series.cell)
        return series.cell if len(self._definitions[key]) == 1 else f"{series.cell} [{series.definition}]"

    @cached_property
    def _drift_by_key(self) -> dict[tuple[object, ...], Drift]:
        return {drift.series.key: drift for drift in self.drifts}

    @cached_property
    def _definitions(self) -> dict[tuple[object, ...], set[str]]:
        found: dict[tuple[object, ...], set[str]] = {}
        for series in (each for group in self.groups for each in group):
            found.setdefault((series.workload, series.place, series.cell), set()).add(series.definition)
        return found


def view(paths: Sequence[Path], selection: Selection) -> View:
    """Raises UsageError for paths or a release that do not exist."""
    runs, notes = read_runs(find_runs(paths))
    releases = find_releases(runs, selection.release) if runs else Releases()
    chosen = [series for series in all_series(runs) if selection.selects(series)]
    shown = [dataclasses.replace(series, points=series.points[-(selection.last or 0) :]) for series in chosen]
    groups = [list(group) for _, group in groupby(shown, key=lambda series: (series.workload, series.place))]
    notes += [
        f"release {run.release} is of run {run.name}, which is not complete: nothing is compared with it"
        for run in runs
        if run.release and not run.complete
    ]
    if runs and not chosen:
        notes.append("no run has what was selected: leave out --workload, --cell, --metric or --machine")
    has_release = any(releases.of(series) for series in chosen)
    return View(runs, groups, find_drifts(chosen, releases), releases, has_release, notes)


def value_text(metric: Metric, value: float) -> str:
    """With its unit."""
    if metric.unit == "ms":
        return words.ms(value)
    return words.percent(value) if metric.unit == "share" else f"{words.tokens_per_s(value)} tok/s"


def change_text(change: float | None) -> str:
    return "–" if change is None else f"{change * 100:+.1f} %"


BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"  # a run that does not count
FLAT = "▄"  # all values are equal
WIDTH = 16  # runs of a sparkline
_MARKS = {DRIFTED: " !", UNCLEAR: " ?", WITHIN: ""}


def sparkline(points: Sequence[TrendPoint]) -> str:
    """One block a run, the newest ``WIDTH`` runs, higher blocks for larger values."""
    shown = points[-WIDTH:]
    values = [point.value for point in shown if point.state == VALID] or [0.0]
    low, high = min(values), max(values)
    span = max(high - low, NARROWEST * abs(low + high) / 2)
    bottom = (low + high - span) / 2

    def block(value: float) -> str:
        return FLAT if low == high else BLOCKS[round((value - bottom) / span * (len(BLOCKS) - 1))]

    return "".join(block(point.value) if point.state == VALID else GAP for point in shown)


def table(view: View, group: Sequence[Series]) -> Table:
    """The series of one workload on one machine."""
    heads = ("cell", "trend", "last", "vs before", "vs release", "n")
    made = make_table(heads, numbers_from=2, title=f"{group[0].workload} on {group[0].machine}", tight=True)
    made.columns[0].min_width, made.columns[1].no_wrap = 22, True
    made.columns[1].min_width = min(WIDTH, max(len(series.points) for series in group))
    for name, cell in groupby(group, key=view.cell_name):
        made.add_row(Text(name, style="bold"))
        for series in cell:
            counted, drift = series.counted, view.drift(series)
            since = change_text(drift.change) + _MARKS[drift.outcome] if drift else "–"
            made.add_row(
                Text(f"  {series.metric.title}"),
                Text(sparkline(series.points)),
                Text(value_text(series.metric, counted[-1].value) if counted else "none valid"),
                Text(change_text(series.change)),
                Text(since, style="bold red" if drift and drift.outcome == DRIFTED else ""),
                Text(str(len(counted))),
            )
        made.add_section()
    return made


def legend(view: View) -> list[str]:
    """What the marks in the tables mean, those that are there."""
    states = {point.state for group in view.groups for series in group for point in series.points}
    outcomes = {drift.outcome for drift in view.drifts}
    lines = (
        (states - {VALID}, f"{GAP} a run that does not count: invalid cell, or incomplete run"),
        (DRIFTED in outcomes, "! worse than the release by more than the margin"),
        (UNCLEAR in outcomes, "? too few repeats, or too much variance, to exclude a drift beyond the margin"),
    )
    return [line for shown, line in lines if shown]


def as_dict(view: View) -> dict[str, Any]:
    """Everything shown, for programs."""
    return {
        "format": "kvbench-history/2",
        "runs": len(view.runs),
        "series": [_series_dict(view, series) for group in view.groups for series in group],
        "drift": view.drift_sentence,
        "notes": list(view.notes),
    }


def _series_dict(view: View, series: Series) -> dict[str, Any]:
    drift, counted = view.drift(series), series.counted
    return {
        "workload": series.workload,
        "cell": series.cell,
        "metric": series.metric.name,
        "unit": series.metric.unit,
        "better": {1: "higher", -1: "lower", 0: None}[series.metric.better],
        "place": dict(series.place),
        "definition": series.definition,
        "n": len(counted),
        "last": counted[-1].value if counted else None,
        "change": series.change,
        "drift": drift and {
            "release": drift.release_name,
            "release_run": drift.release.run.name,
            "run": drift.last.run.name,
            **{name: getattr(drift, name) for name in ("change", "interval", "margin", "outcome")},
        },
        "points": [
            {
                "run": point.run.name,
                "started": point.run.started.isoformat(),
                **{name: getattr(point.run, name) for name in ("sha", "dirty", "release")},
                "versions": dict(point.run.versions),
                **{name: getattr(point, name) for name in ("state", "value", "values")},
            }
            for point in series.points
        ],
    }  # fmt: skip
