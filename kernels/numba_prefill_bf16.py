"""Prefill attention in bfloat16 on a CPU that multiplies it: numba_prefill.py with the products of numba_bf16.py.

K and V are packed as numba_amx.py has weights, in panels of PANEL tokens: K's pairs are neighbours along D, so a tile
of K is 16 rows of 16 pairs, transposed; V's pairs are neighbouring tokens, so a tile of V is 16 times two rows,
interleaved.
Scores, softmax and sums are float32; the weights of the softmax are rounded to bfloat16 for the product with V.
"""

from __future__ import annotations

from functools import cache

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from kvbench_kernels.numba_amx import STEP_BYTES, TILE_BYTES, configure_tiles, release_tiles
from kvbench_kernels.numba_bf16 import ROW_BLOCK, has_bf16, multiply_rows
from kvbench_kernels.numba_codes import KIND_BF16, KIND_FLOAT
from kvbench_kernels.numba_memory import (
    I16,
    I32,
    JIT,
    call_get_int,
    compile_c,
    fill_bytes,
    load_f32,
    load_i64,
    pointer,
    stack_bytes,
    store_f32,
    store_i64,
)  # fmt: skip
from kvbench_kernels.numba_prefill import (
    NO_SCORE,
    P_DIM,
    P_FLOATS,
    P_HEADS,
    P_KEYS,
    P_KV_HEADS,
    P_NUM_THREADS,
    P_OUT,
    P_OUT_STRIDE,
    P_PACKED,
    P_Q,
    P_Q_HEAD_STRIDE,
    P_Q_STRIDE,
    P_QUERIES,
    P_THREAD_NUM,
    P_V_DIM,
    P_WINDOW,
    P_WORK,
    P_WORK_STRIDE,
    find_rows,
    finish_row,
    weigh,
)  # fmt: skip
from kvbench_kernels.numba_simd import scale_values, transpose_tile
from kvbench_kernels.numba_vectors import LANES

PANEL = 64  # tokens; numba_gemm.PANEL of a CPU with AVX-512, which ``weigh`` goes by


@intrinsic
def interleave_rows(typingctx, first, second, target):
    """Interleave ``first [16]`` and ``second [16]`` in ``target [16, 2]`` of 16-bit values."""

    def codegen(context, builder, signature, args):
        half = ir.VectorType(I16, LANES)
        a, b = (builder.load(pointer(builder, at, half), align=2) for at in args[:2])
        picks = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
        pairs = builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(I32, 2 * LANES), picks))
        builder.store(pairs, pointer(builder, args[2], pairs.type), align=2)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), codegen


@numba.njit(**JIT)
def _pack_panel(k_rows: int, v_rows: int, count: int, dim: int, v_dim: int, k_at: int) -> None:
    """Pack one panel of one KV head: K ``[2, dim / 32, 2 tiles]``, then V.

    V is ``[v_dim / 32, 2, 2 tiles]``. Beyond the last token K is the last token's, whose scores no query sees, and V is
    0.
    """
    for j in range(count, PANEL):
        store_i64(k_rows + 8 * j, load_i64(k_rows + 8 * (count - 1)))
    for j in range(0, PANEL, LANES):
        column = k_at + j // 32 * (dim // 32) * STEP_BYTES + j % 32 // LANES * TILE_BYTES
        for step in range(dim // 32):
            transpose_tile(k_rows + 8 * j, 64 * step, column + step * STEP_BYTES, 64)
    v_at = k_at + 2 * PANEL * dim
    for column in range(0, v_dim, LANES):
        tile = v_at + column // 32 * 2 * STEP_BYTES + column % 32 // LANES * TILE_BYTES
        for j in range(0, PANEL, 2):
            target = tile + j // 32 * STEP_BYTES + j % 32 // 2 * 64
            if j + 1 < count:
                interleave_rows(
                    load_i64(v_rows + 8 * j) + 2 * column, load_i64(v_rows + 8 * j + 8) + 2 * column, target
                )
            elif j < count:
                zeros = stack_bytes(64)
                fill_bytes(zeros, 0, 64)
                interleave_rows(load_i64(v_rows + 8 * j) + 2 * column, zeros, target)
            else:
                fill_bytes(target, 0, 64)


@numba.njit(**JIT)
def _attend(args: int, head: int, first: int, count: int, work: int) -> None:
    """Compute one item: queries first..first+count-1 of a head."""
    dim, width = load_i64(args + 8 * P_DIM), load_i64(args + 8 * P_V_DIM)
    keys, window = load_i64(args + 8 * P_KEYS), load_i64(args + 8 * P_WINDOW)
    scale, cap = load_f32(load_i64(args + 8 * P_FLOATS)), load_f32(load_i64(args + 8 * P_FLOATS) + 4)
    scores, weights = work, work + 4 * ROW_BLOCK * PANEL
    acc = weights + 2 * ROW_BLOCK * PANEL
    tops = acc + 4 * ROW_BLOCK * width
    totals = tops + 4 * ROW_BLOCK
    fill_bytes(acc, 0, 4 * ROW_BLOCK * width)
    for r in range(count):
        store_f32(tops + 4 * r, numba.float32(NO_SCORE))
        store_f32(totals + 4 * r, numba.float32(0.0))
    q_step = load_i64(args + 8 * P_Q_STRIDE)
    q = load_i64(args + 8 * P_Q) + first * q_step + head * load_i64(args + 8 * P_Q_HEAD_STRIDE)
    kv_head = head // (load_i64(args + 8 * P_HEADS) // load_i64(args + 8 * P_KV_HEADS))
    place = keys - load_i64(args + 8 * P_QUERIES) + first  # the first query's own token
    panels, size = (keys + PANEL - 1) // PANEL, 2 * PANEL * (dim + width)
    for panel in range(max(0, place + 1 - window) // PANEL, (place + count - 1) // PANEL + 1):
        k = load_i64(args + 8 * P_PACKED) + (kv_head * panels + panel) * size
        v = k + 2 * PANEL * dim
        for side in range(2):
            w = k + side * (dim // 32) * STEP_BYTES
            multiply_rows(q, q_step, w, dim // 32, 0, scores + 128 * side, 4 * PANEL, count, 0)
        for r in range(count):
            s, high = scores + 4 * PANEL * r, place + r + 1 - panel * PANEL
            if high - window < PANEL and high > 0:
                scale_values(s, s, scale, PANEL, KIND_FLOAT, KIND_FLOAT)
                weigh(s, tops + 4 * r, totals + 4 * r, acc + 4 * width * r, width, high - window, high, cap)
            else:
                fill_bytes(s, 0, 4 * PANEL)  # sees nothing of this panel
            scale_values(s, weights + 2 * PANEL * r, numba.float32(1.0), PANEL, KIND_FLOAT, KIND_BF16)
        for column in range(0, width, 32):
            w = v + column // 32 * 2 * STEP_BYTES
            multiply_rows(weights, 2 * PANEL, w, 2, 0, acc + 4 * column, 4 * width, count, 1)
    for r in range(count):
        out = load_i64(args + 8 * P_OUT) + (first + r) * load_i64(args + 8 * P_OUT_STRIDE)
        out += 2 * head * width
        top, total = load_f32(tops + 4 * r), load_f32(totals + 4 * r)
        finish_row(args, head, out, acc + 4 * width * r, top, total, KIND_BF16)


@cache
def build_workers():
    """Compile the workers that pack and that attend, as Numba cfuncs."""
    assert has_bf16(), "the first of these instructions would end the process"

    def pack(args):
        """Copy this thread's share of the panels."""
        thread = call_get_int(load_i64(args + 8 * P_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * P_NUM_THREADS))
        keys, dim, v_dim = load_i64(args + 8 * P_KEYS), load_i64(args + 8 * P_DIM), load_i64(args + 8 * P_V_DIM)
        panels = (keys + PANEL - 1) // PANEL
        total = load_i64(args + 8 * P_KV_HEADS) * panels
        rows = load_i64(args + 8 * P_WORK) + thread * load_i64(args + 8 * P_WORK_STRIDE)
        for index in range(total * thread // threads, total * (thread + 1) // threads):
            first = index % panels * PANEL
            count = min(PANEL, keys - first)
            find_rows(args, index // panels, first, count, rows, rows + 8 * PANEL)
            size = 2 * PANEL * (dim + v_dim)
            _pack_panel(rows, rows + 8 * PANEL, count, dim, v_dim, load_i64(args + 8 * P_PACKED) + index * size)

    def attend(args):
        """Compute this thread's items, one in ``threads`` of them."""
        thread = call_get_int(load_i64(args + 8 * P_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * P_NUM_THREADS))
        heads, queries = load_i64(args + 8 * P_HEADS), load_i64(args + 8 * P_QUERIES)
        work = load_i64(args + 8 * P_WORK) + thread * load_i64(args + 8 * P_WORK_STRIDE)
        config, configured = stack_bytes(64), 0
        for item in range(thread, (queries + ROW_BLOCK - 1) // ROW_BLOCK * heads, threads):
            first = item // heads * ROW_BLOCK
            count = min(ROW_BLOCK, queries - first)
            if count != configured:
                configure_tiles(config, count)
                configured = count
            _attend(args, item % heads, first, count, work)
        if configured:
            release_tiles()

    return compile_c(pack), compile_c(attend)
