"""The table a sweep ends with, for a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from kvbench.report.tables import Value, columns, rows
from kvbench.runs.model import MeasuredCell, Run

HEADS = {
    "configuration": "configuration",
    "output_tokens_per_s": "tok/s",
    "ratio": "ratio",
    "ttft_ms_p95": "p95 TTFT",
    "tpot_ms_p50": "TPOT",
    "running_mean": "run",
    "preemptions": "preempt",
    "failed": "fail",
}
STYLES = {"better": "green", "worse": "red"}


def table(run: Run) -> Table:
    """The columns that fit 80 characters; markup in names is shown, not interpreted."""
    shown = [(i, column) for i, column in enumerate(columns(run)) if column.key in HEADS]
    made = Table(
        title=Text(f"{run.workload} · {run.folder.name} · latencies in ms"),
        title_justify="left",
        header_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 0),
        collapse_padding=True,
    )
    for _, column in shown:
        first = column.key == "configuration"
        made.add_column(
            HEADS[column.key],
            justify="left" if first else "right",
            no_wrap=not first,
            min_width=17 if first else len(HEADS[column.key]),
            overflow="fold",
        )
    load = None
    for row in rows(run):
        if row.cell.load != load:
            if load is not None:
                made.add_section()
            load = row.cell.load
            made.add_row(Text(load.short, style="bold"))
        made.add_row(*(_entry(column.key, row.values[i], row.cell) for i, column in shown))
    if any(not cell.valid for cell in run.cells):
        made.caption = Text("! invalid measurement", style="red")
        made.caption_justify = "left"
    return made


def _entry(key: str, value: Value, cell: MeasuredCell) -> Text:
    text = value.text
    if key == "configuration":
        text = f"{' ' if cell.valid else '!'} {value.text}"  # before the name: behind a long one it would be cut off
    if key == "ratio" and "–" in value.note:
        text += f" ({value.note})"
    if key == "failed":
        text = text.split(" ")[0]
    return Text(text, style=STYLES.get(value.mark, ""))
