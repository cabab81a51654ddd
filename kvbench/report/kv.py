"""Where the KV bytes went: the ledger as table, sentence and figure, what the memory is divided into, KV over time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import wrap

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import Comparisons, best
from kvbench.report.decision import Decision
from kvbench.report.quality import times
from kvbench.report.style import GREY, Drawing, compact, finish, hatch, safe, thin, under
from kvbench.report.tables import (
    NO_TABLE,
    RECOMPUTED,
    Column,
    Part,
    ReportTable,
    Section,
    Value,
    cell_table,
    identity_columns,
    number_column,
)
from kvbench.runs.kv_ledger import (
    SLOT_USES,
    Ledger,
    bytes_per_slot,
    interval_slots,
    ledger,
    scale_bytes_per_slot,
    swapped_bytes,
)
from kvbench.runs.model import DOUBTS, WRONG, MeasuredCell, MeasuredLoad, number
from kvbench.runs.results import Manifest
from kvbench.workload.settings import effective

_NOTE = "Every byte of the KV budget by its use, mean of the steady window."
_NOTES = {  # column that is shown only where it has values -> what the note says of it
    "kv_saved": "Saved by sharing: needed on top if no page were shared.",
    "swapped": "Swapped: to the host and back.",
    "recomputed_tokens": "Recomputed: tokens.",
}
_DOUBT = {
    "": "",
    "invalid": " Invalid measurement, not to be relied on.",
    "refused": " The server refused requests, so it did less work: not to be compared.",
    WRONG: " Canaries were answered wrongly: not to be relied on.",
}
# Okabe and Ito's palette again: what is used is dark, what is lost is loud, what is left is pale.
_FILLS = {
    "tokens": "#0072B2",
    "scales": "#0072B2",
    "waste": "#D55E00",
    "cached": "#009E73",
    "pinned": "#CC79A7",
    "free": "rgba(140,150,160,0.28)",
    "fragmented": "#E69F00",
    "table": "#56B4E9",
    "rest": "rgba(140,150,160,0.55)",
}


@dataclass(frozen=True)
class KvUse:
    """A use of the budget's bytes; ``title`` and ``hint`` are for readers."""

    key: str
    title: str
    hint: str


USES = (
    KvUse("tokens", "tokens", "hold the KV of a token of a running sequence, shared ones counted once"),
    KvUse("waste", "reserved, empty", "reserved by a sequence and holding nothing yet: internal waste"),
    KvUse("cached", "cached", "owned by nobody, kept for the prefix cache, given up when needed"),
    KvUse("pinned", "pinned", "kept until a copy from them is done"),
    KvUse("free", "free", "free and usable"),
    KvUse("fragmented", "free, scattered", "free, enough for a request that waits, but not in one piece (contiguous)"),
    KvUse("table", "page table", "the page table"),
    KvUse("rest", "left over", "too little for another page"),
)
_SCALES = KvUse("scales", "scales of the tokens", "of the tokens' bytes: scales of a quantised KV")
_LEAST_LABELLED = 0.06  # of the budget: a narrower part has no room for its percentage
_MIB = 2.0**20

MOST_SHOWN = 5  # configurations over time
_POINTS = 400  # of all curves of one kind in a figure
_EVENTS = {  # column -> counter, what its panel is called
    "prefix_hits": ("prefix_cache_hits_total", "prefix hits, tokens/s"),
    "preemptions": ("num_preemptions_total", "preemptions/s"),
    "swapped_out": ("swapped_out_slots_total", "swapped out, MiB/s"),
}
_PATTERNS = {"waste": "/", "cached": ".", "pinned": "x", "fragmented": "\\"}
_LINES = {"running": "solid", "waiting": "dot"}
_GAP, _BOTTOM = 34, 52  # px between panels, and below them
_LINE = 19  # characters of a column's title
_KV_HEIGHT, _SEQUENCES_HEIGHT, _EVENT_HEIGHT = 200, 96, 60  # px

Bars = list[tuple[MeasuredCell, Ledger]]
Ledgers = Mapping[str, Ledger]  # by cell id


# --- Tables and sentences ---


def kv_parts(decision: Decision) -> Iterator[Part]:
    """The chapter on the KV's bytes: sentences, figures and tables."""
    comparisons = decision.comparisons
    known = [(cell, one) for cell in comparisons.by_load if (one := ledger(cell)) is not None]
    ledgers = {cell.cell_id: one for cell, one in known}
    yield ledger_sentence(comparisons, ledgers)
    yield from (reservation(contiguous) for _, contiguous in list(comparisons.pairs.values())[-1:])
    yield ledger_figure(known)
    yield from (timeline_drawing(decision, load, ledgers) for load in reversed(comparisons.loads))
    table = ledger_table(known)
    note = " ".join([_NOTE, *(_NOTES[column.key] for column in table.columns if column.key in _NOTES)])
    yield Section("ledger", "Use by use", table, note)
    memory = memory_table(comparisons.cells, decision.run.manifest)
    yield Section("memory", "Bytes a token, scales and page table", memory)


def ledger_table(known: Bars) -> ReportTable:
    """Configuration, load, the uses that have any bytes, the budget, and what is no part of the budget."""
    ledgers = {cell.cell_id: one for cell, one in known}

    def part(use: KvUse) -> Column:
        def value(cell: MeasuredCell) -> Value:
            one = ledgers[cell.cell_id]
            if not one.parts[use.key]:
                return Value("0", 0.0)
            note = words.data_size(one.parts[use.key])
            if use.key == "tokens" and one.scales:
                note += f", {words.data_size(one.scales)} of it scales"
            return Value(words.percent(one.share(use.key)), one.share(use.key), note)

        return Column(f"kv_{use.key}", use.title, use.hint, value)

    budget, saved = "bytes of KV, scales and page table", "bytes needed on top if nothing were shared"
    every = [
        *identity_columns(),
        *(part(use) for use in USES if any(one.parts[use.key] > 0 for _, one in known)),
        number_column("kv_budget", "budget", budget, lambda c: ledgers[c.cell_id].budget, _size),
        number_column("kv_saved", "saved by sharing", saved, lambda c: ledgers[c.cell_id].saved, _size),
        Column("swapped", "swapped out", "bytes moved to the host, all repeats; small: back, and lost there", _swapped),
        RECOMPUTED,
    ]
    shown = [c for c in every if c.key not in _NOTES or any(c.of(cell).sort for cell, _ in known)]
    return cell_table(shown, [cell for cell, _ in known], {column.key for column in shown})


def memory_table(measured: Sequence[MeasuredCell], manifest: Manifest) -> ReportTable:
    """A row a configuration on its KV budget: bytes a token, scales, page table, tokens it holds.

    Of the highest load of each; empty where neither the server nor the arithmetic before the sweep tells.
    """
    last = {cell.name: cell for cell in measured}  # loads ascend
    cells = [cell for cell in last.values() if bytes_per_slot(cell) is not None]

    def outliers(cell: MeasuredCell) -> Value:
        facts = manifest.server_of(cell.config_id).kv_outliers
        unknown = facts.k is None or facts.v is None
        return Value("–") if unknown else Value(times(facts.k), facts.k, f"V: {times(facts.v)}")

    every = [
        identity_columns()[0],
        number_column("kv_token", "a token", "K and V of one token in all layers, scales too", bytes_per_slot, _size),
        number_column("kv_token_scales", "of it scales", "scales of a quantised KV", scale_bytes_per_slot, _size),
        number_column(
            "kv_capacity",
            "capacity, tokens",
            "what the budget holds",
            lambda c: number(c.capacity.capacity_tokens),
            words.count,
        ),
        Column("kv_page_table", "page table", "at most; small: of the KV budget", _page_table),
        Column("kv_outliers", "largest channel", "of K, in medians; small: of V", outliers),
    ]
    return cell_table(every, cells, {"configuration"}, numbers_from=1) if cells else NO_TABLE


def _size(value: float | None) -> str:
    return "0" if value == 0 else words.data_size(value)


def _page_table(cell: MeasuredCell) -> Value:
    size = max(cell.observed("page_table_bytes").values(), default=number(cell.capacity.page_table_bytes))
    budget = cell.capacity.kv_budget_bytes
    return Value(_size(size), size, f"{size / budget * 100:.2g} %" if size and budget else "")


def _swapped(cell: MeasuredCell) -> Value:
    out, back = swapped_bytes(cell), swapped_bytes(cell, "in")
    if not out:
        return Value("–" if out is None else "0", out)
    lost = cell.counter("swap_lost_slots_total") or 0.0
    note = f"{words.data_size(back)} back" + (f", {words.plural(lost, 'token')} lost" if lost else "")
    return Value(words.data_size(out), out, note)


def reservation(contiguous: MeasuredCell) -> str:
    """A sentence on what contiguous reserves for a request and what requests needed; empty where not known."""
    slots = contiguous.settings.get("max_model_len") or contiguous.capacity.max_model_len
    requests = contiguous.requests()
    if effective(contiguous.settings, "reservation") != "max" or not slots or requests.empty:
        return ""
    tokens = requests["prompt_tokens"] + requests["output_tokens"]
    return (
        f"{words.upper_first(contiguous.name)} reserves {words.count(slots)} slots per request; the longest request "
        f"here had {words.plural(int(tokens.max()), 'token')}, the mean {words.count(float(tokens.mean()))}."
    )


def ledger_sentence(comparisons: Comparisons, ledgers: Ledgers) -> str:
    """Says where the bytes of the headline's pair went, else of the baseline or the best; "" without data."""
    for paged, contiguous in reversed(comparisons.pairs.values()):
        if paged.cell_id in ledgers and contiguous.cell_id in ledgers:
            doubt = min(filter(None, (paged.doubt, contiguous.doubt)), key=DOUBTS.index, default="")
            other = _filled(contiguous, ledgers[contiguous.cell_id], " of the KV budget")
            return f"At {paged.load.label} {other}; {_filled(paged, ledgers[paged.cell_id])}.{_DOUBT[doubt]}"
    for load in reversed(comparisons.loads):
        cell = comparisons.baselines[load] or best(comparisons.at(load))
        if cell is not None and cell.cell_id in ledgers:
            return f"At {load.label} {_filled(cell, ledgers[cell.cell_id], ' of the KV budget')}."
    return ""


def _filled(cell: MeasuredCell, one: Ledger, whole: str = "") -> str:
    uses = (("fragmented", "free but scattered"), ("cached", "cached"), ("free", "free"))
    more = [f"{words.percent(one.share(use))} {what}" for use, what in uses if one.share(use) >= 0.01]
    tokens, waste = (words.percent(one.share(use)) for use in ("tokens", "waste"))
    text = f"{cell.name} held tokens in {tokens}{whole} and wasted {waste} on slots reserved and empty"
    return f"{text} ({', '.join(more)})" if more else text


# --- The ledger as a figure ---


def ledger_figure(known: Bars) -> Drawing | None:
    """A panel a load, a stacked bar a configuration; None when no cell has a ledger."""
    if not known:
        return None
    loads = list(dict.fromkeys(cell.load for cell, _ in known))
    panels = [[pair for pair in known if pair[0].load == load][::-1] for load in loads]  # plotly draws from below
    height = 120 + sum(44 + 36 * len(panel) for panel in panels)
    figure = make_subplots(
        rows=len(loads),
        cols=1,
        subplot_titles=[load.label for load in loads],
        row_heights=[len(panel) + 0.6 for panel in panels],
        vertical_spacing=min(0.9 / max(1, len(loads) - 1), 40 / (height - 120)),
    )
    largest = max(one.budget for _, one in known)
    unit, divisor = next(((u, 2.0**p) for u, p in (("GiB", 30), ("MiB", 20)) if largest >= 2.0**p), ("KiB", 2.0**10))
    for use in (USES[0], _SCALES, *USES[1:]):  # scales right after the tokens that they belong to
        if any(_segment(one, use.key) > 0 for _, one in known):
            for row, panel in enumerate(panels, start=1):
                figure.add_trace(_stack(use, panel, divisor, legend=row == 1), row=row, col=1)
    figure.update_annotations(font={"size": 13})  # the panels' titles
    figure.update_xaxes(range=[0, largest / divisor], showgrid=False, showticklabels=False)
    figure.update_xaxes(title_text=f"KV budget, {unit}", showticklabels=True, row=len(loads))
    figure.update_yaxes(showgrid=False)
    finish(figure, height)
    figure.update_layout(barmode="stack", bargap=0.28, margin_t=84)
    caption = (
        "Percent of the budget; the table has the parts under 6 %. Hatched: scales, part of the tokens' percentage."
    )
    return Drawing("ledger", "The KV budget by use, mean of the steady window", caption, figure, 760)


def _segment(one: Ledger, key: str) -> float:
    """Bytes of a segment of the bar; those of the tokens and of their scales are the tokens' part together."""
    return one.scales if key == "scales" else one.parts[key] - (one.scales if key == "tokens" else 0.0)


def _stack(use: KvUse, panel: Bars, divisor: float, legend: bool) -> go.Bar:
    is_scales = use.key == "scales"
    sizes = [one.scales if is_scales else one.parts[use.key] for _, one in panel]  # the tokens' with their scales
    shares = [size / one.budget for size, (_, one) in zip(sizes, panel, strict=True)]
    return go.Bar(
        y=[safe(cell.marked_name) for cell, _ in panel],
        x=[_segment(one, use.key) / divisor for _, one in panel],
        orientation="h",
        name=use.title,
        legendgroup=use.key,
        showlegend=legend,
        marker={"color": _FILLS[use.key], "pattern": hatch("/" if is_scales else "")},
        text=["" if is_scales or share < _LEAST_LABELLED else words.percent(share) for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        insidetextfont={"color": GREY if use.key in ("free", "rest") else "#fff"},  # pale parts: light and dark pages
        textangle=0,
        hovertext=[
            f"{safe(cell.marked_name)}<br>{use.title}: {words.percent(share)} of the budget, "
            f"{words.data_size(size)}<br>{use.hint}"
            for (cell, _), size, share in zip(panel, sizes, shares, strict=True)
        ],
        hoverinfo="text",
    )


# --- Over time ---


def shown_cells(decision: Decision, load: MeasuredLoad, ledgers: Ledgers) -> tuple[list[MeasuredCell], int]:
    """The cells of a load that tell how full their KV was, at most MOST_SHOWN, and their number.

    Of more these: the baseline, the two layouts that are compared, the fastest, and those whose KV use differs most
    from the baseline's.
    """
    known = [cell for cell in decision.comparisons.at(load) if cell.observed("usage_mean")]
    if len(known) <= MOST_SHOWN:
        return known, len(known)
    base = decision.comparisons.baselines[load] or known[0]
    fastest = decision.by_load[load][:1]
    first = {base.name, *(decision.pair or ()), *(one.cell.name for one in fastest)}
    ranked = sorted(known, key=lambda cell: (cell.name not in first, -_difference(cell, base, ledgers)))
    chosen = {cell.name for cell in ranked[:MOST_SHOWN]}
    return [cell for cell in known if cell.name in chosen], len(known)


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
    frames = [_of_cell(cell, points) for cell in cells]
    columns = ["configuration", "t", *SLOT_USES, "usage", *_LINES, *_EVENTS]
    return pd.concat([f for f in frames if len(f)] or [pd.DataFrame(columns=columns)], ignore_index=True)


def _of_cell(cell: MeasuredCell, points: int) -> pd.DataFrame:
    gauges = cell.gauges()
    polls = thin(gauges[gauges["repeat"] == cell.typical_repeat].sort_values("t"), points)
    slots, size = interval_slots(polls), bytes_per_slot(cell)
    total = polls["kv_slots_total"].reindex(slots.index)
    columns = {"configuration": cell.marked_name, "t": polls["t"]}
    columns |= {use: slots[use] / total * 100 for use in SLOT_USES}
    columns["usage"] = polls["kv_cache_usage_perc"] * 100 if slots.empty else np.nan
    columns |= {what: polls[f"num_requests_{what}"] for what in _LINES}
    for name, (counter, _) in _EVENTS.items():
        rate = polls[counter].diff() / polls["t"].diff() if counter in polls else np.nan
        columns[name] = rate * ((size or np.nan) / _MIB if name == "swapped_out" else 1.0)
    return pd.DataFrame(columns, index=polls.index)


def timeline_figure(frame: pd.DataFrame) -> go.Figure:
    """A column a configuration: the KV's uses, the sequences below, then a panel for each event that happened."""
    names = list(dict.fromkeys(frame["configuration"]))
    events = [name for name in _EVENTS if (frame[name] > 0).any()]
    heights = [_KV_HEIGHT, _SEQUENCES_HEIGHT, *[_EVENT_HEIGHT] * len(events)]
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
            line = {"color": GREY, "width": 2, "dash": dash, "shape": "hv"}
            _trace(figure, rows, what, what, 2, column, "%{y:.0f}", line=line, showlegend=False)
        for row, event in enumerate(events, start=3):
            look = {"fill": "tozeroy", "line": {"color": GREY, "width": 1.5, "shape": "vh"}}
            _trace(figure, rows, event, event, row, column, "%{y:.3~g}", **look, showlegend=False)
    figure.update_xaxes(range=[0, float(frame["t"].max())])
    figure.update_xaxes(title_text="seconds", row=len(heights))
    figure.update_yaxes(range=[0, 100], ticksuffix=" %", dtick=25, row=1)
    panels = [("sequences running (solid), waiting (dotted)", frame[list(_LINES)])]
    panels += [(_EVENTS[event][1], frame[event]) for event in events]
    for row, (label, values) in enumerate(panels, start=2):
        figure.update_yaxes(range=[0, float(np.nanmax(values)) * 1.08 or 1.0], nticks=4, row=row)
        top = figure.get_subplot(row, 1).yaxis.domain[1]
        place = {"x": 0, "y": top, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "bottom"}
        figure.add_annotation(text=label, **place, yshift=2, showarrow=False, font={"size": 12})
    entries = sum(45 + 6.5 * len(title) for title in in_legend.values())  # px
    top = 38 + 20 * math.ceil(entries / (_width(len(names)) - 110)) + 16 * max(map(len, titles))
    finish(figure, height + top + _BOTTOM)
    figure.update_layout(margin={"t": top, "b": _BOTTOM}, hovermode="x unified", legend={"tracegroupgap": 0})
    return figure


def _width(columns: int) -> int:
    """The least width of the figure [px]; a phone has 370."""
    return max(370, 140 * columns + 70)


def _lines(name: str) -> list[str]:
    """A configuration's name in lines that are as narrow as its column."""
    first, *more = name.split(" + ")
    return [safe(line) for part in (first, *(f"+ {text}" for text in more)) for line in wrap(part, _LINE)]


def _areas(figure: go.Figure, rows: pd.DataFrame, column: int, in_legend: dict[str, str]) -> None:
    """The uses on top of one another; one area for a server that says no more than how full its KV is."""
    areas = [(0, "usage", "in use")]
    if rows[list(SLOT_USES)].notna().to_numpy().any():
        uses = enumerate(use for use in USES if use.key in SLOT_USES)
        areas = [(i, use.key, use.title) for i, use in uses if (rows[use.key] > 0.05).any()]
    for rank, key, title in areas:
        fill = {"fillcolor": _FILLS.get(key, _FILLS["tokens"]), "line": {"width": 0, "shape": "vh"}, "stackgroup": "kv"}
        if key in _PATTERNS:
            fill["fillpattern"] = hatch(_PATTERNS[key], 0.25) | {"bgcolor": _FILLS[key]}
        legend = {"legendgroup": key, "legendrank": rank, "showlegend": key not in in_legend}
        _trace(figure, rows, key, title, 1, column, "%{y:.0f} %", **legend, **fill)
        in_legend[key] = title


def _trace(
    figure: go.Figure, rows: pd.DataFrame, key: str, title: str, row: int, column: int, hover: str, **look: object
) -> None:
    """One column of the frame; a value that is of the time since the reading before begins there."""
    x, y = compact(rows["t"]), compact(rows[key].bfill(), 3)
    figure.add_scatter(x=x, y=y, mode="lines", name=title, hovertemplate=hover, row=row, col=column, **look)


def timeline_drawing(decision: Decision, load: MeasuredLoad, ledgers: Ledgers) -> Drawing | None:
    """One load's KV over time; None where no server says how full its KV was.

    The title says how much of the KV held tokens in the two layouts, else in the baseline.
    """
    cells, every = shown_cells(decision, load, ledgers)
    frame = timeline(cells)
    if frame.empty:
        return None
    caption = "One repeat each, that of median throughput (title: steady window, all); areas: means between readings."
    if every > len(cells):
        caption += (
            f" {len(cells)} of {every} configurations: the baseline, both layouts, and those that used the KV most "
            "differently."
        )
    at_load = decision.comparisons.at(load)
    named = [cell for cell in at_load if cell.name in (decision.pair or ())]
    named = named or [cell for cell in at_load if cell.is_baseline][:1]
    filled = {cell.name: ledgers[cell.cell_id].share("tokens") for cell in named if cell.cell_id in ledgers}
    shares = ", ".join(f"{name} {words.percent(share)}" for name, share in filled.items())
    title = f"KV holding tokens {under(load)}: {shares}" if filled else f"KV over time {under(load)}"
    key = f"kv-timeline-{load.mode}-{load.value:g}"
    return Drawing(key, title, caption, timeline_figure(frame), _width(len(cells)))
