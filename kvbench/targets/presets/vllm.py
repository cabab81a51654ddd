"""vLLM's OpenAI server. Tried for real with the CPU build of 0.32.

Sources: https://docs.vllm.ai/en/v0.32.0/cli/serve/ (flags), /usage/metrics/ (names), /getting_started/installation/cpu/
(libraries to preload, OMP_NUM_THREADS), and vllm/entrypoints/serve/dev/cache/api_router.py (/reset_prefix_cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvbench.common.machine import usable_cores
from kvbench.targets.presets.preset import (
    COMMON,
    Context,
    Preset,
    Reset,
    Setting,
    Version,
    absent,
    always,
    flag,
    switch,
)
from kvbench.targets.prometheus import MetricNames

_CPU_PAGE, _GPU_PAGE = 32, 16
_GPU_ONLY_DTYPES = ("int8_per_token_head", "int4_per_token_head")
_PRELOADED = ("libtcmalloc*.so.4", "libiomp5.so")  # what its CPU backend looks for in LD_PRELOAD


def _page_refusal(value: Any, context: Context) -> str | None:
    step = _CPU_PAGE if context.on_cpu else _GPU_PAGE
    if isinstance(value, int) and value > 0 and value % step == 0:
        return None
    return f"its {'CPU' if context.on_cpu else 'GPU'} attention takes multiples of {step}"


def _nearest_page(value: Any, context: Context) -> int:
    step = _CPU_PAGE if context.on_cpu else _GPU_PAGE
    return max(step, round(int(value) / step) * step)


def _dtype_refusal(value: Any, context: Context) -> str | None:
    return "its CPU backend has no such KV cache" if context.on_cpu and value in _GPU_ONLY_DTYPES else None


def _chunk_refusal(value: Any, context: Context) -> str | None:
    batch, longest = (context.settings.get(k) for k in ("max_num_batched_tokens", "max_model_len"))
    if value or not batch or not longest or batch >= longest:
        return None
    return f"without chunked prefill it needs max_num_batched_tokens of at least max_model_len ({batch} < {longest})"


def _budget_words(value: Any, context: Context) -> str:
    """The bytes of as many tokens as every other server gets, without the page table's; unknown: the whole budget."""
    known = context.capacity
    tokens, each = known.get("capacity_tokens"), known.get("bytes_per_token")
    count = tokens * each if tokens and each else known.get("kv_budget_bytes") or value
    return f"--kv-cache-memory-bytes {count}"


def _async_refusal(value: Any, context: Context) -> str | None:
    return "its CPU backend schedules synchronously" if value and context.on_cpu else None


def _environment(context: Context) -> Mapping[str, str | None]:
    """Dev mode serves /reset_prefix_cache; the rest is what its CPU documentation asks for."""
    variables: dict[str, str | None] = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": None,  # whole GiB, and it would win over the bytes of --kv-cache-memory-bytes
    }
    if context.on_cpu:
        variables |= {
            "OMP_NUM_THREADS": str(usable_cores()),
            "OMP_THREAD_LIMIT": None,
        }  # else torch would get one thread
        if libraries := _preloaded(Path(context.program).parent.parent):
            variables["LD_PRELOAD"] = ":".join(map(str, libraries))
    return variables


def _preloaded(prefix: Path, system: Path = Path("/usr/lib")) -> list[Path]:
    found: list[Path] = []
    for pattern in _PRELOADED:
        found += [*sorted((prefix / "lib").glob(pattern)), *sorted(system.glob(f"*/{pattern}"))][:1]
    return found


VLLM = Preset(
    name="vllm",
    title="vLLM",
    module="vllm",
    command="{program} -m vllm.entrypoints.openai.api_server --model {model} --host 127.0.0.1 --port {port}"
    " --disable-uvicorn-access-log",
    settings={
        **COMMON,
        "page_size": flag("--block-size {}", refuse=_page_refusal, nearest=_nearest_page),
        "kv_budget": Setting(words=_budget_words),
        "kv_cache_dtype": flag(
            "--kv-cache-dtype {}",
            *("auto", "fp8_e4m3", "fp8_e5m2", *_GPU_ONLY_DTYPES),
            why="it has no such KV cache",
            refuse=_dtype_refusal,
        ),
        "enable_prefix_caching": switch("--enable-prefix-caching", "--no-enable-prefix-caching"),
        "enable_chunked_prefill": switch(
            "--enable-chunked-prefill", "--no-enable-chunked-prefill", refuse=_chunk_refusal
        ),
        "max_model_len": flag("--max-model-len {}"),
        "max_num_seqs": flag("--max-num-seqs {}"),
        "max_num_batched_tokens": flag("--max-num-batched-tokens {}"),
        "max_num_partial_prefills": always(1, "it has one partial prefill at a time"),
        "max_num_waiting": flag("--max-num-queued-reqs {}"),
        "scheduling_policy": flag("--scheduling-policy {}"),
        "preemption_mode": always("recompute", "it preempts by recomputation only"),
        "swap_space": absent("it preempts by recomputation only"),
        "async_scheduling": switch("--async-scheduling", "--no-async-scheduling", refuse=_async_refusal),
        "cuda_graphs": switch("", """--compilation-config '{"cudagraph_mode": "NONE"}'"""),
        "device": flag("", "auto", "cpu", "cuda", why="it is auto, cpu or cuda"),
        "seed": flag("--seed {}"),
        "num_threads": Setting(variable="OMP_NUM_THREADS"),
    },
    environment=_environment,
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
    reset=Reset("/reset_prefix_cache", success_key="success"),
    version=Version(path="/version"),
    grace_s=15.0,
    start_guess_s=100.0,  # imports, and the compilation of a first start
    device_pattern=r"device_config=(\w+)",
    quirks=("a preempted request is computed anew; its prefix hits are not counted as those of new requests",),
)
