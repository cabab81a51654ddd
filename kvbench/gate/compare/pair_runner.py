"""Runs pairs: a fresh server of each side per configuration, and again when a load was no measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.timing.plan import CANDIDATE, SIDES, Turn, cell_rows
from kvbench.gate.timing.rules import MetricRule
from kvbench.runs.aggregate import flatten
from kvbench.runs.metric_names import value_of
from kvbench.sweep.block import BlockRunner, Failure

ATTEMPTS = 3  # of one configuration in one pair
ATTEMPTS_TO_BLAME = 8  # where the candidate's server alone fails each time: 2^-8 rules chance out (see conclude.py)


@dataclass(frozen=True)
class FailedAttempt:
    """An attempt at a pair that was no measurement, and why, by side.

    ``faults``: the reasons that are the server's own doing. ``first``: the side that was launched first, the other one
    in the next attempt. ``resume``: how often the comparison had been resumed; attempts are counted anew each time.
    """

    pair: int
    attempt: int
    turn: str
    first: str
    reasons: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    resume: int = 0

    @property
    def blamed(self) -> str | None:
        """The side whose server failed while nothing else went wrong on either side."""
        found = [side for side in SIDES if self.reasons[side]]
        return found[0] if len(found) == 1 and len(self.reasons[found[0]]) == len(self.faults[found[0]]) else None

    def __str__(self) -> str:
        return "; ".join(f"{side}: {each}" for side in SIDES for each in self.reasons[side])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PairNotMeasured(Exception):
    """No attempt at a pair was a measurement; ``attempt``: the last one."""

    def __init__(self, attempt: FailedAttempt) -> None:
        super().__init__(str(attempt))
        self.attempt = attempt


@dataclass(frozen=True)
class PairRunner:
    """``runners``: by side and workload. ``metrics``: what each load must have if the other side's load has it.

    ``on_measured`` gets the side that went first in the attempt that counts; ``on_failed`` each attempt that does not,
    and how many there can be as it looks now. ``resume``: as of ``FailedAttempt``.
    """

    folder: CompareFolder
    runners: Mapping[tuple[str, str], BlockRunner]
    metrics: Sequence[MetricRule]
    on_measured: Callable[[Turn, str], None]
    on_failed: Callable[[FailedAttempt, int], None]
    resume: int = 0

    def run(self, turns: Sequence[Turn], pair: int) -> None:
        """Everything of the pair that is not measured yet. Raises PairNotMeasured after too many attempts."""
        for turn in turns:
            if not self.folder.is_whole(cell_rows([turn.match]), pair):
                self._run_turn(turn, pair)

    def _run_turn(self, turn: Turn, pair: int) -> None:
        """In each attempt the other side goes first: what fails by its place in the pair fails on both sides then.

        That keeps the order random: it is the coin's first toss, reversed by attempts that do not depend on it.
        """
        failed: list[FailedAttempt] = []
        while True:
            self.folder.set_aside(turn.match, pair)  # half a pair is none: its other half was at another time
            sides = turn.sides[::-1] if len(failed) % 2 else turn.sides
            failures = {side: self._run_side(turn, side, pair) for side in sides}
            reasons, faults = self._judge(turn, pair, failures)
            if not any(reasons.values()):
                return self.on_measured(turn, sides[0])
            attempt = len(failed) + 1
            failed.append(FailedAttempt(pair, attempt, turn.match.key, sides[0], reasons, faults, self.resume))
            blamed = all(each.blamed == CANDIDATE for each in failed)
            most = max(attempt, ATTEMPTS_TO_BLAME if blamed else ATTEMPTS)
            self.on_failed(failed[-1], most)
            if attempt == most:
                raise PairNotMeasured(failed[-1])

    def _run_side(self, turn: Turn, side: str, pair: int) -> list[Failure]:
        runner = self.runners[side, turn.match.workload]
        before = len(runner.failures)
        runner.run_block(turn.match.block(side, pair, turn.order))
        return runner.failures[before:]

    def _judge(
        self, turn: Turn, pair: int, failures: Mapping[str, Sequence[Failure]]
    ) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """By side, why the attempt is no measurement, and which of that are faults of the server."""
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
                    reasons[side] += [f"{cell[side]}: {each}" for each in done["invalid_reasons"]]
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
