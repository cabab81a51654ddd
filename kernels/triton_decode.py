"""Paged decode in Triton: long sequences in pieces, which the last one to end adds up.

One program serves one sequence, or a piece of it as ``triton_plan`` lists them, and one KV head. All query
heads of the KV head are rows of one tile, so each K and V row is read once and tl.dot has its 16 rows. The KV heads of
a piece run side by side: their rows are neighbours in memory, and the scales of eight are one sector.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kvbench_kernels.dependent_launch import wait_for_earlier
from kvbench_kernels.launch import KernelShape, Tiles, latent_tiles, next_power_of_two, shape_constants
from kvbench_kernels.triton_codes import row_bytes
from kvbench_kernels.triton_common import add_parts, arrive, attend, columns, finish, load_rope
from kvbench_kernels.tuning import choose_decode

PARTS_VALUES = 4096  # of parts that a program loads at a time; more would take registers that attention has not


@triton.jit(
    do_not_specialize=["pages_stride"],
    do_not_specialize_on_alignment=["pages_ptr", "lens_ptr", "sinks_ptr", "lse_ptr"],  # slices begin anywhere
)
def decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr, v_ptr,  # [slots, Hkv, D] and [slots, Hkv, Dv], or the codes of a quantised cache
    k_scales_ptr, v_scales_ptr,  # float32 [slots, Hkv], read if KIND has a scale per token and head
    pages_ptr,  # [B, max_pages] int32 or int64, first slot of each page
    lens_ptr,  # [B], read if not SPLIT
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [B, H, Dv]: of whole sequences
    work_ptr,  # the table of kvbench_kernels.triton_plan, read if SPLIT
    parts_ptr,  # float32 [items, H, Dv]: of pieces, written if SPLIT
    lse_ptr,  # float32 [items, H], likewise
    arrived_ptr,  # int32 [B, groups of query heads] zeros, pieces that have ended, used and left as zeros if SPLIT
    score_scale, softcap, v_scale,
    q_stride, q_head_stride, k_stride, v_stride, pages_stride,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_PAD: tl.constexpr, BLOCK_P: tl.constexpr,
    SPLIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    KV_HEADS: tl.constexpr = (HEADS + GROUP - 1) // GROUP  # or groups of the heads that share a latent row
    ROWS: tl.constexpr = 1 if ROPE > 0 else KV_HEADS  # of a token in the cache
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS
    if SPLIT:
        # All loads at once: the table has room for every item that a program may ask for.
        num_items, item_at = tl.load(work_ptr), work_ptr + (1 + item) * 4
        b, piece = tl.load(item_at).to(tl.int64), tl.load(item_at + 1)
        pieces, seq_len = tl.load(item_at + 2), tl.load(item_at + 3)
        if item >= num_items:
            return
    else:
        b, piece, pieces = item.to(tl.int64), 0, 1
        seq_len = tl.load(lens_ptr + b).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP + rows
    row_ok = rows < GROUP
    if ROPE > 0:
        row_ok = row_ok & (heads < HEADS)
    begin = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0

    value, value_ok = columns(D, D_PAD, KIND)
    # int64: heads may lie as far apart as all tokens of a batch
    q_at = q_ptr + b * q_stride + heads[:, None].to(tl.int64) * q_head_stride + value[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & value_ok[None, :], other=0.0)
    q_rope = q  # not used
    if ROPE > 0:
        q_rope = load_rope(q_ptr + b * q_stride + heads.to(tl.int64) * q_head_stride, row_ok, D, ROPE, ROPE_PAD, KIND)
    position = tl.zeros([BLOCK_M], tl.int32) + seq_len - 1
    row = 0 if ROPE > 0 else kv_head
    cache = (
        pages_ptr + b * pages_stride, k_ptr + row * row_bytes(D, KIND), v_ptr + row * row_bytes(DV, KIND),
        k_scales_ptr + row, v_scales_ptr + row, k_stride, v_stride,
    )  # fmt: skip
    acc, top, total = attend(
        q, q_rope, position, (begin, seq_len), (begin, seq_len), piece, pieces, cache,
        score_scale, softcap, PAGE_SIZE, WINDOW, ROWS, D, DV, D_PAD, DV_PAD, ROPE, ROPE_PAD, BLOCK_M, BLOCK_N,
        HAS_SOFTCAP, KIND, FP8_HARDWARE,
    )  # fmt: skip
    finish(
        acc, top, total, pieces, b * HEADS + heads, item.to(tl.int64) * HEADS + heads, row_ok, heads, sinks_ptr,
        out_ptr, parts_ptr, lse_ptr, v_scale, DV, DV_PAD, KIND, SPLIT, HAS_SINKS,
    )  # fmt: skip
    if SPLIT and pieces > 1:
        last = arrive(arrived_ptr + b * KV_HEADS + kv_head, pieces)
        if last:
            group_rows = tl.arange(0, GROUP_PAD)
            group = kv_head * GROUP + group_rows
            group_ok = group_rows < GROUP
            if ROPE > 0:
                group_ok = group_ok & (group < HEADS)
            first = (item - piece).to(tl.int64) * HEADS + group
            add_parts(
                pieces, b * HEADS + group, first, group_ok, group, sinks_ptr, out_ptr, parts_ptr, lse_ptr,
                GROUP_PAD, BLOCK_P, HEADS, DV, DV_PAD, HAS_SINKS,
            )  # fmt: skip


@lru_cache(maxsize=1024)
def tiles_of_decode(shape: KernelShape) -> Tiles:
    """The tiles that the shape asks for, else the chosen ones."""
    if shape.latent:
        return shape.tiles or latent_tiles(shape, prefill=False)
    return shape.tiles or choose_decode(*shape.tuning_key)


@lru_cache(maxsize=1024)
def decode_constants(shape: KernelShape, split: bool) -> dict[str, Any]:
    """The compile-time arguments of ``decode_kernel`` with num_warps and num_stages. Not to be changed by the caller.

    ``split``: sequences may be cut. All numbers of pieces share a kernel: a batch that grows must not compile in the
    middle of a measurement.
    """
    constants, group = shape_constants(shape, tiles_of_decode(shape)), next_power_of_two(shape.group)
    parts = min(64, max(1, PARTS_VALUES // (group * constants["DV_PAD"])))
    return constants | {"SPLIT": split, "GROUP_PAD": group, "BLOCK_P": parts}
