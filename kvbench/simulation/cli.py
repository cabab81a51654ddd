"""The commands that simulate: ``kvbench simulate``, ``cache-sim``, ``dev predict`` and ``dev calibrate-model``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvbench.common.options import (
    Count,
    Existing,
    ExistingFile,
    ExistingFolder,
    NotNegativeCount,
    Options,
    OutputFile,
    argument,
    option,
    switch,
    takes,
)
from kvbench.simulation.request import SimulateRequest


@takes(SimulateRequest)
def simulate(request: SimulateRequest) -> int:
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

    return simulate_command(request)


@dataclass(frozen=True, kw_only=True)
class PredictRequest(Options):
    """The request of ``kvbench dev predict``."""

    results: Path = argument("RESULTS")
    no_report: bool = switch("Write predictions.json only; `kvbench report` can follow later.")


@takes(PredictRequest)
def predict(request: PredictRequest) -> int:
    """Predict every cell of RESULTS, and show the errors.

    RESULTS is a sweep of the built-in engine, and is predicted by simulation: the requests of each load go through the
    engine's own scheduler, page pool and prefix cache, without a model. The time of each step is a sum of unit costs (a
    step, a token, a token of context ...), which are fitted to the measured loads of all other cells. So an error says
    how far the simulator can be trusted on this machine, or that the machine was disturbed during that load.

    \b
    Examples:
      kvbench dev predict results/mixed/20260101T120000Z-1a2b3c4
    \b
    Files written, in RESULTS: predictions.json, and the report anew.
    \b
    Exit codes: 0 predicted, 2 bad input.
    """
    from rich.console import Console

    from kvbench.cli.report import show_report
    from kvbench.common.console import print_plain
    from kvbench.common.errors import as_usage_error
    from kvbench.report.predictions import prediction_sentences
    from kvbench.runs.predictions import read_predictions
    from kvbench.runs.read import read_run
    from kvbench.simulation.calibrate.predict import predict_run

    console, results = Console(), request.results
    with as_usage_error():
        run = read_run(results)
    print_plain(console, f"predictions: {predict_run(run)}")
    if predictions := read_predictions(results):
        for sentence in prediction_sentences(predictions):
            print_plain(console, sentence)
    if not request.no_report:
        show_report(results, console)
    return 0


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


_NOT_WITH_TIERS = {
    "pages": "the sizes of the tiers say how many pages each holds",
    "kv_bytes_per_token": "the model tells the bytes",
}


@dataclass(frozen=True, kw_only=True)
class TierOptions(Options, heading="Tiers"):
    """The options of a cache of several tiers."""

    tiers: str | None = option(
        "A cache of several tiers, such as hbm=40GiB,dram=40GiB@50GB/s,ssd=1TiB, and the TTFT that each saves; @SPEED "
        "and @LATENCY of loading are the device's link and a usual SSD's where they are not given.",
        metavar="NAME=SIZE[,...]",
    )
    device: str | None = option(
        "With --tiers: the GPUs, whose speed is simulated: H100, 4xA100-80GB.", metavar="[Nx]NAME"
    )
    policy: Literal["lru", "lfu"] | None = option(
        "With --tiers: the page that tiers below HBM evict: lru, the one used longest ago (default); lfu, the one used "
        "by the fewest requests."
    )


@dataclass(frozen=True, kw_only=True)
class CacheSimRequest(TierOptions):
    """The request of ``kvbench cache-sim``."""

    trace: tuple[Path, ...] = argument("TRACE")
    format: str = option("The trace's format (default: found by its content).", default="auto", metavar="NAME")
    pages: tuple[str, ...] = option(
        "Pages in the pool, such as 1k,5k,20k. Repeatable. (Default: 1, 2, 5, 10 ... from the longest request up to "
        "where nothing is evicted.)",
        default=(), metavar="N[,N...]",
    )  # fmt: skip
    page_size: Count | None = option(
        "Tokens a page of the trace (default: found from the lengths; Mooncake's is 512).", metavar="TOKENS"
    )
    warm_up: NotNegativeCount = option(
        "Let the first N requests only fill the cache, without counting them.", default=0, metavar="REQUESTS"
    )
    kv_bytes_per_token: Count | None = option("Show capacities in bytes as well.", metavar="BYTES")
    model: str | None = option(
        "Show capacities in bytes of this model: a folder, a config JSON or the name of one that ships.", metavar="NAME"
    )
    kv_cache_dtype: str | None = option(
        "With --model: how K and V are stored: auto, fp8_e4m3, int8_per_token_head, ...", metavar="DTYPE"
    )
    as_json: bool = switch("Print JSON instead of the table.", "--json")
    html: OutputFile | None = option("Write the curve as a page, too.", metavar="PATH")


@takes(CacheSimRequest)
def cache_sim(request: CacheSimRequest) -> int:
    """Show what a prefix cache would have hit on TRACE.

    The hits are shown by capacity, up to those of a cache without limit.

    TRACE has page ids: JSONL with hash_ids and input_length (Mooncake, Qwen/Bailian), or a session of
    kv-cache-tester (JSON; several files are several sessions, one after another). Its requests go one after another
    through the engine's own page pool and prefix cache (least recently used pages are evicted first); no model runs.

    \b
    Examples:
      kvbench cache-sim conversation_trace.jsonl
      kvbench cache-sim conversation_trace.jsonl --pages 1k,5k,20k --model llama-3.1-8b --html curve.html
      kvbench cache-sim conversation_trace.jsonl --tiers dram=40GiB,ssd=1TiB --model llama-3.1-8b --device H100
    \b
    Exit codes: 0 shown, 2 bad input. No files are written but --html's.
    """
    from kvbench.common.option_rules import check_exclusive, check_goes_with

    tiers = request.part(TierOptions).values()
    options = {name: value for name, value in request.values().items() if name not in tiers}
    stated = request.stated
    check_goes_with(stated, dict.fromkeys(("policy", "device"), ("--tiers",)), ["--tiers"] if request.tiers else [])
    check_exclusive(stated, {("tiers", other): why for other, why in _NOT_WITH_TIERS.items()})
    if request.tiers is None:
        from kvbench.trace_analysis.commands import cache_sim_command

        return cache_sim_command(**options)
    from kvbench.simulation.fleet.tiers import tiers_command

    return tiers_command(**{name: options[name] for name in options if name not in _NOT_WITH_TIERS}, **tiers)
