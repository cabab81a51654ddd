"""Trends as figures: one a metric, with a panel a cell, all panels over the same runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.history.drift import DRIFTED, Drift
from kvbench.history.model import INCOMPLETE, VALID, Point, Series, StoredRun
from kvbench.history.table import NARROWEST, change_text, value_text
from kvbench.history.view import View
from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, Drawing, Look, finish, safe

_COLUMNS = 3
_PANEL, _BETWEEN, _AROUND = 180, 72, 108  # px: a row of panels with the room below it, that room, legend and dates
_FULL_MARKS = 60  # runs; of more, points are small
_TICKS = 4


def drawings(view: View, group: Sequence[Series], key: str) -> list[Drawing]:
    """A figure for every metric of one workload on one machine; ``key`` makes their names unique on the page."""
    runs = sorted({p.run for s in group for p in s.points}, key=lambda run: (run.started, run.name))
    metrics = dict.fromkeys(series.metric for series in group)
    return [
        _drawing(view, [s for s in group if s.metric is metric], runs, f"{key}-{metric.name}") for metric in metrics
    ]


def _drawing(view: View, panels: Sequence[Series], runs: Sequence[StoredRun], key: str) -> Drawing:
    metric, columns = panels[0].metric, min(_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = rows * _PANEL + _AROUND
    figure = make_subplots(
        rows=rows, cols=columns, horizontal_spacing=0.07, vertical_spacing=_BETWEEN / height if rows > 1 else 0,
        subplot_titles=[_panel_title(view, series) for series in panels],
    )  # fmt: skip
    at = {run: float(index) for index, run in enumerate(runs)}
    told: set[str] = set()
    for index, series in enumerate(panels):
        place = {"row": index // columns + 1, "col": index % columns + 1}
        for trace in _traces(view, series, at):
            trace.showlegend = trace.name not in told
            told.add(trace.name)
            figure.add_trace(trace, **place)
        figure.update_yaxes(range=_range(series, view.drift(series)), **place)
    finish(figure, height)
    figure.update_annotations(font={"size": 12})
    ticks = sorted({round(k * (len(runs) - 1) / (_TICKS - 1)) for k in range(_TICKS)})
    texts = _dates([runs[tick] for tick in ticks])
    figure.update_xaxes(range=[-0.6, len(runs) - 0.4], tickvals=ticks, ticktext=texts, tickangle=0, showgrid=False)
    figure.update_yaxes(nticks=4, tickformat=".3~%" if metric.unit == "share" else ",.4~g")
    figure.update_layout(margin={"t": 76, "b": 32}, hovermode="closest")
    unit = {"share": "%", "ms": "ms"}.get(metric.unit, metric.unit)
    better = {1: "more is better", -1: "less is better", 0: ""}[metric.better]
    title = f"{metric.title[0].upper()}{metric.title[1:]}, {unit}"
    caption = "Each point is a run, the median over its repeats; axes do not start at 0."
    return Drawing(key, title + (f" ({better})" if better else ""), caption, figure, 340 * columns)


def _traces(view: View, series: Series, at: dict[StoredRun, float]) -> list[go.Scatter]:
    drift = view.drift(series)
    colour = CONTIGUOUS if drift is not None and drift.outcome == DRIFTED else PAGED
    traces = _band(series, at, Look(colour).faint(0.18))
    release = _release_point(view, series)
    if release is not None:
        traces += _release_lines(series, release, drift, len(at))
    by_run = {at[p.run]: p for p in series.counted}
    xs = [float(x) for x in range(len(at))]  # a run without a counted value breaks the line
    traces.append(
        go.Scatter(
            x=xs, y=[by_run[x].value if x in by_run else None for x in xs], mode="lines+markers", name="run",
            line={"color": colour, "width": 1.6}, marker={"size": 6 if len(at) <= _FULL_MARKS else 3, "color": colour},
            text=[_hover(series, by_run[x]) if x in by_run else "" for x in xs], hovertemplate="%{text}<extra></extra>",
            legendgroup="run",
        )
    )  # fmt: skip
    if hollow := [p for p in series.points if p.state != VALID]:
        marker = {
            "symbol": "circle-open",
            "size": 8 if len(at) <= _FULL_MARKS else 5,
            "color": OTHERS[4],
            "line": {"width": 1.5},
        }
        traces.append(_marks(series, hollow, at, "does not count", marker))
    if release in series.points:
        marker = {"symbol": "diamond", "size": 10, "color": OTHERS[0]}
        traces.append(_marks(series, [release], at, "release", marker))
    if found := view.change_points.get(series):
        marker = {"symbol": "triangle-down", "size": 12, "color": OTHERS[2]}
        extra = [f"<br>change point (advisory): {change_text(c.change)}, p {c.p:.2g}" for c in found]
        traces.append(_marks(series, [c.point for c in found], at, "change point (advisory)", marker, extra))
    return traces


def _marks(
    series: Series,
    points: Sequence[Point],
    at: dict[StoredRun, float],
    name: str,
    marker: dict,
    extra: Sequence[str] = (),
) -> go.Scatter:
    texts = [_hover(series, point) + more for point, more in zip(points, extra or [""] * len(points), strict=True)]
    return go.Scatter(
        x=[at[point.run] for point in points], y=[point.value for point in points], mode="markers", name=name,
        marker=marker, text=texts, hovertemplate="%{text}<extra></extra>", legendgroup=name,
    )  # fmt: skip


def _band(series: Series, at: dict[StoredRun, float], fill: str) -> list[go.Scatter]:
    """From the lowest to the highest repeat, as one bar a run: bars do not bridge the runs that do not count."""
    counted = [point for point in series.counted if len(point.values) > 1]
    if not counted:
        return []
    xs, ys = [], []
    for point in counted:
        xs += [at[point.run], at[point.run], None]
        ys += [min(point.values), max(point.values), None]
    width = 7 if len(at) <= _FULL_MARKS else 2
    return [
        go.Scatter(
            x=xs, y=ys, mode="lines", name="lowest to highest repeat", line={"color": fill, "width": width},
            hoverinfo="skip", legendgroup="band",
        )
    ]  # fmt: skip


def _release_point(view: View, series: Series) -> Point | None:
    """The release's run that the drift is of, which may be older than what is shown."""
    if (drift := view.drift(series)) is not None:
        return drift.release
    found = view.releases.of(series)
    return None if found is None else found[1]


def _release_lines(series: Series, release: Point, drift: Drift | None, count: int) -> list[go.Scatter]:
    """The release's value across the panel, and what is worse by the margin."""
    levels = [("level of the release", release.value, "dot")]
    if drift is not None:
        levels.append(("margin", release.value * (1 - series.metric.better * drift.margin), "dash"))
    return [
        go.Scatter(
            x=[-0.6, count - 0.4], y=[level, level], mode="lines", name=name,
            line={"color": OTHERS[4], "width": 1.2, "dash": dash}, hoverinfo="skip", legendgroup=name,
        )
        for name, level, dash in levels
    ]  # fmt: skip


def _range(series: Series, drift: Drift | None) -> list[float]:
    """All that is drawn, and never so little that noise fills the panel."""
    values = [value for point in series.points for value in point.values]
    if drift is not None:
        level = drift.release.value
        values += [level, level * (1 - series.metric.better * drift.margin)]
    low, high = min(values), max(values)
    span = max((high - low) * 1.16, 2 * NARROWEST * abs(statistics.median(values))) or 1.0
    middle = (low + high) / 2
    return [middle - span / 2, middle + span / 2]


def _panel_title(view: View, series: Series) -> str:
    drift = view.drift(series)
    mark = f" · {change_text(drift.change)} since the release" if drift and drift.outcome == DRIFTED else ""
    return safe(view.cell_name(series)) + mark


def _hover(series: Series, point: Point) -> str:
    run = point.run
    lines = [
        f"<b>{value_text(series.metric, point.value)}</b>",
        f"{run.started:%Y-%m-%d %H:%M} UTC · {safe(run.commit)}" + (f" · {safe(run.release)}" if run.release else ""),
        safe(f"kvbench {run.versions.get('kvbench', '?')} · {run.name}"),
    ]
    if point.state != VALID:
        lines.append("does not count: " + ("run incomplete" if point.state == INCOMPLETE else "not valid"))
    return "<br>".join(lines)


def _dates(runs: Sequence[StoredRun]) -> list[str]:
    """Days, or times where all are of one day."""
    same_day = len({run.started.date() for run in runs}) == 1 and len(runs) > 1
    same_year = len({run.started.year for run in runs}) == 1
    style = "%H:%M" if same_day else "%b %d" if same_year and len(runs) > 1 else "%Y-%m-%d"
    return [run.started.strftime(style) for run in runs]
