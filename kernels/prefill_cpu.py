"""Prefill on CPU: one SDPA call per sequence, on buffers that are kept between calls.

Where the KV of a sequence lies in one run of slots (contiguous layout, or neighbouring pages) SDPA
reads the cache in place; a first chunk reads its own new K and V; only the rest is gathered. A quantised
cache is always gathered, the new tokens too, and turned into floats on the way. GQA is
left to SDPA: measured on two AVX-512 cores, ``enable_gqa`` takes 0.47-1.03x the time of repeated
K/V and 0.65-1.15x that of query heads packed as rows, over 32..512 queries and 32..2048 keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.api import AttentionOptions, KVCache, KVPair
from kernels.numba_quantised import load_rows
from kernels.quantized import QuantizedKV
from kernels.reference import attend_explicit, token_slots, visible_mask

EXPLICIT_SCORES = 1 << 22  # scores held at a time where SDPA cannot serve (softcap, sinks): 16 MiB


@dataclass(frozen=True)
class Chunk:
    """One sequence of a prefill step, under one sliding window."""

    rows: slice  # of the packed queries
    num_queries: int
    num_keys: int  # tokens that any of its queries may see
    whole: bool  # the queries are the whole sequence: no earlier context
    mask: torch.Tensor | None  # [num_queries, num_keys] float32, 0 or -inf; None: plain causal
    run: slice | None  # the slots, where they are consecutive
    slots: torch.Tensor | None  # [num_keys] int64 otherwise


class PrefillPlan:
    """Slots and masks of a step's sequences, per sliding window, made when first asked for."""

    def __init__(
        self, page_starts: torch.Tensor, query_starts: torch.Tensor, seq_lens: torch.Tensor, page_size: int
    ) -> None:
        self._page_starts, self._page_size = page_starts, page_size
        self._query_starts: list[int] = query_starts.tolist()
        self._seq_lens: list[int] = seq_lens.tolist()
        self._chunks: dict[int | None, list[Chunk]] = {}

    def chunks(self, window: int | None) -> list[Chunk]:
        """The sequences with queries; rows of sequences of length 0 (padding) have num_keys 0."""
        if window not in self._chunks:
            bounds = zip(self._query_starts, self._query_starts[1:], self._seq_lens, strict=False)
            self._chunks[window] = [
                self._chunk(b, lo, hi, seq_len, window) for b, (lo, hi, seq_len) in enumerate(bounds) if hi > lo
            ]
        return self._chunks[window]

    def _chunk(self, b: int, lo: int, hi: int, seq_len: int, window: int | None) -> Chunk:
        n = hi - lo
        if seq_len == 0:
            return Chunk(slice(lo, hi), n, 0, False, None, None, None)
        if seq_len < n:
            raise ValueError(
                f"sequence {b} has {n} new tokens but a length of {seq_len}: seq_lens counts new tokens too"
            )
        first = 0 if window is None else max(0, seq_len - n + 1 - window)
        keys = seq_len - first
        mask = None
        if n > 1 and (n < keys or (window is not None and keys > window)):
            visible = visible_mask(n, keys, seq_len, window, torch.device("cpu"))
            mask = torch.zeros(n, keys).masked_fill_(~visible, -math.inf)
        slots = token_slots(self._page_starts[b], first, seq_len, self._page_size)
        low, high = int(slots[0]), int(slots[-1])
        consecutive = high - low == keys - 1 and bool((slots.diff() == 1).all())
        run = slice(low, high + 1) if consecutive else None
        return Chunk(slice(lo, hi), n, keys, n == seq_len, mask, run, None if consecutive else slots)


class CpuPrefill:
    """Prefill attention with its gather buffers; one per calling thread."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int, int, torch.dtype], torch.Tensor] = {}

    def attend(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        plan: PrefillPlan,
        options: AttentionOptions,
        *,
        out: torch.Tensor | None,
        new_kv: KVPair | None,
    ) -> torch.Tensor:
        """``q [T, H, D]`` -> ``[T, H, Dv]``; see kernels.api.AttentionBackend.prefill_attention."""
        chunks = plan.chunks(options.sliding_window)
        explicit = options.softcap is not None or options.sinks is not None
        for chunk in chunks:
            if chunk.num_keys == 0:
                out = q.new_zeros(q.shape[0], q.shape[1], v_cache.shape[2]) if out is None else out
                out[chunk.rows] = 0
                continue
            rows = q[chunk.rows]
            k, v = self._keys_and_values(chunk, k_cache, v_cache, new_kv)
            if explicit:
                result = _attend_in_blocks(rows, k, v, chunk, options)
            else:
                result = _sdpa(rows, k, v, chunk, options.scale)
            if out is None and chunk.num_queries == q.shape[0]:
                return result
            out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2]) if out is None else out
            out[chunk.rows] = result
        return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2]) if out is None else out

    def _keys_and_values(self, chunk: Chunk, k_cache: KVCache, v_cache: KVCache, new_kv: KVPair | None) -> KVPair:
        """The chunk's K ``[S, Hkv, D]`` and V ``[S, Hkv, Dv]``, from the nearest place that has them."""
        if isinstance(k_cache, QuantizedKV):
            return self._dequantise("k", k_cache, chunk), self._dequantise("v", v_cache, chunk)
        if chunk.whole and new_kv is not None and chunk.num_keys == chunk.num_queries:
            return new_kv[0][chunk.rows], new_kv[1][chunk.rows]
        if chunk.run is not None:
            return k_cache[chunk.run], v_cache[chunk.run]
        return self._gather("k", k_cache, chunk.slots), self._gather("v", v_cache, chunk.slots)

    def _gather(self, side: str, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the cache at ``slots``, in a buffer that is used again by the next call."""
        out = self._buffer(side, slots.shape[0], cache.shape, cache.dtype)
        return torch.index_select(cache, 0, slots, out=out)

    def _dequantise(self, side: str, cache: QuantizedKV, chunk: Chunk) -> torch.Tensor:
        """The chunk's rows as float32, in a buffer that is used again by the next call."""
        slots = chunk.slots if chunk.run is None else torch.arange(chunk.run.start, chunk.run.stop)
        return load_rows(cache, slots, self._buffer(side, slots.shape[0], cache.shape, torch.float32))

    def _buffer(self, side: str, rows: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """``[rows, Hkv, dim]`` of a buffer that grows by doubling."""
        key = (side, shape[1], shape[2], dtype)
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < rows:
            buffer = self._buffers[key] = torch.empty(1 << (rows - 1).bit_length(), *shape[1:], dtype=dtype)
        return buffer[:rows]


def _sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk, scale: float) -> torch.Tensor:
    """``[n, H, D]`` queries of one sequence against all its keys."""
    result = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=chunk.mask,
        is_causal=chunk.mask is None and chunk.num_queries > 1,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return result[0].transpose(0, 1)


def _attend_in_blocks(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    chunk: Chunk,
    options: AttentionOptions,
) -> torch.Tensor:
    """Explicit attention in blocks of queries, so that the scores stay small."""
    n, keys = chunk.num_queries, chunk.num_keys
    visible = visible_mask(n, keys, keys, options.sliding_window, q.device)
    step = max(1, EXPLICIT_SCORES // (q.shape[1] * keys))
    blocks = [attend_explicit(q[i : i + step], k, v, visible[i : i + step], options) for i in range(0, n, step)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
