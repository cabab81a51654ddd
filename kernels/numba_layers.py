"""RMSNorm and rotary position embedding in Numba, of float32 or bfloat16 (KIND_FLOAT, KIND_BF16), computed in float32.

RMSNorm: two passes over a row that is in the L1 cache, where torch makes six over the whole tensor. Rotation: in place,
``x * cos + rotate_half(x) * sin`` on the first heads of each row.
"""

from __future__ import annotations

from functools import cache

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.numba_codes import load_values, row_code_bytes, store_values
from kernels.numba_memory import F32, I64, JIT, call_get_int, call_parallel, load_f32, load_i64
from kernels.numba_vectors import LANES, call, constant, fma, splat, sum_of

(
    N_X, N_WEIGHT, N_OUT, N_EPS, N_ROWS, N_DIM, N_STRIDE,
    N_THREADS, N_PARALLEL, N_THREAD_NUM, N_NUM_THREADS, N_WORKER,
    NUM_NORM_ARGS,
) = range(13)  # fmt: skip
# The stride in bytes.


@intrinsic(prefer_literal=True)
def norm_row(typingctx, x, weight, out, dim, eps, kind):
    """``out = x / sqrt(mean(x**2) + eps) * weight`` over ``dim`` values of ``kind``, a multiple of LANES."""
    k = kind.literal_value
    step = ir.Constant(I64, row_code_bytes(k, LANES))

    def codegen(context, builder, signature, args):
        x_at, w_at, out_at, count, floor = args[:5]
        blocks = builder.sdiv(count, ir.Constant(I64, LANES))
        total = cgutils.alloca_once_value(builder, constant(LANES, 0.0))
        with cgutils.for_range(builder, blocks) as loop:
            value = _load(builder, builder.add(x_at, builder.mul(loop.index, step)), k)
            builder.store(fma(builder, value, value, builder.load(total)), total)
        mean = builder.fdiv(sum_of(builder, builder.load(total)), builder.sitofp(count, F32))
        root = call(builder, "llvm.sqrt.f32", F32, [builder.fadd(mean, floor)])
        factor = splat(builder, builder.fdiv(ir.Constant(F32, 1.0), root), LANES)
        with cgutils.for_range(builder, blocks) as loop:
            offset = builder.mul(loop.index, step)
            value = builder.fmul(_load(builder, builder.add(x_at, offset), k), factor)
            scaled = builder.fmul(value, _load(builder, builder.add(w_at, offset), k))
            store_values(builder, scaled, builder.add(out_at, offset), 0, k)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4, types.float32, kind), codegen


def _load(builder: ir.IRBuilder, address: ir.Value, kind: int) -> ir.Value:
    return load_values(builder, address, LANES, 0, LANES, kind)


@cache
def build_norm(kind: int):
    """The RMSNorm worker for rows and weights of ``kind`` as a Numba cfunc: its thread's share of the rows."""
    size = row_code_bytes(kind, 1)

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * N_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * N_NUM_THREADS))
        rows, dim = load_i64(args + 8 * N_ROWS), load_i64(args + 8 * N_DIM)
        weight, eps = load_i64(args + 8 * N_WEIGHT), load_f32(load_i64(args + 8 * N_EPS))
        for row in range(rows * thread // threads, rows * (thread + 1) // threads):
            x = load_i64(args + 8 * N_X) + row * load_i64(args + 8 * N_STRIDE)
            norm_row(x, weight, load_i64(args + 8 * N_OUT) + size * row * dim, dim, eps, kind)

    return numba.cfunc(types.void(types.intp), **JIT)(worker)


@numba.cfunc(types.void(types.intp), **JIT)
def run_norm(args):
    """RMSNorm of every row, on as many threads as are asked for."""
    call_parallel(load_i64(args + 8 * N_PARALLEL), load_i64(args + 8 * N_WORKER), args, load_i64(args + 8 * N_THREADS))


(
    R_X, R_COS, R_SIN, R_TOKENS, R_HEADS, R_HALF, R_X_STRIDE, R_HEAD_STRIDE, R_COS_STRIDE,
    R_THREADS, R_PARALLEL, R_THREAD_NUM, R_NUM_THREADS, R_WORKER,
    NUM_ROPE_ARGS,
) = range(15)  # fmt: skip
# Strides in bytes. R_HALF: values in half of the rotated part of a head, a multiple of LANES.


@intrinsic(prefer_literal=True)
def rotate_head(typingctx, x, cos, sin, half, kind):
    """``x[:half], x[half:2 half]`` rotated by ``cos`` and ``sin``, ``[2 half]`` each, as transformers lays them out."""
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
def build_rope(kind: int):
    """The worker that rotates R_HEADS heads of its thread's share of the rows, all of ``kind``, as a Numba cfunc."""

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * R_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * R_NUM_THREADS))
        tokens, heads, half = load_i64(args + 8 * R_TOKENS), load_i64(args + 8 * R_HEADS), load_i64(args + 8 * R_HALF)
        head_stride = load_i64(args + 8 * R_HEAD_STRIDE)
        for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
            x = load_i64(args + 8 * R_X) + token * load_i64(args + 8 * R_X_STRIDE)
            at = token * load_i64(args + 8 * R_COS_STRIDE)
            cos, sin = load_i64(args + 8 * R_COS) + at, load_i64(args + 8 * R_SIN) + at
            for head in range(heads):
                rotate_head(x + head * head_stride, cos, sin, half, kind)

    return numba.cfunc(types.void(types.intp), **JIT)(worker)


@numba.cfunc(types.void(types.intp), **JIT)
def run_rope(args):
    """Rotate R_HEADS heads of each of R_TOKENS rows, on as many threads as are asked for."""
    call_parallel(load_i64(args + 8 * R_PARALLEL), load_i64(args + 8 * R_WORKER), args, load_i64(args + 8 * R_THREADS))
