"""Where the KV bytes went: the ledger's figure and table, and how full the KV was over time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.style import Drawing, LineStyle, finish, looks, safe
from kvbench.report.tables import (
    RECOMPUTED,
    Column,
    Table,
    Value,
    cell_table,
    identity_columns,
    number_column,
)
from kvbench.report.wording import ledger_sentence, occupancy_title
from kvbench.runs.kv_ledger import USES, KvUse, Ledger, ledger, swapped_bytes
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run

SECTION = "Where did the KV bytes go"
_NOTE = "Every byte of the KV budget by its use, averaged over the steady window and the repeats."
_NOTES = {  # column that is shown only where it has values -> what the note says of it
    "kv_saved": "Saved by sharing: what the sequences would have needed on top if no page were shared.",
    "swapped": "Swapped: moved to the host and back, in all repeats.",
    "recomputed_tokens": "Recomputed: tokens, in all repeats.",
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
_SCALES = KvUse("scales", "scales of the tokens", "of the tokens' bytes: scales of a quantised KV")
_LEAST_LABELLED = 0.06  # of the budget: a narrower part has no room for its percentage
_PANELS_PER_ROW = 5
MAX_POINTS = 400  # of a curve

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


def ledger_note(table: Table) -> str:
    """What stands under the table, about the columns that it has."""
    return " ".join([_NOTE, *(_NOTES[column.key] for column in table.columns if column.key in _NOTES)])


def _of_ledger(key: str, title: str, hint: str, of: Callable[[Ledger], float | None]) -> Column:
    def size(cell: MeasuredCell) -> float | None:
        one = ledger(cell)
        return of(one) if one else None

    return number_column(key, title, hint, size, lambda value: "0" if value == 0 else words.data_size(value))


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
        ledger_sentence(run) or SECTION,
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
        y=[safe(cell.name) for cell, _ in panel],
        x=[_segment(one, use.key) / divisor for _, one in panel],
        orientation="h",
        name=use.title,
        legendgroup=use.key,
        showlegend=row == 1,
        marker={
            "color": _FILLS[use.key],
            "pattern": {"shape": "/" if hatched else "", "fillmode": "overlay", "fgcolor": "#fff", "size": 5},
        },
        text=["" if hatched or share < _LEAST_LABELLED else words.percent(share) for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        hovertext=[
            f"{safe(cell.name)}<br>{use.title}: {words.percent(share)} of the budget, "
            f"{words.data_size(size)}<br>{use.hint}"
            for (cell, _), size, share in zip(panel, sizes, shares, strict=True)
        ],
        hoverinfo="text",
        row=row,
        col=1,
    )


def occupancy_figure(run: Run, load: MeasuredLoad) -> Drawing | None:
    """Small multiples of one load's KV budget over time; None when no server says how full its KV was."""
    every = [(cell, _gauges(cell)) for cell in run.at(load)]
    panels = [(c, g) for c, g in every if g[["kv_slots_reserved", "kv_cache_usage_perc"]].notna().to_numpy().any()]
    if not panels:
        return None
    columns = min(_PANELS_PER_ROW, len(panels))
    bands = -(-len(panels) // columns)
    titles: list[str] = []
    for band in range(bands):
        shown = panels[band * columns : (band + 1) * columns]
        names = [safe(cell.name).replace(" + ", "<br>+ ") for cell, _ in shown]
        titles += names + [""] * (2 * columns - len(names))
    figure = make_subplots(
        rows=2 * bands,
        cols=columns,
        shared_xaxes=True,
        subplot_titles=titles,
        vertical_spacing=0.16 / (2 * bands),
        horizontal_spacing=0.025,
        row_heights=[0.6, 0.4] * bands,
    )
    look = looks(run)
    for position, (cell, gauges) in enumerate(panels):
        band, column = divmod(position, columns)
        _occupancy_panel(figure, cell.name, gauges, look[cell.name], 2 * band + 1, column + 1)
    queues = [gauges[["num_requests_running", "num_requests_waiting"]].max().max() for _, gauges in panels]
    figure.update_xaxes(range=[0, max(gauges["t"].max() for _, gauges in panels)])
    for row in range(1, 2 * bands, 2):
        figure.update_yaxes(range=[0, 104], showticklabels=False, row=row)
        figure.update_yaxes(range=[0, max(1.0, *queues) * 1.08], showticklabels=False, row=row + 1)
        figure.update_yaxes(title_text="KV budget", ticksuffix=" %", showticklabels=True, row=row, col=1)
        figure.update_yaxes(title_text="sequences", showticklabels=True, row=row + 1, col=1)
        figure.update_xaxes(title_text="s since load start", row=row + 1)
    figure.update_annotations(font={"size": 12})
    finish(figure, 40 + 380 * bands, legend=False)
    figure.update_layout(margin_t=56)
    return Drawing(
        f"occupancy-{load.mode}-{load.value:g}",
        occupancy_title(run, load),
        "Share of the KV budget over the load, one repeat (that of median throughput): the light area is reserved, the "
        "dark area holds tokens, so the light remainder is waste. Below: sequences running (solid) and waiting "
        "(dotted).",
        figure,
        180 * columns + 60,
    )


def _gauges(cell: MeasuredCell) -> pd.DataFrame:
    """Of the repeat of median throughput (the lower of the middle two): one that happened, not a mean."""
    values = sorted(cell.throughput().items(), key=lambda pair: pair[1])
    repeat = values[(len(values) - 1) // 2][0] if values else cell.repeats[0].repeat
    gauges = cell.gauges()
    return thin(gauges[gauges["repeat"] == repeat].sort_values("t"))


def thin(frame: pd.DataFrame, points: int = MAX_POINTS) -> pd.DataFrame:
    """At most ``points`` rows of a time series, evenly, first and last kept."""
    if len(frame) <= points:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, points).round().astype(int))]


def _occupancy_panel(
    figure: go.Figure, name: str, gauges: pd.DataFrame, look: LineStyle, row: int, column: int
) -> None:
    t, total, name = gauges["t"], gauges["kv_slots_total"], safe(name)
    reserved, used = gauges["kv_slots_reserved"] / total * 100, gauges["kv_slots_used"] / total * 100
    if reserved.isna().all():  # a server that reports usage but not slots
        reserved = gauges["kv_cache_usage_perc"] * 100

    def draw(values: pd.Series, what: str, down: int, **line: object) -> None:
        figure.add_scatter(
            x=t,
            y=values,
            mode="lines",
            name=name,
            row=row + down,
            col=column,
            hovertemplate=f"{name}<br>%{{x:.1f}} s: %{{y:.0f}} {what}<extra></extra>",
            **line,
        )

    for values, alpha, what in ((reserved, 0.25, "% reserved"), (used, 0.8, "% holds tokens")):
        if values.notna().any():
            area = {"fill": "tozeroy", "fillcolor": look.faint(alpha), "line": {"color": look.colour, "width": 1}}
            draw(values, what, 0, **area)
    for what, dash in (("running", "solid"), ("waiting", "dot")):
        line = {"color": look.colour, "width": 1.8, "dash": dash, "shape": "hv"}
        draw(gauges[f"num_requests_{what}"], what, 1, line=line)
