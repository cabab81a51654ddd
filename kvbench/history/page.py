"""A history as one page that needs no network: drift since the release, then a figure for every metric."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.history.drift import DRIFTED, OUTCOMES
from kvbench.history.sentences import say
from kvbench.history.series import VALID, TrendPoint, title_of
from kvbench.history.show import NARROWEST, Trend, View, change_text, value_text
from kvbench.metrics.definitions import HIGHER, LOWER, Figure
from kvbench.report.page import render
from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, Drawing, LineStyle, finish, safe
from kvbench.runs.stored import StoredRun

_DRIFT_HEADS = (
    "workload", "machine", "cell", "metric", "release", "at release", "now", "change", "95 % interval", "margin",
)  # fmt: skip
_DRIFT_NOTE = (
    "Change: ratio of the geometric means over the repeats. The interval is Welch's over the repeats; differences "
    "between two days on one machine are not in it: `kvbench compare` of the two commits measures both on one day."
)


def page(view: View) -> str:
    """The whole page: drift since the release, then a figure for every metric."""
    drawn = [(group[0].series.key, _drawings(group, f"g{index}")) for index, group in enumerate(view.groups)]
    shown = {point.run for trend in view.trends for point in trend.series.points}
    first, last = (pick(run.started for run in shown) for pick in (min, max))
    incomplete = sum(not run.complete for run in shown)
    count = words.plural(len(shown), "run")
    runs_shown = say("page.runs", runs=count, incomplete=incomplete, first=first, last=last)
    return render(
        "history.html.j2",
        [drawing for _, some in drawn for drawing in some],
        title=words.listing(sorted({key.workload for key, _ in drawn})),
        headline=view.drift_sentence,
        context=[runs_shown, *view.notes],
        drifts=_drift_tables(view),
        drift_heads=_DRIFT_HEADS,
        drift_note=_DRIFT_NOTE,
        groups=[(say("show.group", workload=key.workload, machine=key.machine), some) for key, some in drawn],
    )


def _drift_tables(view: View) -> list[tuple[str, bool, list[tuple[str, ...]]]]:
    """Makes (title, whether it is open, rows) of each outcome that there is, the largest change for the worse first."""
    tables = []
    for outcome in OUTCOMES:
        some = [trend for trend in view.trends if trend.drift and trend.drift.outcome == outcome]
        some.sort(key=lambda trend: -trend.drift.change * trend.series.figure.worse_sign)
        rows = []
        for trend in some:
            key, drift = trend.series.key, trend.drift
            where = (key.workload, key.machine, trend.cell, title_of(key.figure), drift.release_name)
            values = (value_text(key.figure, point.value) for point in (drift.release, drift.last))
            ends = " to ".join(map(change_text, drift.interval or ())) or "none of one repeat"
            rows.append((*where, *values, change_text(drift.change), ends, words.percent(drift.margin)))
        if rows:
            tables.append((say("page.table", title=outcome.title, n=len(rows)), outcome == DRIFTED, rows))
    return tables


_COLUMNS = 3
_PANEL, _BETWEEN, _AROUND = 180, 72, 108  # px: a row of panels with the room below it, that room, legend and dates
_FULL_MARKS = 60  # runs; of more, points are small
_TICKS = 4


def _drawings(group: Sequence[Trend], key: str) -> list[Drawing]:
    """A figure for every metric of one workload on one machine; ``key`` makes their names unique on the page."""
    runs = sorted({p.run for t in group for p in t.series.points}, key=lambda run: (run.started, run.name))
    panels: dict[Figure, list[Trend]] = {}
    for trend in group:
        panels.setdefault(trend.series.figure, []).append(trend)
    return [_drawing(trends, runs, f"{key}-{shown.name}") for shown, trends in panels.items()]


def _drawing(panels: Sequence[Trend], runs: Sequence[StoredRun], key: str) -> Drawing:
    """Draws one metric: a panel for each cell, all over the same runs."""
    shown, columns = panels[0].series.figure, min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * _PANEL + _AROUND
    titles = [
        say("page.panel", t.is_worse, cell=safe(t.cell), change=change_text(t.drift and t.drift.change)) for t in panels
    ]
    figure = make_subplots(
        rows=rows, cols=columns, horizontal_spacing=0.07, vertical_spacing=_BETWEEN / height if rows > 1 else 0,
        subplot_titles=titles,
    )  # fmt: skip
    at = {run: float(index) for index, run in enumerate(runs)}
    in_legend: set[str] = set()
    for index, trend in enumerate(panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        for trace in _traces(trend, at):
            trace.showlegend = trace.name not in in_legend
            in_legend.add(trace.name)
            figure.add_trace(trace, **place)
        figure.update_yaxes(range=_range(trend), **place)
    finish(figure, height)
    figure.update_annotations(font={"size": 12})
    ticks = sorted({round(k * (len(runs) - 1) / (_TICKS - 1)) for k in range(_TICKS)})
    started = [run.started for run in runs]
    days, years = ({when.timetuple()[:parts] for when in started} for parts in (3, 1))
    style = "%Y-%m" if len(years) > 1 else "%d %b"
    if len(days) == 1:
        style = "%H:%M"
    dates = [runs[tick].started.strftime(style) for tick in ticks]
    figure.update_xaxes(range=[-0.6, len(runs) - 0.4], tickvals=ticks, ticktext=dates, tickangle=0, showgrid=False)
    figure.update_yaxes(nticks=4, tickformat={"share": ".3~%"}.get(shown.unit, ",.4~g"))
    figure.update_layout(margin={"t": 76, "b": 32}, hovermode="closest")
    better = {HIGHER: " (more is better)", LOWER: " (less is better)"}.get(shown.metric.better, "")
    unit = shown.unit.replace("share", "%")
    title = say("page.title", title=words.upper_first(title_of(shown)), unit=unit, better=better)
    caption = "Each point is a run, the median over its repeats; axes do not start at 0."
    return Drawing(key, title, caption, figure, 340 * columns)


def _traces(trend: Trend, at: dict[StoredRun, float]) -> list[go.Scatter]:
    """A bar from the lowest to the highest repeat of each run, the release's level and margin, and the runs."""
    series, release = trend.series, trend.release
    colour = CONTIGUOUS if trend.is_worse else PAGED
    bar_width, dot, hollow_dot = (7, 6, 8) if len(at) <= _FULL_MARKS else (2, 3, 5)
    traces = []

    def add(name: str, xs: list[Any], ys: list[Any], **style: Any) -> None:
        traces.append(go.Scatter(x=xs, y=ys, name=name, legendgroup=name, **{"hoverinfo": "skip", **style}))

    def add_points(name: str, points: dict[float, TrendPoint | None], **style: Any) -> None:
        """A point that is None breaks the line."""
        texts = [point and _hover(series.figure, point) for point in points.values()]
        ys = [point and point.value for point in points.values()]
        if ys:
            add(name, list(points), ys, text=texts, hovertemplate="%{text}<extra></extra>", hoverinfo=None, **style)

    if spread := [(at[p.run], p.values) for p in series.counted if len(p.values) > 1]:
        xs = [end for x, _ in spread for end in (x, x, None)]
        ys = [end for _, values in spread for end in (min(values), max(values), None)]
        bar = {"color": LineStyle(colour).faint(0.18), "width": bar_width}
        add("lowest to highest repeat", xs, ys, mode="lines", line=bar)
    for name, level in _levels(trend).items():
        line = {"color": OTHERS[4], "width": 1.2, "dash": {"margin": "dash"}.get(name, "dot")}
        add(name, [-0.6, len(at) - 0.4], [level, level], mode="lines", line=line)
    by_run = {point.run: point for point in series.counted}
    dots = {"line": {"color": colour, "width": 1.6}, "marker": {"size": dot, "color": colour}}
    add_points("run", {x: by_run.get(run) for run, x in at.items()}, mode="lines+markers", **dots)
    hollow = {"symbol": "circle-open", "size": hollow_dot, "color": OTHERS[4], "line": {"width": 1.5}}
    not_counted = {at[point.run]: point for point in series.points if point.state != VALID}
    add_points("does not count", not_counted, mode="markers", marker=hollow)
    diamond = {"symbol": "diamond", "size": 10, "color": OTHERS[0]}
    shown = {at[point.run]: point for point in series.points if point is release}
    add_points("release", shown, mode="markers", marker=diamond)
    return traces


def _levels(trend: Trend) -> dict[str, float]:
    """The release's value, and the value that is worse by the margin."""
    levels = {}
    if trend.release:
        levels["level of the release"] = trend.release.value
    if trend.drift:
        worse = trend.series.figure.worse_sign
        levels["margin"] = trend.drift.release.value * (1 + worse * trend.drift.margin)
    return levels


def _range(trend: Trend) -> list[float]:
    """The range of all that is drawn, never so small that noise fills the panel."""
    values = [value for point in trend.series.points for value in point.values]
    values += _levels(trend).values()
    low, high = min(values), max(values)
    span = max((high - low) * 1.16, 2 * NARROWEST * abs(statistics.median(values))) or 1.0
    middle = (low + high) / 2
    return [middle - span / 2, middle + span / 2]


def _hover(shown: Figure, point: TrendPoint) -> str:
    run, version = point.run, point.run.versions.get("kvbench", "?")
    return say(
        "page.hover",
        value=value_text(shown, point.value),
        started=run.started,
        commit=safe(run.commit),
        release=say("page.hover_release", bool(run.release), release=safe(run.release or "")),
        run=safe(say("page.hover_run", version=version, run=run.name)),
        state=say("page.hover_state", point.state, state=point.state),
    )
