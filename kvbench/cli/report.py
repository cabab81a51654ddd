"""``kvbench report``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.common.errors import UsageError, as_usage_error, say
from kvbench.common.options import Options, Positive, argument, option, switch, takes

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class ReportRequest(Options):
    """The request of ``kvbench report``."""

    run_dirs: tuple[Path, ...] = argument("RUN_DIR")
    output_dir: Path | None = option("The folder that the files go to (default: the last RUN_DIR).")
    price_per_hour: Positive | None = option(
        "What the machine costs an hour, in any currency: adds the cost of a million output tokens.", metavar="PRICE"
    )
    png: bool = switch("Also write the main figures as PNG files (needs kaleido and a Chrome).")
    png_all: bool = switch("Also write every figure as a PNG file.")


@takes(ReportRequest)
def report(request: ReportRequest) -> int:
    """Write the report of a run again, from stored results.

    Then print table and conclusion.

    A report is not replaced if files of the run are gone or damaged: the new one would say less. Of two to six
    runs, the cells that all have are put side by side instead: how the runs differ, what cannot be compared, and the
    others' effects against the first. Runs of different engines match by load and the settings that they vary.

    \b
    Examples:
      kvbench report results/mixed/20260101T120000Z-1a2b3c4
      kvbench report results/mixed/20260101T120000Z-1a2b3c4 results/mixed/20260108T120000Z-5d6e7f8
      kvbench report results/mixed/20260101T120000Z-1a2b3c4 --png
    \b
    Files written in --output-dir: report.html (works offline), report.md, summary.csv (one row a cell); with
    --png effects, frontier and KV over time, each as <figure>.png; of several runs compare.html and compare.md.
    Exit codes: 0 written, 2 not a run folder, files are gone and a report is there, no PNG file can be made, or
    runs that share no cell.
    """
    from rich.console import Console

    from kvbench.common.files import check_output_dir
    from kvbench.runs.folder import RunFolder

    run_dirs, output_dir = request.run_dirs, request.output_dir
    png = "all" if request.png_all else "main" if request.png else None
    if len(run_dirs) > 1 and (png or request.price_per_hour):
        raise UsageError("--png, --png-all and --price-per-hour go with one run: leave them out, or give one run")
    if output_dir:
        check_output_dir(output_dir)
    for run_dir in run_dirs:
        if RunFolder(run_dir).is_locked():
            say(f"note: {run_dir} is being measured: this is a report of what is there now")
    with as_usage_error():
        if len(run_dirs) > 1:
            _show_side_by_side(run_dirs, Console(), output_dir)
        else:
            show_report(run_dirs[0], Console(), output_dir, request.price_per_hour, png)
    return 0


def _show_side_by_side(run_dirs: Sequence[Path], console: Console, output_dir: Path | None) -> None:
    """Write compare.html and compare.md; print the sentence, what cannot be compared, and the paths. ValueError."""
    from kvbench.common.console import print_plain
    from kvbench.report.side_by_side import groups_of, not_compared
    from kvbench.report.side_by_side_page import headline, write_side_by_side
    from kvbench.runs.read import read_run

    groups = groups_of(*map(read_run, run_dirs))
    paths = write_side_by_side(groups, output_dir or run_dirs[-1])
    for sentence in (headline(groups), *not_compared(groups), *(f"side by side: {path}" for path in paths)):
        print_plain(console, sentence)


def show_report(
    run_dir: Path,
    console: Console,
    output_dir: Path | None = None,
    price_per_hour: float | None = None,
    png: str | None = None,
) -> None:
    """Write report.html, report.md and summary.csv; print table, conclusion and paths. Raises ValueError.

    ``png``: also write the "main" figures or "all" as PNG files.
    """
    from kvbench.common.console import print_plain, print_table
    from kvbench.report.document import document
    from kvbench.report.page import write_report
    from kvbench.report.terminal import DROP_FIRST, console_table, engine_time_console, first_lines
    from kvbench.runs.read import read_run

    run = read_run(run_dir)
    made = document(run, price_per_hour)
    paths, full = [], None
    try:
        paths = write_report(made, output_dir or run_dir)
    except OSError as error:  # a full disk must not take the figures away
        full = error
    if (served := console_table(made)).row_count:
        print_table(console, served, drop_first=DROP_FIRST)
    if (engine_time := engine_time_console(made)) is not None:
        print_table(console, engine_time)
    for line in first_lines(made):
        print_plain(console, line)
    for sentence in run.damaged:
        print_plain(console, f"note: {sentence}")
    if full:
        raise full
    for path in paths:
        print_plain(console, f"report: {path}")
    if png:
        from kvbench.report.png import main_drawings, write_pngs

        drawn = made.drawings if png == "all" else main_drawings(made.drawings)
        for path in write_pngs(drawn, output_dir or run_dir):
            print_plain(console, f"figure: {path}")
