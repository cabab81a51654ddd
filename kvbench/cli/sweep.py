"""``kvbench sweep``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.cli.options import (
    ANSWER_OPTIONS,
    FORM_OPTIONS,
    NO_CALIBRATION,
    OVERRIDES,
    PROFILE,
    SEED,
    FiniteRange,
    add_options,
    given_options,
    ray_options,
    target_options,
    with_form,
    workload_of,
)
from kvbench.common.errors import UsageError, say
from kvbench.common.option_rules import RAY_OPTIONS, check_goes_with, flag

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.measure.instrument import Instrument
    from kvbench.runs.folder import RunFolder
    from kvbench.runs.results import Manifest
    from kvbench.targets.choose import ChosenTarget
    from kvbench.workload.file import Workload


_MOST_PREDICTED_STEPS = 200_000  # of all loads: about a minute
_HELP = """Run every cell of a workload and report what it shows.

WORKLOAD is a YAML file; without one, --input-len, --output-len, --concurrency and --vary make it.

A cell is one engine configuration under one load. Each configuration is measured on a fresh server in every
repeat, in random order, and its prefix cache is reset between loads. A load that other programs disturbed is
measured again at the end, up to twice. --resume of a finished run measures its invalid loads again. Last, the
answers of the built-in engine's configurations are compared, in 10 to 15 s each (see `kvbench quality --help`).

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


@click.command(help=_HELP)
@click.argument("workload", required=False, type=click.Path())
@add_options(*ANSWER_OPTIONS)
@PROFILE
@OVERRIDES
@add_options(*FORM_OPTIONS)
@SEED
@click.option("--repeats", type=click.IntRange(1, 1000), help="Repeats of every cell, each on a fresh server.")
@click.option("--max-minutes", type=FiniteRange(min=0, min_open=True),
              help="End about then. Every cell's first repeat is measured in any case, further ones where they decide "
                   "most (default: the workload's max_minutes, else all repeats).")  # fmt: skip
@click.option("--only", multiple=True, metavar="GLOB",
              help="Only cells whose id matches ('paged-*-c32'); with --resume, of that run. Repeatable.")  # fmt: skip
@click.option("--resume", is_flag=False, flag_value="latest", metavar="[RUN_DIR]",
              help="Go on with an interrupted run: the folder, or the latest incomplete run of WORKLOAD.")  # fmt: skip
@click.option(
    "--lockstep-minutes",
    type=FiniteRange(min=0),
    metavar="N",
    help="At most so long for the engines' own time before the loads: all configurations of the built-in engine take "
    "turns step by step, until every effect on throughput is decided; a slow machine may take three times that for two "
    "launches. 0: not measured (default: 3, or as the run was begun).",
)
@click.option("--wait-idle", "wait_idle_minutes", type=FiniteRange(min=0), default=2.0, show_default=True, metavar="N",
              envvar="KVBENCH_WAIT_IDLE",
              help="Wait at most N minutes for other programs to leave the machine alone: after two disturbed loads in "
                   "a row, then end early; before a disturbed load is measured again, then leave it. 0: never "
                   "wait.")  # fmt: skip
@click.option("--force", is_flag=True,
              help="With --resume: go on though code, versions or machine differ from the run's start.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Check everything, print cells left, order and time; launch nothing.")
@NO_CALIBRATION
@click.option("--no-quality", is_flag=True, envvar="KVBENCH_NO_QUALITY",
              help="Do not measure at the end what the built-in engine's configurations change in answers; "
                   "`kvbench quality` can follow later.")  # fmt: skip
@click.option("--no-report", is_flag=True, help="Keep the raw results only; `kvbench report` can follow later.")
@click.option("--output-dir", type=click.Path(path_type=Path), default="results", show_default=True,
              help="Where runs go.")  # fmt: skip
@click.option("--simulate", is_flag=True,
              help="Measure nothing: run the same engine on a virtual clock, on a machine that need not be here. The "
                   "results are marked as simulated.")  # fmt: skip
@click.option("--device", metavar="NAME",
              help="With --simulate: the kind of GPU, as H200 (default: the workload's simulate.device). --model names "
                   "the model that runs on it.")  # fmt: skip
@click.option("--tensor-parallel", type=click.IntRange(1, 64), metavar="N",
              help="With --simulate: so many of them share the model (default: 1).")  # fmt: skip
@click.option("--ops", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
              help="With --simulate: measured times of operators, in place of the device's data sheet.")  # fmt: skip
@click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
              help="With --simulate: what `kvbench calibrate-model` fitted.")  # fmt: skip
@target_options
@click.option("--port", type=click.IntRange(0, 65535), default=0,
              help="Port of the launched server (default: a free one).")  # fmt: skip
@click.option("--start-timeout", type=FiniteRange(min=1),
              help="Seconds to be ready (default: 180; 900 for other engines, which may compile first).")  # fmt: skip
@ray_options("Where cells run: on this machine, or on the machines of a Ray cluster, one cell a device at a time.")
@click.option("--device-resource", metavar="NAME",
              help="--executor ray: only machines with this Ray resource, such as accelerator_type:H100 "
                   "(default: GPUs where the workload runs on GPUs, else CPUs).")  # fmt: skip
def sweep(*, workload: str | None, resume: str | None, dry_run: bool, **options: Any) -> int:
    from rich.console import Console

    from kvbench.cli.quality import measure_run
    from kvbench.lockstep.process import OPEN_LIMIT_S
    from kvbench.runs.manifest import planned_cells
    from kvbench.runs.results import Manifest
    from kvbench.sweep.run import Sweep

    given, options = given_options(options), with_form(options)
    check_goes_with(given, RAY_OPTIONS, [f"--executor {options['executor']}"])
    if resume and workload is None and Path(resume).suffix in (".yaml", ".yml"):
        workload, resume = resume, "latest"  # `--resume WORKLOAD` reads as one would mean it
    if options["simulate"] and (workload or not resume):  # a stored workload has its profile
        from kvbench.simulation.choose import profile_of

        options["profile"] = profile_of(options)
    loaded, run = workload_and_run(workload, resume, options)
    if options["force"] and run is None:
        raise UsageError("--force goes with --resume: a new run has nothing to differ from; leave it out")
    stored = run.manifest() if run else Manifest()
    choice, instrument = _target_and_instrument(loaded, options, stored, begun=run is not None)
    only = tuple(options["only"])
    if run:
        only = planned_cells(stored, only) if only else stored.only or ()
    if choice.runs_already:  # it must answer before a results folder is made
        target = choice.new_target()
        target.start({}, Path())
        target.stop()
    with contextlib.ExitStack() as stack:
        stack.callback(choice.close)
        machines = {}
        if options["executor"] == "ray":
            if not instrument.disturbed_by_machine:
                raise UsageError("a simulated sweep runs on no device: leave --executor ray out")
            from kvbench.sweep.ray_machines import ray_machines

            machines["machines"] = stack.enter_context(ray_machines(choice, (loaded, options, stored), only, say))
        sweep = Sweep(
            choice,
            Console(),
            only,
            options["output_dir"],
            report=None if options["no_report"] else _predict_and_show,
            quality=None if options["no_quality"] else measure_run,
            calibrate=not options["no_calibration"],
            resumed=run,
            lockstep_minutes=0.0 if choice.manifest.simulated else options["lockstep_minutes"],
            open_limit_s=options["start_timeout"] or OPEN_LIMIT_S,
            instrument=instrument,
            **{name: options[name] for name in ("wait_idle_minutes", "force", "max_minutes")},
            **machines,
        )
        return sweep.describe() if dry_run else sweep.execute()


def _target_and_instrument(
    loaded: Workload, options: Mapping[str, Any], stored: Manifest, begun: bool
) -> tuple[ChosenTarget, type[Instrument]]:
    """Chooses what is measured or simulated, and the instrument that does it. Raises UsageError."""
    from kvbench.simulation.choose import check_options

    simulates = bool(options["simulate"] or stored.simulated)
    if options["simulate"] and begun and not stored.simulated:
        raise UsageError("--simulate cannot go on with a run that was measured: start a new run without --resume")
    check_options(options, simulates=simulates, begun=begun and not options["simulate"])
    if not simulates:
        if loaded.simulate:
            say(f"note: {loaded.name} is measured here; its section `simulate` counts with --simulate only")
        from kvbench.measure.http import HttpInstrument
        from kvbench.targets.choose import choose

        return choose(loaded, options, stored), HttpInstrument
    from kvbench.simulation.choose import simulated_target, simulated_workload
    from kvbench.simulation.instrument import SimulatedInstrument

    if not options["simulate"]:
        return simulated_target(loaded), SimulatedInstrument
    return simulated_target(*simulated_workload(loaded, options, options["overrides"])), SimulatedInstrument


def _predict_and_show(folder: Path, console: Console) -> None:
    """The report, with a prediction beside each measured cell of the built-in engine where one can be made."""
    from kvbench.cli.report import show_report
    from kvbench.common.console import print_plain
    from kvbench.common.errors import log_traceback
    from kvbench.runs.read import read_run
    from kvbench.simulation.calibrate.predict import predict_run

    run = read_run(folder)
    if run.is_built_in and not run.simulated:
        try:
            predict_run(run, _MOST_PREDICTED_STEPS)
        except (UsageError, OSError) as error:
            print_plain(console, f"note: no cell is predicted: {error}")
        except Exception as error:  # whatever goes wrong here must not cost the report of a measured run
            print_plain(console, f"note: no cell is predicted ({error!r}, {log_traceback(error)})")
    show_report(folder, console)


def workload_and_run(
    workload: str | None, resume: str | None, options: Mapping[str, Any]
) -> tuple[Workload, RunFolder | None]:
    """The workload, and the run to go on with. Without a file, --resume FOLDER takes the stored workload."""
    from kvbench.runs.folder import latest_incomplete, open_run
    from kvbench.runs.manifest import stored_workload
    from kvbench.workload.from_options import Answers, answers_in

    changes = {key: options[key] for key in ("profile", "seed", "repeats", "overrides")}
    answers = answers_in(options)
    if workload is None and resume == "latest" and answers == Answers():
        raise UsageError("the workload is missing: give its file, or name the run: --resume results/mixed/<run>")
    if workload is None and resume and resume != "latest":
        changes |= dataclasses.asdict(answers)
        if given := [key for key, value in changes.items() if value]:
            option = "-o" if given[0] == "overrides" else flag(given[0])
            raise UsageError(
                f"{option} cannot change a run that has begun: leave it out, or start a new run without --resume"
            )
        run = open_run(Path(resume))
        manifest = run.manifest()
        if manifest.kind == "load":
            raise UsageError(f"{run.path} is the folder of a `kvbench load`: go on with `kvbench load ... --resume`")
        return stored_workload(manifest), run
    loaded = workload_of(workload, options, **changes)
    if resume is None:
        return loaded, None
    if resume == "latest":
        return loaded, latest_incomplete(options["output_dir"], loaded.name)
    return loaded, open_run(Path(resume))
