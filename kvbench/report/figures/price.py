"""The price of speed in answers: KLD over the change of throughput, a point a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.report.comparisons import Comparisons, percent_change
from kvbench.report.quality import Quality, is_quantised, kld_text
from kvbench.report.style import GREY, Drawing, LineStyle, finish, safe
from kvbench.report.wording import say
from kvbench.runs.quality import QualityResult, figure

_LEAST_KLD = 1e-6  # nats, far below any limit: what is below, and 0, is drawn here: a log axis has no 0
_MOST_TICKS = 6
_NUMBERS = ["kld", "kld_low", "kld_high", "change", "low", "high"]


def price_frame(comparisons: Comparisons, by_id: Mapping[str, Quality]) -> pd.DataFrame:
    """A row a configuration of the reported load that was measured.

    configuration, label: its name, and what distinguishes it where it is quantised or outside the limits, else ""
    outside: whether it breaks a limit
    kld, kld_low, kld_high: nats; the ends are NaN without an interval
    change, low, high: of output tokens/s against the baseline [%], 0 for the baseline; NaN where not known
    clock: of the change
    """
    rows = []
    for cell in comparisons.reported:
        quality, speed = by_id[cell.config_id], comparisons.throughput_of(cell)
        kld = [figure(quality.figures, name) for name in ("mean", "mean_low", "mean_high")]
        if kld[0] is None or not (speed or cell.is_baseline):
            continue
        ratios = (speed.ratio, speed.low, speed.high) if speed else (1.0, None, None)
        changes = map(percent_change, ratios)
        label = comparisons.names[cell.cell_id] if quality.outside or is_quantised(cell) else ""
        rows.append([cell.name, label, bool(quality.outside), *kld, *changes, speed.clock if speed else "baseline"])
    columns = ["configuration", "label", "outside", *_NUMBERS, "clock"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(_NUMBERS, float))


def price_drawing(
    result: QualityResult | None, comparisons: Comparisons, by_id: Mapping[str, Quality], look: Mapping[str, LineStyle]
) -> Drawing | None:
    """Draws speed against the quality of answers; None where no configuration has both figures."""
    frame = price_frame(comparisons, by_id)
    if result is None or frame.empty or comparisons.load is None:
        return None
    ends = [figure(result.control, name) for name in ("mean_high", "mean")]
    noise = next((end for end in ends if end is not None), None)
    outside = list(frame[frame["outside"]]["label"])
    caption = say("quality.caption", bool(outside), load=comparisons.load.label, model=result.model)
    title = say("quality.title", bool(outside), names=words.and_more(outside))
    return Drawing("quality", title, caption, _figure(frame, noise, result.limits.get("mean"), look), 372)


def _figure(frame: pd.DataFrame, noise: float | None, limit: float | None, look: Mapping[str, LineStyle]) -> go.Figure:
    """KLD over the change of throughput. ``noise``: up to where the control's KLD reaches; ``limit``: of the KLD."""
    made = go.Figure([_point(row, look[row.configuration]) for row in frame.itertuples()])
    ends = [*frame["kld"], *frame["kld_low"].dropna(), *frame["kld_high"].dropna(), *filter(None, (noise, limit))]
    low, high = (math.log10(max(end, _LEAST_KLD)) for end in (min(ends), max(ends)))
    low, high = low - 0.12 * (high - low) - 0.3, high + 0.08 * (high - low) + 0.3
    if noise is not None:
        band = {"fillcolor": "rgba(128,128,128,0.2)", "line_width": 0, "layer": "below"}
        made.add_hrect(10**low, max(noise, _LEAST_KLD), **band)
        _note(made, low, "noise of the control")
    if limit is not None:
        made.add_hline(limit, line={"color": GREY, "width": 1.5, "dash": "dash"}, layer="below")
        _note(made, math.log10(limit), f"limit {kld_text(limit)}")
    made.add_vline(0, line_width=1, line_color=GREY, layer="below")
    decades = range(math.ceil(low), math.floor(high) + 1)
    every = max(1, math.ceil(len(decades) / _MOST_TICKS))
    ticks = [10.0**decade for decade in decades if decade % every == 0]
    names = ["≤ " * (tick <= _LEAST_KLD) + f"{tick:g}".replace("e-0", "e-") for tick in ticks]
    made.update_yaxes(type="log", range=[low, high], tickvals=ticks, ticktext=names, title_text="KLD, nats a token")
    made.update_xaxes(title_text="change of output tokens/s, %", nticks=7)
    finish(made, 380)
    return made.update_layout(margin={"t": 64}, legend_font_size=12)


def _point(row: Any, look: LineStyle) -> go.Scatter:
    """One configuration with both intervals."""
    kld = max(row.kld, _LEAST_KLD)

    def bars(value: float, low: float, high: float) -> dict[str, object]:
        more, less = (0.0 if pd.isna(end) else max(0.0, end) for end in (high - value, value - low))
        style = {"thickness": 1.2, "width": 3, "color": look.faint(0.7)}
        return {"type": "data", "symmetric": False, "array": [more], "arrayminus": [less], **style}

    hover = say("quality.hover", bool(row.outside), name=safe(row.configuration), row=row, ratio=1 + row.change / 100)
    side, symbol = ("top center", "x") if row.outside else ("bottom center", "circle")
    return go.Scatter(
        x=[row.change], y=[kld], mode="markers+text", name=safe(row.configuration), text=[safe(row.label)],
        textposition=side, textfont={"size": 11}, cliponaxis=False,
        marker={"color": look.colour, "size": 11, "symbol": symbol},
        error_x=bars(row.change, row.low, row.high),
        error_y=bars(kld, max(row.kld_low, _LEAST_KLD), row.kld_high),
        hovertext=[hover], hoverinfo="text",
    )  # fmt: skip


def _note(made: go.Figure, y: float, text: str) -> None:
    """Writes a line at the left end, above ``y``: the logarithm, which annotations take on a log axis."""
    made.add_annotation(
        x=0, xref="paper", xanchor="left", y=y, yanchor="bottom", text=text, showarrow=False,
        font={"size": 11, "color": GREY},
    )  # fmt: skip
