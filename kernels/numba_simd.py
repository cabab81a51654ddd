"""Inner loops of CPU decode as LLVM vectors (numba_vectors.py). The last arguments are compile-time constants."""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.numba_codes import (
    KIND_BF16,
    KIND_FLOAT,
    PER_HEAD_KINDS,
    load_values,
    pieces_of,
    row_code_bytes,
    store_values,
)
from kvbench_kernels.numba_memory import F32, I32, I64, JIT, pointer
from kvbench_kernels.numba_vectors import FAST, LANES, call, constant, fma, load, splat, store, sum_of, vec

MAX_ACCUMULATORS = 16  # vectors held in registers at a time; 32 exist with AVX-512VL


@intrinsic(prefer_literal=True)
def score_token(typingctx, q, k, s, k_scale, group, dim, s_stride, kind):
    """Set ``s[g * s_stride] = dot(q[g, :dim], k[:dim])`` for the ``group`` query heads of one KV head.

    k is a row of ``kind`` (numba_codes.py); ``k_scale`` counts for the kinds with a scale per head.
    """
    g_count, d_count, stride = group.literal_value, dim.literal_value, s_stride.literal_value
    row_kind = kind.literal_value

    def codegen(context, builder, signature, args):
        q_at, k_at, s_at, scale = args[:4]
        pieces = pieces_of(row_kind, d_count)
        keys = {o: load_values(builder, k_at, d_count, o, w, row_kind) for o, w in pieces}
        for g in range(g_count):
            sums: dict[int, ir.Value] = {}
            for offset, width in pieces:
                qv = load(builder, q_at, g * d_count + offset, width)
                if width in sums:
                    sums[width] = fma(builder, qv, keys[offset], sums[width])
                else:
                    sums[width] = builder.fmul(qv, keys[offset], flags=FAST)
            total = None
            for vector in sums.values():
                part = sum_of(builder, vector)
                total = part if total is None else builder.fadd(total, part, flags=FAST)
            if row_kind in PER_HEAD_KINDS:
                total = builder.fmul(total, scale)
            store(builder, total, s_at, g * stride)
        return context.get_dummy_value()

    sig = types.void(types.intp, types.intp, types.intp, types.float32, group, dim, s_stride, kind)
    return sig, codegen


@intrinsic(prefer_literal=True)
def add_weighted_rows(typingctx, acc, p, base, offsets, count, group, dim, p_stride, kind):
    """Set ``acc[g, :dim] += sum_j p[g * p_stride + j] * row_j[:dim]``; row_j: at ``base + offsets[j]`` bytes.

    Accumulators stay in registers over the whole loop over j; wide shapes take several passes,
    whose rows come from the L1 cache.
    """
    g_count, d_count, stride = group.literal_value, dim.literal_value, p_stride.literal_value
    row_kind = kind.literal_value

    def codegen(context, builder, signature, args):
        acc_at, p_at, base_at, offsets_at, n = args[:5]
        tiles = [(g, o, w) for o, w in pieces_of(row_kind, d_count) for g in range(g_count)]
        for first in range(0, len(tiles), MAX_ACCUMULATORS):
            tile = tiles[first : first + MAX_ACCUMULATORS]
            regs = [cgutils.alloca_once(builder, vec(w)) for _, _, w in tile]
            for (g, o, w), reg in zip(tile, regs, strict=True):
                builder.store(load(builder, acc_at, g * d_count + o, w), reg)
            with cgutils.for_range(builder, n) as loop:
                j = loop.index
                offset_at = builder.add(offsets_at, builder.shl(j, ir.Constant(I64, 3)))
                row = builder.add(base_at, builder.load(pointer(builder, offset_at, I64)))
                p_j = builder.add(p_at, builder.shl(j, ir.Constant(I64, 2)))
                weights, values = {}, {}
                for (g, o, w), reg in zip(tile, regs, strict=True):
                    if (g, w) not in weights:
                        scalar_at = builder.add(p_j, ir.Constant(I64, 4 * g * stride))
                        weights[g, w] = splat(builder, builder.load(pointer(builder, scalar_at, F32)), w)
                    if o not in values:
                        values[o] = load_values(builder, row, d_count, o, w, row_kind)
                    builder.store(fma(builder, weights[g, w], values[o], builder.load(reg)), reg)
            for (g, o, _), reg in zip(tile, regs, strict=True):
                store(builder, builder.load(reg), acc_at, g * d_count + o)
        return context.get_dummy_value()

    sig = types.void(*[types.intp] * 5, group, dim, p_stride, kind)
    return sig, codegen


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute e**x for x <= 0 to about 1 ulp.

    x = n ln 2 + r: Taylor on |r| <= ln 2 / 2, then n into the exponent. x under -87 counts as -87 (1.6e-38), NaN stays
    NaN.
    """
    w = x.type.count
    nan = builder.fcmp_unordered("uno", x, x)
    given, floor = x, constant(w, -87.0)
    x = builder.select(builder.fcmp_ordered(">", x, floor), x, floor)
    n = call(builder, f"llvm.rint.v{w}f32", vec(w), [builder.fmul(x, constant(w, 1.4426950408889634))])
    r = fma(builder, n, constant(w, -0.693359375), x)  # ln 2 in two parts, the first exact in n * part
    r = fma(builder, n, constant(w, 2.12194440e-4), r)
    poly = constant(w, 1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        poly = fma(builder, poly, r, constant(w, 1 / divisor))
    ints = ir.VectorType(I32, w)
    bits = builder.shl(builder.fptosi(n, ints), ir.Constant(ints, [23] * w))
    return builder.select(nan, given, builder.bitcast(builder.add(builder.bitcast(poly, ints), bits), vec(w)))


def gelu_argument(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Compute u with ``x / (1 + e**-u)`` = gelu(x), by gelu's tanh formula.

    tanh(v) is ``2 / (1 + e**-2v) - 1``.
    """
    w = x.type.count
    inner = fma(builder, builder.fmul(x, x), constant(w, 0.044715), constant(w, 1.0))
    return builder.fmul(builder.fmul(x, constant(w, 1.5957691216057308)), inner)


def times_sigmoid(builder: ir.IRBuilder, x: ir.Value, u: ir.Value) -> ir.Value:
    """Compute x / (1 + e**-u), by e**-|u| so that nothing overflows. NaN stays NaN."""
    w = x.type.count
    zero, one = constant(w, 0.0), constant(w, 1.0)
    e = _exp(builder, builder.fsub(zero, call(builder, f"llvm.fabs.v{w}f32", vec(w), [u])))
    top = builder.select(builder.fcmp_ordered("<", u, zero), e, one)
    return builder.fmul(x, builder.fdiv(top, builder.fadd(one, e)))


@intrinsic
def exp_minus(typingctx, s, top, blocks):
    """Set ``s[i] = exp(s[i] - top)`` over ``blocks * 16`` floats, all <= top; returns their sum.

    Differences under -87 count as -87 (1.6e-38); NaN stays NaN.
    """

    def codegen(context, builder, signature, args):
        s_at, top_value, n = args
        total = cgutils.alloca_once_value(builder, constant(LANES, 0.0))
        tops = splat(builder, top_value, LANES)
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            e = _exp(builder, builder.fsub(load(builder, at, 0, LANES), tops))
            store(builder, e, at, 0)
            builder.store(builder.fadd(builder.load(total), e), total)
        return sum_of(builder, builder.load(total))

    return types.float32(types.intp, types.float32, types.intp), codegen


@intrinsic
def softcap_of(typingctx, s, cap, blocks):
    """Set ``s[i] = cap * tanh(s[i] / cap)`` over ``blocks * 16`` floats."""

    def codegen(context, builder, signature, args):
        s_at, cap_value, n = args
        caps = splat(builder, cap_value, LANES)
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            y = builder.fdiv(load(builder, at, 0, LANES), caps)
            size = call(builder, f"llvm.fabs.v{LANES}f32", vec(LANES), [y])
            e = _exp(builder, builder.fmul(size, constant(LANES, -2.0)))  # tanh|y| = (1 - e) / (1 + e)
            one = constant(LANES, 1.0)
            tanh = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
            signed = call(builder, f"llvm.copysign.v{LANES}f32", vec(LANES), [tanh, y])
            store(builder, builder.fmul(signed, caps), at, 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), codegen


@intrinsic
def max_of(typingctx, s, blocks):
    """The largest of ``blocks * 16`` floats."""

    def codegen(context, builder, signature, args):
        s_at, n = args
        best = cgutils.alloca_once_value(builder, constant(LANES, float("-inf")))
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            here = load(builder, at, 0, LANES)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", here, old), here, old), best)
        return call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(best)])

    return types.float32(types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def _scale_vectors(typingctx, source, target, factor, count, lanes, source_kind, target_kind):
    """Set ``target[i] = factor * source[i]`` over ``count`` vectors of ``lanes``; kinds: KIND_FLOAT or KIND_BF16."""
    width, from_kind, to_kind = lanes.literal_value, source_kind.literal_value, target_kind.literal_value
    from_bytes, to_bytes = (ir.Constant(I64, row_code_bytes(kind, width)) for kind in (from_kind, to_kind))

    def codegen(context, builder, signature, args):
        source_at, target_at, factor_value, n = args[:4]
        factors = splat(builder, factor_value, width)
        with cgutils.for_range(builder, n) as loop:
            place = builder.add(source_at, builder.mul(loop.index, from_bytes))
            value = builder.fmul(load_values(builder, place, width, 0, width, from_kind), factors)
            store_values(builder, value, builder.add(target_at, builder.mul(loop.index, to_bytes)), 0, to_kind)
        return context.get_dummy_value()

    sig = types.void(types.intp, types.intp, types.float32, types.intp, lanes, source_kind, target_kind)
    return sig, codegen


@numba.njit(**JIT)
def scale_values(source: int, target: int, factor: float, count: int, source_kind: int, target_kind: int) -> None:
    """Set ``target[i] = factor * source[i]``, in place when the addresses are equal.

    The kinds are KIND_FLOAT or KIND_BF16, at least one of them KIND_FLOAT.
    """
    blocks, rest = count // LANES, count % LANES
    if source_kind == KIND_BF16:
        _scale_vectors(source, target, factor, blocks, LANES, KIND_BF16, KIND_FLOAT)
        source, target = source + 2 * LANES * blocks, target + 4 * LANES * blocks
        _scale_vectors(source, target, factor, rest, 1, KIND_BF16, KIND_FLOAT)
    elif target_kind == KIND_BF16:
        _scale_vectors(source, target, factor, blocks, LANES, KIND_FLOAT, KIND_BF16)
        source, target = source + 4 * LANES * blocks, target + 2 * LANES * blocks
        _scale_vectors(source, target, factor, rest, 1, KIND_FLOAT, KIND_BF16)
    else:
        _scale_vectors(source, target, factor, blocks, LANES, KIND_FLOAT, KIND_FLOAT)
        source, target = source + 4 * LANES * blocks, target + 4 * LANES * blocks
        _scale_vectors(source, target, factor, rest, 1, KIND_FLOAT, KIND_FLOAT)


@intrinsic
def transpose_tile(typingctx, rows, offset, target, stride):
    """Transpose a 16 x 16 tile.

    Row j is read at ``rows[j] + offset`` (int64 addresses), column d is written at ``target + d * stride`` bytes. In
    each of four rounds rows a distance apart exchange halves of that width.
    """

    def codegen(context, builder, signature, args):
        rows_at, offset_at, target_at, step = args
        tile = []
        for j in range(LANES):
            row = builder.load(pointer(builder, builder.add(rows_at, ir.Constant(I64, 8 * j)), I64))
            tile.append(load(builder, builder.add(row, offset_at), 0, LANES))
        for width in (8, 4, 2, 1):
            low = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
            high = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
            low, high = (ir.Constant(ir.VectorType(I32, LANES), picks) for picks in (low, high))
            for j in (j for j in range(LANES) if not j & width):
                a, b = tile[j], tile[j | width]
                tile[j], tile[j | width] = (builder.shuffle_vector(a, b, picks) for picks in (low, high))
        for d, column in enumerate(tile):
            store(builder, column, builder.add(target_at, builder.mul(step, ir.Constant(I64, d))), 0)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), codegen
