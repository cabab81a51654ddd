"""Chooses what a history shows, and writes it as tables and as JSON; the page is page.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from kvbench.common.console import make_table
from kvbench.common.errors import UsageError
from kvbench.history.drift import DRIFTED, OUTCOMES, Drift, Releases, drift_sentence, find_drift, find_releases
from kvbench.history.sentences import say
from kvbench.history.series import VALID, Series, SeriesKey, TrendPoint, all_series, title_of
from kvbench.metrics.definitions import Figure
from kvbench.runs.stored import StoredRun, find_runs, own_runs, read_runs, trend_figures

NARROWEST = 0.05  # of the middle value: a smaller spread is drawn within this range, so that noise looks small


@dataclass(frozen=True)
class SeriesSelection:
    """A choice of series; an empty tuple selects all. ``last``: at most so many runs of a series."""

    workloads: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    last: int | None = None
    release: str | None = None

    def __post_init__(self) -> None:
        names = [shown.name for shown in trend_figures()]
        for pattern in self.metrics:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise UsageError(say("show.no_metric", pattern=pattern, names=", ".join(names)))

    def selects(self, key: SeriesKey) -> bool:
        def matches(patterns: Sequence[str], *names: str) -> bool:
            return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns for name in names)

        return (
            matches(self.workloads, key.workload)
            and matches(self.cells, key.cell, f"{key.workload}/{key.cell}")
            and matches(self.metrics, key.figure.name)
            and matches([f"*{text.lower()}*" for text in self.machines], key.machine.lower())
        )


@dataclass(frozen=True)
class Trend:
    """A series as it is shown, with its newest runs only.

    ``cell``: with the hash of its definition where another cell has that name. ``release``: the run of the release,
    which may be older than those shown. ``drift``: since then.
    """

    series: Series
    cell: str
    release: TrendPoint | None
    drift: Drift | None

    @property
    def is_worse(self) -> bool:
        """Tests whether it is worse than the release by more than the margin."""
        return self.drift is not None and self.drift.outcome == DRIFTED


@dataclass(frozen=True)
class View:
    """The trends that are shown. ``groups``: those of one workload on one machine each, by cell."""

    runs: Sequence[StoredRun]
    groups: Sequence[Sequence[Trend]]
    notes: Sequence[str] = ()

    @property
    def trends(self) -> list[Trend]:
        return [trend for group in self.groups for trend in group]

    @property
    def drifts(self) -> list[Drift]:
        return [trend.drift for trend in self.trends if trend.drift]

    @property
    def drift_sentence(self) -> str:
        return drift_sentence(self.drifts, any(trend.release for trend in self.trends))


def view(paths: Sequence[Path], selection: SeriesSelection) -> View:
    """Reads and selects the trends. Raises UsageError for paths or a release that do not exist."""
    runs, notes = read_runs(find_runs(paths))
    runs, left_out = own_runs(paths, runs)
    notes += left_out
    releases = Releases()
    if runs:
        releases = find_releases(runs, selection.release)
    chosen = [series for series in all_series(runs) if selection.selects(series.key)]
    definitions: dict[tuple[object, ...], set[str]] = {}
    for key in (series.key for series in chosen):
        definitions.setdefault((key.workload, key.place, key.cell), set()).add(key.definition)
    trends: dict[SeriesKey, Trend] = {}
    for series in chosen:
        key = series.key
        is_alone = len(definitions[key.workload, key.place, key.cell]) == 1
        cell = say("show.cell", is_alone, cell=key.cell, definition=key.definition)
        name, release = releases.of(series) or ("", None)
        drift = release and find_drift(series, name, release)
        newest = dataclasses.replace(series, points=series.points[-(selection.last or 0) :])
        trends[key] = Trend(newest, cell, release, drift)
    _compare_one_window(trends)
    groups = groupby(trends.values(), key=lambda trend: (trend.series.key.workload, trend.series.key.place))
    notes += [
        say("drift.not_complete", release=run.release, run=run.name) for run in runs if run.release and not run.complete
    ]
    if runs and not chosen:
        notes.append(say("show.nothing_selected"))
    return View(runs, [list(group) for _, group in groups], notes)


def _compare_one_window(trends: dict[SeriesKey, Trend]) -> None:
    """Keeps the steady window's drift where release and newest run have one, else that of the whole run."""
    for key, whole in trends.items():
        steady = trends.get(key.of_steady(), whole)
        if steady is not whole and steady.drift and whole.drift:
            first, second = ((drift.release.run, drift.last.run) for drift in (steady.drift, whole.drift))
            left_out = whole if first == second else steady
            trends[left_out.series.key] = dataclasses.replace(left_out, drift=None)


def value_text(shown: Figure, value: float) -> str:
    return shown.text(value) + " tok/s" * (shown.unit == "tokens/s")


def change_text(change: float | None) -> str:
    return say("show.change", change is not None, percent=100 * (change or 0.0))


BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"  # a run that does not count
FLAT = "▄"  # all values are equal
WIDTH = 16  # runs of a sparkline


def sparkline(points: Sequence[TrendPoint]) -> str:
    """Draws a block for each of the newest ``WIDTH`` runs, higher for larger values."""
    shown = points[-WIDTH:]
    values = [point.value for point in shown if point.state == VALID] or [0.0]
    low, high = min(values), max(values)
    span = max(high - low, NARROWEST * abs(low + high) / 2)
    bottom = (low + high - span) / 2

    def block(value: float) -> str:
        return FLAT if low == high else BLOCKS[round((value - bottom) / span * (len(BLOCKS) - 1))]

    return "".join(block(point.value) if point.state == VALID else GAP for point in shown)


def table(group: Sequence[Trend]) -> Table:
    """The trends of one workload on one machine."""
    heads, first = ("cell", "trend", "last", "vs before", "vs release", "n"), group[0].series.key
    title = say("show.group", workload=first.workload, machine=first.machine)
    made = make_table(heads, numbers_from=2, title=title, tight=True)
    made.columns[0].min_width, made.columns[1].no_wrap = 22, True
    made.columns[1].min_width = min(WIDTH, max(len(trend.series.points) for trend in group))
    for name, cell in groupby(group, key=lambda trend: trend.cell):
        made.add_row(Text(name, style="bold"))
        for trend in cell:
            series, drift = trend.series, trend.drift
            counted = series.counted
            since, style = "–", ""
            if drift:
                since, style = change_text(drift.change) + drift.outcome.mark, "bold red" * trend.is_worse
            last = "none valid"
            if counted:
                last = value_text(series.figure, counted[-1].value)
            made.add_row(
                Text(f"  {title_of(series.figure)}"),
                Text(sparkline(series.points)),
                Text(last),
                Text(change_text(series.change)),
                Text(since, style=style),
                Text(str(len(counted))),
            )
        made.add_section()
    return made


def legend(view: View) -> list[str]:
    """Explains the marks in the tables."""
    states = {point.state for trend in view.trends for point in trend.series.points}
    outcomes = {drift.outcome for drift in view.drifts}
    lines = [outcome.legend for outcome in OUTCOMES if outcome in outcomes and outcome.legend]
    if states - {VALID}:
        lines.insert(0, say("show.not_counted", mark=GAP))
    return lines


def as_dict(view: View) -> dict[str, Any]:
    """Returns everything that is shown, for programs."""
    shown = {"series": [_as_dict(trend) for trend in view.trends], "drift": view.drift_sentence}
    return {"format": "kvbench-history/2", "runs": len(view.runs), **shown, "notes": list(view.notes)}


def _as_dict(trend: Trend) -> dict[str, Any]:
    series, drift, key = trend.series, trend.drift, trend.series.key
    counted = series.counted
    return {
        "workload": key.workload,
        "cell": key.cell,
        "metric": key.figure.name,
        "unit": key.figure.unit,
        "better": key.figure.metric.better or None,
        "place": dict(key.place),
        "definition": key.definition,
        "n": len(counted),
        "last": counted[-1].value if counted else None,
        "change": series.change,
        "drift": drift and {
            "release": drift.release_name,
            "release_run": drift.release.run.name,
            "run": drift.last.run.name,
            **{name: getattr(drift, name) for name in ("change", "interval", "margin")},
            "outcome": drift.outcome.word,
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
