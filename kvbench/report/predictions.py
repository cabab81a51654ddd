"""The simulator's predictions beside the measurements: cell by cell with the error, and one run over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.style import GREY, finish, thin
from kvbench.report.tables import NONE, Part, Row, Section, Value, entry, listed_table, texts
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell
from kvbench.runs.predictions import METRICS, Predicted, Predictions

_PANELS = {"running": "running sequences", "kv_cache_pct": "KV in use, %"}
_HEADLINE = ("output tok/s", "p95 TTFT")
_SIMULATED = "#1F77B4"


def prediction_parts(predictions: Predictions | None, cells: Sequence[MeasuredCell]) -> Iterator[Part]:
    """The chapter on predictions: sentences, and a row a cell in the order of ``cells``; nothing without any."""
    if predictions is None:
        return
    yield from prediction_sentences(predictions)
    rows = []
    for cell in cells:
        if figures := predictions.cells.get(cell.cell_id):
            head = (*texts(cell.name), Value(cell.load.short, cell.load.value))
            rows.append(Row(cell, (*head, *(_value(figures.get(name)) for name in METRICS)), cell.load))
    table = listed_table(("configuration", "load", *METRICS), rows)
    yield Section("predictions", "Cell by cell", table, say("predictions.note"), folded=False)


def _value(figure: Predicted | None) -> Value:
    if figure is None:
        return NONE
    return entry(
        figure.error, f"{100 * figure.error:+.1f} %", " / ".join(map(_short, (figure.predicted, figure.measured)))
    )


def _short(value: float) -> str:
    """Writes a number in three digits or whole: `1,031`, `12.3`, `0.456`."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def prediction_sentences(predictions: Predictions) -> list[str]:
    """Says how far off the predictions are, and what was not predicted."""
    parts = []
    for name in _HEADLINE:
        errors = 100 * np.abs(predictions.errors(name))
        if len(errors):
            parts.append(say("predictions.error", name=name, median=np.median(errors), worst=errors.max()))
    missed = say("predictions.missed", parts=" and ".join(parts), cells=len(predictions.cells))
    return [missed] * bool(parts) + [f"{note}." for note in predictions.notes if note]


def predicted_figure(measured: pd.DataFrame, predicted: pd.DataFrame, title: str) -> go.Figure:
    """Both with the columns t [s], running and kv_cache_pct; of ``measured`` one may be missing, or 0 throughout."""
    panels = [name for name in _PANELS if name in measured and measured[name].any()] or ["running"]
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    curves = ((measured, "measured", GREY, "solid"), (thin(predicted), "simulated", _SIMULATED, "dot"))
    for row, name in enumerate(panels, 1):
        for frame, label, colour, dash in curves:
            if name in frame:
                look = {"name": label, "mode": "lines", "line": {"color": colour, "dash": dash, "width": 2}}
                figure.add_scatter(x=frame["t"], y=frame[name], **look, showlegend=row == 1, row=row, col=1)
        figure.update_yaxes(title_text=_PANELS[name], rangemode="tozero", row=row, col=1)
    figure.update_xaxes(title_text="seconds since the first request", row=len(panels), col=1)
    finish(figure, 120 + 240 * len(panels))
    above = {"text": title, "font": {"size": 14}, "x": 0, "xref": "paper", "xanchor": "left", "y": 0.985}
    return figure.update_layout(title=above, legend={"y": 0.93}, margin={"t": 84})
