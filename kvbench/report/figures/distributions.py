"""The distributions of latencies: ECDFs of TTFT, TPOT, ITL and E2EL, of all requests and of each class of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.metrics.definitions import METRICS
from kvbench.metrics.latency import request_latencies
from kvbench.metrics.rows import inter_token_latencies, times_per_output_token
from kvbench.report import style
from kvbench.report.comparisons import Comparisons
from kvbench.report.style import Drawing, LineStyle
from kvbench.report.tables import UNCERTAIN
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, all_steady_latency

LATENCIES = {METRICS[name].path: METRICS[name].short for name in ("ttft", "tpot", "itl", "e2el")}
EVERY = ""  # the group of all requests
_POINTS = {True: 60, False: 30}  # of a curve: of all requests, of a class
_WIDTH, _PANEL, _GAP, _LEGEND = 372, 210, 64, 110  # px: narrowest figure; a panel, between two, legend and menu
_MENU = {
    "direction": "down", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom",
    "pad": {"b": 8, "t": 0, "r": 0, "l": 0}, "bgcolor": "rgba(128,128,128,0.12)",
    "bordercolor": "rgba(128,128,128,0.5)", "font": {"size": 12},
}  # fmt: skip


def distributions(cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """Points of the ECDFs of each cell's raw samples, all repeats, successful requests; a row a point.

    Of the requests that came in the steady windows, where all cells have one; else of all.

    configuration: the cell's name
    group: the class of the requests; EVERY: all of them, once more
    requests: how many the group has in this cell
    metric: ttft_ms, tpot_ms, itl_ms or e2el_ms
    samples: how many the whole curve has
    ms: a sample; at most 60 of a curve, picked, the smallest and the largest among them
    share: of the samples that are not larger, 0 to 100 %
    """
    steady, frames = all_steady_latency(cells), []
    for cell in cells:
        for group, rows in _groups(cell.requests(steady)):
            for metric, samples in _samples(rows).items():
                if len(samples):
                    x, y = style.ecdf(samples, _POINTS[group == EVERY])
                    named = {"configuration": cell.name, "group": group, "requests": len(rows), "metric": metric}
                    frames.append(pd.DataFrame({**named, "samples": len(samples), "ms": x, "share": y * 100}))
    columns = ["configuration", "group", "requests", "metric", "samples", "ms", "share"]
    return pd.concat(frames or [pd.DataFrame(columns=columns)], ignore_index=True)


def _groups(requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """All requests, then those of each class where there are several."""
    if len(requests):
        yield EVERY, requests
        if requests["class"].nunique() > 1:
            yield from ((str(name), rows) for name, rows in requests.groupby("class", sort=True))


def _samples(requests: pd.DataFrame) -> dict[str, np.ndarray]:
    """The samples [ms] of each of LATENCIES. float64 [samples]"""
    by_request = request_latencies(requests)
    pooled = {"tpot_ms": times_per_output_token(requests), "itl_ms": inter_token_latencies(requests)}
    return {path: pooled[path] if path in pooled else by_request[path].dropna().to_numpy() for path in LATENCIES}


def distributions_figure(frame: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """A panel a latency, a line a configuration; a menu shows one class of requests instead of all."""
    spacing = {"vertical_spacing": _GAP / (2 * _PANEL + _GAP), "horizontal_spacing": 0.06}
    figure = make_subplots(rows=2, cols=2, shared_yaxes=True, **spacing)
    places = {metric: (i // 2 + 1, i % 2 + 1) for i, metric in enumerate(LATENCIES)}
    groups: list[str] = []  # the group of each trace
    for (group, name), curves in frame.groupby(["group", "configuration"], sort=False):
        for i, (metric, points) in enumerate(curves.groupby("metric", sort=False)):
            row, column = places[metric]
            values = {"group": style.safe(group or "all requests"), "samples": points["samples"].iloc[0]}
            figure.add_scatter(
                x=style.compact(points["ms"]), y=style.compact(points["share"]), mode="lines", name=style.safe(name),
                legendgroup=style.safe(name), showlegend=i == 0, visible=group == EVERY,
                line={"color": look[name].colour, "dash": look[name].dash, "width": 2, "shape": "hv"},
                hovertemplate=say("distributions.hover", **values), row=row, col=column,
            )  # fmt: skip
            groups.append(group)
    for metric, (row, column) in places.items():
        axis = style.log_axis(frame.loc[(frame["metric"] == metric) & (frame["group"] == EVERY), "ms"].to_numpy())
        figure.update_xaxes(title_text=f"{LATENCIES[metric]}, ms", tickangle=0, row=row, col=column, **axis)
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", tickvals=[25, 50, 75, 100])  # 0 would lie on the ticks below
    style.finish(figure, 2 * _PANEL + _GAP + _LEGEND + 56)
    legend = {"y": -0.13, "yref": "paper", "yanchor": "top", "traceorder": "normal"}  # more lines shrink the panels
    figure.update_layout(legend=legend, margin={"t": 20, "b": 56})
    if len(set(groups)) > 1:
        figure.update_layout(updatemenus=[_menu(frame, groups)])
    return style.below_each_other(figure, legend_lines=frame["configuration"].nunique(), panel=170)


def _menu(frame: pd.DataFrame, groups: list[str]) -> dict[str, Any]:
    """A menu of what is drawn: all requests or one class, with the number of requests of a configuration."""
    buttons = []
    for group, rows in frame.groupby("group", sort=False):
        counts = dict.fromkeys(f"{count:,}" for count in (rows["requests"].min(), rows["requests"].max()))
        label = f"{style.safe(group or 'all requests')} ({' to '.join(counts)})"
        visible = [shown == group for shown in groups]
        buttons.append({"label": label, "method": "restyle", "args": [{"visible": visible}]})
    return {"buttons": buttons, **_MENU}


def drawing(comparisons: Comparisons, look: Mapping[str, LineStyle]) -> Drawing | None:
    """The distributions at the highest load that has valid cells with raw samples; None where there are none."""
    for load in reversed(comparisons.loads):
        cells = [cell for cell in comparisons.at(load) if cell.valid]
        frame = distributions(cells)
        if len(frame):
            left = len(comparisons.at(load)) - frame["configuration"].nunique()
            caption = say(
                "distributions.caption", all_steady_latency(cells), clock=words.upper_first(comparisons.clock)
            )
            caption += say("distributions.left_out", n=left)
            return Drawing("distributions", _title(cells), caption, distributions_figure(frame, look), _WIDTH)
    return None


def _title(cells: Sequence[MeasuredCell]) -> str:
    """Says how far the configurations' p95 TTFT spreads, and where the baseline stands."""
    steady = all_steady_latency(cells)
    measured = [(cell, *cell.percentile("ttft_ms", "p95", steady)) for cell in cells]
    values = [value for _, value, _ in measured if value is not None]
    ends = list(dict.fromkeys(words.ms(pick(values)) for pick in (min, max) if values))
    base = [words.ms(value) for cell, value, _ in measured if cell.is_baseline and value is not None and len(ends) > 1]
    few = UNCERTAIN * any(few for _, _, few in measured)
    load, spread = style.under(cells[0].load), " to ".join(ends) + few
    return say("distributions.title", bool(ends), load=load, spread=spread, baseline="".join(base))
