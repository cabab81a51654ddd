"""Throughput against latency over the loads, with intervals, and which points are on the frontier for certain."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.common.stats import t_interval
from kvbench.effects.comparison import FEWEST
from kvbench.metrics.definitions import METRICS
from kvbench.report.comparisons import Comparisons, median
from kvbench.report.style import Drawing, LineStyle, finish, log_axis, safe
from kvbench.report.tables import UNCERTAIN, Row, Section, Value, listed_table
from kvbench.runs.model import MeasuredCell, all_steady, all_steady_latency

_AXES = {  # column -> title, whether more is better
    "tokens_per_s": (METRICS["output_throughput"].short, True),
    "goodput": (METRICS["goodput"].short, True),
    "cost": ("cost per million output tokens", False),
    "energy": ("energy of all GPUs, J per output token", False),
}
_LATENCIES = {"ttft": f"p95 {METRICS['ttft'].short}, ms", "tpot": f"median {METRICS['tpot'].short}, ms"}
_LOG = {"ttft": " (log)"}
_ENDS = ("", "_low", "_high")


def frontier_frame(comparisons: Comparisons, price_per_hour: float | None = None) -> pd.DataFrame:
    """One row a valid cell: configuration, its short ``name``, load, rank of the load, and each value with its bounds.

    ``steady``: whether all have a steady window, else tokens/s are of the whole run, of all: like with like;
    ``steady_latency``: the same of the latencies. Goodput is of the whole run: at the start of a load even a queue that
    never ends answers within the SLO.

    Values: tokens_per_s; goodput [requests/s within the SLO]; cost [price per 10^6 output tokens]; energy [J per output
    token]; ttft (p95), tpot (median) [ms]: medians over repeats, of latencies the pooled percentile. Intervals: 95 % t
    interval of the logarithms from 3 repeats on, else none (NaN). Unknown values are NaN. ``ttft_few``, ``tpot_few``:
    percentiles of too few samples.
    """
    cells = [cell for cell in comparisons.cells if cell.valid]
    rows, steady, steady_latency = [], all_steady(cells), all_steady_latency(cells)
    for cell in cells:
        tokens = cell.throughput(steady)
        series: dict[str, Mapping[int, float]] = {
            "tokens_per_s": tokens,
            "goodput": cell.per_repeat("goodput"),
            "cost": {r: price_per_hour * 1e6 / (3600 * v) for r, v in tokens.items() if v} if price_per_hour else {},
            "energy": _energy(cell),
            "ttft": cell.latency("ttft_ms.p95", steady_latency),
            "tpot": cell.latency("tpot_ms.p50", steady_latency),
        }
        row: dict[str, object] = {
            "configuration": cell.name, "name": comparisons.names[cell.cell_id], "load": cell.load.label,
            "rank": comparisons.loads.index(cell.load), "steady": steady, "steady_latency": steady_latency,
        }  # fmt: skip
        for name, values in series.items():
            row |= dict(zip((name + end for end in _ENDS), _interval(values), strict=True))
        for name, metric, which in (("ttft", "ttft_ms", "p95"), ("tpot", "tpot_ms", "p50")):
            pooled, row[f"{name}_few"] = cell.percentile(metric, which, steady_latency)
            row[name] = value = math.nan if pooled is None else pooled
            bounds = row[f"{name}_low"], row[f"{name}_high"]  # of the repeats: the pooled one may lie outside
            row |= {f"{name}_low": min(bounds[0], value), f"{name}_high": max(bounds[1], value)}
        rows.append(row)
    names = [name + end for name in (*_AXES, *_LATENCIES) for end in _ENDS]
    names += [f"{name}_few" for name in _LATENCIES]
    return pd.DataFrame(rows, columns=["configuration", "name", "load", "rank", "steady", "steady_latency", *names])


def _energy(cell: MeasuredCell) -> dict[int, float]:
    """Joules of all GPUs over the load, per output token."""
    used = {r.repeat: (r.machine.gpu_energy_j, r.metrics.total_output_tokens) for r in cell.repeats}
    return {repeat: joules / tokens for repeat, (joules, tokens) in used.items() if joules and tokens}


def _interval(values: Mapping[int, float]) -> tuple[float, float, float]:
    """(median, low, high) over the repeats."""
    known, middle = list(values.values()), median(values)
    if middle is None:
        return math.nan, math.nan, math.nan
    if len(known) < FEWEST or min(known) <= 0:
        return middle, math.nan, math.nan
    low, high = np.exp(t_interval(np.log(known)))
    return middle, min(float(low), middle), max(float(high), middle)


def certain(frame: pd.DataFrame, axis: str, latency: str) -> pd.Series:
    """Which rows no other row can beat in both ``axis`` and ``latency`` (less is better), by their intervals.

    A row is certain if against every other row it is surely better in one of the two. Without intervals nothing is.
    """
    more = _AXES[axis][1]
    best, worst = ("_high", "_low") if more else ("_low", "_high")

    def surely(row: pd.Series, other: pd.Series) -> bool:
        ahead = row[axis + worst] > other[axis + best] if more else row[axis + worst] < other[axis + best]
        return bool(ahead or row[latency + "_high"] < other[latency + "_low"])

    rows = [row for _, row in frame.iterrows()]
    found = [
        pd.notna(row[[axis + worst, latency + "_high"]]).all()
        and all(surely(row, other) for other in rows if other is not row)
        for row in rows
    ]
    return pd.Series(found, index=frame.index, dtype=bool)


def frontier_figure(frame: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """Two panels, p95 TTFT and median TPOT; buttons choose the axis below where there is more than one."""
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.13)
    for column, latency in enumerate(_LATENCIES, start=1):
        for axis in axes:
            for name, part in frame.groupby("configuration", sort=False):
                figure.add_trace(
                    _line(part.sort_values("rank"), certain(frame, axis, latency), axis, latency, look[str(name)],
                          visible=axis == axes[0], legend=column == 1),
                    row=1, col=column,
                )  # fmt: skip
        figure.update_yaxes(
            title_text=_LATENCIES[latency] + _LOG.get(latency, "") + _window_words(frame), row=1, col=column
        )
    drawn = frame[["ttft", "ttft_low", "ttft_high"]].to_numpy(dtype=float).ravel()
    figure.update_yaxes(**log_axis(drawn[~np.isnan(drawn)]), row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_xaxes(title_text=_axis_title(frame, axes[0]), rangemode="tozero", nticks=5)
    finish(figure, 340)
    figure.update_layout(margin={"t": 64, "r": 40}, legend_font_size=12)
    if len(axes) > 1:
        figure.update_layout(updatemenus=[_buttons(figure, frame, axes)])
    return figure


def _axis_title(frame: pd.DataFrame, axis: str) -> str:
    whole = axis in ("goodput", "energy") or not frame["steady"].all()
    return _AXES[axis][0] + (" (whole run)" if whole else "")


def _line(
    part: pd.DataFrame, sure: pd.Series, axis: str, latency: str, look: LineStyle, visible: bool, legend: bool
) -> go.Scatter:
    """One configuration over the loads; larger markers for higher loads, stars for certain points of the frontier."""
    name, stars = str(part["name"].iloc[0]), sure[part.index]

    def bars(value: str) -> dict[str, object]:
        up, down = part[f"{value}_high"] - part[value], part[value] - part[f"{value}_low"]
        ends = {"array": up.clip(lower=0), "arrayminus": down.clip(lower=0)}
        return {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": look.faint(0.7), **ends}

    few = [UNCERTAIN * each for each in part[f"{latency}_few"]]
    title, certainly = _LATENCIES[latency] + _LOG.get(latency, ""), "<br>on the frontier for certain"
    hover = [
        f"<b>{safe(name)}</b>, {row.load}<br>{_AXES[axis][0]}: {getattr(row, axis):.4g}<br>"
        f"{title}: {getattr(row, latency):,.4g}{mark}{certainly * bool(star)}"
        for row, star, mark in zip(part.itertuples(), stars, few, strict=True)
    ]
    marker = {
        "size": [(13 if star else 7) + 3 * int(rank) for rank, star in zip(part["rank"], stars, strict=True)],
        "symbol": ["star" if star else "circle" for star in stars],
        "color": look.colour,
    }
    return go.Scatter(
        x=part[axis], y=part[latency], error_x=bars(axis), error_y=bars(latency), mode="lines+markers", name=safe(name),
        legendgroup=name, showlegend=legend and visible, visible=visible, hovertext=hover, hoverinfo="text",
        line={"color": look.colour, "dash": look.dash, "width": 1.6}, marker=marker, customdata=[axis] * len(part),
    )  # fmt: skip


def _buttons(figure: go.Figure, frame: pd.DataFrame, axes: list[str]) -> dict[str, object]:
    """A drop-down that shows the traces of one axis."""

    def shows(axis: str) -> list[dict[str, object]]:
        shown = [trace.customdata[0] == axis for trace in figure.data]
        first = [trace.xaxis in (None, "x") for trace in figure.data]
        legend = [a and b for a, b in zip(shown, first, strict=True)]
        title = dict.fromkeys(("xaxis.title.text", "xaxis2.title.text"), _axis_title(frame, axis))
        return [{"visible": shown, "showlegend": legend}, title]

    buttons = [{"label": _axis_title(frame, axis), "method": "update", "args": shows(axis)} for axis in axes]
    place = {"x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"}
    return {"buttons": buttons, "font": {"size": 11}, **place}


def _window_words(frame: pd.DataFrame) -> str:
    """The words behind a latency's title: its window, where that is the whole run."""
    return "" if frame["steady_latency"].all() else ", whole run"


def section(frame: pd.DataFrame) -> Section:
    """The points as numbers, with their intervals, and the axes on which they are certain."""
    frame = frame.dropna(subset=["tokens_per_s", "ttft"])
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    sure = {(axis, latency): certain(frame, axis, latency) for axis in axes for latency in _LATENCIES}

    def number(row: pd.Series, name: str) -> Value:
        value, low, high = (row[name + end] for end in _ENDS)
        note = "" if pd.isna(low) else f"{words.significant(low)} to {words.significant(high)}"
        if pd.isna(value):
            return Value("–", None, note)
        return Value(words.significant(value) + UNCERTAIN * bool(row.get(f"{name}_few")), value, note)

    rows = []
    for index, row in frame.iterrows():
        certainly = [f"{_AXES[axis][0]} and {latency.upper()}" for (axis, latency), on in sure.items() if on[index]]
        named = (Value(row["configuration"], row["configuration"]), Value(row["load"], row["rank"]))
        numbers = (number(row, name) for name in (*axes, *_LATENCIES))
        rows.append(Row(None, (*named, *numbers, Value("; ".join(certainly) or "–"))))
    whole = _window_words(frame)
    heads = ["configuration", "load", *(_axis_title(frame, axis) for axis in axes)]
    heads += [f"{title}{whole}" for title in _LATENCIES.values()]
    table = listed_table([*heads, "surely not beaten in both"], rows)
    return Section("frontier", "Throughput against latency", table)


def drawing(frame: pd.DataFrame, comparisons: Comparisons, look: Mapping[str, LineStyle]) -> Drawing | None:
    """None where no valid cell has a throughput and a latency."""
    frame = frame.dropna(subset=["tokens_per_s", "ttft"])
    if frame.empty:
        return None
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    stars = any(certain(frame, axis, latency).any() for axis in axes for latency in _LATENCIES)
    certainty = f"Fewer than {FEWEST} repeats have no interval, so no point is on the frontier for certain"
    if stars:
        certainty = "Stars: on the frontier for certain"
    elif frame["ttft_low"].notna().any():
        certainty = "No point is on the frontier for certain: intervals overlap"
    loads = " Larger: higher load." if len(comparisons.loads) > 1 else ""
    better = "lower right is better" + (", of cost and energy lower left" if {"cost", "energy"} & set(axes) else "")
    caption = f"{words.upper_first(comparisons.clock)}; {better}.{loads} {certainty}."
    return Drawing("frontier", "Throughput against latency", caption, frontier_figure(frame, look), 520)
