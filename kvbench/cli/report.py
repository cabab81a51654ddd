"""``kvbench report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.cli.options import FiniteRange
from kvbench.common.errors import UsageError, say

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where the files go (default: RUN_DIR).")
@click.option("--price-per-hour", type=FiniteRange(min=0, min_open=True), metavar="PRICE",
              help="Of the machine, in any currency: adds the cost of a million output tokens.")  # fmt: skip
def report(run_dir: Path, output_dir: Path | None, price_per_hour: float | None) -> int:
    """Write the report of a run again from its stored results, and print table and conclusion.

    A report is not replaced if files of the run are gone or damaged: the new one would say less.

    \b
    Example:
      kvbench report results/mixed/20260101T120000Z-1a2b3c4
    \b
    Files written in --output-dir: report.html (works offline), report.md, summary.csv (one row a cell).
    Exit codes: 0 written, 2 not a run folder, or files are gone and a report is there.
    """
    from rich.console import Console

    from kvbench.common.files import check_output_dir
    from kvbench.runs.folder import RunFolder

    if output_dir:
        check_output_dir(output_dir)
    if RunFolder(run_dir).is_locked():
        say(f"note: {run_dir} is being measured: this is a report of what is there now")
    try:
        show_report(run_dir, Console(), output_dir, price_per_hour)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0


def show_report(
    run_dir: Path, console: Console, output_dir: Path | None = None, price_per_hour: float | None = None
) -> None:
    """Write report.html, report.md and summary.csv; print table, conclusion and paths. Raises ValueError."""
    from kvbench.common.console import print_plain, print_table
    from kvbench.report.document import document
    from kvbench.report.engine_time import engine_time_console
    from kvbench.report.outputs import DROP_FIRST, console_table, write_report
    from kvbench.runs.read import read_run

    run = read_run(run_dir)
    found = document(run, price_per_hour)
    paths, full = [], None
    try:
        paths = write_report(run, output_dir or run_dir, found)
    except OSError as error:  # a full disk must not take the figures away
        full = error
    print_table(console, console_table(run), drop_first=DROP_FIRST)
    if (engine_time := engine_time_console(run)) is not None:
        print_table(console, engine_time)
    print_plain(console, found.verdict)
    for answer in found.answers:
        print_plain(console, f"  {answer.subject}: {answer.verdict}, {answer.evidence}")
    for line in found.limits:
        print_plain(console, f"  limit at {line.load}: {line.limit} ({line.names})")
    for step in found.next_steps[:1]:
        print_plain(console, f"next: {step.why}{f': {step.command}' if step.command else ''}")
    for sentence in run.damaged:
        print_plain(console, f"note: {sentence}")
    if full:
        raise full
    for path in paths:
        print_plain(console, f"report: {path}")
