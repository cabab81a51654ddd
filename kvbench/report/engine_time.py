"""Each configuration's effect in engine time, beside what was served over HTTP."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table as ConsoleTable

from kvbench.common.console import make_table
from kvbench.report.comparisons import baseline, compare
from kvbench.report.tables import Column, Row, Table, Value, ratio_value
from kvbench.runs.engine_time import EngineEffect
from kvbench.runs.model import Run

_METRICS = {"output_throughput": "output tok/s", "p95_ttft_ms": "p95 TTFT", "p95_itl_ms": "p95 ITL"}
_MARKS = {"ahead": "better", "behind": "worse"}
SERVED = "served output tok/s"


def engine_time_table(run: Run) -> Table:
    """One row a configuration and load, the highest load first; no rows where nothing was measured in engine time."""
    rows = []
    for cell in run.by_load:
        base = baseline(run, cell.load)
        found = [run.engine_time.of(cell.cell_id, metric) for metric in _METRICS] if run.engine_time else []
        if any(found):
            served = ratio_value(compare(cell, base).throughput) if base else Value("–")
            shown = (Value(cell.name, cell.name), Value(cell.load.short, cell.load.value), *map(_value, found), served)
            rows.append(Row(cell, shown, cell.load))
    heads = ("configuration", "load", *_METRICS.values(), SERVED)
    return Table(tuple(Column(head, head) for head in heads), tuple(rows))


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
    turns = facts.get("turns") or {}
    costs = [each["cold_cost"] for each in turns.values() if each["cold_cost"] is not None]
    lengths, first = (
        " or ".join(str(n) for n in sorted({each[name] for each in turns.values() if name in each}))
        for name in ("turn_steps", "first_turn_steps")
    )
    first = f", in the first launch {first}" if first and first != lengths else ""
    seen = [e.smallest_seen for e in effects if e.metric == "output_throughput" and e.smallest_seen is not None]
    parts = [
        "Change against the baseline in the engine's own time, without HTTP and load client: all configurations took "
        f"turns in one process, so all met the same speed of the machine (steps in a turn: {lengths}{first}). 95 % "
        f"intervals over {launches} launch{'' if launches == 1 else 'es'}: of throughput for the requests of the first "
        "repeat, of a p95 also for other requests of their kind; level: within 2 %. Each interval stands alone: of a "
        "dozen settings without effect, one is called ahead or behind in about a quarter of such runs.",
        "Launches differ by up to 1 %, so nothing is called after one." if launches == 1 else "",
        f"A turn's steps took {100 * max(0.0, *costs):.1f} % longer than the late ones of a long one." if costs else "",
        f"The smallest change of output tok/s that it could see: {_range(seen)} %." if seen else "",
        *(f"{note}." for note in facts.get("notes") or ()),
        "Beside it the ratio that was served over HTTP, from the repeats above.",
    ]
    return " ".join(filter(None, parts))


def _range(shares: Sequence[float]) -> str:
    """In percent; one number where both ends read alike."""
    return " to ".join(dict.fromkeys(f"{100 * end:.1f}" for end in (min(shares), max(shares))))


def engine_time_console(run: Run) -> ConsoleTable | None:
    """The change of output tokens/s and p95 TTFT for a terminal; None without it."""
    table = engine_time_table(run)
    if not table.rows:
        return None
    heads = ("configuration", "load", "tok/s", "p95 TTFT")
    rows = [[_in_one_line(value) for value in row.values[: len(heads)]] for row in table.rows]
    return make_table(heads, rows, numbers_from=2, title="against the baseline, engine time", tight=True)


def _in_one_line(value: Value) -> str:
    return value.text + (f" ({value.note.splitlines()[0]})" if value.note else "")
