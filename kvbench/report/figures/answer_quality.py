"""What a configuration's answers cost beside what its speed gains."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.report.changes import THROUGHPUT, amount, change, decided_load, short_name
from kvbench.report.comparisons import baseline
from kvbench.report.quality import is_quantised, kld_text, quality_of
from kvbench.report.style import GREY, Drawing, LineStyle, finish, looks, safe
from kvbench.runs.model import Run
from kvbench.runs.quality import figure

_LEAST_KLD = 1e-6  # nats, far below any limit: what is below, and 0, is drawn here: a log axis has no 0
_MOST_TICKS = 6


def price_frame(run: Run) -> pd.DataFrame:
    """A row a configuration of the reported load that was measured.

    configuration, label: its name, and what distinguishes it where it is quantised or outside the limits, else ""
    outside: whether it breaks a limit
    kld, kld_low, kld_high: nats; the ends are NaN without an interval
    change, low, high: of output tokens/s against the baseline [%], 0 for the baseline; NaN where not known
    clock: of the change
    """
    rows, load = [], decided_load(run)
    base = baseline(run, load) if load else None
    for cell in run.at(load) if load else ():
        known = quality_of(run, cell)
        kld = [figure(known.figures, name) for name in ("mean", "mean_low", "mean_high")]
        more = change(run, cell, THROUGHPUT)
        if kld[0] is None or not (more or cell.is_baseline):
            continue
        ratios = (more.ratio, more.low, more.high) if more else (1.0, None, None)
        rows.append([
            cell.name, short_name(cell, base) if known.outside or is_quantised(cell) else "", bool(known.outside), *kld,
            *(None if ratio is None else 100 * (ratio - 1) for ratio in ratios), more.clock if more else "baseline",
        ])  # fmt: skip
    numbers = ["kld", "kld_low", "kld_high", "change", "low", "high"]
    columns = ["configuration", "label", "outside", *numbers, "clock"]
    return pd.DataFrame(rows, columns=columns).astype(dict.fromkeys(numbers, float))


def price_figure(
    frame: pd.DataFrame, noise: float | None, limit: float | None, look: Mapping[str, LineStyle]
) -> go.Figure:
    """KLD over the change of throughput. ``noise``: up to where the control's KLD reaches; ``limit``: of the KLD."""
    made = go.Figure()
    for row in frame.itertuples():
        made.add_trace(_point(row, look[row.configuration]))
    ends = [*frame["kld"], *frame["kld_low"].dropna(), *frame["kld_high"].dropna(), *filter(None, (noise, limit))]
    low, high = (math.log10(max(each, _LEAST_KLD)) for each in (min(ends), max(ends)))
    low, high = low - 0.12 * (high - low) - 0.3, high + 0.08 * (high - low) + 0.3
    if noise is not None:
        top = max(noise, _LEAST_KLD)
        made.add_hrect(10**low, top, fillcolor="rgba(128,128,128,0.2)", line_width=0, layer="below")
        _note(made, low, "noise of the control")
    if limit is not None:
        made.add_hline(limit, line={"color": GREY, "width": 1.5, "dash": "dash"}, layer="below")
        _note(made, math.log10(limit), f"limit {kld_text(limit)}")
    made.add_vline(0, line_width=1, line_color=GREY, layer="below")
    decades = range(math.ceil(low), math.floor(high) + 1)
    ticks = [10.0**each for each in decades if each % max(1, math.ceil(len(decades) / _MOST_TICKS)) == 0]
    names = [f"{'≤ ' * (tick <= _LEAST_KLD)}{tick:g}".replace("e-0", "e-") for tick in ticks]
    made.update_yaxes(type="log", range=[low, high], tickvals=ticks, ticktext=names, title_text="KLD, nats a token")
    made.update_xaxes(title_text="change of output tokens/s, %", nticks=7)
    finish(made, 380)
    return made.update_layout(margin={"t": 64}, legend_font_size=12)


def _point(row: pd.Series, look: LineStyle) -> go.Scatter:
    """One configuration with both intervals."""
    kld = max(row.kld, _LEAST_KLD)

    def bars(value: float, low: float, high: float) -> dict[str, object]:
        more, less = (0.0 if pd.isna(end) else max(0.0, end) for end in (high - value, value - low))
        style = {"thickness": 1.2, "width": 3, "color": look.faint(0.7)}
        return {"type": "data", "symmetric": False, "array": [more], "arrayminus": [less], **style}

    return go.Scatter(
        x=[row.change], y=[kld], mode="markers+text", name=safe(row.configuration), text=[safe(row.label)],
        textposition="top center" if row.outside else "bottom center", textfont={"size": 11}, cliponaxis=False,
        marker={"color": look.colour, "size": 11, "symbol": "x" if row.outside else "circle"},
        error_x=bars(row.change, row.low, row.high),
        error_y=bars(kld, max(row.kld_low, _LEAST_KLD), row.kld_high),
        hovertext=[
            f"<b>{safe(row.configuration)}</b><br>KLD {kld_text(row.kld)}"
            f"{'' if pd.isna(row.kld_low) else f' ({kld_text(row.kld_low)} to {kld_text(row.kld_high)})'}<br>"
            f"output tokens/s {amount(1 + row.change / 100)}, {row.clock}{'<br>outside the limits' * row.outside}"
        ],
        hoverinfo="text",
    )  # fmt: skip


def _note(made: go.Figure, y: float, text: str) -> None:
    """A line of text at the left end, above ``y``: the logarithm, which annotations take on a log axis."""
    made.add_annotation(
        x=0, xref="paper", xanchor="left", y=y, yanchor="bottom", text=text, showarrow=False,
        font={"size": 11, "color": GREY},
    )  # fmt: skip


def drawing(run: Run) -> Drawing | None:
    """None where no configuration has both figures."""
    frame, result = price_frame(run), run.quality
    if result is None or frame.empty:
        return None
    ends = [figure(result.control, name) for name in ("mean_high", "mean")]
    noise = next((end for end in ends if end is not None), None)
    load = decided_load(run)
    caption = (
        f"At {load.label if load else ''}; KLD measured with {result.model}. Right is faster, low is closer to full "
        f"precision. {'Crosses: outside a limit, of this or another figure.' if frame['outside'].any() else ''}"
    )
    made = price_figure(frame, noise, result.limits.get("mean"), looks(run))
    return Drawing("quality", _title(frame), caption.strip(), made, 520)


def _title(frame: pd.DataFrame) -> str:
    outside = list(frame[frame["outside"]]["label"])
    if not outside:
        return "What speed costs in answers: nothing beyond the limits"
    return f"What speed costs in answers: {words.and_more(outside)} outside the limits"
