"""How latencies are distributed: ECDFs of TTFT, TPOT, ITL and E2EL, of all requests and of each class of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.metrics.definitions import METRICS
from kvbench.metrics.latency import request_latencies
from kvbench.metrics.rows import inter_token_latencies, times_per_output_token
from kvbench.report.comparisons import Comparisons
from kvbench.report.style import Drawing, LineStyle, compact, ecdf, finish, legend_outside, log_axis, safe, under
from kvbench.report.tables import UNCERTAIN
from kvbench.runs.model import MeasuredCell, all_steady_latency

LATENCIES = {METRICS[name].path: METRICS[name].short for name in ("ttft", "tpot", "itl", "e2el")}
EVERY = ""  # the group of all requests
_POINTS = {True: 60, False: 30}  # of a curve: of all requests, of a class
_WIDTH, _PANEL, _GAP, _LEGEND = 500, 210, 64, 110  # px: narrowest figure; a panel, between two, legend and menu


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
    steady = all_steady_latency(cells)
    frames = [
        pd.DataFrame({
            "configuration": cell.name, "group": group, "requests": len(rows), "metric": metric,
            "samples": len(samples), "ms": x, "share": y * 100,
        })
        for cell in cells
        if len(requests := cell.requests(steady))
        for group, rows in _groups(requests)
        for metric, samples in _samples(rows).items()
        if len(samples)
        for x, y in [ecdf(samples, _POINTS[group == EVERY])]
    ]  # fmt: skip
    columns = ["configuration", "group", "requests", "metric", "samples", "ms", "share"]
    return pd.concat(frames or [pd.DataFrame(columns=columns)], ignore_index=True)


def _groups(requests: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """All requests, then those of each class where there are several."""
    yield EVERY, requests
    if requests["class"].nunique() > 1:
        for name, rows in requests.groupby("class", sort=True):
            yield str(name), rows


def _samples(requests: pd.DataFrame) -> dict[str, np.ndarray]:
    """The samples [ms] of each of LATENCIES. float64 [samples]"""
    known = request_latencies(requests)
    pooled = {"tpot_ms": times_per_output_token(requests), "itl_ms": inter_token_latencies(requests)}
    return {metric: pooled[metric] if metric in pooled else known[metric].dropna().to_numpy() for metric in LATENCIES}


def distributions_figure(frame: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """A panel a latency, a line a configuration; a menu shows one class of requests instead of all."""
    groups = list(dict.fromkeys(frame["group"]))
    figure = make_subplots(
        rows=2, cols=2, vertical_spacing=_GAP / (2 * _PANEL + _GAP), horizontal_spacing=0.06, shared_yaxes=True
    )
    places = {metric: (i // 2 + 1, i % 2 + 1) for i, metric in enumerate(LATENCIES)}
    shown: list[str] = []  # the group of each trace
    for (group, name), curves in frame.groupby(["group", "configuration"], sort=False):
        for i, (metric, points) in enumerate(curves.groupby("metric", sort=False)):
            row, column = places[metric]
            figure.add_trace(_curve(points, look[name], first=i == 0, visible=group == EVERY), row=row, col=column)
            shown.append(group)
    for metric, (row, column) in places.items():
        axis = log_axis(frame.loc[(frame["metric"] == metric) & (frame["group"] == EVERY), "ms"].to_numpy())
        figure.update_xaxes(title_text=f"{LATENCIES[metric]}, ms", tickangle=0, row=row, col=column, **axis)
    figure.update_yaxes(range=[0, 101], ticksuffix=" %", tickvals=[25, 50, 75, 100])  # 0 would lie on the ticks below
    finish(figure, 2 * _PANEL + _GAP + _LEGEND + 56)
    legend_outside(figure, -0.13, above=False)
    figure.update_layout(margin={"t": 20, "b": 56})
    if len(groups) > 1:
        figure.update_layout(updatemenus=[_menu(frame, groups, shown)])
    return figure


def _curve(points: pd.DataFrame, look: LineStyle, first: bool, visible: bool) -> go.Scatter:
    row = points.iloc[0]
    name, group = safe(row["configuration"]), safe(row["group"] or "all requests")
    return go.Scatter(
        x=compact(points["ms"]),
        y=compact(points["share"]),
        mode="lines",
        name=name,
        legendgroup=name,
        showlegend=first,
        visible=visible,
        line={"color": look.colour, "dash": look.dash, "width": 2, "shape": "hv"},
        hovertemplate=f"%{{y:.1f}} % within %{{x:,.1f}} ms<br>{group}, {row['samples']:,} samples",
    )


def _menu(frame: pd.DataFrame, groups: list[str], shown: list[str]) -> dict:
    """Which requests are drawn: all, or one class of them, each with the number of requests of a configuration."""

    def label(group: str) -> str:
        counts = frame.loc[frame["group"] == group, "requests"]
        low, high = int(counts.min()), int(counts.max())
        return f"{safe(group or 'all requests')} ({low:,}{'' if low == high else f' to {high:,}'})"

    return {
        "buttons": [
            {"label": label(group), "method": "restyle", "args": [{"visible": [each == group for each in shown]}]}
            for group in groups
        ],
        "direction": "down",
        "x": 1,
        "xanchor": "right",
        "y": 1,
        "yanchor": "bottom",
        "pad": {"b": 8, "t": 0, "r": 0, "l": 0},
        "bgcolor": "rgba(128,128,128,0.12)",
        "bordercolor": "rgba(128,128,128,0.5)",
        "font": {"size": 12},
    }


def drawing(comparisons: Comparisons, look: Mapping[str, LineStyle]) -> Drawing | None:
    """The distributions at the highest load that has valid cells with raw samples; None where there are none."""
    for load in reversed(comparisons.loads):
        cells = [cell for cell in comparisons.at(load) if cell.valid]
        frame = distributions(cells)
        if len(frame):
            left = len(comparisons.at(load)) - frame["configuration"].nunique()
            clock = words.upper_first(comparisons.clock)
            caption = f"{clock}. Further left is faster, steeper is steadier; log axes, raw samples of all repeats, "
            caption += "steady window." if all_steady_latency(cells) else "whole run."
            if left:
                caption += f" Left out: {words.plural(left, 'configuration')} invalid or without samples."
            return Drawing("distributions", _title(cells), caption, distributions_figure(frame, look), _WIDTH)
    return None


def _title(cells: Sequence[MeasuredCell]) -> str:
    """How far the configurations' p95 TTFT spreads, and where the baseline stands."""
    load = cells[0].load
    steady = all_steady_latency(cells)
    every = {cell.name: cell.percentile("ttft_ms", "p95", steady) for cell in cells}
    known = {name: value for name, (value, _) in every.items() if value is not None}
    few = UNCERTAIN * any(few for _, few in every.values())
    if not known:
        return f"Latencies {under(load)}"
    low, high = (words.ms(pick(known.values())) for pick in (min, max))
    if low == high:
        return f"p95 TTFT {under(load)}: {low}{few}"
    base = next((known[cell.name] for cell in cells if cell.is_baseline and cell.name in known), None)
    return f"p95 TTFT {under(load)}: {low} to {high}{few}" + (
        f"; baseline {words.ms(base)}" if base is not None else ""
    )
