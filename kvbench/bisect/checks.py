"""The exact checks of a search, which read values off a commit: counters, its start, its KV capacity, its answers."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from kvbench.bisect.sentences import say
from kvbench.common.errors import MeasurementError
from kvbench.common.processes import last_lines
from kvbench.gate.compare.builds import Builds, Commit, run_to_end
from kvbench.gate.compare.request import CompareRequest
from kvbench.gate.compare.sides import REF, PairSide, open_side
from kvbench.gate.counters.lock import read_lock
from kvbench.measure.server import requests_for
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import Target
from kvbench.workload.file import Workload

By = Literal["timing", "counters", "start", "capacity", "answers"]
START, STARTS, FAILS = "start", "starts", "does not start"
_COUNTING_LIMIT_S = 600.0
_PROMPTS, _ANSWER_LIMIT_S = 16, 120.0


class ExactCheck(Protocol):
    """Reads what a commit does. ``varies``: whether two readings of one commit may differ."""

    varies: bool

    def nothing(self) -> str:
        """Says why there are no values, and what to do."""
        ...

    def values(self, commit: Commit, folder: Path) -> Mapping[str, str]:
        """Returns the values by name. ``folder``: for logs.

        Raises MeasurementError where they cannot be had, so that the commit is skipped.
        """
        ...


@dataclass(frozen=True)
class CountersCheck:
    """The counters of the counter gate, replayed by the commit's own code.

    ``counter``: a glob; all counters without one. ``check``: raises when the search must end.
    """

    request: CompareRequest
    builds: Builds
    counter: str | None
    check: Callable[[], None]
    varies: bool = False

    def nothing(self) -> str:
        return say("exact.nothing", metric=self.counter or "*", only=", ".join(self.request.only or ("all scenarios",)))

    def values(self, commit: Commit, folder: Path) -> Mapping[str, str]:
        build, lock = self.builds.build(commit), folder.resolve() / "counters.lock.json"
        lock.unlink(missing_ok=True)
        words = ["accept", "counters", self.request.workloads[0], "--lock", str(lock), "--reason", "bisect"]
        command, log = [str(build.python), "-m", "kvbench", *words], folder / "counters.log"
        self.check()
        run_to_end(command, log, _COUNTING_LIMIT_S, say("check.replay"), cwd=build.source, env=build.env)
        if (counted := read_lock(lock)) is None:
            raise MeasurementError(say("check.no_counters", log=log))
        values = {}
        for name, scenario in counted.scenarios.items():
            if not any(fnmatch.fnmatchcase(name, glob) for glob in self.request.only or ("*",)):
                continue
            read = {**dict.fromkeys(counted.counters, 0), **scenario.counters}
            values |= {f"{name}: {counter}": str(value) for counter, value in read.items()}
            values |= {f"{name}: {column} by step": changes for column, changes in scenario.history.items()}
            values[f"{name}: output tokens"] = scenario.outputs
        pattern = f"*: {self.counter or '*'}"
        return {name: value for name, value in values.items() if fnmatch.fnmatchcase(name, pattern)}


@dataclass(frozen=True)
class LaunchCheck:
    """The behaviour of a server of the commit once it is launched.

    ``what``: whether it starts, its KV capacity, or its answers.
    """

    request: CompareRequest
    builds: Builds
    workload: Workload
    what: Literal["start", "capacity", "answers"]
    check: Callable[[], None]

    @property
    def varies(self) -> bool:
        return self.what != START

    def nothing(self) -> str:
        return say("check.no_capacity")

    def values(self, commit: Commit, folder: Path) -> Mapping[str, str]:
        request = self.request.model_copy(update={"repo": commit.repo})
        with ExitStack() as held:
            opened = open_side(PairSide(REF, commit.sha, commit.sha), self.workload, request, self.builds)
            held.callback(opened.choice.close)
            design, _ = opened.choice.plan(request.only)
            target, log = opened.choice.new_target(), folder / "server.log"
            target.check = self.check
            held.callback(target.stop)
            try:
                target.start(design.configurations[0].settings, log)
            except MeasurementError as error:
                if self.what != START:
                    raise
                last = last_lines(log, count=1).strip() or str(error)
                return {START: f"{FAILS}: {last} (log: {log})"}
            if self.what == START:
                return {START: STARTS}
            if self.what == "capacity":
                return _capacity(target)
            load, point = opened.choice.workload.load, design.cells[0].load
            return _answers(target, requests_for(load, point, target, self.workload.seed, 1)[:_PROMPTS])


def _capacity(target: Target) -> dict[str, str]:
    room = target.server_info().capacity.model_dump(exclude_none=True)
    if not room:
        raise MeasurementError(say("check.no_capacity"))
    return {name: str(value) for name, value in room.items()}


def _answers(target: Target, requests: Sequence[RequestSpec]) -> dict[str, str]:
    answers = {}
    for number, request in enumerate(requests, 1):
        prompt = request.prompt or list(request.prompt_token_ids or ())
        answer = target.complete(prompt, request.max_tokens, _ANSWER_LIMIT_S)
        answers[f"answer {number}"] = str(answer[target.dialect.api.answer])
    return answers
