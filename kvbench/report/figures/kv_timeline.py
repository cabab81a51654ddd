"""Where the KV bytes go over time, above running and waiting sequences and what happened to the KV meanwhile."""

from __future__ import annotations

import math
from collections.abc import Sequence
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import baseline, paging_pair
from kvbench.report.decision import choices
from kvbench.report.figures.axes import compact, thin, under
from kvbench.report.kv import FILLS
from kvbench.report.style import Drawing, finish, safe
from kvbench.runs.kv_ledger import SLOT_USES, USES, bytes_per_slot, interval_slots, ledger
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run

MOST_SHOWN = 5  # configurations
_MIB = 2.0**20
_POINTS = 400  # of all curves of one kind in a figure
_EVENTS = {  # column -> counter, what its panel is called
    "prefix_hits": ("prefix_cache_hits_total", "prefix hits, tokens/s"),
    "preemptions": ("num_preemptions_total", "preemptions/s"),
    "swapped_out": ("swapped_out_slots_total", "swapped out, MiB/s"),
}
_USES = [use for use in USES if use.key in SLOT_USES]
_PATTERNS = {"waste": "/", "cached": ".", "pinned": "x", "fragmented": "\\"}  # as colours alone are not enough
_LINES = {"running": "solid", "waiting": "dot"}
_LINE_COLOUR = "#8A8A8A"
_GAP, _BOTTOM = 34, 52  # px between panels, and below them
_LINE = 19  # characters of a column's title
_HEIGHTS = {"kv": 200, "sequences": 96, "event": 60}  # px


def shown_cells(run: Run, load: MeasuredLoad) -> list[MeasuredCell]:
    """Those of a load that tell how full their KV was, at most MOST_SHOWN.

    Of more these: the baseline, the two layouts that are compared, the fastest, and those whose KV use differs most
    from the baseline's.
    """
    known = [cell for cell in run.at(load) if cell.observed("usage_mean")]
    if len(known) <= MOST_SHOWN:
        return known
    base = baseline(run, load) or known[0]
    fastest = choices(run, load)[:1]
    first = {base.name, *(paging_pair(run) or ()), *(each.cell.name for each in fastest)}
    ranked = sorted(known, key=lambda cell: (cell.name not in first, -_difference(cell, base)))
    chosen = {cell.name for cell in ranked[:MOST_SHOWN]}
    return [cell for cell in known if cell.name in chosen]


def _difference(a: MeasuredCell, b: MeasuredCell) -> float:
    """How differently two cells used their KV over the steady window: 0 (alike) to 2."""
    x, y = ledger(a), ledger(b)
    if x is not None and y is not None:
        return sum(abs(x.share(use) - y.share(use)) for use in SLOT_USES)
    usage = [np.mean(list(cell.observed("usage_mean").values() or [0.0])) for cell in (a, b)]
    return float(abs(usage[0] - usage[1]))


def timeline(cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """What one repeat of each cell (that of median throughput) did over time; a row a reading of its server.

    configuration: the cell's name, with "invalid" or "refused" behind it where its figures are not compared
    t: seconds since the load started; uses and events are means since the reading before
    tokens .. fragmented: the SLOT_USES in % of the KV's slots, over all steps; NaN where the server does not count them
    usage: % of the KV in use, as the server says; only where it does not count its slots
    running, waiting: sequences
    prefix_hits [tokens/s], preemptions [1/s], swapped_out [MiB/s]: NaN where not counted, and in the first row
    """
    points = max(80, _POINTS // max(1, len(cells)))
    frames = [_of_cell(cell, points) for cell in cells]
    columns = ["configuration", "t", *SLOT_USES, "usage", *_LINES, *_EVENTS]
    return pd.concat([f for f in frames if len(f)] or [pd.DataFrame(columns=columns)], ignore_index=True)


def _of_cell(cell: MeasuredCell, points: int) -> pd.DataFrame:
    gauges = cell.gauges()
    polls = thin(gauges[gauges["repeat"] == cell.typical_repeat].sort_values("t"), points)
    slots, size = interval_slots(polls), bytes_per_slot(cell)
    total = polls["kv_slots_total"].reindex(slots.index)
    found = {"configuration": cell.marked_name, "t": polls["t"]}
    found |= {use: slots[use] / total * 100 for use in SLOT_USES}
    found["usage"] = polls["kv_cache_usage_perc"] * 100 if slots.empty else np.nan
    found |= {what: polls[f"num_requests_{what}"] for what in _LINES}
    for name, (counter, _) in _EVENTS.items():
        rate = polls[counter].diff() / polls["t"].diff() if counter in polls else np.nan
        found[name] = rate * ((size or np.nan) / _MIB if name == "swapped_out" else 1.0)
    return pd.DataFrame(found, index=polls.index)


def timeline_figure(frame: pd.DataFrame) -> go.Figure:
    """A column a configuration: the KV's uses, the sequences below, then a panel for each event that happened."""
    names = list(dict.fromkeys(frame["configuration"]))
    events = [name for name in _EVENTS if (frame[name] > 0).any()]
    heights = [_HEIGHTS["kv"], _HEIGHTS["sequences"], *[_HEIGHTS["event"]] * len(events)]
    height = sum(heights) + _GAP * (len(heights) - 1)
    titles = [_lines(name) for name in names]
    figure = make_subplots(
        rows=len(heights),
        cols=len(names),
        shared_xaxes=True,
        shared_yaxes=True,
        row_heights=heights,
        vertical_spacing=_GAP / height,
        horizontal_spacing=0.02,
        column_titles=["<br>".join(lines) for lines in titles],
    )
    figure.update_annotations(font={"size": 12}, yshift=16)
    in_legend: dict[str, str] = {}
    for column, name in enumerate(names, start=1):
        rows = frame[frame["configuration"] == name]
        _areas(figure, rows, column, in_legend)
        for what, dash in _LINES.items():
            line = {"color": _LINE_COLOUR, "width": 2, "dash": dash, "shape": "hv"}
            _trace(figure, rows, what, what, 2, column, "%{y:.0f}", line=line, showlegend=False)
        for row, event in enumerate(events, start=3):
            look = {"fill": "tozeroy", "line": {"color": _LINE_COLOUR, "width": 1.5, "shape": "vh"}}
            _trace(figure, rows, event, event, row, column, "%{y:.3~g}", **look, showlegend=False)
    figure.update_xaxes(range=[0, float(frame["t"].max())])
    figure.update_xaxes(title_text="seconds", row=len(heights))
    figure.update_yaxes(range=[0, 100], ticksuffix=" %", dtick=25, row=1)
    for row, values in enumerate((frame[list(_LINES)], *(frame[event] for event in events)), start=2):
        figure.update_yaxes(range=[0, float(np.nanmax(values)) * 1.08 or 1.0], nticks=4, row=row)
    labels = ["sequences running (solid), waiting (dotted)", *(_EVENTS[event][1] for event in events)]
    for row, label in enumerate(labels, start=2):
        top = figure.get_subplot(row, 1).yaxis.domain[1]
        figure.add_annotation(
            text=label, x=0, y=top, xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=2,
            showarrow=False, font={"size": 12},
        )  # fmt: skip
    entries = sum(45 + 6.5 * len(title) for title in in_legend.values())  # px
    top = 38 + 20 * math.ceil(entries / (_width(len(names)) - 110)) + 16 * max(map(len, titles))
    finish(figure, height + top + _BOTTOM)
    figure.update_layout(margin={"t": top, "b": _BOTTOM}, hovermode="x unified", legend={"tracegroupgap": 0})
    return figure


def _width(columns: int) -> int:
    """How narrow [px] the figure may be; a phone has 370."""
    return max(370, 140 * columns + 70)


def _lines(name: str) -> list[str]:
    """A configuration's name in lines that are as narrow as its column."""
    first, *more = name.split(" + ")
    return [safe(line) for part in (first, *(f"+ {text}" for text in more)) for line in wrap(part, _LINE)]


def _areas(figure: go.Figure, rows: pd.DataFrame, column: int, in_legend: dict[str, str]) -> None:
    """The uses on top of one another; one area for a server that says no more than how full its KV is."""
    if rows[list(SLOT_USES)].notna().to_numpy().any():
        areas = [(i, use.key, use.title) for i, use in enumerate(_USES) if (rows[use.key] > 0.05).any()]
    else:
        areas = [(0, "usage", "in use")]
    for rank, key, title in areas:
        fill = {"fillcolor": FILLS.get(key, FILLS["tokens"]), "line": {"width": 0, "shape": "vh"}, "stackgroup": "kv"}
        if key in _PATTERNS:
            pattern = {"shape": _PATTERNS[key], "fillmode": "overlay", "fgcolor": "#fff", "size": 5, "solidity": 0.25}
            fill["fillpattern"] = pattern | {"bgcolor": FILLS[key]}
        legend = {"legendgroup": key, "legendrank": rank, "showlegend": key not in in_legend}
        _trace(figure, rows, key, title, 1, column, "%{y:.0f} %", **legend, **fill)
        in_legend[key] = title


def _trace(
    figure: go.Figure, rows: pd.DataFrame, key: str, title: str, row: int, column: int, hover: str, **look: object
) -> None:
    """One column of the frame; a value that is of the time since the reading before begins there."""
    figure.add_scatter(
        x=compact(rows["t"]), y=compact(rows[key].bfill(), 3), mode="lines", name=title, hovertemplate=hover,
        row=row, col=column, **look,
    )  # fmt: skip


def drawing(run: Run, load: MeasuredLoad) -> Drawing | None:
    """One load's KV over time; None where no server says how full its KV was."""
    cells = shown_cells(run, load)
    frame = timeline(cells)
    if frame.empty:
        return None
    every = len([cell for cell in run.at(load) if cell.observed("usage_mean")])
    caption = "One repeat each, that of median throughput (title: steady window, all); areas: means between readings."
    if every > len(cells):
        caption += (
            f" {len(cells)} of {every} configurations: the baseline, both layouts, and those that used the KV most "
            "differently."
        )
    key = f"kv-timeline-{load.mode}-{load.value:g}"
    return Drawing(key, _title(run, load), caption, timeline_figure(frame), _width(len(cells)))


def _title(run: Run, load: MeasuredLoad) -> str:
    """How much of the KV held tokens in the two layouts, else in the baseline."""
    names = (paging_pair(run) or ())[::-1]
    cells = [cell for name in names if (cell := run.cell(name, load))] or [baseline(run, load)]
    filled = [(cell, found) for cell in cells if cell is not None and (found := ledger(cell))]
    if not filled:
        return f"KV over time {under(load)}"
    shares = ", ".join(f"{cell.name} {words.percent(found.share('tokens'))}" for cell, found in filled)
    return f"KV holding tokens {under(load)}: {shares}"
