"""``transformers serve`` with continuous batching. Tried for real, in the tests, with 5.23 (and accelerate).

Sources: https://huggingface.co/docs/transformers/serving, and cli/serve.py, cli/serving/completion.py (no [DONE],
stream_options ignored, usage in the last chunk, unknown fields refused, text prompts only) and
generation/configuration_utils.py (ContinuousBatchingConfig) of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbench.common.machine import usable_cores
from kvbench.load.dialect import Dialect
from kvbench.targets.presets.preset import (
    COMMON,
    WHATEVER,
    Context,
    Preset,
    Setting,
    Version,
    always,
    budget_in,
    flag,
    switch,
)

_LEAST_PAGE = 4


def _page_refusal(value: Any, context: Context) -> str | None:
    return None if isinstance(value, int) and value >= _LEAST_PAGE else f"its pages have at least {_LEAST_PAGE} tokens"


def _batch_limit_refusal(value: Any, context: Context) -> str | None:
    """It has no such limit, and needs none where the load never reaches it."""
    if context.max_in_flight is not None and context.max_in_flight <= int(value):
        return None
    return "it has no such limit, and this load may have more requests in flight"


def _environment(context: Context) -> Mapping[str, str | None]:
    variables: dict[str, str | None] = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
    if context.on_cpu and "num_threads" not in context.settings:
        variables["OMP_NUM_THREADS"] = str(usable_cores())
    return variables


TRANSFORMERS = Preset(
    name="transformers",
    title="transformers serve",
    module="transformers",
    command="{program} -m transformers.cli.transformers serve {model} --continuous-batching"
    " --attn-implementation sdpa --host 127.0.0.1 --port {port}",
    settings={
        **COMMON,
        "page_size": flag("--cb-block-size {}", refuse=_page_refusal, nearest=lambda value, context: _LEAST_PAGE),
        "kv_budget": budget_in("num_pages", "--cb-num-blocks {}"),
        "kv_cache_dtype": always("auto", "its KV cache has the model's dtype"),
        "enable_prefix_caching": always(True, "it shares pages of equal prefixes, and its command line cannot say no"),
        "max_model_len": WHATEVER,
        "max_num_seqs": Setting(refuse=_batch_limit_refusal),
        "max_num_batched_tokens": flag("--cb-max-batch-tokens {}"),
        "preemption_mode": always("recompute", "its command line has no swap space"),
        "cuda_graphs": switch("--cb-use-cuda-graph", "--no-cb-use-cuda-graph"),
        "device": flag("--device {}"),
        "seed": flag("--default-seed {}"),
        "torch_compile": switch("--compile", ""),
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
)
