"""A prediction beside each measured cell of a run: by the simulator, calibrated on the run's other cells.

The requests of each load are replayed through the engine's own scheduler and KV manager. The unit costs of its steps
(``unit_costs``) are fitted to all cells but the one that is predicted. What is left between both is what the cost model
does not know, and how much faster or slower the machine was during that load.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.config import EngineConfig
from engine.planning import plan_engine
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.common.text import listing
from kvbench.metrics.latency import summarise
from kvbench.requests.request import read_requests
from kvbench.runs.folder import DONE
from kvbench.runs.model import MeasuredCell, Repeat, Run, number
from kvbench.runs.predictions import METRICS, Predicted, write_predictions
from kvbench.runs.resume import stored_workload
from kvbench.simulation.instrument import row_of
from kvbench.simulation.replay import ReplayedLoad, replay, step_ends, works_of
from kvbench.simulation.unit_costs import MeasuredSteps, UnitCosts, fit_unit_costs, measured
from kvbench.workload.load_section import LoadConfig

_HOST = ("dtype", "kernel_backend", "num_threads", "torch_compile", "fused_layers")
"""Settings of a server on which its unit costs depend; a cell is predicted from cells that agree in them."""
_SAME_STEPS = 0.02  # by how much the steps of a replay may differ from those that the server counted


@dataclass(frozen=True)
class _Load:
    """One measured load of a cell: what can be replayed, what became of its requests, and its metrics.

    ``host``: its server's values of ``_HOST``; ``steps``: that the server counted, None where it did not.
    """

    cell: MeasuredCell
    replayed: ReplayedLoad
    rows: pd.DataFrame
    metrics: Mapping[str, Any]
    host: tuple[Any, ...]
    steps: float | None


def predict_run(run: Run, most_steps: float = math.inf) -> Path:
    """Writes predictions.json into the run's folder.

    most_steps: of all loads together. Raises UsageError where there are more, or nothing can be predicted.
    """
    counted = sum(cell.counter("steps_total") or 0.0 for cell in run.cells)
    if counted > most_steps:
        raise UsageError(f"{counted:,.0f} steps take minutes to replay: `kvbench predict {run.folder}` does it")
    loads, left_out = _loads_of(run)
    measured, notes = _measured(loads)
    notes += left_out
    predicted = {}
    for cell_id in dict.fromkeys(load.cell.cell_id for load in loads):
        of_cell = [load for load in loads if load.cell.cell_id == cell_id]
        others = [s for load, s in measured if load.cell.cell_id != cell_id and load.host == of_cell[0].host]
        if not others:
            notes.append(f"{cell_id} is not predicted: no other cell in a closed loop is like it in {listing(_HOST)}")
            continue
        costs = fit_unit_costs(others)
        predicted[cell_id] = _predicted(of_cell, costs)
        notes += [f"{cell_id}: {note}" for note in costs.timer(of_cell[0].replayed.config.kv_cache_dtype).notes()]
    if not predicted:
        raise UsageError(
            f"{run.folder} has no other cell in a closed loop to calibrate the simulator on: predict a run with two "
            "cells or more"
        )
    return write_predictions(run.folder, predicted, fit_unit_costs(steps for _, steps in measured), notes)


def unit_costs_of(run: Run) -> UnitCosts:
    """Fitted to every cell of a run whose steps are known. Raises UsageError where there is none."""
    measured, _ = _measured(_loads_of(run)[0])
    if len({load.host for load, _ in measured}) > 1:
        raise UsageError(f"{run.folder} varies {' or '.join(_HOST)}, each of which has unit costs of its own")
    return fit_unit_costs(steps for _, steps in measured)


def _measured(loads: Sequence[_Load]) -> tuple[list[tuple[_Load, MeasuredSteps]], list[str]]:
    """The loads that can be fitted to, with their steps, and notes on those whose replay went another way."""
    found, notes = [], []
    for load in loads:
        if not load.replayed.repeats_its_steps:
            continue
        works, *replayed = works_of(load.replayed)
        if load.steps and abs(len(works) / load.steps - 1.0) > _SAME_STEPS:
            notes.append(
                f"nothing is fitted to {load.cell.cell_id}: its replay took {len(works)} steps and its server "
                f"{load.steps:.0f}"
            )
            continue
        began = float(load.rows["t0"].min())
        ends = step_ends(*replayed, load.rows["chunk_times"].tolist())
        found.append((load, measured(load.replayed.config.kv_cache_dtype, works, ends, began)))
    return found, notes


def _loads_of(run: Run) -> tuple[list[_Load], list[str]]:
    """Every load that can be replayed and whose files are there, and why cells are left out. UsageError without any."""
    if run.simulated:
        raise UsageError(f"{run.folder} is simulated itself: predict a run that was measured")
    if not run.is_built_in or run.manifest.get("serve_cmd"):
        raise UsageError(f"{run.folder} is of another engine, whose scheduler the simulator does not have")
    loads, left_out, section = [], [], stored_workload(run.manifest).load
    for cell in run.cells:
        why = _why_not(cell, run, section)
        found = [] if why else [load for each in cell.repeats if (load := _load(cell, each, run, section))]
        loads += found
        if not found:
            left_out.append(f"{cell.cell_id} is not predicted: {why or 'its raw samples are not there'}")
    if not loads:
        why = f": {left_out[0]}" if left_out else ""
        raise UsageError(f"{run.folder} has no load that can be predicted{why}")
    return loads, left_out


def _load(cell: MeasuredCell, repeat: Repeat, run: Run, section: LoadConfig) -> _Load | None:
    """None where its files are not kept. Raises UsageError for one that cannot be replayed."""
    folder = cell.folder / "loads" / str(repeat.repeat)
    if not (folder / DONE).is_file() or not (folder / "requests.parquet").is_file():
        return None
    replayed = _replayed(cell, run, section, run.folder / read_json(folder / DONE)["requests_file"])
    rows = pd.read_parquet(folder / "requests.parquet").sort_values("index")
    host = tuple(_engine(cell, run).get(name) for name in _HOST)
    return _Load(cell, replayed, rows, repeat.metrics, host, number(repeat.server.get("steps_total")))


def _engine(cell: MeasuredCell, run: Run) -> Mapping[str, Any]:
    """The settings that the cell's server said it had; empty where it said none."""
    return ((run.manifest.get("servers") or {}).get(cell.config_id) or {}).get("engine") or {}


def _why_not(cell: MeasuredCell, run: Run, load: LoadConfig) -> str | None:
    if cell.doubt:
        return f"its measurement is {cell.doubt}"
    if not (engine := _engine(cell, run)):
        return "its server's settings are not known"
    if engine.get("async_scheduling"):
        return "its engine plans a step while it computes the one before, so that steps have no time of their own"
    if not load.ignore_eos:
        return "its answers end where the model says so"
    if "steady" in run.cache_state and cell.settings.get("enable_prefix_caching"):
        return "its prefix cache begins with what the load before it left"
    return None


def _replayed(cell: MeasuredCell, run: Run, load: LoadConfig, requests: Path) -> ReplayedLoad:
    """With the settings that the cell's server said it had. Raises UsageError."""
    stored = _engine(cell, run)
    try:
        plan = plan_engine(EngineConfig.from_mapping(stored), on_cpu=stored.get("device") == "cpu")
    except ValueError as error:
        raise UsageError(f"{cell.cell_id} cannot be replayed: {error}") from None
    assert plan.capacity is not None, "a server states its budget"
    return ReplayedLoad(
        plan.config,
        plan.capacity,
        int(run.manifest["model"]["vocab_size"]),
        read_requests(requests),
        users=int(cell.load.value) if cell.load.mode == "closed" else None,
        most_in_flight=load.max_concurrency,
        primed=load.cache_state == "primed",
    )


def predicted_cells(run: Run, costs: UnitCosts) -> dict[str, dict[str, Predicted]]:
    """Each cell that can be replayed, with ``costs`` from elsewhere. Raises UsageError where there is none."""
    loads, _ = _loads_of(run)
    cells = dict.fromkeys(load.cell.cell_id for load in loads)
    return {cell: _predicted([load for load in loads if load.cell.cell_id == cell], costs) for cell in cells}


def _predicted(loads: Sequence[_Load], costs: UnitCosts) -> dict[str, Predicted]:
    """By metric what was predicted and measured, each the mean over a cell's loads."""
    found: dict[str, list[tuple[float, float]]] = {}
    for load in loads:
        metrics = predicted_metrics(load.replayed, costs)
        for name, path in METRICS.items():
            predicted, measured = _at(metrics, path), _at(load.metrics, path)
            if predicted is not None and measured:
                found.setdefault(name, []).append((predicted, measured))
    return {
        name: Predicted(float(np.mean([p for p, _ in pairs])), float(np.mean([m for _, m in pairs])))
        for name, pairs in found.items()
    }


def predicted_metrics(load: ReplayedLoad, costs: UnitCosts) -> dict[str, Any]:
    """The metrics of a load as ``summarise`` defines them, from a replay."""
    ended = replay(load, costs.timer(load.config.kv_cache_dtype))
    mode = "closed" if load.users is not None else "open"
    outcome = {"mode": mode, "concurrency": load.users, "request_rate": None, "client": {}}
    return summarise(pd.DataFrame([row_of(each) for each in ended]), outcome)


def _at(metrics: Mapping[str, Any], path: str) -> float | None:
    value: Any = metrics
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return float(value) if isinstance(value, int | float) else None
