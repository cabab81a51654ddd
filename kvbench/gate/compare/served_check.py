"""The served check of a comparison in engine time: is the server around the engine slower?

Engine time leaves out the HTTP layer, streaming and the server's threads. So both servers of a workload's first
configuration are launched, are warmed up and stay up together, and get single small streamed requests in turn, in each
round one each and the same for both, in an order that a coin decides. What does not pass is measured once more on new
servers, because launches differ. The folder's served.json keeps every round, so that a comparison can be judged again:

    {"format": 1, "checks": {"<workload>/<configuration>": [[round, ...] of a launch, ...]}}
    round: {"first": "base", "base": {"ttft_ms": ..., "itl_ms": ..., "e2e_ms": ...}, "candidate": {...}}

How they are judged: kvbench/gate/timing/served.py.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, ClassVar

from pydantic import Field

from kvbench.common.errors import MeasurementError
from kvbench.common.foreign_cpu import tree_cpu_s
from kvbench.common.records import Record, read_record, write_record
from kvbench.effects.comparison import contradicts
from kvbench.gate.compare.folder import CompareFolder, FailedAttempt
from kvbench.gate.compare.pair_runner import OnFailed, Reasons, measure_again
from kvbench.gate.compare.sides import PairedWorkload
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import SIDES, Match
from kvbench.gate.timing.rules import OVERALL
from kvbench.gate.timing.served import LAUNCHES, ServedJudgement, judge_served
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding
from kvbench.measure.single_request import SingleLatencies, send_single
from kvbench.metrics.definitions import METRICS
from kvbench.requests.request import RequestSpec
from kvbench.targets.base import Target, reason_of

FILE = "served.json"
SUITE = "served"
JUDGED = {"ttft_ms": METRICS["ttft"].short, "e2e_ms": METRICS["e2el"].title}
ROUNDS = 60  # of one launch
SECONDS = 10.0  # that one launch's rounds may take; with slow requests there are fewer, but ``_FEWEST``
_FEWEST = 20  # 2^-20 is far below any alpha, and the bounds are ranks 5 and 16
_WARM_UP = 5
_IDLE_WINDOW_S, _IDLE_CPU_S, _IDLE_LIMIT_S = 0.05, 0.011, 2.0  # the kernel counts CPU time in steps of 10 ms
_PROMPT_TOKENS, _OUTPUT_TOKENS = 24, 8


_Milliseconds = Annotated[float, Field(ge=0, le=1e9)]


class RoundLatencies(Record):
    """The latencies of one request."""

    ttft_ms: _Milliseconds
    e2e_ms: _Milliseconds
    itl_ms: _Milliseconds | None = None


class Round(Record):
    """A request to either server, and the side that was asked first."""

    first: str
    base: RoundLatencies
    candidate: RoundLatencies


Launch = Sequence[Round]


class ServedRounds(Record):
    """The content of served.json: the launches of each configuration that was checked."""

    FORMAT: ClassVar[int] = 1
    checks: Mapping[str, tuple[Launch, ...]] = {}


@dataclass(frozen=True)
class ServedCheck:
    """Measures into the folder of a comparison.

    ``check``: raises Interrupted if a signal has come. ``show``: gets what is being done. ``on_failed``, ``resume``: as
    of a ``PairRunner``. ``rounds``: of one launch at most.
    """

    folder: CompareFolder
    order_seed: int
    check: Callable[[], None]
    show: Callable[[str], None]
    on_failed: OnFailed
    resume: int = 0
    rounds: int = ROUNDS

    def run(self, workloads: Sequence[PairedWorkload]) -> FailedAttempt | None:
        """Measures what is missing; returns the last attempt at a workload that it gave up."""
        checks = {key: list(launches) for key, launches in read_served(self.folder).items()}
        matched = [(workload, workload.matches[0]) for workload in workloads if workload.matches]
        for workload, match in matched:
            launches = checks.setdefault(match.key, [])
            while len(launches) < LAUNCHES:
                if launches and all(j.outcome == PASS for j in _judge(launches, len(matched)).values()):
                    break
                launch = self._measure(workload, match, len(launches))
                if isinstance(launch, FailedAttempt):
                    return launch
                launches.append(launch)
                write_record(self.folder.path / FILE, ServedRounds(checks=checks))
        return None

    def _measure(self, workload: PairedWorkload, match: Match, launch: int) -> Launch | FailedAttempt:
        """Measures the rounds of one launch of both servers; attempts in which one fails are repeated."""
        rng = random.Random(f"kvbench-served/{self.order_seed}/{match.key}/{launch}")
        rounds: list[Round] = []

        def attempt(sides: Sequence[str], number: int) -> tuple[Reasons, Reasons]:
            nonlocal rounds
            rounds, reasons = self._attempt(workload, match, sides, rng, f"{launch + 1}-{number}")
            return reasons, reasons

        turn = say("served.turn", match=match.key)
        ended = measure_again(attempt, rng.sample(SIDES, 2), 0, turn, self.on_failed, self.resume)
        return ended if isinstance(ended, FailedAttempt) else rounds

    def _attempt(
        self, workload: PairedWorkload, match: Match, sides: Sequence[str], rng: random.Random, name: str
    ) -> tuple[list[Round], Reasons]:
        """Measures the rounds of both servers; by side why they failed. ``sides``: the first one is launched first."""
        reasons: Reasons = {side: [] for side in SIDES}
        targets = {side: workload.sides[side].choice.new_target() for side in sides}
        limits = {side: workload.sides[side].choice.workload.load.timeout_s for side in sides}
        rounds: list[Round] = []

        def send(side: str, request: RequestSpec) -> SingleLatencies | None:
            self.check()
            try:
                latencies = send_single(targets[side], request, limits[side])
                if not workload.sides[side].choice.manifest.is_built_in:
                    wait_until_idle(targets[side])
                return latencies
            except MeasurementError as error:
                reasons[side].append(reason_of(targets[side], error))
                return None

        with ExitStack() as held:
            for side in sides:
                self.check()
                self.show(say("served.starting", side=side, label=match.of(side).label))
                held.callback(targets[side].stop)
                log = self.folder.run(side, workload.name).server_log(f"{match.of(side).config_id}-served-{name}")
                try:
                    targets[side].start(match.of(side).settings, log)
                except MeasurementError as error:
                    reasons[side].append(str(error))
            if any(reasons.values()):
                return rounds, reasons
            self.show(say("served.in_turn", match=match.key))
            vocabulary = min(target.model.vocab_size for target in targets.values())
            for side, request in itertools.product(sides, _requests(rng, vocabulary, _WARM_UP)):
                if not reasons[side]:
                    send(side, request)
            gc.collect()
            gc.disable()  # a collection would make a read late
            try:
                began = time.monotonic()
                for number, request in enumerate(_requests(rng, vocabulary, self.rounds)):
                    if any(reasons.values()) or (number >= _FEWEST and time.monotonic() - began > SECONDS):
                        break
                    order = rng.sample(SIDES, 2)
                    seen = {side: send(side, request) for side in order}
                    if None not in seen.values():
                        rounds.append(Round(first=order[0], **{s: dataclasses.asdict(seen[s]) for s in SIDES}))
            finally:
                gc.enable()
        return rounds, reasons


def wait_until_idle(target: Target) -> None:
    """Waits, 2 s at most, until a server that has answered computes no more: the other one would have to share.

    A thread of vLLM goes on looking for work, and a request to the other server then took ten times as long.
    """
    if (pid := target.server().pid) is None:
        return
    until = time.monotonic() + _IDLE_LIMIT_S
    before = tree_cpu_s(pid)
    while before is not None and time.monotonic() < until:
        time.sleep(_IDLE_WINDOW_S)
        before, last = tree_cpu_s(pid), before
        if before is None or before - last <= _IDLE_CPU_S:
            return


def _requests(rng: random.Random, vocabulary: int, count: int) -> list[RequestSpec]:
    """Makes small requests, each with a prompt of its own, so that no prefix cache has it."""
    return [
        RequestSpec(i, SUITE, tuple(rng.choices(range(vocabulary), k=_PROMPT_TOKENS)), None, _OUTPUT_TOKENS)
        for i in range(count)
    ]


def read_served(folder: CompareFolder) -> Mapping[str, tuple[Launch, ...]]:
    """Reads the rounds of served.json by configuration and launch; empty without one. Raises UsageError."""
    path = folder.path / FILE
    return read_record(ServedRounds, path, "use the kvbench that measured it").checks if path.is_file() else {}


def served_findings(folder: CompareFolder, engine: Sequence[Finding]) -> tuple[Finding, ...]:
    """Judges the rounds of the served check, if there was one.

    ``engine``: the comparison's findings in engine time, which tell how much of a difference lies outside of it.
    """
    checks = {key: launches for key, launches in read_served(folder).items() if launches}
    return tuple(
        _finding(key, name, judged, engine)
        for key, launches in checks.items()
        for name, judged in _judge(launches, len(checks)).items()
    )


def served_notes(findings: Sequence[Finding]) -> list[str]:
    """Notes where base and candidate, medians, visibly contradict the change, which is the median of the rounds."""
    return [
        say(
            "served.two_medians",
            title=finding.title,
            change=finding.figures["difference_ms"],
            apart=finding.candidate - finding.base,
        )
        for finding in findings
        if contradicts(1 + finding.change, finding.candidate / finding.base, decimals=3)
    ]


def _judge(launches: Sequence[Launch], workloads: int) -> dict[str, ServedJudgement]:
    """Judges each latency; all tests of the comparison share one alpha."""
    judged = {}
    for name in JUDGED:
        base = [[getattr(round_.base, name) for round_ in rounds] for rounds in launches]
        candidate = [[getattr(round_.candidate, name) for round_ in rounds] for rounds in launches]
        judged[name] = judge_served(base, candidate, workloads * len(JUDGED))
    return judged


def _finding(key: str, name: str, judged: ServedJudgement, engine: Sequence[Finding]) -> Finding:
    title = say("served.title", metric=JUDGED[name], match=key)
    low, high = judged.interval
    sentence = say(
        f"served.{judged.outcome}",
        title=title,
        difference=judged.difference,
        low=low,
        high=high,
        rounds=len(judged.differences),
        launches=say("served.launches", n=judged.launches),
        p=wording.p_value(judged.p),
        floor=judged.floor,
        margin=judged.margin,
        where=_where(judged, engine) if judged.outcome == FAIL else "",
    )
    figures = {"floor": judged.floor / judged.base, "margin": judged.margin / judged.base}
    figures |= {"difference_ms": judged.difference, "most_ms": judged.most}
    figures |= {"rounds": len(judged.differences), "launches": judged.launches}
    return Finding(
        id=say("served.id", match=key, name=name),
        suite=SUITE,
        title=title,
        outcome=judged.outcome,
        sentence=sentence,
        metric=f"served_{name}",
        unit="ms",
        higher_is_better=False,
        base=judged.base,
        candidate=judged.candidate,
        change=judged.difference / judged.base,
        interval=(low / judged.base, high / judged.base),
        p=judged.p,
        figures=figures,
        series=tuple(difference / judged.base for difference in judged.differences),
    )


def _where(judged: ServedJudgement, engine: Sequence[Finding]) -> str:
    """Says whether the difference lies outside of the engine: engine time explains less than half of it."""
    compared = [f for f in engine if f.change is not None and f.higher_is_better is not None]
    compared = [f for f in compared if f.suite == OVERALL] or compared  # known better than those of single cells
    if not compared:
        return ""
    worse = max(0.0, *(end * wording.worse_sign(f) for f in compared for end in f.interval or (f.change,)))
    where = "inside" if worse * judged.base >= judged.difference / 2 else "outside"
    return say(f"served.{where}", difference=judged.difference, engine=wording.percent(worse, signed=False))
