"""Scales of an fp8 KV cache, measured on the model when it is loaded.

fp8 holds 448 (e4m3) or 57344 (e5m2) at most, so K and V are divided by a scale first, one for K and one for V of each
layer. Engines that find no scales in the checkpoint use 1.0 without a warning: large values are cut off, small ones
become 0 (sglang#18882). Here a scale is always measured, or the load fails.
"""

from __future__ import annotations

import math

import torch
from transformers import PreTrainedModel

from kvbench_engine.kv.budget import KVShape
from kvbench_engine.model.attention import AttentionHost, StepTensors, install
from kvbench_kernels import get_backend
from kvbench_kernels.kv_formats import KVFormat
from kvbench_kernels.quantized import FP8_MAX

MARGIN = 2.0  # how far real prompts may go beyond the calibration's largest value before they are cut off
_TOKENS = 256
_SEED = 0


@torch.inference_mode()
def run_random_tokens(
    model: PreTrainedModel, kv_shape: KVShape, vocab_size: int, most: int
) -> tuple[AttentionHost, torch.Tensor]:
    """Prefill up to ``most`` random tokens; a host with K and V of the model's dtype, and the last logits.

    Random tokens need no data set, are the same in every run, and show outlier channels, which come from the weights.
    Afterwards the host is installed in the model: install your own.
    """
    device = next(model.parameters()).device
    count = min(most, getattr(model.config.get_text_config(), "max_position_embeddings", None) or most)
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(vocab_size, (1, count), generator=generator).to(device)
    positions = torch.arange(count, device=device)
    host = AttentionHost(get_backend("torch"), kv_shape, count, (count,), next(model.parameters()))
    install(model, host)
    host.begin(StepTensors.of_prompt(positions, torch.zeros(1, 1, dtype=torch.int64, device=device)))
    last = torch.tensor([count - 1], device=device)
    output = model(input_ids=ids, position_ids=positions[None], use_cache=False, logits_to_keep=last)
    return host, output.logits


def calibrate_kv_scales(
    model: PreTrainedModel, kv_shape: KVShape, vocab_size: int, format: KVFormat
) -> list[tuple[float, float]]:
    """Measure (K scale, V scale) of each layer: MARGIN x largest absolute value / largest finite code.

    The largest values are those of the cache after ``run_random_tokens``, K after RoPE. The margin is for real text;
    beyond it values saturate. It costs little: doubling the scale of a floating-point format costs precision in the
    smallest values only.

    Raises:
        ValueError: a layer's K or V is all zero, or not finite.
    """
    host, _ = run_random_tokens(model, kv_shape, vocab_size, _TOKENS)
    return [
        (_scale(k, f"K of layer {layer}", format), _scale(v, f"V of layer {layer}", format))
        for layer, (k, v) in enumerate(zip(host.k_caches, host.v_caches, strict=True))
    ]


def _scale(written: torch.Tensor, what: str, format: KVFormat) -> float:
    largest = float(written.abs().max())
    if not 0 < largest < math.inf:
        raise ValueError(
            f"no {format.name} scale can be measured: the largest absolute value of {what} over {len(written)} random "
            f"tokens is {largest}; check the weights, or use kv_cache_dtype auto or int8_per_token_head"
        )
    return MARGIN * largest / FP8_MAX[format]
