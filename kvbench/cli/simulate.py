"""``kvbench simulate``: one load or trace on a machine, or a fleet, that need not be here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import (
    OVERRIDES,
    PROMPT_OPTIONS,
    SEED,
    FiniteRange,
    NumberList,
    add_options,
    given_options,
    ray_options,
)

_POSITIVE = FiniteRange(min=0, min_open=True)
_MACHINE_OPTIONS = (
    click.option("--device", metavar="[Nx]NAME",
                 help="The kind of GPU, as H200 or 4xA100-80GB (default: the workload's simulate.device)."),
    click.option("--model", metavar="NAME",
                 help="A model that `kvbench plan` knows, or its config.json (default: the workload's)."),
    click.option("--tensor-parallel", type=click.IntRange(1, 64), metavar="N",
                 help="So many GPUs share the model (default: N of --device)."),
    click.option("--ops", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
                 help="Measured times of operators, in place of the device's data sheet."),
    click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                 help="What `kvbench calibrate-model` fitted."),
)  # fmt: skip
_LOAD_OPTIONS = (
    click.option("--at", metavar="LOAD",
                 help="Which of the WORKLOAD's loads: c32 is that of 32 users, r4 that of 4 requests/s (default: the "
                 "first)."),
    click.option("--request-rate", type=NumberList(float), metavar="R[,R]",
                 help="Open loop at R requests/s (conversations/s where the workload has them); inf: all at once."),
    click.option("--burstiness", type=_POSITIVE, metavar="B",
                 help="Gamma-distributed gaps: below 1 burstier than Poisson, above 1 more regular."),
    click.option("--max-concurrency", "--concurrency", type=NumberList(int), metavar="N[,N]",
                 help="Closed loop: the users. Open loop: most requests in flight."),
    click.option("--num-prompts", type=click.IntRange(1), metavar="N",
                 help="Requests of the load, or conversations where the workload has them."),
    click.option("--goodput", multiple=True, metavar="NAME:MS", help="An SLO such as 'ttft:200 tpot:50'. Repeatable."),
    click.option("--replicas", type=NumberList(int), default="1", show_default=True, metavar="N[,N]",
                 help="So many engines, each with GPUs and a prefix cache of its own."),
    click.option("--router", multiple=True, type=click.Choice(("round-robin", "least-loaded", "prefix-aware")),
                 help="Which replica gets a request (default: round-robin). Given several times: each is simulated, "
                 "and they are compared."),
    click.option("--processes", type=click.IntRange(1), metavar="N",
                 help="Of several simulations, so many at once (default: one a core)."),
    click.option("--find-max-rate", metavar="SLO",
                 help="The highest request rate that meets SLO: conditions such as p95_ttft<=500ms,p99_itl<=50ms or "
                 "goodput>=95%, as `kvbench load` has them."),
    click.option("--run-seconds", type=_POSITIVE, default=120.0, show_default=True,
                 help="--find-max-rate: seconds of arrivals of a run, at least."),
    click.option("--tolerance", type=FiniteRange(0.001, 0.5), default=0.02, show_default=True,
                 help="--find-max-rate: how near to the next rate that missed."),
)  # fmt: skip


@click.command()
@click.argument("workload", type=click.Path(), required=False)
@add_options(*_MACHINE_OPTIONS, *PROMPT_OPTIONS)
@click.option("--profile", metavar="NAME", help="cpu or gpu: which of the file's profiles to use (default: gpu).")
@OVERRIDES
@SEED
@add_options(*_LOAD_OPTIONS)
@ray_options("Where several simulations run: in processes of this machine, or on all cores of a Ray cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
@click.option("--output-dir", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep figures and requests there; it must be new or empty (default: keep nothing).")  # fmt: skip
def simulate(**options: Any) -> int:
    """Run one load or trace on a machine that is not here.

    The machine may be a fleet.

    The engine is the built-in one, with its scheduler, page pool, prefix cache and swap; only its tensors are replaced,
    by a cost model of the device, and its clock, by a virtual one. All figures are simulated: nothing is measured.

    The load is one of WORKLOAD, or without a file the one that --input-len, --output-len and --concurrency make, or the
    trace of --dataset-path at its own times. The same options give the same bytes.

    \b
    Examples:
      kvbench simulate --device H200 --model llama-3.1-8b --input-len 600 --output-len 150 --concurrency 64
      kvbench simulate --device 4xA100-80GB --model llama-3.1-70b --dataset-path conversation_trace.jsonl
      kvbench simulate workloads/mixed.yaml --device L4 --at c256 -o engine.enable_prefix_caching=true
      kvbench simulate workloads/mixed.yaml --device L4 --request-rate 2,4,8 --output-dir out
      kvbench simulate workloads/conversations.yaml --device H200 --model llama-3.1-8b --replicas 4
          --router round-robin --router least-loaded --router prefix-aware
      kvbench simulate workloads/mixed.yaml --device L4 --replicas 1,2,4 --find-max-rate 'p95_ttft<=500ms'
    \b
    Files written, with --output-dir only (of several simulations in a folder each):
      summary.json        the figures, and what was simulated with which cost model
      requests.parquet    one row a request, in the order of their ends, as `kvbench load` has them
    \b
    Exit codes: 0 simulated; 2 bad input, or a model that does not fit; 4 a simulation failed; 130 interrupted.
    """
    from kvbench.simulation.command import simulate_command

    return simulate_command(given=given_options(options), **options)
