"""KV occupancy over time: what each configuration reserved, what it used, how many sequences that let run."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.comparisons import paging, spread
from kvbench.report.series import representative_repeat, thin
from kvbench.report.style import LineStyle, finish, looks, safe
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run

PER_ROW = 5


def occupancy(run: Run, load: MeasuredLoad) -> tuple[str, go.Figure, int] | None:
    """Title, figure and minimal width of one load's small multiples; None when no server told how full its KV was."""
    cells = [cell for cell in run.at(load) if _tells_occupancy(cell)]
    if not cells:
        return None
    columns = min(PER_ROW, len(cells))
    bands = -(-len(cells) // columns)
    titles: list[str] = []
    for band in range(bands):
        names = [safe(c.name).replace(" + ", "<br>+ ") for c in cells[band * columns : (band + 1) * columns]]
        titles += names + [""] * (columns - len(names)) + [""] * columns
    figure = make_subplots(
        rows=2 * bands,
        cols=columns,
        shared_xaxes=True,
        subplot_titles=titles,
        vertical_spacing=0.16 / (2 * bands),
        horizontal_spacing=0.025,
        row_heights=[0.6, 0.4] * bands,
    )
    look, longest, busiest = looks(run), 0.0, 1.0
    for position, cell in enumerate(cells):
        band, column = divmod(position, columns)
        longest, busiest = _panel(figure, cell, look[cell.name], 2 * band + 1, column + 1, longest, busiest)
    figure.update_xaxes(range=[0, longest])
    for band in range(bands):
        figure.update_yaxes(range=[0, 104], showticklabels=False, row=2 * band + 1)
        figure.update_yaxes(range=[0, busiest * 1.08], showticklabels=False, row=2 * band + 2)
        figure.update_yaxes(title_text="KV budget", ticksuffix=" %", showticklabels=True, row=2 * band + 1, col=1)
        figure.update_yaxes(title_text="sequences", showticklabels=True, row=2 * band + 2, col=1)
        figure.update_xaxes(title_text="s since load start", row=2 * band + 2)
    figure.update_annotations(font={"size": 12})
    finish(figure, 40 + 380 * bands, legend=False)
    figure.update_layout(margin_t=56)
    return _title(run, load), figure, 180 * columns + 60


def _tells_occupancy(cell: MeasuredCell) -> bool:
    gauges = cell.gauges()
    return bool(gauges["kv_slots_reserved"].notna().any() or gauges["kv_cache_usage_perc"].notna().any())


def _panel(
    figure: go.Figure, cell: MeasuredCell, look: LineStyle, row: int, column: int, longest: float, busiest: float
) -> tuple[float, float]:
    gauges = cell.gauges()
    gauges = thin(gauges[gauges["repeat"] == representative_repeat(cell)].sort_values("t"))
    t, total = gauges["t"], gauges["kv_slots_total"]
    reserved, used = gauges["kv_slots_reserved"] / total * 100, gauges["kv_slots_used"] / total * 100
    if reserved.isna().all():  # a server that reports usage but not slots
        reserved = gauges["kv_cache_usage_perc"] * 100
    name = safe(cell.name)
    for values, alpha, what in ((reserved, 0.25, "reserved"), (used, 0.8, "holds tokens")):
        if values.notna().any():
            figure.add_scatter(
                x=t,
                y=values,
                fill="tozeroy",
                fillcolor=look.faint(alpha),
                mode="lines",
                name=name,
                line={"color": look.colour, "width": 1},
                row=row,
                col=column,
                hovertemplate=f"{name}<br>%{{x:.1f}} s: %{{y:.0f}} % {what}<extra></extra>",
            )
    for gauge, dash, what in (
        ("num_requests_running", "solid", "running"),
        ("num_requests_waiting", "dot", "waiting"),
    ):
        figure.add_scatter(
            x=t,
            y=gauges[gauge],
            mode="lines",
            name=name,
            row=row + 1,
            col=column,
            line={"color": look.colour, "width": 1.8, "dash": dash, "shape": "hv"},
            hovertemplate=f"{name}<br>%{{x:.1f}} s: %{{y:.0f}} {what}<extra></extra>",
        )
    peak = max(gauges["num_requests_running"].max(), gauges["num_requests_waiting"].max())
    return max(longest, float(t.max())), max(busiest, float(peak))


def _title(run: Run, load: MeasuredLoad) -> str:
    pair = next((p for p in paging(run) if p.load == load), None)
    parts = []
    for cell in (pair.b, pair.a) if pair else ():
        owned, used = spread(cell.observed("usage_mean")), spread(cell.observed("used_share"))
        if owned and used:
            parts.append(
                f"{cell.name} reserves {words.percent(owned.median)} of the KV budget and fills "
                f"{words.percent(used.median)}"
            )
    return f"At {load.label}: {'; '.join(parts)}" if parts else f"KV occupancy over time at {load.label}"
