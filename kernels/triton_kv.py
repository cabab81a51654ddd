"""KV write in Triton: one program stores some heads of one token, K and V, in the cache's format.

The codes are those of ``quantized.QuantizedKV.store``, bit for bit, on every chip: division as IEEE has it,
ties to even, and fp8 made by integer arithmetic, because conversions in hardware differ in what they do with NaN.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from kvbench_kernels.dependent_launch import wait_for_earlier
from kvbench_kernels.launch import cdiv, next_power_of_two

MAX_TILE = 4096  # values of one side that a program holds


@triton.jit
def fp8_bits(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """float32 within the format's range, or NaN -> its byte with MANTISSA bits of mantissa, ties to even."""
    bits = y.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    # Normal: add half a step less one, and one more if the kept part is odd, then cut off and change the bias.
    odd = (size >> (23 - MANTISSA)) & 1
    normal = ((size + (1 << (22 - MANTISSA)) - 1 + odd) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    # Subnormal: added to a number whose last bit weighs one step, the sum's last bits are the code.
    EXPONENT: tl.constexpr = 24 - BIAS - MANTISSA
    anchor = tl.full([1, 1], (127 + EXPONENT) << 23, tl.int32)
    near = tl.abs(y) + anchor.to(tl.float32, bitcast=True)
    code = tl.where(size < ((128 - BIAS) << 23), near.to(tl.int32, bitcast=True) - anchor, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)  # NaN
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def row_scale(size, MAX_CODE: tl.constexpr):
    """Largest of ``size`` [heads, n], absolute values, / MAX_CODE: 0 where it is too small, NaN where not finite."""
    is_nan = tl.max((size != size).to(tl.int32), 1) > 0
    largest = tl.max(tl.where(size == size, size, 0.0), 1)
    scale = tl.div_rn(largest, tl.full(largest.shape, MAX_CODE, tl.float32))
    scale = tl.where(scale < 1.1754943508222875e-38, 0.0, scale)
    return tl.where(is_nan | (scale == float("inf")), float("nan"), scale)


@triton.jit
def integer_codes(x, scale, MAX_CODE: tl.constexpr):
    """Computes x [heads, n] / scale [heads], rounded to even; 0 in rows whose scale is 0 or NaN."""
    usable = scale > 0
    y = tl.div_rn(x, tl.broadcast_to(tl.where(usable, scale, 1.0)[:, None], x.shape))
    y = tl.where(usable[:, None], y, 0.0)
    y = (y + 12582912.0) - 12582912.0  # 1.5 * 2**23: float32 has no bits left for a fraction there
    return tl.minimum(tl.maximum(y, -MAX_CODE), MAX_CODE).to(tl.int8)


@triton.jit
def store_halves(
    low, high, cache, slot, cache_stride, scales, head, head_ok,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr,
):  # fmt: skip
    """Store int4 codes of the heads ``head`` [n] at ``slot``, two values a byte.

    Byte i holds value i, from ``low`` [n, PAD], and value i + ceil(DIM / 2), from ``high`` [n, PAD]; 0 beyond DIM.
    """
    HALF: tl.constexpr = (DIM + 1) // 2
    i = tl.arange(0, PAD)
    low, high = low.to(tl.float32), high.to(tl.float32)
    # Not maximum(): it may drop a NaN.
    scale = row_scale(tl.join(tl.abs(low), tl.abs(high)).reshape(low.shape[0], 2 * PAD), 7.0)
    codes = (integer_codes(low, scale, 7.0) & 15) | (integer_codes(high, scale, 7.0) << 4)
    target = cache + slot * cache_stride + head[:, None] * HALF + i[None, :]
    tl.store(target, codes.to(tl.uint8), mask=head_ok[:, None] & (i < HALF)[None, :])
    tl.store(scales + slot * KV_HEADS + head, scale, mask=head_ok)


@triton.jit
def store_side(
    x, cache, slot, cache_stride, scales, divisor, head, head_ok,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store the values x [n, PAD] of the heads ``head`` [n] at ``slot``, in any format but int4."""
    i = tl.arange(0, PAD)
    ok = head_ok[:, None] & (i < DIM)[None, :]
    target = cache + slot * cache_stride + head[:, None] * DIM + i[None, :]
    if KIND == "int8_per_token_head":
        x = x.to(tl.float32)
        scale = row_scale(tl.abs(x), 127.0)
        tl.store(target, integer_codes(x, scale, 127.0), mask=ok)
        tl.store(scales + slot * KV_HEADS + head, scale, mask=head_ok)
    elif KIND == "auto":
        tl.store(target, x.to(cache.dtype.element_ty), mask=ok)
    else:
        MAX: tl.constexpr = 448.0 if KIND == "fp8_e4m3" else 57344.0
        y = tl.div_rn(x.to(tl.float32), tl.zeros(x.shape, tl.float32) + divisor)
        y = tl.where(y > MAX, MAX, tl.where(y < -MAX, -MAX, y))  # NaN stays
        codes = fp8_bits(y, 3, 7) if KIND == "fp8_e4m3" else fp8_bits(y, 2, 15)
        tl.store(target, codes, mask=ok)


@triton.jit
def write_side(
    row, head_stride, cache, slot, cache_stride, scales, divisor, head, head_ok,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAD: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Store the heads ``head`` [n] of one token's K or V at ``slot``."""
    i = tl.arange(0, PAD)
    source = row + head[:, None].to(tl.int64) * head_stride + i[None, :]
    if KIND == "int4_per_token_head":
        HALF: tl.constexpr = (DIM + 1) // 2
        ok = head_ok[:, None] & (i < HALF)[None, :]
        low = tl.load(source, mask=ok, other=0.0)
        high = tl.load(source + HALF, mask=ok & (i + HALF < DIM)[None, :], other=0.0)
        store_halves(low, high, cache, slot, cache_stride, scales, head, head_ok, KV_HEADS, DIM, PAD)
    else:
        x = tl.load(source, mask=head_ok[:, None] & (i < DIM)[None, :], other=0.0)
        store_side(x, cache, slot, cache_stride, scales, divisor, head, head_ok, KV_HEADS, DIM, PAD, KIND)


@triton.jit(do_not_specialize_on_alignment=["slots_ptr"])
def write_kv_kernel(
    k_ptr, v_ptr,  # [T, Hkv, D] and [T, Hkv, Dv], strides of tokens and heads free
    k_cache_ptr, v_cache_ptr,  # [slots, Hkv, D] and [slots, Hkv, Dv], or the codes of a quantised cache
    k_scales_ptr, v_scales_ptr,  # float32 [slots, Hkv], written if KIND has a scale per token and head
    slots_ptr,  # [T] int64
    k_scale, v_scale,  # of an fp8 cache
    k_token_stride, k_head_stride, v_token_stride, v_head_stride, k_cache_stride, v_cache_stride,
    KV_HEADS: tl.constexpr, HEADS_PAD: tl.constexpr,  # heads a program stores
    D: tl.constexpr, DV: tl.constexpr, K_PAD: tl.constexpr, V_PAD: tl.constexpr,  # values, int4: bytes, padded
    KIND: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_earlier(PDL)
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + t).to(tl.int64)
    if slot < 0:  # padding
        return
    head = tl.program_id(1) * HEADS_PAD + tl.arange(0, HEADS_PAD)
    head_ok = head < KV_HEADS
    write_side(
        k_ptr + t * k_token_stride, k_head_stride, k_cache_ptr, slot, k_cache_stride, k_scales_ptr, k_scale,
        head, head_ok, KV_HEADS, D, K_PAD, KIND,
    )  # fmt: skip
    if DV == 0:  # V is a part of K
        return
    write_side(
        v_ptr + t * v_token_stride, v_head_stride, v_cache_ptr, slot, v_cache_stride, v_scales_ptr, v_scale,
        head, head_ok, KV_HEADS, DV, V_PAD, KIND,
    )  # fmt: skip


def write_constants(kv_heads: int, dim: int, v_dim: int, kind: str) -> dict[str, Any]:
    """The compile-time arguments of ``write_kv_kernel`` with num_warps."""
    values = (cdiv(d, 2) if kind == "int4_per_token_head" else d for d in (dim, v_dim))
    k_pad, v_pad = (next_power_of_two(max(1, d)) for d in values)
    heads = next_power_of_two(kv_heads)
    while heads > 1 and heads * max(k_pad, v_pad) > MAX_TILE:
        heads //= 2
    return {
        "KV_HEADS": kv_heads, "HEADS_PAD": heads, "D": dim, "DV": v_dim, "K_PAD": k_pad, "V_PAD": v_pad,
        "KIND": kind, "num_warps": 4,
    }  # fmt: skip
