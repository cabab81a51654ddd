"""Drift since the last release: what many changes, each too small for a gate, have added up to.

Each cell's newest counted run is compared with the newest counted run of the release. The change is the ratio of the
geometric means over the repeats; its 95 % interval is Welch's, on logarithms (each repeat is a fresh server, so repeats
are independent). The interval does not contain what differs between two days on one machine: `kvbench compare` of the
two commits measures both on one day.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.common.git import git
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.history.model import Series, StoredRun, TrendPoint

DRIFTED, WITHIN, UNCLEAR = "drifted", "within", "unclear"
MARGINS = {metric.name: metric.margins["cell"] for metric in DEFAULT_RULES.metrics}  # how much worse a cell may be
_MIN_SHA = 7


@dataclass(frozen=True)
class Drift:
    """One metric of one cell since a release. ``change``: new / old - 1, ``interval`` its 95 % interval.

    ``outcome``: ``drifted`` when it is worse by more than ``margin`` and the interval excludes no change; ``within``
    when the interval excludes a drift beyond the margin; else ``unclear``.
    """

    series: Series
    release_name: str
    release: TrendPoint
    last: TrendPoint
    change: float
    interval: tuple[float, float] | None
    margin: float
    outcome: str


@dataclass(frozen=True)
class Releases:
    """Which runs belong to a release.

    ``tags``: (name, full sha), newest first. ``chosen``: only this release counts; otherwise runs that were marked as a
    release in their history come before git tags.
    """

    tags: tuple[tuple[str, str], ...] = ()
    chosen: str | None = None

    def of(self, series: Series) -> tuple[str, TrendPoint] | None:
        """The name and newest counted run of the newest release before the newest counted run.

        Where no release is before it: the release that the newest run itself belongs to.
        """
        counted = series.counted
        found = list(self._known(counted))
        return next((each for each in found if not _same_release(each[1], counted[-1])), next(iter(found), None))

    def _known(self, counted: Sequence[TrendPoint]) -> Iterable[tuple[str, TrendPoint]]:
        """Every release with a counted run, and its newest one: the preferred release first."""
        newest_first = counted[::-1]
        if self.chosen is None:
            yield from ((point.run.release, point) for point in newest_first if point.run.release)
        for name, sha in self.tags:
            yield from [(name, p) for p in newest_first if p.run.sha == sha and not p.run.dirty][:1]
        if self.chosen is not None:
            yield from [(self.chosen, p) for p in newest_first if _is(p.run, self.chosen)][:1]


def find_releases(runs: Sequence[StoredRun], chosen: str | None) -> Releases:
    """Raises UsageError when ``chosen`` is neither a marked release, nor a git ref, nor the start of a commit's sha."""
    if chosen is None:
        return Releases(tuple(_tags()))
    if any(run.release == chosen for run in runs):
        return Releases(chosen=chosen)
    sha = "" if chosen.startswith("-") else _git("rev-parse", "--verify", "--quiet", f"{chosen}^{{commit}}").strip()
    if not any((sha and run.sha == sha and not run.dirty) or _is(run, chosen) for run in runs):
        known = ", ".join(sorted({run.release for run in runs if run.release}))
        raise UsageError(
            f"--release {chosen!r}: no run is of that commit or release; marked releases: {known or 'none'} "
            "(`kvbench history add ... --release NAME` marks one)"
        )
    return Releases(((chosen, sha),) if sha else (), chosen)


def find_drifts(series: Iterable[Series], releases: Releases, margins: Mapping[str, float] = MARGINS) -> list[Drift]:
    """The change since the release of every series that has a margin, a run of the release and a newer one."""
    found = []
    for each in series:
        release = releases.of(each) if each.metric.name in margins else None
        if release and release[1] is not each.counted[-1] and min(release[1].values + each.counted[-1].values) > 0:
            found.append(_drift(each, *release, margins[each.metric.name]))
    return found


def _drift(series: Series, name: str, release: TrendPoint, margin: float) -> Drift:
    last = series.counted[-1]
    old, new = ([math.log(value) for value in point.values] for point in (release, last))
    change = math.expm1(statistics.fmean(new) - statistics.fmean(old))
    interval = _interval(old, new)
    better = series.metric.better
    least, most = sorted(-better * end for end in interval) if interval else (-math.inf, math.inf)  # worse is positive
    drifted = -better * change > margin and least > 0
    outcome = DRIFTED if drifted else WITHIN if most <= margin else UNCLEAR
    return Drift(series, name, release, last, change, interval, margin, outcome)


def _interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
    """Welch's 95 % interval of mean(new) - mean(old), as changes; None with fewer than two values on a side."""
    from scipy.stats import ttest_ind

    if min(len(old), len(new)) < 2:
        return None
    if len(set(old)) == len(set(new)) == 1:
        return (math.expm1(new[0] - old[0]),) * 2
    found = ttest_ind(new, old, equal_var=False).confidence_interval(0.95)
    return math.expm1(found.low), math.expm1(found.high)


def drift_exit_code(drifts: Sequence[Drift]) -> int:
    """What ``--fail-on-drift`` ends with."""
    outcomes = {drift.outcome for drift in drifts}
    if not outcomes:
        return EXIT_NOTHING
    return EXIT_REGRESSION if DRIFTED in outcomes else EXIT_INCONCLUSIVE if UNCLEAR in outcomes else EXIT_OK


def drift_sentence(drifts: Sequence[Drift], has_release: bool) -> str:
    """What became of the metrics since the release. ``has_release``: some series has a run of one."""
    if not drifts and has_release:
        return "Drift since the release: nothing to compare, there is no newer valid run of the same cells and machine."
    if not drifts:
        return (
            "Drift since a release: nothing to compare; mark a release's run with `kvbench history add ... --release "
            "NAME`, name one with --release, or measure a commit with a tag v*."
        )
    worse, held, unclear = (sum(d.outcome == outcome for d in drifts) for outcome in (DRIFTED, WITHIN, UNCLEAR))
    return (
        f"Drift since the release, {len(drifts)} metrics of cells: {worse} worse by more than the margin, {held} "
        f"within it, {unclear} unclear (too few repeats, or too much variance)."
    )


def _same_release(point: TrendPoint, last: TrendPoint) -> bool:
    """Whether it is the newest run itself, or another run of the release that the newest run is marked as."""
    return point is last or (point.run.release is not None and point.run.release == last.run.release)


def _is(run: StoredRun, name: str) -> bool:
    """Whether the run is marked as that release, or its commit begins so."""
    starts = len(name) >= _MIN_SHA and run.sha is not None and run.sha.startswith(name.lower()) and not run.dirty
    return run.release == name or starts


def _tags() -> list[tuple[str, str]]:
    """Tags v* of the repository in this folder, newest first, with their commits."""
    text = _git("tag", "--list", "v*", "--sort=-creatordate", "--format=%(refname:short) %(objectname) %(*objectname)")
    rows = [line.split() for line in text.splitlines()]
    return [(row[0], row[-1]) for row in rows if len(row) > 1]  # the last one is the commit of an annotated tag


def _git(*arguments: str) -> str:
    """Its output; empty without git, outside of a repository, or when git fails."""
    try:
        return git(Path.cwd(), *arguments, limit_s=10)
    except UsageError:
        return ""
