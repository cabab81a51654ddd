"""The figures about latency: against throughput, and as distributions."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import best, paging, spread
from kvbench.report.series import ecdf, itl_ms, log_axis, ttft_ms
from kvbench.report.style import Drawing, LineStyle, finish, hover, looks, safe, throughput_axis
from kvbench.runs.model import MeasuredCell, Run


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
                hovertext=[hover(run, p[2]) for p in points],
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
    figure.update_xaxes(title_text=throughput_axis(run), rangemode="tozero")
    sizes = f"Larger markers: higher load ({words.listing([load.tick for load in run.loads])}). "
    return Drawing(
        "latency",
        _latency_title(run),
        f"{sizes if len(run.loads) > 1 else ''}Right and down is better.",
        finish(figure, 420),
        640,
    )


def _latency_title(run: Run) -> str:
    top = best(run, run.loads[-1])
    low = run.cell(top.cell.name, run.loads[0]) if top else None
    if top is None or low is None or low is top.cell or (s := spread(low.throughput())) is None:
        return "Throughput against latency"
    before, after = low.percentile("tpot_ms", "p50")[0], top.cell.percentile("tpot_ms", "p50")[0]
    return (
        f"From {low.load.tick} to {top.load.short}, {top.cell.name} goes from "
        f"{words.tokens_per_s(s.median)} to {words.tokens_per_s(top.throughput.median)} tokens/s "
        f"and its median TPOT from {words.ms(before)} to {words.ms(after)}"
    )


def distribution_figure(run: Run) -> Drawing | None:
    """ECDFs of TTFT (top) and ITL (bottom), one column a load; None without raw samples."""
    loads, look = run.loads, looks(run)
    rows = (("TTFT, ms (log)", ttft_ms), ("ITL, ms (log)", itl_ms))
    figure = make_subplots(
        rows=2,
        cols=len(loads),
        subplot_titles=[load.label for load in loads],
        vertical_spacing=0.16,
        horizontal_spacing=0.07,
        shared_yaxes=True,
    )
    shown: set[str] = set()
    for column, load in enumerate(loads, start=1):
        drawn: list[list[np.ndarray]] = [[], []]
        for cell in run.at(load):
            requests = cell.requests()
            for row, (_, samples_of) in enumerate(rows, start=1):
                samples = samples_of(requests)
                if len(samples):
                    curve = _curve(cell, samples, look[cell.name], cell.name not in shown)
                    figure.add_trace(curve, row=row, col=column)
                    drawn[row - 1].append(samples)
                    shown.add(cell.name)
        for row, (label, _) in enumerate(rows, start=1):
            axis = log_axis(np.concatenate(drawn[row - 1])) if drawn[row - 1] else {}
            figure.update_xaxes(title_text=label, row=row, col=column, **axis)
    if not shown:
        return None
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", dtick=25)
    for row in (1, 2):
        figure.update_yaxes(title_text="share of samples", row=row, col=1)
    finish(figure, 640)
    figure.update_layout(margin_t=90)
    return Drawing(
        "distributions",
        _distribution_title(run),
        "Cumulative share of samples: further left is faster, "
        "steeper is steadier. Raw samples of all repeats; failed requests left out.",
        figure,
        320 * len(loads),
    )


def _distribution_title(run: Run) -> str:
    pairs = paging(run)
    if not pairs or pairs[-1].itl is None:
        return "How TTFT and ITL are distributed"
    c = pairs[-1]
    (a, doubt_a), (b, doubt_b) = c.a.percentile("itl_ms", "p95"), c.b.percentile("itl_ms", "p95")
    return (
        f"At {c.load.short} one ITL in twenty is over {words.ms(a)}{'*' * doubt_a} in {c.a.name}, "
        f"over {words.ms(b)}{'*' * doubt_b} in {c.b.name}{'' if c.valid else ' (invalid)'}"
    )


def _curve(cell: MeasuredCell, samples: np.ndarray, look: LineStyle, legend: bool) -> go.Scatter:
    x, y = ecdf(samples)
    return go.Scatter(
        x=x,
        y=y * 100,
        mode="lines",
        name=safe(cell.name),
        legendgroup=cell.name,
        showlegend=legend,
        line={"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
        hovertemplate=f"<b>{safe(cell.name)}</b>, {cell.load.short}<br>%{{y:.1f}} % within %{{x:,.1f}} ms"
        f"<br>{len(samples):,} samples, all repeats<extra></extra>",
    )
