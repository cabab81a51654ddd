"""A history as one page that needs no network: drift since the release, then a figure for every metric."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvbench.common import text as words
from kvbench.history.drift import DRIFTED, UNCLEAR, WITHIN, Drift
from kvbench.history.figures import drawings
from kvbench.history.model import place_words
from kvbench.history.table import change_text, value_text
from kvbench.history.view import View
from kvbench.report.page import figures_json

DRIFT_HEADS = (
    "workload",
    "machine",
    "cell",
    "metric",
    "release",
    "at release",
    "now",
    "change",
    "95 % interval",
    "margin",
)
DRIFT_NOTE = (
    "Change: ratio of the geometric means over the repeats. The interval is Welch's and holds for the repeats alone: "
    "what differs between two days on one machine is not in it; `kvbench compare` of the two commits measures both on "
    "one day."
)
_TITLES = {
    DRIFTED: "Worse than the release by more than the margin",
    UNCLEAR: "Not known: too few repeats, or too unlike",
    WITHIN: "Within the margin",
}


def page(view: View) -> str:
    """The whole page; everything that came from outside is escaped by the template."""
    made = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    drawn = [(series[0], drawings(view, series, f"g{index}")) for index, series in enumerate(view.groups)]
    flat = [drawing for _, some in drawn for drawing in some]
    places = {id(drawing): index for index, drawing in enumerate(flat)}
    return made.from_string(_asset("history.html.j2")).render(
        title=words.listing(sorted({first.workload for first, _ in drawn})),
        headline=view.drift_sentence,
        context=[_told(view), view.change_point_note, *view.notes],
        drifts=_drifts(view),
        drift_heads=DRIFT_HEADS,
        drift_note=DRIFT_NOTE,
        groups=[
            (f"{first.workload} on {place_words(first.place)}", [(places[id(each)], each) for each in some])
            for first, some in drawn
        ],
        figures_json=Markup(figures_json(flat)),
        css=Markup(_asset("page.css")),
        js=Markup(_asset("page.js")),
        plotly_js=Markup(get_plotlyjs()),
    )


def _told(view: View) -> str:
    shown = {point.run for group in view.groups for series in group for point in series.points}
    first, last = (pick(run.started for run in shown) for pick in (min, max))
    days = f"{first:%Y-%m-%d}" + (f" to {last:%Y-%m-%d}" if first.date() != last.date() else "")
    incomplete = sum(not run.complete for run in shown)
    return (
        f"{words.plural(len(shown), 'run')}, {days}"
        + (f"; {incomplete} of them incomplete" if incomplete else "")
        + "."
    )


def _drifts(view: View) -> list[tuple[str, bool, list[tuple[str, ...]]]]:
    """(title, whether it is open, rows) for each outcome that there is, the largest change for the worse first."""
    found = []
    for outcome, title in _TITLES.items():
        some = [drift for drift in view.drifts if drift.outcome == outcome]
        some.sort(key=lambda drift: drift.series.metric.better * drift.change)
        if some:
            found.append((f"{title}: {len(some)}", outcome == DRIFTED, [_row(view, drift) for drift in some]))
    return found


def _row(view: View, drift: Drift) -> tuple[str, ...]:
    series = drift.series
    return (
        series.workload,
        series.machine,
        view.cell_name(series),
        series.metric.title,
        view.release_name(drift),
        value_text(series.metric, drift.release.value),
        value_text(series.metric, drift.last.value),
        change_text(drift.change),
        " to ".join(change_text(end) for end in drift.interval) if drift.interval else "one repeat, none",
        words.percent(drift.margin),
    )


def _asset(name: str) -> Any:
    return files("kvbench.report").joinpath("templates", name).read_text(encoding="utf-8")
