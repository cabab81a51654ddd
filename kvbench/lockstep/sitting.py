"""One sitting: all configurations of a sweep in engine time, taking turns step by step, launch after launch.

    <run>/lockstep/
      effects.json                            each setting's effect on each load, and how it was measured
      cells/<cell id>/loads/<launch>/         one load in engine time (kvbench/lockstep/instrument.py)
      logs/<launch>.log                       the engines' process

A launch of the built-in engine is one process with an engine of every configuration; they share the weights. Other
engines have a process each. What memory has no room for follows in rounds: another part of every launch, with the
baseline again, in round-<number>/. Built-in engines with few threads leave cores free; then two launches compute side
by side, each in turns of its own. Every engine computes the same requests to their end, and so does every launch: what
scatters is the machine and the launch, not the requests. Launches go on until every effect on throughput is decided or
the time is over (kvbench/lockstep/intervals.py). Loads come in the order of their users, most first: that is where
memory decides. A load for which the time does not hold enough launches is left out, and the effects say so.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.machine import free_memory, usable_cores
from kvbench.common.preloaded import Preloaded
from kvbench.common.records import read_record, write_record
from kvbench.common.text import listing, plural
from kvbench.effects.comparison import Comparison
from kvbench.lockstep import instrument as loads
from kvbench.lockstep.intervals import (
    POOLED,
    LaunchRatio,
    Steps,
    as_it_recurs,
    effect,
    effect_of_values,
    fewest_launches,
    for_other_requests,
    goes_on,
    is_decided,
    launch_ratios,
    pooled_effects,
)
from kvbench.lockstep.process import (
    EngineFailedError,
    EngineProcess,
    Opened,
    open_each,
    options_of,
    read_info,
    stay_on_same_cores,
    why_not_stepped,
)
from kvbench.lockstep.turns import TurnTaker, choose_turn, cold_facts, mean_step, share_done, warm_up
from kvbench.measure.instrument import Job
from kvbench.metrics.definitions import THROUGHPUT, figure
from kvbench.metrics.latency import QUANTILES, request_latencies
from kvbench.metrics.rows import request_gaps
from kvbench.runs.engine_time import EFFECTS, FOLDER, EngineEffect, EngineTime
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import Capacity, LoadResult
from kvbench.runs.server_info import ASYNCHRONOUS, ServerInfo
from kvbench.targets.base import SteppedLaunch
from kvbench.targets.builtin import ENGINES, imports_as_usual, stepped_builtin
from kvbench.workload.design import Cell, Configuration, Design, LoadPoint
from kvbench.workload.file import Workload, runs_on_cpu
from kvbench.workload.settings import Settings

MOST_LAUNCHES = 20
ROUND = "round-"  # the folders of the rounds after the first
MOST_AT_ONCE = 2  # launches: more would share the memory's bandwidth among too many
METRICS = (THROUGHPUT, "p95_ttft_ms", "p95_itl_ms")  # figures that are compared
_MOST_LIMITS = 3  # a slow machine's first launches may take so many times limit_s, and one time less for each launch
LEAST_END_S = 90.0  # in which a first launch may end, however short limit_s is
_WARM_UP_TURNS = 1  # of an engine whose turns' length is known

Show = Callable[[str | Callable[[], str]], None]
"""Replaces the status line by a text, or by what a function returns whenever the line is shown."""


@dataclass
class Sitting:
    """The launches of all configurations. ``capacity``: by configuration; ``run``: of the sweep, with /lockstep.

    ``limit_s``: no launch is begun that would not end by then, or by up to ``_MOST_LIMITS`` times that while there
    are too few; ``open_limit_s``: until one engine is there. ``check``: called twice a second, may raise.
    ``is_enough``: whether so many launches answer the question, if that is another one than every effect on throughput
    (then one configuration may be alone). ``option``: of the command, which allows more time. ``on_effects``: gets what
    is known after each launch. ``forked``: whether processes are forks of one that has imported what they need, where
    that serves all configurations.
    ``stepped``: the launch of an engine's process. ``most_at_once``: launches side by side.
    ``launches``: those measured, ``at_once`` side by side, in ``elapsed_s``.
    """

    run: RunFolder
    workload: Workload
    design: Design
    capacity: Mapping[str, Capacity]
    limit_s: float
    open_limit_s: float
    show: Show
    check: Callable[[], None]
    is_enough: Callable[[int], bool] | None = None
    option: str = "--lockstep-minutes"
    forked: bool = False
    stepped: Callable[[Settings], SteppedLaunch] = stepped_builtin
    most_at_once: int = MOST_AT_ONCE
    on_effects: Callable[[EngineTime], None] = lambda _: None
    notes: list[str] = field(default_factory=list)
    _rounds: list[list[Configuration]] = field(default_factory=list)  # beside the baseline, that take part together
    _order_seed: int = field(default_factory=lambda: random.randrange(2**32))  # another in each sitting
    _turns: dict[str, dict[str, Any]] = field(default_factory=dict)  # by load: ``cold_facts``
    launches: int = field(default=0, init=False)  # that are measured
    at_once: int = field(default=1, init=False)
    elapsed_s: float = field(default=0.0, init=False)
    _preloaded: Preloaded | None = None  # forks processes
    _options: Collection[str] = ()  # that requests have
    _shared: bool = True  # whether one process has the engines of all configurations
    versions: Mapping[str, str] = field(default_factory=dict)  # of the engines' packages, as one says
    _asynchronous: bool = False  # whether an engine says that it schedules while the device computes
    _loads: Sequence[LoadPoint] = ()  # that launches compute
    _questions: list[Comparison] = field(default_factory=list)  # effects on throughput, so far

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.run.path / FOLDER)
        self.baseline = next((c for c in self.design.configurations if c.is_baseline), None)

    @property
    def _others(self) -> list[Configuration]:
        """The configurations beside the baseline that take part."""
        return [configuration for beside in self._rounds for configuration in beside]

    @property
    def points(self) -> list[LoadPoint]:
        """The loads, most users first."""
        points = {cell.load.load_id: cell.load for cell in self.design.cells}
        return sorted(points.values(), key=lambda p: -(p.concurrency or p.request_rate or 0))

    def why_not(self) -> str | None:
        """Returns why these configurations cannot be compared in engine time, None if they can."""
        alone = len(self.design.configurations) < 2 and self.is_enough is None
        if self.baseline is None or alone:
            return "there is no second configuration to compare the baseline with"
        if None in (self._limit("vocab_size"), self._limit("max_model_len")):
            return "the model's vocabulary or length is not known before a server tells it"
        for point in self.points:
            if reason := loads.SteppedInstrument.why_not(self.workload.load, self._requests(point)):
                return reason
        return None

    def execute(self) -> EngineTime:
        """Measures and returns what effects.json holds. Raises MeasurementError where nothing could be measured.

        Called again, it goes on with further launches.
        """
        began = time.monotonic() - self.elapsed_s
        if not self.launches:
            self._prepare()
        while self.launches < MOST_LAUNCHES:
            numbers = range(self.launches + 1, self.launches + self.at_once + 1)
            try:
                for beside in self._rounds:  # the first launch may add some
                    if beside or not self._others:
                        self._launch(numbers, beside, began)
            except MeasurementError as error:
                if not self.launches:
                    raise
                if self._others:
                    self.notes.append(f"engine time ended in {_words(numbers)}: {error}")
                self.elapsed_s = time.monotonic() - began
                stored = self.effects(done=True)
                if not stored.effects:
                    raise
                return stored
            self.launches, self.elapsed_s = numbers[-1], time.monotonic() - began
            self.on_effects(self.effects(done=False))
            limit_s = max(1, _MOST_LIMITS + 1 - self.launches) * self.limit_s
            again = goes_on(self._questions) if self.is_enough is None else not self.is_enough(self.launches)
            if not again or self.elapsed_s + self.round_s > limit_s:
                break
        if self.launches == 1 and self.is_enough is None:
            minutes = math.ceil(fewest_launches(len(self._others)) * self.elapsed_s / 60)
            self.notes.append(f"one launch decides nothing: about {minutes} minutes would do ({self.option})")
        return self.effects(done=True)

    @property
    def _end_s(self) -> float:
        """The seconds after which a launch is given up."""
        return max(LEAST_END_S, _MOST_LIMITS * self.limit_s)

    @property
    def round_s(self) -> float:
        """The seconds that the next launches will take."""
        return self.elapsed_s * self.at_once / self.launches

    def _prepare(self) -> None:
        """Settles which configurations take part, and how many launches compute side by side."""
        assert self.baseline is not None
        launch = self.stepped(self.baseline.settings)
        self._loads, self._shared = self.points, launch.shared
        self._options = options_of(itertools.chain(*map(self._requests, self._loads)))
        self.open_limit_s = max(self.open_limit_s, launch.start_limit_s)
        self._rounds = [[c for c in self.design.configurations if not c.is_baseline]]
        if self.forked and all(imports_as_usual(c.settings) for c in self.design.configurations):
            self._preloaded = ENGINES
        for configuration in self.design.configurations:
            if _is_on_gpu(configuration) and "kv_budget" not in configuration.settings:
                reason = "set kv_budget: on a GPU each engine would take most of the memory that is free"
                self._leave_out(configuration, reason)
        if not self._shared:
            return
        self.at_once = launches_at_once(self.baseline.settings, self.most_at_once)
        for configuration in self._others:
            if configuration.settings.get("num_threads") != self.baseline.settings.get("num_threads"):
                reason = "engines of one process share their threads, and its num_threads is another"
                self._leave_out(configuration, reason)

    def _launch(self, numbers: Sequence[int], beside: list[Configuration], began: float) -> None:
        """Measures the loads of the baseline and of the configurations ``beside`` it, those of one round.

        The first launch settles which loads the time holds.
        """
        order = random.Random(f"kvbench-sitting/{self._order_seed}/{numbers[0]}")
        until, settles = began + self._end_s, not self._turns
        with contextlib.ExitStack() as stack:
            engines = self._open(stack, numbers, beside, order, until)
            if self._others and not beside:
                return
            if not settles:
                users = loads.users_of(self._loads[0])
                warm_up(engines, users, self._limit("max_model_len"), until, _WARM_UP_TURNS)
            took: list[float] = []
            for point in self._loads:
                if settles and took and not self._holds(point, len(self._loads) - len(took), took, began):
                    self._loads = self._loads[: len(took)]
                    return
                started = time.monotonic()
                self._measure(numbers, point, engines, self._folder_of(beside), order, until)
                took.append(time.monotonic() - started)

    def _folder_of(self, beside: Sequence[Configuration]) -> RunFolder:
        """The folder of a round; the first one's is the sitting's."""
        number = next(number for number, other in enumerate(self._rounds, 1) if other is beside)
        return self.folder if number == 1 else RunFolder(self.folder.path / f"{ROUND}{number}")

    def _open(
        self,
        stack: contextlib.ExitStack,
        numbers: Sequence[int],
        beside: list[Configuration],
        order: random.Random,
        until: float,
    ) -> list[TurnTaker]:
        """Starts the processes of a round and opens its engines, in random order; those that there is room for.

        Engines of one process open one after the other. Processes of their own open at once, the first baseline before
        the others: it shows what a process takes.
        """
        assert self.baseline is not None
        configurations = [self.baseline, *beside]
        order.shuffle(configurations)
        self.show(f"engine time, {_words(numbers)}: starting {len(configurations)} engines")
        is_first, processes = numbers[0] == 1, dict[str, EngineProcess]()
        waves = [configurations]
        if self._shared:
            self._make_room(beside, free_memory() // len(numbers) - self._budget(self.baseline), 0, is_first)
            waves = [[configuration] for configuration in configurations]
        elif is_first:
            waves = [[self.baseline], beside]
        engines, infos = list[TurnTaker](), list[ServerInfo]()
        for wave in waves:
            launched = [
                (str(number) if self._shared else f"{number}-{configuration.config_id}", configuration, number)
                for configuration in wave
                if configuration is self.baseline or configuration in beside
                for number in numbers
            ]
            self._start(stack, processes, {log: c.settings for log, c, _ in launched if log not in processes})
            limit_s = max(1.0, min(self.open_limit_s, until - time.monotonic()))
            answers = open_each([(processes[log], c.config_id, c.settings) for log, c, _ in launched], limit_s)
            for (log, configuration, number), answer in zip(launched, answers, strict=True):
                try:
                    infos.append(self._info(configuration, processes[log], answer))
                except UsageError as error:
                    if not self._shared:
                        processes[log].__exit__()  # it may compute or hold memory yet
                    if configuration in (self.baseline, *beside):  # another launch has not left it out yet
                        self._not_opened(configuration, beside, str(error), is_first)
                else:
                    engines.append(TurnTaker(processes[log], configuration.config_id, number))
            if not self._shared and wave == [self.baseline]:
                room = free_memory() - self._budget(self.baseline)
                self._make_room(beside, room, engines[0].process.memory(), is_first)
        self.versions = self.versions or next((info.versions for info in infos if info.versions), {})
        self._asynchronous |= any(info.fact("engine", ASYNCHRONOUS) for info in infos)
        if not self._shared:
            settings = {c.config_id: c.settings for c in configurations}
            stay_on_same_cores({engine.process: settings[engine.name] for engine in engines}, infos, order)
        names = {configuration.config_id for configuration in (self.baseline, *beside)}
        return [engine for engine in engines if engine.name in names]

    def _start(
        self, stack: contextlib.ExitStack, processes: dict[str, EngineProcess], logs: Mapping[str, Settings]
    ) -> None:
        """Adds to ``processes`` one for each of ``logs``, all at once. Raises MeasurementError."""
        for log, settings in logs.items():
            path, how = self.folder.server_log(log), {"check": self.check, "preloaded": self._preloaded}
            processes[log] = stack.enter_context(EngineProcess.of(self.stepped(settings), path, **how))
        for log in logs:
            if why := why_not_stepped(processes[log], self.workload.load, self._options):
                raise MeasurementError(why)

    def _info(self, configuration: Configuration, process: EngineProcess, answer: Opened) -> ServerInfo:
        """Reads what an opened engine says of itself. Raises UsageError for one that is not to be measured."""
        if isinstance(answer, UsageError) or (isinstance(answer, EngineFailedError) and self._shared):
            raise answer  # the other engines of a shared process are gone with one that failed
        if isinstance(answer, EngineFailedError):
            raise UsageError(str(answer))
        try:
            return read_info(process, configuration.settings, self.capacity[configuration.config_id], answer)
        except EngineFailedError as error:
            raise UsageError(str(error)) from None

    def _budget(self, configuration: Configuration) -> int:
        return self.capacity[configuration.config_id].kv_budget_bytes or 0

    def _make_room(self, beside: list[Configuration], room: int, process_bytes: int, is_first: bool) -> None:
        """Keeps of a round what ``room`` bytes hold at once. The rest gets a round of its own, or is left out.

        process_bytes: that an engine's process takes; where it has written to its KV cache, that counts twice
        """
        free, later = room, list[Configuration]()
        for configuration in list(beside):
            if _is_on_gpu(configuration):  # it says itself whether there is room
                continue
            takes = self._budget(configuration) + process_bytes
            if takes <= free:
                free -= takes
            elif takes <= room and is_first and self.is_enough is None:
                later.append(configuration)
            else:
                reason = f"its {takes / 2**30:.1f} GiB have no room beside the others: {free / 2**30:.1f} GiB are free"
                self._not_opened(configuration, beside, reason, is_first)
        if later:
            self.notes.append(
                f"memory holds {1 + len(beside) - len(later)} engines at once: {plural(len(later), 'configuration')} "
                "took turns with the baseline in a round of their own"
            )
            self._postpone(later, beside)

    def _postpone(self, later: list[Configuration], beside: list[Configuration]) -> None:
        """Moves configurations of a round to a new one."""
        beside[:] = [configuration for configuration in beside if configuration not in later]
        self._rounds.append(later)

    def _not_opened(
        self, configuration: Configuration, beside: list[Configuration], reason: str, is_first: bool
    ) -> None:
        """Leaves a configuration out. On a GPU, which may have no room for it, it first gets a round of its own.

        Raises MeasurementError after the first launch, which keeps what was measured.
        """
        if not is_first:
            raise MeasurementError(f"{configuration.label}: {reason}")
        if _is_on_gpu(configuration) and configuration in beside and len(beside) > 1:
            self._postpone([configuration], beside)
        else:
            self._leave_out(configuration, reason)

    def _leave_out(self, configuration: Configuration, reason: str) -> None:
        """Raises MeasurementError where nothing is left to compare."""
        self.notes.append(f"{configuration.label} was not measured in engine time: {reason}")
        for beside in self._rounds:
            beside[:] = [other for other in beside if other is not configuration]
        if configuration is self.baseline or not self._others:
            raise MeasurementError(self.notes[-1])

    def _holds(self, point: LoadPoint, left: int, took: Sequence[float], began: float) -> bool:
        """Tests whether the time holds enough launches with this load too; ``left``: loads not measured yet."""
        smallest = min((len(beside) for beside in self._rounds if beside), default=0)  # a round has its own noise
        fewest, elapsed = fewest_launches(smallest), time.monotonic() - began
        fewest = math.ceil(fewest / self.at_once) * len(self._rounds)
        if fewest * (elapsed + max(took)) <= self.limit_s:
            return True
        self.notes.append(
            f"{point.load_id} was not measured in engine time: {self.limit_s / 60:g} minutes hold too few launches of "
            f"it; about {fewest * (elapsed + max(took) * left) / 60:.0f} would do ({self.option})"
        )
        return False

    def _limit(self, name: str) -> Any:
        """The smallest limit of all configurations; None where it is not known of one."""
        limits = [getattr(capacity, name) for capacity in self.capacity.values()]
        return None if None in limits else min(limits)

    def _requests(self, point: LoadPoint) -> Any:
        """The requests of the first repeat over HTTP, for the smallest limits that any configuration has."""
        sizes = {name: self._limit(name) for name in ("vocab_size", "max_model_len")}
        return loads.requests_of(self.workload.load, point, seed=self.workload.seed, repeat=1, **sizes)

    def _measure(
        self,
        numbers: Sequence[int],
        point: LoadPoint,
        engines: list[TurnTaker],
        folder: RunFolder,
        order: random.Random,
        until: float,
    ) -> None:
        cost, all_engines = None, tuple(engines)
        job = Job(self.workload, folder, check=self.check)
        instruments = [loads.SteppedInstrument(job, engine, lambda p, _: self._requests(p)) for engine in engines]
        for instrument in instruments:
            instrument.begin(point, instrument.engine.launch)
            instrument.facts["server_forked"] = instrument.engine.process.forked
        tokens = sum(request.n * request.max_tokens for request in instruments[0].requests)
        doing = f"engine time, {_words(numbers)}: {point.load_id}, {len({e.name for e in engines})} engines"
        self.show(doing)
        try:
            if point.load_id not in self._turns:
                self.show(f"{doing} warm up")
                cost = warm_up(engines, loads.users_of(point), self._limit("max_model_len"), until)
                decode_step = mean_step(engines, decodes_only=True)
                self._turns[point.load_id] = cold_facts(cost, choose_turn(cost))
            length = self._turns[point.load_id]["turn_steps"]
            done = partial(self.show, lambda: f"{doing}, {100 * share_done(all_engines, tokens):.0f} % done")
            loads.compute(instruments, point, order, length, until, done)
        except MeasurementError:
            if time.monotonic() <= until:
                raise
            raise MeasurementError(
                f"{point.load_id} did not end by second {self._end_s:.0f}: shorten it, or allow more ({self.option})"
            ) from None
        if cost is not None:  # the load's own steps are longer where they hold prompts, and not by more when cold
            cost = cost * decode_step / mean_step(engines)
            self._turns[point.load_id] = {**cold_facts(cost, choose_turn(cost)), "first_turn_steps": length}
        configurations = {c.config_id: c for c in self.design.configurations}
        for instrument in instruments:
            configuration = configurations[instrument.engine.name]
            cell = Cell.of(configuration, point)
            result = instrument.measure(cell, instrument.engine.launch)
            if not result.valid and instrument.engine in engines:
                self._leave_out(configuration, "; ".join(result.invalid_reasons))
                engines[:] = [engine for engine in engines if engine.name != configuration.config_id]

    def effects(self, *, done: bool) -> EngineTime:
        """Writes and returns effects.json, from the launches that are stored."""
        self._questions = []
        stored = EngineTime(
            finished=done,
            launches=self.launches,
            seconds=self.elapsed_s,
            limit_s=self.limit_s,
            order_seed=self._order_seed,
            configurations=1 + len(self._others),
            at_once=self.at_once,
            own_processes=not self._shared,
            asynchronous=self._asynchronous,
            baseline=self.baseline.config_id if self.baseline else None,
            turns=self._turns,
            notes=tuple(self.notes),
            effects=tuple(
                effect
                for point in self._loads
                for beside in self._rounds
                if beside
                for effect in self._effects_at(point, beside, self.launches)
            ),
        )
        write_record(self.folder.path / EFFECTS, stored)
        return stored

    def _effects_at(
        self, point: LoadPoint, beside: Sequence[Configuration], launches: int
    ) -> Iterator[EngineEffect]:
        assert self.baseline is not None
        base, *cells = (Cell.of(c, point).cell_id for c in (self.baseline, *beside))
        folder = self._folder_of(beside)
        stored = {cell: _loads_in(folder, cell, launches) for cell in (base, *cells)}
        steps = {cell: _steps(folders) for cell, folders in stored.items()}
        values = {cell: [_values(folder) for folder in folders] for cell, folders in stored.items()}
        for metric in METRICS:
            if metric == THROUGHPUT and point.mode == "closed":  # in an open loop engines also wait
                same = {cell: _same_work(launch) for cell, launch in steps.items()}
                ratios = {c: launch_ratios(steps[base], steps[c], same[base] and same[c]) for c in cells}
                y = {cell: [launch.log_ratio for launch in ratios[cell]] for cell in cells}
                alone = {cell: effect(ratios[cell], self.at_once) for cell in cells}
            else:
                by_cell = {cell: [of_load[metric] for of_load in launch] for cell, launch in values.items()}
                whole = [cell for cell in cells if all(by_cell[cell]) and all(by_cell[base])]
                y = {c: np.log(np.divide(by_cell[c], by_cell[base])).tolist() for c in whole}
                alone = {c: effect_of_values(by_cell[base], by_cell[c], metric, self.at_once) for c in whole}
            for cell, comparison in pooled_effects(alone, y).items():
                if metric == THROUGHPUT:
                    self._questions.append(comparison)
                else:
                    first = (values_of_requests(metric, stored[cell_id][0]) for cell_id in (base, cell))
                    comparison = for_other_requests(comparison, *first, QUANTILES["p95"])
                yield EngineEffect(
                    cell=cell,
                    metric=metric,
                    higher_is_better=figure(metric).higher_is_better,
                    base=_mean([of_load[metric] for of_load in values[base]]),
                    value=_mean([of_load[metric] for of_load in values[cell]]),
                    call=comparison.call,
                    decided=is_decided(comparison),
                    ratio=comparison.ratio,
                    low=comparison.low,
                    high=comparison.high,
                    launches=comparison.n,
                    within_launch=comparison.n == 1 and comparison.low is not None,
                    smallest_seen=comparison.smallest,
                    pooled=comparison.basis == POOLED,
                )

    def loads_of(self, cell: str, launches: int) -> list[Path]:
        """The folders of a cell's loads in the first round, one a launch."""
        return _loads_in(self.folder, cell, launches)


def launches_at_once(settings: Settings, most: int = MOST_AT_ONCE) -> int:
    """Returns how many launches compute side by side: on CPUs, as many as have cores of their own, up to ``most``.

    ``settings``: of the baseline. Two launches meet each other as they would meet any other program: all engines of
    a launch alike.
    """
    threads = settings.get("num_threads")
    if not threads or not runs_on_cpu(settings.get("device", "auto")):
        return 1
    return max(1, min(most, usable_cores() // threads))


def _is_on_gpu(configuration: Configuration) -> bool:
    return not runs_on_cpu(configuration.settings.get("device", "auto"))


def _loads_in(folder: RunFolder, cell: str, launches: int) -> list[Path]:
    return [folder.load(cell, launch + 1) for launch in range(launches)]


def _words(numbers: Sequence[int]) -> str:
    return f"launch {numbers[0]}" if len(numbers) == 1 else f"launches {listing(list(map(str, numbers)))}"


def values_of_requests(metric: str, load: Path) -> list[np.ndarray]:
    """The values that each request of a load has of a p95 of TTFT or ITL. [requests] of float64 [values]"""
    requests = pd.read_parquet(load / "requests.parquet")
    if metric == "p95_itl_ms":
        return request_gaps(requests)
    return [np.array([ttft]) for ttft in request_latencies(requests)["ttft_ms"]]


def _values(load: Path) -> dict[str, float | None]:
    metrics = read_record(LoadResult, load / DONE, "measure it again").metrics
    return {metric: metrics.value(figure(metric).path) for metric in METRICS}


def throughput_ratios(bases: Sequence[Path], others: Sequence[Path]) -> list[LaunchRatio]:
    """The ratio of output throughputs of two cells in each launch of a closed-loop load; their loads' folders."""
    base, other = _steps(bases), _steps(others)
    return launch_ratios(base, other, _same_work(base) and _same_work(other))


def _steps(launches: Sequence[Path]) -> list[Steps]:
    """The steps of a cell in each launch, as they recur where all launches have the same."""
    tables = [pd.read_parquet(load / "steps.parquet") for load in launches]
    seconds, tokens = ([table[name].to_numpy() for table in tables] for name in ("seconds", "output_tokens"))
    steps = [Steps(*launch) for launch in zip(seconds, tokens, strict=True)]
    if not _same_work(steps):
        return steps
    return [Steps(*launch) for launch in zip(as_it_recurs(np.array(seconds)), tokens, strict=True)]


def _same_work(launches: Sequence[Steps]) -> bool:
    return all(np.array_equal(launches[0].tokens, launch.tokens) for launch in launches)


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def begin_anew(run: RunFolder) -> bool:
    """Removes the launches of an interrupted sitting, which would be hours before the others; tests whether it had any.

    Its effects stay until the first round of the next sitting replaces them.
    """
    there = (run.path / FOLDER).is_dir()
    for path in ("cells", "logs", f"{ROUND}*"):
        for folder in (run.path / FOLDER).glob(path):
            shutil.rmtree(folder, ignore_errors=True)
    return there
