"""bfloat16 linear layers on a CPU that multiplies bfloat16: in AMX's tiles, or in vectors of AVX512-BF16.

    out [M, N] = x [M, K] @ weight [N, K].T  (+ bias [N])  (+ residual [M, N])
    out [M, N] = act(x @ gate.T  (+ gate bias)) * (x @ weight.T  (+ bias))  (+ residual [M, N])

    panel   PANEL output features, packed as numba_amx.py has them; shared out over the threads
    block   ROW_BLOCK rows of x, multiplied by numba_amx.py or numba_dot.py
    finish  sums go through a scratch of 4 KiB to become bfloat16, with bias, gate and residual in float32

Threads: torch's own OpenMP team, see numba_threads.py.
"""

from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels import numba_amx, numba_dot
from kvbench_kernels.numba_amx import DEPTH, PANEL, STEP_BYTES, configure_tiles, release_tiles
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
    I16,
    I32,
    I64,
    call_get_int,
    compile_c,
    compiles_for,
    has_amx,
    load_i64,
    stack_bytes,
)
from kvbench_kernels.numba_simd import gelu_argument
from kvbench_kernels.numba_vectors import LANES, call, constant, fma, ints, load, load_bf16, store_bf16, vec

ROW_BLOCK = 32
CHUNK = 512  # rows multiplied by a panel before the next panel
AHEAD = 8192  # bytes of weights that are asked for ahead of their use
SUMS_BYTES = 4 * PANEL * ROW_BLOCK

multiply_rows = numba_amx.multiply_rows if has_amx() else numba_dot.multiply_rows


def has_bf16() -> bool:
    """Tests whether this process may multiply bfloat16: in AMX's tiles or in vectors."""
    return has_amx() or compiles_for("avx512bf16")


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


@cache
def build_bf16(epilogue: int):
    """Compile the worker for an epilogue (HAS_BIAS | HAS_GATE | IS_GELU) as a Numba cfunc.

    Each thread takes its share of the panels. With HAS_BIAS and HAS_GATE the gate has a bias too.

    Arguments as numba_gemm.py's, of bfloat16.
    """
    assert has_bf16(), "the first of these instructions would end the process"

    def worker(args):
        thread = call_get_int(load_i64(args + 8 * G_THREAD_NUM))
        threads = call_get_int(load_i64(args + 8 * G_NUM_THREADS))
        m, n, k = load_i64(args + 8 * G_M), load_i64(args + 8 * G_N), load_i64(args + 8 * G_K)
        x_step, out_step = load_i64(args + 8 * G_X_STRIDE), load_i64(args + 8 * G_OUT_STRIDE)
        residual_step = load_i64(args + 8 * G_RESIDUAL_STRIDE)
        panels, steps = (n + PANEL - 1) // PANEL, k // DEPTH
        chunks = (m + CHUNK - 1) // CHUNK
        pairs = chunks * panels
        sums, gate_sums = stack_bytes(SUMS_BYTES), stack_bytes(SUMS_BYTES)
        config = stack_bytes(64)
        configured = 0
        for pair in range(pairs * thread // threads, pairs * (thread + 1) // threads):
            part, panel = pair // panels, pair % panels
            first, last = m * part // chunks, m * (part + 1) // chunks  # nearly equal shares for the threads
            across = 2 * PANEL * panel
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
                    ahead = gate + AHEAD if row == first else 0
                    multiply_rows(x, x_step, gate, steps, ahead, gate_sums, 4 * PANEL, rows, 0)
                ahead = w + AHEAD if row == first else 0
                multiply_rows(x, x_step, w, steps, ahead, sums, 4 * PANEL, rows, 0)
                for r in range(rows):
                    out = load_i64(args + 8 * G_OUT) + (row + r) * out_step + across
                    residual = load_i64(args + 8 * G_RESIDUAL)
                    residual += (row + r) * residual_step + across if residual else 0
                    at, columns = 4 * PANEL * r, min(PANEL, n - PANEL * panel)
                    finish_row(sums + at, bias, gate_sums + at, gate_bias, residual, out, columns, epilogue)
        if configured:
            release_tiles()

    return compile_c(worker)
