"""Pairs in engine time: a process of each side, whose engines take turns by step under the same requests.

A pair is a launch of both engines. They run at the same time and one step at a time, so whatever the machine does
meets both (kvbench/lockstep/turns.py); launches differ too, so every pair has new ones. What is measured is the engine
alone: the server around it is the served check's (served_check.py).

Cores differ too: a neighbour on a core's second thread slows it down for minutes. Engines with fewer threads than the
machine has cores would each settle on other cores, so both stay on the same ones, drawn for each pair. Ratios of one
engine to itself, 4 x 1.3 s with one thread on 2 cores: 0.24 % (sd) on one core, 0.8 % where the kernel chose, 2.4 % on
one core each.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.foreign_cpu import MachineReport
from kvbench.common.machine import gpus
from kvbench.gate.compare.folder import CompareFolder, LockstepFacts
from kvbench.gate.compare.sides import PairedWorkload
from kvbench.gate.timing.plan import SIDES, Match, Turn
from kvbench.load.launch import bound_s
from kvbench.lockstep import instrument as loads
from kvbench.lockstep.process import (
    EngineFailedError,
    EngineProcess,
    EngineRefusedError,
    open_all,
    options_of,
    read_info,
    stay_on_same_cores,
    why_not_stepped,
)
from kvbench.lockstep.turns import TurnTaker, choose_turn, cold_facts, mean_step, warm_up
from kvbench.measure.instrument import Job
from kvbench.requests.request import RequestList
from kvbench.runs.results import FailedLoad
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.design import Cell
from kvbench.workload.load_section import LoadPoint

PAIR_S = 8.0  # engine time of both sides of a pair, over all cells
_WARM_UP_LIMIT_S = 600.0  # a few hundred decode steps
_WARM_UP_TURNS = 2  # of each engine, once the length of turns is known
_LEAST_S = 3.0  # of one side in one cell
_PREFILL_SHARE = 1.3  # a load's time over that of its decode steps, for the guess of its length

OnEngine = Callable[[str, Match, ServerInfo], None]


def why_not_lockstep(workloads: Sequence[PairedWorkload], log: Path) -> str | None:
    """Says why these sides cannot be measured in lockstep, None if they can.

    It launches each engine for a moment, and opens those of other projects: what they refuse shows only then.
    """
    with ExitStack() as stack:
        for paired in workloads:
            opening, limit_s = [], 0.0
            for side in SIDES:
                opened, match = paired.sides[side], paired.matches[0]
                settings = match.of(side).settings
                if opened.choice.stepped is None:
                    return f"{opened.name} has no adapter that tells an engine when to compute a step (docs/engines.md)"
                draws = [_requests(paired, side, cell, 1, 1) for cell in match.cells(side)]
                if reason := _why_no_load(paired, side, draws):
                    return reason
                launch = opened.choice.stepped(settings)
                process = stack.enter_context(EngineProcess.of(launch, log.with_suffix(f".{side}")))
                if why := why_not_stepped(process, opened.choice.workload.load, options_of(itertools.chain(*draws))):
                    return f"the engine of {opened.name} cannot be stepped ({why})"
                if not launch.shared:
                    opening.append((process, side, settings))
                    limit_s = max(limit_s, launch.start_limit_s)
            try:
                answers = open_all(opening, limit_s)
                for (process, side, settings), answer in zip(opening, answers, strict=True):
                    capacity = paired.capacity[side][paired.matches[0].of(side).config_id]
                    read_info(process, settings, capacity, answer)
            except (UsageError, MeasurementError) as error:
                return str(error)
    return None


def _why_no_load(paired: PairedWorkload, side: str, draws: Sequence[RequestList]) -> str | None:
    """Says why a side's loads, whose requests are ``draws``, cannot be measured in engine time; None if they can."""
    load = paired.sides[side].choice.workload.load
    for requests in draws:
        if reason := loads.SteppedInstrument.why_not(load, requests):
            return f"{paired.name}: {reason}"
    settings = [match.of(side).settings for match in paired.matches]
    if gpus() and any(engine.get("device") != "cpu" and engine.get("kv_budget") is None for engine in settings):
        return "two engines on one GPU need a kv_budget: each would take most of the memory that is free"
    return None


def _requests(workload: PairedWorkload, side: str, cell: Cell, pair: int, times: int) -> Any:
    given, capacity = workload.sides[side].choice.workload, workload.capacity[side][cell.configuration.config_id]
    sizes = {"vocab_size": capacity.vocab_size, "max_model_len": capacity.max_model_len}
    try:
        return loads.requests_of(given.load, cell.load, seed=given.seed, repeat=pair, times=times, **sizes)
    except ValueError as error:  # of a later pair, whose lengths are drawn anew
        raise MeasurementError(f"{cell.cell_id}, pair {pair}: {error}") from error


@dataclass
class LockstepPairs:
    """Pairs of engines that take turns, into the folder of a comparison.

    ``facts``: chosen in the first pair and handed to ``on_facts``, so that all pairs are alike. ``on_engine``: called
    with what each engine says of itself; may refuse it with a UsageError. ``open_limit_s``: for an engine's start.
    ``check``: may raise to end the measurement. ``pair_s``: engine time of both sides of a pair (None: ``PAIR_S``).
    """

    folder: CompareFolder
    workloads: Mapping[str, PairedWorkload]
    facts: LockstepFacts
    order_seed: int
    on_facts: Callable[[LockstepFacts], None]
    on_engine: OnEngine
    open_limit_s: float
    show: Callable[[str], None]
    check: Callable[[], None]
    pair_s: float | None = None

    def measure(self, turn: Turn, sides: Sequence[str], pair: int) -> dict[str, list[FailedLoad]]:
        failures: dict[str, list[FailedLoad]] = {side: [] for side in SIDES}
        owner: dict[int, str] = {}
        try:
            with ExitStack() as stack:
                self._measure(stack, turn, sides, pair, owner)
        except EngineFailedError as error:
            side = owner[id(error.process)]
            failures[side] = [
                FailedLoad(cell_id=c.cell_id, repeat=pair, reason=str(error), of_server=True)
                for c in turn.match.cells(side)
            ]
        except MeasurementError as error:  # of no engine alone: the load did not end in time, or cannot be drawn
            for side in SIDES:
                failures[side] = [
                    FailedLoad(cell_id=c.cell_id, repeat=pair, reason=str(error)) for c in turn.match.cells(side)
                ]
        return failures

    def _measure(self, stack: ExitStack, turn: Turn, sides: Sequence[str], pair: int, owner: dict[int, str]) -> None:
        match, started, workload = turn.match, time.monotonic(), self.workloads[turn.match.workload]
        rng = random.Random(f"kvbench-lockstep/{self.order_seed}/{pair}/{match.key}")
        self.show(f"pair {pair}: starting both engines of {match.key}")
        opened, limit_s = [], self.open_limit_s
        for side in sides:
            settings = match.of(side).settings
            stepped = workload.sides[side].choice.stepped
            assert stepped is not None  # why_not_lockstep has asked
            launch = stepped(settings)
            limit_s = max(limit_s, launch.start_limit_s)
            log = self.folder.run(side, match.workload).server_log(f"{match.of(side).config_id}-{pair}")
            process = EngineProcess.of(launch, log, check=self.check)
            owner[id(process)] = side
            opened.append((stack.enter_context(process), side, settings))
        for process, _, _ in opened:
            process.greet()
        try:
            answers = open_all(opened, limit_s)
        except UsageError as error:
            if pair == 1 or not isinstance(refused := error.__cause__, EngineRefusedError):
                raise
            raise refused from None  # it opened before: its memory is missing, its settings are not wrong
        start_s = time.monotonic() - started
        infos = {}
        for (process, side, settings), answer in zip(opened, answers, strict=True):
            capacity = workload.capacity[side][match.of(side).config_id]
            infos[side] = read_info(process, settings, capacity, answer)
            self.on_engine(side, match, infos[side])
        stay_on_same_cores({process: settings for process, _, settings in opened}, infos.values(), rng)
        seats = {side: TurnTaker(process, side) for process, side, _ in opened}
        users = max(loads.users_of(cell.load) for cell in match.cells(sides[0]))
        capacities = (workload.capacity[side][match.of(side).config_id] for side in sides)
        max_model_len = min(capacity.max_model_len for capacity in capacities)
        is_first = match.key not in self.facts.turn_lengths
        turns = None if is_first else _WARM_UP_TURNS
        cost = warm_up(list(seats.values()), users, max_model_len, time.monotonic() + _WARM_UP_LIMIT_S, turns)
        decode_step_s = mean_step(list(seats.values()), decodes_only=True)
        if is_first:
            self._choose("turn_lengths", match.key, self.facts.turn_steps or choose_turn(cost))
        length = self.facts.turn_lengths[match.key]
        for index in turn.order:
            cells = {side: match.cells(side)[index] for side in sides}
            self.show(f"pair {pair}: {cells[sides[0]].cell_id}, both engines in turns")
            times = self._times(match.names[index], workload, sides[0], cells[sides[0]], pair, decode_step_s)
            stepped = {**cold_facts(cost, length), "times": times}
            facts = {"server_start_s": start_s, "lockstep": stepped, "machine": MachineReport()}
            self._load(workload, cells, pair, seats, rng, facts)

    def _times(self, name: str, workload: PairedWorkload, side: str, cell: Cell, pair: int, step_s: float) -> int:
        """Guesses how often one pair computes the load, from how long the warm-up's decode steps took.

        Once in an open loop, which takes as long as its arrivals.
        """
        if cell.load.mode == "open":
            return 1
        if name not in self.facts.times:
            drawn = _requests(workload, side, cell, pair, 1)
            steps = sum(request.max_tokens for request in drawn) / loads.users_of(cell.load)
            cells_in_all = sum(len(match.names) for other in self.workloads.values() for match in other.matches)
            wanted_s = (self.pair_s or PAIR_S) / 2 / cells_in_all
            if self.pair_s is None:
                wanted_s = max(_LEAST_S, wanted_s)
            self._choose("times", name, max(1, math.ceil(wanted_s / (_PREFILL_SHARE * steps * step_s))))
        return self.facts.times[name]

    def _choose(self, field: str, name: str, value: int) -> None:
        """Sets one of the facts for this pair and all later ones."""
        self.facts = self.facts.model_copy(update={field: {**getattr(self.facts, field), name: value}})
        self.on_facts(self.facts)

    def _load(
        self,
        workload: PairedWorkload,
        cells: Mapping[str, Cell],
        pair: int,
        seats: Mapping[str, TurnTaker],
        rng: random.Random,
        facts: Mapping[str, Any],
    ) -> None:
        sides = list(cells)
        load, point = workload.sides[sides[0]].choice.workload.load, cells[sides[0]].load
        times = facts["lockstep"]["times"]
        # the same requests again where that makes the same steps, else others after them
        again, draws = (times, 1) if loads.is_repeatable(load, point) else (1, times)
        instruments = {}
        for side in sides:
            job = Job(workload.sides[side].choice.workload, self.folder.run(side, workload.name), check=self.check)

            def draw(point: LoadPoint, pair: int, side: str = side) -> RequestList:
                return _requests(workload, side, cells[side], pair, draws)

            instruments[side] = loads.SteppedInstrument(job, seats[side], draw, keeps_requests=True)
            instruments[side].facts = dict(facts)
            instruments[side].begin(point, pair)
        for _ in range(again):
            until = time.monotonic() + len(sides) * bound_s(load, point, instruments[sides[0]].requests)
            loads.compute(list(instruments.values()), point, rng, facts["lockstep"]["turn_steps"], until)
        for side, instrument in instruments.items():
            instrument.measure(cells[side], pair)
