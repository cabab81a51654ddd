"""``kvbench calibrate-model``: what a simulation's cost model lacks, fitted to a measured run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from kvbench.cli.options import OutputFile, add_options

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_FITTED = ("prompt_layer_s", "host_s", "all_reduce_s", "kernels")
_OPTIONS = (
    click.option("--check", multiple=True, type=_FOLDER, metavar="RUN",
                 help="Another measured run: predict it with what was fitted. Repeatable."),
    click.option("--ops", type=_FOLDER, metavar="FOLDER",
                 help="Measured times of operators, or a collection GPU/MODEL/tpN of them (default: the data sheet)."),
    click.option("--device", metavar="[Nx]NAME", help="The GPUs, where a run does not state them."),
    click.option("--model", metavar="NAME", help="The model, where a run does not state it."),
    click.option("--tensor-parallel", type=click.IntRange(1, 64), metavar="N", help="So many GPUs share the model."),
    click.option("--engine", multiple=True, metavar="KEY=VALUE",
                 help="A setting of the engine that a run does not state, as max_num_seqs=128. Repeatable."),
    click.option("--fit", multiple=True, type=click.Choice(_FITTED),
                 help="What is fitted (default: what the run can tell). Repeatable."),
    click.option("--calibration", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                 help="One that was fitted before, for --check."),
    click.option("--output", type=OutputFile(), metavar="FILE",
                 help="Write the calibration, for --calibration of others."),
    click.option("--figure", type=OutputFile(), metavar="FILE",
                 help="Draw the last run's running sequences and KV use, simulated over measured, as HTML."),
    click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table."),
)  # fmt: skip


@click.command(name="calibrate-model")
@click.argument("run", required=False, type=click.Path(exists=True, path_type=Path))
@add_options(*_OPTIONS)
def calibrate_model(**options: Any) -> int:
    """Fit what a simulation's cost model lacks to RUN.

    Then show how well it predicts other runs.

    RUN is the folder of a measured run: requests.jsonl with the times of its requests, as vLLM's engine stamps them
    (docs/simulation.md has the fields), or the requests.parquet of `kvbench load`. Or it is a step log of the built-in
    engine (`kvbench serve --step-log`), whose last third is held out. RUN's arrivals and lengths are simulated, and
    fitted are the launches of steps with prompts, the host's time where it does not overlap, and the exchange between
    GPUs that share a model.

    RUN may also be the results of a sweep of the built-in engine on a CPU: fitted are unit costs of its steps, and with
    them `--device this-cpu` simulates that machine; each RUN of --check is another sweep then.

    \b
    Examples:
      kvbench calibrate-model results/mixed/<run> --check results/uniform/<run> --output this-cpu.json
      kvbench calibrate-model runs/RTX4090/Llama-3.1-8B --ops ops --check runs/RTXPRO6000/Llama-3.1-8B
      kvbench calibrate-model load/ --device H200 --model llama-3.1-8b --output h200.json
      kvbench calibrate-model steps.csv --device H200 --model llama-3.1-8b --output h200.json
      kvbench calibrate-model --calibration h200.json --check another-load/ --device H200 --model llama-3.1-8b
    \b
    Files written: --output's and --figure's.
    \b
    Exit codes: 0 fitted, 2 bad input, or a model that does not fit the device.
    """
    from kvbench.simulation.calibrate.calibration import calibrate_command

    return calibrate_command(**options)
