"""SGLang's server. From its documentation; not tried here, since it needs a GPU.

Sources: https://docs.sglang.io/docs/advanced_features/server_arguments (flags),
https://docs.sglang.io/docs/references/production_metrics (names; --enable-metrics), sgl-project/sglang pull requests
21413 and 21490 (/flush_cache answers 400 while requests run, 200 once the radix tree is empty).
"""

from __future__ import annotations

from typing import Any

from kvbench.targets.presets.preset import (
    COMMON,
    Context,
    Preset,
    Reset,
    Setting,
    Version,
    always,
    budget_in,
    flag,
    switch,
)
from kvbench.targets.prometheus import MetricNames


def _batch_words(value: Any, context: Context) -> str:
    return f"--chunked-prefill-size {value if context.settings.get('enable_chunked_prefill', True) else -1}"


def _chunk_refusal(value: Any, context: Context) -> str | None:
    if value or context.settings.get("max_num_batched_tokens"):
        return None
    return "--chunked-prefill-size says both, so max_num_batched_tokens must be given beside it"


SGLANG = Preset(
    name="sglang",
    title="SGLang",
    module="sglang",
    command="{program} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port} --enable-metrics"
    " --enable-cache-report",
    settings={
        **COMMON,
        "page_size": flag("--page-size {}"),
        "kv_budget": budget_in("capacity_tokens", "--max-total-tokens {}"),
        "kv_cache_dtype": flag("--kv-cache-dtype {}", "auto", "fp8_e4m3", "fp8_e5m2", why="it has no such KV cache"),
        "enable_prefix_caching": switch("", "--disable-radix-cache"),
        "enable_chunked_prefill": switch("", "", refuse=_chunk_refusal),
        "max_model_len": flag("--context-length {}"),
        "max_num_seqs": flag("--max-running-requests {}"),
        "max_num_batched_tokens": Setting(words=_batch_words),
        "max_num_waiting": flag("--max-queued-requests {}"),
        "scheduling_policy": Setting(
            values={
                "fcfs": "--schedule-policy fcfs",
                "priority": "--enable-priority-scheduling --schedule-low-priority-values-first",
            },
            why="it has no such policy",
        ),
        "preemption_mode": always("recompute", "it retracts requests and computes them anew"),
        "cuda_graphs": switch("", "--disable-cuda-graph"),
        "device": Setting(
            values={"auto": "", "cpu": "--device cpu", "cuda": "--device cuda"}, why="it is auto, cpu or cuda"
        ),
        "seed": flag("--random-seed {}"),
        "torch_compile": switch("--enable-torch-compile", ""),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    metrics=MetricNames(
        ("sglang:", "sglang_"),
        names={
            "num_running_reqs": "num_requests_running",
            "num_queue_reqs": "num_requests_waiting",
            "token_usage": "kv_cache_usage_perc",
            "cached_tokens_total": "prefix_cache_hits_total",
            "prompt_tokens_total": ("prompt_tokens_total", "prefix_cache_queries_total"),  # cached ones included
            "num_retracted_requests_total": "num_preemptions_total",
            "queue_time_seconds": "request_queue_time_seconds",
        },
        facts={
            "max_total_num_tokens": {"": "capacity_tokens"},
            "num_pages": {"": "num_pages"},
            "page_size": {"": "page_size"},
            "cache_config_info": {"page_size": "page_size", "num_pages": "num_pages"},
        },
        parts_label="priority",  # with --enable-priority-scheduling: the requests of each, and ("") of all
    ),
    reset=Reset("/flush_cache", busy=(400,)),
    version=Version(path="/server_info"),
    environment=lambda context: {"HF_HUB_OFFLINE": "1"},
    dialect=Preset.dialect.model_copy(update={"return_token_ids": False}),
    grace_s=15.0,
    quirks=(
        "the KV budget becomes --max-total-tokens, by kvbench's arithmetic of bytes a token",
        "prefix-cache queries are all prompt tokens of finished requests",
    ),
)
