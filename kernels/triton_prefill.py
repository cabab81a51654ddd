"""Paged causal prefill in Triton for packed sequences of any lengths, with earlier context.

One program serves a block of query tokens of one sequence under one KV head; its rows are token x query head of the
group, so K and V are read once for the whole group. The KV heads of a block run side by side, as in decode. Where there
are fewer blocks than the GPU can run at a time (a few sequences, of which each has a few new tokens after a long
context), each block's keys are split among programs, and a second kernel adds up the parts: unlike in decode they are
too many values for one program. How long a piece is, the device has chosen for the step (triton_plan.py); a block that
is in one piece is written at once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import triton
import triton.language as tl

from kvbench_kernels.dependent_launch import wait_for_earlier
from kvbench_kernels.launch import KernelShape, latent_tiles, next_power_of_two, shape_constants, short_tiles
from kvbench_kernels.triton_codes import row_bytes
from kvbench_kernels.triton_common import add_parts, attend, columns, finish, load_rope
from kvbench_kernels.tuning import choose_prefill


@triton.jit
def find_sequence(query_starts_ptr, block, batch, BLOCK_Q: tl.constexpr):
    """Returns (sequence, its first block).

    Sequence b has the blocks from query_starts[b] // BLOCK_Q + b to before b + 1's, at least as many as its queries
    fill. All blocks: total queries // BLOCK_Q + batch.
    """
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(query_starts_ptr + middle).to(tl.int32) // BLOCK_Q + middle
        before = first <= block
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    return low, tl.load(query_starts_ptr + low).to(tl.int32) // BLOCK_Q + low


@triton.jit(
    do_not_specialize=["pages_stride", "batch"],
    do_not_specialize_on_alignment=[
        "pages_ptr", "query_starts_ptr", "lens_ptr", "sinks_ptr", "lse_ptr", "pieces_ptr", "piece_ptr",
    ],
)
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr, v_ptr,  # [slots, Hkv, D] and [slots, Hkv, Dv], or the codes of a quantised cache
    k_scales_ptr, v_scales_ptr,  # float32 [slots, Hkv], read if KIND has a scale per token and head
    pages_ptr,  # [B, max_pages] int32 or int64
    query_starts_ptr, lens_ptr,  # [B + 1], [B]
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [T, H, Dv]: of blocks in one piece
    parts_ptr,  # float32 [T, splits, H, Dv]: of pieces, written if SPLIT
    lse_ptr,  # float32 [T, splits, H], likewise
    pieces_ptr,  # int32 [T]: in how many pieces each token's block is, written if SPLIT
    piece_ptr,  # int32 [1]: keys that no piece exceeds, read if SPLIT
    score_scale, softcap, v_scale,
    q_stride, q_head_stride, k_stride, v_stride, pages_stride, batch,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, D_PAD: tl.constexpr, DV_PAD: tl.constexpr,
    ROPE: tl.constexpr, ROPE_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    KV_HEADS: tl.constexpr = (HEADS + GROUP - 1) // GROUP  # or groups of the heads that share a latent row
    ROWS: tl.constexpr = 1 if ROPE > 0 else KV_HEADS  # of a token in the cache
    kv_head = tl.program_id(0) % KV_HEADS
    # The last block of a sequence has the most keys: it starts first, so that the short ones fill the end.
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // KV_HEADS
    b, first_block = find_sequence(query_starts_ptr, block, batch, BLOCK_Q)
    q_begin = tl.load(query_starts_ptr + b).to(tl.int32)
    num_queries = tl.load(query_starts_ptr + b + 1).to(tl.int32) - q_begin
    seq_len = tl.load(lens_ptr + b).to(tl.int32)
    first_query = (block - first_block) * BLOCK_Q
    if first_query >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    query = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (query < num_queries)
    if ROPE > 0:
        row_ok = row_ok & (heads < HEADS)
    token = (q_begin + query).to(tl.int64)
    context = seq_len - num_queries  # tokens before the first query
    lowest = context + first_query
    end = tl.maximum(tl.minimum(lowest + BLOCK_Q, seq_len), 0)
    begin = tl.maximum(lowest + 1 - WINDOW, 0) if WINDOW > 0 else 0
    pieces = 1
    if SPLIT:
        pieces = tl.maximum(tl.cdiv(end - begin, tl.load(piece_ptr)), 1)
        if tl.program_id(1) >= pieces:
            return
        if kv_head == 0:
            tl.store(pieces_ptr + token, tl.zeros([BLOCK_M], tl.int32) + pieces, mask=row_ok & (rows % GROUP == 0))
    value, value_ok = columns(D, D_PAD, KIND)
    # int64: heads may lie as far apart as all tokens of a batch
    q_at = q_ptr + (token * q_stride + heads.to(tl.int64) * q_head_stride)[:, None] + value[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & value_ok[None, :], other=0.0)
    q_rope = q  # not used
    if ROPE > 0:
        at = q_ptr + token * q_stride + heads.to(tl.int64) * q_head_stride
        q_rope = load_rope(at, row_ok, D, ROPE, ROPE_PAD, KIND)

    # Every row sees the tokens up to the lowest row's own, and from the last row's window on.
    unmasked = (tl.maximum(end - WINDOW, 0) if WINDOW > 0 else 0, tl.maximum(lowest + 1, 0))
    row = 0 if ROPE > 0 else kv_head
    cache = (
        pages_ptr + b.to(tl.int64) * pages_stride, k_ptr + row * row_bytes(D, KIND),
        v_ptr + row * row_bytes(DV, KIND), k_scales_ptr + row, v_scales_ptr + row, k_stride, v_stride,
    )  # fmt: skip
    acc, top, total = attend(
        q, q_rope, context + query, (begin, end), unmasked, tl.program_id(1), pieces, cache,
        score_scale, softcap, PAGE_SIZE, WINDOW, ROWS, D, DV, D_PAD, DV_PAD, ROPE, ROPE_PAD, BLOCK_M, BLOCK_N,
        HAS_SOFTCAP, KIND, FP8_HARDWARE,
    )  # fmt: skip
    part = (token * tl.num_programs(1) + tl.program_id(1)) * HEADS + heads
    finish(
        acc, top, total, pieces, token * HEADS + heads, part, row_ok, heads, sinks_ptr,
        out_ptr, parts_ptr, lse_ptr, v_scale, DV, DV_PAD, KIND, SPLIT, HAS_SINKS,
    )  # fmt: skip


@triton.jit(do_not_specialize=["splits"], do_not_specialize_on_alignment=["lse_ptr", "sinks_ptr", "pieces_ptr"])
def reduce_kernel(
    parts_ptr,  # float32 [T, splits, H, Dv]
    lse_ptr,  # float32 [T, splits, H]
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [T, H, Dv]
    pieces_ptr,  # int32 [T]
    splits,
    HEADS: tl.constexpr, DV: tl.constexpr, DV_PAD: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_P: tl.constexpr,
    HAS_SINKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up the parts of BLOCK_H heads of one token, if its block is in several pieces."""
    wait_for_earlier(PDL)
    BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    heads = tl.program_id(0) % BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
    pieces = tl.load(pieces_ptr + token)
    if pieces > 1:
        add_parts(
            pieces, token * HEADS + heads, token * splits * HEADS + heads, heads < HEADS, heads, sinks_ptr,
            out_ptr, parts_ptr, lse_ptr, BLOCK_H, BLOCK_P, HEADS, DV, DV_PAD, HAS_SINKS,
        )  # fmt: skip


def reduce_constants(heads: int, v_dim: int, sinks: bool) -> dict[str, Any]:
    """The compile-time arguments of ``reduce_kernel`` with num_warps: 8,192 values at a time, 64 a thread."""
    v_pad = next_power_of_two(v_dim)
    block_h = max(1, 256 // v_pad)
    return {
        "HEADS": heads, "DV": v_dim, "DV_PAD": v_pad, "BLOCK_H": block_h, "BLOCK_P": 8192 // (block_h * v_pad),
        "HAS_SINKS": sinks, "num_warps": 4,
    }  # fmt: skip


@lru_cache(maxsize=1024)
def prefill_constants(shape: KernelShape, splits: int, short: bool) -> dict[str, Any]:
    """The compile-time arguments of ``prefill_kernel`` with num_warps and num_stages. Not to be changed by the caller.

    ``short``: no sequence has more than ``launch.SHORT_QUERIES`` queries. The tiles are then always computed ones:
    tuning tries decode and long chunks only, and what decode can launch this kernel may not.
    """
    if shape.tiles is not None:
        tiles = shape.tiles
    elif shape.latent:
        tiles = latent_tiles(shape, prefill=True)
    elif short:
        tiles = short_tiles(shape.group, shape.head_dim, shape.v_head_dim, shape.itemsize, shape.kind)
    else:
        tiles = choose_prefill(*shape.tuning_key)
    return shape_constants(shape, tiles) | {"SPLIT": splits > 1}
