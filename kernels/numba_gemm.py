"""float32 linear layers on a CPU: weights packed once, read in one stream, a tile of results in registers.

    out [M, N] = x [M, K] @ weight [N, K].T  (+ bias [N])  (* act(gate [M, N]))  (+ residual [M, N])

Decode multiplies a few rows with weights that no cache holds: each weight is to be read once, in order, ahead of its
use, while every core is busy. A general GEMM packs the weights in every call and waits for them.

    panel   PANEL output features, stored [K, PANEL]; pairs of block and panel are shared out over the threads
    slice   DEPTH of a panel's K: 128 KiB (AVX2: 24), in the L2 (L1) cache when all rows but a block's first read it
    block   ROW_BLOCK rows of x, which stay in the L2 cache while the panels pass by
    tile    up to ROWS rows x PANEL results in registers: with AVX-512 per k 4 loads of weights, a broadcast a row and
            24 multiply-adds; half the registers of half the width, as AVX2 has, hold panels of 16

Each tile asks for one cache line of the next slice per k, so that memory works while the arithmetic does.
Between slices a tile's sums lie in ``out``. Threads: torch's own OpenMP team, see numba_threads.py.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_memory import (
    F32,
    I64,
    call_get_int,
    call_parallel,
    compile_c,
    compiles_for,
    emit_prefetch,
    load_i64,
    pointer,
)
from kvbench_kernels.numba_simd import gelu_argument, times_sigmoid
from kvbench_kernels.numba_vectors import LANES, cases, constant, fma, load, splat, store, vec

PANEL = 64 if compiles_for("avx512f") else 16
ROWS = 6  # 6 x 4 sums, 4 weights and a broadcast fit the 32 registers of AVX-512; 6 x 2, 2 and 1 the 16 of AVX2
# A slice of the L1 cache (96 with AVX-512) was 5 % slower on an EPYC of 2 cores: sums went through memory more often.
DEPTH = 512 if PANEL == 64 else 384
ROW_BLOCK = 192
LINES = PANEL // LANES  # cache lines of weights per k

HAS_BIAS, HAS_GATE, IS_GELU = 1, 2, 4  # bits of the epilogue; act is silu, or gelu by its tanh formula
FIRST_SLICE, LAST_SLICE = 1, 2  # bits of a slice's stage: sums begin at 0; the epilogue is due

(
    G_X, G_W, G_OUT, G_BIAS, G_GATE, G_GATE_BIAS, G_RESIDUAL, G_M, G_N, G_K,
    G_X_STRIDE, G_OUT_STRIDE, G_GATE_STRIDE, G_RESIDUAL_STRIDE,
    G_THREADS, G_WORKER, G_PARALLEL, G_THREAD_NUM, G_NUM_THREADS,
    NUM_GEMM_ARGS,
) = range(20)  # fmt: skip
# Strides in bytes. No residual: 0. G_GATE: the gate's values; in numba_bf16.py its packed weights, with G_GATE_BIAS.


class _Tile:
    """Emits the code of one tile: ``rows`` rows, the ``columns`` (a multiple of LANES, at run time) of a panel."""

    def __init__(self, builder: ir.IRBuilder, rows: int, columns: ir.Value):
        self.builder = builder
        self.columns = columns
        self.places = [(r, v) for v in range(PANEL // LANES) for r in range(rows)]
        self.sums = {place: cgutils.alloca_once(builder, vec(LANES)) for place in self.places}

    def row(self, base: ir.Value, step: ir.Value, r: int) -> ir.Value:
        return self.builder.add(base, self.builder.mul(step, ir.Constant(I64, r))) if r else base

    def each_vector(self):
        """Yield the tile's places, vector by vector, in code that is skipped where the panel has no such columns."""
        for v in range(PANEL // LANES):
            with self.builder.if_then(self.builder.icmp_signed(">", self.columns, ir.Constant(I64, LANES * v))):
                yield [place for place in self.places if place[1] == v]

    def clear(self) -> None:
        for place in self.places:
            self.builder.store(constant(LANES, 0.0), self.sums[place])

    def resume(self, out: ir.Value, step: ir.Value) -> None:
        for places in self.each_vector():
            for r, v in places:
                self.builder.store(load(self.builder, self.row(out, step, r), LANES * v, LANES), self.sums[r, v])

    def multiply(self, x: ir.Value, x_step: ir.Value, w: ir.Value, depth: ir.Value, ahead: ir.Value) -> None:
        builder = self.builder
        x_rows = {r: self.row(x, x_step, r) for r, v in self.places if v == 0}
        with cgutils.for_range(builder, depth) as loop:
            w_row = builder.add(w, builder.mul(loop.index, ir.Constant(I64, 4 * PANEL)))
            weights = [load(builder, w_row, LANES * v, LANES) for v in range(PANEL // LANES)]
            emit_prefetch(builder, builder.add(ahead, builder.shl(loop.index, ir.Constant(I64, 6))), 2)
            offset = builder.shl(loop.index, ir.Constant(I64, 2))
            for r, x_row in x_rows.items():
                wide = splat(builder, builder.load(pointer(builder, builder.add(x_row, offset), F32)), LANES)
                for v, weight in enumerate(weights):
                    builder.store(fma(builder, wide, weight, builder.load(self.sums[r, v])), self.sums[r, v])

    def finish(
        self, epilogue: int, bias: ir.Value, gate: ir.Value, gate_step: ir.Value, residual: ir.Value, step: ir.Value
    ) -> None:
        builder = self.builder
        for places in self.each_vector():
            for r, v in places:
                value = builder.load(self.sums[r, v])
                if epilogue & HAS_BIAS:
                    value = builder.fadd(value, load(builder, bias, LANES * v, LANES))
                if epilogue & HAS_GATE:
                    opening = load(builder, self.row(gate, gate_step, r), LANES * v, LANES)
                    u = gelu_argument(builder, opening) if epilogue & IS_GELU else opening
                    value = builder.fmul(value, times_sigmoid(builder, opening, u))
                builder.store(value, self.sums[r, v])
        with builder.if_then(builder.icmp_signed("!=", residual, ir.Constant(I64, 0))):
            for places in self.each_vector():
                for r, v in places:
                    added = load(builder, self.row(residual, step, r), LANES * v, LANES)
                    builder.store(builder.fadd(builder.load(self.sums[r, v]), added), self.sums[r, v])

    def store(self, out: ir.Value, step: ir.Value) -> None:
        for places in self.each_vector():
            for r, v in places:
                store(self.builder, self.builder.load(self.sums[r, v]), self.row(out, step, r), LANES * v)


@intrinsic(prefer_literal=True)
def multiply_tile(
    typingctx, x, x_stride, w, depth, ahead, bias, gate, gate_stride, residual, residual_stride,
    out, out_stride, columns, rows, stage, epilogue,
):  # fmt: skip
    """Compute a slice's share of ``out [rows, columns]``: x ``[rows, depth]`` @ w ``[depth, PANEL]``.

    ``rows`` in 1..ROWS. ``ahead``: where to prefetch ``64 * depth`` bytes for whoever comes next. ``epilogue`` is a
    compile-time constant.
    """
    flags = epilogue.literal_value

    def codegen(context, builder, signature, args):
        x_at, x_step, w_at, k_count, ahead_at = args[:5]
        bias_at, gate_at, gate_step, residual_at, residual_step, out_at, out_step, width, height, stages = args[5:15]

        def at_stage(bit: int) -> ir.Value:
            return builder.icmp_signed("!=", builder.and_(stages, ir.Constant(I64, bit)), ir.Constant(I64, 0))

        for rows_here in cases(builder, height, ROWS):
            tile = _Tile(builder, rows_here, width)
            tile.clear()
            with builder.if_then(builder.not_(at_stage(FIRST_SLICE))):
                tile.resume(out_at, out_step)
            tile.multiply(x_at, x_step, w_at, k_count, ahead_at)
            with builder.if_then(at_stage(LAST_SLICE)):
                tile.finish(flags, bias_at, gate_at, gate_step, residual_at, residual_step)
            tile.store(out_at, out_step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 15, epilogue), codegen


@cache
def build_gemm(epilogue: int):
    """Compile the worker for an epilogue (bits as above) as a Numba cfunc. Each thread takes its share of the pairs."""

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * G_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * G_NUM_THREADS))
        m, n, k = load_i64(args + 8 * G_M), load_i64(args + 8 * G_N), load_i64(args + 8 * G_K)
        x_step, out_step = load_i64(args + 8 * G_X_STRIDE), load_i64(args + 8 * G_OUT_STRIDE)
        gate_step, residual_step = load_i64(args + 8 * G_GATE_STRIDE), load_i64(args + 8 * G_RESIDUAL_STRIDE)
        panels = (n + PANEL - 1) // PANEL
        blocks = (m + ROW_BLOCK - 1) // ROW_BLOCK
        pairs = blocks * panels
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            part, panel = pair // panels, pair % panels
            block = m * part // blocks  # of nearly equal height, or the threads would have unlike shares
            count = m * (part + 1) // blocks - block
            tiles = (count + ROWS - 1) // ROWS
            across = 4 * PANEL * panel
            bias = load_i64(args + 8 * G_BIAS) + across
            for first in range(0, k, DEPTH):
                depth = min(DEPTH, k - first)
                stage = (FIRST_SLICE if first == 0 else 0) | (LAST_SLICE if first + depth == k else 0)
                w = load_i64(args + 8 * G_W) + 4 * PANEL * (panel * k + first)
                for tile in range(tiles):  # of nearly equal height, so that none is left with one row
                    row = block + count * tile // tiles
                    rows = block + count * (tile + 1) // tiles - row
                    residual = load_i64(args + 8 * G_RESIDUAL)
                    residual += row * residual_step + across if residual else 0
                    ahead = w + 64 * depth * (LINES + tile if tile < LINES else 0)  # past the end does no harm
                    multiply_tile(
                        load_i64(args + 8 * G_X) + row * x_step + 4 * first, x_step, w, depth, ahead,
                        bias, load_i64(args + 8 * G_GATE) + row * gate_step + across, gate_step,
                        residual, residual_step,
                        load_i64(args + 8 * G_OUT) + row * out_step + across, out_step,
                        min(PANEL, n - PANEL * panel), rows, stage, epilogue,
                    )  # fmt: skip

    return compile_c(worker)


@compile_c
def run_gemm(args):
    """Compute one linear layer: the worker on every thread."""
    call_parallel(load_i64(args + 8 * G_PARALLEL), load_i64(args + 8 * G_WORKER), args, load_i64(args + 8 * G_THREADS))
