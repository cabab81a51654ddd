"""Drift since the last release: what many changes, each too small for a gate, have added up to.

Each cell's newest counted run is set beside the newest counted run of the release. The change is the ratio of the
geometric means over the repeats; its 95 % interval is Welch's, on logarithms (a repeat is a fresh server, so repeats
are independent draws). What differs from day to day on one machine is not in that interval: a flag asks for
``kvbench compare`` of the two commits, which measures both on one day.
"""

from __future__ import annotations

import math
import statistics
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.history.model import Point, Series, StoredRun

DRIFTED, WITHIN, UNCLEAR = "drifted", "within", "unclear"
CONFIDENCE = 0.95
_MIN_SHA = 7


@dataclass(frozen=True)
class Drift:
    """One judged metric of one cell since the release. ``change``: new / old - 1, ``interval`` its 95 % interval.

    ``outcome``: ``drifted`` when it is worse by more than ``margin`` and the interval shuts out no change; ``within``
    when the interval shuts out a drift beyond the margin; else ``unclear``: the repeats vary too much, or are too few.
    """

    series: Series
    release: Point
    last: Point
    change: float
    interval: tuple[float, float] | None
    margin: float
    outcome: str


@dataclass(frozen=True)
class Releases:
    """Which runs are of a release: by name and commit, the newest release first.

    ``asked``: only this one counts; otherwise a run that was marked as a release in its history comes before git tags.
    """

    tags: tuple[tuple[str, str], ...] = ()  # (name, full sha)
    asked: str | None = None

    def of(self, series: Series) -> tuple[str, Point] | None:
        """The release's name and its newest counted run in this series.

        The newest counted run is what is compared, so the release is the newest one before it: where every run is of a
        release, that of the run before. Without one before it, the release that the newest run itself is of.
        """
        counted = series.counted
        found = [(name, point) for name, point in self._known(counted) if not _same_release(point, counted[-1])]
        return next(iter(found or self._known(counted)), None)

    def _known(self, counted: Sequence[Point]) -> list[tuple[str, Point]]:
        """Every release with a counted run, with the newest of its runs: the preferred first."""
        found: list[tuple[str, Point]] = []
        if self.asked is None:
            found += [(str(point.run.release), point) for point in reversed(counted) if point.run.release]
        for name, sha in self.tags:
            found += [(name, point) for point in reversed(counted) if point.run.sha == sha and not point.run.dirty][:1]
        if self.asked is not None:
            found += [(self.asked, point) for point in reversed(counted) if _is(point.run, self.asked)][:1]
        return found


def find_releases(runs: Sequence[StoredRun], asked: str | None) -> Releases:
    """Raises UsageError when ``asked`` is neither a marked release, nor a git ref, nor the start of a commit's name."""
    if asked is None:
        return Releases(tuple(_tags()))
    if any(run.release == asked for run in runs):
        return Releases(asked=asked)
    sha = _git("rev-parse", "--verify", "--quiet", f"{asked}^{{commit}}") if not asked.startswith("-") else ""
    found = Releases(((asked, sha.strip()),) if sha.strip() else (), asked)
    shas = {sha for _, sha in found.tags}
    if not any((run.sha in shas and not run.dirty) or _is(run, asked) for run in runs):
        known = sorted({run.release for run in runs if run.release})
        raise UsageError(
            f"--release {asked!r}: no run is of that commit or release; "
            + (f"marked releases: {', '.join(known)}" if known else "mark one with `kvbench history add ... --release`")
        )
    return found


def find_drifts(series: Iterable[Series], releases: Releases, margins: Mapping[str, float]) -> list[Drift]:
    """The change since the release of every series that has a margin, a run of the release and a newer one."""
    found = []
    for each in series:
        release = releases.of(each)
        if each.metric.name not in margins or release is None or release[1] is each.counted[-1]:
            continue
        if drift := compare(each, release[1], each.counted[-1], margins[each.metric.name]):
            found.append(drift)
    return found


def compare(series: Series, release: Point, last: Point, margin: float) -> Drift | None:
    """None where a value is not positive, so that there is no ratio."""
    if min(release.values + last.values) <= 0:
        return None
    old, new = ([math.log(value) for value in point.values] for point in (release, last))
    difference = statistics.fmean(new) - statistics.fmean(old)
    half = _half_width(old, new)
    interval = None if half is None else (math.expm1(difference - half), math.expm1(difference + half))
    worse = sorted(-series.metric.better * change for change in interval) if interval else (-math.inf, math.inf)
    change = math.expm1(difference)
    if -series.metric.better * change > margin and worse[0] > 0:
        outcome = DRIFTED
    else:
        outcome = WITHIN if worse[1] <= margin else UNCLEAR
    return Drift(series, release, last, change, interval, margin, outcome)


def _half_width(old: Sequence[float], new: Sequence[float]) -> float | None:
    """Of Welch's interval of the difference of two means; None with fewer than two values on a side."""
    if min(len(old), len(new)) < 2:
        return None
    from scipy.stats import t

    parts = [statistics.variance(side) / len(side) for side in (old, new)]
    if not (total := sum(parts)):
        return 0.0
    freedom = total**2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (old, new), strict=True))
    return float(t.ppf((1 + CONFIDENCE) / 2, freedom)) * math.sqrt(total)


def drift_exit_code(drifts: Sequence[Drift]) -> int:
    """What ``--fail-on-drift`` ends with."""
    outcomes = {drift.outcome for drift in drifts}
    if DRIFTED in outcomes:
        return EXIT_REGRESSION
    if not outcomes:
        return EXIT_NOTHING
    return EXIT_INCONCLUSIVE if UNCLEAR in outcomes else EXIT_OK


def drift_sentence(drifts: Sequence[Drift], has_release: bool) -> str:
    """What became of the metrics since the release, in one line. ``has_release``: some series has a run of one."""
    if not drifts and has_release:
        return "Drift since the release: nothing to compare, no newer run of the same cells on the same machine counts."
    if not drifts:
        return (
            "Drift since a release: nothing to compare; mark a release's run with `kvbench history add ... --release "
            "NAME`, name one with --release, or measure a commit with a tag v*."
        )
    counts = {outcome: sum(drift.outcome == outcome for drift in drifts) for outcome in (DRIFTED, WITHIN, UNCLEAR)}
    parts = [
        f"{counts[DRIFTED]} got worse by more than the margin",
        f"{counts[WITHIN]} held within it",
        f"for {counts[UNCLEAR]} the repeats are too few or vary too much to say",
    ]
    return f"Drift since the release, {len(drifts)} metrics of cells: {', '.join(parts)}."


def default_margins() -> dict[str, float]:
    """Metric -> how much worse a cell may be, as a share: those of the timing gate."""
    from kvbench.gate.timing.rules import DEFAULT_RULES

    return {metric.name: metric.margins["cell"] for metric in DEFAULT_RULES.metrics}


def _same_release(point: Point, last: Point) -> bool:
    """Whether it is the newest run itself, or another run of the release that this one is marked as."""
    return point is last or (point.run.release is not None and point.run.release == last.run.release)


def _is(run: StoredRun, asked: str) -> bool:
    starts = len(asked) >= _MIN_SHA and run.sha is not None and run.sha.startswith(asked.lower()) and not run.dirty
    return run.release == asked or starts


def _tags() -> list[tuple[str, str]]:
    """Tags v* of the repository in this folder, newest first, with their commits."""
    text = _git("tag", "--list", "v*", "--sort=-creatordate", "--format=%(refname:short) %(objectname) %(*objectname)")
    rows = [line.split() for line in text.splitlines()]
    return [(row[0], row[-1]) for row in rows if len(row) > 1]  # the last one is the commit of an annotated tag


def _git(*arguments: str) -> str:
    """Its output; empty without git, outside a repository, or when it says no."""
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
