"""The figures of the report, as plotly figures with the finding each one shows as its title."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import compare, ratio_to_reference, reference, spread
from kvbench.report.figures import distributions, heat_map, kv_timeline, slowest, step_time
from kvbench.report.figures.axes import log_axis
from kvbench.report.kv import ledger_figure
from kvbench.report.style import Drawing, LineStyle, finish, looks, safe
from kvbench.report.wording import RATIO_MARKS, figure_title, latency, marked_ratio, window_words
from kvbench.runs.model import MeasuredCell, Run


def drawings(run: Run) -> list[Drawing]:
    """Every figure the run has data for."""
    if not run.cells:
        return []
    found = [
        throughput_figure(run),
        ledger_figure(run),
        latency_figure(run) if len(run.cells) > 1 else None,
        heat_map.drawing(run),
        distributions.drawing(run),
        slowest.drawing(run),
        *(kv_timeline.drawing(run, load) for load in reversed(run.loads)),
        step_time.drawing(run),
    ]
    return [drawing for drawing in found if drawing is not None]


def throughput_figure(run: Run) -> Drawing:
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
    figure.update_yaxes(title_text=_throughput_axis(run), rangemode="tozero")
    ref = reference(run, run.loads[-1])
    caption = "Bar: median over repeats; line: lowest to highest repeat; dots: repeats."
    if ref and len(names) > 1:
        caption += f" Above: ratio to {ref.name}, paired by repeat; {RATIO_MARKS}."
    if doubts := sorted({cell.doubt for cell in run.cells if not cell.valid}):
        caption += f" Hatched: {' or '.join(doubts)}."
    width = min(1150, max(120 * len(run.loads) + 320, 52 * bars + 80))
    title = figure_title(run, "Output tokens/s", lambda pair: pair.throughput, is_latency=False)
    return Drawing("headline", title, caption, finish(figure, 440), width)


def _bars(figure: go.Figure, run: Run, name: str, position: int, look: LineStyle, upright: bool) -> None:
    """One configuration's bars; ``upright``: too many bars for ratios to be written across."""
    width = min(0.84 / len(run.configs), 0.26)
    cells = [(c, s) for c in run.cells if c.name == name and (s := spread(c.throughput()))]
    xs = [run.loads.index(c.load) + (position - (len(run.configs) - 1) / 2) * width for c, _ in cells]
    pattern = {"shape": ["" if c.valid else "/" for c, _ in cells], "fillmode": "overlay", "fgcolor": "#fff"}
    figure.add_bar(
        x=xs,
        y=[s.median for _, s in cells],
        width=width * 0.9,
        name=safe(name),
        legendgroup=name,
        marker={"color": look.colour, "opacity": 0.85, "pattern": pattern},
        hovertext=[_hover(run, c) for c, _ in cells],
        hoverinfo="text",
        error_y={
            "type": "data",
            "symmetric": False,
            "array": [s.high - s.median for _, s in cells],
            "arrayminus": [s.median - s.low for _, s in cells],
            "color": "#777",
            "thickness": 1.4,
            "width": 4,
        },
    )
    dots = [
        (x, value, f"{safe(name)}, {c.load.short}, repeat {repeat}: {words.tokens_per_s(value)} tokens/s")
        for x, (c, _) in zip(xs, cells, strict=True)
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
    for x, (c, s) in zip(xs, cells, strict=True):
        if (r := ratio_to_reference(run, c)) is not None:
            figure.add_annotation(x=x, y=s.high, text=marked_ratio(r), showarrow=False, font={"size": 12}, **turned)


def _throughput_axis(run: Run) -> str:
    """Which of the two throughputs the run's cells have to show."""
    steady = {cell.has_steady for cell in run.cells}
    if steady == {False}:
        return "output tokens/s (whole run)"
    return "output tokens/s (steady window" + ("; whole run where there is none)" if False in steady else ")")


def _hover(run: Run, cell: MeasuredCell) -> str:
    """Throughput, ratio and latencies of a cell, one line each, and why it is invalid."""
    lines = [f"<b>{safe(cell.name)}</b> · {cell.load.label}"]
    if s := spread(cell.throughput()):
        lines.append(
            f"output tokens/s{window_words(cell.has_steady)}: {words.tokens_per_s(s.median)} "
            f"({words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)}, {words.plural(s.n, 'repeat')})"
        )
    ref, r = reference(run, cell.load), ratio_to_reference(run, cell)
    if ref and r:
        c = compare(cell, ref)
        medians = f"; medians give {words.ratio(c.of_medians)}" if c.of_medians is not None else ""
        lines.append(f"ratio to {safe(ref.name)}: {marked_ratio(r)}{window_words(c.steady)}{medians}")
    for label, metric in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")):
        lines.append(f"{label} p50 {latency(cell, metric, 'p50')}, p95 {latency(cell, metric, 'p95')}")
    if not cell.valid:
        lines.append(f"<b>{cell.doubt}</b>: " + safe("; ".join(cell.invalid_reasons or cell.refused)))
    return "<br>".join(lines)


def latency_figure(run: Run) -> Drawing:
    """Throughput against latency: a line a configuration, a marker a load."""
    look = looks(run)
    panels = (("p95 TTFT, ms (log)", "ttft_ms", "p95"), ("median TPOT, ms", "tpot_ms", "p50"))
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.12)
    for column, (label, metric, which) in enumerate(panels, start=1):
        for name in run.configs:
            points = [
                (s.median, value, c)
                for c in run.cells
                if c.name == name
                and (s := spread(c.throughput()))
                and (value := c.percentile(metric, which)[0]) is not None
            ]
            figure.add_scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                mode="lines+markers",
                name=safe(name),
                legendgroup=name,
                showlegend=column == 1,
                hovertext=[_hover(run, p[2]) for p in points],
                hoverinfo="text",
                line={"color": look[name].colour, "dash": look[name].dash, "width": 1.6},
                marker={"size": [8 + 6 * run.loads.index(p[2].load) for p in points], "color": look[name].colour},
                row=1,
                col=column,
            )
        figure.update_yaxes(title_text=label, row=1, col=column)
    ttfts = [cell.percentile("ttft_ms", "p95")[0] or 0.0 for cell in run.cells]
    figure.update_yaxes(**log_axis(np.array(ttfts)), row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_xaxes(title_text=_throughput_axis(run), rangemode="tozero")
    sizes = f"Larger markers: higher load ({words.listing([load.tick for load in run.loads])}). "
    caption = f"{sizes if len(run.loads) > 1 else ''}Right and down is better."
    title = figure_title(run, "p95 TTFT", lambda pair: pair.ttft)
    return Drawing("latency", title, caption, finish(figure, 420), 640)
