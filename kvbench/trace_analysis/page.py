"""A trace as one page that needs no network: lengths, arrivals over time, hit rate over capacity."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.page import render
from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, Drawing, finish, safe
from kvbench.trace_analysis.cache_sim import HitRateCurve, cache_table
from kvbench.trace_analysis.describe import LENGTH_HEADS, Description, about, facts, length_rows
from kvbench.trace_analysis.sentences import say
from kvbench.traces.model import Trace, file_names

_POINTS = 400  # of a curve: more are not seen
_BARS = 240
_CURVES = {  # column -> name, colour, dash
    "prompt_tokens": ("prompt", PAGED, "solid"),
    "output_tokens": ("output", CONTIGUOUS, "dash"),
    "total_tokens": ("prompt + output", OTHERS[0], "dot"),
    "prompt_characters": ("prompt", PAGED, "solid"),
    "reply_characters": ("reply", CONTIGUOUS, "dash"),
}
_LOG_TICKS = [digit * 10**power for power in range(13) for digit in (1, 2, 5)]


def page(description: Description) -> str:
    """The whole page."""
    cache, heads, rows = None, [], []
    if description.cache is not None:
        cache, (heads, rows) = cache_figure(description.cache), cache_table(description.cache)
    figures = [lengths_figure(description), arrivals_figure(description.trace), cache, waste_figure(description)]
    drawings = [figure for figure in figures if figure is not None]
    return render(
        "trace.html.j2", drawings, title=file_names(description.paths), about=about(description),
        facts=facts(description), length_heads=LENGTH_HEADS, length_rows=length_rows(description), cache_heads=heads,
        cache_rows=rows, drawings=drawings,
    )  # fmt: skip


def lengths_figure(description: Description) -> Drawing | None:
    """Share of requests of at most so many tokens (or characters), prompts and outputs apart."""
    figure = go.Figure()
    unit = "tokens" if any(name.endswith("tokens") for name in description.columns) else "characters"
    for column, values in description.columns.items():
        if not column.endswith(unit):
            continue
        name, colour, dash = _CURVES[column]
        shares = np.linspace(0, 1, min(_POINTS, max(2, len(values))))
        lengths = np.maximum(np.quantile(values, shares, method="inverted_cdf"), 1)
        hover = say("figures.length_hover", unit=unit, name=name)
        line = {"color": colour, "dash": dash, "shape": "hv"}
        figure.add_scatter(x=lengths, y=shares * 100, mode="lines", name=name, line=line, hovertemplate=hover)
    if not figure.data:
        return None
    figure.update_xaxes(title_text=unit, type="log", tickvals=_LOG_TICKS, tickformat=",")
    figure.update_yaxes(title_text="share of requests, %", range=[0, 101])
    reserved, memory = "", description.memory
    if memory is not None:
        reserved = say("figures.reserved", total=memory.total, share=memory.reserve_max_util)
    caption = say("figures.lengths", reserved=reserved)
    return Drawing("lengths", "How long are the requests?", caption, finish(figure, 420))


def arrivals_figure(trace: Trace) -> Drawing | None:
    """Requests and prompt tokens per second over time."""
    if trace.arrival_s is None or not np.nanmax(trace.arrival_s) > 0:
        return None
    timed = ~np.isnan(trace.arrival_s)
    times, tokens = trace.arrival_s[timed], np.maximum(trace.prompt_tokens[timed], 0)
    window = _window(float(times[-1]), trace.tick_s)
    bins = (times // window).astype(np.int64)
    number = int(bins[-1]) + 1
    starts = np.arange(number) * window
    rows = 1 + bool(tokens.any())
    figure = make_subplots(rows=rows, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    shown = [("requests/s", np.bincount(bins, minlength=number) / window, PAGED)]
    if tokens.any():
        shown.append(("prompt tokens/s", np.bincount(bins, weights=tokens, minlength=number) / window, CONTIGUOUS))
    for row, (name, rates, colour) in enumerate(shown, 1):
        hover = say("figures.rate_hover", name=name, window=window)
        marker = {"color": colour, "line": {"width": 0}}
        figure.add_bar(
            x=starts + window / 2, y=rates, width=window, name=name, marker=marker, hovertemplate=hover, row=row, col=1
        )
    finish(figure, 260 + 160 * (rows - 1), legend=False)
    figure.update_layout(bargap=0)
    for row, (name, _, _) in enumerate(shown, 1):
        figure.update_yaxes(title_text=name, rangemode="tozero", tickformat="~s", row=row, col=1)
    figure.update_xaxes(showgrid=False)
    figure.update_xaxes(title_text="time, s", row=rows, col=1)
    ticks = say("figures.ticks", trace.tick_s is not None, tick=trace.tick_s)
    caption = say("figures.arrivals", window=window, ticks=ticks)
    return Drawing("arrivals", "When do they come?", caption, figure)


def _window(span: float, tick: float | None) -> float:
    """The smallest round number of seconds that keeps the bars few and holds whole ticks."""
    least = max(span / _BARS, tick or 0.0)
    rounds = (digit * 10.0**power for power in range(-3, 16) for digit in (1, 2, 5))
    window = next(number for number in rounds if number >= least)
    return float(np.ceil(window / tick) * tick) if tick else window


def cache_figure(result: HitRateCurve, title: str = "") -> Drawing:
    """Hit rate over capacity, and the ceiling. ``title``: inside the figure, for a page of its own."""
    figure, ceiling = go.Figure(), result.ceiling
    texts = [
        say(
            "figures.cache_hover",
            pages=point.run.num_pages,
            tokens=point.num_tokens,
            size=say("cache.size", bool(point.num_bytes), size=point.kv_size),
            rates=point.rates,
            evicted=point.run.evictions,
            cut=point.run.num_cut,
        )
        for point in result.points
    ]
    sizes, drawn = [point.num_tokens for point in result.points], {"mode": "lines+markers", "hoverinfo": "text"}
    for name, colour, dash in (("pages", PAGED, "solid"), ("tokens", CONTIGUOUS, "dot")):
        rates = [getattr(point.rates, name) * 100 for point in result.points]
        line = {"color": colour, "dash": dash}
        figure.add_scatter(
            x=sizes, y=rates, name=say("figures.hit_rate", name=name), line=line, hovertext=texts, **drawn
        )
    best = ceiling.rates.pages
    endless = say("figures.endless", share=best, pages=ceiling.run.num_pages)
    line = {"color": OTHERS[4], "dash": "dash"}
    figure.add_hline(y=best * 100, line=line, annotation_text=endless, annotation_position="top left")
    figure.update_xaxes(title_text="capacity, tokens of KV", type="log", tickvals=_LOG_TICKS, tickformat="~s")
    figure.update_yaxes(title_text="hit rate, %", range=[0, max(best * 118, 1)])
    caption = say("figures.cache", tokens=ceiling.num_tokens)
    finish(figure, 400)
    if title:
        top = {"text": safe(title), "y": 0.93, "yanchor": "top"}
        figure.update_layout(height=480, title=top, margin={"t": 96, "b": 56})
    return Drawing("cache", "What could a prefix cache save?", caption, figure)


def waste_figure(description: Description) -> Drawing | None:
    """Share of the KV memory that holds tokens at a request's end, by the way memory is given."""
    if (memory := description.memory) is None:
        return None
    bars: list[tuple[str, float, str]] = [
        ("reserved: longest", memory.reserve_max_util, CONTIGUOUS),
        ("reserved: p99", memory.reserve_p99_filled, CONTIGUOUS),
        *((f"pages of {size}", 1 - waste, PAGED) for size, waste in sorted(memory.waste.items(), reverse=True)),
    ]
    names, shares, colours = zip(*bars, strict=True)
    figure = go.Figure()
    figure.add_bar(
        y=names, x=[share * 100 for share in shares], orientation="h", marker={"color": colours},
        text=[f"{share:.1%}" for share in shares], textposition="auto",
        hovertemplate="%{y}: %{x:.2f} % holds tokens<extra></extra>",
    )  # fmt: skip
    figure.update_xaxes(title_text="memory that holds tokens at the end, %", range=[0, 102])
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return Drawing("memory", "How much memory would be used?", say("figures.memory"), finish(figure, 300, legend=False))
