"""The effects of settings or of compared cells: an interval plot a metric, a row a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from textwrap import wrap

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.effects.comparison import MARGINS, Call, Comparison
from kvbench.metrics.definitions import ENGINE, figure
from kvbench.report.comparisons import Comparisons, amount, percent_change
from kvbench.report.style import CONTIGUOUS, GREY, PAGED, Drawing, below_each_other, finish, safe
from kvbench.report.wording import say
from kvbench.runs.engine_time import EngineTime

_LOOKS = {  # call -> colour, marker: never colour alone
    Call.BETTER: (PAGED, "circle"),
    Call.WORSE: (CONTIGUOUS, "diamond"),
    Call.LEVEL: ("#009E73", "square"),
    Call.UNDECIDED: (GREY, "circle-open"),
}
NAMES = {call: str(call) for call in Call} | {Call.UNDECIDED: "not decided"}
_BETTER = {True: "more", False: "less"}
_LEAST_RANGE = 12.0  # percent
_ROW, _LINE = 13, 17  # px: of a row, and of each line of its name
_LONGEST = 26  # characters of a line of a row's name
_COLUMNS = ["row", "metric", "better", "change", "low", "high", "call", "note"]


def effects_frame(marks: Iterable[tuple[str, Comparison, str]]) -> pd.DataFrame:
    """The frame of ``effects_figure``, of a row's name, a comparison in it, and the note on that."""
    rows = []
    for name, mark, note in marks:
        changes = map(percent_change, (mark.ratio, mark.low, mark.high))
        shown = figure(mark.metric)
        rows.append((name, shown.title, _BETTER[shown.higher_is_better], *changes, mark.call, note))
    return pd.DataFrame(rows, columns=_COLUMNS).astype(dict.fromkeys(("change", "low", "high"), float))


def effects_figure(frame: pd.DataFrame, margin: float) -> go.Figure:
    """A panel a metric, a row a comparison.

    ``frame``: one mark a row: ``row`` (its name), ``metric`` (its title), ``better`` ("more" or "less"), ``change``,
    ``low``, ``high`` [%, both None without an interval], ``call``, ``note`` (for who points at the mark).
    ``margin``: up to which change [%] a row is called level; drawn as a band.
    """
    metrics = frame.drop_duplicates("metric")
    rows = list(dict.fromkeys(frame["row"]))[::-1]  # plotly draws from below
    titles = [say("effects.panel", metric=metric.metric, better=metric.better) for metric in metrics.itertuples()]
    made = make_subplots(rows=1, cols=len(titles), shared_yaxes=True, horizontal_spacing=0.03, subplot_titles=titles)
    in_legend: set[str] = set()
    for column, metric in enumerate(metrics["metric"], start=1):
        part = frame[frame["metric"] == metric]
        low, high = _range(part)
        for call in _LOOKS:
            marks = part[part["call"] == call]
            if len(marks):
                made.add_traces(_traces(marks, call, rows, (low, high), call not in in_legend), 1, column)
                in_legend.add(call)
        band = {"row": 1, "col": column, "layer": "below"}  # after the traces: plotly skips panels that are empty
        made.add_vrect(-margin, margin, fillcolor="rgba(128,128,128,0.2)", line_width=0, **band)
        made.add_vline(0, line_width=1, line_color=GREY, **band)
        made.update_xaxes(range=[low, high], nticks=5, tickangle=0, row=1, col=column)
    names = ["<br>".join(map(safe, wrap(row, _LONGEST))) for row in rows]
    made.update_yaxes(range=[-0.5, len(rows) - 0.2], tickvals=list(range(len(rows))), ticktext=names)
    lines = max(name.count("<br>") for name in names) + 1
    height = max(80, (_ROW + _LINE * lines) * len(rows))
    finish(made, 112 + height)
    made.update_annotations(font={"size": 13})
    made.update_layout(margin={"t": 78, "l": 20, "r": 16})
    return below_each_other(made, legend_lines=2, panel=height, gap=88, left=20)


def _traces(
    marks: pd.DataFrame, call: str, rows: list[str], axis: tuple[float, float], legend: bool
) -> list[go.Scatter]:
    """The intervals of one call as lines, and its points, at the edge where they lie beyond it."""
    (colour, symbol), (low, high) = _LOOKS[call], axis
    width = high - low
    at = [rows.index(name) for name in marks["row"]]
    xs, ys = [], []
    for y, start, end in zip(at, marks["low"], marks["high"], strict=True):
        if pd.notna(start) and pd.notna(end) and end > low and start < high:
            xs += [max(start, low), min(end, high), None]
            ys += [y, y, None]
    points = marks["change"].clip(low + 0.03 * width, high - 0.03 * width)
    texts = [amount(1 + value / 100) for value in marks["change"]]
    hovers = [
        say("effects.hover", row=safe(mark.row), mark=mark, change=text, call=NAMES[call])
        for mark, text in zip(marks.itertuples(), texts, strict=True)
    ]
    # Near an edge a text above the point would be cut off there.
    edges = [low - 1.0, low + 0.14 * width, high - 0.14 * width, high + 1.0]
    sides = list(pd.cut(points, edges, right=False, labels=["top right", "top center", "top left"]))
    return [
        go.Scatter(
            x=xs, y=ys, mode="lines", line={"color": colour, "width": 1.5 if call == Call.UNDECIDED else 3},
            legendgroup=call, showlegend=False, hoverinfo="skip",
        ),
        go.Scatter(
            x=points, y=at, mode="markers+text", text=texts, textposition=sides, textfont={"size": 11},
            marker={"symbol": symbol, "size": 9, "color": colour, "line": {"width": 1.5, "color": colour}},
            cliponaxis=False, name=NAMES[call], legendgroup=call, showlegend=legend, hovertext=hovers, hoverinfo="text",
        ),
    ]  # fmt: skip


def _range(part: pd.DataFrame) -> tuple[float, float]:
    """The axis: all points but the far ones, which would press the others into a line; always with 0."""
    most = max(_LEAST_RANGE, 4 * float(part["change"].abs().median()))
    ends = [*part["low"].dropna(), *part["high"].dropna(), *part["change"], 0.0]
    low, high = max(min(ends), -most), min(max(ends), most)
    room = 0.16 * (high - low)
    return min(low - room, -_LEAST_RANGE / 3), max(high + room, _LEAST_RANGE / 3)


def drawing(comparisons: Comparisons, engine_time: EngineTime | None) -> Drawing | None:
    """Each setting against the baseline; None for a run without a change to show."""
    changes = comparisons.changes
    if not changes or comparisons.load is None:
        return None
    load, clock, names = comparisons.load.label, changes[0][1].clock, comparisons.names
    frame = effects_frame((names[cell.cell_id], change, f"{load}, {clock}") for cell, change in changes)
    label = engine_time.label if engine_time and clock == ENGINE else clock
    margin = 100 * MARGINS[clock]
    caption = say("effects.caption", clock, load=load, clock=label, margin=margin)
    return Drawing("effects", say("effects.title"), caption, effects_figure(frame, margin), 372)
