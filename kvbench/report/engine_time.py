"""Each configuration's effect in engine time, beside what was served over HTTP."""

from __future__ import annotations

from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import figure
from kvbench.report.comparisons import CALLS, ITL, JUDGED, THROUGHPUT, TTFT, Comparisons, signed_interval
from kvbench.report.tables import ReportTable, Row, Section, Value, listed_table, mark_of, ratio_value, texts
from kvbench.runs.engine_time import EngineTime

_HEADS = ("output tok/s (whole run)", *(figure(metric).title for metric in (TTFT, ITL)), "served output tok/s")


def section(table: ReportTable, known: EngineTime | None) -> Section:
    """The table of engine time with its note."""
    return Section("engine_time", "Engine time", table, engine_time_note(known) if known else "")


def engine_time_table(comparisons: Comparisons, known: EngineTime | None) -> ReportTable:
    """One row a configuration and load, the highest load first; no rows where nothing was measured in engine time.

    Cells that no load over HTTP has finished come last, by their ids.
    """
    rows = []
    cells = {cell.cell_id: cell for cell in comparisons.by_load}
    for cell_id in dict.fromkeys([*cells, *(effect.cell for effect in known.effects)]) if known else ():
        effects = [known.of(cell_id, metric) for metric in JUDGED]
        if not any(effects):
            continue
        if cell_id not in cells:
            rows.append(Row(None, (*texts(cell_id), Value("–"), *map(_value, effects), Value("–")), "not served"))
            continue
        cell = cells[cell_id]
        base = comparisons.baselines[cell.load]
        ratio = ratio_value(comparisons.as_served(cell, THROUGHPUT), cell, base) if base else Value("–")
        load = Value(cell.load.short, cell.load.value)
        rows.append(Row(cell, (*texts(cell.name), load, *map(_value, effects), ratio), cell.load))
    return listed_table(("configuration", "load", *_HEADS), rows)


def _value(effect: Comparison | None) -> Value:
    if effect is None:
        return Value("–")
    note = CALLS[effect.call]
    if bounds := signed_interval(effect):
        note = f"{bounds}\n{note}"
    if effect.call == Call.UNDECIDED and effect.smallest is not None:
        note += f"; a change of {100 * effect.smallest:.1f} % or more would show"
    return Value(f"{100 * (effect.ratio - 1):+.1f} %", effect.ratio, note, mark_of(effect.call))


def engine_time_note(known: EngineTime) -> str:
    """The note on how it was measured and what limits it."""
    effects = [effect.comparison for effect in known.effects]
    launches = max(effect.n for effect in effects)
    times = f"{launches} launch{'' if launches == 1 else 'es'}"
    turns = known.turns.values()
    costs = [turn.cold_cost for turn in turns if turn.cold_cost is not None]
    lengths, first = (
        " or ".join(str(n) for n in sorted({steps for steps in counts if steps is not None}))
        for counts in ([turn.turn_steps for turn in turns], [turn.first_turn_steps for turn in turns])
    )
    first = f", in the first launch {first}" if first and first != lengths else ""
    seen = [e.smallest for e in effects if e.metric == THROUGHPUT and e.smallest is not None]
    smallest = " to ".join(dict.fromkeys(f"{100 * end:.1f}" for end in (min(seen), max(seen)))) if seen else ""
    parts = [
        "" if known.finished else f"Unfinished: it was interrupted after {times}.",
        f"Against the baseline; all configurations took turns in one process (steps in a turn: {lengths}{first}). 95 % "
        f"intervals over {times}; level: within 2 %. Each stands alone: of a dozen settings without effect, one is "
        "called ahead or behind in a quarter of such runs.",
        "Open: not decided." if any(not effect.decided for effect in effects) else "",
        "Launches differ by up to 1 %, so nothing is called after one." if launches == 1 else "",
        f"Turns made steps {100 * max(0.0, *costs):.1f} % longer." if costs else "",
        f"The smallest change of output tok/s that it could see: {smallest} %." if smallest else "",
        *(f"{note}." for note in known.notes),
        "Beside it the ratio as served.",
    ]
    return " ".join(filter(None, parts))
