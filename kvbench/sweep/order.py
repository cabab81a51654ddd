"""Chooses what a sweep measures next.

Loads that were not measured come first, as planned; then disturbed ones again, each on a fresh server. Under
--max-minutes the first repeat of every cell is always measured. What time is left goes to one comparison with the
baseline after the other, in the order of the file, until each has the repeats that a verdict needs (a verdict on some
says more than two repeats of all), and then to what is decided least.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvbench.calibration.calibrate import ClientCalibration, passed_since
from kvbench.common.records import read_record, write_record
from kvbench.common.stats import t_interval
from kvbench.effects.comparison import FEWEST, Call, paired
from kvbench.metrics.definitions import SERVED, figure
from kvbench.metrics.model import LoadMetrics
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.results import LoadResult
from kvbench.workload.design import Block, Cell, Design

ATTEMPTS = 3  # at a load in one execution of a sweep
LoadKey = tuple[str, int]  # cell id, repeat
_DECIDING = ("output_throughput", "p95_ttft_ms")  # what further repeats are for


@dataclass
class Measured:
    """The results of the finished loads, ``done``, and how often each was measured in this execution, ``attempts``.

    ``again``: whether loads that were disturbed in this execution are measured again.
    """

    done: dict[LoadKey, LoadResult]
    attempts: Counter[LoadKey] = field(default_factory=Counter)
    again: bool = True

    def is_left(self, load: LoadKey) -> bool:
        """Tests whether the load is still to be measured; one that failed is not tried again."""
        done, attempts = self.done.get(load), self.attempts[load]
        if attempts and not self.again:
            return False
        return attempts == 0 if done is None else measures_again(done, attempts)

    def read(self, run: RunFolder, block: Block) -> None:
        """Reads the finished loads of ``block``."""
        for cell in block.cells:
            load = (cell.cell_id, block.repeat)
            self.done.pop(load, None)
            if run.is_done(*load):
                self.done[load] = read_record(LoadResult, run.load(*load) / DONE, "remove the load's folder")

    def take(self, run: RunFolder, block: Block) -> None:
        """Counts the attempts at ``block``, and reads what there is of it.

        A calibration that the client failed before a load and passed since was disturbed, whatever disturbed it.
        """
        self.attempts.update((cell.cell_id, block.repeat) for cell in block.cells)
        self.read(run, block)
        for load, done in self.done.items():
            calibration = ClientCalibration.from_json(done.calibration) if done.calibration else None
            reasons = [why for why in calibration.reasons if why not in done.disturbances] if calibration else []
            if calibration and reasons and passed_since(run.path, calibration):
                self.done[load] = done.model_copy(update={"disturbances": (*done.disturbances, *reasons)})
                write_record(run.load(*load) / DONE, self.done[load])

    def disturbed_in_a_row(self, block: Block, before: int) -> int:
        """Counts the loads up to the end of ``block`` that were disturbed one after the other."""
        for cell in block.cells:
            if (done := self.done.get((cell.cell_id, block.repeat))) is not None:
                before = before + 1 if done.is_disturbed else 0
        return before

    def valid(self, cell: Cell) -> dict[int, LoadMetrics]:
        """The metrics of a cell's valid loads by repeat."""
        repeats = sorted(repeat for cell_id, repeat in self.done if cell_id == cell.cell_id)
        loads = {repeat: self.done[cell.cell_id, repeat] for repeat in repeats}
        return {repeat: done.metrics for repeat, done in loads.items() if not done.not_comparable}


def measures_again(done: LoadResult, attempts: int) -> bool:
    """Tests whether a finished load is measured again: if it was disturbed, or is invalid from before a --resume.

    Never one with wrong answers: they may not come again, and are what was to be found.
    """
    if done.wrong_answers or not done.invalid_reasons:
        return False
    return attempts == 0 or (attempts < ATTEMPTS and done.is_disturbed)


def blocks_left(blocks: Sequence[Block], measured: Measured) -> list[Block]:
    """Lists the blocks with what is left of them: first loads without an attempt, then those with one, ..."""

    def is_next(attempts: int, cell: Cell, repeat: int) -> bool:
        load = (cell.cell_id, repeat)
        return measured.attempts[load] == attempts and measured.is_left(load)

    return [part for attempts in range(ATTEMPTS) for part in _parts(blocks, partial(is_next, attempts))]


def _parts(blocks: Sequence[Block], keep: Callable[[Cell, int], bool]) -> list[Block]:
    """The blocks with those of their cells that ``keep`` chooses, without empty ones."""
    parts = (dataclasses.replace(b, cells=tuple(cell for cell in b.cells if keep(cell, b.repeat))) for b in blocks)
    return [part for part in parts if part.cells]


def blocks_in_time(
    design: Design, blocks: Sequence[Block], measured: Measured, time_left_s: float, seconds: Callable[[Block], float]
) -> list[Block]:
    """Lists those of ``blocks_left`` that end in time; ``seconds``: what a block is expected to take.

    First those that are measured in any case: every cell's first repeat, again if it was disturbed and the cell has no
    valid load. Then what decides most.
    """
    every = blocks_left(blocks, measured)

    def is_needed(cell: Cell, repeat: int) -> bool:
        return repeat == 1 and ((cell.cell_id, repeat) not in measured.done or not measured.valid(cell))

    chosen, rest = _parts(every, is_needed), _parts(every, lambda cell, repeat: not is_needed(cell, repeat))
    time_left_s -= sum(map(seconds, chosen))
    for unit in _by_decision(design, rest, measured):
        new = [block for block in unit if block not in chosen]
        if (cost := sum(map(seconds, new))) <= time_left_s:
            chosen += new
            time_left_s -= cost
    return chosen


def _by_decision(design: Design, rest: Sequence[Block], measured: Measured) -> list[list[Block]]:
    """Groups ``rest`` in units of a configuration's and the baseline's block of one repeat.

    First those that lead a configuration to ``FEWEST`` repeats, one configuration after the other; then the least
    decided, where each configuration's next unit comes before any configuration's second one.
    """
    config_ids = [configuration.config_id for configuration in design.configurations]
    base = next((c.config_id for c in design.configurations if c.is_baseline), None)
    compared = [config_id for config_id in config_ids if config_id != base] or config_ids
    ranked = []
    for place, config_id in enumerate(compared):
        pairs, undecided = _undecided(config_id, base, design.cells, measured) if base else (FEWEST, math.inf)
        units: dict[tuple[int, int], list[Block]] = {}
        for block in rest:
            if block.configuration.config_id in (config_id, base):
                attempts = measured.attempts[block.cells[0].cell_id, block.repeat]
                units.setdefault((attempts, block.repeat), []).append(block)
        for nth, key in enumerate(sorted(units)):
            rank = (0, place, nth) if pairs + nth < FEWEST else (1, nth, -undecided, place)
            ranked.append((rank, units[key]))
    return [unit for _, unit in sorted(ranked, key=lambda ranked_unit: ranked_unit[0])]


def _undecided(config_id: str, base: str, cells: Sequence[Cell], measured: Measured) -> tuple[int, float]:
    """The fewest valid repeats that both have at a load, and the widest interval of the log ratio.

    Over loads, of output throughput and p95 TTFT, among those without a verdict; 0 if all have one.
    """
    widest, fewest = 0.0, FEWEST
    by_load = {(c.configuration.config_id, c.load.load_id): measured.valid(c) for c in cells}
    for load_id in {load_id for _, load_id in by_load}:
        mine, others = by_load.get((config_id, load_id)), by_load.get((base, load_id))
        if mine is None or others is None:
            continue
        fewest = min(fewest, len(mine.keys() & others.keys()))
        for name in _DECIDING:
            comparison = paired(name, SERVED, *_values(name, mine, others))
            if comparison is not None and comparison.call is Call.UNDECIDED:
                low, high = t_interval(np.log(comparison.values))
                widest = max(widest, high - low) if comparison.n > 1 else math.inf
    return fewest, widest


def _values(name: str, *sides: Mapping[int, LoadMetrics]) -> list[dict[int, float]]:
    """A figure by repeat of both sides: of the steady window where all repeats have it, else of the whole run."""
    loads = [metrics for side in sides for metrics in side.values()]
    wanted = figure(name)
    if wanted.statistic:
        wanted = wanted.of_steady(all(metrics.has_steady_latency for metrics in loads))
    else:
        wanted = wanted.of_steady(all(metrics.steady_output_throughput for metrics in loads))
    values = [{repeat: metrics.value(wanted.path) for repeat, metrics in side.items()} for side in sides]
    return [{repeat: value for repeat, value in side.items() if value} for side in values]
