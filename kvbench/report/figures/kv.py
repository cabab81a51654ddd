"""The KV budget by use, and its uses over time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.decision import Decision
from kvbench.report.figures.bars import COLUMNS, BarPart, bars
from kvbench.report.kv import USES, Ledgers, ledgers_of
from kvbench.report.style import GREY, Drawing, compact, finish, hatch, legend_below, room_for_labels, safe, thin, under
from kvbench.report.wording import say
from kvbench.runs.kv_ledger import SLOT_USES, bytes_per_slot, interval_slots
from kvbench.runs.model import MeasuredCell, MeasuredLoad

# Okabe and Ito's palette again: what is used is dark, what is lost is loud, what is left is pale.
_FILLS = {
    "tokens": "#0072B2", "scales": "#0072B2", "waste": "#D55E00", "cached": "#009E73", "pinned": "#CC79A7",
    "free": "rgba(140,150,160,0.28)", "fragmented": "#E69F00", "table": "#56B4E9", "rest": "rgba(140,150,160,0.55)",
}  # fmt: skip
_PATTERNS = {"scales": "/"}  # of a bar
_AREA_PATTERNS = {"waste": "/", "cached": ".", "pinned": "x", "fragmented": "\\"}
_INKS = {"free": GREY, "rest": GREY}  # of texts on pale areas, read on light and on dark pages
_TITLES = {"tokens": USES["tokens"], "scales": "scales of the tokens"} | USES  # scales right after their tokens
_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))

MOST_SHOWN = 5  # configurations over time
_POINTS = 400  # of all curves of one kind in a figure
_EVENTS = {  # column -> counter, what its panel is called
    "prefix_hits": ("prefix_cache_hits_total", "prefix hits, tokens/s"),
    "preemptions": ("num_preemptions_total", "preemptions/s"),
    "swapped_out": ("swapped_out_slots_total", "swapped out, MiB/s"),
}
_LINES = {"running": "solid", "waiting": "dot"}
_GAP = 34  # px between panels
_LINE = 19  # characters of a column's title
_KV_HEIGHT, _SEQUENCES_HEIGHT, _EVENT_HEIGHT = 200, 96, 60  # px


def drawings(decision: Decision) -> Iterator[Drawing | None]:
    """The budget by use, then each load over time, the highest first."""
    comparisons = decision.comparisons
    ledgers = ledgers_of(comparisons.by_load)
    yield ledger_drawing(comparisons.by_load, ledgers)
    for load in reversed(comparisons.loads):
        yield timeline_drawing(decision, load, ledgers)


# --- The budget by use ---


def ledger_drawing(cells: Sequence[MeasuredCell], ledgers: Ledgers) -> Drawing | None:
    """A bar a cell, the highest load first; None when no cell has a ledger."""
    if not ledgers:
        return None
    largest = max(uses.budget for uses in ledgers.values())
    unit, size = next((named for named in _UNITS if largest >= named[1]), _UNITS[-1])
    rows, labels = [], []
    for cell in cells:
        if cell.cell_id not in ledgers:
            continue
        uses, at = ledgers[cell.cell_id], 0.0
        labels.append(cell.marked_name)
        sizes = {**uses.parts, "scales": uses.scales}  # tokens: with their scales
        lengths = sizes | {"tokens": sizes["tokens"] - uses.scales}
        for part, title in _TITLES.items():
            share, what = sizes[part] / uses.budget, say("tables.hint", f"kv_{part}", slo="")
            name = safe(cell.marked_name)
            hover = say("kv.hover", name=name, title=title, size=sizes[part], share=share, what=what)
            text = words.percent(share) * (part != "scales")
            where = (cell.cell_id, cell.marked_name, cell.load.label, part)
            rows.append((*where, at / size, lengths[part] / size, text, hover))
            at += lengths[part]
    parts = {
        part: BarPart(title, _FILLS[part], _PATTERNS.get(part, ""), _INKS.get(part, "#fff"))
        for part, title in _TITLES.items()
    }
    figure = bars(pd.DataFrame(rows, columns=COLUMNS), parts, largest / size, title_text=f"KV budget, {unit}")
    return Drawing("ledger", say("kv.ledger_title"), say("kv.ledger_caption"), figure, room_for_labels(labels))


# --- Over time ---


def shown_cells(decision: Decision, load: MeasuredLoad, ledgers: Ledgers) -> tuple[list[MeasuredCell], int]:
    """The cells of a load that tell how full their KV was, at most MOST_SHOWN, and their number.

    Of more these: the baseline, the two layouts that are compared, the fastest, and those whose KV use differs most
    from the baseline's.
    """
    cells = [cell for cell in decision.comparisons.at(load) if cell.observed("usage_mean")]
    if len(cells) <= MOST_SHOWN:
        return cells, len(cells)
    base = decision.comparisons.baselines[load] or cells[0]
    fastest = decision.by_load[load][:1]
    first = {base.name, *(decision.pair or ()), *(candidate.cell.name for candidate in fastest)}
    ranked = sorted(cells, key=lambda cell: (cell.name not in first, -_difference(cell, base, ledgers)))
    chosen = {cell.name for cell in ranked[:MOST_SHOWN]}
    return [cell for cell in cells if cell.name in chosen], len(cells)


def _difference(a: MeasuredCell, b: MeasuredCell, ledgers: Ledgers) -> float:
    """The difference of two cells' KV use over the steady window: 0 (alike) to 2."""
    if a.cell_id in ledgers and b.cell_id in ledgers:
        x, y = ledgers[a.cell_id], ledgers[b.cell_id]
        return sum(abs(x.share(use) - y.share(use)) for use in SLOT_USES)
    usage = [np.mean(list(cell.observed("usage_mean").values() or [0.0])) for cell in (a, b)]
    return float(abs(usage[0] - usage[1]))


def timeline(cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """A row a reading of the server, for one repeat of each cell (that of median throughput).

    configuration: the cell's name, with "invalid" or "refused" behind it where its figures are not compared
    t: seconds since the load started; uses and events are means since the reading before
    tokens .. fragmented: the SLOT_USES in % of the KV's slots, over all steps; NaN where the server does not count them
    usage: % of the KV in use, as the server says; only where it does not count its slots
    running, waiting: sequences
    prefix_hits [tokens/s], preemptions [1/s], swapped_out [MiB/s]: NaN where not counted, and in the first row
    """
    points = max(80, _POINTS // max(1, len(cells)))
    frames = [frame for cell in cells if len(frame := _readings(cell, points))]
    columns = ["configuration", "t", *SLOT_USES, "usage", *_LINES, *_EVENTS]
    return pd.concat(frames or [pd.DataFrame(columns=columns)], ignore_index=True)


def _readings(cell: MeasuredCell, points: int) -> pd.DataFrame:
    gauges = cell.gauges()
    polls = thin(gauges[gauges["repeat"] == cell.typical_repeat].sort_values("t"), points)
    slots, size = interval_slots(polls), bytes_per_slot(cell)
    total = polls["kv_slots_total"].reindex(slots.index)
    columns = {"configuration": cell.marked_name, "t": polls["t"]}
    columns |= {use: slots[use] / total * 100 for use in SLOT_USES}
    columns["usage"] = polls["kv_cache_usage_perc"] * 100 if slots.empty else np.nan
    columns |= {what: polls[f"num_requests_{what}"] for what in _LINES}
    for name, (counter, _) in _EVENTS.items():
        columns[name] = polls[counter].diff() / polls["t"].diff() if counter in polls else np.nan
    columns["swapped_out"] = columns["swapped_out"] * (size or np.nan) / 2.0**20
    return pd.DataFrame(columns, index=polls.index)


def timeline_figure(frame: pd.DataFrame) -> go.Figure:
    """A column a configuration: the KV's uses, the sequences below, then a panel for each event that happened."""
    names = list(dict.fromkeys(frame["configuration"]))
    events = [name for name in _EVENTS if (frame[name] > 0).any()]
    heights = [_KV_HEIGHT, _SEQUENCES_HEIGHT, *[_EVENT_HEIGHT] * len(events)]
    height = sum(heights) + _GAP * (len(heights) - 1)
    titles = [_lines(name) for name in names]
    figure = make_subplots(
        rows=len(heights), cols=len(names), shared_xaxes=True, shared_yaxes=True, row_heights=heights,
        vertical_spacing=_GAP / height, horizontal_spacing=0.02, column_titles=["<br>".join(lines) for lines in titles],
    )  # fmt: skip
    figure.update_annotations(font={"size": 12}, yshift=16)
    in_legend: dict[str, str] = {}
    for column, name in enumerate(names, start=1):
        rows = frame[frame["configuration"] == name]
        _areas(figure, rows, column, in_legend)
        for what, dash in _LINES.items():
            line = {"color": GREY, "width": 2, "dash": dash, "shape": "hv"}
            _trace(figure, rows, what, what, (2, column), "%{y:.0f}", line=line, showlegend=False)
        for row, event in enumerate(events, start=3):
            look = {"fill": "tozeroy", "line": {"color": GREY, "width": 1.5, "shape": "vh"}}
            _trace(figure, rows, event, event, (row, column), "%{y:.3~g}", **look, showlegend=False)
    figure.update_xaxes(range=[0, 1.1 * float(frame["t"].max())])
    figure.update_xaxes(title_text="seconds", row=len(heights))
    figure.update_yaxes(range=[0, 100], ticksuffix=" %", dtick=25, row=1)
    panels = [(say("kv.sequences"), frame[list(_LINES)]), *((_EVENTS[event][1], frame[event]) for event in events)]
    for row, (label, values) in enumerate(panels, start=2):
        figure.update_yaxes(range=[0, float(np.nanmax(values)) * 1.08 or 1.0], nticks=4, row=row)
        place = {"x": 0, "xref": "paper", "xanchor": "left", "yref": "paper", "yanchor": "bottom", "yshift": 2}
        top = figure.get_subplot(row, 1).yaxis.domain[1]
        figure.add_annotation(text=label, y=top, **place, showarrow=False, font={"size": 12})
    finish(figure, height)
    figure.update_layout(hovermode="x unified", legend_tracegroupgap=0)
    margin = {"t": 22 + 16 * max(map(len, titles)), "l": 64, "r": 44}
    return legend_below(figure, height, list(in_legend.values()), margin)


def _lines(name: str) -> list[str]:
    """A configuration's name in lines that are as narrow as its column."""
    first, *more = name.split(" + ")
    return [safe(line) for part in (first, *(f"+ {text}" for text in more)) for line in wrap(part, _LINE)]


def _areas(figure: go.Figure, rows: pd.DataFrame, column: int, in_legend: dict[str, str]) -> None:
    """Draws the uses on top of one another; one area where the server only tells how full its KV is."""
    areas = {"usage": "in use"}
    if rows[list(SLOT_USES)].notna().to_numpy().any():
        areas = {use: USES[use] for use in USES if use in SLOT_USES and (rows[use] > 0.05).any()}
    for key, title in areas.items():
        fill = {"fillcolor": _FILLS.get(key, _FILLS["tokens"]), "line": {"width": 0, "shape": "vh"}, "stackgroup": "kv"}
        if key in _AREA_PATTERNS:
            fill["fillpattern"] = hatch(_AREA_PATTERNS[key], 0.25) | {"bgcolor": _FILLS[key]}
        rank = list(USES).index(key) if key in USES else 0
        legend = {"legendgroup": key, "legendrank": rank, "showlegend": key not in in_legend}
        _trace(figure, rows, key, title, (1, column), "%{y:.0f} %", **legend, **fill)
        in_legend[key] = title


def _trace(
    figure: go.Figure, rows: pd.DataFrame, key: str, title: str, place: tuple[int, int], hover: str, **look: Any
) -> None:
    """One column of the frame; a value that is of the time since the reading before begins there."""
    x, y, (row, column) = compact(rows["t"]), compact(rows[key].bfill(), 3), place
    figure.add_scatter(x=x, y=y, mode="lines", name=title, hovertemplate=hover, row=row, col=column, **look)


def timeline_drawing(decision: Decision, load: MeasuredLoad, ledgers: Ledgers) -> Drawing | None:
    """One load's KV over time; None where no server says how full its KV was.

    The title says how much of the KV held tokens in the two layouts, else in the baseline.
    """
    cells, every = shown_cells(decision, load, ledgers)
    frame = timeline(cells)
    if frame.empty:
        return None
    caption = say("kv.timeline_caption") + say("kv.timeline_some", every > len(cells), shown=len(cells), every=every)
    at_load = decision.comparisons.at(load)
    named = [cell for cell in at_load if cell.name in (decision.pair or ())]
    named = named or [cell for cell in at_load if cell.is_baseline][:1]
    shares = {cell.name: ledgers[cell.cell_id].share("tokens") for cell in named if cell.cell_id in ledgers}
    filled = ", ".join(f"{name} {words.percent(share)}" for name, share in shares.items())
    title = say("kv.timeline_title", bool(filled), load=under(load), filled=filled)
    key = f"kv-timeline-{load.mode}-{load.value:g}"
    return Drawing(key, title, caption, timeline_figure(frame), max(370, 140 * len(cells) + 70))
