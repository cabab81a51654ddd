"""What ``kvbench compare`` and ``kvbench calibrate`` do, apart from parsing. Imported when one of them runs."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvbench.common.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_OK, MeasurementError, UsageError
from kvbench.common.files import read_json
from kvbench.common.git import git_state
from kvbench.common.machine import environment
from kvbench.common.packages import HOUSE
from kvbench.gate.compare.builds import Builds
from kvbench.gate.compare.conclude import finished_verdict, table_of
from kvbench.gate.compare.folder import KIND, CompareFolder
from kvbench.gate.compare.lanes import Lane, close_lanes, open_lanes
from kvbench.gate.compare.manifest import PATHS, edited, go_on, new_comparison, unusable_repeat
from kvbench.gate.compare.run import Comparison
from kvbench.gate.compare.runner_class import FOLDER, noise_notes, runner_class, store_noise
from kvbench.gate.compare.side_text import RUN, Side, parse_side
from kvbench.gate.compare.values import read_values, whole_pairs, write_pairs
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.timing.noise import FEWEST_PAIRS, noise_of, warnings_of
from kvbench.gate.timing.plan import BASE, SIDES
from kvbench.gate.verdict.github import publish
from kvbench.gate.verdict.outputs import write_outputs
from kvbench.gate.verdict.terminal import print_verdict
from kvbench.gate.verdict.verdict import INVALID, Finding, Verdict
from kvbench.runs.folder import MANIFEST, RunFolder, create_run
from kvbench.workload.file import Workload, load_workload, resolve

COMPARE, CALIBRATE = "compare", "calibrate"
_OF_THIS_TIME = ("resume", "max_minutes", "output_dir", "force")  # not of the comparison that is gone on with


@dataclass(frozen=True)
class _Job:
    """What is asked for, by the command line or by the folder that is gone on with (``folder`` None: a new one)."""

    subcommand: str
    options: Mapping[str, Any]
    policy: Policy
    sides: Mapping[str, Side]
    workloads: Sequence[Workload]
    folder: CompareFolder | None = None


def compare_command(**options: Any) -> int:
    """``kvbench compare``. Raises UsageError and MeasurementError."""
    console = Console()
    with ExitStack() as held:
        job = _asked(options, COMPARE, held)
        found = _run(job, console, held)
        if found is None:
            return EXIT_INTERRUPTED
        folder, verdict = found
        print_verdict(verdict, console)  # first of all: it is known, and a full disk must not take it away
        write_pairs(folder, folder.manifest(), job.policy.timing.metrics)
        for path in write_outputs(verdict, folder.path):
            _say(console)(f"written: {path}")
        publish(verdict, folder.path)
    return verdict.exit_code


def calibrate_pairs_command(*, side: str | None, **options: Any) -> int:
    """``kvbench calibrate``. Raises UsageError and MeasurementError."""
    console = Console()
    side = side or "HEAD"
    with ExitStack() as held:
        job = _asked({"base": side, "candidate": side, **options}, CALIBRATE, held)
        found = _run(job, console, held)
        if found is None:
            return EXIT_INTERRUPTED
        return _store_noise(job, *found, console)


def _store_noise(job: _Job, folder: CompareFolder, verdict: Verdict, console: Console) -> int:
    options, policy = job.options, job.policy
    manifest, rules, say = folder.manifest(), policy.timing, _say(console)
    write_pairs(folder, manifest, rules.metrics)
    pairs = whole_pairs(folder, manifest)
    rest = "" if pairs >= options["pairs"] else f"{pairs} of {options['pairs']} pairs were measured"
    if pairs < FEWEST_PAIRS:
        print_verdict(verdict, console)
        say(f"no noise is stored: {rest}. Go on with --resume {folder.path}")
        return EXIT_INVALID
    table = table_of(read_values(folder, manifest, rules.metrics, range(1, pairs + 1)), manifest, rules)
    noise = noise_of(table, rules)
    name = options["runner_class"] or runner_class(environment())
    path = Path(options["store"]) / f"{name}.json"
    facts = {"runner_class": name, "side": manifest["base"]["name"], "workloads": list(manifest["workloads"])}
    store_noise(path, noise, facts | {"started": manifest["started"], "ended": manifest["ended"]})
    for line in noise.each:
        seen = line.detectable[rules.looks[-1].pairs]
        say(
            f"{line.metric} {', '.join(line.stands_for)}: pairs scatter by {100 * line.sd:.2g} % (sd); a slowdown of "
            + (f"{100 * seen:.2g} %" if seen is not None else "no size")
            + f" is seen in {rules.looks[-1].pairs} pairs"
        )
    for warning in warnings_of(noise, rules):
        say(f"warning: {warning}")
    say(f"stored: {path}")
    if rest:
        say(f"{rest}. Go on with --resume {folder.path}")
    return EXIT_INVALID if manifest["void"] else EXIT_OK  # given up, or ended by --max-minutes


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def _asked(options: dict[str, Any], subcommand: str, held: ExitStack) -> _Job:
    """Everything that can be wrong before anything is built. A folder that is gone on with is locked in ``held``.

    Such a folder says all: its workloads and policy are those that it began with, whatever their files hold now.
    Raises UsageError.
    """
    if options["resume"] is None:
        if not options["base"] or not options["candidate"]:
            raise UsageError("two sides are needed: write for example `kvbench compare main HEAD --workload FILE`")
        sides = _sides(options)
        workloads = _workloads(options, sides[BASE].text if sides[BASE].kind == RUN else None)
        return _Job(subcommand, options, load_policy(options["policy"]), sides, workloads)
    folder = CompareFolder.open(options["resume"])
    held.enter_context(folder.run_lock())
    manifest = folder.manifest()
    if manifest["subcommand"] != subcommand:
        raise UsageError(f"{folder.path} was begun by `kvbench {manifest['subcommand']}`: go on with that")
    _refuse_changes(folder)
    stored = manifest["options"]
    asked = stored | {name: options[name] for name in _OF_THIS_TIME}
    asked |= {name: Path(stored[name]) for name in PATHS if stored.get(name)}
    asked["force"] = options["force"] or stored["force"]
    workloads = [resolve(each["workload"], profile=each["profile"], source=None) for each in manifest["given"]]
    return _Job(subcommand, asked, Policy.from_json(manifest["policy"]), _sides(asked), workloads, folder)


def _refuse_changes(folder: CompareFolder) -> None:
    """Raises UsageError for an argument or option that cannot be given with --resume."""
    context = click.get_current_context()
    for parameter in context.command.params:
        given = context.get_parameter_source(parameter.name) is click.core.ParameterSource.COMMANDLINE
        if given and parameter.name not in _OF_THIS_TIME:
            name = parameter.human_readable_name if isinstance(parameter, click.Argument) else parameter.opts[0]
            raise UsageError(
                f"{name} cannot change a comparison that has begun ({folder.path}): leave it out, or start a new one "
                "without --resume"
            )


def _sides(options: Mapping[str, Any]) -> dict[str, Side]:
    repo = Path(options["repo"] or HOUSE)
    return {side: parse_side(options[side], repo) for side in SIDES}


def _run(job: _Job, console: Console, held: ExitStack) -> tuple[CompareFolder, Verdict] | None:
    """Open both sides and measure; None when it was interrupted. The folder stays locked in ``held``."""
    options, say = job.options, _say(console)
    if job.folder is not None and (finished := finished_verdict(job.folder, job.policy)):
        say(f"{job.folder.path} is finished: nothing is measured, and this is its verdict")
        return job.folder, finished
    builds = held.enter_context(Builds(rebuild=options["rebuild"], build_cmd=options["build_cmd"], say=say))
    try:
        lanes = open_lanes(job.sides, job.workloads, {**options, "port": 0}, builds)
    except MeasurementError as error:  # a build that fails
        if job.folder is None:
            path = create_run(options["output_dir"], KIND, git_state()["short_sha"]).path
            _write_invalid(job, path, error, say)
        raise
    held.callback(close_lanes, lanes)
    folder = job.folder
    if folder is None:
        names = [lane.name for lane in lanes]
        notes = _noise_notes(options, names, job.policy) if job.subcommand == COMPARE else []
        folder = new_comparison(options, job.workloads, lanes, job.policy, job.subcommand, notes)
        held.enter_context(folder.run_lock())
    manifest = folder.manifest()
    if job.folder is not None and not folder.stored:
        for remark in (*edited(manifest), *go_on(manifest, lanes, force=options["force"])):
            say(f"note: {remark}")
    say(f"results: {folder.path}")
    for note in manifest["notes"]:
        say(f"note: {note}")
    comparison = Comparison(
        folder,
        manifest,
        lanes,
        job.policy,
        console,
        pairs=options.get("pairs") or job.policy.timing.looks[-1].pairs,
        max_minutes=options["max_minutes"],
        stop_early=job.subcommand == COMPARE,
        calibrate=not options["no_calibration"],
        force=options["force"],
    )
    try:
        verdict = _judge_stored(comparison) if folder.stored else _measure(comparison, lanes, say)
    except MeasurementError as error:
        _write_invalid(job, folder.path, error, say)
        raise
    except UsageError:
        if job.folder is None and folder.remove_unmeasured():
            say(f"removed: {folder.path}, since nothing was measured")
        raise
    return None if verdict is None else (folder, verdict)


def _measure(comparison: Comparison, lanes: Sequence[Lane], say: Callable[[str], None]) -> Verdict | None:
    for lane in lanes:
        lane.warm(comparison.folder.path, say)
    return comparison.execute()


def _judge_stored(comparison: Comparison) -> Verdict:
    """Raises MeasurementError where the runs have repeats, and not one that is valid on both sides."""
    folder, manifest = comparison.folder, comparison.manifest
    if reason := unusable_repeat(folder, manifest):
        if not whole_pairs(folder, manifest):
            raise MeasurementError(f"{reason}: measure that run again")
        manifest["notes"] = list(dict.fromkeys([*manifest["notes"], reason]))
    return comparison.judge_stored()


def _write_invalid(job: _Job, folder: Path, error: Exception, say: Callable[[str], None]) -> None:
    """The files of a verdict that says that nothing could be judged, for who reads those and no terminal.

    The error itself is raised on, with its own exit code. A disk that is full is said with it.
    """
    if job.subcommand != COMPARE:
        return
    manifest = read_json(folder / MANIFEST) if (folder / MANIFEST).is_file() else {}
    told = {side: manifest.get(side) or job.sides[side].to_json() for side in SIDES}
    reproduce = manifest.get("reproduce") or shlex.join(["kvbench", *sys.argv[1:]])
    found = Finding("measured/comparison", "measured", "the comparison is measured", INVALID, str(error))
    verdict = Verdict("compare", INVALID, str(error), (found,), **told, reproduce=reproduce)
    with suppress(OSError):
        for path in write_outputs(verdict, folder):
            say(f"written: {path}")
    publish(verdict, folder)


def _workloads(options: Mapping[str, Any], run: str | None) -> list[Workload]:
    """The files that were asked for; of a stored run its own. Raises UsageError."""
    if run is not None:
        if options["workloads"]:
            raise UsageError("--workload does not go with stored runs, which have their own: leave it out")
        manifest = RunFolder(Path(run).expanduser()).manifest()
        return [resolve(manifest["workload"], profile=manifest["profile"], source=None)]
    if not options["workloads"]:
        raise UsageError("--workload is missing: write for example --workload workloads/mixed.yaml")
    given = {name: options[name] for name in ("profile", "overrides", "seed")}
    return [load_workload(path, **given) for path in options["workloads"]]


def _noise_notes(options: Mapping[str, Any], workloads: Sequence[str], policy: Policy) -> list[str]:
    """What the stored noise of this class of runners says of the policy's limits."""
    name = options["runner_class"] or runner_class(environment())
    path = options["noise"] or FOLDER / f"{name}.json"
    if not path.is_file():
        return []
    return noise_notes(path, workloads, policy.timing)
