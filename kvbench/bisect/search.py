"""A search in history: git chooses commits, a question answers, and what is found becomes a verdict."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from rich.console import Console

from kvbench.bisect.checks import By, CountersCheck, LaunchCheck
from kvbench.bisect.decide import ERROR
from kvbench.bisect.history import History
from kvbench.bisect.questions import ExactQuestion, Measurements, SearchTimeError, TimedQuestion
from kvbench.bisect.sentences import say
from kvbench.common.console import print_plain, status_line
from kvbench.common.errors import EXIT_INTERRUPTED, MeasurementError
from kvbench.common.files import utc_now, write_text
from kvbench.common.records import Record, write_record
from kvbench.common.text import clock, plural, shorten
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.folder import GivenWorkload
from kvbench.gate.compare.request import StoredRequest
from kvbench.gate.compare.series import PairQuestion
from kvbench.gate.verdict.outputs import report_verdict
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, Finding, Verdict
from kvbench.runs.work import kept, work_in
from kvbench.workload.file import Workload, resolve

STATE = "bisect.json"
_MOST_PIECES = 8  # causes that are looked for
_WORDS = 200  # characters of a step


class SearchState(Record):
    """The question of a search, as bisect.json keeps it.

    repo: the repository; good, bad: full shas; names: of versions by sha, else empty
    given: the workloads; metric: of a timing, or a glob of counters
    """

    FORMAT: ClassVar[str] = "kvbench-bisect/1"

    request: StoredRequest
    by: By
    repo: Path
    good: str
    bad: str
    metric: str | None = None
    first_parent: bool = False
    paths: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    given: tuple[GivenWorkload, ...] = ()
    reproduce: str = ""
    started: str = ""

    def workloads(self) -> list[Workload]:
        return [resolve(given.workload, profile=given.profile or "cpu", source=None) for given in self.given]


@dataclass
class Search:
    """A search in its folder.

    ``steps``: the commits that were tested, with git's answer and what was measured.
    """

    folder: Path
    state: SearchState
    console: Console
    limit_s: float
    steps: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    commits: int = 0

    def run(self) -> int:
        """Searches and reports; returns the exit code."""
        resume = shlex.join(["kvbench", "bisect", "--resume", os.path.relpath(self.folder)])
        write_record(self.folder / STATE, self.state)
        verdict = None
        with work_in(self.folder, kept(resume), self._say) as work, ExitStack() as held:
            builds = held.enter_context(Builds(build_cmd=self.state.request.build_cmd, tell=self._say))
            with status_line(self.console, say("search.starting")) as show:
                self._say(say("search.folder", folder=self.folder))
                began = time.monotonic()
                measurements = Measurements(self.folder, self.limit_s, began)
                show_elapsed = lambda text, work="": show(lambda: f"{text}, {clock(time.monotonic() - began)}")  # noqa: E731
                question = self._question(measurements, builds, work.check, show_elapsed)
                try:
                    refusal = self._search(question)
                    verdict = self._verdict(measurements, refusal)
                except MeasurementError as error:
                    verdict = Verdict("bisect", INVALID, str(error), reproduce=self.state.reproduce)
                except SearchTimeError:
                    self.notes.append(say("search.go_on", command=resume))
                    verdict = self._verdict(measurements, None, out_of_time=True)
        if verdict is None:
            return EXIT_INTERRUPTED
        return report_verdict(verdict, self.folder)

    def _question(
        self, measurements: Measurements, builds: Builds, check: Callable[[], None], show: Callable[..., None]
    ) -> TimedQuestion | ExactQuestion:
        state, workloads = self.state, self.state.workloads()
        if state.by == "timing":
            pairs = PairQuestion(state.request, workloads, state.metric or "", check, show)
            cells = ", ".join(state.request.only) or ", ".join(workload.name for workload in workloads)
            return TimedQuestion(measurements, pairs, say("timing.title", title=pairs.rule.title, cells=cells))
        if state.by == "counters":
            return ExactQuestion(
                measurements, CountersCheck(state.request, builds, state.metric, check), say("exact.counters")
            )
        launch = LaunchCheck(state.request, builds, workloads[0], state.by, check)
        return ExactQuestion(measurements, launch, say(f"exact.{state.by}"))

    def _search(self, question: TimedQuestion | ExactQuestion) -> str | None:
        """Searches the whole range, then the parts that hold further causes. Returns why there was nothing to find."""
        ranges, searched = [(self.state.good, self.state.bad)], 0
        while ranges and searched < _MOST_PIECES:
            good, bad = ranges.pop(0)
            history = self._history(good, bad)
            refusal = question.open(history)
            if not searched:
                self.commits = len(history.candidates())
                if refusal:
                    return refusal
                self._say(say("search.differs", question=question.title, commits=plural(self.commits, "commit")))
            searched += 1
            if refusal is None:
                ranges += self._search_range(question, history)
            write_text(self.folder / f"bisect-{searched}.log", history.log())
        return None

    def _search_range(self, question: TimedQuestion | ExactQuestion, history: History) -> list[tuple[str, str]]:
        """Finds the culprit between two commits; returns the ranges in which there is another one."""
        while (sha := history.next()) is not None:
            began = time.monotonic()
            try:
                answer, words = question.answer(history, sha)
            except SearchTimeError:
                self.findings.append(self._range(history, history.candidates()))
                raise
            self.steps[sha] = answer
            if answer == "between":
                self._say(say("search.between", commit=self._commit(history, sha), words=words))
                return question.parts(history, sha)
            history.mark(sha, answer)
            left = len(history.candidates())
            took = clock(time.monotonic() - began)
            step = {"n": len(self.steps), "commit": self._commit(history, sha), "words": shorten(words, _WORDS)}
            self._say(say("search.step", answer, **step, left=plural(left, "commit"), took=took))
            if history.next() == sha:
                break  # git did not take the answer
        left = history.candidates()
        if not left:
            self.findings.append(self._range(history, left))
            return []
        sha, parent = left[0], history.parent(left[-1]) or history.good
        try:
            self.findings.append(
                question.culprit(history, parent, sha) if len(left) == 1 else self._range(history, left)
            )
        except MeasurementError as error:
            self.findings.append(self._range(history, left, str(error)))
            return []
        self._say(self.findings[-1].sentence)
        return question.rests(history, parent, sha)

    def _history(self, good: str, bad: str) -> History:
        state = self.state
        return History(state.repo, self.folder / "clone", good, bad, state.first_parent, state.paths, state.skipped)

    def _commit(self, history: History, sha: str) -> str:
        return say("search.commit", sha=sha[:10], subject=history.subject(sha))

    def _range(self, history: History, left: Sequence[str], why: str = "") -> Finding:
        """A range of commits of which one is the first bad one, where git cannot tell which."""
        first, last = (self._commit(history, sha) for sha in (left[-1], left[0])) if left else ("–", "–")
        key = "not_confirmed" if why else "range" if left else "outside"
        text = say(f"search.{key}", n=len(left), first=first, last=last, why=why)
        return Finding(
            id=f"range/{left[0] if left else 'none'}", suite="range", title=say("search.range_title"),
            outcome=INCONCLUSIVE, sentence=text, details=tuple(self._commit(history, sha) for sha in left[:50]),
        )  # fmt: skip

    def _verdict(self, measurements: Measurements, refusal: str | None, *, out_of_time: bool = False) -> Verdict:
        findings = sorted(self.findings, key=lambda finding: (finding.outcome != FAIL, -abs(finding.change or 0.0)))
        minutes = measurements.seconds / 60
        did = say("search.did", n=len(self.steps), commits=plural(self.commits, "commit"), time=clock(minutes * 60))
        culprits = [finding for finding in findings if finding.outcome == FAIL]
        if refusal:
            outcome, text = EMPTY, refusal
        elif culprits:
            outcome = FAIL
            pieces = say("search.pieces", len(culprits) > 1, n=len(culprits))
            error = say("search.error", self.state.by == "timing", error=100 * ERROR)
            sentences = "; ".join(finding.sentence for finding in culprits)
            text = say("search.found", pieces=pieces, culprits=sentences, did=did, error=error)
        else:
            why = findings[0].sentence if findings else say("search.none_tested")
            over = say("search.out_of_time", out_of_time)
            outcome, text = INCONCLUSIVE, say("search.not_found", why=why, did=did, over=over)
        facts: dict[str, Any] = {
            "started": self.state.started, "ended": utc_now(), "by": self.state.by, "commits": self.commits,
            "measured": len(self.steps), "skipped": sum(a == "skip" for a in self.steps.values()),
            "seconds": round(measurements.seconds, 1), "error_at_most": ERROR if self.state.by == "timing" else 0.0,
        }  # fmt: skip
        ends = {"base": _end(self.state.good), "candidate": _end(self.state.bad)}
        notes, again = tuple(self.notes), self.state.reproduce
        return Verdict("bisect", outcome, text, tuple(findings), **ends, reproduce=again, notes=notes, facts=facts)

    def _say(self, text: str) -> None:
        print_plain(self.console, text)


def _end(sha: str) -> Mapping[str, str]:
    return {"name": sha[:10], "sha": sha}
