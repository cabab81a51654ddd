"""Runs pairs: a fresh server of each side per configuration, and again when a load was no measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from kvbench.gate.compare.folder import CompareFolder
from kvbench.gate.timing.plan import CANDIDATE, SIDES, Turn
from kvbench.gate.timing.rules import MetricRule
from kvbench.runs.aggregate import flatten
from kvbench.runs.metric_names import value_of
from kvbench.sweep.block import BlockRunner, Failure

ATTEMPTS = 3  # of one configuration in one pair
ATTEMPTS_TO_BLAME = 8  # where the candidate's server alone fails each time: 2^-8 rules chance out (void_findings.py)


@dataclass(frozen=True)
class Void:
    """Why one attempt at a pair is none: reasons by side. ``faults``: those of them that are the server's own doing.

    ``first``: the side that was launched first, the other one in the next attempt. ``resume``: how often the
    comparison had been gone on with; attempts are counted anew each time.
    """

    pair: int
    attempt: int
    turn: str
    first: str
    reasons: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]
    resume: int = 0

    @property
    def guilty(self) -> str | None:
        """The side whose server failed while nothing else went wrong, on either side."""
        found = [side for side in SIDES if self.reasons[side]]
        if len(found) != 1 or len(self.reasons[found[0]]) != len(self.faults[found[0]]):
            return None
        return found[0]

    def words(self) -> str:
        return "; ".join(f"{side}: {each}" for side in SIDES for each in self.reasons[side])

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class PairVoid(Exception):
    """No attempt at a pair was a measurement."""

    def __init__(self, void: Void) -> None:
        super().__init__(void.words())
        self.pair, self.turn = void.pair, void.turn


@dataclass(frozen=True)
class PairRunner:
    """``runners``: by side and workload. ``metrics``: what each load must have if its other half has it.

    ``on_kept`` is told the side that went first in the attempt that counts; ``on_void`` each attempt that does not,
    and how many there can be, as it looks now. ``resume``: as of ``Void``.
    """

    folder: CompareFolder
    runners: Mapping[tuple[str, str], BlockRunner]
    metrics: Sequence[MetricRule]
    on_kept: Callable[[Turn, str], None]
    on_void: Callable[[Void, int], None]
    resume: int = 0

    def run(self, turns: Sequence[Turn], pair: int) -> None:
        """Everything of the pair that is not there yet. Raises PairVoid when that takes too many attempts."""
        for turn in turns:
            if not self.folder.is_whole(turn.match, pair):
                self._run_turn(turn, pair)

    def _run_turn(self, turn: Turn, pair: int) -> None:
        """In each attempt the other side goes first: what fails by its place in the pair fails on both sides then.

        That keeps the order a coin's: it is the coin's first fall, turned round by attempts that do not depend on it.
        """
        voids: list[Void] = []
        while True:
            self.folder.set_aside(turn.match, pair)  # half a pair is none: its other half was at another time
            sides = turn.sides[::-1] if len(voids) % 2 else turn.sides
            failures = {side: self._run_side(turn, side, pair) for side in sides}
            void = self._judge(turn, pair, len(voids) + 1, sides[0], failures)
            if void is None:
                return self.on_kept(turn, sides[0])
            voids.append(void)
            blamed = all(each.guilty == CANDIDATE for each in voids)
            most = max(len(voids), ATTEMPTS_TO_BLAME if blamed else ATTEMPTS)
            self.on_void(void, most)
            if len(voids) == most:
                raise PairVoid(void)

    def _run_side(self, turn: Turn, side: str, pair: int) -> list[Failure]:
        runner = self.runners[side, turn.match.workload]
        before = len(runner.failures)
        runner.run_block(turn.match.block(side, pair, turn.order))
        return runner.failures[before:]

    def _judge(
        self, turn: Turn, pair: int, attempt: int, first: str, failures: Mapping[str, Sequence[Failure]]
    ) -> Void | None:
        reasons: dict[str, list[str]] = {side: [] for side in SIDES}
        faults: dict[str, list[str]] = {side: [] for side in SIDES}
        loads = {side: {done["cell_id"]: done for done in self.folder.loads(turn.match, side, pair)} for side in SIDES}
        for side in SIDES:
            for failure in failures[side]:
                reasons[side].append(f"{failure.cell_id}: {failure.reason}")
                faults[side] += reasons[side][-1:] if failure.of_server else []
            for cell, done in loads[side].items():
                reasons[side] += [f"{cell}: {each}" for each in done["invalid_reasons"]]
                faults[side] += [f"{cell}: {each}" for each in done["server_faults"]]
        if not any(reasons.values()):
            for side, lost in self._lost(turn, loads).items():
                reasons[side] += lost
                faults[side] += lost
        if not any(reasons.values()):
            return None
        return Void(pair, attempt, turn.match.key, first, reasons, faults, self.resume)

    def _lost(self, turn: Turn, loads: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """By side, the metrics that only its other half has: a ratio with nothing is none."""
        lost: dict[str, list[str]] = {side: [] for side in SIDES}
        for cells in zip(*(turn.match.cells(side) for side in SIDES), strict=True):
            for metric in self.metrics:
                there = {
                    side: (value_of(flatten(loads[side][cell.cell_id]["metrics"]), metric.name) or 0.0) > 0.0
                    for side, cell in zip(SIDES, cells, strict=True)
                }
                if any(there.values()):
                    for side, cell in zip(SIDES, cells, strict=True):
                        lost[side] += [] if there[side] else [f"{cell.cell_id}: it has no {metric.title}"]
        return lost
