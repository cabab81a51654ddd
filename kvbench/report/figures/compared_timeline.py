"""Figure: KV use, running and waiting sequences of the compared cells over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.compared_cells import Group, panel_title, side_name, without
from kvbench.report.figures.axes import thin
from kvbench.report.style import Drawing, LineStyle, finish

_POINTS = 200  # of a line
_ROWS = {"kv": "KV in use", "running": "running", "waiting": "waiting"}


def timeline_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """One repeat of each cell: ``panel``, ``side``, ``name``, ``t`` (s), ``kv`` (% of the budget), ``running``,
    ``waiting`` (sequences)."""
    parts = []
    for group in groups:
        for side in group:
            gauges = side.cell.gauges()
            gauges = thin(gauges[gauges["repeat"] == side.cell.typical_repeat].sort_values("t"), _POINTS)
            if len(gauges):
                known = {"panel": panel_title(groups, group), "side": side.letter, "name": side_name(groups, side)}
                values = {
                    "t": gauges["t"],
                    "kv": 100 * gauges["kv_cache_usage_perc"],
                    "running": gauges["num_requests_running"],
                    "waiting": gauges["num_requests_waiting"],
                }
                parts.append(pd.DataFrame({**values, **known}))
    columns = ["t", *_ROWS, "panel", "side", "name"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def timeline_figure(frame: pd.DataFrame, looks: Mapping[str, LineStyle]) -> go.Figure:
    """Three rows of panels; a column a group."""
    panels = list(dict.fromkeys(frame["panel"]))
    figure = make_subplots(
        rows=len(_ROWS),
        cols=len(panels),
        shared_xaxes=True,
        shared_yaxes=True,
        subplot_titles=panels if len(panels) > 1 else None,
        vertical_spacing=0.05,
        horizontal_spacing=0.03,
    )
    shown: set[str] = set()
    for (panel, side), part in frame.groupby(["panel", "side"], sort=False):
        look, name = looks[str(side)], part["name"].iloc[0]
        for row, (gauge, title) in enumerate(_ROWS.items(), start=1):
            unit = " %" if gauge == "kv" else ""
            figure.add_scatter(
                x=part["t"].to_numpy(np.float32).round(2),
                y=part[gauge].to_numpy(np.float32).round(1),
                mode="lines",
                name=name,
                legendgroup=str(side),
                showlegend=row == 1 and side not in shown,
                line={"color": look.colour, "dash": look.dash, "width": 1.8, "shape": "hv"},
                hovertemplate=f"<b>{name}</b><br>%{{x:.1f}} s: %{{y:.0f}}{unit} {title}<extra></extra>",
                row=row,
                col=panels.index(panel) + 1,
            )
        shown.add(str(side))
    for row, (gauge, title) in enumerate(_ROWS.items(), start=1):
        most = max(1.0, 100.0 if gauge == "kv" else float(frame[gauge].max()))
        figure.update_yaxes(range=[0, most * 1.06], nticks=4, row=row)
        figure.update_yaxes(title_text=title, ticksuffix=" %" if gauge == "kv" else "", row=row, col=1)
    figure.update_xaxes(title_text="s since load start", row=len(_ROWS))
    figure.update_annotations(font={"size": 12})
    finish(figure, 520)
    figure.update_layout(margin_t=64 if len(panels) == 1 else 118, margin_b=56)
    return figure


def drawing(groups: Sequence[Group], looks: Mapping[str, LineStyle]) -> Drawing | None:
    """None where no server told its gauges."""
    frame = timeline_frame(groups)
    if frame.empty:
        return None
    caption = (
        "The KV budget in use and the sequences running and waiting, one repeat of each (of median throughput)."
        f"{without(groups, frame['side'], 'gauges')}"
    )
    width = 640 if len(groups) == 1 else 200 * len(set(frame["panel"])) + 90
    return Drawing("timeline", _title(groups, frame), caption, timeline_figure(frame, looks), width)


def _title(groups: Sequence[Group], frame: pd.DataFrame) -> str:
    peaks = frame.groupby("side", sort=False)["kv"].max()
    if len(groups) > 1 or peaks.isna().any():
        return "KV in use, running and waiting over time"
    return "Peak KV in use: " + ", ".join(f"{side} {peak:.0f} %" for side, peak in peaks.items())
