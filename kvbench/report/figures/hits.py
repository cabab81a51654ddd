"""The hit-rate ledger as bars: from what requests have in common to what the server counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.hits import NOT_TOLD, UNEXPLAINED, HitLedger, signed_percent
from kvbench.report.style import GREY, Drawing, LineStyle, finish, hatch, room_for_labels, safe
from kvbench.report.wording import say

_MOST_PANELS = 6
_LOST = "#D55E00"
_PATTERNS = {"level": "", "lost": "/", "unexplained": "."}


def hit_frame(ledgers: Sequence[HitLedger]) -> pd.DataFrame:
    """A row a bar, from above; of the cells that were simulated.

    ``cell``: its id; ``title``, ``configuration``: its names; ``step``: the bar's name
    ``kind``: "level" (tokens hit), "lost", or "unexplained" (of either sign)
    ``low``, ``high``: the bar's ends, percent of the prompt tokens
    ``tokens``, ``change``: the bar's length, in tokens and in percent of the prompt tokens, of a gap with its sign
    ``why``: what explains it
    """
    rows = [bar for ledger in ledgers if ledger.shared is not None for bar in _bars(ledger)]
    columns = ["cell", "title", "configuration", "step", "kind", "low", "high", "tokens", "change", "why"]
    return pd.DataFrame(rows, columns=columns)


def _bars(ledger: HitLedger) -> Iterator[tuple[Any, ...]]:
    cell, at = ledger.cell, ledger.shared or 0.0
    named = (cell.cell_id, f"{cell.marked_name} · {cell.load.short}", cell.name)

    def bar(step: str, kind: str, ends: tuple[float, float], change: float) -> tuple[Any, ...]:
        low, high, share = (100 * (ledger.share(tokens) or 0.0) for tokens in (*sorted(ends), change))
        return (*named, step, kind, low, high, change, share, say("hits.gap", step))

    yield bar("shared at all", "level", (0.0, at), at)
    for gap in ledger.gaps:
        if gap.name != NOT_TOLD:
            kind = UNEXPLAINED if gap.name == UNEXPLAINED else "lost"
            yield bar(gap.name, kind, (at, at - gap.tokens), -gap.tokens)
            at -= gap.tokens
    for step, tokens in (("server counted", ledger.counted), ("requests told", ledger.told)):
        if tokens is not None:
            yield bar(step, "level", (0.0, tokens), tokens)


def hit_drawing(ledgers: Sequence[HitLedger], look: Mapping[str, LineStyle]) -> Drawing | None:
    """A panel a cell: tokens hit in the configuration's colour, what is lost hatched; None without a simulation.

    The title has the shares of the cell with the highest load.
    """
    every = hit_frame(ledgers)
    cells = list(dict.fromkeys(every["cell"]))
    if not cells:
        return None
    shown = every[every["cell"].isin(cells[:_MOST_PANELS])]
    caption = say("hits.caption", more=max(0, len(cells) - _MOST_PANELS) or None)
    ledger = next(ledger for ledger in ledgers if ledger.cell.cell_id == cells[0])
    shares = {step: ledger.share(getattr(ledger, step)) for step in ("hit", "shared", "endless")}
    gap = getattr(ledger.largest_gap, "name", "")
    title = say("hits.title", ledger.hit is not None, gap=gap, doubt=ledger.cell.doubt, **shares)
    return Drawing("hits", title, caption, _figure(shown, look), room_for_labels(shown["title"]))


def _figure(bars: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    panels = [panel for _, panel in bars.groupby("cell", sort=False)]
    counts = list(map(len, panels))
    height = 70 + sum(44 + 26 * count for count in counts)
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, row_heights=counts,
        subplot_titles=[safe(panel["title"].iloc[0]) for panel in panels],
        vertical_spacing=min(0.9 / max(1, len(panels) - 1), 44 / height),
    )  # fmt: skip
    for row, panel in enumerate(panels, start=1):
        colours = {"level": look[panel["configuration"].iloc[0]].colour, "lost": _LOST, "unexplained": GREY}
        texts = [_text(bar.kind, bar.change / 100) for bar in panel.itertuples()]
        hovers = [
            say("hits.hover", bool(bar.why), step=bar.step, text=text, tokens=bar.tokens, why=bar.why)
            for bar, text in zip(panel.itertuples(), texts, strict=True)
        ]
        figure.add_bar(
            y=panel["step"], base=panel["low"].astype("float32").round(3),
            x=(panel["high"] - panel["low"]).astype("float32").round(3), orientation="h",
            marker={"color": panel["kind"].map(colours), "pattern": hatch(panel["kind"].map(_PATTERNS))},
            text=texts, textposition="outside", cliponaxis=False, hovertext=hovers, hoverinfo="text", row=row, col=1,
        )  # fmt: skip
    figure.update_annotations(font={"size": 12}, x=0, xanchor="left", xshift=-100)
    figure.update_xaxes(range=[0, max(1.0, float(bars["high"].max()) * 1.18)], ticksuffix=" %", nticks=6)
    figure.update_xaxes(title_text="share of the prompt tokens", row=len(panels))
    figure.update_yaxes(autorange="reversed", showgrid=False)
    finish(figure, height, legend=False)
    return figure.update_layout(margin_t=40, bargap=0.25)


def _text(kind: str, change: float) -> str:
    """Writes a share as `24 %`, a gap as `−1.1 %` or `+0.4 %`."""
    text = signed_percent(change)
    return text.removeprefix("+") if kind == "level" else text
