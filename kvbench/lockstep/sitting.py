"""One sitting: all configurations of a sweep in engine time, taking turns step by step, launch after launch.

    <run>/lockstep/
      effects.json                            each setting's effect on each load, and how it was measured
      cells/<cell id>/loads/<launch>/         one load in engine time (kvbench/lockstep/load.py)
      logs/<launch>.log                       the engines' process

A launch is one process with an engine of every configuration; they share the weights. Every engine computes the same
requests to their end, and so does every launch: what scatters is the machine and the launch, not the requests.
Launches go on until every effect is decided or the time is over (kvbench/lockstep/intervals.py). Loads come in the
order of their users, most first: that is where memory decides. A load for which the time does not hold enough launches
is left out, and the effects say so.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.lockstep import load as loads
from kvbench.lockstep.intervals import (
    FEWEST_LAUNCHES,
    FEWEST_POOLED,
    POOLED_FREEDOM,
    Effect,
    Steps,
    as_it_recurs,
    effect,
    effect_of_values,
    goes_on,
    launch_ratios,
    pooled_effects,
)
from kvbench.lockstep.process import LOCKSTEP_COMMAND, EngineProcess, open_all
from kvbench.lockstep.turns import Seat, choose_turn, cold_facts, mean_step, take_turns, warm_up
from kvbench.runs.aggregate import flatten
from kvbench.runs.engine_time import EFFECTS, FOLDER, FORMAT
from kvbench.runs.folder import DONE, RunFolder
from kvbench.runs.metric_names import value_of
from kvbench.workload.design import Configuration, Design, LoadPoint
from kvbench.workload.file import Workload

MOST_LAUNCHES = 20
METRICS = {"output_throughput": True, "p95_ttft_ms": False, "p95_itl_ms": False}  # name -> whether higher is better
_LONGER = 2.0  # times the limit, for the fewest launches that tell something: other programs slow all of them down
_WARM_UP_USERS = 8  # of a load by arrivals
_WARM_UP_TURNS = 1  # of an engine whose turns' length is known


@dataclass
class Sitting:
    """``folder``: of the sweep's run, with /lockstep. ``capacity``: by configuration, as ``preflight`` returns it.

    ``limit_s``: no launch is begun that would not end by then, or by twice that while there are too few. ``show``:
    replaces the status line; ``check``: called twice a second, may raise.
    """

    run: RunFolder
    workload: Workload
    design: Design
    capacity: Mapping[str, Mapping[str, Any]]
    limit_s: float
    show: Callable[[str], None]
    check: Callable[[], None]
    notes: list[str] = field(default_factory=list)
    _groups: list[list[Configuration]] = field(default_factory=list)
    _turns: dict[str, dict[str, Any]] = field(default_factory=dict)  # by load: ``cold_facts``

    def __post_init__(self) -> None:
        self.folder = RunFolder(self.run.path / FOLDER)

    @property
    def points(self) -> list[LoadPoint]:
        """The loads, most users first."""
        found = {cell.load.load_id: cell.load for cell in self.design.cells}
        return sorted(found.values(), key=lambda p: -(p.concurrency or p.request_rate or 0))

    @property
    def baseline(self) -> Configuration | None:
        return next((each for each in self.design.configurations if each.is_baseline), None)

    def why_not(self) -> str | None:
        """Why these configurations cannot be compared in engine time, None if they can."""
        if self.baseline is None or len(self.design.configurations) < 2:
            return "there is no second configuration to compare the baseline with"
        for point in self.points:
            if reason := loads.why_not(self.workload.load, self._requests(point)):
                return reason
        return None

    def execute(self) -> dict[str, Any]:
        """Measures and returns the content of effects.json. Raises MeasurementError where an engine fails."""
        began, points, launch = time.monotonic(), self.points, 0
        self._groups = [[each for each in self.design.configurations if not each.is_baseline]]
        found: dict[str, Any] = {}
        while launch < MOST_LAUNCHES:
            launch += 1
            self.show(f"engine time, launch {launch}: starting {len(self.design.configurations)} engines")
            seconds = self._launch(launch, points, began)
            elapsed = time.monotonic() - began
            points = [point for point in points if point.load_id in seconds]
            found = self.effects(launch, points, elapsed, done=False)
            limit_s = self.limit_s if launch >= FEWEST_POOLED else _LONGER * self.limit_s
            if not self._goes_on(found) or elapsed * (1 + 1 / launch) > limit_s:
                break
        return self.effects(launch, points, time.monotonic() - began, done=True)

    def _launch(self, launch: int, points: Sequence[LoadPoint], began: float) -> dict[str, float]:
        """One process for each group of configurations; the seconds that each load took."""
        took: dict[str, float] = {}
        order = random.Random(f"kvbench-sitting/{self.workload.seed}/{launch}")
        groups, self._groups = self._groups, []
        while groups:
            others = groups.pop(0)
            assert self.baseline is not None
            names = [self.baseline, *others]
            order.shuffle(names)
            with ExitStack() as stack:
                log = self.folder.server_log(f"{launch}-{len(self._groups) + 1}")
                process = stack.enter_context(EngineProcess(LOCKSTEP_COMMAND, log, check=self.check))
                process.greet()
                try:
                    open_all([(process, each.config_id, each.settings) for each in names])
                except UsageError as error:
                    if len(others) > 1:  # too large together, perhaps: halves of them with the baseline
                        middle = len(others) // 2
                        groups = [others[:middle], others[middle:], *groups]
                    else:
                        self.notes.append(f"{others[0].label} was not measured in engine time: {error}")
                    continue
                self._groups.append(others)
                seats = {each.config_id: Seat(process, each.config_id) for each in names}
                if launch > 1:
                    warm_up(list(seats.values()), _users(points[0]), _WARM_UP_TURNS)
                for point in points:
                    if launch == 1 and took and not self._holds(point, points, took, time.monotonic() - began):
                        continue
                    self.show(f"engine time, launch {launch}: {point.load_id}, {len(names)} engines in turns")
                    started = time.monotonic()
                    self._measure(launch, point, list(seats.values()), order)
                    took[point.load_id] = took.get(point.load_id, 0.0) + time.monotonic() - started
        return took

    def _holds(self, point: LoadPoint, points: Sequence[LoadPoint], took: Mapping[str, float], elapsed: float) -> bool:
        """Whether the time holds enough launches that have this load too, if it takes as long as the longest so far."""
        fewest = FEWEST_POOLED if len(self.design.configurations) > POOLED_FREEDOM / 2 else FEWEST_LAUNCHES
        if fewest * (elapsed + max(took.values())) <= self.limit_s:
            return True
        minutes = fewest * (elapsed + max(took.values()) * (len(points) - len(took))) / 60
        self.notes.append(
            f"{point.load_id} was not measured in engine time: {self.limit_s / 60:g} minutes hold too few launches of "
            f"it; about {minutes:.0f} would do (--lockstep-minutes)"
        )
        return False

    def _requests(self, point: LoadPoint) -> Any:
        """Those of the first repeat over HTTP, for the smallest limits that any configuration has."""
        known = list(self.capacity.values())
        sizes = {name: min(int(each[name]) for each in known) for name in ("vocab_size", "max_model_len")}
        return loads.requests_of(self.workload.load, point, seed=self.workload.seed, repeat=1, **sizes)

    def _measure(self, launch: int, point: LoadPoint, seats: list[Seat], order: random.Random) -> None:
        requests = self._requests(point)
        cost = None
        if point.load_id not in self._turns:
            cost = warm_up(seats, _users(point))
            decode_step = mean_step(seats, decodes_only=True)
            self._turns[point.load_id] = cold_facts(cost, choose_turn(cost))
        started_at = utc_now()
        before = loads.begin(seats, self.workload.load, point, requests)
        take_turns(seats, order, self._turns[point.load_id]["turn_steps"])
        if cost is not None:  # the load's own steps are longer where they hold prompts, and not by more when cold
            cost = cost * decode_step / mean_step(seats)
            self._turns[point.load_id] = cold_facts(cost, choose_turn(cost))
        for seat, metrics in zip(seats, before, strict=True):
            cell_id = f"{seat.name}-{point.load_id}"
            with self.folder.scratch_load(cell_id, launch) as out:
                done = loads.store(out, [loads.computed(seat)], self.workload.load, point, requests, metrics)
                write_json(out / DONE, {"cell_id": cell_id, "repeat": launch, "started_at": started_at, **done})

    def effects(self, launches: int, points: Sequence[LoadPoint], seconds: float, *, done: bool) -> dict[str, Any]:
        """Writes and returns effects.json, from the launches that are stored."""
        rows = [row for point in points for others in self._groups for row in self._rows(others, point)]
        found = {
            "format": FORMAT,
            "finished": done,
            "launches": launches,
            "seconds": seconds,
            "limit_s": self.limit_s,
            "baseline": self.baseline.config_id if self.baseline else None,
            "turns": self._turns,
            "notes": self.notes,
            "effects": rows,
        }
        write_json(self.folder.path / EFFECTS, found)
        return found

    def _rows(self, others: Sequence[Configuration], point: LoadPoint) -> list[dict[str, Any]]:
        """The effects of the configurations of one process under one load."""
        assert self.baseline is not None
        base, *cells = (f"{each.config_id}-{point.load_id}" for each in (self.baseline, *others))
        launches = self.folder.done_repeats(cells[0])
        steps = {cell: _steps([self.folder.load(cell, launch) for launch in launches]) for cell in (base, *cells)}
        values = {cell: [_values(self.folder.load(cell, launch)) for launch in launches] for cell in (base, *cells)}
        rows = []
        for metric, higher in METRICS.items():
            if metric == "output_throughput":
                same = {cell: _same_work(of) for cell, of in steps.items()}
                ratios = {c: launch_ratios(steps[base], steps[c], same[base] and same[c]) for c in cells}
                y = {cell: [each.log_ratio for each in of] for cell, of in ratios.items()}
                alone = {cell: effect(of) for cell, of in ratios.items()}
            else:
                of_metric = {cell: [each[metric] for each in of] for cell, of in values.items()}
                known = [cell for cell in cells if all(of_metric[cell]) and all(of_metric[base])]
                y = {c: np.log(np.divide(of_metric[c], of_metric[base])).tolist() for c in known}
                alone = {cell: effect_of_values(of_metric[base], of_metric[cell]) for cell in known}
            for cell, found in pooled_effects(alone, y).items():
                rows.append(
                    {
                        "cell": cell,
                        "metric": metric,
                        "higher_is_better": higher,
                        "base": _mean([each[metric] for each in values[base]]),
                        "value": _mean([each[metric] for each in values[cell]]),
                        "call": found.call(higher_is_better=higher),
                        "decided": found.is_decided(),
                        **dataclasses.asdict(found),
                    }
                )
        return rows

    def _goes_on(self, found: Mapping[str, Any]) -> bool:
        names = [each.name for each in dataclasses.fields(Effect)]
        rows = [row for row in found["effects"] if row["metric"] == "output_throughput"]
        effects = [Effect(**{name: row[name] for name in names}) for row in rows]
        together = min(map(len, self._groups)) * (FEWEST_POOLED - 1) >= POOLED_FREEDOM
        return goes_on(effects, FEWEST_POOLED if together else None)


def _values(load: Any) -> dict[str, float | None]:
    measured = flatten(read_json(load / DONE)["metrics"])
    return {metric: value_of(measured, metric) for metric in METRICS}


def _users(point: LoadPoint) -> int:
    return point.concurrency or _WARM_UP_USERS


def _steps(launches: Sequence[Any]) -> list[Steps]:
    """The steps of a cell in each launch, as they recur where all launches have the same."""
    tables = [pd.read_parquet(load / "steps.parquet") for load in launches]
    seconds, tokens = ([table[name].to_numpy() for table in tables] for name in ("seconds", "output_tokens"))
    found = [Steps(*each) for each in zip(seconds, tokens, strict=True)]
    if not _same_work(found):
        return found
    return [Steps(*each) for each in zip(as_it_recurs(np.array(seconds)), tokens, strict=True)]


def _same_work(launches: Sequence[Steps]) -> bool:
    return all(np.array_equal(launches[0].tokens, each.tokens) for each in launches)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def begin_anew(run: RunFolder) -> None:
    """Removes a sitting that was interrupted: its launches would have been hours before the others."""
    shutil.rmtree(run.path / FOLDER, ignore_errors=True)
