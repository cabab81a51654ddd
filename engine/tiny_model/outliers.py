"""Puts outlier channels into the keys of kvbench-tiny, as real models have them, and measures them.

    python -m kvbench_engine.tiny_model.outliers FOLDER [--factor 4]

A pair of key channels that RoPE rotates together grows by a power of two and the same pair of the queries shrinks by
it, so every product of query and key, and so every prediction, stays the same to the last bit. What changes is what a
quantised key has to hold: a scale for a token and head has to cover the large channels, and the others get coarser.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

FACTOR = 4  # without kvbench_engine.model.kv_outliers a larger one takes INT8 beyond a KLD of 0.002: 8 gives 0.005
_PAIR = -1  # the lowest frequency; real models have theirs at low ones (arXiv 2502.01563, 2503.01832)


def scale_key_channels(model: Any, factor: float) -> None:
    """Multiplies one pair of every KV head's channels by ``factor``, a power of two, and divides the queries."""
    config = model.config
    dim, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    pair = [dim // 2 + _PAIR, dim + _PAIR]  # RoPE rotates channel i with i + dim / 2
    with torch.no_grad():
        for layer in model.model.layers:
            key = layer.self_attn.k_proj.weight.view(config.num_key_value_heads, dim, -1)
            query = layer.self_attn.q_proj.weight.view(config.num_key_value_heads * group, dim, -1)
            key[:, pair] *= factor
            query[:, pair] /= factor


@torch.inference_mode()
def outlier_ratios(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Mean |K| after RoPE of the largest channel over that of the median channel -> [layers, kv_heads].

    ``ids``: [1, T] tokens.
    """
    cache = model(input_ids=ids, use_cache=True).past_key_values
    means = torch.stack([layer.keys.abs().mean((0, 2)) for layer in cache.layers])  # [layers, kv_heads, head_dim]
    return means.max(-1).values / means.median(-1).values


def main() -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--factor", type=float, default=FACTOR)
    given = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(given.folder, dtype=torch.bfloat16, trust_remote_code=False)
    text = (given.folder / "heldout.txt").read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(given.folder, trust_remote_code=False)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :2048]
    before = outlier_ratios(model.float(), ids)
    scale_key_channels(model.bfloat16(), given.factor)
    model.save_pretrained(given.folder)
    after = outlier_ratios(model.float(), ids)
    for name, ratios in (("before", before), ("after", after)):
        print(f"{name}: largest over median key channel {ratios.min():.1f} to {ratios.max():.1f}")


if __name__ == "__main__":
    main()
