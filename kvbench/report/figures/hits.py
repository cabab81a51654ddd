"""The hit-rate ledger as a figure: from what prompts have in common, step by step, to what the server counted."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.hits import NOTHING, HitLedger, hit_ledgers
from kvbench.report.style import Drawing, LineStyle, finish, looks, safe
from kvbench.runs.model import Run

_MOST_PANELS = 6
_LOST, _UNEXPLAINED = "#D55E00", "#8A8A8A"


def frame(run: Run) -> pd.DataFrame:
    """A row a bar, from above; of the cells that were simulated, the highest load first.

    ``cell``: its id; ``title``, ``configuration``: its names; ``step``: the bar's name
    ``kind``: "level" (tokens hit), "lost", or "unexplained" (of either sign)
    ``low``, ``high``: the bar's ends, percent of the prompt tokens
    ``tokens``, ``change``: the bar's length, in tokens and in percent of the prompt tokens, of a gap with its sign
    ``why``: what explains it
    """
    rows = []
    for ledger in hit_ledgers(run):
        if ledger.shared is not None:
            rows += _bars(ledger)
    columns = ["cell", "title", "configuration", "step", "kind", "low", "high", "tokens", "change", "why"]
    return pd.DataFrame(rows, columns=columns)


def _bars(ledger: HitLedger) -> list[dict[str, object]]:
    at = ledger.shared or 0.0
    bars = [_bar(ledger, "shared at all", "level", 0.0, at, at, "another request begins with them too")]
    for gap in ledger.gaps:
        if gap.name != "not told":
            kind = "unexplained" if gap.name == "unexplained" else "lost"
            bars.append(_bar(ledger, gap.name, kind, *sorted((at, at - gap.tokens)), -gap.tokens, gap.why))
            at -= gap.tokens
    for step, tokens in (("server counted", ledger.counted), ("requests told", ledger.told)):
        if tokens is not None:
            bars.append(_bar(ledger, step, "level", 0.0, tokens, tokens, ""))
    return bars


def _bar(
    ledger: HitLedger, step: str, kind: str, low: float, high: float, change: float, why: str
) -> dict[str, object]:
    ends = {name: 100 * (ledger.share(tokens) or 0.0) for name, tokens in (("low", low), ("high", high))}
    cell = ledger.cell
    named = {
        "cell": cell.cell_id, "title": f"{cell.marked_name} · {cell.load.short}", "configuration": cell.name,
        "step": step, "kind": kind,
    }  # fmt: skip
    return {**named, **ends, "tokens": change, "change": 100 * (ledger.share(change) or 0.0), "why": why}


def figure(bars: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """A panel a cell: tokens hit in the configuration's colour, what is lost hatched, what is unexplained dotted."""
    panels = list(bars.groupby("cell", sort=False))
    counts = [len(panel) for _, panel in panels]
    height = 70 + sum(44 + 26 * count for count in counts)
    drawn = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[safe(one["title"].iloc[0]) for _, one in panels],
        row_heights=counts,
        vertical_spacing=min(0.9 / max(1, len(panels) - 1), 44 / height),
    )
    for row, (_, panel) in enumerate(panels, start=1):
        colours = {"level": look[panel["configuration"].iloc[0]].colour, "lost": _LOST, "unexplained": _UNEXPLAINED}
        texts = [_text(kind, change / 100) for kind, change in zip(panel["kind"], panel["change"], strict=True)]
        drawn.add_bar(
            y=panel["step"],
            base=panel["low"].astype("float32").round(3),
            x=(panel["high"] - panel["low"]).astype("float32").round(3),
            orientation="h",
            marker={
                "color": [colours[kind] for kind in panel["kind"]],
                "pattern": {
                    "shape": [{"level": "", "lost": "/", "unexplained": "."}[kind] for kind in panel["kind"]],
                    "fillmode": "overlay",
                    "fgcolor": "#fff",
                    "size": 5,
                },
            },
            text=texts,
            textposition="outside",
            cliponaxis=False,
            hovertext=[
                f"{step}: {text} of the prompt tokens ({tokens:,.0f} tokens)" + (f"<br>{why}" if why else "")
                for step, text, tokens, why in zip(panel["step"], texts, panel["tokens"], panel["why"], strict=True)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
    drawn.update_annotations(font={"size": 13})
    drawn.update_xaxes(range=[0, max(1.0, float(bars["high"].max()) * 1.12)], ticksuffix=" %")
    drawn.update_xaxes(title_text="share of the prompt tokens", row=len(panels))
    drawn.update_yaxes(autorange="reversed", showgrid=False)
    finish(drawn, height, legend=False)
    drawn.update_layout(margin_t=40, bargap=0.25)
    return drawn


def _text(kind: str, change: float) -> str:
    """24 %; −1.1 % and +0.4 % for a gap."""
    if abs(change) < NOTHING:
        return "0 %"
    sign = "" if kind == "level" else "−" if change < 0 else "+"
    return sign + words.percent(abs(change))


def drawing(run: Run) -> Drawing | None:
    """For the page; None where nothing was simulated."""
    bars = frame(run)
    shown = list(dict.fromkeys(bars["cell"]))
    if not shown:
        return None
    bars = bars[bars["cell"].isin(shown[:_MOST_PANELS])]
    more = f" The table has {len(shown) - _MOST_PANELS} more." if len(shown) > _MOST_PANELS else ""
    return Drawing(
        "hits",
        _title(next(ledger for ledger in hit_ledgers(run) if ledger.cell.cell_id == shown[0])),
        "From what requests have in common to what the server counted, over all repeats; hatched: lost on the way, "
        f"by simulation of the prompts sent.{more}",
        figure(bars, looks(run)),
        560,
    )


def _title(ledger: HitLedger) -> str:
    """Of the cell with the highest load."""
    shared = words.percent(ledger.share(ledger.shared))
    if ledger.hit is None:
        return f"{words.percent(ledger.share(ledger.endless))} of prompt tokens could be hit by an endless cache"
    text = f"{words.percent(ledger.share(ledger.hit))} of prompt tokens hit, {shared} shared"
    gap = ledger.largest_gap
    text = f"{text}; largest gap: {gap.name}" if gap else text
    return f"{text} ({ledger.cell.doubt})" if ledger.cell.doubt else text
