"""Paged decode in Triton: split KV, then a reduction; no second pass where one split does.

One program serves one sequence, one KV head and one split. All query heads of the KV head are rows
of one tile, so each K and V row is read once and tl.dot has its 16 rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kernels.launch import KernelShape, shape_constants
from kernels.triton_codes import row_bytes
from kernels.triton_common import attend, columns, finish
from kernels.tuning import choose_decode


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "lens_ptr", "sinks_ptr", "lse_ptr"],  # slices begin anywhere
)
def decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr, v_ptr,  # [slots, Hkv, D] and [slots, Hkv, Dv], or the codes of a quantised cache
    k_scales_ptr, v_scales_ptr,  # float32 [slots, Hkv], read if KIND has a scale per token and head
    pages_ptr,  # [B, max_pages] int64, first slot of each page
    lens_ptr,  # [B]
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [B, H, Dv]; if SPLIT float32 [B, H, splits, Dv]
    lse_ptr,  # float32 [B, H, splits], written if SPLIT
    score_scale, softcap, v_scale,
    q_stride, q_head_stride, k_stride, v_stride, pages_stride,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr,
):  # fmt: skip
    KV_HEADS: tl.constexpr = HEADS // GROUP
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    row_ok = rows < GROUP
    seq_len = tl.load(lens_ptr + b).to(tl.int32)
    begin = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0

    value, value_ok = columns(D, D_PAD, KIND)
    # int64: heads may lie as far apart as all tokens of a batch
    q_at = q_ptr + b * q_stride + heads[:, None].to(tl.int64) * q_head_stride + value[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & value_ok[None, :], other=0.0)
    position = tl.zeros([BLOCK_M], tl.int32) + seq_len - 1
    cache = (
        pages_ptr + b * pages_stride, k_ptr + kv_head * row_bytes(D, KIND), v_ptr + kv_head * row_bytes(DV, KIND),
        k_scales_ptr + kv_head, v_scales_ptr + kv_head, k_stride, v_stride,
    )  # fmt: skip
    acc, top, total = attend(
        q, position, (begin, seq_len), (begin, seq_len), tl.program_id(2), tl.num_programs(2), cache,
        score_scale, softcap, PAGE_SIZE, WINDOW, KV_HEADS, D, DV, D_PAD, DV_PAD, BLOCK_M, BLOCK_N,
        HAS_SOFTCAP, KIND, FP8_HARDWARE,
    )  # fmt: skip
    finish(
        acc, top, total, b * HEADS + heads, row_ok, heads, tl.program_id(2), tl.num_programs(2),
        sinks_ptr, out_ptr, lse_ptr, v_scale, DV, DV_PAD, KIND, SPLIT, HAS_SINKS,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def decode_constants(shape: KernelShape, splits: int) -> dict[str, Any]:
    """The compile-time arguments of ``decode_kernel`` with num_warps and num_stages. Not to be changed by the caller.

    All numbers of splits above 1 share a kernel: a batch that grows must not compile in the middle of a measurement.
    """
    return shape_constants(shape, shape.tiles or choose_decode(*shape.tuning_key)) | {"SPLIT": splits > 1}
