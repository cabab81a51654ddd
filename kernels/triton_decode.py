"""Paged decode in Triton: split KV, then a reduction; no second pass where one split does.

One program serves one sequence, one KV head and one split. All query heads of the KV head are rows
of one tile, so each K and V row is read once and tl.dot has its 16 rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.api import AttentionOptions
from kernels.launch import decode_tiles, next_power_of_two
from kernels.triton_common import online_softmax, scores_log2, token_slots


@triton.jit(do_not_specialize=["pages_stride"])
def decode_kernel(
    q_ptr,  # [B, H, D]
    k_ptr,  # [slots, Hkv, D]
    v_ptr,  # [slots, Hkv, Dv]
    pages_ptr,  # [B, max_pages] int64, first slot of each page
    lens_ptr,  # [B]
    sinks_ptr,  # [H], read if HAS_SINKS
    out_ptr,  # [B, H, Dv]; with splits float32 [B, H, SPLITS, Dv]
    lse_ptr,  # float32 [B, H, SPLITS], written if SPLITS > 1
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
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    b = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    rows = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    dv = tl.arange(0, DV_PAD)
    heads = kv_head * GROUP + rows
    row_ok = rows < GROUP

    seq_len = tl.load(lens_ptr + b).to(tl.int32)
    begin = tl.maximum(seq_len - WINDOW, 0) if WINDOW > 0 else 0
    per_split = tl.cdiv(tl.cdiv(seq_len - begin, SPLITS), BLOCK_N) * BLOCK_N
    first = begin + split * per_split
    last = tl.minimum(first + per_split, seq_len)
    page_row = pages_ptr + b * pages_stride

    q_at = q_ptr + b * q_stride + heads[:, None] * q_head_stride + d[None, :]
    q = tl.load(q_at, mask=row_ok[:, None] & (d < D)[None, :], other=0.0)
    k_base = k_ptr + kv_head * D + d[:, None]
    v_base = v_ptr + kv_head * DV + dv[None, :]
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, DV_PAD], tl.float32)

    # Only the last tile needs a mask over tokens. The page table is read one tile ahead.
    full_end = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    tokens = first + tl.arange(0, BLOCK_N)
    slots = token_slots(page_row, tokens, tokens < last, PAGE_SIZE)
    for start in range(first, full_end, BLOCK_N):
        ahead = start + BLOCK_N + tl.arange(0, BLOCK_N)
        next_slots = token_slots(page_row, ahead, ahead < last, PAGE_SIZE)
        k_at = k_base + slots[None, :] * k_stride
        v_at = v_base + slots[:, None] * v_stride
        k = tl.load(k_at) if D == D_PAD else tl.load(k_at, mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_at) if DV == DV_PAD else tl.load(v_at, mask=(dv < DV)[None, :], other=0.0)
        s = scores_log2(q, k, scale, softcap, HAS_SOFTCAP)
        acc, top, total = online_softmax(acc, top, total, s, v)
        slots = next_slots
    if full_end < last:
        in_range = full_end + tl.arange(0, BLOCK_N) < last
        # Masked loads give 0 and not what lies there: 0 * NaN from an unused slot would be NaN.
        k = tl.load(k_base + slots[None, :] * k_stride, mask=in_range[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_base + slots[:, None] * v_stride, mask=in_range[:, None] & (dv < DV)[None, :], other=0.0)
        s = scores_log2(q, k, scale, softcap, HAS_SOFTCAP)
        s = tl.where(in_range[None, :], s, float("-inf"))
        acc, top, total = online_softmax(acc, top, total, s, v)

    out_ok = row_ok[:, None] & (dv < DV)[None, :]
    if SPLITS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks_ptr + heads, mask=row_ok, other=0.0).to(tl.float32) * 1.4426950408889634
            joint = tl.maximum(top, sink)
            fade = tl.exp2(top - joint)
            acc = acc * fade[:, None]
            total = total * fade + tl.exp2(sink - joint)
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # length 0 gives 0
        out_at = out_ptr + (b * HEADS + heads)[:, None] * DV + dv[None, :]
        tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=out_ok)
    else:
        result = acc / tl.where(total > 0, total, 1.0)[:, None]
        place = (b * HEADS + heads) * SPLITS + split
        tl.store(out_ptr + place[:, None] * DV + dv[None, :], result, mask=out_ok)
        tl.store(lse_ptr + place, top + tl.log2(total), mask=row_ok)  # -inf where the split is empty


@triton.jit
def reduce_kernel(
    parts_ptr,  # float32 [B, H, SPLITS, Dv], each split normalised
    lse_ptr,  # float32 [B, H, SPLITS], log2 of each split's denominator
    sinks_ptr,  # [H]
    out_ptr,  # [B, H, Dv]
    HEADS: tl.constexpr,
    DV: tl.constexpr,
    DV_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)  # b * H + h
    splits = tl.arange(0, SPLITS_PAD)
    dv = tl.arange(0, DV_PAD)
    lse = tl.load(lse_ptr + row * SPLITS + splits, mask=splits < SPLITS, other=float("-inf"))
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % HEADS).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    weights = tl.exp2(lse - base)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    parts_at = parts_ptr + (row * SPLITS + splits)[:, None] * DV + dv[None, :]
    parts = tl.load(parts_at, mask=(splits < SPLITS)[:, None] & (dv < DV)[None, :], other=0.0)
    result = tl.sum(parts * weights[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(out_ptr + row * DV + dv, result.to(out_ptr.dtype.element_ty), mask=dv < DV)


def decode_constants(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
    itemsize: int,
    page_size: int,
    splits: int,
    window: int | None,
    softcap: bool,
    sinks: bool,
) -> dict[str, int | bool]:
    """The compile-time arguments of ``decode_kernel`` with num_warps and num_stages."""
    group = num_heads // num_kv_heads
    tiles = decode_tiles(group, head_dim, v_head_dim, itemsize)
    return {
        "PAGE_SIZE": page_size, "WINDOW": window or 0, "HEADS": num_heads, "GROUP": group,
        "D": head_dim, "DV": v_head_dim, "D_PAD": tiles.d_pad, "DV_PAD": tiles.v_pad,
        "BLOCK_M": tiles.block_m, "BLOCK_N": tiles.block_n, "SPLITS": splits,
        "HAS_SOFTCAP": softcap, "HAS_SINKS": sinks,
        "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
    }  # fmt: skip


def launch_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    page_size: int,
    options: AttentionOptions,
    out: torch.Tensor,
    parts: torch.Tensor | None,
    lse: torch.Tensor | None,
    splits: int,
) -> None:
    """Run decode into ``out [B, H, Dv]``; with splits > 1 through ``parts [B, H, splits, Dv]`` and
    ``lse [B, H, splits]``, both float32 (any contents)."""
    batch, heads, dim = q.shape
    sinks = options.sinks
    kv_heads, v_dim = k_cache.shape[1], v_cache.shape[2]
    constants = decode_constants(
        heads, kv_heads, dim, v_dim, q.element_size(), page_size, splits,
        options.sliding_window, options.softcap is not None, sinks is not None,
    )  # fmt: skip
    direct = splits == 1
    decode_kernel[(batch, kv_heads, splits)](
        q, k_cache, v_cache, page_starts, seq_lens, q if sinks is None else sinks,
        out if direct else parts, out if direct else lse, options.scale, options.softcap or 1.0,
        q.stride(0), q.stride(1), k_cache.stride(0), v_cache.stride(0), page_starts.stride(0),
        **constants,
    )  # fmt: skip
    if not direct:
        reduce_kernel[(batch * heads,)](
            parts, lse, q if sinks is None else sinks, out, HEADS=heads, DV=v_dim,
            DV_PAD=constants["DV_PAD"], SPLITS=splits, SPLITS_PAD=next_power_of_two(splits),
            HAS_SINKS=sinks is not None, num_warps=4,
        )  # fmt: skip
