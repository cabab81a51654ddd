"""What the commands do, apart from parsing. Imported when a command runs."""

from __future__ import annotations

import dataclasses
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.console import Console

from kvbench.errors import UsageError
from kvbench.results import RunFolder, latest_incomplete, open_run
from kvbench.targets.base import Target
from kvbench.workload import Workload, load_workload, resolve


def sweep_command(*, workload: str | None, resume: str | None, dry_run: bool, **options: Any) -> int:
    """``kvbench sweep``. Raises UsageError."""
    from kvbench.planning import SweepOptions, describe_plan, plan_sweep, preflight
    from kvbench.progress import Estimator
    from kvbench.sweep import Sweep

    console = Console()
    if resume and workload is None and Path(resume).suffix in (".yaml", ".yml"):
        workload, resume = resume, "latest"  # `--resume WORKLOAD` reads as one would mean it
    loaded, run = _workload_and_run(workload, resume, options)
    if options["force"] and run is None:
        raise UsageError("--force goes with --resume: a new run has nothing to differ from; leave it out")
    stored = run.manifest() if run else {}
    target_url = options["target"] or stored.get("target")
    serve_cmd = options["serve_cmd"] or stored.get("serve_cmd")
    if target_url:
        loaded = _as_it_runs(loaded, target_url)
    new_target, check = _target_maker(target_url, serve_cmd, options)
    sweep_options = SweepOptions(
        only=tuple(options["only"]) or tuple(stored.get("only") or ()),
        output_dir=options["output_dir"],
        report=not options["no_report"],
        force=options["force"],
        check=check,
    )
    if dry_run:
        design, blocks = plan_sweep(loaded, sweep_options.only, check)
        _, guesses = preflight(loaded, design, sweep_options)
        describe_plan(loaded, design, blocks, Estimator(guesses).total_s(blocks), console)
        return 0
    if target_url:  # before a results folder is made for it
        probe = new_target()
        probe.start({}, Path())
        probe.stop()
    extra = {
        "target": target_url,
        "serve_cmd": serve_cmd,
        "backend": "openai" if target_url else "custom" if serve_cmd else "kvbench",
        "shared_machine": not target_url or "127.0.0.1" in target_url or "localhost" in target_url,
    }
    return Sweep(loaded, sweep_options, new_target, console, resumed=run, manifest_extra=extra).execute()


def _workload_and_run(
    workload: str | None, resume: str | None, options: Mapping[str, Any]
) -> tuple[Workload, RunFolder | None]:
    """The workload, and the run to go on with. Without a file, --resume FOLDER takes the stored workload."""
    asked = {key: options[key] for key in ("profile", "seed", "repeats")} | {"overrides": options["overrides"]}
    if workload is None:
        if resume in (None, "latest"):
            raise UsageError(
                "the workload file is missing: write for example `kvbench sweep workloads/mixed.yaml`"
                + (", or name the run: --resume results/mixed/<run>" if resume else "")
            )
        if given := [key for key, value in asked.items() if value]:
            raise UsageError(
                f"--{given[0]} cannot change a run that has begun: leave it out, or start a new run without --resume"
            )
        run = open_run(Path(resume))
        manifest = run.manifest()
        return resolve(manifest["workload"], profile=manifest.get("profile") or "cpu", source=None), run
    loaded = load_workload(workload, **asked)
    if resume is None:
        return loaded, None
    if resume == "latest":
        return loaded, latest_incomplete(options["output_dir"], loaded.name)
    return loaded, open_run(Path(resume))


def _as_it_runs(workload: Workload, url: str) -> Workload:
    """A running server cannot be given settings: one configuration, without the workload's engine section."""
    return dataclasses.replace(workload, engine={"target": url}, sweep={})


def _target_maker(
    url: str | None, serve_cmd: str | None, options: Mapping[str, Any]
) -> tuple[Callable[[], Target], Callable[[Mapping[str, Any]], Mapping[str, Any]]]:
    """How to make a target for a block, and how to check a configuration before any launch."""
    from kvbench.targets.builtin import BUILTIN_COMMAND, BuiltinTarget, check_configuration, require_free_port

    if url and serve_cmd:
        raise UsageError("--target and --serve-cmd exclude each other: measure a running server or launch one")
    if url:
        from kvbench.targets.openai import OpenAITarget

        require_url("--target", url)
        told = {key: options[key] for key in ("model", "vocab_size", "max_model_len")}
        return lambda: OpenAITarget(url, **told), lambda settings: {}
    command = _serve_command(serve_cmd) if serve_cmd else BUILTIN_COMMAND
    if options["port"]:
        require_free_port("127.0.0.1", options["port"])

    def make() -> Target:
        return BuiltinTarget(command=command, port=options["port"], start_timeout_s=options["start_timeout"])

    return make, check_configuration


def require_url(flag: str, url: str) -> None:
    """Raises UsageError when ``url`` names no server that could be asked."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a bracket that stays open, a port that is no number or beyond 65535
        good = False
    if not good:
        raise UsageError(f"{flag} {url!r} is not a URL of a server: write for example http://127.0.0.1:8000")


def _serve_command(text: str) -> tuple[str, ...]:
    """The words of --serve-cmd. Raises UsageError when they cannot be launched."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--serve-cmd {text!r} is not a command line ({error}): mend the quotes") from None
    if not words or shutil.which(words[0]) is None:
        raise UsageError(f"--serve-cmd {text!r}: there is no program {(words or ('',))[0]!r}; give its path")
    return words


def serve_command(arguments: list[str]) -> int:
    """``kvbench serve``: the parser and the process of ``python -m engine.server``."""
    from engine.server.arguments import build_parser

    parsed = build_parser(prog="kvbench serve").parse_args(arguments)  # --help answers before torch is loaded
    from engine.server.__main__ import exit_now, run

    exit_now(run(parsed))
    raise AssertionError("exit_now does not return")


def bench_engine_command(arguments: list[str]) -> int:
    """``kvbench bench-engine``: the engine's own parser and benchmark. Raises UsageError."""
    from engine.bench.command import main as bench_main
    from kvbench.bench_watch import ForeignWatch

    try:
        return bench_main(arguments, ForeignWatch().report)
    except ValueError as error:
        raise UsageError(str(error)) from None


def report_command(run_dir: Path) -> int:
    """``kvbench report``. Raises UsageError for a folder that is no run."""
    try:
        show_report(run_dir, Console())
    except ValueError as error:
        raise UsageError(str(error)) from None
    return 0


def show_report(run_dir: Path, console: Console) -> None:
    """Write report.html, report.md and summary.csv; print table, conclusion and paths. Raises ValueError."""
    from kvbench import report

    paths = report.build_report(run_dir)
    console.print(report.console_table(run_dir))
    console.print(report.headline(run_dir), highlight=False, markup=False, soft_wrap=True)
    for path in (paths.html, paths.markdown, paths.csv):
        console.print(f"report: {path}", highlight=False, markup=False, soft_wrap=True)


def plan_command(workload: str, profile: str | None, overrides: tuple[str, ...]) -> int:
    """``kvbench plan``. Raises UsageError for an impossible configuration."""
    from kvbench.capacity_table import capacity_table
    from kvbench.planning import capacities, plan_sweep
    from kvbench.targets.builtin import check_configuration

    loaded = load_workload(workload, profile=profile, overrides=overrides)
    design, _ = plan_sweep(loaded, (), check_configuration)
    capacity = capacities(design, check_configuration)
    table, notes = capacity_table(f"{loaded.name}, {loaded.profile} profile", design, capacity)
    console = Console()
    whole = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    Console(width=max(whole, console.width)).print(table)  # a row that is cut would hide what was asked for
    for note in (*notes, *(f"note: {note}" for note in design.notes)):
        console.print(note, highlight=False, markup=False)
    return 0
