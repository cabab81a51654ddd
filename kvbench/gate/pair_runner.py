"""Runs pairs: a fresh server of each side per configuration, and again when a load was no measurement."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbench.block import BlockRunner, Failure
from kvbench.gate.folder import CompareFolder
from kvbench.gate.plan import SIDES, Turn

ATTEMPTS = 3  # of one configuration in one pair


@dataclass(frozen=True)
class Void:
    """Why one attempt at a pair is none: reasons by side. ``faults``: the servers' own among them."""

    pair: int
    attempt: int
    workload: str
    config_id: str  # base's
    reasons: Mapping[str, Sequence[str]]
    faults: Mapping[str, Sequence[str]]

    @property
    def guilty(self) -> str | None:
        """The side whose server alone failed, where one did."""
        found = [side for side in SIDES if self.faults.get(side)]
        return found[0] if len(found) == 1 else None

    def words(self) -> str:
        return "; ".join(f"{side}: {each}" for side in SIDES for each in self.reasons.get(side, ()))


class PairVoid(Exception):
    """No attempt at a pair was a measurement. ``voids``: of this configuration in this pair, all of them."""

    def __init__(self, voids: Sequence[Void]) -> None:
        super().__init__(voids[-1].words())
        self.voids = tuple(voids)

    @property
    def guilty(self) -> str | None:
        """The side whose server failed alone in every attempt: its own fault, and no noise of the machine."""
        sides = {void.guilty for void in self.voids}
        return sides.pop() if len(sides) == 1 else None


@dataclass
class PairRunner:
    """``runners``: by side and workload. ``tell``: one line for the user about an attempt that is repeated."""

    folder: CompareFolder
    runners: Mapping[tuple[str, str], BlockRunner]
    tell: Callable[[str], None]
    voids: list[Void] = field(default_factory=list)

    def run(self, turns: Sequence[Turn], pair: int) -> None:
        """Everything of the pair that is not there yet. Raises PairVoid when that takes too many attempts."""
        for turn in turns:
            if not self.folder.is_whole(turn.match, pair):
                self._run_turn(turn, pair)

    def _run_turn(self, turn: Turn, pair: int) -> None:
        match, voids = turn.match, []
        while True:
            self.folder.set_aside(match, pair)  # half a pair is none: its other half would be measured at another time
            failures = {side: self._run_side(turn, side, pair) for side in turn.sides}
            void = self._judge(turn, pair, len(voids) + 1, failures)
            if void is None:
                return
            voids.append(void)
            self.voids.append(void)
            if len(voids) == ATTEMPTS:
                raise PairVoid(voids)
            self.tell(f"pair {pair} of {match.names[0]} is measured again: {void.words()}")

    def _run_side(self, turn: Turn, side: str, pair: int) -> list[Failure]:
        runner = self.runners[side, turn.match.workload]
        before = len(runner.failures)
        runner.run_block(turn.match.block(side, pair, turn.order))
        return runner.failures[before:]

    def _judge(self, turn: Turn, pair: int, attempt: int, failures: Mapping[str, Sequence[Failure]]) -> Void | None:
        match = turn.match
        reasons: dict[str, list[str]] = {}
        faults: dict[str, list[str]] = {}
        for side in SIDES:
            faults[side] = [f"{failure.cell_id}: {failure.reason}" for failure in failures[side]]
            reasons[side] = list(faults[side])
            for done in self.folder.loads(match, side, pair):
                reasons[side] += [f"{done['cell_id']}: {each}" for each in done["invalid_reasons"]]
                faults[side] += [f"{done['cell_id']}: {each}" for each in done["server_faults"]]
        if not any(reasons.values()):
            return None
        return Void(pair, attempt, match.workload, match.base.config_id, reasons, faults)
