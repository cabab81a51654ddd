"""What settings or compared cells change: an interval plot a metric, a row a comparison."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report import compared_cells
from kvbench.report.changes import (
    AHEAD,
    BEHIND,
    ENGINE_TIME,
    IS_LEVEL,
    MARGINS,
    METRICS,
    OPEN,
    THROUGHPUT,
    amount,
    changes_frame,
)
from kvbench.report.style import CONTIGUOUS, GREY, PAGED, Drawing, finish, safe
from kvbench.runs.model import SERVED, SIMULATED, Run
from kvbench.runs.ratios import SAME

_LOOKS = {  # call -> colour, marker: never colour alone
    AHEAD: (PAGED, "circle"),
    BEHIND: (CONTIGUOUS, "diamond"),
    IS_LEVEL: ("#009E73", "square"),
    OPEN: (GREY, "circle-open"),
}
_NAMES = {AHEAD: "better", BEHIND: "worse", IS_LEVEL: "level", OPEN: "not decided"}
_LEVEL = {ENGINE_TIME: "the interval", SERVED: "every repeat", SIMULATED: "every repeat"}  # what has to lie there
_LEAST_RANGE = 12.0  # percent
_ROW, _LINE = 13, 17  # px: of a row, and of each line of its name
_LONGEST = 26  # characters of a line of a row's name
_COLUMNS = ["row", "metric", "better", "change", "low", "high", "call", "note"]


def effects_figure(frame: pd.DataFrame, margin: float) -> go.Figure:
    """A panel a metric, a row a comparison.

    ``frame``: one mark a row: ``row`` (its name), ``metric`` (its title), ``better`` ("more" or "less"), ``change``,
    ``low``, ``high`` [%, both None without an interval], ``call``, ``note`` (for who points at the mark).
    ``margin``: up to which change [%] a row is called level; drawn as a band.
    """
    metrics = list(frame.drop_duplicates("metric")[["metric", "better"]].itertuples(index=False, name=None))
    rows = list(dict.fromkeys(frame["row"]))[::-1]  # plotly draws from below
    titles = [f"{metric}<br><span style='font-size:11px'>{better} is better, %</span>" for metric, better in metrics]
    figure = make_subplots(rows=1, cols=len(metrics), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
    shown: set[str] = set()
    for column, (metric, _) in enumerate(metrics, start=1):
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
    names = [_in_lines(row) for row in rows]
    figure.update_yaxes(range=[-0.5, len(rows) - 0.2], tickvals=list(range(len(rows))), ticktext=names)
    lines = max(name.count("<br>") for name in names) + 1
    finish(figure, 112 + max(80, (_ROW + _LINE * lines) * len(rows)))
    figure.update_annotations(font={"size": 13})
    figure.update_layout(margin={"t": 78, "l": 20, "r": 16})
    return figure


def _traces(some: pd.DataFrame, call: str, rows: list[str], low: float, high: float, legend: bool) -> list[go.Scatter]:
    """The intervals of one call as lines, and its points, at the edge where they lie beyond it."""
    colour, symbol = _LOOKS[call]
    at = [rows.index(name) for name in some["row"]]
    xs, ys = [], []
    for y, start, end in zip(at, some["low"], some["high"], strict=True):
        if pd.notna(start) and pd.notna(end) and end > low and start < high:
            xs += [max(start, low), min(end, high), None]
            ys += [y, y, None]
    points = some["change"].clip(low + 0.03 * (high - low), high - 0.03 * (high - low))
    texts = [amount(1 + value / 100) for value in some["change"]]
    hover = [
        f"<b>{safe(row.row)}</b><br>{row.metric} {text}"
        + ("" if pd.isna(row.low) else f", 95 % interval {row.low:+.1f} to {row.high:+.1f} %")
        + f"<br>{_NAMES[call]}, {row.note}"
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


def _in_lines(name: str) -> str:
    """A row's name in lines that leave room for the panels."""
    return "<br>".join(safe(line) for line in wrap(name, _LONGEST))


def drawing(run: Run) -> Drawing | None:
    """Each setting against the baseline; None for a run without a change to show."""
    found = changes_frame(run)
    if found.empty:
        return None
    clock, load = found[["clock", "load"]].iloc[0]
    frame = found.assign(
        row=found["configuration"],
        metric=found["metric"].map(METRICS),
        better=["more" if metric == THROUGHPUT else "less" for metric in found["metric"]],
        note=f"{load}, {clock}",
    )
    label = run.engine_time.label if run.engine_time and clock == ENGINE_TIME else clock
    margin = 100 * MARGINS[clock]
    caption = (
        f"Against the baseline at {load}, {label}; 95 % intervals; level: {_LEVEL[clock]} within the grey band, "
        f"±{margin:.0f} %. A mark at the edge lies beyond it."
    )
    return Drawing("effects", "What each setting changes", caption, effects_figure(frame, margin), 560)


def compared_drawing(groups: Sequence[compared_cells.Group]) -> Drawing | None:
    """Each compared cell against the first of its group; None where no pair may be compared."""
    frame = compared_frame(groups)
    if frame.empty:
        return None
    margin = 100 * MARGINS[SERVED]
    caption = (
        f"Change against A, served; 95 % intervals; the grey band: ±{margin:.0f} %. A mark at the edge lies beyond it."
    )
    counts = frame["call"].value_counts()
    parts = [f"{counts[call]} {name}" for call, name in _NAMES.items() if call in counts]
    title = f"Of {words.plural(len(frame), 'change')} against A: {', '.join(parts)}"
    return Drawing("effects", title, caption, effects_figure(frame, margin), 820)


def compared_frame(groups: Sequence[compared_cells.Group]) -> pd.DataFrame:
    """The frame of ``effects_figure``: a row a pair and metric."""
    calls = {"better": AHEAD, "worse": BEHIND}
    rows = []
    for group in groups:
        for side in group[1:]:
            pair = side.title if len(groups) > 1 and len(group) == 2 else f"{side.letter} {side.title}"
            for each in compared_cells.ratios(group[0], side):
                low, high = (100 * (end - 1) for end in each.interval) if each.interval else (None, None)
                call = calls.get(each.mark) or (IS_LEVEL if each.verdict == SAME else OPEN)
                better = "more" if each.metric.higher_is_better else "less"
                rows.append((pair, each.metric.title, better, 100 * (each.ratio - 1), low, high, call, each.basis))
    return pd.DataFrame(rows, columns=_COLUMNS).astype(dict.fromkeys(("change", "low", "high"), float))
