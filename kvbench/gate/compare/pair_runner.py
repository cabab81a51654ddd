"""Runs pairs; a part of a pair with an invalid load is measured again, with the other side first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvbench.gate.compare.clock import Clock
from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.timing.plan import CANDIDATE, SIDES, Turn, cell_rows
from kvbench.gate.timing.rules import MetricRule
from kvbench.metrics.model import flatten
from kvbench.runs.metric_names import value_of
from kvbench.runs.repeats import not_comparable
from kvbench.sweep.block import BlockRunner, Failure

ATTEMPTS = 3  # of one configuration in one pair
ATTEMPTS_TO_BLAME = 8  # where the candidate's server alone fails each time: 2^-8 rules chance out (see conclude.py)


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt at a pair that failed, and the ``reasons`` by side.

    ``pair``: 0 for the served check. ``faults``: the reasons that are the server's own fault. ``first``: the side that
    was launched first. ``resume``: how often the comparison had been resumed; each time attempts are counted from 1.
    """

    pair: int
    attempt: int
    turn: str
    first: str
    reasons: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    resume: int = 0

    @property
    def where(self) -> str:
        """``pair 3 of mixed/paged``"""
        return f"pair {self.pair} of {self.turn}" if self.pair else self.turn

    @property
    def blamed(self) -> str | None:
        """The side whose server failed while nothing else went wrong on either side."""
        found = [side for side in SIDES if self.reasons[side]]
        return found[0] if len(found) == 1 and len(self.reasons[found[0]]) == len(self.faults[found[0]]) else None

    def __str__(self) -> str:
        return "; ".join(f"{side}: {each}" for side in SIDES for each in self.reasons[side])


def most_attempts(failed: Sequence[FailedAttempt]) -> int:
    """How many attempts there may be, these among them."""
    blamed = all(each.blamed == CANDIDATE for each in failed)
    return max(len(failed), ATTEMPTS_TO_BLAME if blamed else ATTEMPTS)


class Method(Protocol):
    """A way to measure both sides of one configuration in one pair."""

    def measure(self, turn: Turn, sides: Sequence[str], pair: int) -> dict[str, list[Failure]]:
        """Writes the loads of both sides into their run folders; by side, what failed. ``sides``: the first one first.

        Nothing but ``sides`` may tell base from candidate: swapping them must swap the measured values and no more.
        """
        ...


@dataclass(frozen=True)
class LaunchedPairs:
    """One side after the other, each on a new server. ``runners``: by side and workload."""

    runners: Mapping[tuple[str, str], BlockRunner]
    clock: Clock = field(default_factory=Clock)

    def measure(self, turn: Turn, sides: Sequence[str], pair: int) -> dict[str, list[Failure]]:
        """Raises OutOfTimeError before a side that would not end in time."""
        found = {}
        for side in sides:
            runner = self.runners[side, turn.match.workload]
            before = len(runner.failures)
            with self.clock.side(turn.match.key):
                runner.run_block(turn.match.block(side, pair, turn.order))
            found[side] = runner.failures[before:]
        return found


@dataclass(frozen=True)
class PairRunner:
    """``method``: how a pair is measured. ``metrics``: those that a load must have if the other side's load has them.

    ``on_measured`` gets the side that was first in a good attempt; ``on_failed`` a failed attempt and how many attempts
    there may be. ``resume``: as in ``FailedAttempt``. ``clock``: allows each attempt, by how long earlier ones took.
    """

    folder: CompareFolder
    method: Method
    metrics: Sequence[MetricRule]
    on_measured: Callable[[Turn, str], None]
    on_failed: Callable[[FailedAttempt, int], None]
    resume: int = 0
    clock: Clock = field(default_factory=Clock)

    def run(self, turns: Sequence[Turn], pair: int) -> FailedAttempt | None:
        """Measures what is missing of the pair; returns the last attempt at a part that it gave up.

        Raises OutOfTimeError.
        """
        for turn in turns:
            is_whole = self.folder.is_whole(cell_rows([turn.match]), pair)
            if not is_whole and (given_up := self._run_turn(turn, pair)):
                return given_up
        return None

    def _run_turn(self, turn: Turn, pair: int) -> FailedAttempt | None:
        """Each attempt starts with the other side, so that a failure of whichever comes second is blamed on neither.

        The order stays random: it is the coin's, reversed by attempts that do not depend on the coin.
        """
        failed: list[FailedAttempt] = []
        while True:
            self.folder.set_aside(turn.match, pair)  # half a pair is none: its other half was at another time
            sides = turn.sides[::-1] if len(failed) % 2 else turn.sides
            with self.clock.attempt(turn.match.key):
                failures = self.method.measure(turn, sides, pair)
            reasons, faults = self._judge(turn, pair, failures)
            if not any(reasons.values()):
                self.on_measured(turn, sides[0])
                return None
            attempt = len(failed) + 1
            failed.append(FailedAttempt(pair, attempt, turn.match.key, sides[0], reasons, faults, self.resume))
            most = most_attempts(failed)
            self.on_failed(failed[-1], most)
            if attempt == most:
                return failed[-1]

    def _judge(
        self, turn: Turn, pair: int, failures: Mapping[str, Sequence[Failure]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """By side, why the attempt failed, and which of these reasons are the server's fault."""
        reasons: dict[str, list[str]] = {side: [] for side in SIDES}
        faults: dict[str, list[str]] = {side: [] for side in SIDES}
        cells, loads = cell_rows([turn.match]), {}
        for side in SIDES:
            for failure in failures[side]:
                reasons[side].append(f"{failure.cell_id}: {failure.reason}")
                faults[side] += reasons[side][-1:] if failure.of_server else []
            for cell in cells:
                if (done := self.folder.done(cell, side, pair)) is not None:
                    loads[side, cell["name"]] = done
                    reasons[side] += [f"{cell[side]}: {each}" for each in not_comparable(done)]
                    faults[side] += [f"{cell[side]}: {each}" for each in done["server_faults"]]
        if any(reasons.values()):
            return reasons, faults
        for cell in cells:  # a ratio with a metric that only one side has is none
            values = {side: flatten(loads[side, cell["name"]]["metrics"]) for side in SIDES}
            for metric in self.metrics:
                there = {side: (value_of(values[side], metric.name) or 0.0) > 0.0 for side in SIDES}
                for side in SIDES if any(there.values()) else ():
                    reasons[side] += [] if there[side] else [f"{cell[side]}: it has no {metric.title}"]
        return reasons, reasons
