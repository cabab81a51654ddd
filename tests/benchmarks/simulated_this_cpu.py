"""How well the simulator, calibrated on one workload, predicts the built-in engine on this CPU under three others.

python -m tests.benchmarks.simulated_this_cpu > table.md    (4 minutes on an otherwise idle machine)

All engines take turns of a few steps in one process, so that all meet the same machine (kvbench/lockstep/turns.py), and
compute their loads three times, of which each step's median counts. The unit costs of a step are fitted to the first
workload's loads; the others are only compared with.
"""

from __future__ import annotations

import functools
import operator
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from kvbench.lockstep import instrument as loads
from kvbench.lockstep.process import EngineProcess, open_all
from kvbench.lockstep.turns import TurnTaker, take_turns, warm_up
from kvbench.metrics.latency import summarise
from kvbench.simulation.calibrate.predict import ReplayedLoad, predicted_metrics, works_of
from kvbench.simulation.cost.unit_costs import MeasuredSteps, UnitCosts, fit_unit_costs, measured
from kvbench.targets.builtin import LOCKSTEP_COMMAND
from kvbench.workload.design import LoadPoint, design_of
from kvbench.workload.file import Workload, load_workload
from kvbench_engine.config import EngineConfig
from kvbench_engine.planning import plan_engine

CALIBRATED_ON = "mixed"
PREDICTED = ("uniform", "prefix", "reservations")
_LIMIT_S, _TURN, _TIMES = 900.0, 8, 3


@dataclass(frozen=True)
class _Cell:
    """The baseline of a workload under one of its loads."""

    workload: Workload
    point: LoadPoint
    replayed: ReplayedLoad

    @property
    def name(self) -> str:
        return f"{self.workload.name} {self.point.load_id}"


def cells_of(name: str) -> Iterator[_Cell]:
    """One for each load of a workload that ships, with the first values of its settings, on one thread."""
    changes = ("sweep={}", "engine.num_threads=1")
    workload = load_workload(Path("workloads") / f"{name}.yaml", profile="cpu", overrides=changes)
    [configuration] = design_of(workload).configurations
    plan = plan_engine(EngineConfig.from_mapping(configuration.settings), on_cpu=True)
    assert plan.capacity is not None and plan.config.max_model_len is not None
    vocab_size = int(plan.spec.text_config["vocab_size"])
    for point in workload.load_points:
        requests = loads.requests_of(
            workload.load, point, vocab_size=vocab_size, max_model_len=plan.config.max_model_len, seed=0, repeat=1
        )
        primed = workload.load.cache_state == "primed"
        replayed = ReplayedLoad(
            plan.config, plan.capacity, vocab_size, requests, point.concurrency, primed=primed, turnaround_s=0.0
        )
        yield _Cell(workload, point, replayed)


def measure(cells: list[_Cell]) -> dict[str, list[loads.Repetition]]:
    """Every cell in engine time, all in turns, ``_TIMES`` times."""
    with tempfile.TemporaryDirectory() as folder, EngineProcess(LOCKSTEP_COMMAND, Path(folder) / "log") as process:
        process.greet()
        seats = []
        for cell in cells:
            open_all([(process, cell.name, design_of(cell.workload).configurations[0].settings)])
            seats.append(TurnTaker(process, cell.name))
        until = time.monotonic() + _LIMIT_S
        warm_up(seats, 3, 256, until, 1)
        found: dict[str, list[loads.Repetition]] = {cell.name: [] for cell in cells}
        for repetition in range(_TIMES):
            for cell, seat in zip(cells, seats, strict=True):
                loads.begin(seat, cell.workload.load, cell.point, cell.replayed.requests, until)
            take_turns(seats, random.Random(repetition), _TURN, until)
            for seat in seats:
                found[seat.name].append(loads.Repetition.of(seat))
        return found


def steps_of(cell: _Cell, repetitions: list[loads.Repetition]) -> MeasuredSteps:
    works, _, _ = works_of(cell.replayed)
    seconds = np.array([each.steps[:, 0] for each in repetitions])
    typical = np.median(seconds, axis=0)
    ends = np.cumsum(typical) * (seconds.sum(axis=1).mean() / typical.sum())  # as ``loads.typical`` has it
    assert len(works) == len(ends), f"{cell.name}: the replay has {len(works)} steps and the engine {len(ends)}"
    return measured(cell.replayed.config.kv_cache_dtype, works, ends, 0.0)


def row(cell: _Cell, repetitions: list[loads.Repetition], costs: UnitCosts) -> str:
    """A table row: predicted / measured, and the error."""
    rows = [
        loads.result_row(spec, *row)
        for spec, row in zip(cell.replayed.requests, loads.typical(repetitions), strict=True)
    ]
    load = {"mode": "closed", "concurrency": cell.point.concurrency, "client": {}}
    measured, predicted = summarise(pd.DataFrame(rows), load), predicted_metrics(cell.replayed, costs)
    shown = []
    for path in (("output_throughput",), ("ttft_ms", "p95"), ("tpot_ms", "mean")):
        ours, real = (functools.reduce(operator.getitem, path, metrics) for metrics in (predicted, measured))
        shown.append(f"{ours:,.1f} / {real:,.1f} | {100 * (ours / real - 1):+.1f} %")
    return f"| {cell.name} | {' | '.join(shown)} |"


def main() -> None:
    calibrated = list(cells_of(CALIBRATED_ON))
    others = [cell for name in PREDICTED for cell in cells_of(name)]
    found = measure([*calibrated, *others])
    costs = fit_unit_costs([steps_of(cell, found[cell.name]) for cell in calibrated])
    print("| cell | output tok/s | error | p95 TTFT [ms] | error | mean TPOT [ms] | error |")
    print("|---|---|---|---|---|---|---|")
    for cell in (*calibrated, *others):
        print(row(cell, found[cell.name], costs))


if __name__ == "__main__":
    main()
