"""The figures of the report, as plotly figures with the finding each one shows as its title."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import (
    HIGHER,
    LOWER,
    NOT_TOLD,
    SAME,
    UNCLEAR,
    PairedComparison,
    best,
    paging,
    reference,
    spread,
)
from kvbench.report.figures_latency import distribution_figure, latency_figure
from kvbench.report.kv import ledger_figure
from kvbench.report.occupancy import occupancy
from kvbench.report.style import (
    RATIO_MARKS,
    Drawing,
    LineStyle,
    finish,
    hover,
    looks,
    ratio_text,
    safe,
    throughput_axis,
)
from kvbench.runs.model import MeasuredCell, Run


def drawings(run: Run) -> list[Drawing]:
    """Every figure the run has data for."""
    if not run.cells:
        return []
    found = [headline_figure(run)]
    if (where := ledger_figure(run)) is not None:
        found.append(where)
    found.append(cells_figure(run))
    if len(run.cells) > 1:
        found.append(latency_figure(run))
    distribution = distribution_figure(run)
    if distribution is not None:
        found.append(distribution)
    for load in reversed(run.loads):
        drawn = occupancy(run, load)
        if drawn is not None:
            title, figure, width = drawn
            found.append(
                Drawing(
                    f"occupancy-{load.mode}-{load.value:g}",
                    title,
                    "Share of the KV budget over the load, one repeat (that of median throughput): the light area is "
                    "reserved, the dark area holds tokens, so the light remainder is waste. Below: sequences running "
                    "(solid) and waiting (dotted).",
                    figure,
                    width,
                )
            )
    return found


def headline_figure(run: Run) -> Drawing:
    """Bars of output tokens/s by load and configuration, with min-max bars and each repeat as a dot."""
    figure, look, names = go.Figure(), looks(run), run.configs
    bars = len(names) * len(run.loads)
    for position, name in enumerate(names):
        _bars(figure, run, name, position, look[name], upright=bars > 15)
    figure.update_xaxes(
        tickvals=list(range(len(run.loads))),
        ticktext=[load.label for load in run.loads],
        showgrid=False,
        range=[-0.5, len(run.loads) - 0.5],
    )
    figure.update_yaxes(title_text=throughput_axis(run), rangemode="tozero")
    ref = reference(run, run.loads[-1])
    caption = "Bar: median over repeats; line: lowest to highest repeat; dots: repeats."
    if ref and len(names) > 1:
        caption += f" Above: ratio to {ref.name}, paired by repeat; {RATIO_MARKS}."
    if any(not cell.valid for cell in run.cells):
        caption += " Hatched: invalid."
    width = min(1150, max(120 * len(run.loads) + 320, 52 * bars + 80))
    return Drawing("headline", _headline_title(run), caption, finish(figure, 440), width)


def _bars(figure: go.Figure, run: Run, name: str, position: int, look: LineStyle, upright: bool) -> None:
    """One configuration's bars; `upright`: too many bars for ratios to be written across."""
    width = min(0.84 / len(run.configs), 0.26)
    cells = [cell for cell in run.cells if cell.name == name and cell.throughput()]
    xs = [run.loads.index(c.load) + (position - (len(run.configs) - 1) / 2) * width for c in cells]
    spreads = [s for c in cells if (s := spread(c.throughput()))]
    pattern = {"shape": ["" if c.valid else "/" for c in cells], "fillmode": "overlay", "fgcolor": "#fff"}
    figure.add_bar(
        x=xs,
        y=[s.median for s in spreads],
        width=width * 0.9,
        name=safe(name),
        legendgroup=name,
        marker={"color": look.colour, "opacity": 0.85, "pattern": pattern},
        hovertext=[hover(run, c) for c in cells],
        hoverinfo="text",
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [s.high - s.median for s in spreads],
            "arrayminus": [s.median - s.low for s in spreads],
            "color": "#777",
            "thickness": 1.4,
            "width": 4,
        },
    )
    dots = [
        (x, value, f"{safe(name)}, {c.load.short}, repeat {repeat}: {words.tokens_per_s(value)} tokens/s")
        for x, c in zip(xs, cells, strict=True)
        for repeat, value in c.throughput().items()
    ]
    figure.add_scatter(
        x=[dot[0] for dot in dots],
        y=[dot[1] for dot in dots],
        hovertext=[dot[2] for dot in dots],
        hoverinfo="text",
        mode="markers",
        legendgroup=name,
        showlegend=False,
        marker={"size": 5, "color": "#fff", "line": {"color": "#333", "width": 1}},
    )
    turned = {"textangle": -90, "yshift": 24} if upright else {"yshift": 12}
    for x, c, s in zip(xs, cells, spreads, strict=True):
        if (text := ratio_text(run, c)) is not None:
            figure.add_annotation(x=x, y=s.high, text=text, showarrow=False, font={"size": 12}, **turned)


def _headline_title(run: Run) -> str:
    pairs = [pair for pair in paging(run) if pair.throughput is not None]
    if not pairs:
        return _best_title(run)
    low, high = pairs[0], pairs[-1]
    title = f"{high.a.name}: {_verdict_phrase(high, f' the output tokens/s of {high.b.name}')} at {high.load.short}"
    return words.upper_first(title + (f", {_verdict_phrase(low)} at {low.load.short}" if low is not high else ""))


def _verdict_phrase(pair: PairedComparison, of: str = "") -> str:
    r = pair.throughput
    assert r is not None
    invalid = "" if pair.valid else " (invalid)"
    if r.verdict == UNCLEAR:
        whom = of.replace(" the output tokens/s of", " in output tokens/s from")
        return f"{NOT_TOLD}{whom}, {words.ratio(r.median)}{invalid}"
    if r.verdict == SAME:
        return f"level{of.replace(' the output tokens/s of', ' in output tokens/s with')}{invalid}"
    return f"{'only ' if r.verdict == LOWER else ''}{words.ratio(r.median)}{of}{invalid}"


def _best_title(run: Run) -> str:
    top = best(run, run.loads[-1])
    if top is None:
        return f"No valid cell at {run.loads[-1].label}"
    doubt = ", the highest median but no verdict" if top.unclear_with else ""
    return words.upper_first(
        f"{top.cell.name}: {words.tokens_per_s(top.throughput.median)} output tokens/s at {top.load.label}{doubt}"
    )


def cells_figure(run: Run) -> Drawing:
    """A row of panels a load: throughput on the left, p95 TTFT on the right, a line a configuration."""
    loads, look = list(reversed(run.loads)), looks(run)
    height = 90 + len(loads) * (70 + 34 * len(run.configs))
    titles = [f"{what}, {load.label}" for load in loads for what in (throughput_axis(run), "p95 TTFT, ms")]
    figure = make_subplots(
        rows=len(loads),
        cols=2,
        subplot_titles=titles,
        shared_yaxes="rows",
        horizontal_spacing=0.06,
        vertical_spacing=82 / (height - 82),
    )
    for row, load in enumerate(loads, start=1):
        for cell in reversed(run.at(load)):
            for column, values in ((1, cell.throughput()), (2, cell.per_repeat("ttft_ms.p95"))):
                _range_dot(figure, run, cell, values, look[cell.name].colour, row, column)
    figure.update_xaxes(rangemode="tozero")
    figure.update_annotations(font={"size": 13})
    pairs = paging(run)
    title = "Throughput and p95 TTFT by cell"
    if pairs and pairs[-1].ttft is not None:
        c, r = pairs[-1], pairs[-1].ttft
        verb = {
            SAME: "is level with",
            HIGHER: "is worse than",
            LOWER: "is better than",
            UNCLEAR: f"is {NOT_TOLD} from",
        }[r.verdict]
        title = f"p95 TTFT of {c.a.name} {verb} that of {c.b.name} at {c.load.short}: {words.ratio(r.median)}"
        title += "" if c.valid else " (invalid)"
    finish(figure, height, legend=False)
    return Drawing(
        "cells",
        title,
        "Large marker: median of the repeats; line: lowest to highest; small: repeats."
        + (" Crosses: invalid." if any(not c.valid for c in run.cells) else ""),
        figure,
        620,
    )


def _range_dot(
    figure: go.Figure, run: Run, cell: MeasuredCell, values: dict[int, float], colour: str, row: int, column: int
) -> None:
    s = spread(values)
    if s is None:
        return
    name = safe(cell.name)
    place = {"row": row, "col": column}
    figure.add_scatter(
        x=[s.low, s.high],
        y=[name, name],
        mode="lines",
        line={"color": colour, "width": 3},
        hoverinfo="skip",
        **place,
    )
    figure.add_scatter(
        x=list(values.values()),
        y=[name] * s.n,
        mode="markers",
        hoverinfo="skip",
        marker={"size": 6, "color": colour, "opacity": 0.6},
        **place,
    )
    figure.add_scatter(
        x=[s.median],
        y=[name],
        mode="markers",
        hovertext=[hover(run, cell)],
        hoverinfo="text",
        marker={"size": 13, "color": colour, "symbol": "circle" if cell.valid else "x"},
        **place,
    )
