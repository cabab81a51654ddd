"""The CPU backend: decode and KV write in Numba, prefill through torch's SDPA."""

from __future__ import annotations

import struct
import threading
from typing import Any, NamedTuple

import torch

from kvbench_kernels.api import AttentionOptions, KVCache, KVPair, PrefillBatch, check_heads, dense_rows
from kvbench_kernels.kv_formats import find_format
from kvbench_kernels.numba_codes import KIND_OF, UNIT
from kvbench_kernels.numba_cpu import NUM_ARGS, build_worker, run_decode, work_layout
from kvbench_kernels.numba_quantised import KIND_OF_DTYPE, store_rows
from kvbench_kernels.numba_threads import thread_team
from kvbench_kernels.numba_write import NUM_WRITE_ARGS, run_write
from kvbench_kernels.prefill_cpu import CpuPrefill, PrefillPlan
from kvbench_kernels.quantized import QuantizedKV, shares_rows
from kvbench_kernels.reference import TorchBackend

MAX_HEAD_DIM = 512
MOST_ROWS = 16  # query heads that share a pass over a latent row; a worker's code grows with them
_DECODE_ARGS = struct.Struct(f"{NUM_ARGS}q")
_WRITE_ARGS = struct.Struct(f"{NUM_WRITE_ARGS}q")
_FLOATS = struct.Struct("3f")


class _DecodeBuffers(threading.local):
    """Buffers of one calling thread, so that two engines in one process cannot meet in them."""

    def __init__(self) -> None:
        # Tensors, because their memory stays put and data_ptr() is cheap.
        self.args = torch.zeros(NUM_ARGS + NUM_WRITE_ARGS, dtype=torch.int64)
        self.args_view = memoryview(self.args.numpy()).cast("B")
        self.floats = torch.zeros(3, dtype=torch.float32)
        self.floats_view = memoryview(self.floats.numpy()).cast("B")
        self.work = torch.zeros(0, dtype=torch.uint8)
        self.prefill = CpuPrefill()

    def work_address(self, num_bytes: int) -> int:
        """Address of at least ``num_bytes`` of scratch, aligned to a cache line."""
        if self.work.numel() < num_bytes + 64:
            self.work = torch.zeros(num_bytes + 64, dtype=torch.uint8)
        return (self.work.data_ptr() + 63) // 64 * 64


class _DecodeRows(NamedTuple):
    """A layer's cache as the decode worker takes it: memory of rows, their kind, and the scales."""

    kind: int
    k: torch.Tensor
    v: torch.Tensor
    k_scale: float = 1.0  # of the whole tensor
    v_scale: float = 1.0
    k_scales: int = 0  # address of those per token and head
    v_scales: int = 0


def _decode_rows(k_cache: KVCache, v_cache: KVCache) -> _DecodeRows:
    if not isinstance(k_cache, QuantizedKV):
        return _DecodeRows(KIND_OF_DTYPE[k_cache.dtype], k_cache, v_cache)
    assert k_cache.format == v_cache.format, "K and V of a layer have one format"
    kind = KIND_OF[k_cache.format]
    k_scale, v_scale = k_cache.scale * UNIT[kind], v_cache.scale * UNIT[kind]
    scales = () if k_cache.scales is None else (k_cache.scales.data_ptr(), v_cache.scales.data_ptr())
    return _DecodeRows(kind, k_cache.codes, v_cache.codes, k_scale, v_scale, *scales)


class NumbaBackend(TorchBackend):
    """float32 and bfloat16 models on CPU, any KV format. See kvbench_kernels.api.AttentionBackend for the contract."""

    name = "numba"

    def __init__(self) -> None:
        self._scratch = _DecodeBuffers()
        self._run_decode = run_decode.ctypes  # ctypes releases the GIL during the call
        self._run_write = run_write.ctypes
        self._team = thread_team()

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
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim or head_dim, MAX_HEAD_DIM, latent)
        if dtype not in KIND_OF_DTYPE or torch.device(device).type != "cpu":
            raise ValueError(
                f"the numba kernel backend serves float32 and bfloat16 models on cpu, not {dtype} on {device}: "
                "use kernel_backend auto"
            )

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: KVCache,
        v_cache: KVCache,
        slots: torch.Tensor,
    ) -> None:
        if slots.dtype != torch.int64:
            slots = slots.to(torch.int64)
        latent = shares_rows(k_cache, v_cache)
        if isinstance(k_cache, QuantizedKV):
            store_rows(k_cache, slots, k)
            if not latent:
                store_rows(v_cache, slots, v)
            return
        if k.dtype != k_cache.dtype or v.dtype != v_cache.dtype:
            k, v = k.to(k_cache.dtype), v.to(v_cache.dtype)
        k, v = dense_rows(k), dense_rows(v)
        scratch, size = self._scratch, k.element_size()
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        _WRITE_ARGS.pack_into(
            scratch.args_view, 8 * NUM_ARGS,
            k.data_ptr(), v.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), slots.data_ptr(),
            k.shape[0], k.shape[1], k.shape[2] * size, 0 if latent else v.shape[2] * size,
            k_token * size, v_token * size, k_head * size, v_head * size,
            k_cache.stride(0) * size, v_cache.stride(0) * size,
        )  # fmt: skip
        self._run_write(scratch.args.data_ptr() + 8 * NUM_ARGS)

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
        batch, heads, dim = q.shape
        kv_heads, v_dim = k_cache.shape[1], v_cache.shape[2]
        if out is None:
            out = q.new_empty((batch, heads, v_dim))
        if batch == 0:
            return out
        q = dense_rows(q)
        plain = () if isinstance(k_cache, QuantizedKV) else (k_cache, v_cache)
        if q.dtype not in KIND_OF_DTYPE or any(x.dtype != q.dtype for x in (*plain, out)):
            raise ValueError(
                "the numba decode kernel computes with q, plain KV and out all in float32 or all in bfloat16, not with "
                f"{', '.join(str(x.dtype) for x in (q, *plain, out))}: use default_backend(device, dtype)"
            )
        rows, latent = _decode_rows(k_cache, v_cache), shares_rows(k_cache, v_cache)
        dense = rows.k.stride(1) == rows.k.shape[2] and (latent or rows.v.stride(1) == rows.v.shape[2])
        if not dense or k_cache.shape[2] != dim or out.stride(1) != v_dim:
            raise ValueError(
                f"rows of k_cache {tuple(k_cache.shape)} strides {rows.k.stride()}, v_cache "
                f"{tuple(v_cache.shape)} strides {rows.v.stride()}, out strides {out.stride()} must be "
                f"dense for {dim} and {v_dim} values a head: allocate them as [slots, kv_heads, head_dim]"
            )
        if page_starts.dtype != torch.int64:
            page_starts = page_starts.to(torch.int64)
        if seq_lens.dtype != torch.int64:
            seq_lens = seq_lens.to(torch.int64)
        sinks = None if options.sinks is None else options.sinks.to(torch.float32).contiguous()
        threads, kind = torch.get_num_threads(), KIND_OF_DTYPE[q.dtype]
        scratch, team = self._scratch, self._team
        work_stride, _ = work_layout(heads, dim, v_dim)
        group = max(n for n in range(1, MOST_ROWS + 1) if heads % n == 0) if latent else heads // kv_heads
        _FLOATS.pack_into(scratch.floats_view, 0, options.scale * rows.k_scale, options.softcap or 0.0, rows.v_scale)
        args, size, q_size = scratch.args.data_ptr(), rows.k.element_size(), q.element_size()
        _DECODE_ARGS.pack_into(
            scratch.args_view, 0,
            q.data_ptr(), rows.k.data_ptr(), rows.v.data_ptr(), page_starts.data_ptr(),
            seq_lens.data_ptr(), out.data_ptr(), scratch.work_address(threads * work_stride),
            0 if sinks is None else sinks.data_ptr(), scratch.floats.data_ptr(),
            batch, heads, group, v_dim, page_starts.stride(0) * 8, page_size,
            rows.k.stride(0) * size, rows.v.stride(0) * size,
            q.stride(0) * q_size, q.stride(1) * q_size, out.stride(0) * q_size,
            options.sliding_window or 0, 0, threads, 0, work_stride,
            build_worker(group, dim, v_dim, rows.kind, kind, latent).address,
            team.parallel, team.thread_num, team.num_threads, rows.k_scales, rows.v_scales, 4 * kv_heads, kind,
        )  # fmt: skip
        self._run_decode(args)
        return out

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
        plan: PrefillPlan | None = None,
    ) -> torch.Tensor:
        if plan is None:
            plan = PrefillPlan(batch)
        return self._scratch.prefill.attend(q, k_cache, v_cache, plan, options, out=out, new_kv=new_kv)

    def plan_prefill(self, batch: PrefillBatch, *, max_queries: int, max_tokens: int) -> PrefillPlan:
        """Slots and masks of every sequence, made once and used by all layers."""
        return PrefillPlan(batch)
