"""``kvbench sweep``."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kvbench.common.errors import UsageError, say
from kvbench.common.option_rules import RAY_OPTIONS, check_goes_with
from kvbench.common.options import takes
from kvbench.common.packages import require_engine
from kvbench.common.plugins import find_plugin
from kvbench.sweep.requests import SweepRequest
from kvbench.workload.options import Answers

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.runs.folder import RunFolder
    from kvbench.workload.file import Workload


@takes(SweepRequest)
def sweep(request: SweepRequest) -> int:
    """Run every cell of a workload and report what it shows.

    WORKLOAD is a YAML file; without one, --input-len, --output-len, --concurrency and --vary make it.

    A cell is one engine configuration under one load. Each configuration is measured on a fresh server in every
    repeat, in random order, and its prefix cache is reset between loads. A load that other programs disturbed is
    measured again at the end, up to twice. --resume of a finished run measures its invalid loads again. Last, the
    answers of the built-in engine's configurations are compared, in about a minute (see `kvbench quality --help`).

    \b
    Examples:
      kvbench sweep workloads/mixed.yaml
      kvbench sweep --input-len 600 --output-len 150 --concurrency 20 --vary page_size=16,32
      kvbench sweep workloads/mixed.yaml --only 'paged-p16-c*' --repeats 5
      kvbench sweep workloads/mixed.yaml -o engine.kv_budget=64MiB -o 'load.concurrency=[2, 8]'
      kvbench sweep workloads/mixed.yaml --max-minutes 8
      kvbench sweep workloads/mixed.yaml --resume
      kvbench sweep --resume results/mixed/20260101T120000Z-1a2b3c4
      kvbench sweep workloads/mixed.yaml --target http://127.0.0.1:8000
      kvbench sweep workloads/mixed.yaml --target vllm
      kvbench sweep workloads/mixed.yaml --executor ray
      kvbench sweep workloads/mixed.yaml --simulate --device H200 --model llama-3.1-70b --tensor-parallel 4
      kvbench sweep W.yaml --preset vllm --serve-cmd 'vllm serve {model} --port {port} --dtype {dtype}
          --block-size {page_size} --kv-cache-memory-bytes {kv_budget}' -o 'sweep={page_size: [16, 32]}'
                  (a {placeholder} for each setting that is varied; -o 'sweep={}' measures the baseline alone)

    \b
    Files written, in results/<workload>/<UTC time>-<git sha>/:
      manifest.json               what was measured, with what, on what
      cells/<cell>/summary.json   metrics per repeat, aggregated and pooled; requests.parquet: raw samples
      lockstep/effects.json       each configuration against the baseline in engine time
      quality.json                what each configuration changes in the model's answers
      summary.csv                 one row a cell
      report.html, report.md      the report

    \b
    Exit codes:
      0    every cell was validly measured; a server that refused requests by errors of its own is a finding, and said
      1    canaries (load.canaries) were answered wrongly
      2    usage or bad input, or another workload, code or machine at --resume
      4    a cell has no valid load, or a server failed; the results are kept
      130  interrupted; go on with the printed --resume command
    """
    from rich.console import Console

    from kvbench.lockstep.process import OPEN_LIMIT_S
    from kvbench.runs.manifest import planned_cells
    from kvbench.runs.results import Manifest
    from kvbench.sweep.instruments import chosen_instrument
    from kvbench.sweep.run import Sweep

    check_goes_with(request.given, RAY_OPTIONS, [f"--executor {request.executor}"])
    if request.workload is None and Path(request.resume or "").suffix in (".yaml", ".yml"):
        request = replace(request, workload=request.resume, resume="latest")  # as one would mean it
    if request.workload or not request.resume:  # a stored workload has its profile
        request = replace(request, profile=chosen_instrument(request, Manifest()).profile(request))
    loaded, run = workload_and_run(request)
    if request.force and run is None:
        raise UsageError("--force goes with --resume: a new run has nothing to differ from; leave it out")
    stored = run.manifest() if run else Manifest()
    chosen = chosen_instrument(request, stored)
    choice, instrument = chosen.choose(loaded, request, stored, begun=run is not None), chosen.instrument
    only = request.only
    if run:
        only = planned_cells(stored, only) if only else stored.only or ()
    if choice.runs_already:  # it must answer before a results folder is made
        target = choice.new_target()
        target.start({}, Path())
        target.stop()
    with contextlib.ExitStack() as stack:
        stack.callback(choice.close)
        machines = {}
        if request.executor == "ray":
            if not instrument.disturbed_by_machine:
                raise UsageError("a simulated sweep runs on no device: leave --executor ray out")
            on_machines = find_plugin("executors", request.executor, "--executor")
            machines["machines"] = stack.enter_context(on_machines(choice, (loaded, request, stored), only, say))
        run_or_plan = Sweep(
            choice,
            Console(),
            only,
            request.output_dir,
            report=None if request.no_report else _predict_and_show,
            quality=None if request.no_quality else find_plugin("after_sweep", "quality", "the step"),
            calibrate=not request.no_calibration,
            resumed=run,
            lockstep_minutes=0.0 if choice.manifest.simulated else request.lockstep_minutes,
            open_limit_s=request.start_timeout or OPEN_LIMIT_S,
            instrument=instrument,
            wait_idle_minutes=request.wait_idle_minutes,
            force=request.force,
            max_minutes=request.max_minutes,
            **machines,
        )
        if request.dry_run:
            return run_or_plan.describe()
        is_measured_here = choice.manifest.is_built_in and not (choice.manifest.simulated or machines)
        if is_measured_here and run is None:  # a finished run that is resumed is reported again
            require_engine("a sweep without --target")
        return run_or_plan.execute()


def _predict_and_show(folder: Path, console: Console) -> None:
    """Writes and shows the report, with a prediction beside each measured cell where the simulator can make one."""
    from kvbench.cli.report import show_report

    try:
        find_plugin("after_sweep", "predict", "the step")(folder, console)
    except UsageError as error:  # the simulator cannot be imported: the report does without
        say(f"note: no cell is predicted: {error}")
    show_report(folder, console)


def workload_and_run(request: SweepRequest) -> tuple[Workload, RunFolder | None]:
    """The workload, and the run to go on with. Without a file, --resume FOLDER takes the stored workload."""
    from kvbench.runs.folder import latest_incomplete, open_run
    from kvbench.runs.manifest import stored_workload
    from kvbench.workload.from_options import read_or_make

    path, resume, answers, overrides = request.workload, request.resume, request.part(Answers), request.changes
    changes = {"profile": request.profile, "seed": request.seed, "repeats": request.repeats, "overrides": overrides}
    if path is None and resume == "latest" and not answers.stated:
        raise UsageError("the workload is missing: give its file, or name the run: --resume results/mixed/<run>")
    if path is None and resume and resume != "latest":
        if stated := [*(name for name, value in changes.items() if value), *answers.stated]:
            raise UsageError(
                f"{request.typed(stated[0])} cannot change a run that has begun: leave it out, or start a new run "
                "without --resume"
            )
        run = open_run(Path(resume))
        manifest = run.manifest()
        if manifest.kind == "load":
            raise UsageError(f"{run.path} is the folder of a `kvbench load`: go on with `kvbench load ... --resume`")
        return stored_workload(manifest), run
    loaded = read_or_make(path, answers, other_engine=bool(request.target or request.serve_cmd), **changes)
    if resume is None:
        return loaded, None
    if resume == "latest":
        return loaded, latest_incomplete(request.output_dir, loaded.name)
    return loaded, open_run(Path(resume))
