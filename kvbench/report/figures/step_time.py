"""The parts of the engine's steps, also of simulated ones: schedule, prepare, move KV, execute, sample, output."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pandas as pd

from kvbench.common import text as words
from kvbench.report import tables
from kvbench.report.figures.bars import COLUMNS, BarPart, bars
from kvbench.report.style import PAGED, Drawing, room_for_labels
from kvbench.report.tables import Column, Part, ReportTable, Section, Value
from kvbench.report.wording import say
from kvbench.runs.kv_ledger import share_of_steps
from kvbench.runs.metric_names import SIMULATED_SECONDS
from kvbench.runs.model import MeasuredCell

PHASES = {  # in the order of a step; what each is: ``tables.hint`` in the file of sentences
    "schedule": BarPart("schedule", "#009E73", "/"),
    "prepare": BarPart("prepare", "#E69F00", "\\"),
    "move": BarPart("move KV", "#D55E00", "x"),
    "execute": BarPart("execute", PAGED),
    "sample": BarPart("sample", "#56B4E9", "."),
    "output": BarPart("output", "#CC79A7", "-"),
}


def phase_seconds(cell: MeasuredCell) -> dict[str, float]:
    """Returns seconds of all steps of all repeats by phase (PHASES); empty where the server does not count them.

    What moving KV took is taken out of "prepare", which counts it as well.
    """
    seconds = {phase: cell.counter(f"step_time_seconds_total_{phase}") or 0.0 for phase in PHASES if phase != "move"}
    if not sum(seconds.values()):
        return {}
    moved = min(cell.counter("swap_seconds_total") or 0.0, seconds["prepare"])
    seconds |= {"move": moved, "prepare": seconds["prepare"] - moved}
    return {phase: seconds[phase] for phase in PHASES}


def _ms_a_step(cell: MeasuredCell, seconds: float) -> float | None:
    """Spreads the ``seconds`` of all repeats over the steps [ms]; None where steps are not counted."""
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


def engine_parts(cells: Sequence[MeasuredCell]) -> Iterator[Part]:
    """The chapter on the engine's steps: its tables."""
    note = say("step_time.simulated_note")
    yield Section("simulated_time", "Where the simulated time goes", _simulated_table(cells), note, folded=False)
    yield Section("steps", "Step time", step_time_table(cells))


def drawing(cells: Sequence[MeasuredCell]) -> Drawing | None:
    """A bar a cell, with how long its steps are above it; None where no server splits its step time."""
    frame = step_time(cells)
    if frame.empty:
        return None
    rows = []
    for cell, phases in frame.groupby("cell_id", sort=False):
        whole, at = phases["ms"].sum(min_count=1), 0.0
        for row in phases.itertuples():
            title, what = PHASES[row.phase].title, say("tables.hint", row.phase, slo="")
            hover = say("step_time.hover", title=title, share=row.share / 100, ms=row.ms, what=what)
            label = say("step_time.label", name=row.configuration, ms=whole)
            rows.append((cell, label, row.load, row.phase, at, row.share, f"{row.share:.0f} %", hover))
            at += row.share
    shown = pd.DataFrame(rows, columns=COLUMNS)
    figure = bars(shown, PHASES, 100, title_text="share of step time", ticksuffix=" %")
    return Drawing("step-time", _title(frame), say("step_time.caption"), figure, room_for_labels(shown["label"]))


def _title(frame: pd.DataFrame) -> str:
    """Says what most of the time went into, and how much scheduling took at most."""
    frame = frame[frame["valid"]] if frame["valid"].any() else frame
    shares = frame.pivot_table(index="cell_id", columns="phase", values="share", observed=True) / 100
    largest = str(shares.mean().idxmax())
    low, high = words.percent(shares[largest].min()), words.percent(shares[largest].max())
    values = {"phase": PHASES[largest].title, "share": f"{low[:-2]}–" * (low != high) + high}
    return say("step_time.title", largest, scheduling=shares["schedule"].max(), **values)


def step_time_table(every_cell: Sequence[MeasuredCell]) -> ReportTable:
    """The same shares a cell, with ms a step, and the prefix cache; empty where no server tells."""
    seconds = {cell.cell_id: phases for cell in every_cell if (phases := phase_seconds(cell))}

    def phase_column(phase: str) -> Column:
        def value(cell: MeasuredCell) -> Value:
            spent = seconds[cell.cell_id][phase]
            share, ms = spent / sum(seconds[cell.cell_id].values()), _ms_a_step(cell, spent)
            return tables.entry(share, words.percent(share), "" if ms is None else f"{words.significant(ms)} ms")

        return tables.column(phase, PHASES[phase].title, value)

    def whole(cell: MeasuredCell) -> float | None:
        return _ms_a_step(cell, sum(seconds[cell.cell_id].values()))

    columns = [
        *tables.identity_columns(),
        tables.number_column("steps", "steps", lambda cell: cell.counter("steps_total"), words.count),
        tables.number_column("step_ms", "ms a step", whole, words.milliseconds),
        *map(phase_column, PHASES),
        tables.number_column("hash_share", "prefix cache", lambda c: share_of_steps(c, "hash_seconds"), words.percent),
    ]
    return tables.cell_table(columns, [c for c in every_cell if c.cell_id in seconds], not_zero=("move", "hash_share"))


def _simulated_table(every_cell: Sequence[MeasuredCell]) -> ReportTable:
    """The shares of the simulated time of each cell's steps by what they compute; empty for a measured run."""
    seconds = {}
    for cell in every_cell:
        counters = {name for repeat in cell.repeats for name in repeat.server if name.startswith(SIMULATED_SECONDS)}
        parts = {name.removeprefix(SIMULATED_SECONDS): cell.counter(name) or 0.0 for name in sorted(counters)}
        if sum(parts.values()):
            seconds[cell.cell_id] = parts
    names = dict.fromkeys(name for parts in seconds.values() for name, spent in parts.items() if spent)

    def part_column(name: str) -> Column:
        def share(cell: MeasuredCell) -> float | None:
            parts = seconds[cell.cell_id]
            return parts.get(name, 0.0) / sum(parts.values())

        return tables.number_column(name, name.replace("_", "-"), share, words.percent)

    cells = [cell for cell in every_cell if cell.cell_id in seconds]
    return tables.cell_table([*tables.identity_columns(), *map(part_column, names)], cells)
