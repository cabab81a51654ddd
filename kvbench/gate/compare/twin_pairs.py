"""Pairs in turns: both servers are up at once and under the same load, and only one of them runs at any moment.

A pair is a launch of both. Whatever the machine does meets both, since they take turns of a tenth of a second
(kvbench/measure/twins.py); times are each server's own running time.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.files import write_json
from kvbench.common.machine import free_memory
from kvbench.gate.compare.sides import PairedWorkload
from kvbench.gate.timing.plan import SIDES, Turn
from kvbench.measure.load import LoadSetup
from kvbench.measure.twins import SLICE_S, TurnLength, Twin, TwinsError, measure_twins, why_not_in_turns
from kvbench.runs.folder import DONE
from kvbench.sweep.block import BlockRunner, Failure, is_gone
from kvbench.targets.base import Target, reason_of
from kvbench.targets.builtin import BuiltinTarget
from kvbench.targets.launched import ProcessTarget
from kvbench.workload.design import Block

GPU_GUARD_S = 0.02  # what was launched on the GPU before the freeze: a decode step or two
NOTE = (
    f"twins in turns: both servers were up at once under the same load, one frozen while the other ran for "
    f"{SLICE_S * 1000:g} ms; all times are a server's own running time over HTTP, and no wall time"
)


def why_not_twins(workloads: Sequence[PairedWorkload]) -> str | None:
    """Why these sides cannot be measured in turns, None if they can."""
    for each in workloads:
        for opened in each.sides.values():
            if opened.choice.runs_already:
                return f"{opened.name} runs already, and kvbench freezes only servers that it has launched"
        if reason := why_not_in_turns(each.sides[SIDES[0]].choice.workload.load):
            return f"{each.name}: {reason}"
    return None


@dataclass(frozen=True)
class TwinPairs:
    """``runners``: by side and workload; ``order_seed``: the comparison's, of the order in each round."""

    runners: Mapping[tuple[str, str], BlockRunner]
    order_seed: int

    def measure(self, turn: Turn, sides: Sequence[str], pair: int) -> dict[str, list[Failure]]:
        runners = {side: self.runners[side, turn.match.workload] for side in SIDES}
        before = {side: len(runners[side].failures) for side in SIDES}
        order = list(turn.order)
        while order:
            order = _Sitting(self, turn, runners, sides, pair, order).measure()
        return {side: runners[side].failures[before[side] :] for side in SIDES}


@dataclass(frozen=True)
class _Sitting:
    """One launch of both servers, and as many of the loads ``order`` (indices) as they can be measured under."""

    pairs: TwinPairs
    turn: Turn
    runners: Mapping[str, BlockRunner]
    sides: Sequence[str]
    pair: int
    order: Sequence[int]

    def measure(self) -> list[int]:
        """Returns the loads that need new servers: none after a failure, since the pair is measured again then."""
        match, length = self.turn.match, TurnLength()
        keeps = any(match.of(side).config_id in self.runners[side].keeps_cache for side in SIDES)
        now, later = (self.order[:1], list(self.order[1:])) if keeps else (self.order, [])
        with ExitStack() as stack:
            targets, up = {}, {}
            for side in self.sides:
                block = match.block(side, self.pair, now)
                block = Block(block.repeat, block.configuration, block.cells, alone=keeps)
                free = free_memory()
                targets[side] = target = self.runners[side].new_target()
                stack.callback(target.stop)
                if (found := self.runners[side].bring_up(target, block, block.cells)) is None:
                    return []
                up[side] = found
                if len(up) == 1:
                    self._require_room(side, target, free)
                if len(free) > 1 and block.configuration.settings.get("device") != "cpu":
                    length = TurnLength(guard_s=GPU_GUARD_S)
            freezers = {side: stack.enter_context(targets[side].freezer()) for side in self.sides}
            for position, index in enumerate(now):
                staying = [s for s in SIDES if position and self.runners[s].cache_stays(targets[s])]
                if staying:
                    for side in staying:
                        self.runners[side].keeps_cache.append(match.of(side).config_id)
                    return list(now[position:])
                if not self._load(index, targets, up, freezers, length, first=position == 0):
                    return []
        return later

    def _load(
        self,
        index: int,
        targets: Mapping[str, Target],
        up: Mapping[str, tuple[LoadSetup, dict[str, Any]]],
        freezers: Mapping[str, Any],
        length: TurnLength,
        *,
        first: bool,
    ) -> bool:
        """One load on both; False where it failed."""
        match = self.turn.match
        rng = random.Random(f"kvbench-twins/{self.pairs.order_seed}/{self.pair}/{match.names[index]}")
        cells = {side: match.cells(side)[index] for side in self.sides}
        try:
            with ExitStack() as folders:
                twins, facts = [], []
                for side in self.sides:
                    runner, (setup, started), cell = self.runners[side], up[side], cells[side]
                    requests, path, drawn = runner.draw(setup, cell, self.pair)
                    runner.listener.load_started(cell, self.pair, len(requests))
                    out = folders.enter_context(runner.run.scratch_load(cell.cell_id, self.pair))
                    twins.append(Twin(setup, freezers[side], cell.load, requests, path, out, first))
                    facts.append({**drawn, **started})
                for twin, known, measured in zip(twins, facts, measure_twins(twins, rng, length), strict=True):
                    write_json(twin.out / DONE, {**known, **measured})
        except TwinsError as failed:
            for number, error in failed.errors.items():
                side = self.sides[number]
                reason = reason_of(targets[side], error)
                self.runners[side].fail(cells[side], self.pair, reason, of_server=is_gone(targets[side]))
            return False
        return True

    def _require_room(self, side: str, target: ProcessTarget, before: Mapping[str, int]) -> None:
        """Raises UsageError where a second server like ``target`` does not fit. ``before``: free memory without it.

        A cache in the machine's memory may take it only as it fills: then both servers still need their budget. The
        built-in engine's is filled at its start.
        """
        configuration, after = self.turn.match.of(side), free_memory()
        needs = {where: free - after.get(where, 0) for where, free in before.items() if where != "this machine"}
        needs["this machine"] = target.memory_bytes()
        on_host = configuration.settings.get("device") == "cpu" or len(before) == 1
        if on_host and not isinstance(target, BuiltinTarget):
            known = self.runners[side].capacity.get(configuration.config_id, {})
            needs["this machine"] += 2 * int(known.get("kv_budget_bytes") or 0)
        for where, needed in needs.items():
            if needed > after.get(where, needed):
                raise UsageError(
                    f"two servers at once do not fit: the first one needs {needed / 2**30:.1f} GiB of {where}, and "
                    f"{after[where] / 2**30:.1f} GiB are left; lower kv_budget, or measure with --method launched"
                )
