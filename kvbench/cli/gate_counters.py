"""``kvbench gate counters`` and ``kvbench accept counters``."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvbench.common.errors import EXIT_INVALID, EXIT_OK, EXIT_REGRESSION, UsageError
from kvbench.common.options import Options, argument, option, takes
from kvbench.common.packages import find_file
from kvbench.gate.counters import LOCK, WORKLOAD

if TYPE_CHECKING:
    from kvbench.gate.counters.workload import CounterWorkload


@dataclass(frozen=True, kw_only=True)
class CountersRequest(Options):
    """The request of ``kvbench gate counters``."""

    workload: Path = argument("WORKLOAD", WORKLOAD)
    lock: Path = option("The file of accepted counters.", default=LOCK)
    only: tuple[str, ...] = option("Replay only scenarios whose name matches. Repeatable.", default=(), metavar="GLOB")
    output_dir: Path | None = option("Write verdict.json, junit.xml and summaries to this folder.")


@takes(CountersRequest)
def counters(request: CountersRequest) -> int:
    """Replay WORKLOAD on the engine and compare its counters.

    Every counter must equal the lock file's.

    The scheduler, the page pool, the prefix cache and the swap space work for real and no model is computed: it takes
    seconds, needs no GPU, and gives the same numbers on any machine. Each scenario runs twice, the second time in
    another process with another hash seed.

    \b
    Examples:
      kvbench gate counters
      kvbench gate counters --only 'forks/paged-*' --output-dir results/gate
    \b
    Files written, with --output-dir: verdict.json, junit.xml and summary.md. In GitHub Actions, with or without it: the
    step summary and up to 5 annotations.
    \b
    Exit codes:
      0  every counter of every step is as accepted
      1  something differs from the lock file: which counter, from which step on
      2  usage, or a workload or lock file that cannot be read
      4  two runs of this very code differ, or the second run failed
      5  nothing was compared
    """
    from kvbench.common.files import check_output_dir
    from kvbench.common.git import git_state
    from kvbench.gate.counters.judge import GateCommands, judge
    from kvbench.gate.counters.lock import read_lock
    from kvbench.gate.counters.replay import replay_twice
    from kvbench.gate.verdict.outputs import report_verdict

    workload, lock, only, output_dir = request.workload, request.lock, request.only, request.output_dir
    if output_dir is not None:  # before the replay, which takes seconds
        check_output_dir(output_dir)
    chosen = _read(workload, only)
    accepted = read_lock(find_file(lock))
    if accepted is not None and only:
        accepted = accepted.model_copy(update={"scenarios": _matching(accepted.scenarios, only)})
    # without a lock or a scenario there is nothing to compare, and nothing to wait for
    first, second = replay_twice(chosen) if accepted is not None and chosen.scenarios else ({}, {})
    state = git_state()
    name = f"{state['short_sha']}{' and changes' if state['dirty'] else ''}"
    commands = GateCommands(workload, lock, only)
    return report_verdict(judge(chosen, accepted, first, second, commands, {"name": name, **state}), output_dir)


@click.group()
def accept() -> None:
    """Make an intended change the baseline, with its reason."""


@dataclass(frozen=True, kw_only=True)
class AcceptRequest(Options):
    """The request of ``kvbench accept counters``."""

    workload: Path = argument("WORKLOAD", WORKLOAD)
    lock: Path = option("The file that the counters are written to.", default=LOCK)
    reason: str = option("Why the counters changed: kept in the lock file.", required=True)


@takes(AcceptRequest, "counters")
def accept_counters(request: AcceptRequest) -> int:
    """Write what this code counts into the lock file.

    The reason, the commit and the date are stored with it.

    \b
    Example:
      kvbench accept counters --reason "admission keeps 8 tokens of room instead of 16"
    \b
    Exit codes: 0 written (or nothing to write), 1 the engine breaks or leaks, which cannot be accepted, 2 usage,
    4 two runs of this very code differ.
    """
    from kvbench.gate.counters.judge import accept as accept_runs
    from kvbench.gate.counters.judge import nondeterminism
    from kvbench.gate.counters.replay import replay_twice

    if not (reason := " ".join(request.reason.split())):
        raise UsageError("--reason is empty: say in a few words why the counters changed")
    if not (folder := request.lock.parent).is_dir():
        raise UsageError(f"there is no folder {folder} in {Path.cwd()}: go to the repository's root, or give --lock")
    chosen = _read(request.workload, ())
    first, second = replay_twice(chosen)
    for name, run in first.items():
        if words := nondeterminism(run, second[name]):
            click.echo(f"nothing was accepted: {name}: {words}", err=True)
            return EXIT_INVALID
    for name, run in first.items():
        if run.error:
            click.echo(f"nothing was accepted: {name}: {run.error}", err=True)
            return EXIT_REGRESSION
    for line in accept_runs(chosen, first, request.lock, reason):
        click.echo(line)
    return EXIT_OK


accept.add_command(accept_counters)


def _read(path: Path, only: tuple[str, ...]) -> CounterWorkload:
    import dataclasses

    from kvbench.gate.counters.workload import read_counter_workload

    workload = read_counter_workload(path)
    if not only:
        return workload
    names = _matching({scenario.name: scenario for scenario in workload.scenarios}, only)
    return dataclasses.replace(workload, scenarios=tuple(names.values()))


def _matching(scenarios: dict, only: tuple[str, ...]) -> dict:
    return {name: scenario for name, scenario in scenarios.items() if any(fnmatchcase(name, glob) for glob in only)}
