"""What each setting changes: one interval plot a metric, a row a configuration, against the baseline."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.changes import (
    AHEAD,
    BEHIND,
    ENGINE_TIME,
    IS_LEVEL,
    MARGINS,
    METRICS,
    OPEN,
    SERVED,
    amount,
    changes_frame,
)
from kvbench.report.style import CONTIGUOUS, GREY, PAGED, Drawing, finish, safe
from kvbench.runs.model import Run

_LOOKS = {  # call -> colour, marker: never colour alone
    AHEAD: (PAGED, "circle"),
    BEHIND: (CONTIGUOUS, "diamond"),
    IS_LEVEL: ("#009E73", "square"),
    OPEN: (GREY, "circle-open"),
}
_NAMES = {AHEAD: "better", BEHIND: "worse", IS_LEVEL: "level", OPEN: "not decided"}
_BETTER = {metric: "more is better" if metric == "output_throughput" else "less is better" for metric in METRICS}
_LEVEL = {ENGINE_TIME: "the interval", SERVED: "every repeat"}  # what has to lie there
_LEAST_RANGE, _ROW = 12.0, 30  # percent, px
_LABEL = 26  # characters of a row's name


def effects_figure(frame: pd.DataFrame) -> go.Figure:
    """``frame``: that of ``changes_frame``. The band is the margin within which a change is called level."""
    metrics = [metric for metric in METRICS if (frame["metric"] == metric).any()]
    rows = list(dict.fromkeys(frame["configuration"]))[::-1]  # plotly draws from below
    titles = [f"{METRICS[metric]}<br><span style='font-size:11px'>{_BETTER[metric]}, %</span>" for metric in metrics]
    figure = make_subplots(
        rows=1, cols=len(metrics), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles
    )
    margin = 100 * MARGINS[frame["clock"].iloc[0]]
    shown: set[str] = set()
    for column, metric in enumerate(metrics, start=1):
        part = frame[frame["metric"] == metric]
        low, high = _range(part)
        for call in _LOOKS:
            if (some := part[part["call"] == call]).empty:
                continue
            for trace in _traces(some, call, rows, low, high, call not in shown):
                figure.add_trace(trace, row=1, col=column)
            shown.add(call)
        band = {"row": 1, "col": column, "layer": "below"}  # after the traces: plotly skips panels that are empty
        figure.add_vrect(-margin, margin, fillcolor="rgba(128,128,128,0.2)", line_width=0, **band)
        figure.add_vline(0, line_width=1, line_color=GREY, **band)
        figure.update_xaxes(range=[low, high], nticks=5, tickangle=0, row=1, col=column)
    figure.update_yaxes(
        range=[-0.5, len(rows) - 0.2], tickvals=list(range(len(rows))), ticktext=[_label(row) for row in rows]
    )
    finish(figure, 112 + max(80, _ROW * len(rows)))
    figure.update_annotations(font={"size": 13})
    figure.update_layout(margin={"t": 78, "l": 20, "r": 16})
    return figure


def _traces(
    some: pd.DataFrame, call: str, rows: list[str], low: float, high: float, legend: bool
) -> list[go.Scatter]:
    """The intervals of one call as lines, and its points, at the edge where they lie beyond it."""
    colour, symbol = _LOOKS[call]
    at = [rows.index(name) for name in some["configuration"]]
    xs, ys = [], []
    for y, start, end in zip(at, some["low"], some["high"], strict=True):
        if pd.notna(start) and pd.notna(end) and end > low and start < high:
            xs += [max(start, low), min(end, high), None]
            ys += [y, y, None]
    points = some["change"].clip(low + 0.03 * (high - low), high - 0.03 * (high - low))
    texts = [amount(1 + value / 100) for value in some["change"]]
    hover = [
        f"<b>{safe(row.configuration)}</b>, {row.load}<br>{METRICS[row.metric]} {text}"
        + ("" if pd.isna(row.low) else f", 95 % interval {row.low:+.1f} to {row.high:+.1f} %")
        + f"<br>{_NAMES[call]}, {row.clock}"
        for row, text in zip(some.itertuples(), texts, strict=True)
    ]
    marker = {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1.5, "color": colour}}
    line = {"color": colour, "width": 1.5 if call == OPEN else 3}
    near = 0.14 * (high - low)  # the edge: a text above the point would be cut off there
    sides = [
        "top right" if value < low + near else "top left" if value > high - near else "top center" for value in points
    ]
    return [
        go.Scatter(x=xs, y=ys, mode="lines", line=line, legendgroup=call, showlegend=False, hoverinfo="skip"),
        go.Scatter(
            x=points, y=at, mode="markers+text", marker=marker, text=texts, textposition=sides,
            textfont={"size": 11}, cliponaxis=False, name=_NAMES[call], legendgroup=call, showlegend=legend,
            hovertext=hover, hoverinfo="text",
        ),
    ]  # fmt: skip


def _range(part: pd.DataFrame) -> tuple[float, float]:
    """The axis: all points but the far ones, which would press the others into a line; always with 0."""
    sizes = part["change"].abs()
    most = max(_LEAST_RANGE, 4 * float(sizes.median()))
    ends = [*part["low"].dropna(), *part["high"].dropna(), *part["change"], 0.0]
    low, high = max(min(ends), -most), min(max(ends), most)
    room = 0.16 * (high - low)
    return min(low - room, -_LEAST_RANGE / 3), max(high + room, _LEAST_RANGE / 3)


def _label(name: str) -> str:
    """A row's name on at most two lines."""
    if len(name) <= _LABEL or " with " not in name:
        return safe(name)
    first, _, rest = name.partition(" with ")
    return f"{safe(first)}<br>with {safe(rest)}"


def drawing(run: Run) -> Drawing | None:
    """None for a run without a change to show."""
    frame = changes_frame(run)
    if frame.empty:
        return None
    clock, load = frame[["clock", "load"]].iloc[0]
    label = run.engine_time.label if run.engine_time and clock == ENGINE_TIME else clock
    caption = (
        f"Against the baseline at {load}, {label}; 95 % intervals; level: {_LEVEL[clock]} within the grey band, "
        f"±{100 * MARGINS[clock]:.0f} %. A mark at the edge lies beyond it."
    )
    return Drawing("effects", "What each setting changes", caption, effects_figure(frame), 520)
