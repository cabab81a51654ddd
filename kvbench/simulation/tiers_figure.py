"""Mean and p95 TTFT as one tier after another is added, and how many pages each hits."""

from __future__ import annotations

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from kvbench.report.style import CONTIGUOUS, OTHERS, PAGED, finish, safe
from kvbench.simulation.tiers import TieredSimulation


def tiers_figure(result: TieredSimulation, title: str) -> go.Figure:
    """Two panels over the same tiers; ``title``: inside the figure."""
    names = ["no cache", *(value.tier.name.upper() for value in result.values if value.tier)]
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    for name, colour, times in (
        ("mean TTFT", PAGED, [value.mean_s for value in result.values]),
        ("p95 TTFT", CONTIGUOUS, [value.p95_s for value in result.values]),
    ):
        figure.add_bar(
            x=names, y=[seconds * 1e3 for seconds in times], name=name, marker={"color": colour},
            hovertemplate=f"%{{y:,.1f}} ms {name}<extra></extra>", row=1, col=1,
        )  # fmt: skip
    figure.add_bar(
        x=names, y=[value.hits / result.pages * 100 for value in result.values], name="pages hit in the tier",
        marker={"color": OTHERS[0]}, hovertemplate="%{y:.2f} % of pages<extra></extra>", row=2, col=1,
    )  # fmt: skip
    finish(figure, 520)
    figure.update_yaxes(title_text="TTFT with it, ms", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title_text="hits, % of pages", rangemode="tozero", row=2, col=1)
    top = {"text": safe(f"Simulated: {title}"), "y": 0.95, "yanchor": "top"}
    figure.update_layout(title=top, margin={"t": 96, "b": 56})
    return figure
