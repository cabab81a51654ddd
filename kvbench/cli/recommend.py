"""``kvbench recommend``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.common.errors import EXIT_INVALID, EXIT_OK, UsageError, say

if TYPE_CHECKING:
    from kvbench.history.runs import StoredRun


@click.command()
@click.argument("results", metavar="RESULTS", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print the same as one JSON object.")
def recommend(results: Path, as_json: bool) -> int:
    """Say which settings a measured sweep supports, with the evidence, the fallback, and when not to page at all.

    RESULTS is the folder of a run, or one that holds runs: then the newest complete run is taken, and named. The rules
    are the report's: a setting is recommended where it is decided to be better, at no load worse, and where a quantised
    KV lost no quality; what pays alone is not said to pay together. Else the baseline is.

    \b
    Examples:
      kvbench recommend results/mixed/20260101T120000Z-1a2b3c4
      kvbench recommend results/mixed
      kvbench recommend results/mixed --json
    \b
    No files are written.
    Exit codes: 0 printed, 2 no folder of a run or of runs, 4 no load of the run is valid.
    """
    import dataclasses
    import json

    from rich.console import Console

    from kvbench.common.console import print_plain
    from kvbench.report.recommend import lines
    from kvbench.report.recommend import recommend as recommendation
    from kvbench.runs.folder import RunFolder
    from kvbench.runs.read import read_run

    folder = _chosen(results)
    if RunFolder(folder).is_locked():
        say(f"note: {folder} is being measured: this is of what is there now")
    try:
        run = read_run(folder)
    except ValueError as error:
        raise UsageError(str(error)) from None
    said, console = recommendation(run), Console()
    if as_json:
        print(json.dumps(dataclasses.asdict(said), indent=2, default=str))
    else:
        for line in lines(said):
            print_plain(console, line)
    if not any(cell.valid for cell in run.cells):
        say(f"no load of {folder} is valid: {'only engine time counts' if said.effects else 'measure it again'}")
        return EXIT_INVALID
    return EXIT_OK


def _chosen(results: Path) -> Path:
    """The run itself, or the newest complete one with a valid load in the folder. UsageError where there is none."""
    from kvbench.history.runs import find_runs, own_runs, read_runs

    found = find_runs([results])
    if found == [results.resolve()]:
        return results
    stored, _ = read_runs(found)
    own, _ = own_runs([results], stored)
    complete = [run for run in own if run.complete and any(cell.valid for cell in run.cells.values())]
    if not complete:
        newest = f"; the newest, {_shown(own[-1], results)}, is none: name it to see what it has" if own else ""
        raise UsageError(f"{results} holds no complete run of `kvbench sweep` with a valid load{newest}")
    chosen = _shown(complete[-1], results)
    say(f"{chosen}: the newest of {len(complete)} complete runs in {results}")
    return chosen


def _shown(run: StoredRun, results: Path) -> Path:
    """The run's folder as the user would write it."""
    return results / run.folder.relative_to(results.resolve())
