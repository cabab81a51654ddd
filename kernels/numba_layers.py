"""RMSNorm with the residual sum before it, and rotary embedding with the KV write, in Numba.

Values are float32 or bfloat16 (KIND_FLOAT, KIND_BF16), arithmetic is float32. A row passes through the L1 cache once,
where torch makes six passes over the whole tensor.
"""

from __future__ import annotations

from functools import cache

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_codes import load_values, row_code_bytes, store_values
from kvbench_kernels.numba_memory import (
    F32,
    I64,
    call_get_int,
    call_parallel,
    compile_c,
    copy_bytes,
    load_f32,
    load_i64,
)
from kvbench_kernels.numba_vectors import LANES, call, constant, fma, splat, sum_of

SCALED, ADDED, BOTH = 1, 2, 3  # bits: times factor and weights; plus the residual

(
    N_X, N_RESIDUAL, N_SUM, N_OUT, N_POST_WEIGHT, N_WEIGHT, N_POST_EPS, N_POST_OFFSET, N_EPS, N_OFFSET,
    N_ROWS, N_DIM, N_STRIDE, N_RESIDUAL_STRIDE,
    N_THREADS, N_PARALLEL, N_THREAD_NUM, N_NUM_THREADS, N_WORKER,
    NUM_NORM_ARGS,
) = range(20)  # fmt: skip
# Strides in bytes; EPS and OFFSET are float32. No residual, post weight or weight: 0.


@intrinsic(prefer_literal=True)
def row_factor(typingctx, x, dim, eps, kind):
    """Compute ``1 / sqrt(mean(x**2) + eps)`` of ``dim`` values of ``kind``, a multiple of LANES."""
    k = kind.literal_value
    step = ir.Constant(I64, row_code_bytes(k, LANES))

    def codegen(context, builder, signature, args):
        x_at, count, floor = args[:3]
        total = cgutils.alloca_once_value(builder, constant(LANES, 0.0))
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(I64, LANES))) as loop:
            value = _load(builder, builder.add(x_at, builder.mul(loop.index, step)), k)
            builder.store(fma(builder, value, value, builder.load(total)), total)
        mean = builder.fdiv(sum_of(builder, builder.load(total)), builder.sitofp(count, F32))
        root = call(builder, "llvm.sqrt.f32", F32, [builder.fadd(mean, floor)])
        return builder.fdiv(ir.Constant(F32, 1.0), root)

    return types.float32(types.intp, types.intp, types.float32, kind), codegen


@intrinsic(prefer_literal=True)
def combine_row(typingctx, x, factor, weight, offset, residual, out, dim, what, kind):
    """Set ``out = x * factor * (weight + offset) + residual`` over ``dim`` values of ``kind``, a multiple of LANES.

    ``what`` (SCALED, ADDED or BOTH, a constant): the part of it that is done. ``out`` may be ``x``.
    """
    flags, k = what.literal_value, kind.literal_value
    step = ir.Constant(I64, row_code_bytes(k, LANES))

    def codegen(context, builder, signature, args):
        x_at, scale, w_at, shift, residual_at, out_at, count = args[:7]
        factors, shifts = splat(builder, scale, LANES), splat(builder, shift, LANES)
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(I64, LANES))) as loop:
            along = builder.mul(loop.index, step)
            value = _load(builder, builder.add(x_at, along), k)
            if flags & SCALED:
                weights = builder.fadd(_load(builder, builder.add(w_at, along), k), shifts)
                value = builder.fmul(builder.fmul(value, factors), weights)
            if flags & ADDED:
                value = builder.fadd(value, _load(builder, builder.add(residual_at, along), k))
            store_values(builder, value, builder.add(out_at, along), 0, k)
        return context.get_dummy_value()

    floats, at = types.float32, types.intp
    return types.void(at, floats, at, floats, at, at, at, what, kind), codegen


def _load(builder: ir.IRBuilder, address: ir.Value, kind: int) -> ir.Value:
    return load_values(builder, address, LANES, 0, LANES, kind)


@cache
def build_add_norm(kind: int):
    """Compile the worker for rows and weights of ``kind`` as a Numba cfunc: its thread's share of the rows.

    Sum: the residual plus x, which is normed first where there is a post weight. Out: the norm of the sum, or of x.
    """
    size = row_code_bytes(kind, 1)

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * N_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * N_NUM_THREADS))
        rows, dim = load_i64(args + 8 * N_ROWS), load_i64(args + 8 * N_DIM)
        post_weight, weight = load_i64(args + 8 * N_POST_WEIGHT), load_i64(args + 8 * N_WEIGHT)
        post_eps, post_offset = load_f32(args + 8 * N_POST_EPS), load_f32(args + 8 * N_POST_OFFSET)
        eps, offset = load_f32(args + 8 * N_EPS), load_f32(args + 8 * N_OFFSET)
        one = numba.float32(1.0)
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            x = load_i64(args + 8 * N_X) + row * load_i64(args + 8 * N_STRIDE)
            if load_i64(args + 8 * N_RESIDUAL):
                residual = load_i64(args + 8 * N_RESIDUAL) + row * load_i64(args + 8 * N_RESIDUAL_STRIDE)
                total = load_i64(args + 8 * N_SUM) + size * row * dim
                if post_weight:
                    factor = row_factor(x, dim, post_eps, kind)
                    combine_row(x, factor, post_weight, post_offset, residual, total, dim, BOTH, kind)
                else:
                    combine_row(x, one, x, one, residual, total, dim, ADDED, kind)
                x = total
            if weight:
                out = load_i64(args + 8 * N_OUT) + size * row * dim
                combine_row(x, row_factor(x, dim, eps, kind), weight, offset, x, out, dim, SCALED, kind)

    return compile_c(worker)


@compile_c
def run_add_norm(args):
    """Compute every row, on as many threads as are asked for."""
    call_parallel(load_i64(args + 8 * N_PARALLEL), load_i64(args + 8 * N_WORKER), args, load_i64(args + 8 * N_THREADS))


(
    R_X, R_COS, R_SIN, R_SLOTS, R_K_CACHE, R_V_CACHE, R_Q_WEIGHT, R_K_WEIGHT,
    R_Q_EPS, R_Q_OFFSET, R_K_EPS, R_K_OFFSET,
    R_TOKENS, R_HEADS, R_KV_HEADS, R_DIM, R_V_DIM, R_HALF, R_X_STRIDE, R_COS_STRIDE, R_K_STRIDE, R_V_STRIDE,
    R_THREADS, R_PARALLEL, R_THREAD_NUM, R_NUM_THREADS, R_WORKER,
    NUM_ROTATE_ARGS,
) = range(28)  # fmt: skip
# Strides in bytes; EPS and OFFSET are float32. No norm or no slots: 0. R_HALF: values in half of the rotated part of a
# head, a multiple of LANES.


@intrinsic(prefer_literal=True)
def rotate_head(typingctx, x, cos, sin, half, kind):
    """Rotate ``x[:half], x[half:2 half]`` by ``cos`` and ``sin``, ``[2 half]`` each, as transformers lays them out."""
    k = kind.literal_value
    size, step = (ir.Constant(I64, row_code_bytes(k, count)) for count in (1, LANES))

    def codegen(context, builder, signature, args):
        x_at, cos_at, sin_at, count = args[:4]
        across = builder.mul(count, size)
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(I64, LANES))) as loop:
            low = builder.mul(loop.index, step)
            high = builder.add(low, across)
            places = [(builder.add(base, offset)) for base in (x_at, cos_at, sin_at) for offset in (low, high)]
            a, b, cos_a, cos_b, sin_a, sin_b = (_load(builder, place, k) for place in places)
            turned = fma(builder, a, cos_a, builder.fneg(builder.fmul(b, sin_a)))
            store_values(builder, turned, places[0], 0, k)
            store_values(builder, fma(builder, b, cos_b, builder.fmul(a, sin_b)), places[1], 0, k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, kind), codegen


@cache
def build_rotate_write(kind: int):
    """Compile the worker for rows ``[Q heads | K heads | V heads]`` of ``kind`` as a Numba cfunc.

    It does its thread's share of the rows. Heads of Q and K are normed and rotated in place, then K and V are copied to
    the token's slot; slot < 0 is skipped.
    """
    size = row_code_bytes(kind, 1)

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * R_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * R_NUM_THREADS))
        tokens, half, dim = load_i64(args + 8 * R_TOKENS), load_i64(args + 8 * R_HALF), load_i64(args + 8 * R_DIM)
        heads, kv_heads = load_i64(args + 8 * R_HEADS), load_i64(args + 8 * R_KV_HEADS)
        k_bytes, v_bytes = size * kv_heads * dim, size * kv_heads * load_i64(args + 8 * R_V_DIM)
        slots = load_i64(args + 8 * R_SLOTS)
        for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
            x = load_i64(args + 8 * R_X) + token * load_i64(args + 8 * R_X_STRIDE)
            turn = token * load_i64(args + 8 * R_COS_STRIDE)
            cos, sin = load_i64(args + 8 * R_COS) + turn, load_i64(args + 8 * R_SIN) + turn
            for head in range(heads + kv_heads):
                at, side = x + size * head * dim, 0 if head < heads else 1
                weight = load_i64(args + 8 * (R_Q_WEIGHT + side))
                if weight:
                    eps = load_f32(args + 8 * (R_Q_EPS + 2 * side))
                    offset = load_f32(args + 8 * (R_Q_OFFSET + 2 * side))
                    factor = row_factor(at, dim, eps, kind)
                    combine_row(at, factor, weight, offset, at, at, dim, SCALED, kind)
                rotate_head(at, cos, sin, half, kind)
            slot = load_i64(slots + 8 * token) if slots else -1
            if slot >= 0:
                k = x + size * heads * dim
                copy_bytes(load_i64(args + 8 * R_K_CACHE) + slot * load_i64(args + 8 * R_K_STRIDE), k, k_bytes)
                v_target = load_i64(args + 8 * R_V_CACHE) + slot * load_i64(args + 8 * R_V_STRIDE)
                copy_bytes(v_target, k + k_bytes, v_bytes)

    return compile_c(worker)


@compile_c
def run_rotate_write(args):
    """Compute every token, on as many threads as are asked for."""
    call_parallel(load_i64(args + 8 * R_PARALLEL), load_i64(args + 8 * R_WORKER), args, load_i64(args + 8 * R_THREADS))
