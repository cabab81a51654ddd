"""What ``kvbench compare`` and ``kvbench calibrate`` do, apart from parsing. Imported when one of them runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from kvbench.errors import EXIT_INTERRUPTED, EXIT_INVALID, UsageError
from kvbench.gate.builds import Builds
from kvbench.gate.compare import Comparison
from kvbench.gate.compare_manifest import new_comparison, require_unchanged
from kvbench.gate.conclude import table_of
from kvbench.gate.folder import CompareFolder
from kvbench.gate.github import publish
from kvbench.gate.lanes import close_lanes, open_lanes
from kvbench.gate.noise import noise_of, warnings_of
from kvbench.gate.outputs import write_outputs
from kvbench.gate.plan import BASE, SIDES
from kvbench.gate.policy import Policy, load_policy
from kvbench.gate.runner_class import FOLDER, runner_class, store_noise, stored_noise
from kvbench.gate.side_text import RUN, parse_side
from kvbench.gate.terminal import print_verdict
from kvbench.gate.values import read_values, whole_pairs, write_pairs
from kvbench.gate.verdict import Verdict
from kvbench.house import HOUSE
from kvbench.manifest import environment
from kvbench.results import RunFolder
from kvbench.workload import Workload, load_workload, resolve

COMPARE, CALIBRATE = "compare", "calibrate"
_OF_THIS_TIME = ("resume", "max_minutes", "output_dir", "force")  # not of the comparison that is gone on with
_PATHS = ("policy", "repo", "noise", "store", "tokenizer", "tls_ca_file")


def compare_command(**options: Any) -> int:
    """``kvbench compare``. Raises UsageError and MeasurementError."""
    console = Console()
    folder, options = _reopened(options, COMPARE)
    if not options["base"] or not options["candidate"]:
        raise UsageError("two sides are needed: write for example `kvbench compare main HEAD --workload FILE`")
    policy = load_policy(options["policy"])
    found = _run(folder, options, policy, console, COMPARE)
    if found is None:
        return EXIT_INTERRUPTED
    folder, verdict = found
    write_pairs(folder, folder.manifest(), policy.timing.metrics)
    written = write_outputs(verdict, folder.path)
    print_verdict(verdict, console)
    for path in written:
        _say(console)(f"written: {path}")
    publish(verdict, folder.path)
    return verdict.exit_code


def calibrate_pairs_command(*, side: str | None, **options: Any) -> int:
    """``kvbench calibrate``. Raises UsageError and MeasurementError."""
    console = Console()
    side = side or "HEAD"
    folder, options = _reopened({"base": side, "candidate": side, **options}, CALIBRATE)
    policy = load_policy(options["policy"])
    found = _run(folder, options, policy, console, CALIBRATE)
    if found is None:
        return EXIT_INTERRUPTED
    folder, verdict = found
    manifest, rules, say = folder.manifest(), policy.timing, _say(console)
    write_pairs(folder, manifest, rules.metrics)
    pairs = whole_pairs(folder, manifest)
    if pairs < options["pairs"]:
        print_verdict(verdict, console)
        say(f"no noise is stored: {pairs} of {options['pairs']} pairs were measured. Go on with --resume {folder.path}")
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
            f"{line.metric} {line.level}: pairs scatter by {100 * line.sd:.2g} % (sd); a slowdown of "
            + (f"{100 * seen:.2g} %" if seen is not None else "no size")
            + f" is seen in {rules.looks[-1].pairs} pairs"
        )
    for warning in warnings_of(noise, rules):
        say(f"warning: {warning}")
    say(f"stored: {path}")
    return 0


def _say(console: Console) -> Callable[[str], None]:
    return lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)


def _reopened(options: dict[str, Any], subcommand: str) -> tuple[CompareFolder | None, dict[str, Any]]:
    """The folder to go on with and the options that it was begun with; (None, ``options``) for a new one."""
    if options["resume"] is None:
        return None, options
    folder = CompareFolder.open(options["resume"])
    manifest = folder.manifest()
    if manifest["subcommand"] != subcommand:
        raise UsageError(f"{folder.path} was begun by `kvbench {manifest['subcommand']}`: go on with that")
    context = click.get_current_context()
    given = [n for n in options if context.get_parameter_source(n) is click.core.ParameterSource.COMMANDLINE]
    if wrong := [name for name in given if name not in _OF_THIS_TIME]:
        raise UsageError(
            f"--{wrong[0].replace('_', '-')} cannot change a comparison that has begun: leave it out, or start a new "
            "one without --resume"
        )
    stored = manifest["options"] | {name: options[name] for name in _OF_THIS_TIME}
    return folder, stored | {name: Path(stored[name]) for name in _PATHS if stored.get(name)}


def _run(
    folder: CompareFolder | None, options: Mapping[str, Any], policy: Policy, console: Console, subcommand: str
) -> tuple[CompareFolder, Verdict] | None:
    """Open both sides and measure; None when it was interrupted."""
    say = _say(console)
    repo = Path(options["repo"] or HOUSE)
    sides = {side: parse_side(options[side], repo) for side in SIDES}
    workloads = _workloads(options, sides[BASE].text if sides[BASE].kind == RUN else None)
    with Builds(rebuild=options["rebuild"], build_cmd=options["build_cmd"], say=say) as builds:
        lanes = open_lanes(sides, workloads, {**options, "port": 0}, builds)
        try:
            if folder is None:
                notes = _noise_notes(options, policy) if subcommand == COMPARE else []
                folder = new_comparison(options, lanes, policy, subcommand, notes)
            manifest = folder.manifest()
            require_unchanged(manifest, lanes)
            say(f"results: {folder.path}")
            for note in manifest["notes"]:
                say(f"note: {note}")
            comparison = Comparison(
                folder,
                manifest,
                lanes,
                policy,
                console,
                pairs=options.get("pairs") or policy.timing.looks[-1].pairs,
                max_minutes=options["max_minutes"],
                stop_early=subcommand == COMPARE,
                calibrate=not options["no_calibration"],
                force=options["force"],
            )
            if folder.stored:
                verdict = comparison.judge_stored()
            else:
                for lane in lanes:
                    lane.warm(folder.path, say)
                verdict = comparison.execute()
        finally:
            close_lanes(lanes)
    return None if verdict is None else (folder, verdict)


def _workloads(options: Mapping[str, Any], run: str | None) -> list[Workload]:
    """The files that were asked for; of a stored run its own. Raises UsageError."""
    if run is not None:
        if options["workloads"]:
            raise UsageError("--workload does not go with stored runs, which have their own: leave it out")
        manifest = RunFolder(Path(run)).manifest()
        return [resolve(manifest["workload"], profile=manifest["profile"], source=None)]
    if not options["workloads"]:
        raise UsageError("--workload is missing: write for example --workload workloads/mixed.yaml")
    given = {name: options[name] for name in ("profile", "overrides", "seed")}
    return [load_workload(path, **given) for path in options["workloads"]]


def _noise_notes(options: Mapping[str, Any], policy: Policy) -> list[str]:
    """What the stored noise of this class of runners says of the policy's limits."""
    name = options["runner_class"] or runner_class(environment())
    path = options["noise"] or FOLDER / f"{name}.json"
    if not path.is_file():
        return []
    return [f"{text} (noise of {path.name})" for text in warnings_of(stored_noise(path), policy.timing)]
