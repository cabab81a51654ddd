"""What the simulator predicted beside what was measured: cell by cell with the error, and one run over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.style import GREY, finish, thin
from kvbench.report.tables import Part, Row, Section, Value, listed_table, texts
from kvbench.runs.model import MeasuredCell
from kvbench.runs.predictions import METRICS, Predicted, Predictions

PREDICTIONS_NOTE = (
    "Predicted / measured, and the error relative to the measured figure; whole run, mean over the loads. Each cell is "
    "predicted by the simulator with unit costs that were fitted to the other cells of this run, some of which do the "
    "same work. An error is what these costs do not know (layout, page size and hashing cost nothing of their own), or "
    "the machine, which was faster or slower during that load."
)
_PANELS = {"running": "running sequences", "kv_cache_pct": "KV in use, %"}
_HEADLINE = ("output tok/s", "p95 TTFT")


def prediction_parts(known: Predictions | None, cells: Sequence[MeasuredCell]) -> Iterator[Part]:
    """The chapter on predictions: sentences, and a row a cell in the order of ``cells``; nothing without any."""
    if known is None:
        return
    yield from prediction_sentences(known)
    rows = []
    for cell in cells:
        if figures := known.cells.get(cell.cell_id):
            head = (*texts(cell.name), Value(cell.load.short, cell.load.value))
            rows.append(Row(cell, (*head, *(_value(figures.get(name)) for name in METRICS)), cell.load))
    table = listed_table(("configuration", "load", *METRICS), rows)
    yield Section("predictions", "Cell by cell", table, PREDICTIONS_NOTE, folded=False)


def _value(figure: Predicted | None) -> Value:
    if figure is None:
        return Value("–")
    note = f"{_short(figure.predicted)} / {_short(figure.measured)}"
    return Value(f"{100 * figure.error:+.1f} %", figure.error, note)


def prediction_sentences(known: Predictions) -> list[str]:
    """How far off the predictions are, and what was not predicted."""
    parts = []
    for name in _HEADLINE:
        errors = 100 * np.abs(known.errors(name))
        if len(errors):
            median, most = f"{np.median(errors):.1f} % in the median cell", f"{errors.max():.1f} % in the worst"
            parts.append(f"{name} by {median} and {most}")
    missed = f"The simulator, calibrated on the other cells, missed {' and '.join(parts)} of {len(known.cells)}."
    return [missed] * bool(parts) + [f"{note}." for note in known.notes if note]


def _short(value: float) -> str:
    """1,031; 12.3; 0.456"""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def predicted_figure(measured: pd.DataFrame, predicted: pd.DataFrame, title: str) -> go.Figure:
    """Both with the columns t [s], running and kv_cache_pct; of ``measured`` one may be missing, or 0 throughout."""
    panels = [name for name in _PANELS if name in measured and measured[name].any()] or ["running"]
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, name in enumerate(panels, 1):
        for frame, label, colour, dash in (
            (measured, "measured", GREY, "solid"),
            (thin(predicted), "simulated", "#1F77B4", "dot"),
        ):
            if name in frame:
                line = {"color": colour, "dash": dash, "width": 2}
                curve = go.Scatter(
                    x=frame["t"], y=frame[name], name=label, mode="lines", line=line, showlegend=row == 1
                )
                figure.add_trace(curve, row=row, col=1)
        figure.update_yaxes(title_text=_PANELS[name], rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="seconds since the first request", row=len(panels), col=1)
    finish(figure, 120 + 240 * len(panels))
    figure.update_layout(
        title={"text": title, "font": {"size": 14}, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.985},
        legend={"y": 0.93},
        margin={"t": 84},
    )
    return figure
