"""What the engine's steps took: scheduling, preparing, moving KV, executing, sampling, output; a bar a cell."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.report.figures.axes import compact, label_above, legend_outside, room_for_labels
from kvbench.report.style import Drawing, finish
from kvbench.report.tables import Column, Table, Value, cell_table, identity_columns, number_column
from kvbench.runs.kv_ledger import share_of_steps
from kvbench.runs.model import MeasuredCell, Run

_STEP_SECONDS = "step_time_seconds_total_"
PHASES = {  # key -> title, what it is, colour, pattern; in the order of a step
    "schedule": ("schedule", "choosing what runs, giving out pages", "#009E73", "/"),
    "prepare": ("prepare", "building the step's inputs", "#E69F00", "\\"),
    "move": ("move KV", "copies on write and swaps, within prepare", "#D55E00", "x"),
    "execute": ("execute", "the model", "#0072B2", ""),
    "sample": ("sample", "choosing tokens", "#56B4E9", "."),
    "output": ("output", "growing, finishing and freeing sequences", "#CC79A7", "-"),
}
_LEAST_LABELLED = 0.06  # of the bar: a narrower part has no room for its percentage
_ROW, _HEAD = 40, 34  # px a bar, and above the first of a load


def phase_seconds(cell: MeasuredCell) -> dict[str, float]:
    """Seconds of all steps of all repeats by phase (PHASES); empty where the server does not count them.

    What moving KV took is taken out of "prepare", which counts it as well.
    """
    found = {phase: cell.counter(f"{_STEP_SECONDS}{phase}") for phase in PHASES if phase != "move"}
    known = {phase: seconds for phase, seconds in found.items() if seconds is not None}
    if not sum(known.values()):
        return {}
    moved = min(cell.counter("swap_seconds_total") or 0.0, known.get("prepare", 0.0))
    return {p: moved if p == "move" else known.get(p, 0.0) - moved * (p == "prepare") for p in PHASES}


def ms_a_step(cell: MeasuredCell, seconds: float | None) -> float | None:
    """``seconds`` of all repeats in ms a step; None where that is not known."""
    steps = cell.counter("steps_total")
    return seconds * 1000 / steps if seconds is not None and steps else None


def step_time(run: Run) -> pd.DataFrame:
    """The split of each cell's step time, the highest load first; a row a phase of a cell.

    cell_id, configuration, valid, load: the cell
    phase: one of PHASES
    share: of the time of all steps, 0 to 100 %
    ms: a step; NaN where steps are not counted
    hash_share: of the time of all steps, hashing pages for the prefix cache, 0 to 100 %; it is within "schedule" and
      "output", NaN where it is not counted
    """
    rows = []
    for cell in run.by_load:
        seconds = phase_seconds(cell)
        total, hashing = sum(seconds.values()), share_of_steps(cell, "hash_seconds")
        for phase, spent in seconds.items():
            rows.append({
                "cell_id": cell.cell_id, "configuration": cell.marked_name, "valid": cell.valid,
                "load": cell.load.short, "phase": phase,
                "share": spent / total * 100, "ms": ms_a_step(cell, spent),
                "hash_share": None if hashing is None else hashing * 100,
            })  # fmt: skip
    columns = ["cell_id", "configuration", "valid", "load", "phase", "share", "ms", "hash_share"]
    return pd.DataFrame(rows, columns=columns).astype({"share": float, "ms": float, "hash_share": float})


def step_time_figure(frame: pd.DataFrame) -> go.Figure:
    """A bar a cell; above it what it is and how long its steps are."""
    places, height = _places(frame)
    figure = go.Figure()
    for phase, (title, what, colour, pattern) in PHASES.items():
        rows = frame[frame["phase"] == phase]
        if not (rows["share"] > 0).any():
            continue
        figure.add_bar(
            y=[places[cell] for cell in rows["cell_id"]],
            x=compact(rows["share"], 3),
            orientation="h",
            width=16,
            name=title,
            marker={
                "color": colour,
                "line": {"width": 0},
                "pattern": {"shape": pattern, "fillmode": "overlay", "fgcolor": "#fff", "size": 5, "solidity": 0.2},
            },
            text=[f"{share:.0f} %" if share >= _LEAST_LABELLED * 100 else "" for share in rows["share"]],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"size": 11},
            constraintext="none",
            hovertext=[_hover(row, title, what) for row in rows.to_dict("records")],
            hoverinfo="text",
        )
    for load, cells in frame.groupby("load", sort=False):
        label_above(figure, places[cells["cell_id"].iloc[0]] - _HEAD + 8, str(load), bold=True)
        for cell, parts in cells.groupby("cell_id", sort=False):
            label_above(figure, places[cell], _label(parts))
    figure.update_xaxes(title_text="share of step time", range=[0, 100], ticksuffix=" %", showgrid=False)
    figure.update_yaxes(range=[height, 0], showticklabels=False, showgrid=False)
    finish(figure, height + 56 + 52)
    legend_outside(figure, 1.0)
    figure.update_layout(barmode="stack", margin={"t": 24, "b": 52, "l": 16, "r": 40})
    return figure


def _label(parts: pd.DataFrame) -> str:
    """The configuration, and how long its steps are if that is known."""
    whole, name = parts["ms"].sum(min_count=1), str(parts["configuration"].iloc[0])
    return name if pd.isna(whole) else f"{name} · {words.significant(whole)} ms a step"


def _places(frame: pd.DataFrame) -> tuple[dict[str, float], float]:
    """The middle of each cell's bar and the height of all [px from the top]."""
    at, load, places = 0.0, None, {}
    for row in frame.drop_duplicates("cell_id").to_dict("records"):
        at += _ROW + _HEAD * (row["load"] != load)
        places[row["cell_id"]], load = at - 10, row["load"]
    return places, at + 8


def _hover(row: dict, title: str, what: str) -> str:
    ms = "" if pd.isna(row["ms"]) else f", {words.significant(row['ms'])} ms a step"
    return f"{title}: {words.percent(row['share'] / 100)} of the step time{ms}<br>{what}"


def drawing(run: Run) -> Drawing | None:
    """None where no server splits its step time."""
    frame = step_time(run)
    if frame.empty:
        return None
    caption = "All steps of all repeats. The table has the parts under 6 %, and hashing pages for the prefix cache."
    width = room_for_labels(_label(parts) for _, parts in frame.groupby("cell_id"))
    return Drawing("step-time", _title(frame), caption, step_time_figure(frame), width)


def _title(frame: pd.DataFrame) -> str:
    """What most of the time went into, and how much scheduling took at most."""
    frame = frame[frame["valid"]] if frame["valid"].any() else frame
    shares = frame.pivot_table(index="cell_id", columns="phase", values="share", observed=True) / 100
    largest = str(shares.mean().idxmax())
    low, high = (words.percent(pick) for pick in (shares[largest].min(), shares[largest].max()))
    text = f"{words.upper_first(PHASES[largest][0])} takes {low if low == high else f'{low[:-2]}–{high}'} of step time"
    return text if largest == "schedule" else f"{text}; scheduling at most {words.percent(shares['schedule'].max())}"


def step_time_table(run: Run) -> Table:
    """The same shares a cell, with ms a step, and hashing where there is any; empty where no server tells."""
    cells = [cell for cell in run.by_load if phase_seconds(cell)]
    every = [
        *identity_columns(),
        number_column("steps", "steps", "of all repeats", lambda c: c.counter("steps_total"), words.count),
        number_column("step_ms", "ms a step", "of all repeats", _whole, words.milliseconds),
        *(_column(phase) for phase in PHASES),
        number_column(
            "hash_share", "hashing", "hashing pages for the prefix cache, within schedule and output",
            lambda c: share_of_steps(c, "hash_seconds"), words.percent,
        ),
    ]  # fmt: skip
    shown = [c for c in every if c.key not in ("move", "hash_share") or any(c.of(cell).sort for cell in cells)]
    return cell_table(shown, cells, {"configuration", "load"}) if cells else Table((), ())


def _whole(cell: MeasuredCell) -> float | None:
    return ms_a_step(cell, sum(phase_seconds(cell).values()))


def _column(phase: str) -> Column:
    title, what, *_ = PHASES[phase]

    def of(cell: MeasuredCell) -> Value:
        seconds = phase_seconds(cell)
        share, ms = seconds[phase] / sum(seconds.values()), ms_a_step(cell, seconds[phase])
        return Value(words.percent(share), share, "" if ms is None else f"{words.significant(ms)} ms")

    return Column(phase, title, what, of)
