"""The work of a decoder layer beside attention and matrix products, one Triton kernel each.

RMSNorm with the residual sum before it, the norm and rotation of Q and K with the KV write, and the product of a gated
MLP. All compute in float32 and round once, to the model's dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from kvbench_kernels.api import KVCache, dense_rows
from kvbench_kernels.dependent_launch import dependent_launch, wait_for_earlier
from kvbench_kernels.launch import cdiv, next_power_of_two
from kvbench_kernels.layer_parts import Heads, Norm, Rotation
from kvbench_kernels.triton_kv import store_halves, store_side
from kvbench_kernels.triton_launch import kind_of, side_of

MAX_NORM = 16384  # values of a row, which one program holds
HEADS_TILE = 2048  # values of some heads of a token, which one program rotates
ACT_BLOCK = 1024


@triton.jit
def scale_row(x, weight_ptr, column, ok, eps, SIZE: tl.constexpr, OFFSET: tl.constexpr):
    """RMSNorm of x [BLOCK] float32, 0 where not ok."""
    weight = tl.load(weight_ptr + column, mask=ok, other=0.0).to(tl.float32) + OFFSET
    return x * (1 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)) * weight


@triton.jit
def add_norm_kernel(
    x_ptr, residual_ptr, sum_ptr, out_ptr,  # [T, SIZE]; the last two dense
    post_weight_ptr, weight_ptr,  # [SIZE]
    post_eps, eps, x_stride, residual_stride,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, POST_OFFSET: tl.constexpr, OFFSET: tl.constexpr,
    POST: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """POST: norm x. ADD: add the residual and write the sum. NORM: write the norm of what there is then."""
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    if POST:
        x = scale_row(x, post_weight_ptr, column, ok, post_eps, SIZE, POST_OFFSET)
    if ADD:
        x += tl.load(residual_ptr + row * residual_stride + column, mask=ok, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * SIZE + column, rounded, mask=ok)
        x = rounded.to(tl.float32)
    if NORM:
        x = scale_row(x, weight_ptr, column, ok, eps, SIZE, OFFSET)
        tl.store(out_ptr + row * SIZE + column, x.to(out_ptr.dtype.element_ty), mask=ok)


@triton.jit
def head_factor(row, head_ok, eps, DIM: tl.constexpr, PAD: tl.constexpr):
    """Computes 1 / sqrt(mean(x**2) + eps) of each head at ``row`` [n, 1]: [n, 1]."""
    column = tl.arange(0, PAD)
    x = tl.load(row + column[None, :], mask=head_ok[:, None] & (column < DIM)[None, :], other=0.0).to(tl.float32)
    return (1 / tl.sqrt_rn(tl.sum(x * x, 1) / DIM + eps))[:, None]


@triton.jit
def rotate_heads(
    row, column, ok, factor, weight_ptr, cos, sin,
    NORM: tl.constexpr, OFFSET: tl.constexpr, DIM: tl.constexpr,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, PER_PAIR: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The values ``column`` [c] of the heads at ``row`` [n, 1], normed and rotated: float32 [n, c]. ``ok`` [n, c]."""
    x = tl.load(row + column[None, :], mask=ok, other=0.0).to(tl.float32)
    if NORM:
        weight = tl.load(weight_ptr + column, mask=column < DIM, other=0.0).to(tl.float32) + OFFSET
        x = x * factor * weight[None, :]
    if SIZE > 0:
        turns = column < SIZE
        first = column % 2 == 0 if PAIRS else column < SIZE // 2
        distance: tl.constexpr = 1 if PAIRS else SIZE // 2
        other = tl.where(first, column + distance, column - distance)
        y = tl.load(row + other[None, :], mask=ok & turns[None, :], other=0.0).to(tl.float32)
        if NORM:
            weight = tl.load(weight_ptr + other, mask=turns, other=0.0).to(tl.float32) + OFFSET
            y = y * factor * weight[None, :]
        angle = column // 2 if PER_PAIR else column % WIDTH
        c = tl.load(cos + angle, mask=turns, other=1.0).to(tl.float32)
        s = tl.load(sin + angle, mask=turns, other=0.0).to(tl.float32)
        x = x * c[None, :] + y * tl.where(first, -s, s)[None, :]
    return x


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def rotate_write_kernel(
    qkv_ptr,  # [T, (H + Hkv) * D + Hkv * DV]
    q_ptr,  # [T, H, D], dense
    cos_ptr, sin_ptr,  # [T, WIDTH]
    q_weight_ptr, k_weight_ptr,  # [D]
    k_cache_ptr, v_cache_ptr, k_scales_ptr, v_scales_ptr, slots_ptr,  # as of write_kv_kernel
    k_scale, v_scale, q_eps, k_eps,
    qkv_stride, cos_stride, sin_stride, k_cache_stride, v_cache_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    HEADS_PAD: tl.constexpr, PAD: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,
    NORM: tl.constexpr, Q_OFFSET: tl.constexpr, K_OFFSET: tl.constexpr,
    SIZE: tl.constexpr, PAIRS: tl.constexpr, PER_PAIR: tl.constexpr, WIDTH: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One program norms and rotates some heads of one token: of Q, which it writes to ``q_ptr``, or of K, which it
    stores in the cache with the same heads of V."""
    wait_for_earlier(PDL)
    t = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    cos, sin = cos_ptr + t * cos_stride, sin_ptr + t * sin_stride
    token = qkv_ptr + t * qkv_stride
    Q_BLOCKS: tl.constexpr = (HEADS + HEADS_PAD - 1) // HEADS_PAD
    if block < Q_BLOCKS:
        head = block * HEADS_PAD + tl.arange(0, HEADS_PAD)
        column = tl.arange(0, PAD)
        ok = (head < HEADS)[:, None] & (column < D)[None, :]
        row = token + head[:, None] * D
        factor = head_factor(row, head < HEADS, q_eps, D, PAD) if NORM else 1.0
        x = rotate_heads(
            row, column, ok, factor, q_weight_ptr, cos, sin,
            NORM, Q_OFFSET, D, SIZE, PAIRS, PER_PAIR, WIDTH,
        )  # fmt: skip
        target = q_ptr + t * HEADS * D + head[:, None] * D + column[None, :]
        tl.store(target, x.to(q_ptr.dtype.element_ty), mask=ok)
    else:
        slot = tl.load(slots_ptr + t).to(tl.int64)
        if slot >= 0:  # else padding
            head = (block - Q_BLOCKS) * HEADS_PAD + tl.arange(0, HEADS_PAD)
            head_ok = head < KV_HEADS
            k_row = token + HEADS * D + head[:, None] * D
            v_row = token + (HEADS + KV_HEADS) * D + head[:, None] * DV
            factor = head_factor(k_row, head_ok, k_eps, D, PAD) if NORM else 1.0
            column = tl.arange(0, K_PAD)
            v_column = tl.arange(0, V_PAD)
            if KIND == "int4_per_token_head":
                HALF: tl.constexpr = (D + 1) // 2
                V_HALF: tl.constexpr = (DV + 1) // 2
                ok = head_ok[:, None] & (column < HALF)[None, :]
                high_ok = head_ok[:, None] & (column + HALF < D)[None, :]
                low = rotate_heads(
                    k_row, column, ok, factor, k_weight_ptr, cos, sin,
                    NORM, K_OFFSET, D, SIZE, PAIRS, PER_PAIR, WIDTH,
                )  # fmt: skip
                high = rotate_heads(
                    k_row, column + HALF, high_ok, factor, k_weight_ptr, cos, sin,
                    NORM, K_OFFSET, D, SIZE, PAIRS, PER_PAIR, WIDTH,
                )  # fmt: skip
                store_halves(
                    low.to(q_ptr.dtype.element_ty), tl.where(high_ok, high, 0.0).to(q_ptr.dtype.element_ty),
                    k_cache_ptr, slot, k_cache_stride, k_scales_ptr, head, head_ok, KV_HEADS, D, K_PAD,
                )  # fmt: skip
                low_v_ok = head_ok[:, None] & (v_column < V_HALF)[None, :]
                high_v_ok = head_ok[:, None] & (v_column + V_HALF < DV)[None, :]
                store_halves(
                    tl.load(v_row + v_column[None, :], mask=low_v_ok, other=0.0),
                    tl.load(v_row + V_HALF + v_column[None, :], mask=high_v_ok, other=0.0),
                    v_cache_ptr, slot, v_cache_stride, v_scales_ptr, head, head_ok, KV_HEADS, DV, V_PAD,
                )  # fmt: skip
            else:
                ok = head_ok[:, None] & (column < D)[None, :]
                x = rotate_heads(
                    k_row, column, ok, factor, k_weight_ptr, cos, sin,
                    NORM, K_OFFSET, D, SIZE, PAIRS, PER_PAIR, WIDTH,
                )  # fmt: skip
                store_side(
                    x.to(q_ptr.dtype.element_ty), k_cache_ptr, slot, k_cache_stride, k_scales_ptr, k_scale,
                    head, head_ok, KV_HEADS, D, K_PAD, KIND,
                )  # fmt: skip
                v_ok = head_ok[:, None] & (v_column < DV)[None, :]
                store_side(
                    tl.load(v_row + v_column[None, :], mask=v_ok, other=0.0), v_cache_ptr, slot, v_cache_stride,
                    v_scales_ptr, v_scale, head, head_ok, KV_HEADS, DV, V_PAD, KIND,
                )  # fmt: skip


@triton.jit
def act_mul_kernel(
    x_ptr, out_ptr, x_stride, SIZE: tl.constexpr, BLOCK: tl.constexpr, ACT: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """``x [T, 2 * SIZE]`` -> ``out [T, SIZE]``: act of the first half times the second."""
    wait_for_earlier(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < SIZE
    x = tl.load(x_ptr + row * x_stride + column, mask=ok, other=0.0).to(tl.float32)
    factor = tl.load(x_ptr + row * x_stride + SIZE + column, mask=ok, other=0.0).to(tl.float32)
    if ACT == "silu":
        x = x / (1 + tl.exp(-x))
    elif ACT == "gelu_tanh":  # x * (1 + tanh(u)) / 2, and 1 + tanh(u) = 2 / (1 + exp(-2u))
        x = x / (1 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif ACT == "gelu":
        x = 0.5 * x * (1 + tl.erf(0.7071067811865476 * x))
    else:
        x = tl.where(x < 0, 0.0, x)  # NaN stays
    tl.store(out_ptr + row * SIZE + column, (x * factor).to(out_ptr.dtype.element_ty), mask=ok)


def norm_constants(size: int, post: float | None, add: bool, norm: float | None) -> dict[str, Any]:
    """The compile-time arguments of ``add_norm_kernel`` with num_warps. ``post``, ``norm``: the offset of each norm,
    None where there is none.
    """
    block = next_power_of_two(size)
    return {
        "SIZE": size, "BLOCK": block, "POST_OFFSET": post or 0.0, "OFFSET": norm or 0.0,
        "POST": post is not None, "ADD": add, "NORM": norm is not None,
        "num_warps": 4 if block <= 2048 else 8 if block <= 8192 else 16,
    }  # fmt: skip


def rotate_constants(
    heads: Heads, rotation: Rotation, width: int, offsets: tuple[float, float] | None, kind: str
) -> dict[str, Any]:
    """The compile-time arguments of ``rotate_write_kernel`` with num_warps. ``width``: columns of cos and sin;
    ``offsets``: of the norms of Q and K, None where there are none.
    """
    pad = next_power_of_two(heads.dim)
    k_pad, v_pad = (
        next_power_of_two(cdiv(dim, 2) if kind == "int4_per_token_head" else dim)
        for dim in (heads.dim, heads.value_dim)
    )
    tile = next_power_of_two(max(heads.query, heads.kv))
    while tile > 1 and tile * max(pad, v_pad) > HEADS_TILE:
        tile //= 2
    q_offset, k_offset = offsets or (0.0, 0.0)
    return {
        "HEADS": heads.query, "KV_HEADS": heads.kv, "D": heads.dim, "DV": heads.value_dim,
        "HEADS_PAD": tile, "PAD": pad, "K_PAD": k_pad, "V_PAD": v_pad,
        "NORM": offsets is not None, "Q_OFFSET": q_offset, "K_OFFSET": k_offset,
        "SIZE": rotation.size, "PAIRS": rotation.pairs, "PER_PAIR": rotation.angle == "pair", "WIDTH": width,
        "KIND": kind, "num_warps": 4,
    }  # fmt: skip


def act_constants(size: int, activation: str) -> dict[str, Any]:
    """The compile-time arguments of ``act_mul_kernel`` with num_warps."""
    return {"SIZE": size, "BLOCK": min(ACT_BLOCK, next_power_of_two(size)), "ACT": activation, "num_warps": 4}


def add_norm(
    x: torch.Tensor, norm: Norm | None, residual: torch.Tensor | None = None, post: Norm | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [T, C]`` -> (sum, normed), ``[T, C]`` each.

    The sum is ``residual + post(x)``, or x where there is no residual; normed is ``norm(sum)``, or the sum where there
    is no norm. Either is a new tensor unless it is x itself.
    """
    x = dense_rows(x)
    total = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    out = total if norm is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    residual = x if residual is None else dense_rows(residual)
    first, last = post or norm, norm or post
    assert first is not None or total is not x, "there is nothing to do"
    constants = norm_constants(x.shape[1], post and post.offset, total is not x, norm and norm.offset)
    if len(x):
        weights = [x if one is None else one.weight for one in (first, last)]
        eps = [0.0 if one is None else one.eps for one in (first, last)]
        add_norm_kernel[(len(x),)](
            x, residual, total, out, *weights, *eps, x.stride(0), residual.stride(0), **constants,
            **dependent_launch(x.device),
        )  # fmt: skip
    return total, out


def rotate_and_write(
    qkv: torch.Tensor,
    angles: tuple[torch.Tensor, torch.Tensor],
    heads: Heads,
    rotation: Rotation,
    norms: tuple[Norm, Norm] | None,
    k_cache: KVCache,
    v_cache: KVCache,
    slots: torch.Tensor,
) -> torch.Tensor:
    """Norm and rotate Q and K of ``qkv [T, Q | K | V]``; store K and V at ``slots``.

    Returns Q ``[T, H, D]``. ``slots [T]``: a slot < 0 stores nothing. ``angles``: cos and sin ``[T, width]``.
    ``norms``: of each head of Q and of K.
    """
    cos, sin = (dense_rows(x) for x in angles)
    k_side, v_side = side_of(k_cache), side_of(v_cache)
    offsets = None if norms is None else (norms[0].offset, norms[1].offset)
    constants = rotate_constants(heads, rotation, cos.shape[1], offsets, kind_of(k_cache))
    q = qkv.new_empty(len(qkv), heads.query, heads.dim)
    q_norm, k_norm = norms or (Norm(qkv, 0.0, 0.0),) * 2
    blocks = cdiv(heads.query, constants["HEADS_PAD"]) + cdiv(heads.kv, constants["HEADS_PAD"])
    if len(qkv):
        rotate_write_kernel[(len(qkv), blocks)](
            qkv, q, cos, sin, q_norm.weight, k_norm.weight,
            k_side.rows, v_side.rows, k_side.scales, v_side.scales, slots,
            k_side.scale, v_side.scale, q_norm.eps, k_norm.eps,
            qkv.stride(0), cos.stride(0), sin.stride(0), k_side.rows.stride(0), v_side.rows.stride(0), **constants,
            **dependent_launch(qkv.device),
        )  # fmt: skip
    return q


def act_mul(x: torch.Tensor, activation: str) -> torch.Tensor:
    """``x [T, 2 * I]`` -> ``activation(x[:, :I]) * x[:, I:]``."""
    size = x.shape[1] // 2
    out = x.new_empty(len(x), size)
    if len(x):
        constants = act_constants(size, activation) | dependent_launch(x.device)
        act_mul_kernel[(len(x), cdiv(size, constants["BLOCK"]))](x, out, x.stride(0), **constants)
    return out
