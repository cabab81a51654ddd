"""One look for every figure: a colour and a dash per configuration, neutral axes that suit light and dark."""

from __future__ import annotations

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from kvbench.runs.model import Run

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), without its black and its yellow.
CONTIGUOUS, PAGED, GREY = "#D55E00", "#0072B2", "#8A8A8A"
OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A", "#A6761D")
DASHES = ("dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
GRID = "rgba(128,128,128,0.22)"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True)
class LineStyle:
    """How one configuration is drawn."""

    colour: str
    dash: str = "solid"

    def faint(self, alpha: float) -> str:
        """The colour with an opacity."""
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red},{green},{blue},{alpha})"


@dataclass(frozen=True)
class Drawing:
    """A figure for the page; narrower than ``min_width`` px it scrolls."""

    key: str
    title: str
    caption: str
    figure: go.Figure
    min_width: int = 0


def looks(run: Run) -> dict[str, LineStyle]:
    """Configuration name -> look, the same in all figures of a run."""
    paged = [c.name for c in run.cells if c.is_baseline and c.is_paged]
    paged += [c.name for c in run.cells if not c.is_contiguous]
    contiguous = [c.name for c in run.cells if c.is_contiguous]
    found = {paged[0]: LineStyle(PAGED)} if paged else {}
    found |= {contiguous[0]: LineStyle(CONTIGUOUS, "dash")} if contiguous else {}
    for i, name in enumerate(name for name in run.configs if name not in found):
        found[name] = LineStyle(OTHERS[i % len(OTHERS)], DASHES[(i // len(OTHERS) + i) % len(DASHES)])
    return found


def safe(text: object) -> str:
    """Text from outside for a figure: plotly reads some HTML in names and hovers."""
    return html.escape(str(text), quote=False)


def finish(figure: go.Figure, height: int, legend: bool = True) -> go.Figure:
    """Margins, fonts and grid; colours of text are set by the page, so that light and dark both read."""
    figure.update_layout(
        height=height,
        margin={"l": 64, "r": 44, "t": 44, "b": 36},
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": FONT, "size": 13},
        showlegend=legend,
        legend={"orientation": "h", "y": 1.0, "yref": "container", "yanchor": "top", "x": 0, "xanchor": "left"},
        modebar={"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#9aa3ad", "activecolor": "#5b6675"},
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
    )
    axes = {"gridcolor": GRID, "zeroline": False, "linecolor": GRID, "automargin": True}
    figure.update_xaxes(**axes, title_font_size=12, title_standoff=8)
    figure.update_yaxes(**axes, title_font_size=12, title_standoff=8)
    return figure
