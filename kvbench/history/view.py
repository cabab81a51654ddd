"""A history as it is asked for: which runs and series, their drift and their change points."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import groupby
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.history.drift import Drift, Releases, default_margins, drift_sentence, find_drifts, find_releases
from kvbench.history.model import METRICS, Series, StoredRun, all_series
from kvbench.history.otava import ChangePoint, find_change_points
from kvbench.history.read import find_runs, read_runs


@dataclass(frozen=True)
class Asked:
    """What the command was given; an empty tuple asks for everything. ``last``: this many runs of a series."""

    workloads: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    last: int | None = None
    release: str | None = None
    otava: str | None = None
    change_points: bool = True


@dataclass(frozen=True)
class View:
    """``groups``: the series of one workload on one machine each, by cell. ``drifts``: of what is shown.

    ``has_release``: there is a counted run of a release among them, be it older than what is shown.
    """

    runs: Sequence[StoredRun]
    groups: Sequence[Sequence[Series]]
    drifts: Sequence[Drift]
    releases: Releases
    has_release: bool
    change_points: Mapping[Series, Sequence[ChangePoint]] = field(default_factory=dict)
    change_point_note: str = ""
    notes: Sequence[str] = ()

    @property
    def drift_sentence(self) -> str:
        return drift_sentence(self.drifts, self.has_release)

    def drift(self, series: Series) -> Drift | None:
        return self._drift_by_key.get(_key(series))

    def release_name(self, drift: Drift) -> str:
        found = self.releases.of(drift.series)
        assert found is not None  # a drift has one
        return found[0]

    def cell_name(self, series: Series) -> str:
        """With the fingerprint of its definition where a cell of that name was another one in other runs."""
        same = self._definitions[_cell(series)]
        return series.cell if len(same) == 1 else f"{series.cell} [{series.definition}]"

    @cached_property
    def _drift_by_key(self) -> dict[tuple[object, ...], Drift]:
        return {_key(drift.series): drift for drift in self.drifts}

    @cached_property
    def _definitions(self) -> dict[tuple[object, ...], set[str]]:
        found: dict[tuple[object, ...], set[str]] = {}
        for series in (each for group in self.groups for each in group):
            found.setdefault(_cell(series), set()).add(series.definition)
        return found


def view(paths: Sequence[Path], asked: Asked) -> View:
    """Raises UsageError for paths, names or a release that are not there."""
    folders = find_runs(paths)
    runs, notes = read_runs(folders)
    releases = find_releases(runs, asked.release) if runs else Releases()
    chosen = [series for series in all_series(runs) if _wanted(series, asked)]
    drifts = find_drifts(chosen, releases, default_margins())
    shown = chosen
    if asked.last is not None:
        shown = [dataclasses.replace(series, points=series.points[-asked.last :]) for series in chosen]
    found, said = find_change_points(shown, asked.otava) if asked.change_points and shown else ({}, "")
    groups = [list(group) for _, group in groupby(shown, key=lambda series: (series.workload, series.place))]
    notes += [
        f"release {run.release} is of run {run.name}, which is not complete: nothing is compared with it"
        for run in runs
        if run.release and not run.complete
    ]
    if runs and not chosen:
        notes.append("no run has what was asked for: leave out --workload, --cell, --metric or --machine")
    has_release = any(releases.of(series) for series in chosen)
    return View(runs, groups, drifts, releases, has_release, found, said, notes)


def _wanted(series: Series, asked: Asked) -> bool:
    return (
        _matches(series.workload, asked.workloads)
        and (_matches(series.cell, asked.cells) or _matches(f"{series.workload}/{series.cell}", asked.cells))
        and _matches(series.metric.name, asked.metrics)
        and (not asked.machines or any(text.lower() in series.machine.lower() for text in asked.machines))
    )


def check_metrics(names: Sequence[str]) -> None:
    """Raises UsageError for a name or pattern that no metric has."""
    known = [metric.name for metric in METRICS]
    for name in names:
        if not any(fnmatchcase(each, name) for each in known):
            raise UsageError(f"--metric {name!r} is none that is followed: {', '.join(known)}")


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


def _key(series: Series) -> tuple[object, ...]:
    return (*_cell(series), series.definition, series.metric.name)


def _cell(series: Series) -> tuple[object, ...]:
    return (series.workload, series.place, series.cell)
