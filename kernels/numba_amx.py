"""Products of bfloat16 on a CPU with AMX: the tile unit multiplies, float32 sums stay in its registers.

A tile register has 16 rows of 64 bytes. One instruction adds ``x [16, 32] @ weight [32, 16]`` to 16 x 16 sums, for
which the weights lie in pairs along K: 16 rows (pairs) of 16 columns (output features) of 2 values.

    panel   PANEL output features, stored [K / 32, 2 tiles, 16, 16, 2]
    block   32 rows of x: 2 x 2 tiles of sums, 2 of x and 2 of weights are the eight registers that there are

Tiles of the last rows are configured to be as high as there are rows left, so nothing beyond x is read or written.
"""

from __future__ import annotations

import numba
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_memory import I8, I16, I64, JIT, emit_prefetch, has_amx

PANEL = 32
DEPTH = 32  # values of K per instruction
TILE_BYTES = 1024
STEP_BYTES = 2 * TILE_BYTES  # bytes of a panel's weights per DEPTH

SUMS, X_TILES, W_TILES = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers; sums: row of tiles x 2 + column


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
    """Set the tile registers for blocks of ``rows`` (1..32) rows of x; ``at``: 64 bytes of scratch.

    Without AMX there is nothing to set.
    """

    def codegen(context, builder, signature, args):
        if not has_amx():
            return context.get_dummy_value()
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
        if has_amx():
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


@numba.njit(**JIT)
def multiply_rows(
    x: int, x_step: int, w: int, steps: int, ahead: int, sums: int, sums_step: int, rows: int, add: int
) -> None:
    """Set ``sums [rows, PANEL]`` float32, or add to them, the product of x ``[rows, 32 steps]`` and a panel's weights.

    ``rows``: 1..32, as the tiles are configured. ``ahead``: where to prefetch as many weights, or 0.
    """
    if rows > 16:
        if add:
            multiply_block(x, x_step, w, steps, ahead, sums, sums_step, 2, 1)
        else:
            multiply_block(x, x_step, w, steps, ahead, sums, sums_step, 2, 0)
    elif add:
        multiply_block(x, x_step, w, steps, ahead, sums, sums_step, 1, 1)
    else:
        multiply_block(x, x_step, w, steps, ahead, sums, sums_step, 1, 0)
