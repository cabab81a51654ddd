"""Predicts each measured cell of a run by the simulator, calibrated on the run's other cells.

The requests of each load are replayed through the engine's own scheduler and KV manager. The unit costs of its steps
(``unit_costs``) are fitted to all cells but the one that is predicted. What is left between both is what the cost model
does not know, and how much faster or slower the machine was during that load.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from rich.console import Console

from kvbench.common.console import print_plain
from kvbench.common.errors import UsageError, log_traceback
from kvbench.common.files import read_json
from kvbench.common.records import write_record
from kvbench.common.text import listing
from kvbench.metrics.latency import summarise
from kvbench.metrics.model import LoadMetrics, LoadOutcome
from kvbench.requests.request import RequestSpec, conversations, distinct_prefixes, read_requests
from kvbench.runs.folder import DONE
from kvbench.runs.manifest import stored_workload
from kvbench.runs.model import MeasuredCell, Repeat, Run, number
from kvbench.runs.predictions import METRICS, PREDICTIONS, Predicted, Predictions
from kvbench.runs.read import read_run
from kvbench.simulation.cost.cost_model import StepTimer
from kvbench.simulation.cost.machine import SettingsByName
from kvbench.simulation.cost.unit_costs import MeasuredSteps, UnitCostModel, UnitCosts, fit_unit_costs, measured
from kvbench.simulation.fleet.drive import TURNAROUND_S, Drive, EndedRequest, Replica, prime
from kvbench.simulation.fleet.recorder import row_of
from kvbench.simulation.wording import sentence
from kvbench.workload.load_section import LoadConfig
from kvbench_engine.config import EngineConfig
from kvbench_engine.execution.simulated_executor import StepTime, StepWork
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.planning import plan_engine

_HOST = ("dtype", "kernel_backend", "num_threads", "torch_compile", "fused_layers")
"""Settings of a server on which its unit costs depend; a cell is predicted from cells that agree in them."""
_SAME_STEPS = 0.02  # by how much the steps of a replay may differ from those that the server counted
LoadsByCell = Mapping[str, Sequence["_ReplayableLoad"]]
_MOST_STEPS_AFTER_SWEEP = 200_000  # of all loads: about a minute
_EVEN_STEP_S = 0.02  # of a replay whose times do not matter; longer than the turnaround


@dataclass(frozen=True)
class ReplayedLoad:
    """A load as it is replayed.

    users: of a closed loop; None: requests are sent at their arrivals, at most ``most_in_flight`` at a time
    primed: the shared prefixes were sent once before the load
    """

    config: EngineConfig
    capacity: KVCapacity
    vocab_size: int
    requests: Sequence[RequestSpec]
    users: int | None
    most_in_flight: int | None = None
    primed: bool = False

    @property
    def repeats_its_steps(self) -> bool:
        """Tests whether its steps are the same however fast they are computed."""
        return self.users is not None and not any(request.turn for request in self.requests)


def replay(
    load: ReplayedLoad, step_time: StepTimer, on_step: Callable[[float], None] = lambda end: None
) -> list[EndedRequest]:
    """Returns the requests as they ended, in the order of their indices. ``on_step``: gets the end of each step [s]."""
    replica = Replica(load.config, load.capacity, load.vocab_size, step_time)
    if load.primed:
        prime(replica, distinct_prefixes(load.requests))
    turns = conversations(load.requests)
    if load.users is None:
        turns.sort(key=lambda requests: requests[0].arrival_s or 0.0)
    ended: list[EndedRequest] = []
    Drive(
        [replica],
        turns,
        ended.append,
        users=load.users,
        most_in_flight=load.most_in_flight,
        turnaround_s=TURNAROUND_S,
        on_step=lambda replica, outputs: on_step(replica.clock.now),
    ).run()
    return sorted(ended, key=lambda end: end.spec.index)


def works_of(load: ReplayedLoad) -> tuple[list[StepWork], list[float], list[EndedRequest]]:
    """Returns the work of each step of a load with repeated steps; of a replay also step ends and requests."""
    works: list[StepWork] = []
    ends: list[float] = []

    def even(work: StepWork) -> StepTime:
        works.append(work)
        return StepTime(_EVEN_STEP_S)

    ended = replay(load, even, ends.append)
    return works[len(works) - len(ends) :], ends, ended  # without the steps that primed the cache


def step_ends(
    ends: Sequence[float], ended: Sequence[EndedRequest], token_times: Sequence[Sequence[float]]
) -> np.ndarray:
    """Returns when each step of a measured load ended [s], NaN where no token came at its end.

    ends, ended: of a replay, as ``works_of`` returns them
    token_times: of each request in the order of the indices, when each token came [s]; a request with another number
        of tokens than in the replay is left out
    """
    number = {end: index for index, end in enumerate(ends)}
    came: list[list[float]] = [[] for _ in ends]
    for request, times in zip(ended, token_times, strict=True):
        if len(times) == len(request.times):
            for simulated, real in zip(request.times, times, strict=True):
                came[number[simulated]].append(float(real))
    return np.array([np.median(times) if times else np.nan for times in came])


@dataclass(frozen=True)
class _ReplayableLoad:
    """A measured load of a cell, and how it is replayed; host: its server's values of ``_HOST``."""

    cell_id: str
    replayed: ReplayedLoad
    rows: pd.DataFrame
    repeat: Repeat
    host: tuple[Any, ...]


def predict_after_sweep(folder: Path, console: Console) -> None:
    """Predicts the cells of a measured sweep of the built-in engine; a failure is noted and costs no report."""
    run = read_run(folder)
    if not run.is_built_in or run.simulated:
        return
    try:
        predict_run(run, _MOST_STEPS_AFTER_SWEEP)
    except (UsageError, OSError) as error:
        print_plain(console, f"note: no cell is predicted: {error}")
    except Exception as error:  # a fault of the simulator must not cost the report of a measured run
        print_plain(console, f"note: no cell is predicted ({error!r}, {log_traceback(error)})")


def predict_run(run: Run, most_steps: float = math.inf) -> Path:
    """Writes predictions.json into the run's folder.

    most_steps: of all loads together. Raises UsageError where there are more, or nothing can be predicted.
    """
    counted = sum(cell.counter("steps_total") or 0.0 for cell in run.cells)
    if counted > most_steps:
        raise UsageError(sentence("predict.too_many_steps", steps=counted, run=run.folder))
    loads, left_out = _loads_of(run)
    fittable, notes = _fittable(loads)
    notes += left_out
    predicted = {}
    for cell_id, of_cell in loads.items():
        others = [steps for load, steps in fittable if load.cell_id != cell_id and load.host == of_cell[0].host]
        if not others:
            notes.append(sentence("predict.alone", cell=cell_id, settings=listing(_HOST)))
            continue
        costs = fit_unit_costs(others)
        predicted[cell_id] = _predicted(of_cell, costs)
        timer = UnitCostModel(costs, of_cell[0].replayed.config.kv_cache_dtype)
        notes += [sentence("predict.note", cell=cell_id, note=note) for note in timer.notes()]
    if not predicted:
        raise UsageError(sentence("predict.one_cell", run=run.folder))
    costs = dataclasses.asdict(fit_unit_costs(steps for _, steps in fittable))
    path = run.folder / PREDICTIONS
    write_record(path, Predictions(cells=predicted, unit_costs_s=costs, notes=tuple(notes)))
    return path


def unit_costs_of(run: Run) -> UnitCosts:
    """Fits them to every cell of a run whose steps are known. Raises UsageError where there is none."""
    fittable, _ = _fittable(_loads_of(run)[0])
    if len({load.host for load, _ in fittable}) > 1:
        raise UsageError(sentence("predict.varies", run=run.folder, settings=" or ".join(_HOST)))
    return fit_unit_costs(steps for _, steps in fittable)


def _fittable(loads: LoadsByCell) -> tuple[list[tuple[_ReplayableLoad, MeasuredSteps]], list[str]]:
    """Finds the loads that can be fitted to, with their steps, and notes on those whose replay went another way."""
    fittable, notes = [], []
    for load in itertools.chain.from_iterable(loads.values()):
        if not load.replayed.repeats_its_steps:
            continue
        works, ends, ended = works_of(load.replayed)
        counted = number(load.repeat.server.get("steps_total"))
        if counted and abs(len(works) / counted - 1.0) > _SAME_STEPS:
            notes.append(sentence("predict.other_steps", cell=load.cell_id, replay=len(works), server=counted))
            continue
        began = float(load.rows["t0"].min())
        measured_ends = step_ends(ends, ended, load.rows["chunk_times"].tolist())
        fittable.append((load, measured(load.replayed.config.kv_cache_dtype, works, measured_ends, began)))
    return fittable, notes


def _loads_of(run: Run) -> tuple[LoadsByCell, list[str]]:
    """Reads every load that can be replayed, and notes why cells are left out. UsageError without any."""
    if run.simulated:
        raise UsageError(sentence("predict.simulated", run=run.folder))
    if not run.is_built_in or run.manifest.serve_cmd:
        raise UsageError(sentence("predict.other_engine", run=run.folder))
    loads: dict[str, list[_ReplayableLoad]] = {}
    left_out, section = [], stored_workload(run.manifest).load
    for cell in run.cells:
        engine = run.manifest.server_of(cell.config_id).engine.to_json()  # as its server said it
        why = _why_not(cell, engine, run, section)
        if why is None:
            read = (_load(cell, engine, repeat, run, section) for repeat in cell.repeats)
            loads[cell.cell_id] = [load for load in read if load is not None]
        if not loads.get(cell.cell_id):
            loads.pop(cell.cell_id, None)
            left_out.append(sentence("predict.left_out", why or "no samples", cell=cell.cell_id, doubt=cell.doubt))
    if not loads:
        raise UsageError(sentence("predict.nothing", run=run.folder, why="".join(f": {why}" for why in left_out[:1])))
    return loads, left_out


def _why_not(cell: MeasuredCell, engine: SettingsByName, run: Run, load: LoadConfig) -> str | None:
    """Names the form of ``predict.left_out`` for a cell that cannot be predicted; None for one that can."""
    reasons = {
        "doubt": cell.doubt,
        "no settings": not engine,
        "overlaps": engine.get("async_scheduling"),
        "answers end": not load.ignore_eos,
        "steady": "steady" in run.cache_state and cell.settings.get("enable_prefix_caching"),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _load(
    cell: MeasuredCell, engine: SettingsByName, repeat: Repeat, run: Run, load: LoadConfig
) -> _ReplayableLoad | None:
    """Reads a load; None where its files are not kept. Raises UsageError for one that cannot be replayed."""
    folder = cell.folder / "loads" / str(repeat.repeat)
    if not (folder / DONE).is_file() or not (folder / "requests.parquet").is_file():
        return None
    try:
        plan = plan_engine(EngineConfig.from_mapping(engine), on_cpu=engine.get("device") == "cpu")
    except ValueError as error:
        raise UsageError(sentence("predict.not_replayed", cell=cell.cell_id, error=error)) from None
    assert plan.capacity is not None, "a server states its budget"
    replayed = ReplayedLoad(
        plan.config,
        plan.capacity,
        int((run.manifest.model or {})["vocab_size"]),
        read_requests(run.folder / read_json(folder / DONE)["requests_file"]),
        users=int(cell.load.value) if cell.load.mode == "closed" else None,
        most_in_flight=load.max_concurrency,
        primed=load.cache_state == "primed",
    )
    rows = pd.read_parquet(folder / "requests.parquet").sort_values("index")
    return _ReplayableLoad(cell.cell_id, replayed, rows, repeat, tuple(engine.get(name) for name in _HOST))


def predicted_cells(run: Run, costs: UnitCosts) -> dict[str, dict[str, Predicted]]:
    """Predicts each cell that can be replayed, with ``costs`` from elsewhere. Raises UsageError where there is none."""
    loads, _ = _loads_of(run)
    return {cell_id: _predicted(of_cell, costs) for cell_id, of_cell in loads.items()}


def _predicted(loads: Sequence[_ReplayableLoad], costs: UnitCosts) -> dict[str, Predicted]:
    """Returns predicted and measured values by metric, each the mean over a cell's loads."""
    pairs: dict[str, list[tuple[float, float]]] = {}
    for load in loads:
        simulated = predicted_metrics(load.replayed, costs)
        for name, path in METRICS.items():
            predicted, measured = simulated.value(path), load.repeat.metrics.value(path)
            if predicted is not None and measured:
                pairs.setdefault(name, []).append((predicted, measured))
    means = {name: np.mean(figures, axis=0).tolist() for name, figures in pairs.items()}
    return {name: Predicted(predicted=predicted, measured=measured) for name, (predicted, measured) in means.items()}


def predicted_metrics(load: ReplayedLoad, costs: UnitCosts) -> LoadMetrics:
    """Computes the metrics of a load from a replay."""
    ended = replay(load, UnitCostModel(costs, load.config.kv_cache_dtype))
    outcome = LoadOutcome(mode="open" if load.users is None else "closed", concurrency=load.users)
    return summarise(pd.DataFrame([row_of(end) for end in ended]), outcome)
