"""Each configuration's effect in engine time, beside what was served over HTTP."""

from __future__ import annotations

from collections.abc import Iterable

from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import figure
from kvbench.report import tables
from kvbench.report.comparisons import ITL, JUDGED, THROUGHPUT, TTFT, Comparisons, signed_interval
from kvbench.report.tables import NONE, ReportTable, Row, Section, Value
from kvbench.report.wording import say
from kvbench.runs.engine_time import EngineTime

_HEADS = ("output tok/s (whole run)", *(figure(metric).title for metric in (TTFT, ITL)), "served output tok/s")


def section(table: ReportTable, measured: EngineTime | None) -> Section:
    """The table of engine time with its note."""
    return Section("engine_time", "Engine time", table, engine_time_note(measured) if measured else "")


def engine_time_table(comparisons: Comparisons, measured: EngineTime | None) -> ReportTable:
    """One row a configuration and load, the highest load first; no rows where nothing was measured in engine time.

    Cells that no load over HTTP has finished come last, by their ids.
    """
    rows = []
    cells = {cell.cell_id: cell for cell in comparisons.by_load}
    for cell_id in dict.fromkeys([*cells, *(effect.cell for effect in measured.effects)]) if measured else ():
        effects = [measured.of(cell_id, metric) for metric in JUDGED]
        if not any(effects):
            continue
        values = list(map(_value, effects))
        cell = cells.get(cell_id)
        if cell is None:
            rows.append(Row(None, (*tables.texts(cell_id), NONE, *values, NONE), "not served"))
            continue
        base = comparisons.baselines[cell.load]
        ratio = tables.ratio_value(comparisons.as_served(cell, THROUGHPUT), cell, base)
        load = Value(cell.load.short, cell.load.value)
        rows.append(Row(cell, (*tables.texts(cell.name), load, *values, ratio), cell.load))
    return tables.listed_table(("configuration", "load", *_HEADS), rows)


def _value(effect: Comparison | None) -> Value:
    if effect is None:
        return NONE
    call = effect.call.value
    if effect.call == Call.UNDECIDED and effect.smallest is not None:
        call += say("engine_time.would_show", size=100 * effect.smallest)
    change = f"{100 * (effect.ratio - 1):+.1f} %"
    return tables.entry(effect.ratio, change, signed_interval(effect), call, mark=tables.mark_of(effect.call))


def engine_time_note(measured: EngineTime) -> str:
    """Says how it was measured and what limits it."""
    effects = [effect.comparison for effect in measured.effects]
    launches = max(effect.n for effect in effects)
    turns = measured.turns.values()
    costs = [turn.cold_cost for turn in turns if turn.cold_cost is not None]
    lengths = _lengths(turn.turn_steps for turn in turns)
    first = _lengths(turn.first_turn_steps for turn in turns)
    visible = [e.smallest for e in effects if e.metric == THROUGHPUT and e.smallest is not None]
    ends = dict.fromkeys(f"{100 * end:.1f}" for end in (min(visible), max(visible))) if visible else ()
    times = say("engine_time.launches", n=launches)
    beside = say("engine_time.side_by_side", measured.at_once > 1, n=measured.at_once)
    own = say("engine_time.own_processes", measured.own_processes)
    longer = say("engine_time.first_turns", first not in ("", lengths), steps=first)
    sentences = {
        say("engine_time.unfinished", launches=times): not measured.finished,
        say("engine_time.turns", launches=times + beside, steps=lengths, first=longer, own=own): True,
        say("engine_time.left_out", measured.asynchronous): measured.own_processes,
        say("engine_time.one_launch"): launches == 1,
        say("engine_time.cost", percent=100 * max(0.0, *costs, 0.0)): costs,
        say("engine_time.smallest", sizes=" to ".join(ends)): ends,
        **{f"{note}.": True for note in measured.notes},
        say("engine_time.beside"): True,
    }
    return " ".join(text for text, holds in sentences.items() if holds)


def _lengths(counts: Iterable[int | None]) -> str:
    """Lists how many steps turns had, ascending."""
    return " or ".join(str(steps) for steps in sorted({steps for steps in counts if steps is not None}))
