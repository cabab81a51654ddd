"""A history in a terminal, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvbench.common import text as words
from kvbench.history.drift import DRIFTED, UNCLEAR, Drift
from kvbench.history.model import VALID, Metric, Point, Series
from kvbench.history.otava import ADVISORY
from kvbench.history.view import View

BLOCKS = "▁▂▃▄▅▆▇█"
GAP = "·"  # a run that measured it and does not count
WIDTH = 16
FLAT = "▄"  # where there is nothing to be higher or lower than
NARROWEST = 0.05  # of the middle value: a spread below it is drawn as part of this range, so that noise looks small
UNITS = {"tokens/s": "tok/s"}


def sparkline(points: Sequence[Point]) -> str:
    """A block a run, the newest ``WIDTH`` runs, higher blocks for larger values."""
    shown = points[-WIDTH:]
    values = [point.value for point in shown if point.state == VALID]
    if not values:
        return GAP * len(shown)
    low, high = min(values), max(values)
    if low == high:
        return "".join(FLAT if point.state == VALID else GAP for point in shown)
    span = max(high - low, NARROWEST * abs(low + high) / 2)
    bottom = (low + high - span) / 2
    return "".join(
        BLOCKS[round((point.value - bottom) / span * (len(BLOCKS) - 1))] if point.state == VALID else GAP
        for point in shown
    )


def value_text(metric: Metric, value: float) -> str:
    """With its unit."""
    if metric.unit == "ms":
        return words.ms(value)
    return words.percent(value) if metric.unit == "share" else f"{words.tokens_per_s(value)} {UNITS[metric.unit]}"


def change_text(change: float | None) -> str:
    return "–" if change is None else f"{change * 100:+.1f} %"


def tables(view: View) -> list[Table]:
    """One a workload and machine."""
    return [_table(view, series) for series in view.groups]


def _table(view: View, group: Sequence[Series]) -> Table:
    made = Table(
        title=Text(f"{group[0].workload} on {group[0].machine}"), title_justify="left", box=SIMPLE_HEAD,
        pad_edge=False, padding=(0, 0), header_style="bold",
    )  # fmt: skip
    made.add_column("cell", min_width=22, overflow="fold")
    made.add_column("trend", no_wrap=True, min_width=min(WIDTH, max(len(series.points) for series in group)))
    for head in ("last", "vs before", "vs release", "n"):
        made.add_column(head, justify="right", no_wrap=True)
    before: tuple[str, str] | None = None
    for series in group:
        if (cell := (series.cell, series.definition)) != before:
            if before is not None:
                made.add_section()
            made.add_row(Text(view.cell_name(series), style="bold"))
        made.add_row(*_entries(view, series))
        before = cell
    return made


def _entries(view: View, series: Series) -> list[Text]:
    counted, drift = series.counted, view.drift(series)
    trend = sparkline(series.points)
    last = Text(value_text(series.metric, counted[-1].value) if counted else "none valid")
    return [
        Text("  " + series.metric.title + (" *" if view.change_points.get(series) else "")),
        Text(trend),
        last,
        Text(change_text(series.change)),
        Text("–") if drift is None else _drift_text(drift),
        Text(str(len(counted))),
    ]


def _drift_text(drift: Drift) -> Text:
    mark = {DRIFTED: " !", UNCLEAR: " ?"}.get(drift.outcome, "")
    return Text(change_text(drift.change) + mark, style="bold red" if drift.outcome == DRIFTED else "")


def legend(view: View) -> list[str]:
    """What the marks in the tables say, those that are there."""
    points = [point for group in view.groups for series in group for point in series.points]
    outcomes = {drift.outcome for drift in view.drifts}
    lines = [
        f"{GAP} a run that does not count: a cell that is not valid, or a run that is not complete"
        if any(point.state != VALID for point in points) else "",
        "! worse than the release by more than the margin" if DRIFTED in outcomes else "",
        "? too few repeats, or too unlike, to shut out a drift beyond the margin" if UNCLEAR in outcomes else "",
        f"* a change point, {ADVISORY}" if view.change_points else "",
    ]  # fmt: skip
    return [line for line in lines if line]


def as_dict(view: View) -> dict[str, Any]:
    """Everything shown, for programs."""
    return {
        "format": "kvbench-history/1",
        "runs": len(view.runs),
        "series": [_series(view, series) for group in view.groups for series in group],
        "drift": view.drift_sentence,
        "change_points": view.change_point_note,
        "notes": list(view.notes),
    }


def _series(view: View, series: Series) -> dict[str, Any]:
    drift, counted = view.drift(series), series.counted
    return {
        "workload": series.workload,
        "cell": series.cell,
        "metric": series.metric.name,
        "unit": series.metric.unit,
        "better": {1: "higher", -1: "lower", 0: None}[series.metric.better],
        "place": dict(series.place),
        "definition": series.definition,
        "n": len(counted),
        "last": counted[-1].value if counted else None,
        "change": series.change,
        "drift": None if drift is None else _drift(view, drift),
        "change_points": [
            {"run": each.point.run.name, "change": _finite(each.change), "p": each.p, "advisory": True}
            for each in view.change_points.get(series, ())
        ],
        "points": [_point(point) for point in series.points],
    }


def _drift(view: View, drift: Drift) -> Mapping[str, Any]:
    return {
        "release": view.release_name(drift),
        "release_run": drift.release.run.name,
        "run": drift.last.run.name,
        "change": drift.change,
        "interval": drift.interval,
        "margin": drift.margin,
        "outcome": drift.outcome,
    }


def _point(point: Point) -> Mapping[str, Any]:
    return {
        "run": point.run.name,
        "started": point.run.started.isoformat(),
        "sha": point.run.sha,
        "dirty": point.run.dirty,
        "release": point.run.release,
        "versions": dict(point.run.versions),
        "state": point.state,
        "value": point.value,
        "values": list(point.values),
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
