"""What a report says of a run that was simulated: nothing in it may be taken for a measurement."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kvbench.common import text as words
from kvbench.report.style import Drawing
from kvbench.report.tables import Column, Table, cell_table, identity_columns, number_column
from kvbench.runs.metric_names import SIMULATED_SECONDS
from kvbench.runs.model import COST_NOTES, MeasuredCell, Run

_NO_CLIENT = (
    "There is no client and no network: TTFT begins when a request reaches the engine, and no request times out."
)
_NO_ANSWERS = (
    "A simulation computes no answers: what a quantised KV, or any other change, does to them is for `kvbench quality`."
)
CODE_PATHS = "The layouts differ besides the page table: paged admission keeps some pages spare for sequences that run."
REPEATS = (
    "One repeat is the same simulated engines anew under other requests, drawn from the seed, identical for all "
    "configurations; ratios are formed within a repeat. Nothing else varies between repeats."
)
TIME_NOTE = (
    "Shares of the time of all steps. gemm: projections of attention and MLP; experts: routed experts; attention: with "
    "the write of KV; elementwise: norms, rotary embedding, activation; all-reduce: between the GPUs of a model; head: "
    "logits and sampling; move: swaps and copies of KV; host: what the CPU adds to a step."
)
MEANING = (
    "simulated",
    "On a virtual clock: scheduler, pages, prefix cache and swap are the built-in engine's own, and a cost model says "
    "how long each step takes on the device.",
)


def on_what(run: Run) -> str:
    """4xA100-80GB; empty for a measured run."""
    count = int(run.simulated.get("tensor_parallel") or 1)
    return f"{f'{count}x' if count > 1 else ''}{run.simulated.get('device', '')}"


def title(run: Run) -> str:
    """The workload, marked where the run is simulated."""
    return f"{run.workload} (simulated)" if run.simulated else run.workload


def facts(run: Run) -> dict[str, Any]:
    """For the table of the environment."""
    if not run.simulated:
        return {}
    known = run.simulated
    return {"simulated": f"{known.get('model')} on {on_what(run)}", "step times": known.get("cost_model")} | {
        name: known[name] for name in ("ops", "calibration") if known.get(name)
    }


def details(run: Run) -> list[str]:
    """What limits the numbers of a simulated run, the most important first."""
    if not run.simulated:
        return []
    calibrated = run.simulated.get("calibration")
    source = f"{run.simulated.get('cost_model')}{f' by {calibrated}' if calibrated else ', not calibrated'}"
    return [
        f"Nothing was measured: kvbench's own scheduler, pages and prefix cache ran on a virtual clock as "
        f"{run.simulated.get('model')} on {on_what(run)}, with step times from a cost model ({source}).",
        *(f"Of the step times: {note}." for note in _cost_notes(run)),
        _NO_CLIENT,
        _NO_ANSWERS,
    ]


def _cost_notes(run: Run) -> list[str]:
    """What was said of the step times: of sentences that differ in their numbers only the one of the highest load."""
    found: dict[str, str] = {}
    for cell in run.by_load:
        told = cell.notes.get(COST_NOTES) or ()
        for note in (each for part in told for each in (part if isinstance(part, list) else [part])):
            found.setdefault(re.sub(r"[\d.,]+", "#", note), note)
    return list(found.values())


def time_table(run: Run) -> Table:
    """Of each cell the shares of the simulated time of its steps by what they compute; empty for a measured run."""
    known = {cell.cell_id: _parts(cell) for cell in run.cells}
    parts = dict.fromkeys(name for found in known.values() for name, seconds in found.items() if seconds)
    cells = [cell for cell in run.by_load if sum(known[cell.cell_id].values())]
    columns = [*identity_columns(), *(_share(name, known) for name in parts)]
    return cell_table(columns, cells, {"configuration", "load"}) if cells else Table((), ())


def _parts(cell: MeasuredCell) -> dict[str, float]:
    """Seconds by part of a step, of all repeats."""
    names = {name for repeat in cell.repeats for name in repeat.server if name.startswith(SIMULATED_SECONDS)}
    return {name.removeprefix(SIMULATED_SECONDS): cell.counter(name) or 0.0 for name in sorted(names)}


def _share(name: str, known: Mapping[str, Mapping[str, float]]) -> Column:
    def of(cell: MeasuredCell) -> float | None:
        total = sum(known[cell.cell_id].values())
        return known[cell.cell_id].get(name, 0.0) / total if total else None

    return number_column(name, name.replace("_", "-"), "share of the time of all steps", of, words.percent)


def marked(run: Run, drawing: Drawing) -> Drawing:
    """A figure whose caption says that it is simulated."""
    if not run.simulated:
        return drawing
    said = re.sub(r"^Simulated[.;] ", "", drawing.caption)
    return replace(drawing, caption=f"Simulated on {on_what(run)}. {words.upper_first(said)}")
