"""The style that all figures share: colours and dashes, axes that suit light and dark, labels, legends."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from kvbench.runs.model import MeasuredCell, MeasuredLoad

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), without its black and its yellow.
CONTIGUOUS, PAGED, GREY = "#D55E00", "#0072B2", "#8A8A8A"
OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#A6761D")
DASHES = ("dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
GRID = "rgba(128,128,128,0.22)"
MAX_POINTS = 400  # of a curve
_MOST_TICKS = 4  # of a log axis
_PHONE, _LAPTOP = 372, 620  # px that a page leaves to a figure there; on a laptop to one of two
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'


@dataclass(frozen=True)
class LineStyle:
    """The colour and dash of one configuration."""

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


def looks(cells: Sequence[MeasuredCell]) -> dict[str, LineStyle]:
    """Gives each configuration, by name, a look that is the same in all figures of a run."""
    paged = [c.name for c in cells if c.is_baseline and c.is_paged]
    paged += [c.name for c in cells if not c.is_contiguous]
    contiguous = [c.name for c in cells if c.is_contiguous]
    styles = {name: LineStyle(PAGED) for name in paged[:1]}
    styles |= {name: LineStyle(CONTIGUOUS, "dash") for name in contiguous[:1]}
    others = [name for name in dict.fromkeys(cell.name for cell in cells) if name not in styles]
    for i, name in enumerate(others):
        styles[name] = LineStyle(OTHERS[i % len(OTHERS)], DASHES[(i // len(OTHERS) + i) % len(DASHES)])
    return styles


def safe(text: object) -> str:
    """Escapes text from outside for a figure: plotly reads some HTML in names and hovers."""
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


def below_each_other(
    figure: go.Figure, legend_lines: int, panel: int = 220, gap: int = 64, left: int = 60
) -> go.Figure:
    """Lets a narrow page put panels below each other, with the legend below them.

    The script of the page takes the changes from ``layout.meta.narrow``. panel, gap, left: px a panel, between two
    panels, where the titles of panels stand too, and beside them.
    """
    count, titled = len(list(figure.select_xaxes())), len(figure.layout.annotations) > 0
    top, bottom = 16 + (gap - 40) * titled, 64 + 20 * legend_lines
    whole = count * panel + (count - 1) * gap
    narrow: dict[str, Any] = {"height": whole + top + bottom, "margin": {"l": left, "r": 14, "t": top, "b": bottom}}
    narrow |= {"legend.y": 0, "legend.yref": "container", "legend.yanchor": "bottom"}
    for i in range(count):
        axis, end = str(i + 1) if i else "", 1 - i * (panel + gap) / whole
        narrow[f"xaxis{axis}.domain"] = [0, 1]
        narrow |= {f"yaxis{axis}.domain": [max(0.0, end - panel / whole), end], f"yaxis{axis}.showticklabels": True}
        if titled:
            narrow |= {f"annotations[{i}].x": 0.5, f"annotations[{i}].y": end}
    return figure.update_layout(meta={"narrow": narrow})


def hatch(shape: object, solidity: float | None = None) -> dict[str, object]:
    """A pattern in white on the colour of a bar or an area, since colours alone are not enough."""
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#fff", "size": 5, "solidity": solidity}


def ecdf(samples: np.ndarray, points: int = MAX_POINTS) -> tuple[np.ndarray, np.ndarray]:
    """Returns x [n], y [n] of the empirical distribution, n <= points; the smallest and largest sample stay.

    Samples are picked, not interpolated: every (x, y) is a point of the full curve.
    """
    picks = np.unique(np.linspace(0, len(samples) - 1, min(points, len(samples))).round().astype(int))
    return np.sort(samples)[picks].astype(float), (picks + 1) / len(samples)


def thin(frame: pd.DataFrame, points: int = MAX_POINTS) -> pd.DataFrame:
    """Keeps at most ``points`` rows of a time series, evenly, with the first and the last."""
    if len(frame) <= points:
        return frame
    return frame.iloc[np.unique(np.linspace(0, len(frame) - 1, points).round().astype(int))]


def compact(values: Any, decimals: int = 2) -> np.ndarray:
    """Values for a trace as rounded float32, which keeps a page small. float32 [n]"""
    return np.round(np.asarray(values, dtype=float), decimals).astype(np.float32)


def log_axis(values: np.ndarray) -> dict[str, Any]:
    """Sets up a log axis: ticks at 1, 2 and 5 of each decade or fewer, low outliers cut off.

    A gap of microseconds (two tokens read from the socket at once) would otherwise take up half the axis.
    """
    positive = values[values > 0]
    if not len(positive):
        return {}
    low, high = float(np.quantile(positive, 0.005)), float(positive.max())
    if high < 4 * low:  # too narrow for two ticks
        middle = math.sqrt(low * high)
        low, high = middle / 2, middle * 2
    low, high = low * 0.85, high * 1.15
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [tick for decade in decades for step in steps if low <= (tick := step * 10.0**decade) <= high]
        if len(ticks) <= _MOST_TICKS:
            break
    return {
        "type": "log",
        "range": [math.log10(low), math.log10(high)],
        "tickvals": ticks,
        "ticktext": [f"{tick:,g}" for tick in ticks],
    }


def label_above(figure: go.Figure, y: float, text: str, bold: bool = False) -> None:
    """Writes outside text above the left end of the bar at ``y``, where it needs no room beside the plot."""
    place = {"x": 0, "xref": "paper", "xanchor": "left", "y": y, "yanchor": "bottom", "yshift": 9, "align": "left"}
    look = {"text": safe(text), "font": {"size": 12}}
    if bold:
        look = {"text": f"<b>{safe(text)}</b>", "font": {"size": 13}}
    figure.add_annotation(**place, **look, showarrow=False)


def room_for_labels(labels: Iterable[str]) -> int:
    """The width [px] at which ``label_above`` shows the longest of these whole; 0: a phone's."""
    width = 56 + 6.4 * max(map(len, labels), default=0)
    return round(width) if width > _PHONE else 0


def under(load: MeasuredLoad) -> str:
    """A load behind a noun in a title: "with 24 at once", "at 4/s", "under the trace's arrivals"."""
    if load.mode == "closed":
        return f"with {load.short}"
    return f"at {load.short}" if 0 < load.value < math.inf else f"under {load.label}"


def legend_below(figure: go.Figure, panels: float, titles: Sequence[str], margin: dict[str, int]) -> go.Figure:
    """Puts the legend below axes that end at ``panels`` px, in as many lines as a phone needs."""

    def layout(width: int) -> dict[str, Any]:
        columns = max(1, width // (45 + round(6.8 * max(map(len, titles), default=1))))
        bottom = 52 + 20 * math.ceil(len(titles) / columns)
        return {"height": panels + margin["t"] + bottom, "margin": margin | {"b": bottom}}

    figure.update_layout(layout(_LAPTOP), meta={"narrow": layout(_PHONE - margin["l"] - margin["r"])})
    return figure.update_layout(legend={"y": 0, "yref": "container", "yanchor": "bottom", "traceorder": "normal"})
