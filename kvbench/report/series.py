"""Long series made short enough for a web page, without changing what they show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from kvbench.metrics.latency import inter_token_latencies, request_latencies
from kvbench.runs.model import MeasuredCell

MAX_POINTS = 400


def ecdf(samples: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """x [n], y [n] of the empirical distribution with n <= points; the smallest and largest sample stay.

    Samples are picked, not interpolated: every (x, y) is a point of the full curve.
    """
    ordered = np.sort(samples)
    total = len(ordered)
    picks = np.unique(np.linspace(0, total - 1, min(points, total)).round().astype(int)) if total else np.array([], int)
    return ordered[picks].astype(float), (picks + 1) / max(total, 1)


def thin(frame: pd.DataFrame, points: int = MAX_POINTS) -> pd.DataFrame:
    """At most `points` rows of a time series, evenly, first and last kept."""
    if len(frame) <= points:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, points).round().astype(int))]


def ttft_ms(requests: pd.DataFrame) -> np.ndarray:
    """Time to first token in ms of every request given."""
    return request_latencies(requests)["ttft_ms"].dropna().to_numpy() if len(requests) else np.array([])


def itl_ms(requests: pd.DataFrame) -> np.ndarray:
    """Every gap between content chunks in ms, pooled over the requests given."""
    return inter_token_latencies(requests) if len(requests) else np.array([])


def representative_repeat(cell: MeasuredCell) -> int:
    """The repeat whose throughput is the median (the lower of the middle two): one that happened, not a mean."""
    values = sorted(cell.throughput().items(), key=lambda pair: pair[1])
    return values[(len(values) - 1) // 2][0] if values else cell.repeats[0].repeat


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
    steps = (1, 2, 5) if len(decades) <= 4 else (1,)
    ticks = [step * 10.0**decade for decade in decades for step in steps]
    return {
        "type": "log",
        "range": [math.log10(low * 0.85), math.log10(high * 1.15)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" if tick >= 1 else f"{tick:g}" for tick in ticks],
    }
