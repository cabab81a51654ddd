"""Each configuration's effect in engine time, beside what was served over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from kvbench.report.comparisons import baseline, compare
from kvbench.report.tables import Row, Table, Value, listed_table, throughput_ratio
from kvbench.runs.engine_time import EngineEffect
from kvbench.runs.model import Run

_METRICS = {"output_throughput": "output tok/s (whole run)", "p95_ttft_ms": "p95 TTFT", "p95_itl_ms": "p95 ITL"}
_MARKS = {"ahead": "better", "behind": "worse"}
SERVED = "served output tok/s"


def engine_time_table(run: Run) -> Table:
    """One row a configuration and load, the highest load first; no rows where nothing was measured in engine time.

    Cells that no load over HTTP has finished come last, by their ids.
    """
    rows, known = [], run.engine_time
    served = {cell.cell_id: cell for cell in run.by_load}
    in_engine_time = dict.fromkeys(effect.cell for effect in known.effects) if known else {}
    for cell_id in (*served, *(each for each in in_engine_time if each not in served)):
        found = [known.of(cell_id, metric) for metric in _METRICS] if known else []
        if not any(found):
            continue
        cell = served.get(cell_id)
        if cell is None:
            rows.append(Row(None, (Value(cell_id, cell_id), Value("–"), *map(_value, found), Value("–")), "not served"))
            continue
        base = baseline(run, cell.load)
        ratio = throughput_ratio(compare(cell, base)) if base else Value("–")
        shown = (Value(cell.name, cell.name), Value(cell.load.short, cell.load.value), *map(_value, found), ratio)
        rows.append(Row(cell, shown, cell.load))
    return listed_table(("configuration", "load", *_METRICS.values(), SERVED), rows)


def _value(effect: EngineEffect | None) -> Value:
    if effect is None:
        return Value("–")
    note = f"{effect.interval}\n{effect.call}" if effect.interval else effect.call
    if effect.call == "open" and effect.smallest_seen is not None:
        note += f"; a change of {100 * effect.smallest_seen:.1f} % or more would show"
    return Value(f"{100 * (effect.ratio - 1):+.1f} %", effect.ratio, note, _MARKS.get(effect.call, ""))


def engine_time_note(run: Run) -> str:
    """How it was measured and what limits it; empty without it."""
    if run.engine_time is None:
        return ""
    facts, effects = run.engine_time.facts, run.engine_time.effects
    launches = max(effect.launches for effect in effects)
    times = f"{launches} launch{'' if launches == 1 else 'es'}"
    turns = facts.get("turns") or {}
    costs = [each["cold_cost"] for each in turns.values() if each["cold_cost"] is not None]
    lengths, first = (
        " or ".join(str(n) for n in sorted({each[name] for each in turns.values() if name in each}))
        for name in ("turn_steps", "first_turn_steps")
    )
    first = f", in the first launch {first}" if first and first != lengths else ""
    seen = [e.smallest_seen for e in effects if e.metric == "output_throughput" and e.smallest_seen is not None]
    called_open = any(effect.call == "open" for effect in effects)
    notes = (f"{note}." for note in facts.get("notes") or ())
    parts = [
        "" if run.engine_time.finished else f"Unfinished: it was interrupted after {times}.",
        f"Against the baseline; all configurations took turns in one process (steps in a turn: {lengths}{first}). 95 % "
        f"intervals over {times}; level: within 2 %. Each stands alone: of a dozen settings without effect, one is "
        "called ahead or behind in a quarter of such runs.",
        "Open: not decided." if called_open else "",
        "Launches differ by up to 1 %, so nothing is called after one." if launches == 1 else "",
        f"Turns made steps {100 * max(0.0, *costs):.1f} % longer." if costs else "",
        f"The smallest change of output tok/s that it could see: {_range(seen)} %." if seen else "",
        *notes,
        "Beside it the ratio as served.",
    ]
    return " ".join(filter(None, parts))


def _range(shares: Sequence[float]) -> str:
    """In percent; one number where both ends read alike."""
    return " to ".join(dict.fromkeys(f"{100 * end:.1f}" for end in (min(shares), max(shares))))
