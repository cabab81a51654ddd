"""Runs pairs; a part of a pair with an invalid load is measured again, with the other side first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbench.gate.compare.clock import LAUNCH, ONE_SIDE, Clock
from kvbench.gate.compare.folder import CompareFolder, FailedAttempt
from kvbench.gate.sentences import say
from kvbench.gate.timing.plan import CANDIDATE, SIDES, Turn
from kvbench.gate.timing.rules import MetricRule
from kvbench.metrics.definitions import figure
from kvbench.runs.results import FailedLoad
from kvbench.sweep.block import BlockRunner

ATTEMPTS = 3  # of one configuration in one pair
ATTEMPTS_TO_BLAME = 8  # where the candidate's server alone fails each time: 2^-8 rules chance out (see conclude.py)

Reasons = dict[str, list[str]]
"""Why an attempt failed, by side."""
OnFailed = Callable[[FailedAttempt, int], None]
"""Called with a failed attempt and how many attempts there may be."""


def measure_again(
    attempt: Callable[[Sequence[str], int], tuple[Reasons, Reasons]],
    sides: Sequence[str],
    pair: int,
    turn: str,
    on_failed: OnFailed,
    resume: int,
) -> FailedAttempt | str:
    """Repeats ``attempt`` until it succeeds or is given up; returns the side that was first, or the last attempt.

    Each attempt starts with the other side, so that a failure of whichever comes second is blamed on neither. The order
    stays random: it is the coin's, reversed by attempts that do not depend on the coin.

    attempt: called with the sides and a number from 1 on; returns why it failed, and what is the servers' own fault
    resume: how often the comparison was resumed
    """
    failed: list[FailedAttempt] = []
    while True:
        number = len(failed) + 1
        reasons, faults = attempt(sides, number)
        if not any(reasons.values()):
            return sides[0]
        failed.append(FailedAttempt(pair, number, turn, sides[0], reasons, faults, resume))
        blamed = all(attempt.blamed == CANDIDATE for attempt in failed)
        most = max(number, ATTEMPTS_TO_BLAME if blamed else ATTEMPTS)
        on_failed(failed[-1], most)
        if number == most:
            return failed[-1]
        sides = sides[::-1]


MeasurePair = Callable[[Turn, Sequence[str], int], dict[str, list[FailedLoad]]]
"""Writes the loads of both sides of one configuration in one pair into their run folders; by side, what failed.

It gets the sides, the first one first, and the pair. Nothing but the sides may tell base from candidate: swapping them
must swap the measured values and no more.
"""


def measure_launched(
    runners: Mapping[tuple[str, str], BlockRunner], clock: Clock, turn: Turn, sides: Sequence[str], pair: int
) -> dict[str, list[FailedLoad]]:
    """Measures one side after the other, each on a new server. ``runners``: by side and workload.

    Raises DeadlineError before a side that would not end in time.
    """
    failures = {}
    for side in sides:
        runner = runners[side, turn.match.workload]
        before = len(runner.failures)
        with clock.spend(ONE_SIDE.format(turn.match.key), clock.expected_s(LAUNCH)):
            runner.run_block(turn.match.block(side, pair, turn.order))
        failures[side] = runner.failures[before:]
    return failures


@dataclass(frozen=True)
class PairRunner:
    """Measures pairs, each until it is whole or given up.

    ``measure_pair``: measures one. ``metrics``: those that a load must have if the other side's load has them.
    ``on_measured`` gets the side that was first in a good attempt. ``resume``: as in ``FailedAttempt``. ``clock``:
    allows each attempt, by how long earlier ones took.
    """

    folder: CompareFolder
    measure_pair: MeasurePair
    metrics: Sequence[MetricRule]
    on_measured: Callable[[Turn, str], None]
    on_failed: OnFailed
    resume: int = 0
    clock: Clock = field(default_factory=Clock)

    def run(self, turns: Sequence[Turn], pair: int) -> FailedAttempt | None:
        """Measures what is missing of the pair; returns the last attempt at a part that it gave up.

        Raises DeadlineError.
        """
        for turn in turns:
            if self.folder.is_whole(turn.match.paired_cells, pair):
                continue

            def attempt(sides: Sequence[str], number: int, turn: Turn = turn) -> tuple[Reasons, Reasons]:
                self.folder.set_aside(turn.match, pair)  # half a pair is none: its other half was at another time
                with self.clock.spend(turn.match.key, self.clock.attempt_s(turn.match.key)):
                    failures = self.measure_pair(turn, sides, pair)
                return self._judge(turn, pair, failures)

            ended = measure_again(attempt, turn.sides, pair, turn.match.key, self.on_failed, self.resume)
            if isinstance(ended, FailedAttempt):
                return ended
            self.on_measured(turn, ended)
        return None

    def _judge(self, turn: Turn, pair: int, failures: Mapping[str, Sequence[FailedLoad]]) -> tuple[Reasons, Reasons]:
        """Returns by side why the attempt failed, and which of these reasons are the server's fault."""
        reasons: Reasons = {side: [] for side in SIDES}
        faults: Reasons = {side: [] for side in SIDES}
        cells, loads = turn.match.paired_cells, {}
        for side in SIDES:
            for failure in failures[side]:
                reasons[side].append(say("conclude.reason", side=failure.cell_id, reason=failure.reason))
                faults[side] += reasons[side][-1:] if failure.of_server else []
            for cell in cells:
                if (done := self.folder.done(cell, side, pair)) is not None:
                    loads[side, cell.name] = done
                    for texts, whose in ((reasons, done.not_comparable), (faults, done.server_faults)):
                        texts[side] += [say("conclude.reason", side=cell.on(side), reason=text) for text in whose]
        if any(reasons.values()):
            return reasons, faults
        for cell in cells:  # a ratio with a metric that only one side has is none
            for metric in self.metrics:
                path = figure(metric.name).path
                there = {side: (loads[side, cell.name].metrics.value(path) or 0.0) > 0.0 for side in SIDES}
                for side in SIDES:
                    if any(there.values()) and not there[side]:
                        reasons[side].append(say("conclude.no_metric", cell=cell.on(side), metric=metric.title))
        return reasons, reasons
