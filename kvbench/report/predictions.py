"""What the simulator predicted beside what was measured, cell by cell, with the error."""

from __future__ import annotations

import numpy as np

from kvbench.report.tables import Column, Row, Table, Value
from kvbench.runs.model import Run
from kvbench.runs.predictions import METRICS, Predicted

PREDICTIONS_NOTE = (
    "Predicted / measured, and the error relative to the measured figure; whole run, mean over the loads. Each cell is "
    "predicted by the simulator with unit costs that were fitted to the other cells of this run, some of which do the "
    "same work. An error is what these costs do not know (layout, page size and hashing cost nothing of their own), or "
    "the machine, which was faster or slower during that load."
)
_HEADLINE = ("output tok/s", "p95 TTFT")


def prediction_table(run: Run) -> Table:
    """One row a cell, the highest load first; no rows where nothing was predicted."""
    found = run.predictions
    rows = []
    for cell in run.by_load if found else ():
        if figures := found.cells.get(cell.cell_id):
            head = (Value(cell.name, cell.name), Value(cell.load.short, cell.load.value))
            rows.append(Row(cell, (*head, *(_value(figures.get(name)) for name in METRICS)), cell.load))
    heads = ("configuration", "load", *METRICS)
    return Table(tuple(Column(head, head) for head in heads), tuple(rows))


def _value(figure: Predicted | None) -> Value:
    if figure is None:
        return Value("–")
    return Value(
        f"{100 * figure.error:+.1f} %", figure.error, f"{_short(figure.predicted)} / {_short(figure.measured)}"
    )


def prediction_sentences(run: Run) -> list[str]:
    """How far off the predictions are, and what was not predicted."""
    if run.predictions is None:
        return []
    parts = []
    for name in _HEADLINE:
        errors = 100 * np.abs(run.predictions.errors(name))
        if len(errors):
            parts.append(
                f"{name} by {np.median(errors):.1f} % in the median cell and {errors.max():.1f} % in the worst"
            )
    cells = len(run.predictions.cells)
    said = f"The simulator, calibrated on the other cells, missed {' and '.join(parts)} of {cells}." if parts else ""
    return [text for text in (said, *(f"{note}." for note in run.predictions.notes)) if text]


def _short(value: float) -> str:
    """1,031; 12.3; 0.456"""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
