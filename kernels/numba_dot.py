"""Products of bfloat16 on a CPU with AVX512-BF16: one instruction adds 16 dot products of pairs to float32 sums.

The weights are packed as for AMX (numba_amx.py): in its tiles a row is one pair of 16 output features, a vector. A pair
of x is sent to all lanes; up to ROWS rows times PANEL sums stay in registers while K passes by.
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_amx import PANEL, TILE_BYTES
from kvbench_kernels.numba_memory import I32, I64, JIT, emit_prefetch, pointer
from kvbench_kernels.numba_vectors import LANES, BFloat, call, cases, constant, load, splat, store, vec

ROWS = 11  # a third of a block of 32; 22 of the 32 registers hold sums
_PAIRS = ir.VectorType(BFloat(), 2 * LANES)


@intrinsic
def _multiply_tile(typingctx, x, x_stride, w, steps, ahead, sums, sums_stride, rows, add):
    """Compute as ``multiply_rows`` does, for ``rows`` in 1..ROWS and an ``ahead`` that is never 0."""

    def codegen(context, builder, signature, args):
        x_at, x_step, w_at, count, ahead_at, sums_at, sums_step, height, adds = args

        def number(value: int) -> ir.Constant:
            return ir.Constant(I64, value)

        for rows_here in cases(builder, height, ROWS):
            lines = [(r, builder.mul(sums_step, number(r))) for r in range(rows_here)]
            places = [(r, v, builder.add(sums_at, step)) for r, step in lines for v in range(PANEL // LANES)]
            totals = {(r, v): cgutils.alloca_once(builder, vec(LANES)) for r, v, _ in places}
            for total in totals.values():
                builder.store(constant(LANES, 0.0), total)
            with builder.if_then(builder.icmp_signed("!=", adds, number(0))):
                for r, v, place in places:
                    builder.store(load(builder, place, LANES * v, LANES), totals[r, v])
            x_rows = [builder.add(x_at, builder.mul(x_step, number(r))) for r in range(rows_here)]
            with cgutils.for_range(builder, count) as step, cgutils.for_range(builder, number(LANES)) as pair:
                row = builder.add(builder.mul(step.index, number(2 * TILE_BYTES)), builder.shl(pair.index, number(6)))
                along = builder.add(builder.shl(step.index, number(6)), builder.shl(pair.index, number(2)))
                weights = []
                for v in range(PANEL // LANES):
                    tile_row = builder.add(row, number(TILE_BYTES * v))
                    weights.append(builder.load(pointer(builder, builder.add(w_at, tile_row), _PAIRS), align=2))
                    emit_prefetch(builder, builder.add(ahead_at, tile_row), 2)
                for r, x_row in enumerate(x_rows):
                    one = builder.load(pointer(builder, builder.add(x_row, along), I32), align=2)
                    wide = builder.bitcast(splat(builder, one, LANES), _PAIRS)
                    for v, weight in enumerate(weights):
                        parts = [builder.load(totals[r, v]), wide, weight]
                        total = call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", vec(LANES), parts)
                        builder.store(total, totals[r, v])
            for r, v, place in places:
                store(builder, builder.load(totals[r, v]), place, LANES * v)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 9), codegen


@numba.njit(**JIT)
def multiply_rows(
    x: int, x_step: int, w: int, steps: int, ahead: int, sums: int, sums_step: int, rows: int, add: int
) -> None:
    """Compute what numba_amx.multiply_rows does, for any number of rows."""
    tiles = (rows + ROWS - 1) // ROWS
    for tile in range(tiles):  # of nearly equal height, so that none is left with one row
        row = rows * tile // tiles
        height = rows * (tile + 1) // tiles - row
        fetched = ahead if ahead and tile == 0 else w
        _multiply_tile(x + row * x_step, x_step, w, steps, fetched, sums + row * sums_step, sums_step, height, add)
