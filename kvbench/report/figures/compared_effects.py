"""Figure: how each metric of the compared cells differs from the first cell's, with its 95 % interval."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.compared_cells import METRICS, Group, ratios
from kvbench.report.style import CONTIGUOUS, GRID, OTHERS, PAGED, Drawing, finish, safe
from kvbench.runs.ratios import LEVEL, SAME

_MARKS = {  # what a change is called -> colour, symbol, legend
    "better": (PAGED, "circle", "better"),
    "worse": (CONTIGUOUS, "diamond", "worse"),
    "level": (OTHERS[4], "square", "level"),
    "open": (OTHERS[4], "circle-open", "not told apart, or too few repeats"),
}
_ROW, _AROUND = 46, 130  # px
_LABELS = 4  # of an axis
_LONGEST = 30  # characters of a line beside the axis


def effects_frame(groups: Sequence[Group]) -> pd.DataFrame:
    """A row a pair and metric: ``pair``, ``metric``, ``change``, ``low``, ``high`` (%), ``called``, ``basis``."""
    rows = []
    for group in groups:
        for side in group[1:]:
            pair = side.title if len(groups) > 1 else f"{side.letter} {side.title}"
            for each in ratios(group[0], side):
                low, high = (100 * (end - 1) for end in each.interval) if each.interval else (None, None)
                called = each.mark or ("level" if each.verdict == SAME else "open")
                rows.append((pair, each.metric.title, 100 * (each.ratio - 1), low, high, called, each.basis))
    columns = ["pair", "metric", "change", "low", "high", "called", "basis"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(("change", "low", "high"), float))


def effects_figure(frame: pd.DataFrame) -> go.Figure:
    """A panel a metric, a row a pair."""
    pairs = list(dict.fromkeys(frame["pair"]))
    metrics = [metric.title for metric in METRICS if metric.title in set(frame["metric"])]
    figure = make_subplots(
        rows=1,
        cols=len(metrics),
        shared_yaxes=True,
        subplot_titles=[f"{metric}, %" for metric in metrics],
        horizontal_spacing=0.03,
    )
    level = {"x0": -100 * LEVEL, "x1": 100 * LEVEL, "fillcolor": GRID, "line_width": 0, "layer": "below"}
    shown: set[str] = set()
    for column, metric in enumerate(metrics, start=1):
        for called, rows in frame[frame["metric"] == metric].groupby("called", sort=False):
            _points(figure, rows, str(called), column, called not in shown)
            shown.add(str(called))
        figure.add_vrect(**level, row=1, col=column)
        figure.update_xaxes(**_axis(frame[frame["metric"] == metric]), row=1, col=column)
        figure.add_vline(x=0, line={"color": OTHERS[4], "width": 1}, row=1, col=column)
    lines = [_in_lines(pair) for pair in pairs]
    figure.update_yaxes(tickvals=lines, ticktext=lines, range=[len(pairs) - 0.5, -0.5], showgrid=False)
    figure.update_annotations(font={"size": 13})
    finish(figure, _AROUND + _ROW * len(pairs))
    figure.update_layout(margin_t=76)
    return figure


def _points(figure: go.Figure, rows: pd.DataFrame, called: str, column: int, legend: bool) -> None:
    colour, symbol, name = _MARKS[called]
    bounds = [
        "" if pd.isna(row.low) else f"<br>95 % interval {row.low:+.1f} to {row.high:+.1f} %"
        for row in rows.itertuples()
    ]
    figure.add_scatter(
        x=rows["change"],
        y=[_in_lines(pair) for pair in rows["pair"]],
        mode="markers",
        name=name,
        legendgroup=called,
        showlegend=legend,
        marker={"color": colour, "symbol": symbol, "size": 9, "line": {"width": 1.6, "color": colour}},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": (rows["high"] - rows["change"]).fillna(0.0),
            "arrayminus": (rows["change"] - rows["low"]).fillna(0.0),
            "color": colour,
            "thickness": 2,
            "width": 5,
        },
        hovertext=[
            f"{safe(row.pair)}<br>{row.metric}: {row.change:+.1f} %{bound}<br>{row.basis}"
            for row, bound in zip(rows.itertuples(), bounds, strict=True)
        ],
        hoverinfo="text",
        row=1,
        col=column,
    )


def _axis(rows: pd.DataFrame) -> dict[str, Any]:
    """A range with 0, all intervals and room for the labels, of which there are four at most."""
    ends = rows[["change", "low", "high"]].to_numpy()
    low, high = min(-100 * LEVEL, np.nanmin(ends)), max(100 * LEVEL, np.nanmax(ends))
    steps = (factor * 10.0**power for power in itertools.count(0) for factor in (1, 2, 5))
    step = next(step for step in steps if (high - low) / step <= _LABELS - 1)
    ticks = [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    room = 0.13 * (high - low)
    return {
        "range": [low - room, high + room],
        "tickvals": ticks,
        "ticktext": [f"{tick:+,.0f}".replace("-", "−") if tick else "0" for tick in ticks],
        "tickangle": 0,
    }


def _in_lines(pair: str) -> str:
    """The name of a pair in lines that leave room for the panels."""
    lines, line = [], ""
    for word in pair.split(" "):
        if line and len(line) + len(word) >= _LONGEST:
            lines, line = [*lines, line], ""
        line = f"{line} {word}".strip()
    return "<br>".join(safe(each) for each in [*lines, line])


def drawing(groups: Sequence[Group]) -> Drawing | None:
    """None where no pair may be compared."""
    frame = effects_frame(groups)
    if frame.empty:
        return None
    caption = (
        "Change against A; bars are 95 % intervals. To the right is better for tokens/s, to the left for latencies. "
        f"Shaded: within {100 * LEVEL:g} %."
    )
    return Drawing("effects", _title(frame), caption, effects_figure(frame), 820)


def _title(frame: pd.DataFrame) -> str:
    """Of 12 changes against A: 4 better, 2 worse, 3 level, 3 not told apart."""
    names = {"better": "better", "worse": "worse", "level": "level", "open": "not told apart"}
    counts = frame["called"].value_counts()
    parts = [f"{counts[called]} {name}" for called, name in names.items() if called in counts]
    return f"Of {words.plural(len(frame), 'change')} against A: {', '.join(parts)}"
