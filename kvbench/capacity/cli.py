"""``kvbench plan``: what memory holds, of a workload's configurations or of a model on GPUs."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from kvbench.capacity.gpus import VENDORS
from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.options import Count, FiniteRange, Options, argument, option, switch, takes
from kvbench.common.packages import find_file
from kvbench.workload.options import Answers, FileOptions


class Tokens(click.ParamType):
    """A number of tokens: 8192, or 8k for 8 x 1024."""

    name = "N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d{1,9})(k?)", str(value).strip().replace(",", ""), re.IGNORECASE)
        if not match or int(match[1]) < 1:
            self.fail(f"{value!r} is not a number of tokens such as 8192 or 8k.", param, ctx)
        return int(match[1]) * (1024 if match[2] else 1)


TokenCount = Annotated[int, Tokens()]


@dataclass(frozen=True, kw_only=True)
class ModelOptions(Options, heading="With a MODEL"):
    """The options of the plan of a model."""

    gpu: str | None = option("Plan for these GPUs, as 4xA100-80GB or L4.", metavar="[Nx]NAME")
    context: TokenCount | None = option("Tokens of a sequence, 8192 or 8k (default: 4096).", metavar="N")
    kv_cache_dtype: str | None = option(
        "How K and V are stored: auto (the model's own type), fp8, fp8_e5m2, int8_per_token_head or "
        "int4_per_token_head.",
        metavar="DTYPE",
    )
    quantization: str | None = option(
        "How the weights are stored, if not as in the checkpoint: fp8, awq, gptq or mxfp4.", metavar="NAME"
    )
    pick: bool = switch("Name the cheapest GPUs that hold it by --price; without prices the fewest and smallest.")
    price: str | None = option("Price of one GPU an hour, as L4=0.8,H100-80GB=2.9.", metavar="GPU=P[,GPU=P]")
    vendor: Annotated[str, click.Choice(VENDORS, case_sensitive=False)] | None = option(
        "Consider only GPUs of this vendor."
    )
    as_json: bool = switch("Print the figures as JSON.", "--json")
    max_model_len: TokenCount | None = option(
        "The tokens that a contiguous cache reserves for a sequence (default: the model's limit).",
        metavar="N",
        rare=True,
    )
    page_size: Count | None = option("Tokens a page (default: 16).", rare=True)
    gpu_memory_utilization: Annotated[float, FiniteRange(0, 1, min_open=True)] | None = option(
        "The share of a GPU's memory that the engine takes (default: 0.9).", metavar="SHARE", rare=True
    )
    max_num_batched_tokens: Count | None = option(
        "The most tokens that the engine computes in a step (default: vLLM's for the GPU).", rare=True
    )
    max_num_seqs: Count | None = option(
        "The most sequences that the engine computes in a step (default: vLLM's for the GPU).", rare=True
    )


@dataclass(frozen=True, kw_only=True)
class PlanRequest(Answers, FileOptions, ModelOptions):
    """The request of ``kvbench plan``."""

    what: str | None = argument("WORKLOAD|MODEL", None)


@takes(PlanRequest)
def plan(request: PlanRequest) -> int:
    """Show what memory holds, of a workload or of a model.

    Arithmetic only, nothing is launched. What ends in .yaml, or is a file that is no config.json, is a workload. All
    else is a model: a folder, a config.json, or the name of one whose dimensions ship, such as Qwen/Qwen3-32B.

    Of a WORKLOAD, what each configuration gets for its KV budget: bytes a token (scales of a quantised KV among them),
    pages or reservations, tokens, page-table bytes, how many sequences of max_model_len tokens fit at once, and what
    the swap space holds; then, for each load, whether memory limits it.

    Of a MODEL: bytes a token, a sequence of --context, --concurrency of them; the weights; which GPUs hold that under
    vLLM; and with --gpu or --pick what is left for KV on them, and the largest concurrency by length.

    \b
    Examples:
      kvbench plan workloads/mixed.yaml
      kvbench plan workloads/mixed.yaml -o engine.kv_budget=1GiB
      kvbench plan --input-len 600 --output-len 150 --concurrency 20 --vary kv_cache_dtype=auto,fp8
      kvbench plan Qwen3-32B --context 8k --concurrency 40 --kv-cache-dtype fp8 --pick
      kvbench plan Qwen3-32B --context 8k --concurrency 40 --pick --vendor amd
      kvbench plan llama-3.1-70b --gpu 4xA100-80GB --concurrency 256
    \b
    Exit codes: 0 printed, 2 a configuration is impossible, or a model or GPU is not known. No files are written.
    """
    what, answers, model = request.what, request.part(Answers), request.part(ModelOptions)
    if what is None and not model.stated and not answers.stated:
        raise UsageError(
            "nothing to plan: give a model such as Qwen3-32B, a workload such as workloads/mixed.yaml, or "
            "--input-len 600 --output-len 150 --concurrency 20"
        )
    is_config = what is not None and Path(what).suffix == ".json"
    if what is None or Path(what).suffix in (".yaml", ".yml") or (find_file(Path(what)).is_file() and not is_config):
        if model.stated:
            option, way_out = model.typed(model.stated[0]), "name one, such as Qwen3-32B"
            if what is not None:
                way_out = "leave it out, or name a model such as Qwen3-32B"
            raise UsageError(f"{option} is for the plan of a model: {way_out}")
        return _plan_workload(request)
    others = [name for name in answers.stated if name != "concurrency"]
    if others := [*others, *request.part(FileOptions).stated]:
        raise UsageError(
            f"{request.typed(others[0])} is for the plan of a workload, and {what!r} is a model: leave it out, or name "
            "a workload file that ends in .yaml"
        )
    return _plan_model(what, answers.concurrency or (1,), model)


def _plan_workload(request: PlanRequest) -> int:
    from rich.console import Console

    from kvbench.common.console import print_table
    from kvbench.sweep.plan import DROP_FIRST, capacity_table, memory_notes, preflight
    from kvbench.targets.builtin import check_configuration
    from kvbench.workload.design import plan_sweep
    from kvbench.workload.from_options import read_or_make

    how = {"profile": request.profile, "overrides": request.overrides}
    loaded = read_or_make(request.what, request.part(Answers), **how)
    design, _ = plan_sweep(loaded, (), check_configuration)
    checked = preflight(loaded, design, check_configuration)
    table, notes = capacity_table(f"{loaded.name}, {loaded.profile} profile", design, checked.capacity)
    console = Console()
    print_table(console, table, drop_first=DROP_FIRST)
    notes = (*notes, *(f"note: {note}" for note in design.notes))
    for note in (*notes, *memory_notes(design, checked.capacity, checked.lengths)):
        console.print(note, highlight=False, markup=False)
    return 0


def _plan_model(name: str, concurrency: tuple[int, ...], options: ModelOptions) -> int:
    from rich.console import Console

    from kvbench.capacity import answer as shown
    from kvbench.capacity.fit import Settings
    from kvbench.capacity.gpus import parse_gpus, parse_prices
    from kvbench.capacity.model import plan_model
    from kvbench.capacity.weights import QUANTIZATIONS
    from kvbench.common.console import print_table
    from kvbench_engine.config import KV_CACHE_DTYPE_ALIASES
    from kvbench_kernels.kv_formats import find_format

    if len(concurrency) > 1:
        raise UsageError("--concurrency has several numbers, but a plan for a model takes one: give one")
    if options.gpu is not None and options.pick:
        raise UsageError("--gpu names the GPUs and --pick chooses them: give one of the two")
    if options.gpu is not None and options.vendor:
        raise UsageError("--gpu names the GPUs, so --vendor has nothing to choose: leave it out")
    if (quantization := options.quantization) and quantization not in QUANTIZATIONS:
        raise UsageError(f"--quantization {quantization!r} is not one of {', '.join(QUANTIZATIONS)}: give one of these")
    names = ("kv_cache_dtype", "page_size", "gpu_memory_utilization", "max_num_batched_tokens", "max_num_seqs")
    settings = {name: getattr(options, name) for name in names if getattr(options, name)}
    if dtype := settings.get("kv_cache_dtype"):
        settings["kv_cache_dtype"] = KV_CACHE_DTYPE_ALIASES.get(dtype, dtype)
        with as_usage_error():
            find_format(settings["kv_cache_dtype"])
    planned = shown.answer(
        plan_model(name),
        Settings(**settings),
        context=options.context,
        concurrency=concurrency[0],
        max_model_len=options.max_model_len,
        gpus=parse_gpus(options.gpu) if options.gpu is not None else None,
        vendor=options.vendor,
        prices=parse_prices(options.price) if options.price is not None else None,
        quantization=quantization,
        choose=options.pick,
    )
    if options.as_json:
        click.echo(json.dumps(shown.as_dict(planned), indent=2))
        return 0
    console = Console()
    for sentence in shown.sentences(planned):
        console.print(sentence, highlight=False, markup=False)
    tables = [shown.model_table(planned)]
    if planned.memory is not None:
        tables.append(shown.memory_table(planned, planned.memory))
        if planned.memory.kv > 0:
            tables.append(shown.concurrency_table(planned, planned.memory))
    for table in tables:
        print_table(console, table)
    if planned.shows_gpus:
        print_table(console, shown.gpus_table(planned), drop_first=shown.DROP_FIRST)
    console.print(shown.footnote(planned), highlight=False, markup=False)
    return 0
