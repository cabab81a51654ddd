"""Drift since the last release: the sum of many changes that are each too small for a gate.

Each cell's newest counted run is compared with the newest counted run of the release. The change is the ratio of the
geometric means over the repeats; its 95 % interval is Welch's, on logarithms (each repeat is a new server, so repeats
are independent). Differences between two days on one machine are not in the interval: `kvbench compare` of the two
commits measures both on one day.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.common.git import try_git
from kvbench.common.stats import welch_interval
from kvbench.gate.timing.rules import DEFAULT_RULES
from kvbench.history.runs import Series, StoredRun, TrendPoint

DRIFTED, WITHIN, UNCLEAR = "drifted", "within", "unclear"
MARGINS = {metric.name: metric.margins["cell"] for metric in DEFAULT_RULES.metrics}  # how much worse a cell may be
MARGINS |= {f"steady_{name}": margin for name, margin in MARGINS.items()}
_MIN_SHA = 7


@dataclass(frozen=True)
class Drift:
    """The change of a series since a release: ``change`` is new / old - 1, ``interval`` its 95 % interval.

    ``outcome``: ``drifted`` if it is worse by more than ``margin`` and the interval excludes 0; ``within`` if the
    interval excludes a drift beyond the margin; else ``unclear``.
    """

    release_name: str
    last: TrendPoint
    change: float
    interval: tuple[float, float] | None
    margin: float
    outcome: str


@dataclass(frozen=True)
class Releases:
    """Which runs belong to a release.

    ``tags``: (name, full sha), newest first. ``chosen``: the only release that counts; without one, runs that are
    marked as a release come before git tags.
    """

    tags: tuple[tuple[str, str], ...] = ()
    chosen: str | None = None

    def of(self, series: Series) -> tuple[str, TrendPoint] | None:
        """The name and the newest counted run of the newest release before the newest counted run.

        If there is none before it: those of the release that the newest run itself belongs to.
        """
        newest_first = series.counted[::-1]
        found = [
            (name, point)
            for name, sha in self._names(newest_first)
            if (point := next((p for p in newest_first if _belongs(p.run, name, sha)), None))
        ]

        def is_newest(run: StoredRun) -> bool:
            newest = newest_first[0].run
            return run is newest or (run.release is not None and run.release == newest.release)

        return next((each for each in found if not is_newest(each[1].run)), found[0] if found else None)

    def _names(self, newest_first: Sequence[TrendPoint]) -> list[tuple[str, str]]:
        """Name and sha of every release that may count, the preferred ones first."""
        if self.chosen is not None:
            return [*self.tags, (self.chosen, "")]
        return [*((point.run.release, "") for point in newest_first if point.run.release), *self.tags]


def find_releases(runs: Sequence[StoredRun], chosen: str | None) -> Releases:
    """Raises UsageError when ``chosen`` is neither a marked release, nor a git ref, nor the start of a commit's sha."""
    if chosen is None:
        return Releases(tuple(_tags()))
    if any(run.release == chosen for run in runs):
        return Releases(chosen=chosen)
    sha = "" if chosen.startswith("-") else _git("rev-parse", "--verify", "--quiet", f"{chosen}^{{commit}}")
    if not any(_belongs(run, chosen, sha) or _belongs(run, chosen, "") for run in runs):
        known = ", ".join(sorted({run.release for run in runs if run.release}))
        raise UsageError(
            f"--release {chosen!r}: no run is of that commit or release; marked releases: {known or 'none'} "
            "(`kvbench history add ... --release NAME` marks one)"
        )
    return Releases(((chosen, sha),) if sha else (), chosen)


def find_drift(series: Series, name: str, release: TrendPoint) -> Drift | None:
    """The change from ``release`` to the newest counted run; None without a newer run or a margin of the metric."""
    last, margin, better = series.counted[-1], MARGINS.get(series.metric.name), series.metric.better
    if margin is None or release is last or min(release.values + last.values) <= 0:
        return None
    old, new = ([math.log(value) for value in point.values] for point in (release, last))
    change = math.expm1(statistics.fmean(new) - statistics.fmean(old))
    interval = _interval(old, new)
    least, most = sorted(-better * end for end in interval) if interval else (-math.inf, math.inf)  # worse is positive
    drifted = -better * change > margin and least > 0
    outcome = DRIFTED if drifted else WITHIN if most <= margin else UNCLEAR
    return Drift(name, last, change, interval, margin, outcome)


def _interval(old: Sequence[float], new: Sequence[float]) -> tuple[float, float] | None:
    """Welch's 95 % interval of mean(new) - mean(old), as changes; None with fewer than two values on a side."""
    low, high = welch_interval(old, new)
    return None if math.isnan(low) else (math.expm1(low), math.expm1(high))


def drift_exit_code(drifts: Sequence[Drift]) -> int:
    """What ``--fail-on-drift`` ends with."""
    outcomes = {drift.outcome for drift in drifts}
    if not outcomes:
        return EXIT_NOTHING
    return EXIT_REGRESSION if DRIFTED in outcomes else EXIT_INCONCLUSIVE if UNCLEAR in outcomes else EXIT_OK


def drift_sentence(drifts: Sequence[Drift], has_release: bool) -> str:
    """The drifts in one sentence. ``has_release``: whether any series has a run of a release."""
    if drifts:
        count = Counter(drift.outcome for drift in drifts)
        return (
            f"Drift since the release, {len(drifts)} metrics of cells: {count[DRIFTED]} worse by more than the margin, "
            f"{count[WITHIN]} within it, {count[UNCLEAR]} unclear (too few repeats, or too much variance)."
        )
    if has_release:
        return "Drift since the release: nothing to compare, there is no newer valid run of the same cells and machine."
    return (
        "Drift since a release: nothing to compare; mark a release's run with `kvbench history add ... --release NAME`,"
        " name one with --release, or measure a commit with a tag v*."
    )


def _belongs(run: StoredRun, name: str, sha: str) -> bool:
    """Whether the run is of the commit ``sha``; if that is empty, whether it is marked as ``name`` or its commit's sha
    begins with it."""
    if sha:
        return run.sha == sha and not run.dirty
    starts = len(name) >= _MIN_SHA and (run.sha or "").startswith(name.lower()) and not run.dirty
    return run.release == name or starts


def _tags() -> list[tuple[str, str]]:
    """Tags v* of the repository in this folder, newest first, with their commits."""
    text = _git("tag", "--list", "v*", "--sort=-creatordate", "--format=%(refname:short) %(objectname) %(*objectname)")
    rows = [line.split() for line in text.splitlines()]
    return [(row[0], row[-1]) for row in rows if len(row) > 1]  # the last one is the commit of an annotated tag


def _git(*arguments: str) -> str:
    return try_git(Path.cwd(), *arguments, limit_s=10) or ""
