"""What the commands do, apart from parsing. Imported when a command runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.common.errors import UsageError
from kvbench.runs.folder import RunFolder, latest_incomplete, open_run
from kvbench.workload.file import Workload, load_workload, resolve


def sweep_command(*, workload: str | None, resume: str | None, dry_run: bool, **options: Any) -> int:
    """``kvbench sweep``. Raises UsageError."""
    from kvbench.sweep.plan import START_GUESS_S, SweepOptions, describe_plan, preflight
    from kvbench.sweep.progress import Estimator
    from kvbench.sweep.run import Sweep
    from kvbench.targets.choose import choose

    console = Console()
    if resume and workload is None and Path(resume).suffix in (".yaml", ".yml"):
        workload, resume = resume, "latest"  # `--resume WORKLOAD` reads as one would mean it
    loaded, run = _workload_and_run(workload, resume, options)
    if options["force"] and run is None:
        raise UsageError("--force goes with --resume: a new run has nothing to differ from; leave it out")
    stored = run.manifest() if run else {}
    choice = choose(loaded, options, stored)
    sweep_options = SweepOptions(
        only=tuple(options["only"]) or tuple(stored.get("only") or ()),
        output_dir=options["output_dir"],
        report=None if options["no_report"] else show_report,
        force=options["force"],
        calibrate=not options["no_calibration"],
        check=choice.check,
        refuses=choice.refuses,
        require=choice.require,
        start_guess_s=choice.start_guess_s or START_GUESS_S,
        fresh=choice.fresh,
        notes=choice.notes,
    )
    loaded = choice.workload
    if dry_run:
        design, blocks = sweep_options.plan(loaded)
        _, guesses = preflight(loaded, design, sweep_options)
        guessed = sweep_options.start_guess_s
        seconds = Estimator(guesses, guessed).total_s(blocks)
        describe_plan(loaded, design, blocks, seconds, console, start_guess_s=guessed)
        return 0
    if choice.probes:  # before a results folder is made for it
        probe = choice.new_target()
        probe.start({}, Path())
        probe.stop()
    try:
        sweep = Sweep(loaded, sweep_options, choice.new_target, console, resumed=run, manifest_extra=choice.manifest)
        return sweep.execute()
    finally:
        choice.close()


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
    from kvbench.common.foreign_cpu import ForeignWatch

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
    from kvbench.sweep.capacity import capacity_table
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import capacities, plan_sweep

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
