"""Paged causal prefill in Triton for packed sequences of any lengths, with earlier context.

One program serves a block of query tokens of one sequence under one KV head; its rows are
token x query head of the group, so K and V are read once for the whole group. Query lengths of 1
to a few tokens (speculation, the tail of a chunk) take the same path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.api import AttentionOptions
from kernels.launch import cdiv, prefill_tiles
from kernels.triton_common import online_softmax, scores_log2, token_slots


@triton.jit(do_not_specialize=["pages_stride"])
def prefill_kernel(
    q_ptr,  # [T, H, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, Dv]
    pages_ptr,  # [B, max_pages] int64
    query_starts_ptr,  # [B + 1]
    lens_ptr,  # [B]
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [T, H, Dv]
    scale,
    softcap,
    q_stride,
    q_head_stride,
    k_stride,
    v_stride,
    pages_stride,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    BLOCK_Q: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(1)
    b = tl.program_id(2)
    q_begin = tl.load(query_starts_ptr + b).to(tl.int32)
    num_queries = tl.load(query_starts_ptr + b + 1).to(tl.int32) - q_begin
    seq_len = tl.load(lens_ptr + b).to(tl.int32)
    first_query = tl.program_id(0) * BLOCK_Q
    if first_query >= num_queries:
        return

    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    query = first_query + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    row_ok = (rows < BLOCK_Q * GROUP) & (query < num_queries)
    context = seq_len - num_queries  # tokens before the first query
    position = context + query
    packed = (q_begin + query).to(tl.int64)

    q_at = q_ptr + (packed * q_stride + heads * q_head_stride)[:, None] + d[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    k_base = k_ptr + kv_head * D + d[:, None]
    v_base = v_ptr + kv_head * DV + dv[None, :]
    page_row = pages_ptr + b.to(tl.int64) * pages_stride
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)

    # Tiles that every row sees in full need no mask; the diagonal, and a window's edge, do.
    end = tl.minimum(context + first_query + BLOCK_Q, seq_len)
    begin = 0
    free_end = tl.maximum(context + first_query + 1, 0) // BLOCK_N * BLOCK_N
    if WINDOW > 0:
        begin = tl.maximum(context + first_query + 1 - WINDOW, 0)
        free_end = begin
    for start in range(begin, free_end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        slots = token_slots(page_row, tokens, tokens < end, PAGE_SIZE)
        k = tl.load(k_base + slots[None, :] * k_stride, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_base + slots[:, None] * v_stride, mask=(dv < DV)[None, :], other=0.0)
        s = scores_log2(q, k, scale, softcap, HAS_SOFTCAP)
        acc, top, total = online_softmax(acc, top, total, s, v)
    for start in range(free_end, end, BLOCK_N):
        tokens = start + tl.arange(0, BLOCK_N)
        in_range = tokens < end
        slots = token_slots(page_row, tokens, in_range, PAGE_SIZE)
        # Masked loads give 0 and not what lies there: 0 * NaN from an unused slot would be NaN.
        k = tl.load(k_base + slots[None, :] * k_stride, mask=in_range[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_base + slots[:, None] * v_stride, mask=in_range[:, None] & (dv < DV)[None, :], other=0.0)
        visible = in_range[None, :] & (tokens[None, :] <= position[:, None])
        if WINDOW > 0:
            visible = visible & (tokens[None, :] > position[:, None] - WINDOW)
        s = scores_log2(q, k, scale, softcap, HAS_SOFTCAP)
        s = tl.where(visible, s, float("-inf"))
        acc, top, total = online_softmax(acc, top, total, s, v)

    if HAS_SINKS:
        sink = tl.load(sinks_ptr + heads, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
        joint = tl.maximum(top, sink)
        fade = tl.exp2(top - joint)
        acc = acc * fade[:, None]
        total = total * fade + tl.exp2(sink - joint)
    result = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_at = out_ptr + (packed * HEADS + heads)[:, None] * DV + dv[None, :]
    tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=row_ok[:, None] & (dv < DV)[None, :])


def prefill_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    page_size: int,
    window: int | None,
    softcap: bool,
    sinks: bool,
) -> dict[str, int | bool]:
    """The compile-time arguments of ``prefill_kernel`` with num_warps and num_stages."""
    group = num_heads // num_kv_heads
    tiles = prefill_tiles(group, head_dim, v_head_dim, itemsize)
    return {
        "PAGE_SIZE": page_size, "WINDOW": window or 0, "HEADS": num_heads, "GROUP": group,
        "D": head_dim, "DV": v_head_dim, "D_PAD": tiles.d_pad, "DV_PAD": tiles.v_pad,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "HAS_SOFTCAP": softcap, "HAS_SINKS": sinks,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def launch_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_starts: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    options: AttentionOptions,
    out: torch.Tensor,
    max_queries: int,
) -> None:
    """Run prefill into ``out [T, H, Dv]``; no sequence has more than ``max_queries`` queries."""
    _, heads, dim = q.shape
    sinks = options.sinks
    kv_heads, v_dim = k_cache.shape[1], v_cache.shape[2]
    constants = prefill_constants(
        heads, kv_heads, dim, v_dim, q.element_size(), page_size,
        options.sliding_window, options.softcap is not None, sinks is not None,
    )  # fmt: skip
    blocks = cdiv(max_queries, constants["BLOCK_M"] // constants["GROUP"])
    prefill_kernel[(blocks, kv_heads, seq_lens.shape[0])](
        q, k_cache, v_cache, page_starts, query_starts, seq_lens, q if sinks is None else sinks, out,
        options.scale, options.softcap or 1.0,
        q.stride(0), q.stride(1), k_cache.stride(0), v_cache.stride(0), page_starts.stride(0),
        **constants,
    )  # fmt: skip
