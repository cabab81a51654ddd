"""llama.cpp's llama-server. From its documentation; not tried here.

Source: tools/server/README.md of ggml-org/llama.cpp (flags; GET /metrics, which needs --metrics; GET /props; POST
/slots/{id}?action=erase, which needs --slot-save-path). With --kv-unified all slots share one KV buffer of --ctx-size
tokens; without it each slot owns --ctx-size / --parallel of them: a contiguous reservation.
"""

from __future__ import annotations

from kvbench.load.dialect import Dialect
from kvbench.targets.presets.preset import (
    COMMON,
    WHATEVER,
    Preset,
    Reset,
    Setting,
    Version,
    absent,
    always,
    budget_in,
    flag,
    switch,
)
from kvbench.targets.prometheus import MetricNames

_FROM_GGUF = (
    "cannot be worked out from a GGUF file. Take the budget out with -o engine.kv_budget=null and give the tokens of "
    "all slots with --target-args '--ctx-size N'"
)

LLAMACPP = Preset(
    name="llamacpp",
    title="llama.cpp",
    program="llama-server",
    # A kept-alive connection holds an HTTP thread; the default is --parallel + 2.
    command="{program} --model {model} --host 127.0.0.1 --port {port} --metrics --slots --slot-save-path {scratch}"
    " --kv-unified --cache-ram 0 --no-context-shift --no-ui --threads-http 256",
    settings={
        **COMMON,
        "layout": always("paged", "its unified KV buffer is the nearest to pages; separate slots are not offered here"),
        "page_size": absent("its KV buffer has no pages: cells of one token each"),
        "kv_budget": budget_in("capacity_tokens", "--ctx-size {}", _FROM_GGUF),
        "kv_cache_dtype": always("auto", "its quantised KV caches (q8_0, q4_0 ...) have other formats"),
        "enable_prefix_caching": switch("--cache-prompt", "--no-cache-prompt"),
        "max_model_len": flag("--kv-unified-per-slot {}"),
        "max_num_seqs": flag("--parallel {}"),
        "max_num_batched_tokens": flag("--batch-size {} --ubatch-size {}"),
        "preemption_mode": always("recompute", "it never preempts: a request that outgrows the buffer fails"),
        "device": Setting(values={"auto": "", "cpu": "--device none", "cuda": ""}, why="it is auto, cpu or cuda"),
        "dtype": WHATEVER,
        "seed": flag("--seed {}"),
        "num_threads": flag("--threads {}"),
    },
    environment=lambda context: {"LLAMA_ARG_OFFLINE": "1"},
    metrics=MetricNames(
        ("llamacpp:",),
        names={
            "requests_processing": "num_requests_running",
            "requests_deferred": "num_requests_waiting",
            "tokens_predicted_total": "generation_tokens_total",
            # Computed and cached tokens are counted apart: a prompt, and a query of the cache, has both.
            "prompt_tokens_total": ("prompt_tokens_total", "prefix_cache_queries_total"),
            "prompt_tokens_cached_total": (
                "prefix_cache_hits_total",
                "prompt_tokens_total",
                "prefix_cache_queries_total",
            ),
            # Of all slots, added up; prompt_seconds_total is the engine's time, however many it serves at once.
            "tokens_predicted_seconds_total": "request_decode_time_seconds_sum",
        },
    ),
    reset=Reset("/slots/{slot}?action=erase"),
    start_guess_s=10.0,
    version=Version(path="/props", key="build_info"),
    dialect=Dialect(return_token_ids=False),
    model_format="gguf",
    quirks=(
        "the prompt cache is one per slot: a prefix is reused where a request meets the slot that has it",
        "it does not tell how full its KV buffer is",
    ),
)
