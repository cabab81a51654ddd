"""Torch attention over the page table: per-sequence gather and an explicit softmax.

The oracle of the other backends (exact in float64) and the backend for dtypes and devices that
they do not serve. Simple before fast.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from kvbench_kernels.api import AttentionOptions, KVCache, KVPair, PrefillBatch, check_heads
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.quantized import QuantizedKV, shares_rows


def token_slots(page_starts: torch.Tensor, start: int, stop: int, page_size: int) -> torch.Tensor:
    """The slots ``[stop - start] int64`` of a sequence's tokens start..stop-1; ``page_starts [pages]``."""
    tokens = torch.arange(start, stop, device=page_starts.device)
    return page_starts[tokens // page_size].to(torch.int64) + tokens % page_size


def load_rows(cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
    """Load rows ``[n, Hkv, dim]`` at ``slots [n] int64``, dequantised to float32 if the cache is quantised."""
    return cache.load(slots) if isinstance(cache, QuantizedKV) else cache[slots]


def visible_mask(
    num_queries: int, num_keys: int, seq_len: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """The mask ``[num_queries, num_keys] bool`` of the last num_keys tokens that the last num_queries see."""
    i = torch.arange(seq_len - num_queries, seq_len, device=device)[:, None]
    j = torch.arange(seq_len - num_keys, seq_len, device=device)[None, :]
    mask = j <= i
    return mask if window is None else mask & (j > i - window)


def attend_explicit(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Softmax attention of one sequence, written out.

    q ``[n, H, D]``, k ``[S, Hkv, D]``, v ``[S, Hkv, Dv]``, mask ``[n, S]`` -> ``[n, H, Dv]`` in q's dtype. The window
    is in the mask.

    Computed in float32 (float64 for float64 inputs); KV heads are broadcast, not repeated.
    """
    softcap, sinks = options.softcap, options.sinks
    n, heads, _ = q.shape
    kv_heads, dtype = k.shape[1], torch.promote_types(q.dtype, torch.float32)
    qg = q.to(dtype).view(n, kv_heads, heads // kv_heads, -1)
    scores = torch.einsum("nkgd,skd->kgns", qg, k.to(dtype)) * options.scale  # [Hkv, G, n, S]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -math.inf)
    top = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.to(dtype).view(kv_heads, heads // kv_heads, 1, 1)
        top = torch.maximum(top, sink)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - top)
    out = torch.einsum("kgns,skv->nkgv", weights / total, v.to(dtype))
    return out.reshape(n, heads, -1).to(q.dtype)


class TorchBackend:
    """The reference backend for any device and floating dtype. See kvbench_kernels.api.AttentionBackend."""

    name = "torch"

    def check_support(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_cache_dtype: str = "auto",
        latent: bool = False,
    ) -> None:
        find_format(kv_cache_dtype)
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim, 1 << 16, latent)
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ValueError(
                f"the torch kernel backend cannot compute in {dtype}: use float64, float32, bfloat16 or float16"
            )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        slots: torch.Tensor,
    ) -> None:
        keep = slots >= 0
        if not bool(keep.all()):
            k, v, slots = k[keep], v[keep], slots[keep]
        slots = slots.to(torch.int64)
        for cache, new in ((k_cache, k),) if shares_rows(k_cache, v_cache) else ((k_cache, k), (v_cache, v)):
            if isinstance(cache, QuantizedKV):
                cache.store(slots, new)
            else:
                cache.index_copy_(0, slots, new.to(cache.dtype))

    def decode_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        page_starts: torch.Tensor,
        seq_lens: torch.Tensor,
        page_size: int,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        plan: Any | None = None,
    ) -> torch.Tensor:
        batch = PrefillBatch(page_starts, torch.arange(q.shape[0] + 1), seq_lens, page_size)
        return self.prefill_attention(q, k_cache, v_cache, batch, options, out=out)

    def prefill_attention(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        batch: PrefillBatch,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None = None,
        new_kv: KVPair | None = None,
        plan: Any | None = None,
    ) -> torch.Tensor:
        if out is None:
            out = q.new_empty((q.shape[0], q.shape[1], v_cache.shape[2]))
        window = options.sliding_window
        starts, lens = batch.query_starts.tolist(), batch.seq_lens.tolist()
        for b, seq_len in enumerate(lens):
            lo, hi = starts[b], starts[b + 1]
            if lo == hi:
                continue
            if seq_len == 0:  # a padding row
                out[lo:hi] = 0
                continue
            oldest = seq_len - (hi - lo)  # first query's token
            first = 0 if window is None else max(0, oldest + 1 - window)
            slots = token_slots(batch.page_starts[b], first, seq_len, batch.page_size)
            mask = visible_mask(hi - lo, seq_len - first, seq_len, window, q.device)
            out[lo:hi] = attend_explicit(q[lo:hi], load_rows(k_cache, slots), load_rows(v_cache, slots), mask, options)
        return out

    def plan_decode(
        self, page_starts: torch.Tensor, seq_lens: torch.Tensor, page_size: int, *, max_tokens: int
    ) -> None:
        """Nothing to prepare."""
        return

    def plan_prefill(self, batch: PrefillBatch, *, max_queries: int, max_tokens: int) -> None:
        """Nothing to prepare."""
        return
