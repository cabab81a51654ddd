"""``kvbench dev calibrate-model``: what a simulation's cost model lacks, fitted to a measured run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kvbench.common.options import (
    Existing,
    ExistingFile,
    ExistingFolder,
    Options,
    OutputFile,
    argument,
    option,
    switch,
    takes,
)


@dataclass(frozen=True, kw_only=True)
class CalibrateModelRequest(Options):
    """The request of ``kvbench dev calibrate-model``."""

    run: Existing | None = argument("RUN", None)
    check: tuple[ExistingFolder, ...] = option(
        "Another measured run: predict it with what was fitted. Repeatable.", default=(), metavar="RUN"
    )
    ops: ExistingFolder | None = option(
        "A folder of measured operator times, or a collection GPU/MODEL/tpN of such folders (default: the data sheet).",
        metavar="FOLDER",
    )
    device: str | None = option("The GPUs, where the run does not name them.", metavar="[Nx]NAME")
    model: str | None = option("The model, where the run does not name it.", metavar="NAME")
    tensor_parallel: int | None = option("N GPUs share the model.", least=1, most=64)
    engine: tuple[str, ...] = option(
        "An engine setting that the run does not name, as max_num_seqs=128. Repeatable.",
        default=(), metavar="KEY=VALUE",
    )  # fmt: skip
    fit: tuple[Literal["prompt_layer_s", "host_s", "all_reduce_s", "kernels"], ...] = option(
        "Fit only this (default: all that the run can tell). Repeatable.", default=()
    )
    calibration: ExistingFile | None = option("A calibration that was fitted before, for --check.", metavar="FILE")
    output: OutputFile | None = option("Write the calibration, for --calibration of other commands.", metavar="FILE")
    figure: OutputFile | None = option(
        "Draw the last run's running sequences and KV use, simulated and measured, as HTML.", metavar="FILE"
    )
    as_json: bool = switch("Print JSON instead of the table.", "--json")


@takes(CalibrateModelRequest)
def calibrate_model(request: CalibrateModelRequest) -> int:
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
      kvbench dev calibrate-model results/mixed/<run> --check results/uniform/<run> --output this-cpu.json
      kvbench dev calibrate-model runs/RTX4090/Llama-3.1-8B --ops ops --check runs/RTXPRO6000/Llama-3.1-8B
      kvbench dev calibrate-model load/ --device H200 --model llama-3.1-8b --output h200.json
      kvbench dev calibrate-model steps.csv --device H200 --model llama-3.1-8b --output h200.json
      kvbench dev calibrate-model --calibration h200.json --check another-load/ --device H200 --model llama-3.1-8b
    \b
    Files written: --output's and --figure's.
    \b
    Exit codes: 0 fitted, 2 bad input, or a model that does not fit the device.
    """
    from kvbench.simulation.calibrate.calibration import calibrate_command

    return calibrate_command(**request.values())
