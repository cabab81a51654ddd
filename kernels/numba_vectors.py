"""LLVM vectors for the CPU kernels: the building blocks of the intrinsics in numba_simd.py and numba_codes.py.

Written as explicit ``<16 x float>`` code and not left to the loop vectoriser: with raw pointers the
vectoriser cannot prove that accumulators and KV do not overlap, and Numba has no vector exp without
SVML. LLVM splits the vectors to what the machine has (AVX-512, AVX2, NEON), so this is portable.
Addresses are byte addresses in ``intp``.
"""

from __future__ import annotations

from collections.abc import Iterator

from llvmlite import ir
from numba.core import cgutils

from kvbench_kernels.numba_memory import F32, I16, I32, I64, compiles_for, pointer

LANES = 16
# Sums may be reordered and fused; nnan/ninf are left out, so NaN and inf keep their meaning.
FAST = ("reassoc", "contract", "nsz")


def chunks(dim: int) -> list[tuple[int, int]]:
    """Cut ``dim`` into pieces (offset, width): power-of-two vectors of at most LANES."""
    pieces, offset, width = [], 0, LANES
    while offset < dim:
        if dim - offset >= width:
            pieces.append((offset, width))
            offset += width
        else:
            width //= 2
    return pieces


def vec(width: int) -> ir.VectorType:
    return ir.VectorType(F32, width)


def load(builder: ir.IRBuilder, address: ir.Value, element: int, width: int) -> ir.Value:
    place = builder.add(address, ir.Constant(I64, 4 * element)) if element else address
    return builder.load(pointer(builder, place, vec(width)), align=4)


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, element: int) -> None:
    place = builder.add(address, ir.Constant(I64, 4 * element)) if element else address
    builder.store(value, pointer(builder, place, value.type), align=4)


class BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite has no class for."""

    def _to_string(self) -> str:
        return "bfloat"


def ints(kind: ir.IntType, width: int, value: int) -> ir.Constant:
    return ir.Constant(ir.VectorType(kind, width), [value] * width)


def load_bf16(builder: ir.IRBuilder, address: ir.Value, element: int, width: int) -> ir.Value:
    """bfloat16 values as floats: they are the upper halves."""
    place = builder.add(address, ir.Constant(I64, 2 * element)) if element else address
    codes = builder.load(pointer(builder, place, ir.VectorType(I16, width)), align=2)
    wide = builder.shl(builder.zext(codes, ir.VectorType(I32, width)), ints(I32, width, 16))
    return builder.bitcast(wide, vec(width))


def store_bf16(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, element: int) -> None:
    """Floats rounded to bfloat16, ties to even. NaN stays NaN."""
    place = builder.add(address, ir.Constant(I64, 2 * element)) if element else address
    width = value.type.count
    if width == LANES and compiles_for("avx512bf16"):  # one instruction; it takes subnormal numbers for 0
        narrow = ir.VectorType(BFloat(), width)
        halves = call(builder, "llvm.x86.avx512bf16.cvtneps2bf16.512", narrow, [value])
    else:
        bits = builder.bitcast(value, ir.VectorType(I32, width))
        last = builder.and_(builder.lshr(bits, ints(I32, width, 16)), ints(I32, width, 1))
        rounded = builder.add(builder.add(bits, ints(I32, width, 0x7FFF)), last)
        rounded = builder.select(builder.fcmp_unordered("uno", value, value), ints(I32, width, 0x7FC00000), rounded)
        halves = builder.trunc(builder.lshr(rounded, ints(I32, width, 16)), ir.VectorType(I16, width))
    builder.store(halves, pointer(builder, place, halves.type), align=2)


def splat(builder: ir.IRBuilder, scalar: ir.Value, width: int) -> ir.Value:
    nothing = ir.Constant(ir.VectorType(scalar.type, width), ir.Undefined)
    one = builder.insert_element(nothing, scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, nothing, ints(I32, width, 0))


def constant(width: int, value: float) -> ir.Constant:
    return ir.Constant(vec(width), [value] * width)


def call(builder: ir.IRBuilder, name: str, result: ir.Type, args: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args, fastmath=FAST)


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    width = a.type.count
    return call(builder, f"llvm.fma.v{width}f32", vec(width), [a, b, c])


def cases(builder: ir.IRBuilder, value: ir.Value, last: int) -> Iterator[int]:
    """Yield 1..last, each to emit the code that runs where ``value`` is that number."""
    done = builder.append_basic_block("cases.done")
    choice = builder.switch(value, done)
    for number in range(1, last + 1):
        body = builder.append_basic_block(f"cases.{number}")
        choice.add_case(ir.Constant(I64, number), body)
        builder.position_at_end(body)
        yield number
        builder.branch(done)
    builder.position_at_end(done)


def sum_of(builder: ir.IRBuilder, vector: ir.Value) -> ir.Value:
    width = vector.type.count
    if width == 1:
        return builder.extract_element(vector, ir.Constant(I32, 0))
    args = [ir.Constant(F32, 0.0), vector]
    return call(builder, f"llvm.vector.reduce.fadd.v{width}f32", F32, args)
