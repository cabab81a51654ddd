"""Prefill on CPU: one kernel call for all sequences (numba_prefill.py), on buffers kept between calls.

A first chunk reads its own new K and V, everything else reads the cache, through the slots of its tokens or in place
where those lie in one run. A quantised cache is turned into floats first, sequence by sequence, the new tokens too.

Against torch's SDPA on one AVX-512 core, 8 / 4 heads of 64: 1.5x for 512 new tokens, 1.3x after 1,536 earlier ones,
level up to 128 new ones, behind for 32 (0.1 ms). SDPA would also want a mask tensor for every chunk after the first.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch

from kvbench_kernels.api import AttentionOptions, KVCache, KVPair, PrefillBatch, dense_rows
from kvbench_kernels.numba_amx import DEPTH
from kvbench_kernels.numba_bf16 import has_bf16
from kvbench_kernels.numba_prefill import (
    C_KEYS,
    C_NEW,
    C_ROW,
    C_SLOTS,
    NUM_FIELDS,
    NUM_PREFILL_ARGS,
    attend_worker,
    pack_worker,
    packed_floats,
    run_prefill,
    work_floats,
)
from kvbench_kernels.numba_prefill_bf16 import build_workers
from kvbench_kernels.numba_quantised import KIND_OF_DTYPE, load_rows
from kvbench_kernels.numba_threads import thread_team
from kvbench_kernels.quantized import QuantizedKV, shares_rows
from kvbench_kernels.reference import token_slots

_ARGS = struct.Struct(f"{NUM_PREFILL_ARGS}q")


@dataclass(frozen=True)
class Chunks:
    """The sequences of a prefill step under one sliding window.

    ``table [chunks, NUM_FIELDS] int64``: see numba_prefill.py. ``slots``: of each chunk's keys, int64; held here
    because the table has their addresses. ``max_keys``: of the longest.
    """

    table: torch.Tensor
    slots: list[torch.Tensor]
    max_keys: int


class PrefillPlan:
    """The places of a step's sequences per sliding window, computed when first asked for, for all layers."""

    def __init__(self, batch: PrefillBatch) -> None:
        self._page_starts, self._page_size = batch.page_starts, batch.page_size
        self._query_starts: list[int] = batch.query_starts.tolist()
        self._seq_lens: list[int] = batch.seq_lens.tolist()
        self._chunks: dict[int | None, Chunks] = {}

    def chunks(self, window: int | None) -> Chunks:
        """The sequences with queries; those of length 0 (padding) have no keys."""
        if window not in self._chunks:
            bounds = zip(self._query_starts, self._query_starts[1:], self._seq_lens, strict=False)
            rows, slots = [], []
            for b, (lo, hi, seq_len) in enumerate(bounds):
                if hi > lo:
                    rows.append(self._chunk(b, lo, hi - lo, seq_len, window, slots))
            table = torch.tensor(rows, dtype=torch.int64).view(-1, NUM_FIELDS)
            self._chunks[window] = Chunks(table, slots, max((row[C_KEYS] for row in rows), default=0))
        return self._chunks[window]

    def _chunk(
        self, b: int, first: int, queries: int, seq_len: int, window: int | None, kept: list[torch.Tensor]
    ) -> tuple[int, ...]:
        if seq_len and seq_len < queries:
            raise ValueError(
                f"sequence {b} has {queries} new tokens but a length of {seq_len}: seq_lens counts new tokens too"
            )
        oldest = 0 if window is None else max(0, seq_len - queries + 1 - window)
        slots = token_slots(self._page_starts[b], oldest, seq_len, self._page_size)
        kept.append(slots)
        keys = len(slots)
        consecutive = keys > 0 and int(slots[-1] - slots[0]) == keys - 1 and bool((slots.diff() == 1).all())
        place = (0, int(slots[0])) if consecutive else (slots.data_ptr(), 0)
        return (first, queries, keys, int(keys == queries), *place)


class CpuPrefill:
    """Prefill attention with its buffers; one per calling thread.

    The buffers are not inference tensors, which could not be written outside inference mode.
    """

    @torch.inference_mode(False)
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
        """Attend: ``q [T, H, D]`` -> ``[T, H, Dv]``; see kvbench_kernels.api.AttentionBackend.prefill_attention."""
        if out is None:
            out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2])
        q, chunks = dense_rows(q), plan.chunks(options.sliding_window)
        plain = not isinstance(k_cache, QuantizedKV)
        if q.dtype == torch.bfloat16 and not (
            plain and q.shape[2] % DEPTH == v_cache.shape[2] % DEPTH == 0 and has_bf16()
        ):
            floats = torch.empty(out.shape)
            return out.copy_(self._attend_in_floats(q.float(), k_cache, v_cache, chunks, options, floats))
        if plain:
            table = chunks.table
            if new_kv is None and bool(table[:, C_NEW].any()):
                table = table.clone()
                table[:, C_NEW] = 0
            new = tuple(map(dense_rows, new_kv)) if new_kv is not None else (k_cache, v_cache)
            self._run(q, (k_cache, v_cache), new, table, chunks.max_keys, options, out)
            return out
        return self._attend_in_floats(q, k_cache, v_cache, chunks, options, out)

    def _attend_in_floats(
        self,
        q: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        chunks: Chunks,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Attend in float32; a cache of any kind, one sequence's rows at a time turned into floats."""
        for row, slots in zip(chunks.table.clone(), chunks.slots, strict=True):
            k = self._floats_of("k", k_cache, slots)
            latent = shares_rows(k_cache, v_cache)
            kv = k, k[..., : v_cache.shape[2]] if latent else self._floats_of("v", v_cache, slots)
            row[C_NEW] = row[C_SLOTS] = row[C_ROW] = 0
            self._run(q, kv, kv, row[None], len(slots), options, out)
        return out

    def _floats_of(self, side: str, cache: KVCache, slots: torch.Tensor) -> torch.Tensor:
        """Rows as ``[n, Hkv, dim]`` float32, in a buffer that the next call uses again."""
        _, heads, dim = cache.shape
        out = self._buffer(side, len(slots) * heads * dim).view(-1, heads, dim)
        return load_rows(cache, slots, out) if isinstance(cache, QuantizedKV) else out.copy_(cache[slots])

    def _run(
        self,
        q: torch.Tensor,
        cache: KVPair,
        new: KVPair,
        table: torch.Tensor,
        max_keys: int,
        options: AttentionOptions,
        out: torch.Tensor,
    ) -> None:
        tensors, size = (q, *cache, *new, out), q.element_size()
        unlike = any(x.dtype != q.dtype or x.stride(2) != 1 for x in tensors)
        if q.dtype not in KIND_OF_DTYPE or unlike or out.stride(1) != out.shape[2]:
            raise ValueError(
                "the numba prefill kernel computes with dense heads, all float32 or all bfloat16, not with "
                f"{', '.join(f'{x.dtype} of strides {x.stride()}' for x in tensors)}: "
                "use default_backend(device, dtype)"
            )
        (_, heads, dim), kv_heads, v_dim, threads = q.shape, cache[0].shape[1], out.shape[2], torch.get_num_threads()
        stride = -(-work_floats(dim, v_dim) // 16) * 16
        packed = self._buffer("packed", packed_floats(max_keys, kv_heads, dim, v_dim))
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        self._floats[0], self._floats[1] = options.scale, options.softcap or 0.0
        workers = build_workers() if q.dtype == torch.bfloat16 else (pack_worker, attend_worker)
        _ARGS.pack_into(
            self._view, 0,
            0, 0, 0, 0, 0, 0 if sinks is None else sinks.data_ptr(), self._floats.data_ptr(), packed.data_ptr(),
            self._buffer("work", threads * stride).data_ptr(), 4 * stride,
            0, 0, heads, kv_heads, dim, v_dim, 0,
            size * q.stride(0), size * q.stride(1), 0, 0, 0, 0, size * out.stride(0),
            threads, *self._team, *(worker.address for worker in workers),
            table.data_ptr(), len(table), q.data_ptr(), out.data_ptr(), options.sliding_window or 0, size,
            *_source(*cache), *_source(*new),
        )  # fmt: skip
        run_prefill.ctypes(self._args.data_ptr())  # ctypes releases the GIL during the call

    def _buffer(self, name: str, floats: int) -> torch.Tensor:
        """A view ``[floats]`` of a buffer that grows by doubling."""
        buffer = self._buffers.get(name)
        if buffer is None or len(buffer) < floats:
            with torch.inference_mode(False):
                buffer = torch.empty(1 << max(0, floats - 1).bit_length(), dtype=torch.float32)
            self._buffers[name] = buffer
        return buffer[:floats]


def _source(k: torch.Tensor, v: torch.Tensor) -> tuple[int, ...]:
    """Addresses and strides in bytes, as numba_prefill.py's S_K and so on."""
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    return (k.data_ptr(), v.data_ptr(), *(k.element_size() * stride for stride in strides))
