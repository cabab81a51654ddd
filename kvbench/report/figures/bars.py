"""Horizontal bars of several parts, with a label above each bar: they need no room beside the plot, on a phone too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from kvbench.report.style import compact, finish, hatch, label_above, legend_below

_BAR, _ROW, _HEAD = 16, 40, 34  # px: a bar, a bar with its label, and above the first bar below a heading
_LEAST_LABELLED = 0.06  # of the axis: a narrower part has no room for its text
COLUMNS = ("bar", "label", "head", "part", "start", "length", "text", "hover")


@dataclass(frozen=True)
class BarPart:
    """The look of one part of all bars: its ``title`` in the legend, its colour and pattern."""

    title: str
    colour: str
    pattern: str = ""
    ink: str = "#fff"  # of the text in it


def bars(frame: pd.DataFrame, parts: Mapping[str, BarPart], end: float | None = None, **axis: Any) -> go.Figure:
    """A figure of bars, from above.

    frame: a row a part of a bar
        bar, label, head: its id, the text above it, and the heading above the first bar of a group ("": none)
        part: a key of ``parts``; start, length: on the axis
        text, hover: written into it where there is room, and for who points at it
    end: of the axis, where that is given; axis: further settings of it
    """
    places, height = _places(frame)
    longest = end or float((frame["start"] + frame["length"]).max())
    figure = go.Figure()
    for key, part in parts.items():
        rows = frame[frame["part"] == key]
        if not (rows["length"] > 0).any():
            continue
        figure.add_bar(
            y=rows["bar"].map(places).astype("float32"), x=compact(rows["length"], 6), base=compact(rows["start"], 6),
            orientation="h", width=_BAR, name=part.title, hovertext=list(rows["hover"]), hoverinfo="text",
            marker={"color": part.colour, "line": {"width": 0}, "pattern": hatch(part.pattern, 0.2)},
            text=list(rows["text"].where(rows["length"] >= _LEAST_LABELLED * longest, "")), textposition="inside",
            insidetextanchor="middle", textangle=0, textfont={"size": 11, "color": part.ink}, constraintext="inside",
        )  # fmt: skip
    head = ""
    for row in frame.drop_duplicates("bar").itertuples():
        if row.head != head:
            label_above(figure, places[row.bar] - _HEAD + 8, str(row.head), bold=True)
        label_above(figure, places[row.bar], str(row.label))
        head = row.head
    figure.update_xaxes(showgrid=False, **({"range": [0, end]} if end else {"rangemode": "tozero"}), **axis)
    figure.update_yaxes(range=[height, 0], showticklabels=False, showgrid=False)
    finish(figure, round(height))
    figure.update_layout(barmode="overlay")
    titles = [trace.name for trace in figure.data]
    return legend_below(figure, height, titles, margin={"t": 16, "l": 16, "r": 40})


def _places(frame: pd.DataFrame) -> tuple[dict[Any, float], float]:
    """Returns the middle of each bar and the height of all [px from the top]."""
    at, head, places = 0.0, "", {}
    for row in frame.drop_duplicates("bar").itertuples():
        at += _ROW + _HEAD * (row.head != head)
        places[row.bar], head = at - 10, row.head
    return places, at + 8
