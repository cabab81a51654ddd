"""Vector building blocks of the CPU decode kernel, emitted as LLVM vectors.

Written as explicit ``<16 x float>`` code and not left to the loop vectoriser: with raw pointers the
vectoriser cannot prove that accumulators and KV do not overlap, and Numba has no vector exp without
SVML. LLVM splits the vectors to what the machine has (AVX-512, AVX2, NEON), so this is portable.
Addresses are byte addresses in ``intp``; the last arguments are compile-time constants.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.numba_memory import F32, I32, I64
from kernels.numba_memory import pointer as _pointer

LANES = 16
# Sums may be reordered and fused; nnan/ninf are left out, so NaN and inf keep their meaning.
FAST = ("reassoc", "contract", "nsz")
MAX_ACCUMULATORS = 16  # vectors held in registers at a time; 32 exist with AVX-512VL


def _chunks(dim: int) -> list[tuple[int, int]]:
    """(offset, width) pieces that cover ``dim`` with power-of-two vectors of at most LANES."""
    pieces, offset, width = [], 0, LANES
    while offset < dim:
        if dim - offset >= width:
            pieces.append((offset, width))
            offset += width
        else:
            width //= 2
    return pieces


def _vec(width: int) -> ir.VectorType:
    return ir.VectorType(F32, width)


def _load(builder: ir.IRBuilder, address: ir.Value, element: int, width: int) -> ir.Value:
    place = builder.add(address, ir.Constant(I64, 4 * element)) if element else address
    return builder.load(_pointer(builder, place, _vec(width)), align=4)


def _store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, element: int) -> None:
    place = builder.add(address, ir.Constant(I64, 4 * element)) if element else address
    builder.store(value, _pointer(builder, place, value.type), align=4)


def _splat(builder: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    one = builder.insert_element(ir.Constant(_vec(width), ir.Undefined), scalar, ir.Constant(I32, 0))
    zeros = ir.Constant(ir.VectorType(I32, width), [0] * width)
    return builder.shuffle_vector(one, ir.Constant(_vec(width), ir.Undefined), zeros)


def _constant(width: int, value: float) -> ir.Constant:
    return ir.Constant(_vec(width), [value] * width)


def _call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, fastmath=FAST)


def _fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    width = a.type.count
    return _call(builder, f"llvm.fma.v{width}f32", _vec(width), [a, b, c])


def _sum(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    width = vector.type.count
    if width == 1:
        return builder.extract_element(vector, ir.Constant(I32, 0))
    args = [ir.Constant(F32, 0.0), vector]
    return _call(builder, f"llvm.vector.reduce.fadd.v{width}f32", F32, args)


@intrinsic(prefer_literal=True)
def score_token(typingctx, q, k, s, group, dim, s_stride):
    """``s[g * s_stride] = dot(q[g, :dim], k[:dim])`` for the ``group`` query heads of one KV head."""
    g_count, d_count, stride = group.literal_value, dim.literal_value, s_stride.literal_value

    def codegen(context, builder, signature, args):
        q_at, k_at, s_at = args[:3]
        pieces = _chunks(d_count)
        for g in range(g_count):
            sums: dict[int, ir.Value] = {}
            for offset, width in pieces:
                qv = _load(builder, q_at, g * d_count + offset, width)
                kv = _load(builder, k_at, offset, width)
                if width in sums:
                    sums[width] = _fma(builder, qv, kv, sums[width])
                else:
                    sums[width] = builder.fmul(qv, kv, flags=FAST)
            total = None
            for vector in sums.values():
                part = _sum(builder, vector)
                total = part if total is None else builder.fadd(total, part, flags=FAST)
            _store(builder, total, s_at, g * stride)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, group, dim, s_stride), codegen


@intrinsic(prefer_literal=True)
def add_weighted_rows(typingctx, acc, p, base, offsets, count, group, dim, p_stride):
    """``acc[g, :dim] += sum_j p[g * p_stride + j] * row_j[:dim]``, row_j at ``base + offsets[j]`` bytes.

    Accumulators stay in registers over the whole loop over j; wide shapes take several passes,
    whose rows come from the L1 cache.
    """
    g_count, d_count, stride = group.literal_value, dim.literal_value, p_stride.literal_value

    def codegen(context, builder, signature, args):
        acc_at, p_at, base_at, offsets_at, n = args[:5]
        tiles = [(g, o, w) for o, w in _chunks(d_count) for g in range(g_count)]
        for first in range(0, len(tiles), MAX_ACCUMULATORS):
            tile = tiles[first : first + MAX_ACCUMULATORS]
            regs = [cgutils.alloca_once(builder, _vec(w)) for _, _, w in tile]
            for (g, o, w), reg in zip(tile, regs, strict=True):
                builder.store(_load(builder, acc_at, g * d_count + o, w), reg)
            with cgutils.for_range(builder, n) as loop:
                j = loop.index
                offset_at = builder.add(offsets_at, builder.shl(j, ir.Constant(I64, 3)))
                row = builder.add(base_at, builder.load(_pointer(builder, offset_at, I64)))
                p_j = builder.add(p_at, builder.shl(j, ir.Constant(I64, 2)))
                weights, values = {}, {}
                for (g, o, w), reg in zip(tile, regs, strict=True):
                    if (g, w) not in weights:
                        scalar_at = builder.add(p_j, ir.Constant(I64, 4 * g * stride))
                        weights[g, w] = _splat(builder, builder.load(_pointer(builder, scalar_at, F32)), w)
                    if o not in values:
                        values[o] = _load(builder, row, o, w)
                    builder.store(_fma(builder, weights[g, w], values[o], builder.load(reg)), reg)
            for (g, o, _), reg in zip(tile, regs, strict=True):
                _store(builder, builder.load(reg), acc_at, g * d_count + o)
        return context.get_dummy_value()

    sig = types.void(types.intp, types.intp, types.intp, types.intp, types.intp, group, dim, p_stride)
    return sig, codegen


def _exp(builder: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """e**x for x <= 0 to about 1 ulp: x = n ln 2 + r, Taylor on |r| <= ln 2 / 2, then n into the exponent.

    x under -87 counts as -87 (1.6e-38), NaN stays NaN.
    """
    w = x.type.count
    nan = builder.fcmp_unordered("uno", x, x)
    given, floor = x, _constant(w, -87.0)
    x = builder.select(builder.fcmp_ordered(">", x, floor), x, floor)
    n = _call(builder, f"llvm.rint.v{w}f32", _vec(w), [builder.fmul(x, _constant(w, 1.4426950408889634))])
    r = _fma(builder, n, _constant(w, -0.693359375), x)  # ln 2 in two parts, the first exact in n * part
    r = _fma(builder, n, _constant(w, 2.12194440e-4), r)
    poly = _constant(w, 1 / 5040)
    for divisor in (720, 120, 24, 6, 2, 1, 1):
        poly = _fma(builder, poly, r, _constant(w, 1 / divisor))
    ints = ir.VectorType(I32, w)
    bits = builder.shl(builder.fptosi(n, ints), ir.Constant(ints, [23] * w))
    return builder.select(
        nan, given, builder.bitcast(builder.add(builder.bitcast(poly, ints), bits), _vec(w))
    )


@intrinsic
def exp_minus(typingctx, s, top, blocks):
    """In place ``s[i] = exp(s[i] - top)`` over ``blocks * 16`` floats, all <= top; returns their sum.

    Differences under -87 count as -87 (1.6e-38); NaN stays NaN.
    """

    def codegen(context, builder, signature, args):
        s_at, top_value, n = args
        total = cgutils.alloca_once_value(builder, _constant(LANES, 0.0))
        tops = _splat(builder, top_value, LANES)
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            e = _exp(builder, builder.fsub(_load(builder, at, 0, LANES), tops))
            _store(builder, e, at, 0)
            builder.store(builder.fadd(builder.load(total), e), total)
        return _sum(builder, builder.load(total))

    return types.float32(types.intp, types.float32, types.intp), codegen


@intrinsic
def softcap_of(typingctx, s, cap, blocks):
    """In place ``s[i] = cap * tanh(s[i] / cap)`` over ``blocks * 16`` floats."""

    def codegen(context, builder, signature, args):
        s_at, cap_value, n = args
        caps = _splat(builder, cap_value, LANES)
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            y = builder.fdiv(_load(builder, at, 0, LANES), caps)
            size = _call(builder, f"llvm.fabs.v{LANES}f32", _vec(LANES), [y])
            e = _exp(builder, builder.fmul(size, _constant(LANES, -2.0)))  # tanh|y| = (1 - e) / (1 + e)
            one = _constant(LANES, 1.0)
            tanh = builder.fdiv(builder.fsub(one, e), builder.fadd(one, e))
            signed = _call(builder, f"llvm.copysign.v{LANES}f32", _vec(LANES), [tanh, y])
            _store(builder, builder.fmul(signed, caps), at, 0)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp), codegen


@intrinsic
def max_of(typingctx, s, blocks):
    """The largest of ``blocks * 16`` floats."""

    def codegen(context, builder, signature, args):
        s_at, n = args
        best = cgutils.alloca_once_value(builder, _constant(LANES, float("-inf")))
        with cgutils.for_range(builder, n) as loop:
            at = builder.add(s_at, builder.shl(loop.index, ir.Constant(I64, 6)))
            here = _load(builder, at, 0, LANES)
            old = builder.load(best)
            builder.store(builder.select(builder.fcmp_ordered(">", here, old), here, old), best)
        return _call(builder, f"llvm.vector.reduce.fmax.v{LANES}f32", F32, [builder.load(best)])

    return types.float32(types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def scale_row(typingctx, source, target, factor, dim):
    """``target[:dim] = factor * source[:dim]`` (in place when the addresses are equal)."""
    d_count = dim.literal_value

    def codegen(context, builder, signature, args):
        for offset, width in _chunks(d_count):
            value = _load(builder, args[0], offset, width)
            _store(builder, builder.fmul(value, _splat(builder, args[2], width)), args[1], offset)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, dim), codegen
