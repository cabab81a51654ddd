"""What settings or compared cells change: an interval plot a metric, a row a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.effects.comparison import MARGINS, Call, Comparison
from kvbench.metrics.definitions import ENGINE, SERVED, SIMULATED, figure
from kvbench.report.comparisons import Comparisons, amount
from kvbench.report.style import CONTIGUOUS, GREY, PAGED, Drawing, finish, safe
from kvbench.runs.engine_time import EngineTime

_LOOKS = {  # call -> colour, marker: never colour alone
    Call.BETTER: (PAGED, "circle"),
    Call.WORSE: (CONTIGUOUS, "diamond"),
    Call.LEVEL: ("#009E73", "square"),
    Call.UNDECIDED: (GREY, "circle-open"),
}
NAMES = {call: str(call) for call in Call} | {Call.UNDECIDED: "not decided"}
_LEVEL = {ENGINE: "the interval", SERVED: "every repeat", SIMULATED: "every repeat"}  # what has to lie there
_LEAST_RANGE = 12.0  # percent
_ROW, _LINE = 13, 17  # px: of a row, and of each line of its name
_LONGEST = 26  # characters of a line of a row's name
_COLUMNS = ["row", "metric", "better", "change", "low", "high", "call", "note"]


def effects_frame(marks: Iterable[tuple[str, Comparison, str]]) -> pd.DataFrame:
    """The frame of ``effects_figure``, of a row's name, a comparison in it, and the note on that."""
    rows = []
    for name, one, note in marks:
        change, low, high = (None if ratio is None else 100 * (ratio - 1) for ratio in (one.ratio, one.low, one.high))
        shown = figure(one.metric)
        better = "more" if shown.higher_is_better else "less"
        rows.append((name, shown.title, better, change, low, high, one.call, note))
    return pd.DataFrame(rows, columns=_COLUMNS).astype(dict.fromkeys(("change", "low", "high"), float))


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
        + f"<br>{NAMES[call]}, {row.note}"
        for row, text in zip(some.itertuples(), texts, strict=True)
    ]
    marker = {"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1.5, "color": colour}}
    line = {"color": colour, "width": 1.5 if call == Call.UNDECIDED else 3}
    near = 0.14 * (high - low)  # the edge: a text above the point would be cut off there
    sides = [
        "top right" if value < low + near else "top left" if value > high - near else "top center" for value in points
    ]
    return [
        go.Scatter(x=xs, y=ys, mode="lines", line=line, legendgroup=call, showlegend=False, hoverinfo="skip"),
        go.Scatter(
            x=points, y=at, mode="markers+text", marker=marker, text=texts, textposition=sides,
            textfont={"size": 11}, cliponaxis=False, name=NAMES[call], legendgroup=call, showlegend=legend,
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


def drawing(comparisons: Comparisons, engine_time: EngineTime | None) -> Drawing | None:
    """Each setting against the baseline; None for a run without a change to show."""
    changes = comparisons.changes
    if not changes or comparisons.load is None:
        return None
    load, clock, names = comparisons.load.label, changes[0][1].clock, comparisons.names
    frame = effects_frame((names[cell.cell_id], one, f"{load}, {clock}") for cell, one in changes)
    label = engine_time.label if engine_time and clock == ENGINE else clock
    margin = 100 * MARGINS[clock]
    caption = (
        f"Against the baseline at {load}, {label}; 95 % intervals; level: {_LEVEL[clock]} within the grey band, "
        f"±{margin:.0f} %. A mark at the edge lies beyond it."
    )
    return Drawing("effects", "What each setting changes", caption, effects_figure(frame, margin), 560)
