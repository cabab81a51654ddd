"""Where the KV bytes went: the ledger's figure and table, and what the memory was divided into."""

from __future__ import annotations

from collections.abc import Callable

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.provenance import server_facts
from kvbench.report.quality import times
from kvbench.report.style import GREY, Drawing, finish, safe
from kvbench.report.tables import (
    RECOMPUTED,
    Column,
    Table,
    Value,
    cell_table,
    identity_columns,
    number_column,
)
from kvbench.runs.kv_ledger import (
    USES,
    KvUse,
    Ledger,
    bytes_per_slot,
    ledger,
    scale_bytes_per_slot,
    swapped_bytes,
)
from kvbench.runs.model import MeasuredCell, Run, number

_NOTE = "Every byte of the KV budget by its use, mean of the steady window."
_NOTES = {  # column that is shown only where it has values -> what the note says of it
    "kv_saved": "Saved by sharing: needed on top if no page were shared.",
    "swapped": "Swapped: to the host and back.",
    "recomputed_tokens": "Recomputed: tokens.",
}
# Okabe and Ito's palette again: what is used is dark, what is lost is loud, what is left is pale.
FILLS = {
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
_SCALES = KvUse("scales", "scales of the tokens", "of the tokens' bytes: scales of a quantised KV")
_LEAST_LABELLED = 0.06  # of the budget: a narrower part has no room for its percentage

Bars = list[tuple[MeasuredCell, Ledger]]


def ledgers(run: Run) -> Bars:
    """Cells that have a ledger, in table order: the highest load first."""
    return [(cell, found) for cell in run.by_load if (found := ledger(cell)) is not None]


def ledger_table(run: Run) -> Table:
    """Configuration, load, the uses that have any bytes, the budget, and what is no part of the budget."""
    found = ledgers(run)
    every = [
        *identity_columns(),
        *(_part(use) for use in USES if any(one.parts[use.key] > 0 for _, one in found)),
        _of_ledger("kv_budget", "budget", "bytes of KV, scales and page table", lambda one: one.budget),
        _of_ledger("kv_saved", "saved by sharing", "bytes needed on top if nothing were shared", lambda one: one.saved),
        Column("swapped", "swapped out", "bytes moved to the host, all repeats; small: back, and lost there", _swapped),
        RECOMPUTED,
    ]
    shown = [c for c in every if c.key not in _NOTES or any(c.of(cell).sort for cell, _ in found)]
    return cell_table(shown, [cell for cell, _ in found], {column.key for column in shown})


def memory_table(run: Run) -> Table:
    """What the KV budget is divided into, a row a configuration: bytes a token, scales, page table, tokens it holds.

    Of the highest load of each; empty where neither the server nor the arithmetic before the sweep tells.
    """
    last = {cell.name: cell for cell in run.cells}  # loads ascend
    cells = [cell for cell in last.values() if bytes_per_slot(cell) is not None]
    every = [
        identity_columns()[0],
        number_column("kv_token", "a token", "K and V of one token in all layers, scales too", bytes_per_slot, _size),
        number_column("kv_token_scales", "of it scales", "scales of a quantised KV", scale_bytes_per_slot, _size),
        number_column("kv_capacity", "capacity, tokens", "what the budget holds", _capacity, words.count),
        Column("kv_page_table", "page table", "at most; small: of the KV budget", _page_table),
        Column("kv_outliers", "largest channel", "of K, in medians; small: of V", lambda cell: _outliers(run, cell)),
    ]
    return cell_table(every, cells, {"configuration"}, numbers_from=1) if cells else Table((), ())


def _outliers(run: Run, cell: MeasuredCell) -> Value:
    facts = server_facts(run, cell).get("kv_outliers") or {}
    k, v = (number(facts.get(side)) for side in ("k", "v"))
    return Value("–") if k is None or v is None else Value(times(k), k, f"V: {times(v)}")


def _size(value: float | None) -> str:
    return "0" if value == 0 else words.data_size(value)


def _capacity(cell: MeasuredCell) -> float | None:
    return number(cell.capacity.get("capacity_tokens"))


def _page_table(cell: MeasuredCell) -> Value:
    peaks = [*cell.observed("page_table_bytes").values()]
    size = max(peaks) if peaks else number(cell.capacity.get("page_table_bytes"))
    budget = number(cell.capacity.get("kv_budget_bytes"))
    share = f"{size / budget * 100:.2g} %" if size and budget else ""
    return Value(_size(size), size, share)


def ledger_note(table: Table) -> str:
    """What stands under the table, about the columns that it has."""
    return " ".join([_NOTE, *(_NOTES[column.key] for column in table.columns if column.key in _NOTES)])


def _of_ledger(key: str, title: str, hint: str, of: Callable[[Ledger], float | None]) -> Column:
    def size(cell: MeasuredCell) -> float | None:
        one = ledger(cell)
        return of(one) if one else None

    return number_column(key, title, hint, size, _size)


def _part(use: KvUse) -> Column:
    def value(cell: MeasuredCell) -> Value:
        one = ledger(cell)
        if one is None or not one.parts[use.key]:
            return Value("0", 0.0)
        note = words.data_size(one.parts[use.key])
        if use.key == "tokens" and one.scales:
            note += f", {words.data_size(one.scales)} of it scales"
        return Value(words.percent(one.share(use.key)), one.share(use.key), note)

    return Column(f"kv_{use.key}", use.title, use.hint, value)


def _swapped(cell: MeasuredCell) -> Value:
    out, back = swapped_bytes(cell), swapped_bytes(cell, "in")
    if not out:
        return Value("–" if out is None else "0", out)
    lost = cell.counter("swap_lost_slots_total") or 0.0
    note = f"{words.data_size(back)} back" + (f", {words.plural(lost, 'token')} lost" if lost else "")
    return Value(words.data_size(out), out, note)


def ledger_figure(run: Run) -> Drawing | None:
    """A panel a load, a stacked bar a configuration; None when no cell has a ledger."""
    found = ledgers(run)
    if not found:
        return None
    loads = list(dict.fromkeys(cell.load for cell, _ in found))
    panels = [[pair for pair in found if pair[0].load == load][::-1] for load in loads]  # plotly draws from below
    height = 120 + sum(44 + 36 * len(panel) for panel in panels)
    figure = make_subplots(
        rows=len(loads),
        cols=1,
        subplot_titles=[load.label for load in loads],
        row_heights=[len(panel) + 0.6 for panel in panels],
        vertical_spacing=min(0.9 / max(1, len(loads) - 1), 40 / (height - 120)),
    )
    largest = max(one.budget for _, one in found)
    unit, divisor = next(((u, 2.0**p) for u, p in (("GiB", 30), ("MiB", 20)) if largest >= 2.0**p), ("KiB", 2.0**10))
    for use in (USES[0], _SCALES, *USES[1:]):  # scales right after the tokens that they belong to
        if any(_segment(one, use.key) > 0 for _, one in found):
            for row, panel in enumerate(panels, start=1):
                _stack(figure, use, panel, row, divisor)
    figure.update_annotations(font={"size": 13})  # the panels' titles
    figure.update_xaxes(range=[0, largest / divisor], showgrid=False, showticklabels=False)
    figure.update_xaxes(title_text=f"KV budget, {unit}", showticklabels=True, row=len(loads))
    figure.update_yaxes(showgrid=False)
    finish(figure, height)
    figure.update_layout(barmode="stack", bargap=0.28, margin_t=84)
    return Drawing(
        "ledger",
        "The KV budget by use, mean of the steady window",
        "Percent of the budget; the table has the parts under 6 %. Hatched: scales, part of the tokens' percentage.",
        figure,
        760,
    )


def _segment(one: Ledger, key: str) -> float:
    """Bytes of a segment of the bar; those of the tokens and of their scales are the tokens' part together."""
    return one.scales if key == "scales" else one.parts[key] - (one.scales if key == "tokens" else 0.0)


def _stack(figure: go.Figure, use: KvUse, panel: Bars, row: int, divisor: float) -> None:
    hatched = use.key == "scales"
    sizes = [one.scales if hatched else one.parts[use.key] for _, one in panel]  # the tokens' with their scales
    shares = [size / one.budget for size, (_, one) in zip(sizes, panel, strict=True)]
    figure.add_bar(
        y=[safe(cell.marked_name) for cell, _ in panel],
        x=[_segment(one, use.key) / divisor for _, one in panel],
        orientation="h",
        name=use.title,
        legendgroup=use.key,
        showlegend=row == 1,
        marker={
            "color": FILLS[use.key],
            "pattern": {"shape": "/" if hatched else "", "fillmode": "overlay", "fgcolor": "#fff", "size": 5},
        },
        text=["" if hatched or share < _LEAST_LABELLED else words.percent(share) for share in shares],
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
        row=row,
        col=1,
    )
