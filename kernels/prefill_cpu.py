"""Prefill on CPU: one call of the kernel per sequence (numba_prefill.py), on buffers that are kept between calls.

A first chunk reads its own new K and V, everything else reads the cache, through the slots of its tokens or in place
where those lie in one run. A quantised cache is turned into floats first, the new tokens too.

Against torch's SDPA on one AVX-512 core, 8 / 4 heads of 64: 1.5x for 512 new tokens, 1.3x after 1,536 earlier ones,
level up to 128 new ones, behind for 32 (0.1 ms). SDPA would also want a mask tensor for every chunk after the first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kernels.api import AttentionOptions, KVCache, KVPair, dense_rows
from kernels.numba_prefill import (
    NUM_PREFILL_ARGS,
    attend_worker,
    pack_worker,
    packed_floats,
    run_prefill,
    work_floats,
)
from kernels.numba_quantised import load_rows
from kernels.numba_threads import thread_team
from kernels.quantized import QuantizedKV
from kernels.reference import token_slots

_ARGS = struct.Struct(f"{NUM_PREFILL_ARGS}q")


@dataclass(frozen=True)
class Chunk:
    """One sequence of a prefill step, under one sliding window."""

    rows: slice  # of the packed queries
    num_queries: int
    num_keys: int  # tokens that any of its queries may see
    whole: bool  # the queries are the whole sequence: no earlier context
    run: slice | None  # the slots, where they are consecutive
    slots: torch.Tensor | None  # [num_keys] int64 otherwise


class PrefillPlan:
    """Slots of a step's sequences, per sliding window, found when first asked for."""

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
            return Chunk(slice(lo, hi), n, 0, False, None, None)
        if seq_len < n:
            raise ValueError(
                f"sequence {b} has {n} new tokens but a length of {seq_len}: seq_lens counts new tokens too"
            )
        first = 0 if window is None else max(0, seq_len - n + 1 - window)
        keys = seq_len - first
        slots = token_slots(self._page_starts[b], first, seq_len, self._page_size)
        low, high = int(slots[0]), int(slots[-1])
        consecutive = high - low == keys - 1 and bool((slots.diff() == 1).all())
        run = slice(low, high + 1) if consecutive else None
        return Chunk(slice(lo, hi), n, keys, n == seq_len, run, None if consecutive else slots)


class CpuPrefill:
    """Prefill attention with its buffers; one per calling thread."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._team = thread_team()
        self._args = torch.zeros(NUM_PREFILL_ARGS, dtype=torch.int64)
        self._view = memoryview(self._args.numpy()).cast("B")
        self._floats = torch.zeros(2, dtype=torch.float32)

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
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2])
        q = dense_rows(q)
        for chunk in plan.chunks(options.sliding_window):
            if chunk.num_keys:
                k, v, slots = self._keys_and_values(chunk, k_cache, v_cache, new_kv)
                self._run(q[chunk.rows], dense_rows(k), dense_rows(v), slots, chunk.num_keys, options, out[chunk.rows])
            else:
                out[chunk.rows] = 0
        return out

    def _keys_and_values(
        self, chunk: Chunk, k_cache: KVCache, v_cache: KVCache, new_kv: KVPair | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """K ``[rows, Hkv, D]``, V ``[rows, Hkv, Dv]`` and which rows are the chunk's tokens; None: all, in order."""
        if isinstance(k_cache, QuantizedKV):
            return self._dequantise("k", k_cache, chunk), self._dequantise("v", v_cache, chunk), None
        if chunk.whole and new_kv is not None and chunk.num_keys == chunk.num_queries:
            return new_kv[0][chunk.rows], new_kv[1][chunk.rows], None
        if chunk.run is not None:
            return k_cache[chunk.run], v_cache[chunk.run], None
        return k_cache, v_cache, chunk.slots

    def _dequantise(self, side: str, cache: QuantizedKV, chunk: Chunk) -> torch.Tensor:
        """The chunk's rows as float32, in a buffer that is used again by the next call."""
        slots = chunk.slots if chunk.run is None else torch.arange(chunk.run.start, chunk.run.stop)
        _, heads, dim = cache.shape
        return load_rows(cache, slots, self._buffer(side, len(slots) * heads * dim).view(-1, heads, dim))

    def _run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor | None,
        keys: int,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        if not (q.dtype == k.dtype == v.dtype == out.dtype == torch.float32) or out.stride(1) != v.shape[2]:
            raise ValueError(
                f"the numba prefill kernel computes in torch.float32 into dense heads, not with q {q.dtype}, "
                f"k {k.dtype}, v {v.dtype} and out {out.dtype}, strides {out.stride()}: "
                "use default_backend(device, dtype)"
            )
        queries, heads, dim = q.shape
        kv_heads, v_dim, threads = k.shape[1], v.shape[2], torch.get_num_threads()
        stride = -(-work_floats(dim, v_dim) // 16) * 16
        packed = self._buffer("packed", packed_floats(keys, kv_heads, dim, v_dim))
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        self._floats[0], self._floats[1] = options.scale, options.softcap or 0.0
        _ARGS.pack_into(
            self._view, 0,
            q.data_ptr(), k.data_ptr(), v.data_ptr(), 0 if slots is None else slots.data_ptr(), out.data_ptr(),
            0 if sinks is None else sinks.data_ptr(), self._floats.data_ptr(), packed.data_ptr(),
            self._buffer("work", threads * stride).data_ptr(), 4 * stride,
            queries, keys, heads, kv_heads, dim, v_dim, options.sliding_window or keys,
            4 * q.stride(0), 4 * q.stride(1), 4 * k.stride(0), 4 * k.stride(1), 4 * v.stride(0), 4 * v.stride(1),
            4 * out.stride(0), threads, *self._team, pack_worker.address, attend_worker.address,
        )  # fmt: skip
        run_prefill.ctypes(self._args.data_ptr())  # ctypes releases the GIL during the call

    def _buffer(self, name: str, floats: int) -> torch.Tensor:
        """``[floats]`` of a buffer that grows by doubling."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < floats:
            buffer = self._buffers[name] = torch.empty(1 << max(0, floats - 1).bit_length(), dtype=torch.float32)
        return buffer[:floats]
