"""Measures outlier channels of K and V, and balances those of K for integer formats.

int8 and int4 have one scale for a token's KV head: a channel 100 times the others leaves these 1 of 127 steps. So the
channels of K are divided by powers of two, measured at load, and those of Q multiplied by the same, in the weights
that make them. Products of Q and K keep every bit and no kernel changes. (KIVI, arXiv 2402.02750, and KVQuant, arXiv
2401.18079, have scales of K's channels in their kernels.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from kvbench_engine.kv.budget import KVShape
from kvbench_engine.model.attention import HOST
from kvbench_engine.model.kv_scales import run_random_tokens
from kvbench_engine.model.loader import LoadedModel

MEASURED = "_kvbench_kv_outliers"  # on a model whose channels have been measured
_TOKENS = 64  # a quarter of fp8's, since every load pays for them twice
# The pairs that RoPE may make of channels, which must share a scale: i with i + dim / 2, or with its neighbour.
_PAIRINGS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda sizes: sizes.unflatten(-1, (2, -1)).amax(-2).repeat(1, 2),
    lambda sizes: sizes.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1),
)
_Rows = tuple[torch.Tensor, torch.Tensor]
"""Rows of a weight or bias that make the channels of Q, and those that make the channels of K."""


@dataclass(frozen=True)
class KVOutliers:
    """The largest channel of a KV head over its median one, in the layer where that is most.

    A channel's size is its largest absolute value over 64 random tokens, K after RoPE. ``k_stored``: of K as the cache
    gets it. ``why_unbalanced``: empty where K is balanced.
    """

    k: float
    k_layer: int
    k_stored: float
    v: float
    v_layer: int
    why_unbalanced: str

    def __str__(self) -> str:
        balance = f"not balanced: {self.why_unbalanced}" if self.why_unbalanced else f"{self.k_stored:g}x once balanced"
        return (
            f"largest over median channel: K {self.k:g}x in layer {self.k_layer} ({balance}), V {self.v:g}x in layer "
            f"{self.v_layer}"
        )


@torch.inference_mode()
def balance_keys(loaded: LoadedModel) -> KVOutliers:
    """Measure the channels of K and V, and balance those of K where no other number changes; once a model.

    Every engine's load does it, whatever its KV dtype, since engines of one process share their weights. It comes
    before linear layers are packed. Afterwards a host of its own is installed in the model: install yours.
    """
    if (measured := getattr(loaded.model, MEASURED, None)) is None:
        measured = _balance(loaded.model, loaded.kv_shape, loaded.query_heads, loaded.info.vocab_size)
        setattr(loaded.model, MEASURED, measured)
    return measured


def _balance(model: PreTrainedModel, kv_shape: KVShape, query_heads: Sequence[int], vocab_size: int) -> KVOutliers:
    before, logits = run_random_tokens(model, kv_shape, vocab_size, _TOKENS)
    k_sizes, v_sizes = ([cache.abs().amax(0).float() for cache in side] for side in (before.k_caches, before.v_caches))
    (k, k_layer), (v, v_layer) = _worst(k_sizes), _worst(v_sizes)
    rows, reason = _rows_by_layer(model, kv_shape, query_heads), "it would change the model's numbers"
    if next(model.parameters()).dtype == torch.float16:
        rows, reason = {}, "float16 has too narrow a range"
    elif not rows:
        reason = "its Q and K are made by other layers than q_proj and k_proj, or qkv_proj"
    for pair in _PAIRINGS if rows else ():
        scales = [_scales(pair, sizes, rows.get(layer, [])) for layer, sizes in enumerate(k_sizes)]
        if not _divide(rows, scales):
            continue
        after, logits_after = run_random_tokens(model, kv_shape, vocab_size, _TOKENS)
        expected = [cache / scale.to(cache.dtype) for cache, scale in zip(before.k_caches, scales, strict=True)]
        wanted, got = [*expected, *before.v_caches, logits], [*after.k_caches, *after.v_caches, logits_after]
        if all(map(torch.equal, wanted, got)):
            stored = [sizes / scale for sizes, scale in zip(k_sizes, scales, strict=True)]
            return KVOutliers(k, k_layer, _worst(stored)[0], v, v_layer, "")
        _divide(rows, [1 / scale for scale in scales])
    return KVOutliers(k, k_layer, k, v, v_layer, reason)


def _ratios(sizes: torch.Tensor) -> torch.Tensor:
    """The channels' sizes ``[heads, dim]`` over their head's median; 1 where either is 0 or not finite."""
    typical = sizes.masked_fill(sizes == 0, torch.nan).nanmedian(-1, keepdim=True).values
    ratios = sizes / typical
    return ratios.where(ratios.isfinite() & (ratios > 0), 1.0)


def _worst(layers: Sequence[torch.Tensor]) -> tuple[float, int]:
    """The largest ratio of a channel in the layers' sizes, and its layer."""
    ratios = [float(_ratios(sizes).max()) for sizes in layers]
    layer = max(range(len(ratios)), key=ratios.__getitem__)
    return float(f"{ratios[layer]:.3g}"), layer


def _scales(pair: Callable[[torch.Tensor], torch.Tensor], sizes: torch.Tensor, rows: list[_Rows]) -> torch.Tensor:
    """The power of two nearest to each channel's ratio, at least 1, ``[heads, dim]``; ones where nothing makes them."""
    if not rows:
        return torch.ones_like(sizes)
    if len(rows[0][1]) != sizes.numel():  # a norm that all heads share
        sizes = sizes.amax(0, keepdim=True).expand_as(sizes)
    return _ratios(pair(sizes)).clamp_min(1.0).log2().round().exp2()


def _divide(layers: dict[int, list[_Rows]], scales: Sequence[torch.Tensor]) -> bool:
    """Divide the rows of K by the scales, multiply those of Q. False, with nothing changed, if bits would be lost."""
    changes = []
    for index, rows in layers.items():
        scale = scales[index]
        for q, k in rows:
            for_q = scale.repeat_interleave(max(1, len(q) // scale.numel()), 0)  # query heads of a KV head in a row
            for tensor, factor in ((k, 1 / scale), (q, for_q)):
                factor = factor.reshape(-1)[: len(tensor)].to(tensor.dtype).view(-1, *[1] * (tensor.dim() - 1))
                if not torch.equal(tensor * factor / factor, tensor):
                    return False
                changes.append((tensor, factor))
    for tensor, factor in changes:
        tensor.mul_(factor)
    return True


def _rows_by_layer(model: PreTrainedModel, kv_shape: KVShape, query_heads: Sequence[int]) -> dict[int, list[_Rows]]:
    rows_by_layer = {}
    for module in model.modules():
        index = getattr(module, "layer_idx", None)
        if hasattr(module, HOST) and isinstance(index, int) and index < len(query_heads):
            heads, dim = kv_shape.layers[index].kv_heads, kv_shape.layers[index].head_dim
            if dim % 2 == 0 and (rows := _rows(module, query_heads[index] * dim, heads * dim, dim)):
                rows_by_layer[index] = rows
    return rows_by_layer


def _rows(module: nn.Module, q_rows: int, k_rows: int, dim: int) -> list[_Rows]:
    """Returns the last rows that make Q and K: those of their norms, else of linear layers; none for other modules."""
    norms = [getattr(module, name) for name in ("q_norm", "k_norm") if hasattr(module, name)]
    if norms:
        pairs = [[getattr(norm, "weight", None) for norm in norms]]
        sizes = [(q_rows, k_rows), (dim, dim)]
    elif type(joint := getattr(module, "qkv_proj", None)) is nn.Linear:
        tensors = [tensor for tensor in (joint.weight, joint.bias) if tensor is not None]
        pairs, sizes = [[tensor[:q_rows], tensor[q_rows : q_rows + k_rows]] for tensor in tensors], [(q_rows, k_rows)]
    else:
        linears = [getattr(module, name, None) for name in ("q_proj", "k_proj")]
        if any(type(linear) is not nn.Linear for linear in linears):
            return []
        pairs, sizes = [[linear.weight for linear in linears], [linear.bias for linear in linears]], [(q_rows, k_rows)]
    rows = [tuple(pair) for pair in pairs if any(tensor is not None for tensor in pair)]
    whole = all(isinstance(tensor, torch.Tensor) for pair in rows for tensor in pair)
    return rows if whole and all(tuple(map(len, pair)) in sizes for pair in rows) else []
