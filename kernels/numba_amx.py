"""bfloat16 linear layers on a CPU with AMX: the tile unit multiplies, float32 sums stay in its registers.

    out [M, N] = x [M, K] @ weight [N, K].T  (+ bias [N])  (+ residual [M, N])
    out [M, N] = act(x @ gate.T  (+ gate bias)) * (x @ weight.T  (+ bias))  (+ residual)

A tile register has 16 rows of 64 bytes. One instruction adds ``x [16, 32] @ weight [32, 16]`` to 16 x 16 sums, for
which the weights lie in pairs along K: 16 rows (pairs) of 16 columns (output features) of 2 values.

    panel   PANEL output features, stored [K / 32, 2 tiles, 16, 16, 2]; shared out over the threads
    block   ROW_BLOCK rows of x: 2 x 2 tiles of sums, 2 of x and 2 of weights are the eight registers that there are
    finish  sums go through a scratch of 4 KiB to become bfloat16, with bias, gate and residual in float32

Tiles of the last rows are configured to be as high as there are rows left, so nothing beyond x is read or written.
Threads: torch's own OpenMP team, see numba_threads.py.
"""

from __future__ import annotations

from functools import cache

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_gemm import (
    G_BIAS,
    G_GATE,
    G_GATE_BIAS,
    G_K,
    G_M,
    G_N,
    G_NUM_THREADS,
    G_OUT,
    G_OUT_STRIDE,
    G_RESIDUAL,
    G_RESIDUAL_STRIDE,
    G_THREAD_NUM,
    G_W,
    G_X,
    G_X_STRIDE,
    HAS_BIAS,
    HAS_GATE,
    IS_GELU,
)  # fmt: skip
from kvbench_kernels.numba_memory import (
    I8,
    I16,
    I32,
    I64,
    JIT,
    call_get_int,
    compiles_for,
    emit_prefetch,
    load_i64,
    stack_bytes,
)
from kvbench_kernels.numba_simd import gelu_argument
from kvbench_kernels.numba_vectors import LANES, call, constant, fma, ints, load, load_bf16, store_bf16, vec

PANEL = 32
ROW_BLOCK = 32
CHUNK = 512  # rows multiplied by a panel before the next panel
AHEAD = 8192  # bytes of weights that are asked for ahead of their use
DEPTH = 32  # values of K per instruction
SUMS_BYTES = 4 * PANEL * ROW_BLOCK
TILE_BYTES = 1024
STEP_BYTES = 2 * TILE_BYTES  # bytes of a panel's weights per DEPTH

SUMS, X_TILES, W_TILES = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers; sums: row of tiles x 2 + column


@cache
def has_amx() -> bool:
    """Tests whether Numba compiles for AMX's bfloat16 here and the system lets this process use the tile registers."""
    return compiles_for("amx-bf16") and compiles_for("avx512f") and bool(torch.cpu._init_amx())


def pack_bf16(weight: torch.Tensor) -> torch.Tensor:
    """Pack ``[N, K]`` bfloat16 into ``[ceil(N / PANEL), K / DEPTH, 2, 16, 16, 2]``; missing outputs are zeros."""
    n, k = weight.shape
    panels = -(-n // PANEL)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, panels * PANEL - n))
    return padded.view(panels, 2, 16, k // DEPTH, 16, 2).permute(0, 3, 1, 4, 2, 5).contiguous()


def unpack_bf16(packed: torch.Tensor, n: int) -> torch.Tensor:
    """The inverse of ``pack_bf16``."""
    panels, steps = packed.shape[:2]
    return packed.permute(0, 2, 4, 1, 3, 5).reshape(panels * PANEL, steps * DEPTH)[:n]


def _amx(builder: ir.IRBuilder, name: str, *args: ir.Value | int) -> None:
    """Call an AMX intrinsic; ints are numbers of tile registers."""
    values = [ir.Constant(I8, a) if isinstance(a, int) else a for a in args]
    kind = ir.FunctionType(ir.VoidType(), [v.type for v in values])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), values)


def _place(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.inttoptr(address, ir.PointerType(I8))


@intrinsic
def configure_tiles(typingctx, at, rows):
    """Set the tile registers for blocks of ``rows`` (1..32) rows of x; ``at``: 64 bytes of scratch."""

    def codegen(context, builder, signature, args):
        at_value, count = args
        sixteen = ir.Constant(I64, 16)
        high = builder.select(builder.icmp_signed("<", count, sixteen), count, sixteen)
        low = builder.sub(count, high)
        low = builder.select(builder.icmp_signed(">", low, ir.Constant(I64, 0)), low, ir.Constant(I64, 1))
        cgutils.memset(builder, _place(builder, at_value), ir.Constant(I64, 64), 0)

        def put(offset: int, value: ir.Value) -> None:
            builder.store(
                value, builder.inttoptr(builder.add(at_value, ir.Constant(I64, offset)), ir.PointerType(value.type))
            )

        put(0, ir.Constant(I8, 1))  # palette 1
        for tile in range(8):
            height = {0: high, 1: high, 4: high, 2: low, 3: low, 5: low}.get(tile, sixteen)
            put(16 + 2 * tile, ir.Constant(I16, 64))
            put(48 + tile, builder.trunc(height, I8))
        _amx(builder, "ldtilecfg", _place(builder, at_value))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def release_tiles(typingctx):
    """Set the tile registers free, so that a switch of threads need not save them."""

    def codegen(context, builder, signature, args):
        _amx(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def multiply_block(typingctx, x, x_stride, w, steps, ahead, sums, sums_stride, tiles, add):
    """Multiply x ``[rows, 32 steps]`` by a panel's weights into ``sums``, float32 ``[16 tiles, PANEL]``.

    ``tiles`` (1 or 2 tiles of rows) and ``add`` (1 if the product is added to the sums) are constants.
    ``ahead``: where to prefetch STEP_BYTES a step, or 0.
    """
    high = tiles.literal_value

    def codegen(context, builder, signature, args):
        x_at, step, w_at, count, ahead_at, sums_at, sums_step = args[:7]
        pairs = [(r, c) for r in range(high) for c in range(2)]
        places = {
            (r, c): _place(builder, builder.add(
                builder.add(sums_at, ir.Constant(I64, 64 * c)), builder.mul(sums_step, ir.Constant(I64, 16 * r))
            ))
            for r, c in pairs
        }  # fmt: skip
        for r, c in pairs:
            if add.literal_value:
                _amx(builder, "tileloadd64", SUMS[2 * r + c], places[r, c], sums_step)
            else:
                _amx(builder, "tilezero", SUMS[2 * r + c])
        rows = [x_at, builder.add(x_at, builder.shl(step, ir.Constant(I64, 4)))]
        wide = ir.Constant(I64, 64)
        with cgutils.for_range(builder, count) as loop:
            along = builder.shl(loop.index, ir.Constant(I64, 6))
            panel = builder.add(w_at, builder.shl(loop.index, ir.Constant(I64, 11)))
            for r in range(high):
                _amx(builder, "tileloadd64", X_TILES[r], _place(builder, builder.add(rows[r], along)), step)
            for c in range(2):
                tile = builder.add(panel, ir.Constant(I64, TILE_BYTES * c))
                _amx(builder, "tileloadd64", W_TILES[c], _place(builder, tile), wide)
            for r, c in pairs:
                _amx(builder, "tdpbf16ps", SUMS[2 * r + c], X_TILES[r], W_TILES[c])
            next_panel = builder.add(ahead_at, builder.shl(loop.index, ir.Constant(I64, 11)))
            with builder.if_then(builder.icmp_signed("!=", ahead_at, ir.Constant(I64, 0))):
                for line in range(0, STEP_BYTES, 64):
                    emit_prefetch(builder, builder.add(next_panel, ir.Constant(I64, line)), 2)
        for r, c in pairs:
            _amx(builder, "tilestored64", SUMS[2 * r + c], places[r, c], sums_step)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, tiles, add), codegen


def _times_sigmoid(builder: ir.IRBuilder, x: ir.Value, u: ir.Value) -> ir.Value:
    """Compute x / (1 + e**-u) to about 1e-4, which bfloat16 rounds away. NaN stays NaN.

    It takes a third of numba_simd's time.
    """
    w = x.type.count
    edge, zero = constant(w, 87.0), constant(w, 0.0)
    power = builder.fsub(zero, u)
    for sign, bound in (("<", edge), (">", constant(w, -87.0))):
        power = builder.select(builder.fcmp_ordered(sign, power, bound), power, bound)
    n = call(builder, f"llvm.rint.v{w}f32", vec(w), [builder.fmul(power, constant(w, 1.4426950408889634))])
    r = fma(builder, n, constant(w, -0.6931471805599453), power)
    poly = constant(w, 1 / 24)
    for divisor in (6, 2, 1, 1):
        poly = fma(builder, poly, r, constant(w, 1 / divisor))
    words = ir.VectorType(I32, w)
    exponent = builder.shl(builder.fptosi(n, words), ints(I32, w, 23))
    below = builder.fadd(builder.bitcast(builder.add(builder.bitcast(poly, words), exponent), vec(w)), constant(w, 1.0))
    every_lane = ir.Constant(I16, -1)
    inverse = call(builder, "llvm.x86.avx512.rcp14.ps.512", vec(w), [below, zero, every_lane])
    return builder.fmul(x, inverse)


@intrinsic(prefer_literal=True)
def finish_row(typingctx, sums, bias, gate_sums, gate_bias, residual, out, columns, epilogue):
    """Round a row of ``columns`` (16 or 32) sums to bfloat16 at ``out``.

    ``epilogue`` (a constant) says what is done before; the residual is added unless its address is 0.
    """
    flags = epilogue.literal_value

    def codegen(context, builder, signature, args):
        sums_at, bias_at, gate_at, gate_bias_at, residual_at, out_at, width = args[:7]
        none = ir.Constant(I64, 0)

        def sums_of(at: ir.Value, bias_here: ir.Value, v: int) -> ir.Value:
            value = load(builder, at, LANES * v, LANES)
            if flags & HAS_BIAS:
                value = builder.fadd(value, load_bf16(builder, bias_here, LANES * v, LANES))
            return value

        for v in range(PANEL // LANES):
            with builder.if_then(builder.icmp_signed(">", width, ir.Constant(I64, LANES * v))):
                value = sums_of(sums_at, bias_at, v)
                if flags & HAS_GATE:
                    opening = sums_of(gate_at, gate_bias_at, v)
                    u = gelu_argument(builder, opening) if flags & IS_GELU else opening
                    value = builder.fmul(value, _times_sigmoid(builder, opening, u))
                total = cgutils.alloca_once_value(builder, value)
                with builder.if_then(builder.icmp_signed("!=", residual_at, none)):
                    builder.store(builder.fadd(value, load_bf16(builder, residual_at, LANES * v, LANES)), total)
                store_bf16(builder, builder.load(total), out_at, LANES * v)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 7, epilogue), codegen


@numba.njit(**JIT)
def _multiply(x: int, x_step: int, w: int, steps: int, ahead: int, sums: int, rows: int) -> None:
    if rows > 16:
        multiply_block(x, x_step, w, steps, ahead, sums, 4 * PANEL, 2, 0)
    else:
        multiply_block(x, x_step, w, steps, ahead, sums, 4 * PANEL, 1, 0)


@cache
def build_amx(epilogue: int):
    """Compile the worker for an epilogue (HAS_BIAS | HAS_GATE | IS_GELU) as a Numba cfunc.

    Each thread takes its share of the panels. With HAS_BIAS and HAS_GATE the gate has a bias too.

    Arguments as numba_gemm.py's, of bfloat16.
    """
    assert has_amx(), "without the system's leave the first tile instruction ends the process"

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * G_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * G_NUM_THREADS))
        m, n, k = load_i64(args + 8 * G_M), load_i64(args + 8 * G_N), load_i64(args + 8 * G_K)
        x_step, out_step = load_i64(args + 8 * G_X_STRIDE), load_i64(args + 8 * G_OUT_STRIDE)
        residual_step = load_i64(args + 8 * G_RESIDUAL_STRIDE)
        panels, steps = (n + PANEL - 1) // PANEL, k // DEPTH
        pairs = (m + CHUNK - 1) // CHUNK * panels
        sums, gate_sums = stack_bytes(SUMS_BYTES), stack_bytes(SUMS_BYTES)
        config = stack_bytes(64)
        configured = 0
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            first, panel = pair // panels * CHUNK, pair % panels
            last, across = min(first + CHUNK, m), 2 * PANEL * panel
            bias, gate_bias = load_i64(args + 8 * G_BIAS) + across, load_i64(args + 8 * G_GATE_BIAS) + across
            w = load_i64(args + 8 * G_W) + panel * steps * STEP_BYTES
            gate = load_i64(args + 8 * G_GATE) + panel * steps * STEP_BYTES
            for row in range(first, last, ROW_BLOCK):
                rows = min(ROW_BLOCK, last - row)
                if rows != configured:
                    configure_tiles(config, rows)
                    configured = rows
                x = load_i64(args + 8 * G_X) + row * x_step
                if epilogue & HAS_GATE:
                    _multiply(x, x_step, gate, steps, gate + AHEAD if row == first else 0, gate_sums, rows)
                _multiply(x, x_step, w, steps, w + AHEAD if row == first else 0, sums, rows)
                for r in range(rows):
                    out = load_i64(args + 8 * G_OUT) + (row + r) * out_step + across
                    residual = load_i64(args + 8 * G_RESIDUAL)
                    residual += (row + r) * residual_step + across if residual else 0
                    at, columns = 4 * PANEL * r, min(PANEL, n - PANEL * panel)
                    finish_row(sums + at, bias, gate_sums + at, gate_bias, residual, out, columns, epilogue)
        if configured:
            release_tiles()

    return numba.cfunc(types.void(types.intp), **JIT)(worker)
