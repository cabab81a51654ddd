"""``kvbench history``: stored runs over time, drift since the last release, and keeping runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from kvbench.common.errors import EXIT_NOTHING, EXIT_OK, UsageError, say
from kvbench.common.options import Count, DefaultGroup, Folder, Options, OutputFile, argument, option, switch, takes


@click.group(cls=DefaultGroup, default="show")
def history() -> None:
    """Follow stored runs over time, and keep them.

    \b
      kvbench history results/                        what changed from run to run, and since the last release
      kvbench history results/ --html trend.html      the same as a page
      kvbench history add results/mixed/<run> --to history/ [--release v1.2]
    `kvbench history FOLDERS` is short for `kvbench history show FOLDERS`: see `kvbench history show --help`.
    """


@dataclass(frozen=True, kw_only=True)
class SelectionOptions(Options, heading="What is shown"):
    """The options that choose runs, cells and metrics."""

    workloads: tuple[str, ...] = option(
        "Show only these workloads. Repeatable.", "--workload", default=(), metavar="GLOB"
    )
    cells: tuple[str, ...] = option(
        "Show only these cells, e.g. 'paged-*'. Repeatable.", "--cell", default=(), metavar="GLOB"
    )
    metrics: tuple[str, ...] = option("Show only these metrics. Repeatable.", "--metric", default=(), metavar="GLOB")
    machines: tuple[str, ...] = option(
        "Show only machines with this in their name. Repeatable.", "--machine", default=(), metavar="TEXT"
    )
    last: Count | None = option("Show the newest N runs of each series.")
    release: str | None = option(
        "Compare with this release, tag or commit (default: the newest earlier run that is marked as a release, else "
        "the newest git tag v* that has a run).",
        metavar="REF",
    )


@dataclass(frozen=True, kw_only=True)
class HistoryRequest(SelectionOptions):
    """The request of ``kvbench history show``."""

    folders: tuple[Path, ...] = argument("FOLDERS")
    fail_on_drift: bool = switch("Exit with 1 if a metric got worse, 3 if undecided, 5 if nothing was compared.")
    html: OutputFile | None = option("Write the trends as a page, too.", metavar="OUT.html")
    as_json: bool = switch("Print JSON instead of the tables.", "--json")


@takes(HistoryRequest, short_help="How runs changed over time, and since the last release.")
def show(request: HistoryRequest) -> int:
    """Show how the runs in FOLDERS changed over time, and since the last release.

    FOLDERS: results/, or what `kvbench history add` keeps; both at once, too. Runs on another machine, GPU, device,
    model or profile are a series of their own, as are cells whose settings or load were changed; versions of kvbench
    and of the engine are what is compared. Invalid cells and incomplete runs are shown and not counted. A value is the
    median over the repeats of a run. The runs in results/reference/, which came with the repository, are shown where
    there are no others or FOLDERS names them.

    Drift: the newest run against the release before it, with the margins that `kvbench compare` has for a cell. It is
    flagged (!) when it is beyond the margin and the 95 % interval over the repeats excludes no change. The interval
    does not contain what differs between two days on one machine: let `kvbench compare` of the two commits confirm it.

    \b
    Exit codes:
      0  shown
      1  --fail-on-drift only: a metric of a cell is worse than the release by more than its margin
      2  usage or bad input
      3  --fail-on-drift only: the repeats vary too much, or are too few, to say
      5  no run was found; with --fail-on-drift: nothing could be compared with a release
    """
    from rich.console import Console

    from kvbench.common.console import print_plain, print_table
    from kvbench.common.files import write_text
    from kvbench.history.drift import drift_exit_code
    from kvbench.history.show import SeriesSelection, as_dict, legend, table, view

    trends = view(request.folders, SeriesSelection(**request.part(SelectionOptions).values()))
    for note in trends.notes:
        say(f"note: {note}")
    if not trends.groups:
        say(
            f"there is nothing to show in {', '.join(map(str, request.folders))}: no run of `kvbench sweep` "
            "that can be read"
        )
        return EXIT_NOTHING
    if request.html is not None:
        from kvbench.history.page import page

        write_text(request.html, page(trends))
    if request.as_json:
        print(json.dumps(as_dict(trends), indent=1))
    else:
        console = Console()
        for group in trends.groups:
            print_table(console, table(group))
        for line in (*legend(trends), trends.drift_sentence, *([f"page: {request.html}"] if request.html else [])):
            print_plain(console, line)
    return drift_exit_code(trends.drifts) if request.fail_on_drift else EXIT_OK


@dataclass(frozen=True, kw_only=True)
class KeepRequest(Options):
    """The request of ``kvbench history add``."""

    runs: tuple[Path, ...] = argument("RUNS")
    to: Folder = option("The folder of the history.", required=True)
    release: str | None = option("Mark the runs as those of a release, e.g. v1.2.", metavar="NAME")
    incomplete: bool = switch("Keep incomplete runs, too.")


@takes(KeepRequest, short_help="Keep runs: small files only, never changed again.")
def add(request: KeepRequest) -> int:
    """Keep RUNS (folders of runs, or folders that hold some) in a history: small files only, never changed again.

    Of each run: manifest.json, summary.csv, verdict.json and the figures of each cell that trends are made of, in
    DIR/<workload>/<run>/. No prompts, no outputs, no logs. A run that is there already is left alone, with the verdict
    that was kept; an incomplete run is skipped.

    \b
    Exit codes: 0 kept, or there already; 2 bad input, or something else lies in its place; 5 no run was kept.
    """
    from kvbench.history.store import Skipped, add_run
    from kvbench.runs.stored import find_runs

    runs, release = request.runs, request.release
    if release is not None and not release.strip():
        raise UsageError("--release '' is no name: give one such as v1.2, or leave it out")
    kept, conflicts = 0, []
    for folder in find_runs(runs):
        try:
            done, place, notes = add_run(folder, request.to, release, incomplete=request.incomplete)
        except Skipped as why:
            say(f"note: {why}")
            continue
        except UsageError as conflict:
            conflicts.append(str(conflict))
            continue
        for note in notes:
            say(f"note: {note}")
        print(f"{done}: {place}")
        kept += 1
    if conflicts:
        raise UsageError("; ".join(conflicts))
    if not kept:
        say(f"there is no run to keep in {', '.join(map(str, runs))}: give the folder of one, results/mixed/<run>")
    return EXIT_OK if kept else EXIT_NOTHING


history.add_command(show)
history.add_command(add)
