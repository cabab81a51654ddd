"""The two kinds of questions that a search asks: by timing, in pairs against GOOD, and by values, exactly.

Every measurement is a file of the search's folder, measured/<base>-<commit>....json. A search that goes on asks git the
same questions again and finds the answers there; what could not be measured is tried again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np

from kvbench.bisect.checks import FAILS, START, ExactCheck
from kvbench.bisect.decide import (
    EXACT_LOOKS,
    STEP_PAIRS,
    StepAnswer,
    StepRule,
    has_part,
    is_worse,
    resolves,
    step_alpha,
    trimmed_interval,
    trimmed_mean,
)
from kvbench.bisect.history import History
from kvbench.bisect.sentences import say
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.records import Record, read_record, write_record
from kvbench.common.stats import bounded_log
from kvbench.common.text import listing, shorten
from kvbench.gate.compare.series import PairQuestion
from kvbench.gate.verdict.verdict import FAIL, Finding
from kvbench.gate.verdict.wording import percent

_EXACT_POINTS = tuple(pairs for pairs, _ in EXACT_LOOKS)
_STEP_POINTS = tuple(range(STEP_PAIRS[0], STEP_PAIRS[1] + 1))
_NAMED = 3  # values in a sentence
_LONGEST = 160  # characters of a value


class MeasuredCommit(Record):
    """A commit measured against ``base``, or alone where the check is exact.

    harms: log(commit / base) of each pair, positive where worse; method: how the pairs were measured
    values: what the commit does, by name; skipped: why it could not be measured
    seconds: that it took, its build included
    """

    FORMAT: ClassVar[str] = "kvbench-bisect-step/1"

    base: str
    sha: str
    harms: tuple[float, ...] = ()
    method: str | None = None
    values: Mapping[str, str] = {}
    skipped: str | None = None
    seconds: float = 0.0


class SearchTimeError(Exception):
    """The minutes of a search are over."""


@dataclass
class Measurements:
    """The measurements of one search, in its folder.

    ``limit_s``: none begins that would end later after ``began``, by the longest one so far. ``lenient``: what a commit
    cannot be asked for is no mistake of the user, since GOOD and BAD could.
    """

    folder: Path
    limit_s: float
    began: float
    lenient: bool = False
    taken: dict[str, MeasuredCommit] = field(default_factory=dict)

    def take(self, base: str, sha: str, measure: Callable[[Path], MeasuredCommit], kind: str = "") -> MeasuredCommit:
        """Returns the measurement of ``sha``, from its file or by ``measure``, which gets a folder for its logs."""
        key = "-".join(filter(None, [base[:12], sha[:12], kind]))
        path = self.folder / "measured" / f"{key}.json"
        if key not in self.taken:
            stored = read_record(MeasuredCommit, path, say("search.again")) if path.is_file() else None
            self.taken[key] = stored if stored and not stored.skipped else self._measure(base, sha, path, measure)
        return self.taken[key]

    def of(self, base: str, sha: str) -> list[MeasuredCommit]:
        """The measurements of a commit against ``base`` so far."""
        return [taken for taken in self.taken.values() if (taken.base, taken.sha) == (base, sha)]

    def _measure(self, base: str, sha: str, path: Path, measure: Callable[[Path], MeasuredCommit]) -> MeasuredCommit:
        began = time.monotonic()
        longest = max((taken.seconds for taken in self.taken.values()), default=0.0)
        if began - self.began + longest > self.limit_s:
            raise SearchTimeError
        logs = self.folder / "commits" / sha[:12]
        logs.mkdir(parents=True, exist_ok=True)
        try:
            made = measure(logs)
        except MeasurementError as error:
            made = MeasuredCommit(base=base, sha=sha, skipped=str(error))
        except UsageError as error:
            if not self.lenient:
                raise
            made = MeasuredCommit(base=base, sha=sha, skipped=str(error))
        made = made.model_copy(update={"seconds": time.monotonic() - began})
        path.parent.mkdir(exist_ok=True)
        write_record(path, made)
        return made

    @property
    def seconds(self) -> float:
        """The time of all measurements, those too that were taken before the search went on."""
        return sum(taken.seconds for taken in self.taken.values())


@dataclass
class TimedQuestion:
    """A question of timing: is a commit as slow as BAD, by pairs against GOOD?

    ``pairs``: what is measured; ``title``: the metric. ``spent``: the chance of a wrong answer so far; ``bad``: BAD
    against GOOD.
    """

    measurements: Measurements
    pairs: PairQuestion
    title: str
    spent: float = 0.0
    bad: MeasuredCommit = field(default_factory=lambda: MeasuredCommit(base="", sha=""))

    def open(self, history: History) -> str | None:
        """Measures BAD against GOOD; returns why there is nothing to search for, None where BAD is shown to be worse.

        Raises MeasurementError where a side cannot be measured, or pairs scatter too much for a search.
        """
        self.spent, self.bad = 0.0, self._exact(history, history.good, history.bad)
        harms = self.bad.harms
        if self.bad.skipped:
            raise MeasurementError(self.bad.skipped)
        worse = is_worse(harms)
        if not worse:
            values = {"title": self.title, "change": self._change(harms), "n": len(harms)}
            return say("timing.no_effect", worse is None, **values)
        if not resolves(harms):
            raise MeasurementError(say("timing.too_noisy", change=self._change(harms), n=STEP_PAIRS[1]))
        return None

    def answer(self, history: History, sha: str) -> tuple[StepAnswer, str]:
        """Tests one commit; returns the answer, and what was measured in words."""
        alpha = step_alpha(self.spent, len(history.candidates()))
        others = [taken.harms for taken in self.measurements.taken.values() if taken.harms and taken.sha != sha]
        rule = StepRule(self._effect, others, alpha)
        # Another part of the range has another effect: what decided there may not decide here.
        kept = [taken for taken in self.measurements.of(history.good, sha) if taken.harms and rule.answer(taken.harms)]
        step = kept[0] if kept else self._take(
            history, history.good, sha, _STEP_POINTS, lambda harms: rule.answer(harms) is not None, history.bad[:12]
        )  # fmt: skip
        if step.skipped:
            return "skip", step.skipped
        self.spent += alpha
        return rule.answer(step.harms) or "skip", self._in_words(step)

    def culprit(self, history: History, parent: str, sha: str) -> Finding:
        """Measures the culprit against its parent. Raises MeasurementError where it is not shown to be worse."""
        step, rule = self._exact(history, parent, sha), self.pairs.rule
        if step.skipped or not is_worse(step.harms):
            why = step.skipped or self._in_words(step)
            raise MeasurementError(say("timing.not_confirmed", parent=parent[:10], why=why))
        change, ends = self._relative(trimmed_mean(step.harms)), self._interval(step.harms)
        smaller, larger = sorted(map(abs, ends))
        commit = history.title(sha)
        text = say(
            "timing.made", commit=commit, title=self.title, worse=say("timing.worse", rule.higher_is_better),
            size=percent(abs(change), signed=False), smaller=percent(smaller, signed=False, sign=""),
            larger=percent(larger, signed=False, sign=""),
        )  # fmt: skip
        return Finding(
            id=f"culprit/{sha}",
            suite="culprit",
            title=commit,
            outcome=FAIL,
            sentence=text,
            metric=rule.name,
            unit=rule.unit,
            higher_is_better=rule.higher_is_better,
            change=change,
            interval=ends,
            figures={"pairs": len(step.harms)},
            series=tuple(map(self._relative, step.harms)),
        )

    def rests(self, history: History, parent: str, sha: str) -> list[tuple[str, str]]:
        """The ranges that hold a further cause: before the culprit and after it, the larger part first.

        Of a commit with a part of the effect, which is its own ``parent`` here, both sides.
        """
        none, rests = (0.0,) * len(self.bad.harms), []
        before, after = self._harms(history.good, parent) or none, self._harms(history.good, sha) or self.bad.harms
        if has_part(none, before, self._effect):
            rests.append((trimmed_mean(before), (history.good, parent)))
        if has_part(after, self.bad.harms, self._effect):
            rests.append((self._effect - trimmed_mean(after), (sha, history.bad)))
        return [commits for _, commits in sorted(rests, reverse=True)]

    def _harms(self, base: str, sha: str) -> tuple[float, ...] | None:
        return next((taken.harms for taken in self.measurements.of(base, sha) if taken.harms), None)

    @property
    def _effect(self) -> float:
        return trimmed_mean(self.bad.harms)

    def _in_words(self, step: MeasuredCommit) -> str:
        return say("timing.step", change=self._change(step.harms), n=len(step.harms))

    def _change(self, harms: Sequence[float]) -> str:
        low, high = (percent(end, sign="") for end in self._interval(harms))
        return say("timing.change", change=percent(self._relative(trimmed_mean(harms))), low=low, high=high)

    def _interval(self, harms: Sequence[float]) -> tuple[float, float]:
        low, high = sorted(map(self._relative, trimmed_interval(harms)))
        return low, high

    def _relative(self, harm: float) -> float:
        """The change of the metric, commit / base - 1, of a harm."""
        return float(np.expm1(bounded_log(-harm if self.pairs.rule.higher_is_better else harm)))

    def _exact(self, history: History, base: str, sha: str) -> MeasuredCommit:
        return self._take(history, base, sha, _EXACT_POINTS, lambda harms: is_worse(harms) is not None, "exact")

    def _take(
        self,
        history: History,
        base: str,
        sha: str,
        points: Sequence[int],
        is_decided: Callable[[Sequence[float]], bool],
        kind: str,
    ) -> MeasuredCommit:
        def measure(logs: Path) -> MeasuredCommit:
            sides = {"base": history.commit(base).sha, "candidate": history.commit(sha).sha}
            request = self.pairs.request.model_copy(update={"repo": history.repo, "output_dir": logs, **sides})
            harms, method = self.pairs.measure(request, points, is_decided, self.bad.method)
            return MeasuredCommit(base=base, sha=sha, harms=harms, method=method)

        return self.measurements.take(base, sha, measure, kind)


@dataclass
class ExactQuestion:
    """An exact question: has a commit other values than GOOD, among those in which BAD differs from it?"""

    measurements: Measurements
    check: ExactCheck
    title: str
    good: str = ""
    moved: tuple[str, ...] = ()

    def open(self, history: History) -> str | None:
        """Reads the values of both ends; returns why there is nothing to search for. Raises MeasurementError.

        Where a second reading of GOOD may differ from the first, what does is not looked at.
        """
        self.good = history.good
        good, bad = (self._values(history, sha) for sha in (history.good, history.bad))
        if not good and not bad:
            raise UsageError(self.check.nothing())
        vary = differing(good, self._values(history, history.good, again=True)) if self.check.varies else ()
        # Of a part of the range, only what lasts to the end of the whole.
        moved = [name for name in differing(good, bad) if name not in vary]
        self.moved = tuple(name for name in moved if not self.moved or name in self.moved)
        return None if self.moved else say("exact.no_change", title=self.title, n=len(good))

    def answer(self, history: History, sha: str) -> tuple[StepAnswer, str]:
        """Tests one commit; returns the answer, and its values in words."""
        try:
            values, good = self._values(history, sha), self._values(history, self.good)
        except MeasurementError as error:
            return "skip", str(error)
        changed = self._changed(good, values)
        return ("bad", words_of(changed, good, values)) if changed else ("good", say("exact.same"))

    def culprit(self, history: History, parent: str, sha: str) -> Finding:
        """Holds the culprit against its parent. Raises MeasurementError where they do not differ, twice."""
        before, after = self._values(history, parent), self._values(history, sha)
        changed = self._changed(before, after)
        if self.check.varies:
            again = self._values(history, sha, again=True)
            changed = [name for name in changed if again.get(name) == after.get(name)]
        if not changed:
            raise MeasurementError(say("exact.not_confirmed", parent=parent[:10]))
        commit = history.title(sha)
        return Finding(
            id=f"culprit/{sha}",
            suite="culprit",
            title=commit,
            outcome=FAIL,
            sentence=say("exact.made", commit=commit, changed=words_of(changed, before, after)),
            figures={"values": len(changed)},
            details=tuple(words_of([name], before, after) for name in changed[:200]),
        )

    def rests(self, history: History, parent: str, sha: str) -> list[tuple[str, str]]:
        """The range after the culprit, where BAD has still other values."""
        after, bad = self._values(history, sha), self._values(history, history.bad)
        return [(sha, history.bad)] if self._changed(after, bad) else []

    def _changed(self, before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
        return [name for name in differing(before, after) if name in self.moved]

    def _values(self, history: History, sha: str, *, again: bool = False) -> Mapping[str, str]:
        def measure(logs: Path) -> MeasuredCommit:
            return MeasuredCommit(base=sha, sha=sha, values=self.check.values(history.commit(sha), logs))

        taken = self.measurements.take(sha, sha, measure, "again" if again else "")
        if taken.skipped:
            raise MeasurementError(taken.skipped)
        return taken.values


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the values that differ. Of two starts that fail, the reasons are not compared."""
    if all(values.get(START, "").startswith(FAILS) for values in (a, b)):
        return ()
    return tuple(name for name in dict.fromkeys((*a, *b)) if a.get(name) != b.get(name))


def words_of(names: Sequence[str], before: Mapping[str, str], after: Mapping[str, str]) -> str:
    """Writes the first few changed values, and how many more there are."""
    # Totals say more than columns by step, so they come first.
    ordered = sorted(names, key=lambda name: (" by step" in name, names.index(name)))
    shown = []
    for name in ordered[:_NAMED]:
        ends = {"before": before.get(name, "–"), "after": after.get(name, "–")}
        shown.append(say("exact.change", name=name, **{end: shorten(value, _LONGEST) for end, value in ends.items()}))
    more = len(names) - len(shown)
    return listing([*shown, *([say("exact.more", n=more)] if more else [])])
