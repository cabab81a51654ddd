"""A simulated run drawn over the measured one: running sequences and the use of the KV over time."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.figures.axes import thin
from kvbench.report.style import finish

_PANELS = {"running": "running sequences", "kv_cache_pct": "KV in use, %"}
_MEASURED, _PREDICTED = "#8A8A8A", "#1F77B4"


def predicted_figure(measured: pd.DataFrame, predicted: pd.DataFrame, title: str) -> go.Figure:
    """Both with the columns t [s], running and kv_cache_pct; of ``measured`` one may be missing, or 0 throughout."""
    panels = [name for name in _PANELS if name in measured and measured[name].any()] or ["running"]
    figure = make_subplots(rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for row, name in enumerate(panels, 1):
        for frame, label, colour, dash in (
            (measured, "measured", _MEASURED, "solid"),
            (thin(predicted), "simulated", _PREDICTED, "dot"),
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
