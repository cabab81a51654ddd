"""The report on a terminal of 80 columns: the table of all cells, and the effects in engine time."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from kvbench.common.console import make_table
from kvbench.effects.comparison import Call, Comparison
from kvbench.report.cells import served_words
from kvbench.report.comparisons import THROUGHPUT, TTFT, WHOLE_RUN, interval, leaders
from kvbench.report.document import Document
from kvbench.report.limits import UNKNOWN
from kvbench.report.provenance import on_what
from kvbench.report.tables import MEDIANS, Value
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

_HEADS = {
    "configuration": "configuration",
    "output_tokens_per_s": "tok/s",
    "ratio": "ratio",
    "ttft_ms_p95": "p95 TTFT",
    "tpot_ms_p50": "TPOT",
    "running_mean": "run",
    "preemptions": "preempt",
    "failed": "fail",
}
DROP_FIRST = ("run", "preempt", "TPOT")  # on a narrow terminal
_MARKS = {"best": "•", "not_told": "◦", "whole": "†", "medians": "‡"}
_CALL_MARKS = {Call.LEVEL: _MARKS["best"], Call.UNDECIDED: _MARKS["not_told"]}
_WITH_MARKS = ("ratio", "output_tokens_per_s", "ttft_ms_p95", "tpot_ms_p50")
_STYLES = {"better": "green", "worse": "red"}
_NAME_WIDTH = 17


def console_table(report: Document) -> Table:
    """The columns that fit 80 characters; markup in names is shown, not interpreted.

    Print it with ``print_table(..., drop_first=DROP_FIRST)``.
    """
    table, run, by_load = report.cells, report.decision.run, report.decision.comparisons.by_load
    shown = [(i, column.key) for i, column in enumerate(table.columns) if column.key in _HEADS]
    heads = [_HEADS[key] for _, key in shown]
    device = say("terminal.simulated", bool(run.simulated), device=on_what(run))
    title = say("terminal.title", workload=run.workload, device=device, run=run.folder.name)
    made = make_table(heads, title=title, tight=True)
    for column, head in zip(made.columns, heads, strict=True):
        column.min_width = len(head)
    made.columns[0].min_width = _NAME_WIDTH
    best = {load: leaders(report.decision.comparisons.at(load)) for load in report.decision.comparisons.loads}
    marked = {key for columns in best.values() for key, calls in columns.items() if calls}
    load = None
    for row, cell in zip(table.rows, by_load, strict=True):
        if cell.load != load:
            if load is not None:
                made.add_section()
            load = cell.load
            made.add_row(Text(load.short, style="bold"))
        entries = {key: _entry(key, row.values[i], cell) for i, key in shown}
        for key in marked & entries.keys():  # others get a blank, so that digits stay below each other
            call = best[load][key].get(cell.name)
            entries[key].append(_CALL_MARKS.get(call, " "))
            if call == Call.LEVEL:
                entries[key].stylize("bold")
        made.add_row(*entries.values())
    made.caption, made.caption_justify = _caption(made, by_load), "left"
    return made


def first_lines(report: Document) -> list[str]:
    """The first sentence, the answers with their numbers below them, the limits, and the next step."""
    lines = [report.verdict]
    for answer in report.answers:
        lines += [say("terminal.answer", subject=answer.subject, text=answer.text)]
        lines += [say("terminal.numbers", numbers=answer.numbers)]
    named = (line for line in report.limits if line.limit != UNKNOWN)
    lines += [say("terminal.limit", load=line.load, limit=line.limit, names=line.names) for line in named]
    for step in report.next_steps[:1]:
        lines.append(say("terminal.next", bool(step.command), why=step.why, command=step.command))
    return lines


def _caption(table: Table, cells: Sequence[MeasuredCell]) -> Text | None:
    """The meaning of the marks in ``table``, a line each; None without marks."""
    entries = "".join(str(entry) for column in table.columns for entry in column.cells)
    lines = [Text(say("terminal.mark", name, mark=mark)) for name, mark in _MARKS.items() if mark in entries]
    wrong = [cell for cell in cells if cell.wrong_answers]
    refused = [cell for cell in cells if cell.doubt == "refused"]
    doubts = [say("terminal.wrong", name=c.name, where=c.load.short, why=c.wrong_answers[0]) for c in wrong]
    doubts += [say("terminal.refused", name=c.name, where=c.load.short, served=served_words(c)) for c in refused]
    doubts += [say("terminal.invalid", any(cell.doubt == "invalid" for cell in cells))]
    lines += [Text(text, style="red") for text in doubts if text]
    return Text("\n").join(lines) if lines else None


def _entry(key: str, value: Value, cell: MeasuredCell) -> Text:
    """The text of an entry in its colour, with the mark of what its small lines say."""
    text, notes = value.text, value.note.split("\n")
    if key == "configuration":
        text = say("terminal.name", cell.valid, name=text)  # a mark behind a long name would be cut off
    if key == "ratio" and "–" in notes[0]:
        text += f" ({notes[0]})"
    if key in _WITH_MARKS:
        text += _MARKS["whole"] * (WHOLE_RUN in notes)
        text += _MARKS["medians"] * any(note.startswith(MEDIANS) for note in notes)
    if key == "failed":
        text = text.split(" ")[0]
    return Text(text, style=_STYLES.get(value.mark, ""))


def engine_time_console(report: Document) -> Table | None:
    """The change of output tokens/s and p95 TTFT for a terminal of 80 columns; None without it."""
    table, measured = report.engine_time, report.decision.run.engine_time
    if not table.rows or measured is None:
        return None
    title = say("terminal.engine_time", measured.finished)
    made = make_table(("configuration", "tok/s", "p95 TTFT"), title=title, tight=True)
    made.columns[0].min_width = _NAME_WIDTH
    group = None
    for row in table.rows:
        if row.group != group:
            group = row.group
            made.add_row(Text(row.cell.load.short if row.cell else say("terminal.not_served"), style="bold"))
        cell_id = row.cell.cell_id if row.cell else row.values[0].text
        effects = [measured.of(cell_id, metric) for metric in (THROUGHPUT, TTFT)]
        made.add_row(Text(f"  {row.values[0].text}"), *map(_engine_effect, effects))
    made.caption, made.caption_justify = Text(say("terminal.whole_run")), "left"
    return made


def _engine_effect(effect: Comparison | None) -> Text:
    """Writes ``+13.2 (+12.9 to +13.6) ahead``."""
    if effect is None:
        return Text("–")
    low, high = _change(effect.low or 1.0), _change(effect.high or 1.0)
    bounds = say("terminal.bounds", bool(interval(effect)), low=low, high=high)
    return Text(f"{_change(effect.ratio)}{bounds} {effect.call.value}", style=_STYLES.get(effect.call, ""))


def _change(ratio: float) -> str:
    """Writes ``+13.2``; whole numbers from 100 on."""
    percent = round(100 * (ratio - 1), 1) + 0.0  # no -0.0
    return f"{percent:+.{int(abs(percent) < 100)}f}"
