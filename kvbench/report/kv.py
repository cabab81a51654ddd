"""The section "Where did the KV bytes go": a stacked bar a cell, and the table beneath it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import baseline, best, paging
from kvbench.report.style import Drawing, finish, safe
from kvbench.report.tables import Column, Row, Value
from kvbench.runs.kv_ledger import PLACES, Ledger, Place, ledger, swapped_bytes
from kvbench.runs.model import MeasuredCell, Run

SECTION = "Where did the KV bytes go"
_NOTE = "The whole KV budget, every byte in one place, averaged over the steady window and the repeats."
_NOTES = {  # columns that are not always there -> what the note says of them
    "kv_saved": "Saved by sharing: what the sequences would have needed on top if no page were shared.",
    "swapped": "Swapped: moved to the host and back, in all repeats.",
    "recomputed": "Recomputed: tokens, in all repeats.",
}
# Okabe and Ito's palette again: what is used is dark, what is lost is loud, what is left is pale.
_FILLS = {
    "tokens": "#0072B2",
    "waste": "#D55E00",
    "cached": "#009E73",
    "pinned": "#CC79A7",
    "free": "rgba(140,150,160,0.28)",
    "fragmented": "#E69F00",
    "table": "#56B4E9",
    "rest": "rgba(140,150,160,0.55)",
}
_SCALES = Place("scales", "scales of the tokens", "of the tokens' bytes: scales of a quantised KV")
_LEAST_LABELLED = 0.06  # of the budget: a narrower part has no room for its percentage


def ledger_figure(run: Run) -> Drawing | None:
    """A panel a load, a stacked bar a configuration; None when no cell has a ledger."""
    found = ledgers(run)
    if not found:
        return None
    loads = list(dict.fromkeys(cell.load for cell, _ in found))
    bars = [[pair for pair in found if pair[0].load == load][::-1] for load in loads]  # plotly draws from below
    height = 120 + sum(44 + 36 * len(panel) for panel in bars)
    figure = make_subplots(
        rows=len(loads),
        cols=1,
        subplot_titles=[load.label for load in loads],
        row_heights=[len(panel) + 0.6 for panel in bars],
        vertical_spacing=min(0.9 / max(1, len(loads) - 1), 40 / (height - 120)),
    )
    unit, divisor = _unit(max(one.budget for _, one in found))
    for place in _shown_places(found):
        for row, panel in enumerate(bars, start=1):
            _stack(figure, place, panel, row, divisor, legend=row == 1)
    figure.update_annotations(font={"size": 13})  # the panels' titles
    widest = max(one.budget for _, one in found) / divisor
    asides = _write_asides(figure, bars, widest)
    figure.update_xaxes(range=[0, widest], showgrid=False, showticklabels=False)
    figure.update_xaxes(title_text=f"KV budget, {unit}", showticklabels=True, row=len(loads))
    figure.update_yaxes(showgrid=False)
    finish(figure, height)
    figure.update_layout(barmode="stack", bargap=0.28, margin_t=84, margin_r=210 if asides else 44)
    return Drawing(
        "ledger",
        ledger_sentence(run) or SECTION,
        "Percent of the budget; the table has the parts under 6 %. Hatched: scales, part of the tokens' percentage.",
        figure,
        760,
    )


def _write_asides(figure: go.Figure, bars: list[list[tuple[MeasuredCell, Ledger]]], x: float) -> bool:
    """The text right of each bar; whether there is any."""
    written = False
    for row, panel in enumerate(bars, start=1):
        for cell, one in panel:
            if text := aside(cell, one):
                place = {"x": x, "y": safe(cell.name), "xanchor": "left", "xshift": 8, "align": "left"}
                figure.add_annotation(text=text, showarrow=False, font={"size": 11}, row=row, col=1, **place)
                written = True
    return written


def _shown_places(found: list[tuple[MeasuredCell, Ledger]]) -> list[Place]:
    """Places that hold anything anywhere; scales right after the tokens that they belong to."""
    every = [PLACES[0], _SCALES, *PLACES[1:]]
    return [place for place in every if any(_bytes(one, place.key) > 0 for _, one in found)]


def _bytes(one: Ledger, key: str) -> float:
    """Bytes of a segment of the bar; the tokens' segment and that of their scales are the tokens' part together."""
    if key == "scales":
        return one.scales
    return one.parts[key] - (one.scales if key == "tokens" else 0.0)


def _stack(
    figure: go.Figure, place: Place, panel: list[tuple[MeasuredCell, Ledger]], row: int, divisor: float, legend: bool
) -> None:
    hatched = place.key == "scales"
    told = [one.scales if hatched else one.parts[place.key] for _, one in panel]  # the tokens' with their scales
    shares = [size / one.budget for size, (_, one) in zip(told, panel, strict=True)]
    figure.add_bar(
        y=[safe(cell.name) for cell, _ in panel],
        x=[_bytes(one, place.key) / divisor for _, one in panel],
        orientation="h",
        name=place.title,
        legendgroup=place.key,
        showlegend=legend,
        marker={
            "color": _FILLS["tokens" if hatched else place.key],
            "pattern": {"shape": "/" if hatched else "", "fillmode": "overlay", "fgcolor": "#fff", "size": 5},
        },
        text=["" if hatched or share < _LEAST_LABELLED else words.percent(share) for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[
            f"{safe(cell.name)}<br>{place.title}: {words.percent(share)} of the budget, "
            f"{words.data_size(size)}<br>{place.hint}"
            for (cell, _), size, share in zip(panel, told, shares, strict=True)
        ],
        hoverinfo="text",
        row=row,
        col=1,
    )


def aside(cell: MeasuredCell, one: Ledger) -> str:
    """What a bar cannot show: bytes saved by sharing, swapped, tokens recomputed; "" where there is nothing."""
    parts = []
    if one.saved:
        parts.append(f"{words.data_size(one.saved)} saved by sharing")
    if moved := swapped_bytes(cell):
        parts.append(f"{words.data_size(moved)} swapped out")
    if again := cell.counter("recomputed_tokens_total"):
        parts.append(f"{words.count(again)} tokens recomputed")
    return "<br>".join(parts)


def _unit(largest: float) -> tuple[str, float]:
    return next(
        ((name, size) for name, size in (("GiB", 2.0**30), ("MiB", 2.0**20)) if largest >= size), ("KiB", 2.0**10)
    )


def ledger_columns(run: Run) -> list[Column]:
    """Configuration, load, the places that hold anything, the budget, and what stands beside it."""
    found = [one for _, one in ledgers(run)]
    places = [place for place in PLACES if any(one.parts[place.key] > 0 for one in found)]
    every = [
        Column("configuration", "configuration", "engine settings", lambda _, c: Value(c.name, c.name)),
        Column("load", "load", "", lambda _, c: Value(c.load.short, c.load.value)),
        *(Column(f"kv_{place.key}", place.title, place.hint, _part(place.key)) for place in places),
        Column("kv_budget", "budget", "bytes of KV, scales and page table", _budget),
        Column("kv_saved", "saved by sharing", "bytes needed on top if nothing were shared", _saved),
        Column("swapped", "swapped out", "bytes moved to the host, all repeats; small: back, and lost there", _swapped),
        Column("recomputed", "recom-puted", "tokens computed again after a preemption, all repeats", _recomputed),
    ]
    return [c for c in every if c.key not in _NOTES or any(c.of(run, cell).sort for cell, _ in ledgers(run))]


def ledger_note(run: Run) -> str:
    """What stands under the table: of its columns only."""
    shown = {column.key for column in ledger_columns(run)}
    return " ".join([_NOTE, *(text for key, text in _NOTES.items() if key in shown)])


def ledger_rows(run: Run) -> list[Row]:
    """One row a cell that has a ledger."""
    shown = ledger_columns(run)
    return [Row(cell, tuple(col.of(run, cell) for col in shown)) for cell, _ in ledgers(run)]


def _part(place: str) -> Callable[[Run, MeasuredCell], Value]:
    def of(_: Run, cell: MeasuredCell) -> Value:
        one = ledger(cell)
        if one is None:
            return Value("–")
        if not one.parts[place]:
            return Value("0", 0.0)
        note = words.data_size(one.parts[place])
        if place == "tokens" and one.scales:
            note += f", {words.data_size(one.scales)} of it scales"
        return Value(words.percent(one.share(place)), one.share(place), note)

    return of


def _budget(_: Run, cell: MeasuredCell) -> Value:
    one = ledger(cell)
    return Value(words.data_size(one.budget), one.budget) if one else Value("–")


def _saved(_: Run, cell: MeasuredCell) -> Value:
    one = ledger(cell)
    if one is None or one.saved is None:
        return Value("–")
    return Value(words.data_size(one.saved) if one.saved else "0", one.saved)


def _swapped(_: Run, cell: MeasuredCell) -> Value:
    out, back = swapped_bytes(cell), swapped_bytes(cell, "in")
    if not out:
        return Value("–" if out is None else "0", out)
    lost = cell.counter("swap_lost_slots_total") or 0.0
    note = f"{words.data_size(back)} back" + (f", {words.plural(lost, 'token')} lost" if lost else "")
    return Value(words.data_size(out), out, note)


def _recomputed(_: Run, cell: MeasuredCell) -> Value:
    again = cell.counter("recomputed_tokens_total")
    return Value(words.count(again), again)


def ledger_sentence(run: Run) -> str:
    """What the section shows, for the pair that the headline speaks of, else for one configuration; "" without data."""
    pairs = [p for p in paging(run) if ledger(p.a) and ledger(p.b)]
    if pairs:
        c = pairs[-1]
        text = f"At {c.load.label} {_filled(c.b, ' of the KV budget')}; {_filled(c.a)}."
        return text if c.valid else f"{text} (Invalid measurement, not to be relied on.)"
    for load in reversed(run.loads):
        top = best(run, load)
        cell = baseline(run, load) or (top.cell if top else None)
        if cell is not None and ledger(cell):
            return f"At {load.label} {_filled(cell, ' of the KV budget')}."
    return ""


def _filled(cell: MeasuredCell, whole: str = "") -> str:
    found = ledger(cell)
    assert found is not None
    text = (
        f"{cell.name} held tokens in {words.percent(found.share('tokens'))}{whole} and wasted "
        f"{words.percent(found.share('waste'))} on slots reserved and empty"
    )
    more = [
        f"{words.percent(found.share(place))} {what}"
        for place, what in (("fragmented", "free but scattered"), ("cached", "cached"), ("free", "free"))
        if found.share(place) >= 0.01
    ]
    return f"{text} ({', '.join(more)})" if more else text


def ledgers(run: Run) -> list[tuple[MeasuredCell, Ledger]]:
    """Cells that have one, in table order: the highest load first."""
    cells: Sequence[MeasuredCell] = [cell for load in reversed(run.loads) for cell in run.at(load)]
    return [(cell, found) for cell in cells if (found := ledger(cell)) is not None]
