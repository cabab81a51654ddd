"""Hugging Face's text-generation-inference. From its documentation and source; not tried here, since it needs a GPU.

Sources: docs/source/reference/launcher.md (flags, PREFIX_CACHING and the like), docs/source/reference/metrics.md
(names and units) and router/src/validation.rs (``ignore_eos_token: false``) of huggingface/text-generation-inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.load.dialect import Dialect
from kvbench.targets.presets.preset import (
    COMMON,
    WHATEVER,
    Context,
    Preset,
    Setting,
    Version,
    absent,
    always,
    budget_in,
    flag,
    switch,
)
from kvbench.targets.prometheus import MetricNames

_MOST_REQUESTS = "65536"  # its router refuses any above its limit, 128 unless it is told, in place of queueing them


def _length_words(value: Any, context: Context) -> str:
    return f"--max-total-tokens {value} --max-input-tokens {int(value) - 1}"


def _environment(context: Context) -> Mapping[str, str | None]:
    variables = {"HF_HUB_OFFLINE": "1", "USAGE_STATS": "off", "MAX_CONCURRENT_REQUESTS": _MOST_REQUESTS}
    if (caching := context.settings.get("enable_prefix_caching")) is not None:
        variables |= dict.fromkeys(("PREFIX_CACHING", "USE_PREFIX_CACHING"), "1" if caching else "0")
    return variables


TGI = Preset(
    name="tgi",
    title="TGI",
    program="text-generation-launcher",
    command="{program} --model-id {model} --hostname 127.0.0.1 --port {port}",
    settings={
        **COMMON,
        "page_size": absent("the page size follows from its attention kernels"),
        "kv_budget": budget_in("capacity_tokens", "--max-batch-total-tokens {}"),
        "kv_cache_dtype": Setting(
            values={"auto": "", "fp8_e4m3": "--kv-cache-dtype fp8_e4m3fn", "fp8_e5m2": "--kv-cache-dtype fp8_e5m2"},
            why="it has no such KV cache",
        ),
        "enable_prefix_caching": switch("", ""),  # by the environment
        "enable_chunked_prefill": always(True, "it is on wherever its attention kernels can do it"),
        "max_model_len": Setting(words=_length_words),
        "max_num_seqs": flag("--max-batch-size {}"),
        "max_num_batched_tokens": flag("--max-batch-prefill-tokens {}"),
        "preemption_mode": always("recompute", "it admits what fits to its end, so it never preempts"),
        "cuda_graphs": switch("", "--cuda-graphs 0"),
        "device": flag("", "auto", "cuda", why="its launcher needs an accelerator"),
        "dtype": Setting(
            values={"auto": "", "float16": "--dtype float16", "bfloat16": "--dtype bfloat16"},
            why="it serves float16 and bfloat16",
        ),
        "seed": WHATEVER,  # of the weights, which are in the folder; greedy requests need none
    },
    environment=_environment,
    metrics=MetricNames(
        ("tgi_",),
        names={
            "batch_current_size": "num_requests_running",
            "queue_size": "num_requests_waiting",
            "request_count_total": "request_total",
            "request_success_total": "request_success_total",
            "request_generated_tokens_sum": "generation_tokens_total",
            "request_input_length_sum": "prompt_tokens_total",
            "request_duration": "e2e_request_latency_seconds",
            "request_queue_duration": "request_queue_time_seconds",
            "request_inference_duration": "request_inference_time_seconds",
            "request_mean_time_per_token_duration": "request_time_per_output_token_seconds",
        },
    ),
    version=Version(path="/info"),
    dialect=Dialect(token_id_prompts=False, ignore_eos=False, return_token_ids=False),
    grace_s=20.0,
    quirks=(
        "prompts are sent as text, since it takes no token ids",
        "the model folder has no end-of-sequence token where the load ignores it, since requests cannot say so",
        "the prefix cache cannot be emptied: a fresh server for each load that needs it cold",
    ),
)
