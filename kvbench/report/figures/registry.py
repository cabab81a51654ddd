"""FIGURES: every figure of a report below its first screen, with the chapter that it stands in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbench.common.errors import say as warn
from kvbench.common.plugins import add_plugins
from kvbench.report.decision import Decision
from kvbench.report.figures import distributions, heat_map, hits, kv, price, slowest, step_time
from kvbench.report.hits import hit_ledgers
from kvbench.report.style import Drawing, looks


@dataclass(frozen=True)
class ReportFigure:
    """A figure of a report.

    name: unique among all figures
    chapter: the heading that it stands under; a new one makes a chapter of its own before "All cells"
    draw: its drawings for a run; None among them, or none, where the run has nothing to show of it
    """

    name: str
    chapter: str
    draw: Callable[[Decision], Iterable[Drawing | None]]


def _price(decision: Decision) -> list[Drawing | None]:
    run = decision.run
    return [price.price_drawing(run.quality, decision.comparisons, decision.qualities, looks(run.cells))]


def _hits(decision: Decision) -> list[Drawing | None]:
    run = decision.run
    return [hits.hit_drawing(hit_ledgers(run, decision.comparisons.by_load), looks(run.cells))]


_SHIPPED = (
    ReportFigure("price", "Quality of the answers", _price),
    ReportFigure("kv", "Where the KV bytes went", kv.drawings),
    ReportFigure("distributions", "Latencies", lambda d: [distributions.drawing(d.comparisons, looks(d.run.cells))]),
    ReportFigure("slowest", "Latencies", lambda d: [slowest.drawing(d.comparisons)]),
    ReportFigure("hits", "Prefix cache: hits", _hits),
    ReportFigure("step time", "Inside the engine", lambda d: [step_time.drawing(d.comparisons.by_load)]),
    ReportFigure("heat map", "Inside the engine", lambda d: [heat_map.drawing(d.run, d.comparisons)]),
)
FIGURES = {figure.name: figure for figure in _SHIPPED}
"""Name -> figure, in the order of the page."""
add_plugins(FIGURES, "figures", ReportFigure)


def drawings(decision: Decision, chapter: str) -> list[Drawing]:
    """Draws the figures of a chapter, in the order of FIGURES; one of another package may fail alone."""
    drawn: list[Drawing] = []
    for figure in FIGURES.values():
        if figure.chapter != chapter:
            continue
        try:
            drawn += [drawing for drawing in figure.draw(decision) if drawing is not None]
        except Exception as error:
            if figure in _SHIPPED:
                raise
            warn(f"note: the figure {figure.name!r}, which another package added, is left out ({error!r})")
    return drawn
