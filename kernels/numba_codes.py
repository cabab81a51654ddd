"""Rows of bfloat16 and quantised rows as LLVM vectors: codes to floats and back, in registers.

Each kind of row has its own bits (kernels/quantized.py says what they mean). A loaded value is
``code x unit``; ``UNIT`` is folded into the scale by the caller:

    bfloat16        is the upper half of a float32

    8-bit integer   sign-extend, convert
    4-bit integer   shift to the top of 32 bits and arithmetically back, convert
    e5m2            is the upper byte of a float16, which the machine converts, or a shift and a product
    e4m3            its exponent and mantissa are those of a float16 with 2**-8 of the value, so that
                    subnormals need no case of their own; NaN is put in place by a select
"""

from __future__ import annotations

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from kvbench_kernels.kv_formats import FP8_E4M3, FP8_E5M2, INT4, INT8, KVFormat
from kvbench_kernels.numba_memory import F32, I8, I16, I32, I64, compiles_for, pointer
from kvbench_kernels.numba_vectors import (
    LANES,
    call,
    chunks,
    constant,
    ints,
    load,
    load_bf16,
    splat,
    store,
    store_bf16,
    vec,
)

# Kinds of rows, plain ints because kernels close over them; 0 is float32.
KIND_FLOAT, KIND_INT8, KIND_INT4, KIND_E4M3, KIND_E5M2, KIND_BF16 = range(6)
KIND_OF: dict[KVFormat, int] = {INT8: KIND_INT8, INT4: KIND_INT4, FP8_E4M3: KIND_E4M3, FP8_E5M2: KIND_E5M2}
PER_HEAD_KINDS = (KIND_INT8, KIND_INT4)  # whose scale is per token and head
UNIT = {KIND_FLOAT: 1.0, KIND_BF16: 1.0, KIND_INT8: 1.0, KIND_INT4: 1.0, KIND_E4M3: 256.0, KIND_E5M2: 1.0}
_LARGEST = {KIND_INT8: 127.0, KIND_INT4: 7.0, KIND_E4M3: 448.0, KIND_E5M2: 57344.0}


def row_code_bytes(kind: int, dim: int) -> int:
    """Bytes of the ``dim`` values of one token's head."""
    if kind in (KIND_FLOAT, KIND_BF16):
        return (4 if kind == KIND_FLOAT else 2) * dim
    return (dim + 1) // 2 if kind == KIND_INT4 else dim


def pieces_of(kind: int, dim: int) -> list[tuple[int, int]]:
    """Cut a row into vectors (offset, width). No int4 vector straddles the halves; those that share bytes are
    neighbours.
    """
    if kind != KIND_INT4:
        return chunks(dim)
    half = (dim + 1) // 2
    high = [(half + offset, width) for offset, width in chunks(dim - half)]
    return sorted(chunks(half) + high, key=lambda piece: (piece[0] % half, piece[0]))


def _bytes_at(builder: ir.IRBuilder, address: ir.Value, first: int, width: int) -> ir.Value:
    place = builder.add(address, ir.Constant(I64, first)) if first else address
    return builder.load(pointer(builder, place, ir.VectorType(I8, width)), align=1)


def load_values(builder: ir.IRBuilder, address: ir.Value, dim: int, offset: int, width: int, kind: int) -> ir.Value:
    """Values offset..offset+width-1 (a piece of ``pieces_of``) of the row at ``address``, as floats without scale."""
    if kind == KIND_FLOAT:
        return load(builder, address, offset, width)
    if kind == KIND_BF16:
        return load_bf16(builder, address, offset, width)
    if kind == KIND_INT4:
        half = (dim + 1) // 2
        low = offset < half
        codes = builder.sext(
            _bytes_at(builder, address, offset if low else offset - half, width), ir.VectorType(I32, width)
        )
        if low:
            codes = builder.shl(codes, ints(I32, width, 28))
        return builder.sitofp(builder.ashr(codes, ints(I32, width, 28 if low else 4)), vec(width))
    codes = _bytes_at(builder, address, offset, width)
    if kind == KIND_INT8:
        return builder.sitofp(builder.sext(codes, ir.VectorType(I32, width)), vec(width))
    return _load_fp8(builder, address, dim, offset, width, kind)


def store_values(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, element: int, kind: int) -> None:
    """Write floats as KIND_FLOAT or KIND_BF16."""
    (store_bf16 if kind == KIND_BF16 else store)(builder, value, address, element)


def _load_fp8(builder: ir.IRBuilder, address: ir.Value, dim: int, offset: int, width: int, kind: int) -> ir.Value:
    """Load fp8 values. Two neighbouring pieces build the same 32-wide code, of which LLVM keeps one."""
    first = offset // 32 * 32
    paired = width == LANES and first + 32 <= dim
    w, start = (32, first) if paired else (width, offset)
    codes = _bytes_at(builder, address, start, w)
    if kind == KIND_E5M2:
        bits = builder.shl(builder.zext(codes, ir.VectorType(I16, w)), ints(I16, w, 8))
    else:
        nan = builder.icmp_unsigned("==", builder.and_(codes, ints(I8, w, 0x7F)), ints(I8, w, 0x7F))
        bits = builder.shl(builder.sext(codes, ir.VectorType(I16, w)), ints(I16, w, 7))
        bits = builder.and_(bits, ints(I16, w, 0xBFFF))  # the sign twice: once as float16's highest exponent bit
        bits = builder.select(nan, ints(I16, w, 0x7E00), bits)
    if paired:
        mine = ir.Constant(ir.VectorType(I32, LANES), list(range(offset - first, offset - first + LANES)))
        bits = builder.shuffle_vector(bits, ir.Constant(bits.type, ir.Undefined), mine)
    return _half_to_float(builder, bits)


def _converts_float16() -> bool:
    """Tests whether float16 to float32 is an instruction here; else LLVM calls a function that Numba lacks."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return True
    return compiles_for("f16c")


def _half_to_float(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Convert float16 bits (i16 vector) to floats."""
    w = bits.type.count
    if _converts_float16():
        return builder.fpext(builder.bitcast(bits, ir.VectorType(ir.HalfType(), w)), vec(w))
    words = ir.VectorType(I32, w)
    wide = builder.zext(bits, words)
    size = builder.and_(wide, ints(I32, w, 0x7FFF))
    # the bits in float32's place are the value over 2**112, subnormals included; only NaN and infinity are not
    value = builder.bitcast(builder.shl(size, ints(I32, w, 13)), vec(w))
    value = builder.bitcast(builder.fmul(value, constant(w, 2.0**112)), words)
    special = builder.icmp_unsigned(">=", size, ints(I32, w, 0x7C00))
    value = builder.select(special, builder.or_(value, ints(I32, w, 0x7FC00000)), value)
    sign = builder.shl(builder.and_(wide, ints(I32, w, 0x8000)), ints(I32, w, 16))
    return builder.bitcast(builder.or_(value, sign), vec(w))


def _encode_fp8(builder: ir.IRBuilder, y: ir.Value, kind: int) -> ir.Value:
    """Convert floats to i32 with the fp8 bits, ties to even; the caller has clamped to the finite range.

    Normal results: add half a unit less one plus the last kept bit, then cut. Subnormal ones: adding a float
    whose unit in the last place is the format's smallest step makes the machine round.
    """
    w, words = y.type.count, ir.VectorType(I32, y.type.count)
    cut, bias = (20, 7) if kind == KIND_E4M3 else (21, 15)  # mantissa bits dropped, exponent bias
    bits = builder.bitcast(y, words)
    size = builder.and_(bits, ints(I32, w, 0x7FFFFFFF))
    last = builder.and_(builder.lshr(size, ints(I32, w, cut)), ints(I32, w, 1))
    rounding = ints(I32, w, (1 << (cut - 1)) - 1 - ((127 - bias) << 23))
    normal = builder.lshr(builder.add(builder.add(size, rounding), last), ints(I32, w, cut))
    magic = (127 - bias + cut + 1) << 23
    sum_ = builder.fadd(builder.bitcast(size, vec(w)), builder.bitcast(ints(I32, w, magic), vec(w)))
    subnormal = builder.sub(builder.bitcast(sum_, words), ints(I32, w, magic))
    small = builder.icmp_unsigned("<", size, ints(I32, w, (128 - bias) << 23))
    code = builder.select(small, subnormal, normal)
    code = builder.select(builder.fcmp_unordered("uno", y, y), ints(I32, w, 0x7F), code)
    sign = builder.and_(builder.lshr(bits, ints(I32, w, 24)), ints(I32, w, 0x80))
    return builder.or_(code, sign)


def _encode(builder: ir.IRBuilder, x: ir.Value, scale: ir.Value, kind: int) -> ir.Value:
    """Convert floats to i32 codes of x / scale, clamped, ties to even."""
    w, top = x.type.count, constant(x.type.count, _LARGEST[kind])
    y = builder.fdiv(x, splat(builder, scale, w))
    y = builder.select(builder.fcmp_ordered(">", y, top), top, y)
    bottom = constant(w, -_LARGEST[kind])
    y = builder.select(builder.fcmp_ordered("<", y, bottom), bottom, y)
    if kind not in PER_HEAD_KINDS:
        return _encode_fp8(builder, y, kind)
    return builder.fptosi(call(builder, f"llvm.rint.v{w}f32", vec(w), [y]), ir.VectorType(I32, w))


@intrinsic(prefer_literal=True)
def largest_of(typingctx, x, dim):
    """The largest absolute value of ``x[:dim]``; NaN if one is NaN (their bits are the largest)."""
    d_count = dim.literal_value

    def codegen(context, builder, signature, args):
        best = ir.Constant(I32, 0)
        for offset, width in chunks(d_count):
            words = ir.VectorType(I32, width)
            size = builder.and_(
                builder.bitcast(load(builder, args[0], offset, width), words), ints(I32, width, 0x7FFFFFFF)
            )
            name = f"llvm.vector.reduce.umax.v{width}i32"
            reduce = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [words]), name)
            here = builder.call(reduce, [size])
            best = builder.select(builder.icmp_unsigned(">", here, best), here, best)
        return builder.bitcast(best, F32)

    return types.float32(types.intp, dim), codegen


@intrinsic(prefer_literal=True)
def encode_row(typingctx, x, codes, scale, dim, kind):
    """Write the codes of the floats ``x[:dim]`` over ``scale`` (not 0) to the address ``codes``."""
    d_count, k = dim.literal_value, kind.literal_value

    def codegen(context, builder, signature, args):
        x_at, codes_at, scale_value = args[:3]
        half = (d_count + 1) // 2 if k == KIND_INT4 else d_count
        for offset, width in chunks(half):
            bits = _encode(builder, load(builder, x_at, offset, width), scale_value, k)
            if k == KIND_INT4:
                bits = builder.and_(bits, ints(I32, width, 15))
            narrow = builder.trunc(bits, ir.VectorType(I8, width))
            builder.store(
                narrow, pointer(builder, builder.add(codes_at, ir.Constant(I64, offset)), narrow.type), align=1
            )
        for offset, width in chunks(d_count - half):  # the high halves of int4, over the low ones
            bits = _encode(builder, load(builder, x_at, half + offset, width), scale_value, k)
            high = builder.trunc(builder.shl(bits, ints(I32, width, 4)), ir.VectorType(I8, width))
            joint = builder.or_(high, _bytes_at(builder, codes_at, offset, width))
            builder.store(joint, pointer(builder, builder.add(codes_at, ir.Constant(I64, offset)), joint.type), align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, dim, kind), codegen


@intrinsic(prefer_literal=True)
def decode_row(typingctx, codes, target, factor, dim, kind):
    """Write the floats ``factor x value`` of the row at ``codes`` to ``target``."""
    d_count, k = dim.literal_value, kind.literal_value

    def codegen(context, builder, signature, args):
        codes_at, target_at, factor_value = args[:3]
        for offset, width in pieces_of(k, d_count):
            value = load_values(builder, codes_at, d_count, offset, width, k)
            store(builder, builder.fmul(value, splat(builder, factor_value, width)), target_at, offset)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32, dim, kind), codegen
