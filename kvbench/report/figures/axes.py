"""What the axes of several figures share: points of a curve, ticks of a log axis, and labels above bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvbench.report.style import safe

MAX_POINTS = 400  # of a curve


def ecdf(samples: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """x [n], y [n] of the empirical distribution with n <= points; the smallest and largest sample stay.

    Samples are picked, not interpolated: every (x, y) is a point of the full curve.
    """
    picks = np.unique(np.linspace(0, len(samples) - 1, min(points, len(samples))).round().astype(int))
    return np.sort(samples)[picks].astype(float), (picks + 1) / len(samples)


def thin(frame: pd.DataFrame, points: int = MAX_POINTS) -> pd.DataFrame:
    """At most ``points`` rows of a time series, evenly, first and last kept."""
    if len(frame) <= points:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, points).round().astype(int))]


def compact(values: Any, decimals: int = 2) -> np.ndarray:
    """Values for a trace as rounded float32, which keeps a page small. float32 [n]"""
    return np.round(np.asarray(values, dtype=float), decimals).astype(np.float32)


def log_axis(values: np.ndarray) -> dict[str, Any]:
    """Settings of a log axis: ticks at 1, 2 and 5 of each decade, outliers at the low end cut off.

    A gap of microseconds (two tokens read from the socket at once) would otherwise take up half the axis.
    """
    positive = values[values > 0]
    if not len(positive):
        return {}
    low, high = float(np.quantile(positive, 0.005)), float(positive.max())
    if high < 4 * low:  # too narrow for two ticks
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [step * 10.0**decade for decade in decades for step in ((1, 2, 5) if len(decades) <= 4 else (1,))]
    return {
        "type": "log",
        "range": [math.log10(low * 0.85), math.log10(high * 1.15)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" if tick >= 1 else f"{tick:g}" for tick in ticks],
    }


def label_above(figure: go.Figure, y: float, text: str, bold: bool = False) -> None:
    """A line of text from outside at the left end of the bar at ``y``, above it: it needs no room beside the plot."""
    figure.add_annotation(
        x=0,
        xref="paper",
        xanchor="left",
        y=y,
        yanchor="bottom",
        yshift=9,
        text=f"<b>{safe(text)}</b>" if bold else safe(text),
        showarrow=False,
        align="left",
        font={"size": 13 if bold else 12},
    )


def legend_room(names: Sequence[str], width: int) -> int:
    """Height in px that a horizontal legend of ``names`` takes in a figure ``width`` px wide, with some air below."""
    entry = max(len(name) for name in names) * 7 + 50
    rows = -(-len(names) // max(1, (width - 60) // entry))
    return 16 + 19 * rows
