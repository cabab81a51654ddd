"""What several figures share: points of a curve, ticks of a log axis, labels above bars, and where the legend is."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvbench.report.style import safe
from kvbench.runs.model import MeasuredLoad

MAX_POINTS = 400  # of a curve
_MOST_TICKS = 4  # of a log axis
_PHONE = 372  # px that a page leaves to a figure there


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
    """Settings of a log axis: ticks at 1, 2 and 5 of each decade or fewer, outliers at the low end cut off.

    A gap of microseconds (two tokens read from the socket at once) would otherwise take up half the axis.
    """
    positive = values[values > 0]
    if not len(positive):
        return {}
    low, high = float(np.quantile(positive, 0.005)), float(positive.max())
    if high < 4 * low:  # too narrow for two ticks
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    low, high = low * 0.85, high * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
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


def room_for_labels(labels: Iterable[str]) -> int:
    """How wide [px] a figure must be for ``label_above`` to show the longest of these whole; 0: a phone is enough."""
    width = 56 + 6.4 * max(map(len, labels), default=0)
    return round(width) if width > _PHONE else 0


def under(load: MeasuredLoad) -> str:
    """A load behind a noun in a title: "with 24 at once", "at 4/s", "under the trace's arrivals"."""
    if load.mode == "closed":
        return f"with {load.short}"
    return f"at {load.short}" if 0 < load.value < math.inf else f"under {load.label}"


def legend_outside(figure: go.Figure, y: float, above: bool = True) -> None:
    """Puts the legend above (or below) the panels at ``y`` of their height; a legend of more lines shrinks them."""
    place = {"y": y, "yref": "paper", "yanchor": "bottom" if above else "top", "traceorder": "normal"}
    figure.update_layout(legend=place)
