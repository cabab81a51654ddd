"""``kvbench recommend``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.common.errors import EXIT_INVALID, EXIT_OK, UsageError, as_usage_error, say
from kvbench.common.options import Options, argument, switch, takes
from kvbench.common.text import and_more

if TYPE_CHECKING:
    from kvbench.runs.stored import StoredRun

_WIDEST = 110  # columns of text
_MOST_NAMED = 6  # runs to choose from


@dataclass(frozen=True, kw_only=True)
class RecommendRequest(Options):
    """The request of ``kvbench recommend``."""

    results: Path = argument("RESULTS")
    as_json: bool = switch("Print one JSON object instead.", "--json")


@takes(RecommendRequest)
def recommend(request: RecommendRequest) -> int:
    """Say which settings a measured sweep supports.

    The evidence, the fallback, and when not to page at all are printed too.

    RESULTS is the folder of a run, or one that holds runs: then the newest complete run is taken, and named; of several
    workloads or engines you are asked to name one. The rules are the report's: a setting is recommended where it is
    decided to be better, at no load worse, and its answers were measured and lie within the limits; what pays alone is
    not said to pay together. Else the baseline is kept.

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
    from kvbench.report.recommend import recommend as recommendation
    from kvbench.report.recommend_lines import lines
    from kvbench.runs.folder import RunFolder
    from kvbench.runs.read import read_run

    folder = _chosen(request.results)
    if RunFolder(folder).is_locked():
        say(f"note: {folder} is being measured: this is of what is there now")
    with as_usage_error():
        run = read_run(folder)
    if run.simulated:
        say(f"note: {folder} is simulated, nothing in it was measured: measure what follows before you rely on it")
    made, console = recommendation(run), Console()
    if request.as_json:
        print(json.dumps(dataclasses.asdict(made), indent=2, default=str))
    else:
        for line in lines(made, min(console.width, _WIDEST)):
            print_plain(console, line)
    if not any(cell.valid for cell in run.cells):
        say(f"no load of {folder} is valid: {'only its engine time counts' if run.engine_time else 'measure it again'}")
        return EXIT_INVALID
    return EXIT_OK


def _chosen(results: Path) -> Path:
    """The run itself, or the newest complete one with a valid load in the folder.

    Raises UsageError where there is none, or where they are of several workloads, engines or folders.
    """
    from kvbench.runs.stored import find_runs, own_runs, read_runs

    paths = find_runs([results])
    if paths == [results.resolve()]:
        return results
    stored, _ = read_runs(paths)
    usable = [run for run in stored if run.complete and any(cell.valid for cell in run.cells.values())]
    complete, _ = own_runs([results], usable)  # one's own that cannot be used must not hide those that came with it
    if not complete:
        newest = f"; the newest, {_shown(stored[-1], results)}, is none: name it to see what it has" if stored else ""
        raise UsageError(f"{results} holds no complete run of `kvbench sweep` with a valid load{newest}")
    newer = [_shown(run, results) for run in stored if run.started > complete[-1].started and run not in usable]
    if newer:
        say(f"note: passed over {and_more(newer, _MOST_NAMED)}: newer, and not complete or without a valid load")
    newest = {(run.folder.parent, run.workload, _engine(run)): run for run in complete}
    if len(newest) > 1:
        named = [f"{_shown(run, results)} ({run.workload}, {_engine(run)})" for run in reversed(newest.values())]
        raise UsageError(
            f"{results} holds runs of several workloads, engines or folders, and a recommendation is of one run: name "
            f"one, such as {and_more(named, _MOST_NAMED)}"
        )
    chosen = _shown(complete[-1], results)
    which = f"the newest of {len(complete)} complete runs" if len(complete) > 1 else "the only complete run"
    say(f"{chosen}: {which} in {results}")
    return chosen


def _engine(run: StoredRun) -> str:
    from kvbench.targets.presets import PRESETS

    name = dict(run.place).get("backend", "")
    return PRESETS[name].title if name in PRESETS else name or "built-in engine"


def _shown(run: StoredRun, results: Path) -> Path:
    """The run's folder as the user would write it."""
    return results / run.folder.relative_to(results.resolve())
