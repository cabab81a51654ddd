"""Figure: the distributions of TTFT and ITL of the compared cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.metrics.latency import inter_token_latencies, request_latencies
from kvbench.report.compared_cells import Group, panel_title, side_name, without
from kvbench.report.figures.axes import ecdf, log_axis
from kvbench.report.style import Drawing, LineStyle, finish

_POINTS = 200  # of a curve
_LABELS = 3  # of an axis


def distributions_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """Points of the distributions: ``panel``, ``side``, ``name``, ``metric``, ``ms``, ``share`` (%), ``samples``."""
    parts = []
    for group in groups:
        for side in group:
            requests = side.cell.requests()
            if requests.empty:
                continue
            samples = {
                "TTFT": request_latencies(requests)["ttft_ms"].dropna().to_numpy(),
                "ITL": inter_token_latencies(requests),
            }
            for metric, values in samples.items():
                if len(values):
                    x, y = ecdf(values, _POINTS)
                    known = {"panel": panel_title(groups, group), "side": side.letter, "name": side_name(groups, side)}
                    parts.append(
                        pd.DataFrame({**known, "metric": metric, "ms": x, "share": 100 * y, "samples": len(values)})
                    )
    columns = ["panel", "side", "name", "metric", "ms", "share", "samples"]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=columns)


def distributions_figure(frame: pd.DataFrame, looks: Mapping[str, LineStyle]) -> go.Figure:
    """TTFT and ITL: beside each other for one panel, else above each other with a column a panel."""
    panels, metrics = list(dict.fromkeys(frame["panel"])), list(dict.fromkeys(frame["metric"]))
    alone = len(panels) == 1
    rows, columns = (1, len(metrics)) if alone else (len(metrics), len(panels))
    figure = make_subplots(
        rows=rows,
        cols=columns,
        shared_yaxes=True,
        subplot_titles=None if alone else panels,
        vertical_spacing=0.16,
        horizontal_spacing=0.05,
    )
    shown: set[str] = set()
    for (panel, metric), part in frame.groupby(["panel", "metric"], sort=False):
        first, second = panels.index(panel), metrics.index(metric)
        place = {"row": 1, "col": second + 1} if alone else {"row": second + 1, "col": first + 1}
        for side, curve in part.groupby("side", sort=False):
            figure.add_trace(_curve(curve, looks[str(side)], side not in shown), **place)
            shown.add(str(side))
        figure.update_xaxes(title_text=f"{metric}, ms (log)", **_axis(part["ms"].to_numpy()), tickangle=0, **place)
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", dtick=25)
    figure.update_yaxes(title_text="share of samples", col=1)
    figure.update_annotations(font={"size": 12})
    finish(figure, 380 if alone else 660)
    figure.update_layout(margin_t=64 if alone else 118, margin_b=56)
    return figure


def _axis(values: np.ndarray) -> dict[str, Any]:
    """A log axis with as many labels as a narrow panel has room for."""
    axis = log_axis(values)
    if "tickvals" in axis:
        low, high = axis["range"]
        labels = zip(axis["tickvals"], axis["ticktext"], strict=True)
        inside = [(tick, text) for tick, text in labels if low <= math.log10(tick) <= high]
        shown = inside[:: -(-len(inside) // _LABELS)]
        axis |= {"tickvals": [tick for tick, _ in shown], "ticktext": [text for _, text in shown]}
    return axis


def _curve(curve: pd.DataFrame, look: LineStyle, legend: bool) -> go.Scatter:
    name, samples = curve["name"].iloc[0], curve["samples"].iloc[0]
    return go.Scatter(
        x=curve["ms"].to_numpy(np.float32),
        y=curve["share"].to_numpy(np.float32).round(2),
        mode="lines",
        name=name,
        legendgroup=str(curve["side"].iloc[0]),
        showlegend=legend,
        line={"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
        hovertemplate=f"<b>{name}</b><br>%{{y:.1f}} % within %{{x:,.1f}} ms<br>{samples:,} samples<extra></extra>",
    )


def drawing(groups: Sequence[Group], looks: Mapping[str, LineStyle]) -> Drawing | None:
    """None without raw samples."""
    frame = distributions_frame(groups)
    if frame.empty:
        return None
    caption = (
        "Cumulative share of samples: further left is faster, steeper is steadier. Raw samples of all repeats; failed "
        f"requests are left out.{without(groups, frame['side'], 'raw samples')}"
    )
    columns = max(2, len(set(frame["panel"])))
    return Drawing("distributions", _title(groups), caption, distributions_figure(frame, looks), 230 * columns + 120)


def _title(groups: Sequence[Group]) -> str:
    """The p95 of ITL of each side, where there is one group."""
    found: list[Any] = [(side.letter, side.cell.percentile("itl_ms", "p95")[0]) for side in groups[0]]
    if len(groups) > 1 or any(value is None for _, value in found):
        return "How TTFT and ITL are distributed"
    return "p95 ITL: " + ", ".join(f"{letter} {words.ms(value)}" for letter, value in found)
