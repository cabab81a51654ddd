"""What the engine's steps took: scheduling, preparing, moving KV, executing, sampling, output; simulated ones too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd
import plotly.graph_objects as go

from kvbench.common import text as words
from kvbench.report.style import Drawing, compact, finish, hatch, label_above, legend_outside, room_for_labels
from kvbench.report.tables import (
    NO_TABLE,
    Column,
    Part,
    ReportTable,
    Section,
    Value,
    cell_table,
    identity_columns,
    number_column,
)
from kvbench.runs.kv_ledger import share_of_steps
from kvbench.runs.metric_names import SIMULATED_SECONDS
from kvbench.runs.model import MeasuredCell

SIMULATED_TIME_NOTE = (
    "Shares of the time of all steps. gemm: projections of attention and MLP; experts: routed experts; attention: with "
    "the write of KV; elementwise: norms, rotary embedding, activation; all-reduce: between the GPUs of a model; head: "
    "logits and sampling; move: swaps and copies of KV; host: what the CPU adds to a step."
)
PHASES = {  # key -> title, what it is, colour, pattern; in the order of a step
    "schedule": ("schedule", "choosing what runs, giving out pages", "#009E73", "/"),
    "prepare": ("prepare", "building the step's inputs", "#E69F00", "\\"),
    "move": ("move KV", "copies on write and swaps, within prepare", "#D55E00", "x"),
    "execute": ("execute", "the model", "#0072B2", ""),
    "sample": ("sample", "choosing tokens", "#56B4E9", "."),
    "output": ("output", "growing, finishing and freeing sequences", "#CC79A7", "-"),
}
_LEAST_LABELLED = 6  # percent of the bar: a narrower part has no room for its percentage
_ROW, _HEAD = 40, 34  # px a bar, and above the first of a load


def phase_seconds(cell: MeasuredCell) -> dict[str, float]:
    """Seconds of all steps of all repeats by phase (PHASES); empty where the server does not count them.

    What moving KV took is taken out of "prepare", which counts it as well.
    """
    counted = {phase: cell.counter(f"step_time_seconds_total_{phase}") for phase in PHASES if phase != "move"}
    seconds = {phase: counted.get(phase) or 0.0 for phase in PHASES}
    if not sum(seconds.values()):
        return {}
    moved = min(cell.counter("swap_seconds_total") or 0.0, seconds["prepare"])
    return seconds | {"move": moved, "prepare": seconds["prepare"] - moved}


def _ms_a_step(cell: MeasuredCell, seconds: float) -> float | None:
    """``seconds`` of all repeats in ms a step; None where steps are not counted."""
    steps = cell.counter("steps_total")
    return seconds * 1000 / steps if steps else None


def step_time(cells: Sequence[MeasuredCell]) -> pd.DataFrame:
    """The split of each cell's step time, in their order; a row a phase of a cell.

    cell_id, configuration, valid, load: the cell
    phase: one of PHASES
    share: of the time of all steps, 0 to 100 %
    ms: a step; NaN where steps are not counted
    """
    rows = []
    for cell in cells:
        seconds = phase_seconds(cell)
        total = sum(seconds.values())
        named = (cell.cell_id, cell.marked_name, cell.valid, cell.load.short)
        rows += [(*named, phase, spent / total * 100, _ms_a_step(cell, spent)) for phase, spent in seconds.items()]
    columns = ["cell_id", "configuration", "valid", "load", "phase", "share", "ms"]
    return pd.DataFrame(rows, columns=columns).astype({"share": float, "ms": float})


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
            marker={"color": colour, "line": {"width": 0}, "pattern": hatch(pattern, 0.2)},
            text=[f"{share:.0f} %" if share >= _LEAST_LABELLED else "" for share in rows["share"]],
            textposition="inside",
            insidetextanchor="middle",
            textangle=0,
            textfont={"size": 11},
            constraintext="none",
            hovertext=[_hover(row.share, row.ms, title, what) for row in rows.itertuples()],
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
    return figure.update_layout(barmode="stack", margin={"t": 24, "b": 52, "l": 16, "r": 40})


def _label(parts: pd.DataFrame) -> str:
    """The configuration, and how long its steps are if that is known."""
    whole, name = parts["ms"].sum(min_count=1), str(parts["configuration"].iloc[0])
    return name if pd.isna(whole) else f"{name} · {words.significant(whole)} ms a step"


def _places(frame: pd.DataFrame) -> tuple[dict[str, float], float]:
    """The middle of each cell's bar and the height of all [px from the top]."""
    at, load, places = 0.0, None, {}
    for row in frame.drop_duplicates("cell_id").itertuples():
        at += _ROW + _HEAD * (row.load != load)
        places[row.cell_id], load = at - 10, row.load
    return places, at + 8


def _hover(share: float, ms: float, title: str, what: str) -> str:
    length = "" if pd.isna(ms) else f", {words.significant(ms)} ms a step"
    return f"{title}: {words.percent(share / 100)} of the step time{length}<br>{what}"


def engine_parts(cells: Sequence[MeasuredCell]) -> Iterator[Part]:
    """The chapter on the engine's steps: figure and tables."""
    yield drawing(cells)
    table = simulated_time_table(cells)
    yield Section("simulated_time", "Where the simulated time goes", table, SIMULATED_TIME_NOTE, folded=False)
    yield Section("steps", "Step time", step_time_table(cells))


def drawing(cells: Sequence[MeasuredCell]) -> Drawing | None:
    """None where no server splits its step time."""
    frame = step_time(cells)
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
    low, high = words.percent(shares[largest].min()), words.percent(shares[largest].max())
    text = f"{words.upper_first(PHASES[largest][0])} takes {low if low == high else f'{low[:-2]}–{high}'} of step time"
    return text if largest == "schedule" else f"{text}; scheduling at most {words.percent(shares['schedule'].max())}"


def step_time_table(every_cell: Sequence[MeasuredCell]) -> ReportTable:
    """The same shares a cell, with ms a step, and hashing where there is any; empty where no server tells."""
    cells = [cell for cell in every_cell if phase_seconds(cell)]

    def whole(cell: MeasuredCell) -> float | None:
        return _ms_a_step(cell, sum(phase_seconds(cell).values()))

    def hashing(cell: MeasuredCell) -> float | None:
        return share_of_steps(cell, "hash_seconds")

    hint = "hashing pages for the prefix cache, within schedule and output"
    every = [
        *identity_columns(),
        number_column("steps", "steps", "of all repeats", lambda c: c.counter("steps_total"), words.count),
        number_column("step_ms", "ms a step", "of all repeats", whole, words.milliseconds),
        *(_column(phase) for phase in PHASES),
        number_column("hash_share", "hashing", hint, hashing, words.percent),
    ]
    shown = [c for c in every if c.key not in ("move", "hash_share") or any(c.of(cell).sort for cell in cells)]
    return cell_table(shown, cells, {"configuration", "load"}) if cells else NO_TABLE


def _column(phase: str) -> Column:
    title, what, *_ = PHASES[phase]

    def value(cell: MeasuredCell) -> Value:
        seconds = phase_seconds(cell)
        share, ms = seconds[phase] / sum(seconds.values()), _ms_a_step(cell, seconds[phase])
        return Value(words.percent(share), share, "" if ms is None else f"{words.significant(ms)} ms")

    return Column(phase, title, what, value)


def simulated_time_table(every_cell: Sequence[MeasuredCell]) -> ReportTable:
    """The shares of the simulated time of each cell's steps by what they compute; empty for a measured run."""
    seconds = {}
    for cell in every_cell:
        counters = {name for repeat in cell.repeats for name in repeat.server if name.startswith(SIMULATED_SECONDS)}
        parts = {name.removeprefix(SIMULATED_SECONDS): cell.counter(name) or 0.0 for name in sorted(counters)}
        if sum(parts.values()):
            seconds[cell.cell_id] = parts
    names = dict.fromkeys(name for parts in seconds.values() for name, spent in parts.items() if spent)

    def column(name: str) -> Column:
        def share(cell: MeasuredCell) -> float | None:
            parts = seconds[cell.cell_id]
            return parts.get(name, 0.0) / sum(parts.values())

        return number_column(name, name.replace("_", "-"), "share of the time of all steps", share, words.percent)

    cells = [cell for cell in every_cell if cell.cell_id in seconds]
    return cell_table([*identity_columns(), *map(column, names)], cells, {"configuration", "load"})
