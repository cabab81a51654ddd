"""One look for every figure: a colour and a dash per configuration, neutral axes that suit light and dark."""

from __future__ import annotations

import html
from dataclasses import dataclass

import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.report.comparisons import NOT_TOLD, SAME, UNCLEAR, Ratio, compare, reference, spread
from kvbench.runs.model import MeasuredCell, Run

# Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), without its black and its yellow.
CONTIGUOUS, PAGED = "#D55E00", "#0072B2"
OTHERS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A", "#A6761D")
DASHES = ("dot", "dashdot", "longdash", "longdashdot", "5px,2px", "2px,4px")
GRID = "rgba(128,128,128,0.22)"
RATIO_MARKS = f"≈ means level, ? {NOT_TOLD} from 1"
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
    """A figure with its place on the page; `min_width` in px, below which it scrolls."""

    key: str
    title: str
    caption: str
    figure: go.Figure
    min_width: int = 0


def looks(run: Run) -> dict[str, LineStyle]:
    """Configuration name -> look, the same in all figures of a run."""
    found: dict[str, LineStyle] = {}
    others = 0
    first_paged = next(
        (c.name for c in run.cells if c.is_baseline and c.is_paged),
        next((c.name for c in run.cells if not c.is_contiguous), None),
    )
    first_contiguous = next((c.name for c in run.cells if c.is_contiguous), None)
    for name in run.configs:
        if name == first_contiguous:
            found[name] = LineStyle(CONTIGUOUS, "dash")
        elif name == first_paged:
            found[name] = LineStyle(PAGED)
        else:
            found[name] = LineStyle(
                OTHERS[others % len(OTHERS)], DASHES[(others // len(OTHERS) + others) % len(DASHES)]
            )
            others += 1
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
        legend={
            "orientation": "h",
            "y": 1.0,
            "yref": "container",
            "yanchor": "top",
            "x": 0,
            "xanchor": "left",
        },
        modebar={"orientation": "v", "bgcolor": "rgba(0,0,0,0)", "color": "#9aa3ad", "activecolor": "#5b6675"},
        hoverlabel={"align": "left", "font": {"family": FONT, "size": 12}},
    )
    figure.update_xaxes(
        gridcolor=GRID, zeroline=False, linecolor=GRID, automargin=True, title_font_size=12, title_standoff=8
    )
    figure.update_yaxes(
        gridcolor=GRID, zeroline=False, linecolor=GRID, automargin=True, title_font_size=12, title_standoff=8
    )
    return figure


def hover(run: Run, cell: MeasuredCell) -> str:
    """Everything known of a cell, one line each."""
    lines = [f"<b>{safe(cell.name)}</b> · {cell.load.label}"]
    s = spread(cell.throughput())
    if s:
        lines.append(
            f"output tokens/s{'' if cell.has_steady else ' (whole run)'}: {words.tokens_per_s(s.median)} "
            f"({words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)}, {words.plural(s.n, 'repeat')})"
        )
    if (text := ratio_text(run, cell)) is not None:
        ref = reference(run, cell.load)
        lines.append(f"ratio to {safe(ref.name)}: {text}" if ref else "")
    for label, metric in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("ITL", "itl_ms")):
        (p50, doubt50), (p95, doubt95) = cell.percentile(metric, "p50"), cell.percentile(metric, "p95")
        lines.append(f"{label} p50 {words.ms(p50)}{'*' * doubt50}, p95 {words.ms(p95)}{'*' * doubt95}")
    if (r := spread(cell.observed("running_mean"))) is not None:
        lines.append(f"running at once, mean: {words.decimal(r.median)}")
    if (p := cell.counter("num_preemptions_total")) is not None:
        lines.append(f"preemptions: {words.count(p)}")
    if cell.count("failed"):
        lines.append(f"failed requests: {cell.count('failed')}")
    if not cell.valid:
        lines.append("<b>invalid</b>: " + safe("; ".join(cell.invalid_reasons)))
    return "<br>".join(line for line in lines if line)


def ratio_text(run: Run, cell: MeasuredCell) -> str | None:
    """`marked_ratio` against the run's reference; None for the reference itself."""
    ref = reference(run, cell.load)
    if ref is None or ref is cell:
        return None
    r = compare(cell, ref).throughput
    return None if r is None else marked_ratio(r)


def marked_ratio(r: Ratio) -> str:
    """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1."""
    return f"{'≈' if r.verdict == SAME else ''}{words.ratio(r.median)}{'?' if r.verdict == UNCLEAR else ''}"


def throughput_axis(run: Run) -> str:
    """The axis title of `MeasuredCell.throughput`: which of the two throughputs the run's cells have to show."""
    steady = {cell.has_steady for cell in run.cells}
    if steady == {False}:
        return "output tokens/s (whole run)"
    return "output tokens/s (steady window" + ("; whole run where there is none)" if False in steady else ")")
