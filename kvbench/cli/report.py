"""``kvbench report``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.common.errors import UsageError, say

if TYPE_CHECKING:
    from rich.console import Console


@click.command()
@click.argument("run_dir", type=click.Path(path_type=Path))
@click.option("--output-dir", type=click.Path(path_type=Path), help="Where the files go (default: RUN_DIR).")
@click.option("--png", flag_value="main", help="Also write the main figures as PNG files (needs kaleido and a Chrome).")
@click.option("--png-all", "png", flag_value="all", help="Also write every figure as a PNG file.")
def report(run_dir: Path, output_dir: Path | None, png: str | None) -> int:
    """Write the report of a run again from its stored results, and print table and conclusion.

    A report is not replaced if files of the run are gone or damaged: the new one would say less.

    \b
    Example:
      kvbench report results/mixed/20260101T120000Z-1a2b3c4
      kvbench report results/mixed/20260101T120000Z-1a2b3c4 --png
    \b
    Files written in --output-dir: report.html (works offline), report.md, summary.csv (one row a cell); with --png
    effects, frontier and KV over time, each as <figure>.png.
    Exit codes: 0 written, 2 not a run folder, or files are gone and a report is there, or no PNG file can be made.
    """
    from rich.console import Console

    from kvbench.common.files import check_output_dir
    from kvbench.runs.folder import RunFolder

    if output_dir:
        check_output_dir(output_dir)
    if RunFolder(run_dir).is_locked():
        say(f"note: {run_dir} is being measured: this is a report of what is there now")
    try:
        show_report(run_dir, Console(), output_dir, png)
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0


def show_report(run_dir: Path, console: Console, output_dir: Path | None = None, png: str | None = None) -> None:
    """Write report.html, report.md and summary.csv; print table, conclusion and paths. Raises ValueError.

    ``png``: also write the "main" figures or "all" as PNG files.
    """
    from kvbench.common.console import print_plain, print_table
    from kvbench.report.engine_time import engine_time_console
    from kvbench.report.kv import kv_bottleneck
    from kvbench.report.outputs import DROP_FIRST, console_table, write_report
    from kvbench.report.wording import headline, sensitivity
    from kvbench.runs.read import read_run

    run = read_run(run_dir)
    paths, full = [], None
    try:
        paths = write_report(run, output_dir or run_dir)
    except OSError as error:  # a full disk must not take the figures away
        full = error
    print_table(console, console_table(run), drop_first=DROP_FIRST)
    if (engine_time := engine_time_console(run)) is not None:
        print_table(console, engine_time)
    for sentence in filter(None, (headline(run), kv_bottleneck(run), sensitivity(run))):
        print_plain(console, sentence)
    for sentence in run.damaged:
        print_plain(console, f"note: {sentence}")
    if full:
        raise full
    for path in paths:
        print_plain(console, f"report: {path}")
    if png:
        from kvbench.report.figures.cells import drawings
        from kvbench.report.png import main_drawings, write_pngs

        drawn = drawings(run)
        for path in write_pngs(drawn if png == "all" else main_drawings(drawn), output_dir or run_dir):
            print_plain(console, f"figure: {path}")
