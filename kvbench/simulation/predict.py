"""A prediction beside each measured cell of a run: by the simulator, calibrated on the run's other cells.

The requests of each load are replayed through the engine's own scheduler and KV manager. The unit costs of its steps
(``unit_costs``) are fitted to all cells but the one that is predicted. What is left between both is what the cost model
does not know, and how much faster or slower the machine was during that load.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from engine.config import EngineConfig
from engine.planning import plan_engine
from kvbench.common.errors import UsageError
from kvbench.common.files import read_json
from kvbench.metrics.latency import summarise
from kvbench.requests.request import read_requests
from kvbench.runs.folder import DONE
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.predictions import METRICS, Predicted, write_predictions
from kvbench.runs.resume import stored_workload
from kvbench.simulation.driver import row_of
from kvbench.simulation.replay import ReplayedLoad, measured_steps, replay
from kvbench.simulation.unit_costs import MeasuredSteps, UnitCosts, fit_unit_costs
from kvbench.workload.load_section import LoadConfig


@dataclass(frozen=True)
class _Load:
    """One measured load of a cell: what can be replayed, what became of its requests, and its metrics."""

    cell: MeasuredCell
    replayed: ReplayedLoad
    rows: pd.DataFrame
    metrics: Mapping[str, Any]


def predict_run(run: Run) -> Path:
    """Writes predictions.json into the run's folder. Raises UsageError where nothing can be predicted."""
    loads = _loads_of(run)
    measured = [(load.cell.cell_id, _steps_of(load)) for load in loads if load.replayed.repeats_its_steps]
    known = {load.cell.cell_id for load in loads}
    section = stored_workload(run.manifest).load
    predicted, notes = {}, [
        f"{cell.cell_id} is not predicted: {_why_not(cell, section) or 'its raw samples are not there'}"
        for cell in run.cells
        if cell.cell_id not in known
    ]  # fmt: skip
    for cell_id in dict.fromkeys(load.cell.cell_id for load in loads):
        others = [steps for of, steps in measured if of != cell_id]
        if not others:
            raise UsageError(
                f"{run.folder} has no other cell in a closed loop to calibrate the simulator on: predict a run with "
                "two cells or more"
            )
        costs, of_cell = fit_unit_costs(others), [load for load in loads if load.cell.cell_id == cell_id]
        predicted[cell_id] = _predicted(of_cell, costs)
        notes += [f"{cell_id}: {note}" for note in costs.timer(of_cell[0].replayed.config.kv_cache_dtype).notes()]
    return write_predictions(run.folder, predicted, fit_unit_costs(steps for _, steps in measured), notes)


def unit_costs_of(run: Run) -> UnitCosts:
    """Fitted to every cell of a run whose steps are known. Raises UsageError where there is none."""
    steps = [_steps_of(load) for load in _loads_of(run) if load.replayed.repeats_its_steps]
    if not steps:
        raise UsageError(f"{run.folder} has no cell in a closed loop to calibrate the simulator on")
    return fit_unit_costs(steps)


def _loads_of(run: Run) -> list[_Load]:
    """Every load that can be replayed and whose files are there. Raises UsageError where there is none."""
    if run.manifest.get("simulated"):
        raise UsageError(f"{run.folder} is simulated itself: predict a run that was measured")
    if not run.is_built_in or run.manifest.get("serve_cmd"):
        raise UsageError(f"{run.folder} is of another engine, whose scheduler the simulator does not have")
    loads, section = [], stored_workload(run.manifest).load
    for cell in run.cells:
        for repeat in cell.repeats if _why_not(cell, section) is None else ():
            folder = cell.folder / "loads" / str(repeat.repeat)
            if (folder / DONE).is_file() and (folder / "requests.parquet").is_file():
                replayed = _replayed(cell, run, section, run.folder / read_json(folder / DONE)["requests_file"])
                rows = pd.read_parquet(folder / "requests.parquet").sort_values("index")
                loads.append(_Load(cell, replayed, rows, repeat.metrics))
    if not loads:
        raise UsageError(f"{run.folder} keeps no load that can be predicted: it has no raw samples of single loads")
    return loads


def _why_not(cell: MeasuredCell, load: LoadConfig) -> str | None:
    if cell.doubt:
        return f"its measurement is {cell.doubt}"
    if not load.ignore_eos:
        return "its answers end where the model says so"
    if load.cache_state == "steady" and cell.settings.get("enable_prefix_caching"):
        return "its prefix cache begins with what the load before it left"
    return None


def _replayed(cell: MeasuredCell, run: Run, load: LoadConfig, requests: Path) -> ReplayedLoad:
    """With the settings that the cell's server said it had. Raises UsageError."""
    stored = run.manifest["servers"][cell.config_id]["engine"]
    try:
        plan = plan_engine(EngineConfig.from_mapping(stored), on_cpu=stored.get("device") == "cpu")
    except ValueError as error:
        raise UsageError(f"{cell.cell_id} cannot be replayed: {error}") from None
    assert plan.capacity is not None, "a server states its budget"
    return ReplayedLoad(
        replace(plan.config, async_scheduling=False),  # so that each step's tokens are there at its end
        plan.capacity,
        int(run.manifest["model"]["vocab_size"]),
        read_requests(requests),
        users=int(cell.load.value) if cell.load.mode == "closed" else None,
        most_in_flight=load.max_concurrency,
        primed=load.cache_state == "primed",
    )


def _steps_of(load: _Load) -> MeasuredSteps:
    return measured_steps(load.replayed, load.rows["chunk_times"].tolist(), float(load.rows["t0"].min()))


def predicted_cells(run: Run, costs: UnitCosts) -> dict[str, dict[str, Predicted]]:
    """Each cell that can be replayed, with ``costs`` from elsewhere. Raises UsageError where there is none."""
    loads = _loads_of(run)
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
