"""Rotary position embedding in Numba, in place: ``x * cos + rotate_half(x) * sin`` on the first heads of each row."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.numba_memory import I64, JIT, call_get_int, call_parallel, load_i64
from kernels.numba_vectors import LANES, fma, load, store

(
    R_X, R_COS, R_SIN, R_TOKENS, R_HEADS, R_HALF, R_X_STRIDE, R_HEAD_STRIDE, R_COS_STRIDE,
    R_THREADS, R_PARALLEL, R_THREAD_NUM, R_NUM_THREADS, R_WORKER,
    NUM_ROPE_ARGS,
) = range(15)  # fmt: skip
# Strides in bytes. R_HALF: values in half of the rotated part of a head, a multiple of LANES.


@intrinsic
def rotate_head(typingctx, x, cos, sin, half):
    """``x[:half], x[half:2 half]`` rotated by ``cos`` and ``sin``, ``[2 half]`` each, as transformers lays them out."""

    def codegen(context, builder, signature, args):
        x_at, cos_at, sin_at, count = args
        across = builder.shl(count, ir.Constant(I64, 2))
        with cgutils.for_range(builder, builder.sdiv(count, ir.Constant(I64, LANES))) as loop:
            low = builder.shl(loop.index, ir.Constant(I64, 6))
            high = builder.add(low, across)
            places = [(builder.add(base, offset)) for base in (x_at, cos_at, sin_at) for offset in (low, high)]
            a, b, cos_a, cos_b, sin_a, sin_b = (load(builder, place, 0, LANES) for place in places)
            store(builder, fma(builder, a, cos_a, builder.fneg(builder.fmul(b, sin_a))), places[0], 0)
            store(builder, fma(builder, b, cos_b, builder.fmul(a, sin_b)), places[1], 0)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen


@numba.cfunc(types.void(types.intp), **JIT)
def rope_worker(args):
    """Rotate R_HEADS heads of this thread's share of the rows."""
    thread = call_get_int(load_i64(args + 8 * R_THREAD_NUM))
    threads = call_get_int(load_i64(args + 8 * R_NUM_THREADS))
    tokens, heads, half = load_i64(args + 8 * R_TOKENS), load_i64(args + 8 * R_HEADS), load_i64(args + 8 * R_HALF)
    head_stride = load_i64(args + 8 * R_HEAD_STRIDE)
    for token in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        x = load_i64(args + 8 * R_X) + token * load_i64(args + 8 * R_X_STRIDE)
        at = token * load_i64(args + 8 * R_COS_STRIDE)
        for head in range(heads):
            rotate_head(x + head * head_stride, load_i64(args + 8 * R_COS) + at, load_i64(args + 8 * R_SIN) + at, half)


@numba.cfunc(types.void(types.intp), **JIT)
def run_rope(args):
    """Rotate R_HEADS heads of each of R_TOKENS rows, on as many threads as are asked for."""
    call_parallel(load_i64(args + 8 * R_PARALLEL), load_i64(args + 8 * R_WORKER), args, load_i64(args + 8 * R_THREADS))
