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
from kvbench.report.style import GREY, Drawing, LineStyle, below_each_other, finish, log_axis, safe
from kvbench.report.tables import UNCERTAIN, Row, Section, Value, listed_table
from kvbench.report.wording import say
from kvbench.runs.model import all_steady, all_steady_latency

_AXES = {  # column -> title; 1: more is better, -1: less is
    "tokens_per_s": (METRICS["output_throughput"].short, 1),
    "goodput": (METRICS["goodput"].short, 1),
    "cost": ("cost per million output tokens", -1),
    "energy": ("energy of all GPUs, J per output token", -1),
}
_LATENCIES = {"ttft": f"p95 {METRICS['ttft'].short}, ms", "tpot": f"median {METRICS['tpot'].short}, ms"}
_LOG = {"ttft": " (log)"}
_ENDS = ("", "_low", "_high")


def frontier_frame(comparisons: Comparisons, price_per_hour: float | None = None) -> pd.DataFrame:
    """Makes a row a valid cell: configuration, short ``name``, load, rank of the load, each value with its bounds.

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
        used = {r.repeat: (r.machine.gpu_energy_j, r.metrics.total_output_tokens) for r in cell.repeats}
        series: dict[str, Mapping[int, float]] = {
            "tokens_per_s": tokens,
            "goodput": cell.per_repeat("goodput"),
            "cost": {r: price_per_hour * 1e6 / (3600 * v) for r, v in tokens.items() if v} if price_per_hour else {},
            "energy": {repeat: joules / count for repeat, (joules, count) in used.items() if joules and count},
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


def _interval(values: Mapping[int, float]) -> tuple[float, float, float]:
    """Returns (median, low, high) over the repeats."""
    sizes, middle = list(values.values()), median(values)
    if middle is None:
        return math.nan, math.nan, math.nan
    if len(sizes) < FEWEST or min(sizes) <= 0:
        return middle, math.nan, math.nan
    low, high = np.exp(t_interval(np.log(sizes)))
    return middle, min(float(low), middle), max(float(high), middle)


def certain(frame: pd.DataFrame, axis: str, latency: str) -> pd.Series:
    """Marks rows that no other can beat in both ``axis`` and ``latency`` (less is better), by their intervals.

    A row is certain if against every other row it is surely better in one of the two. Without intervals nothing is.
    """
    sign = _AXES[axis][1]
    best, worst = {1: ("_high", "_low"), -1: ("_low", "_high")}[sign]

    def surely(row: pd.Series, other: pd.Series) -> bool:
        ahead = sign * row[axis + worst] > sign * other[axis + best]
        return bool(ahead or row[latency + "_high"] < other[latency + "_low"])

    rows = [row for _, row in frame.iterrows()]
    marks = [
        pd.notna(row[[axis + worst, latency + "_high"]]).all()
        and all(surely(row, other) for other in rows if other is not row)
        for row in rows
    ]
    return pd.Series(marks, index=frame.index, dtype=bool)


def frontier_figure(frame: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """Draws two panels, p95 TTFT and median TPOT; buttons choose the axis below where there are several.

    ``look``: of the configurations that are coloured and in the legend; the others are grey, named to who points there.
    """
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    figure = make_subplots(rows=1, cols=2, horizontal_spacing=0.13)
    by_name = dict(tuple(frame.groupby("configuration", sort=False)))
    names = sorted(by_name, key=lambda name: name in look)  # the grey ones lie below
    for column, latency in enumerate(_LATENCIES, start=1):
        for axis in axes:
            sure = certain(frame, axis, latency)
            for name in names:
                line = _line(by_name[name].sort_values("rank"), sure, axis, latency, look.get(name))
                shown = axis == axes[0]
                line.update(visible=shown, showlegend=shown and column == 1 and name in look)
                figure.add_trace(line, row=1, col=column)
        title = _LATENCIES[latency] + _LOG.get(latency, "") + _window_words(frame)
        figure.update_yaxes(title_text=title, row=1, col=column)
    drawn = frame[["ttft", "ttft_low", "ttft_high"]].to_numpy(dtype=float).ravel()
    figure.update_yaxes(**log_axis(drawn[~np.isnan(drawn)]), row=1, col=1)
    figure.update_yaxes(rangemode="tozero", row=1, col=2)
    figure.update_xaxes(title_text=_axis_title(frame, axes[0]), rangemode="tozero", nticks=5)
    finish(figure, 340)
    figure.update_layout(margin={"t": 64, "r": 40}, legend_font_size=12)
    if len(axes) > 1:
        figure.update_layout(updatemenus=[_buttons(figure, frame, axes)])
    return below_each_other(figure, legend_lines=math.ceil(min(len(names), len(look)) / 2))


def _axis_title(frame: pd.DataFrame, axis: str) -> str:
    whole = axis in ("goodput", "energy") or not frame["steady"].all()
    return _AXES[axis][0] + say("frontier.axis_whole_run", bool(whole))


def _line(part: pd.DataFrame, sure: pd.Series, axis: str, latency: str, look: LineStyle | None) -> go.Scatter:
    """Draws one configuration over the loads; higher loads are larger, stars are on the frontier for certain.

    ``look``: None for one that stays in the background, without its intervals.
    """
    name, stars, title = str(part["name"].iloc[0]), sure[part.index], _LATENCIES[latency] + _LOG.get(latency, "")
    hover = []
    for row, star in zip(part.itertuples(), stars, strict=True):
        point = {"name": safe(name), "load": row.load, "axis": _AXES[axis][0], "latency": title}
        mark = UNCERTAIN * getattr(row, f"{latency}_few") + say("frontier.certain_point") * bool(star)
        hover.append(say("frontier.hover", **point, x=getattr(row, axis), y=getattr(row, latency), mark=mark))
    sizes = 7 + 3 * part["rank"].to_numpy(dtype=int) + 6 * stars.to_numpy(dtype=int)
    symbols = stars.map({True: "star", False: "circle"}).tolist()
    line = go.Scatter(
        x=part[axis], y=part[latency], mode="lines+markers", name=safe(name), legendgroup=name, hovertext=hover,
        hoverinfo="text", marker={"size": sizes.tolist(), "symbol": symbols}, customdata=[axis] * len(part),
    )  # fmt: skip
    if look is None:
        line.update(line={"color": GREY, "width": 1}, marker={"color": GREY, "size": 5}, opacity=0.5)
        return line
    line.update(
        line={"color": look.colour, "dash": look.dash, "width": 1.6}, marker_color=look.colour,
        error_x=_bars(part, axis, look), error_y=_bars(part, latency, look),
    )  # fmt: skip
    return line


def _bars(part: pd.DataFrame, value: str, look: LineStyle) -> dict[str, object]:
    """The intervals of a value as error bars."""
    up, down = part[f"{value}_high"] - part[value], part[value] - part[f"{value}_low"]
    ends = {"array": up.clip(lower=0), "arrayminus": down.clip(lower=0)}
    return {"type": "data", "symmetric": False, "thickness": 1.2, "width": 3, "color": look.faint(0.7), **ends}


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
    return say("frontier.whole_run", not frame["steady_latency"].all())


def section(frame: pd.DataFrame) -> Section:
    """The points as numbers, with their intervals, and the axes on which they are certain."""
    frame = frame.dropna(subset=["tokens_per_s", "ttft"])
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    sure = {}
    for axis in axes:
        for latency in _LATENCIES:
            sure[say("frontier.both", axis=_AXES[axis][0], latency=latency.upper())] = certain(frame, axis, latency)
    rows = []
    for index, row in frame.iterrows():
        where = "; ".join(both for both, holds in sure.items() if holds[index]) or "–"
        entries = (Value(row["configuration"], row["configuration"]), Value(row["load"], row["rank"]))
        rows.append(Row(None, (*entries, *(_number(row, name) for name in (*axes, *_LATENCIES)), Value(where))))
    heads = [_axis_title(frame, axis) for axis in axes] + [
        title + _window_words(frame) for title in _LATENCIES.values()
    ]
    table = listed_table(["configuration", "load", *heads, say("frontier.not_beaten")], rows)
    return Section("frontier", say("frontier.title"), table)


def _number(row: pd.Series, name: str) -> Value:
    """A value of a point, with its interval in small."""
    value, low, high = (row[name + end] for end in _ENDS)
    if pd.isna(value):
        return Value("–")
    note = say("frontier.interval", low=low, high=high)
    return Value(words.significant(value) + UNCERTAIN * bool(row.get(f"{name}_few")), value, note)


def drawing(frame: pd.DataFrame, comparisons: Comparisons, look: Mapping[str, LineStyle]) -> Drawing | None:
    """The figure; None where no valid cell has a throughput and a latency. ``look``: of what is coloured."""
    frame = frame.dropna(subset=["tokens_per_s", "ttft"])
    if frame.empty:
        return None
    axes = [axis for axis in _AXES if frame[axis].notna().any()]
    stars = any(certain(frame, axis, latency).any() for axis in axes for latency in _LATENCIES)
    has_intervals = bool(frame["ttft_low"].notna().any())
    sentences = [
        say("frontier.better", bool({"cost", "energy"} & set(axes)), clock=comparisons.clock),
        say("frontier.larger", len(comparisons.loads) > 1),
        say("frontier.stars", stars),
        say("frontier.no_stars", has_intervals and not stars),
        say("frontier.no_intervals", not has_intervals and not stars, fewest=FEWEST),
        say("frontier.grey", not look.keys() >= set(frame["configuration"])),
    ]
    caption = words.upper_first(" ".join(filter(None, sentences)))
    return Drawing("frontier", say("frontier.title"), caption, frontier_figure(frame, look))
