"""Drift since the last release: the sum of many changes that are each too small for a gate.

Each cell's newest counted run is compared with the newest counted run of the release. The change is the ratio of the
geometric means over the repeats; its 95 % interval is Welch's, on logarithms (each repeat is a new server, so repeats
are independent). Differences between two days on one machine are not in the interval: `kvbench compare` of the two
commits measures both on one day.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.common.git import try_git
from kvbench.effects.comparison import Comparison, independent
from kvbench.gate.timing.rules import CELL, DEFAULT_RULES
from kvbench.history.sentences import say
from kvbench.history.series import Series, TrendPoint
from kvbench.metrics.definitions import SERVED
from kvbench.runs.stored import StoredRun

MARGINS = {rule.name: rule.margins[CELL] for rule in DEFAULT_RULES.metrics}  # how much worse a cell may be
_MIN_SHA = 7


@dataclass(frozen=True)
class DriftOutcome:
    """An outcome in JSON, on a page, beside a figure and in the legend, and its code of --fail-on-drift."""

    word: str
    title: str
    mark: str
    legend: str
    exit_code: int


DRIFTED = DriftOutcome(
    "drifted", "Worse than the release by more than the margin", " !",
    "! worse than the release by more than the margin", EXIT_REGRESSION,
)  # fmt: skip
UNCLEAR = DriftOutcome(
    "unclear", "Unclear: too few repeats, or too much variance", " ?",
    "? too few repeats, or too much variance, to exclude a drift beyond the margin", EXIT_INCONCLUSIVE,
)  # fmt: skip
WITHIN = DriftOutcome("within", "Within the margin", "", "", EXIT_OK)
OUTCOMES = (DRIFTED, UNCLEAR, WITHIN)  # the most urgent first


@dataclass(frozen=True)
class Drift:
    """A series' newest counted run against that of a release.

    ``outcome``: by the ``margin`` of its metric: within it is what is not worse by more, whatever it is better by.
    """

    release_name: str
    release: TrendPoint
    last: TrendPoint
    comparison: Comparison
    margin: float
    outcome: DriftOutcome

    @property
    def change(self) -> float:
        """The relative change, new / old - 1."""
        return self.comparison.ratio - 1

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the change; None with fewer than two repeats on a side."""
        low, high = self.comparison.low, self.comparison.high
        if low is None or high is None:
            return None
        return low - 1, high - 1


@dataclass(frozen=True)
class Releases:
    """The releases, and which runs belong to them.

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
        names = [*((p.run.release, "") for p in newest_first if p.run.release), *self.tags]
        if self.chosen:
            names = [*self.tags, (self.chosen, "")]
        first = None
        for name, sha in names:
            point = next((point for point in newest_first if _belongs(point.run, name, sha)), None)
            if point is None:
                continue
            newest = newest_first[0].run
            if point.run is not newest and (point.run.release is None or point.run.release != newest.release):
                return name, point
            first = first or (name, point)
        return first


def find_releases(runs: Sequence[StoredRun], chosen: str | None) -> Releases:
    """Finds the releases. Raises UsageError where ``chosen`` is no marked release, git ref or start of a sha."""
    if chosen is None:
        tags = _git(
            "tag", "--list", "v*", "--sort=-creatordate", "--format=%(refname:short) %(objectname) %(*objectname)"
        )
        rows = [line.split() for line in tags.splitlines()]
        return Releases(tuple((row[0], row[-1]) for row in rows if len(row) > 1))  # last: an annotated tag's commit
    if any(run.release == chosen for run in runs):
        return Releases(chosen=chosen)
    sha = "" if chosen.startswith("-") else _git("rev-parse", "--verify", "--quiet", f"{chosen}^{{commit}}")
    if not any(_belongs(run, chosen, sha) or _belongs(run, chosen, "") for run in runs):
        marked = ", ".join(sorted({run.release for run in runs if run.release}))
        raise UsageError(say("drift.no_release", release=chosen, marked=marked or "none"))
    return Releases(((chosen, sha),) if sha else (), chosen)


def find_drift(series: Series, name: str, release: TrendPoint) -> Drift | None:
    """The change from ``release`` to the newest counted run; None without a newer run or a margin of the metric."""
    last, shown = series.counted[-1], series.figure
    margin = MARGINS.get(shown.of_steady(False).name)
    if margin is None or release is last:
        return None
    comparison = independent(shown.name, SERVED, last.values, release.values)
    if comparison is None:
        return None
    worse = shown.worse_sign
    harm = worse * (comparison.ratio - 1)
    least, most = sorted(worse * (end - 1) for end in (comparison.low or 0.0, comparison.high or math.inf))
    outcome = UNCLEAR
    if harm > margin and least > 0:
        outcome = DRIFTED
    elif comparison.low is not None and most <= margin:
        outcome = WITHIN
    return Drift(name, release, last, comparison, margin, outcome)


def drift_exit_code(drifts: Sequence[Drift]) -> int:
    outcomes = {drift.outcome for drift in drifts}
    return next((outcome.exit_code for outcome in OUTCOMES if outcome in outcomes), EXIT_NOTHING)


def drift_sentence(drifts: Sequence[Drift], has_release: bool) -> str:
    """The drifts in one sentence. ``has_release``: whether any series has a run of a release."""
    if drifts:
        count = Counter(drift.outcome.word for drift in drifts)
        return say("drift.counted", n=len(drifts), **{outcome.word: count[outcome.word] for outcome in OUTCOMES})
    return say("drift.nothing", has_release)


def _belongs(run: StoredRun, name: str, sha: str) -> bool:
    """Tests whether the run is of the commit ``sha``; without one, whether it is marked or its commit begins so."""
    if sha:
        return run.sha == sha and not run.dirty
    starts = len(name) >= _MIN_SHA and (run.sha or "").startswith(name.lower()) and not run.dirty
    return run.release == name or starts


def _git(*arguments: str) -> str:
    return try_git(Path.cwd(), *arguments, limit_s=10) or ""
