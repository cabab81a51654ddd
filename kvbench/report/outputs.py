"""Writes report.html, report.md and summary.csv; makes the table for a terminal."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from kvbench.common.console import make_table
from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.common.text import and_more, csv_cell
from kvbench.report.comparisons import leaders
from kvbench.report.document import Document
from kvbench.report.markdown import markdown
from kvbench.report.page import page
from kvbench.report.simulated import on_what
from kvbench.report.tables import MEDIANS, WHOLE_RUN, Value, flat_rows, main_table
from kvbench.report.wording import NOT_TOLD, served_words
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.ratios import SAME, UNCLEAR

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
_WHOLE, _MEDIANS, _BEST, _NOT_TOLD = "†", "‡", "•", "◦"
_STYLES = {"better": "green", "worse": "red"}


def write_report(run: Run, folder: Path, report: Document) -> list[Path]:
    """Writes the three files of a run's ``report``, after all of them are made.

    Raises UsageError where files of a finished run are gone and a report is there: it may have been made with them.
    """
    paths = [folder / name for name in ("report.html", "report.md", "summary.csv")]
    there = [path for path in paths if path.is_file()]
    samples = [cell.folder / "requests.parquet" for cell in run.cells]
    lost = [] if run.manifest else ["manifest.json is missing"]
    lost += [*run.damaged, *(f"{path} is missing" for path in samples if not path.is_file())]
    if run.manifest.get("status") == "complete":
        lost += [f"cell {cell} is missing" for cell in run.missing]
    if lost and there:
        raise UsageError(
            f"{there[0]} is kept, since a new report would say less ({and_more(lost, 1)}); to write one all the same "
            "give another folder with --output-dir"
        )
    made = (page(run, report), markdown(report), pd.DataFrame(flat_rows(run)).map(csv_cell).to_csv(index=False))
    for path, text in zip(paths, made, strict=True):
        write_text(path, text)
    return paths


def console_table(run: Run) -> Table:
    """The columns that fit 80 characters; markup in names is shown, not interpreted.

    Print it with ``print_table(..., drop_first=DROP_FIRST)``.
    """
    table = main_table(run)
    shown = [(i, column.key) for i, column in enumerate(table.columns) if column.key in _HEADS]
    heads = [_HEADS[key] for _, key in shown]
    what = f"simulated on {on_what(run)} · " if run.simulated else ""
    made = make_table(heads, title=f"{run.workload} · {what}{run.folder.name} · latencies in ms", tight=True)
    for column, head in zip(made.columns, heads, strict=True):
        column.min_width = 17 if column is made.columns[0] else len(head)
    best = {load: leaders(run, load) for load in run.loads}
    marked = {key for columns in best.values() for key, found in columns.items() if found}
    load = None
    for row, cell in zip(table.rows, run.by_load, strict=True):
        if cell.load != load:
            if load is not None:
                made.add_section()
            load = cell.load
            made.add_row(Text(load.short, style="bold"))
        entries = {key: _entry(key, row.values[i], cell) for i, key in shown}
        for key in marked & entries.keys():
            _mark(entries[key], best[load][key].get(cell.name))
        made.add_row(*entries.values())
    made.caption, made.caption_justify = _caption(made, run), "left"
    return made


def _mark(entry: Text, verdict: str | None) -> None:
    """Marks an entry by its ``leaders``; others get a blank, so that the digits of a column stay below each other."""
    entry.append({SAME: _BEST, UNCLEAR: _NOT_TOLD}.get(verdict or "", " "))
    if verdict == SAME:
        entry.stylize("bold")


def _caption(table: Table, run: Run) -> Text | None:
    """What the marks in ``table`` mean, a line each; None without marks."""
    entries = "".join(str(entry) for column in table.columns for entry in column.cells)
    known = {
        _BEST: f"{_BEST} best of its load, or level with the best",
        _NOT_TOLD: f"{_NOT_TOLD} {NOT_TOLD} from the best",
        _WHOLE: f"{_WHOLE} of the whole run: a repeat has no steady window, or for latencies too few requests in it",
        _MEDIANS: f"{_MEDIANS} paired by repeat; the medians shown have visibly another ratio",
    }
    lines = [Text(words) for mark, words in known.items() if mark in entries]
    doubts = [
        f"! WRONG ANSWERS: {cell.name} at {cell.load.short}, {cell.wrong_answers[0]}"
        for cell in run.by_load
        if cell.wrong_answers
    ]
    doubts += [
        f"! {cell.name} at {cell.load.short} {served_words(cell)}" for cell in run.by_load if cell.doubt == "refused"
    ]
    doubts += ["! invalid measurement"] if any(cell.doubt == "invalid" for cell in run.cells) else []
    lines += [Text(words, style="red") for words in doubts]
    return Text("\n").join(lines) if lines else None


def _entry(key: str, value: Value, cell: MeasuredCell) -> Text:
    text, notes = value.text, value.note.split("\n")
    if key == "configuration":
        text = f"{' ' if cell.valid else '!'} {value.text}"  # before the name: behind a long one it would be cut off
    if key == "ratio" and "–" in notes[0]:
        text += f" ({notes[0]})"
    if key in ("ratio", "output_tokens_per_s", "ttft_ms_p95", "tpot_ms_p50"):
        text += _WHOLE * (WHOLE_RUN in notes) + _MEDIANS * any(note.startswith(MEDIANS) for note in notes)
    if key == "failed":
        text = text.split(" ")[0]
    return Text(text, style=_STYLES.get(value.mark, ""))
