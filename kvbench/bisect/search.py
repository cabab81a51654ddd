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
from kvbench.common.errors import EXIT_INTERRUPTED, MeasurementError, UsageError
from kvbench.common.files import utc_now, write_text
from kvbench.common.records import Record, write_record
from kvbench.common.text import clock, plural, shorten
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.folder import GivenWorkload
from kvbench.gate.compare.request import StoredRequest
from kvbench.gate.compare.run import ElapsedLine
from kvbench.gate.compare.series import PairQuestion
from kvbench.gate.verdict.outputs import report_verdict
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, Finding, Verdict
from kvbench.runs.manifest import stored_workload
from kvbench.runs.work import kept, work_in

STATE = "bisect.json"
_MOST_RANGES = 8  # that are searched for causes
_WORDS = 200  # characters of a step

Question = TimedQuestion | ExactQuestion


class SearchState(Record):
    """The question of a search, as bisect.json keeps it.

    repo: the repository; good, bad: full shas; given: the workloads
    metric: of a timing, or a glob of counters
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


@dataclass
class Search:
    """A search in its folder. ``steps``: the commits that were tested, with git's answer."""

    folder: Path
    state: SearchState
    console: Console
    limit_s: float
    steps: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    commits: int = 0

    def run(self) -> int:
        """Searches and reports; returns the exit code."""
        resume = shlex.join(["kvbench", "bisect", "--resume", os.path.relpath(self.folder)])
        write_record(self.folder / STATE, self.state)
        verdict, began = None, time.monotonic()
        with work_in(self.folder, kept(resume), self._say) as work, ExitStack() as held:
            request = self.state.request
            builds = Builds(rebuild=request.rebuild, build_cmd=request.build_cmd, tell=self._say)
            held.enter_context(builds)

            def check() -> None:
                work.check()
                if time.monotonic() - began > self.limit_s:
                    raise SearchTimeError

            with status_line(self.console, say("search.starting")) as show:
                self._say(say("search.folder", folder=self.folder))
                measurements = Measurements(self.folder, self.limit_s, began)
                question = self._question(measurements, builds, check, ElapsedLine(show))
                try:
                    verdict = self._verdict(measurements, self._search(question))
                except MeasurementError as error:
                    verdict = Verdict("bisect", INVALID, str(error), reproduce=self.state.reproduce)
                except SearchTimeError:
                    verdict = self._verdict(measurements, None, go_on=resume)
        return EXIT_INTERRUPTED if verdict is None else report_verdict(verdict, self.folder)

    def _question(
        self, measurements: Measurements, builds: Builds, check: Callable[[], None], show: Callable[..., None]
    ) -> Question:
        state, workloads = self.state, [stored_workload(given) for given in self.state.given]
        if state.by == "timing":
            pairs = PairQuestion(state.request, workloads, state.metric or "", check, show)
            cells = ", ".join(state.request.only or [workload.name for workload in workloads])
            return TimedQuestion(measurements, pairs, say("timing.title", title=pairs.rule.title, cells=cells))
        if state.by == "counters":
            counters = CountersCheck(state.request, builds, state.metric, check)
            return ExactQuestion(measurements, counters, say("exact.counters"))
        launch = LaunchCheck(state.request, builds, workloads[0], state.by, check)
        return ExactQuestion(measurements, launch, say(f"exact.{state.by}"))

    def _search(self, question: Question) -> str | None:
        """Searches the whole range, then the parts that hold further causes. Returns why there was nothing to find."""
        whole = self._history(self.state.good, self.state.bad)
        self.commits = len(whole.candidates())
        if refusal := question.open(whole):
            return refusal
        question.measurements.lenient = True
        self._say(say("search.differs", question=question.title, commits=plural(self.commits, "commit")))
        ranges = self._search_range(question, whole, 1)
        for number in range(2, _MOST_RANGES + 1):
            if not ranges:
                break
            good, bad = ranges.pop(0)
            try:
                history = self._history(good, bad, whole.undone)
                if refusal := question.open(history):
                    self._unresolved(whole, good, bad, refusal)
                else:
                    ranges += self._search_range(question, history, number)
            except (MeasurementError, UsageError) as error:  # what was found stays
                self._unresolved(whole, good, bad, str(error))
        for good, bad in ranges:
            self._unresolved(whole, good, bad, say("search.many", n=_MOST_RANGES))
        return None

    def _search_range(self, question: Question, history: History, number: int) -> list[tuple[str, str]]:
        """Finds the culprit between two commits; returns the ranges in which there is another one."""
        try:
            while (sha := history.next()) is not None:
                began = time.monotonic()
                answer, words = question.answer(history, sha)
                self.steps[sha] = answer
                if answer == "between":
                    self._say(say("search.between", commit=history.title(sha), words=words))
                    return question.rests(history, sha, sha)
                history.mark(sha, answer)
                left, took = plural(len(history.candidates()), "commit"), clock(time.monotonic() - began)
                step = {"n": len(self.steps), "commit": history.title(sha), "words": shorten(words, _WORDS)}
                self._say(say("search.step", answer, **step, left=left, took=took))
                if history.next() == sha:
                    break  # git did not take the answer
            return self._name(question, history)
        except SearchTimeError:
            self.findings.append(self._range(history))
            raise
        finally:
            write_text(self.folder / f"bisect-{number}.log", history.log())

    def _name(self, question: Question, history: History) -> list[tuple[str, str]]:
        """Names the culprit of a range, or the commits of which it is one; returns the ranges with further causes."""
        left = history.candidates()
        if not left:
            self.findings.append(self._range(history))
            return []
        sha, parent = left[0], history.parent(left[-1]) or history.good
        try:
            finding = question.culprit(history, parent, sha) if len(left) == 1 else self._range(history)
        except MeasurementError as error:
            self.findings.append(self._range(history, str(error)))
            return []
        self.findings.append(finding)
        self._say(finding.sentence)
        return question.rests(history, parent, sha)

    def _history(self, good: str, bad: str, undone: Mapping[str, str] | None = None) -> History:
        state, clone = self.state, self.folder.resolve() / "clone"
        return History(state.repo, clone, good, bad, state.first_parent, state.paths, state.skipped, undone)

    def _range(self, history: History, why: str = "") -> Finding:
        """The commits of which one is the first bad one, where git cannot tell which."""
        left = history.candidates()
        first, last = (history.title(sha) for sha in (left[-1], left[0])) if left else ("–", "–")
        key = "range" if left else "outside"
        if why:
            key = "not_confirmed"
        return self._open_finding(left, say(f"search.{key}", n=len(left), first=first, last=last, why=why), history)

    def _unresolved(self, history: History, good: str, bad: str, why: str) -> None:
        """Notes a part of the range whose cause was not found."""
        text = say("search.unresolved", good=history.title(good), bad=history.title(bad), why=why)
        self.findings.append(self._open_finding([bad], text, history))

    def _open_finding(self, left: Sequence[str], text: str, history: History) -> Finding:
        id_, title = f"range/{left[0] if left else 'none'}", say("search.range_title")
        details = tuple(history.title(sha) for sha in left[:50])
        return Finding(id=id_, suite="range", title=title, outcome=INCONCLUSIVE, sentence=text, details=details)

    def _verdict(self, measurements: Measurements, refusal: str | None, go_on: str = "") -> Verdict:
        findings = sorted(self.findings, key=lambda finding: (finding.outcome != FAIL, -abs(finding.change or 0.0)))
        culprits = [finding for finding in findings if finding.outcome == FAIL]
        is_timed = self.state.by == "timing"
        did = say(
            "search.did", n=len(self.steps), commits=plural(self.commits, "commit"), time=clock(measurements.seconds)
        )
        if refusal:
            text = refusal
        elif culprits:
            pieces = say("search.pieces", len(culprits) > 1, n=len(culprits))
            error = say("search.error", is_timed, error=100 * ERROR)
            sentences = "; ".join(finding.sentence for finding in culprits)
            text = say("search.found", pieces=pieces, culprits=sentences, did=did, error=error)
        else:
            why = findings[0].sentence if findings else say("search.none_tested")
            text = say("search.not_found", over=say("search.out_of_time", bool(go_on)), why=why, did=did)
        facts: dict[str, Any] = {
            "started": self.state.started, "ended": utc_now(), "by": self.state.by, "commits": self.commits,
            "tested": len(self.steps), "skipped": sum(answer == "skip" for answer in self.steps.values()),
            "seconds": round(measurements.seconds, 1), "error_at_most": ERROR if is_timed else None,
        }  # fmt: skip
        return Verdict(
            "bisect",
            FAIL if culprits else INCONCLUSIVE,
            text,
            tuple(findings),
            base=_end(self.state.good),
            candidate=_end(self.state.bad),
            reproduce=self.state.reproduce,
            notes=(say("search.go_on", command=go_on),) if go_on else (),
            facts=facts,
        )

    def _say(self, text: str) -> None:
        print_plain(self.console, text)


def _end(sha: str) -> Mapping[str, str]:
    return {"name": sha[:10], "sha": sha}
