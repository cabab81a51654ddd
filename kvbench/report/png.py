"""Figures of a report as PNG files, for slides, chats and pull requests; needs the extra ``png`` and a browser."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

import plotly.graph_objects as go

from kvbench.common.errors import UsageError
from kvbench.report.style import Drawing, safe

WIDTH = 1300  # px of the page that the figures are drawn for
SCALE = 2  # px of the image for each of them
MAIN = ("effects", "frontier", "ledger", "kv")  # first words of the keys of figures
_INK = "#1c2430"
_TITLE_PX, _TITLE_ROW_PX, _TITLE_CHARACTERS = 17, 24, 110


def main_drawings(drawings: Sequence[Drawing]) -> list[Drawing]:
    """Effects, frontier and KV over time: what one shows to others first."""
    return [drawing for drawing in drawings if drawing.key.split("-")[0] in MAIN]


def write_pngs(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Writes each drawing to ``<key>.png`` in ``folder``: as on a page of ``WIDTH`` px, on white, its title above.

    Raises UsageError where kaleido or a browser is missing.
    """
    try:
        import kaleido
        from kaleido.errors import BrowserFailedError, ChromeNotFoundError
    except ImportError:
        raise UsageError("PNG files need kaleido, which is not installed: pip install 'kaleido>=1'") from None
    paths = [folder / f"{drawing.key}.png" for drawing in drawings]
    jobs = [
        {
            "fig": figure,
            "path": path,
            "opts": {"format": "png", "scale": SCALE, "width": figure.layout.width, "height": figure.layout.height},
        }
        for figure, path in zip(map(_standalone, drawings), paths, strict=True)
    ]
    try:
        # MathJax, which plotly's own write_images always has, would be fetched from the network
        kaleido.write_fig_from_object_sync(jobs, kopts={"mathjax": False}, cancel_on_error=True)
    except (ChromeNotFoundError, BrowserFailedError) as error:
        why = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"PNG files need Chrome or Chromium, and none could be started ({why}): install one (apt "
            "install chromium, or kaleido_get_chrome), or name its program in the variable BROWSER_PATH"
        ) from None
    return paths


def _standalone(drawing: Drawing) -> go.Figure:
    """The figure on white with its title above everything else, which moves down by as much."""
    figure, layout = go.Figure(drawing.figure), drawing.figure.layout
    rows = textwrap.wrap(drawing.title, _TITLE_CHARACTERS)
    more = 16 + _TITLE_ROW_PX * len(rows)
    height = layout.height + more
    first_row = {"y": 1 - _TITLE_ROW_PX / height, "yref": "container", "yanchor": "bottom"}
    left = {"x": 0, "xref": "paper", "xanchor": "left"}
    figure.layout.updatemenus = None  # a choice that a picture cannot offer
    figure.update_layout(
        width=max(WIDTH, drawing.min_width),
        height=height,
        margin_t=layout.margin.t + more,
        paper_bgcolor="white",
        plot_bgcolor="white",
        font_color=_INK,
        title={"text": "<br>".join(map(safe, rows)), "font": {"size": _TITLE_PX}, **left, **first_row},
    )
    if layout.legend.yref == "container":  # else it is placed within the axes, and moves with them
        figure.update_layout(legend_y=layout.legend.y * layout.height / height)
    return figure
