"""``transformers serve`` with continuous batching. Tried for real, in the tests, with 5.23 (and accelerate).

Sources: https://huggingface.co/docs/transformers/serving, and cli/serve.py, cli/serving/completion.py (no [DONE],
stream_options ignored, usage in the last chunk, unknown fields refused, text prompts only) and
generation/configuration_utils.py (ContinuousBatchingConfig) of transformers 5.23.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from kvbench.load.dialect import Dialect
from kvbench.targets.presets.preset import Context, Preset, Setting, Version, absent, always, flag, whatever

_LEAST_PAGE = 4


def _page_refusal(value: Any, context: Context) -> str | None:
    return None if isinstance(value, int) and value >= _LEAST_PAGE else f"its pages have at least {_LEAST_PAGE} tokens"


def _budget_refusal(value: Any, context: Context) -> str | None:
    if context.capacity.get("num_pages"):
        return None
    return "it takes a number of pages, and how many fit the budget cannot be worked out for this model"


def _budget_words(value: Any, context: Context) -> tuple[str, ...]:
    return ("--cb-num-blocks", str(context.capacity["num_pages"]))


def _batch_limit_refusal(value: Any, context: Context) -> str | None:
    """It has no such limit, and needs none where the load never reaches it."""
    if context.max_in_flight is not None and context.max_in_flight <= int(value):
        return None
    return "it has no such limit, and this load may have more requests in flight"


def _environment(context: Context) -> Mapping[str, str | None]:
    variables: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if context.on_cpu and "num_threads" not in context.settings:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        variables["OMP_NUM_THREADS"] = str(cores)
    return variables


TRANSFORMERS = Preset(
    name="transformers",
    title="transformers serve",
    module="transformers",
    command=(
        "{program}",
        "-m",
        "transformers.cli.transformers",
        "serve",
        "{model}",
        "--continuous-batching",
        "--attn-implementation",
        "sdpa",
        "--host",
        "127.0.0.1",
        "--port",
        "{port}",
    ),
    settings={
        "layout": always("paged", "its continuous batching always pages"),
        "page_size": flag("--cb-block-size", "{}", refuse=_page_refusal, nearest=lambda value, context: _LEAST_PAGE),
        "kv_budget": Setting(words=_budget_words, refuse=_budget_refusal),
        "kv_cache_dtype": always("auto", "its KV cache has the model's dtype"),
        "enable_prefix_caching": always(True, "it shares pages of equal prefixes, and its command line cannot say no"),
        "enable_chunked_prefill": always(True, "prompts are always cut to its batch"),
        "max_model_len": whatever(),
        "max_num_seqs": Setting(refuse=_batch_limit_refusal),
        "max_num_batched_tokens": flag("--cb-max-batch-tokens", "{}"),
        "max_num_partial_prefills": absent("it has no such setting"),
        "scheduling_policy": always("fcfs", "it serves in order of arrival"),
        "preemption_mode": always("recompute", "its command line has no swap space"),
        "swap_space": absent("its command line has none"),
        "cuda_graphs": Setting(
            values={True: ("--cb-use-cuda-graph",), False: ("--no-cb-use-cuda-graph",)}, why="it is true or false"
        ),
        "device": flag("--device", "{}"),
        "dtype": flag("--dtype", "{}"),
        "seed": flag("--default-seed", "{}"),
        "kernel_backend": always("auto", "its attention is PyTorch's SDPA"),
        "torch_compile": Setting(values={True: ("--compile",), False: ()}, why="it is true or false"),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    environment=_environment,
    models_path=None,  # it lists Hugging Face's cache, not what it serves
    start_guess_s=20.0,
    version=Version(packages=("transformers",)),
    dialect=Dialect(
        done_marker=False, stream_options=False, token_id_prompts=False, ignore_eos=False, return_token_ids=False
    ),
    quirks=(
        "streams end without [DONE], with usage in the last chunk",
        "prompts are sent as text, since it takes no token ids",
        "the model folder has no end-of-sequence token where the load ignores it, since requests cannot say so",
        "it has no /metrics and cannot empty its prefix cache: a fresh server for each load that needs it cold",
        "max_model_len keeps the prompts within bounds; the server is not told",
    ),
    sources=("https://huggingface.co/docs/transformers/serving", "transformers 5.23, read and run"),
)
