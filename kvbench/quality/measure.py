"""`kvbench quality`: the KL divergence of each quantised KV cache of a workload, measured by the built-in engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvbench.common.errors import UsageError
from kvbench.common.git import git_state
from kvbench.common.machine import versions
from kvbench.load.launch import make_requests
from kvbench.runs.quality import QualityResult
from kvbench.targets.builtin import check_configuration
from kvbench.workload.design import Configuration, plan_sweep
from kvbench.workload.file import Workload
from kvbench.workload.settings import effective

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.model.loader import LoadedModel
    from engine.teacher_forcing import Divergence

_QUANTILES = {"p95": 0.95, "p99": 0.99}
# Settings that decide which weights are loaded, and how.
_LOADED_BY = ("model", "load_format", "seed", "dtype", "device", "kernel_backend", "kv_cache_dtype", "torch_compile")


def quantised(workload: Workload, only: Sequence[str] = ()) -> tuple[Configuration, ...]:
    """The configurations with a quantised KV. Raises UsageError when there is none."""
    design, _ = plan_sweep(workload, only, check_configuration)
    found = tuple(c for c in design.configurations if effective(c.settings, "kv_cache_dtype") != "auto")
    if not found:
        raise UsageError(
            f"no configuration of {workload.name} has a quantised KV, so there is nothing to compare: set one with "
            "-o engine.kv_cache_dtype=int8_per_token_head"
        )
    return found


def measure(
    workload: Workload,
    configurations: Sequence[Configuration],
    *,
    prompts: int,
    output_tokens: int,
    say: Callable[[str], None] = lambda text: None,
) -> QualityResult:
    """Each configuration against the same engine with its KV in the model's dtype, on the same tokens.

    ``prompts``: how many of the workload's first load; ``output_tokens``: at most so many after each. Raises
    UsageError for an impossible configuration and for prompts without token ids.
    """
    from engine.config import EngineConfig
    from engine.model.loader import load_model
    from engine.model.spec import find_model, uses_random_weights
    from engine.teacher_forcing import measure_divergence

    began = time.monotonic()
    results: dict[str, Mapping[str, Any]] = {}
    # As sets that keep their order: a sweep may have several models.
    fingerprints, dtypes, weights = {}, {}, {}
    loaded: LoadedModel | None = None
    key: tuple[Any, ...] = ()
    for configuration in configurations:
        say(f"{configuration.config_id}: loading")
        try:
            config = EngineConfig.from_mapping(configuration.settings)
            wanted = tuple(getattr(config, name) for name in _LOADED_BY)
            if loaded is None or wanted != key:
                loaded, key = None, wanted  # before the next one: two large models may not fit
                loaded = load_model(config)
            token_ids, max_tokens = draw_prompts(workload, config, loaded, prompts, output_tokens)
            say(f"{configuration.config_id}: {sum(map(len, token_ids)):,} prompt tokens")
            divergence = measure_divergence(config, loaded, token_ids, max_tokens)
            random = uses_random_weights(find_model(config.model, config.load_format), config.load_format)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(f"configuration {configuration.config_id}: {error}") from None
        facts = {"kv_cache_dtype": config.kv_cache_dtype, "reference": "auto"}
        results[configuration.config_id] = facts | figures(divergence)
        fingerprints[loaded.info.weights_fingerprint] = None
        dtypes[str(loaded.dtype).removeprefix("torch.")] = None
        of_whom = f"random (seed {config.seed}) in the shape of" if random else "those of"
        weights[f"{of_whom} {config.model}"] = random
    assert loaded is not None
    return QualityResult(
        workload=workload.name,
        weights="; ".join(weights),
        configurations=results,
        weights_fingerprint="".join(fingerprints) if len(fingerprints) == 1 else "",
        git=git_state(),
        versions=versions(),
        note=_RANDOM_NOTE if any(weights.values()) else "",
        facts={
            "device": str(loaded.device),
            "dtype": ", ".join(dtypes),
            "kernel_backend": loaded.backend.name,
            "prompts": len(token_ids),
            "prompt_tokens": sum(map(len, token_ids)),
            "output_tokens": sum(max_tokens),
            "seed": workload.seed,
            "seconds": round(time.monotonic() - began, 3),
        },
    )


_RANDOM_NOTE = (
    "The weights are random, and such a model's predictions are nearly even and hardly moved by its KV: this KLD shows "
    "that the quantised KV is read and written right, and is much smaller than a trained model's."
)


def draw_prompts(
    workload: Workload, config: EngineConfig, loaded: LoadedModel, count: int, output_tokens: int
) -> tuple[list[tuple[int, ...]], list[int]]:
    """Token ids and output lengths of the first requests of the workload's first load. Raises UsageError."""
    length = config.max_model_len or loaded.info.max_model_len
    if length is None:
        raise UsageError(f"model {config.model!r} states no maximum length: set engine.max_model_len")
    requests = make_requests(
        workload.load,
        workload.load_points[0],
        vocab_size=loaded.info.vocab_size,
        max_model_len=length,
        seed=workload.seed,
        repeat=1,
    )[:count]
    if any(request.prompt_token_ids is None for request in requests):
        raise UsageError(f"the prompts of {workload.name} are texts without token ids: give it load.prompts.tokenizer")
    return [tuple(r.prompt_token_ids) for r in requests], [min(r.max_tokens, output_tokens) for r in requests]


def figures(divergence: Divergence) -> dict[str, Any]:
    """KLD [nats]: mean, p95, p99 (linear interpolation) and max.

    ``same_argmax``: share of the positions whose likeliest token is the same. ``prompt_mean``, ``decode_mean``: of
    positions computed in a chunk of the prompt, and of those computed one by one.
    """
    import numpy as np

    kld, decoded = divergence.kld, divergence.decoded
    return {
        "positions": len(kld),
        "mean": float(kld.mean()),
        **{name: float(np.quantile(kld, q)) for name, q in _QUANTILES.items()},
        "max": float(kld.max()),
        "same_argmax": float(divergence.same.mean()),
        "prompt_mean": statistics.fmean(kld[~decoded]),
        "decode_mean": statistics.fmean(kld[decoded]),
    }
