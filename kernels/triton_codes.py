"""Turns codes of a quantised cache into operands of ``tl.dot``, in registers.

That takes one to two instructions a value.

A row of codes is loaded as words of 16 bits, because those are what ``ldmatrix`` moves and transposes: a tile of bytes
would be read from shared memory byte by byte. A word holds a column of each *part*: of two parts (a byte each: fp8,
int8) or of four (a half byte each: int4). ``unpack`` makes one operand of each part. So q is split into the columns
that each part meets, K's parts are added up by as many dots, and each of V's parts has an accumulator of its own.

fp8 becomes float16, which holds every value of it. An integer code with its sign flipped is u = code + BIAS >= 0, and
16 bits that hold u are the float16 u / 2**24, subnormal, or the bfloat16 u / 2**133: nothing is converted. K's operand
is that float16, and ``score_tile`` takes BIAS * sum(q) off again. V's becomes (u - BIAS) * VALUE_UNIT by one FMA.

The same integer steps are written twice: as instructions of PTX on two words at a time, because Triton's would work on
one and pack the halves again, and in Triton's language for the interpreter and for models in float32.
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

FP8_UNIT = 256.0  # what ``fp8_value`` leaves out where it has no hardware conversion of e4m3
ASSEMBLER = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1")  # the interpreter has none

# Each takes two words, $2 or of int4 $4, and gives the two columns of each part, $0 and on. lop3 by 0x6A: (a & b) ^ c.
E5M2 = tl.constexpr("""{
prmt.b32 $0, $2, 0, 0x2404;
and.b32 $1, $2, 0xFF00FF00;
}""")
E4M3 = tl.constexpr("""{
.reg .b32 x;
.reg .b16 low, high;
prmt.b32 x, $2, 0, 0x3120;
mov.b32 {low, high}, x;
cvt.rn.f16x2.e4m3x2 $0, low;
cvt.rn.f16x2.e4m3x2 $1, high;
}""")
# The bits of e4m3 shifted into place are a float16 of 1 / FP8_UNIT the value. 0x7F, NaN, carries into the exponent.
E4M3_BY_BITS = tl.constexpr("""{
.reg .b32 x, y, sign;
and.b32 x, $2, 0x007F007F;
shl.b32 x, x, 7;
add.u32 y, x, 0x00800080;
and.b32 y, y, 0x40004000;
or.b32 x, x, y;
shl.b32 sign, $2, 8;
and.b32 sign, sign, 0x80008000;
or.b32 $0, x, sign;
shr.u32 x, $2, 1;
and.b32 x, x, 0x3F803F80;
add.u32 y, x, 0x00800080;
and.b32 y, y, 0x40004000;
or.b32 x, x, y;
and.b32 sign, $2, 0x80008000;
or.b32 $1, x, sign;
}""")
INT8_KEYS = tl.constexpr("""{
.reg .b32 x;
xor.b32 x, $2, 0x80808080;
prmt.b32 $0, x, 0, 0x4240;
prmt.b32 $1, x, 0, 0x4341;
}""")
INT4_KEYS = tl.constexpr("""{
.reg .b32 x;
lop3.b32 $0, $4, 0x000F000F, 0x00080008, 0x6A;
lop3.b32 $1, $4, 0x00F000F0, 0x00800080, 0x6A;
shr.u32 x, $4, 8;
lop3.b32 $2, x, 0x000F000F, 0x00080008, 0x6A;
lop3.b32 $3, x, 0x00F000F0, 0x00800080, 0x6A;
}""")
# u / 2**133 * 2**124 - 128 / 2**9; of a high half byte 16 u, so * 2**120.
INT8_VALUES_BF16 = tl.constexpr("""{
.reg .b32 x, y, up, bias;
mov.b32 up, 0x7D807D80;
mov.b32 bias, 0xBE80BE80;
xor.b32 x, $2, 0x80808080;
prmt.b32 y, x, 0, 0x4240;
fma.rn.bf16x2 $0, y, up, bias;
prmt.b32 y, x, 0, 0x4341;
fma.rn.bf16x2 $1, y, up, bias;
}""")
INT4_VALUES_BF16 = tl.constexpr("""{
.reg .b32 x, y, up, up_high, bias;
mov.b32 up, 0x7D807D80;
mov.b32 up_high, 0x7B807B80;
mov.b32 bias, 0xBC80BC80;
lop3.b32 y, $4, 0x000F000F, 0x00080008, 0x6A;
fma.rn.bf16x2 $0, y, up, bias;
lop3.b32 y, $4, 0x00F000F0, 0x00800080, 0x6A;
fma.rn.bf16x2 $1, y, up_high, bias;
shr.u32 x, $4, 8;
lop3.b32 y, x, 0x000F000F, 0x00080008, 0x6A;
fma.rn.bf16x2 $2, y, up, bias;
lop3.b32 y, x, 0x00F000F0, 0x00800080, 0x6A;
fma.rn.bf16x2 $3, y, up_high, bias;
}""")
# The same of float16: u / 2**24 * 2**15.
INT8_VALUES_FP16 = tl.constexpr("""{
.reg .b32 x, y, up, bias;
mov.b32 up, 0x78007800;
mov.b32 bias, 0xB400B400;
xor.b32 x, $2, 0x80808080;
prmt.b32 y, x, 0, 0x4240;
fma.rn.f16x2 $0, y, up, bias;
prmt.b32 y, x, 0, 0x4341;
fma.rn.f16x2 $1, y, up, bias;
}""")
INT4_VALUES_FP16 = tl.constexpr("""{
.reg .b32 x, y, up, up_high, bias;
mov.b32 up, 0x78007800;
mov.b32 up_high, 0x68006800;
mov.b32 bias, 0xA400A400;
lop3.b32 y, $4, 0x000F000F, 0x00080008, 0x6A;
fma.rn.f16x2 $0, y, up, bias;
lop3.b32 y, $4, 0x00F000F0, 0x00800080, 0x6A;
fma.rn.f16x2 $1, y, up_high, bias;
shr.u32 x, $4, 8;
lop3.b32 y, x, 0x000F000F, 0x00080008, 0x6A;
fma.rn.f16x2 $2, y, up, bias;
lop3.b32 y, x, 0x00F000F0, 0x00800080, 0x6A;
fma.rn.f16x2 $3, y, up_high, bias;
}""")


@triton.constexpr_function
def is_integer(KIND):
    """Tests whether the cache's codes are integers, with a scale per token and head."""
    return KIND == "int8_per_token_head" or KIND == "int4_per_token_head"


@triton.jit
def split_columns(x, KIND: tl.constexpr):
    """Splits x [M, columns] into one tensor [M, words] a part.

    Word w holds the columns from w * parts on, one of each part.
    """
    if KIND == "auto":
        return (x,)
    elif KIND == "int4_per_token_head":
        low, high = tl.split(x.reshape([x.shape[0], x.shape[1] // 4, 2, 2]))
        low_0, low_1 = tl.split(low)
        high_0, high_1 = tl.split(high)
        return low_0, high_0, low_1, high_1
    else:
        return tl.split(x.reshape([x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def join_columns(parts, KIND: tl.constexpr):
    """The inverse of ``split_columns``."""
    if KIND == "auto":
        return parts[0]
    elif KIND == "int4_per_token_head":
        x = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))
        return x.reshape([x.shape[0], x.shape[1] * 4])
    else:
        x = tl.join(parts[0], parts[1])
        return x.reshape([x.shape[0], x.shape[1] * 2])


@triton.jit
def assemble(words, CODE: tl.constexpr, dtype: tl.constexpr, KIND: tl.constexpr):
    """The parts of ``words`` as CODE makes them."""
    if KIND == "int4_per_token_head":
        a, b, c, d = tl.inline_asm_elementwise(
            CODE, "=r,=r,=r,=r,r", [words], (tl.int16, tl.int16, tl.int16, tl.int16), is_pure=True, pack=2
        )
        c, d = c.to(dtype, bitcast=True), d.to(dtype, bitcast=True)
        return a.to(dtype, bitcast=True), b.to(dtype, bitcast=True), c, d
    else:
        a, b = tl.inline_asm_elementwise(CODE, "=r,=r,r", [words], (tl.int16, tl.int16), is_pure=True, pack=2)
        return a.to(dtype, bitcast=True), b.to(dtype, bitcast=True)


@triton.jit
def fp8_value(byte, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """Codes 0..255 as int16 -> float16, for e4m3 without FP8_HARDWARE of 1 / FP8_UNIT the value."""
    if KIND == "fp8_e5m2":
        return (byte << 8).to(tl.float16, bitcast=True)
    elif FP8_HARDWARE:
        return byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        size = (byte & 0x7F) << 7
        half = ((byte & 0x80) << 8) | size | ((size + 0x80) & 0x4000)
        return half.to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def unpack_keys(words, dtype: tl.constexpr, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """Words of K (int16) -> its parts in dtype (float16 or float32): fp8's values, an integer's u / 2**24, or 16 times
    as much in the high half bytes of int4."""
    if KIND == "auto":
        return (words,)
    elif dtype == tl.float32 or not ASSEMBLER:
        if KIND == "int4_per_token_head":
            low, high = words ^ 0x88, (words >> 8) ^ 0x88
            low_0, high_0 = (low & 0x0F).to(tl.float16, bitcast=True), (low & 0xF0).to(tl.float16, bitcast=True)
            low_1, high_1 = (high & 0x0F).to(tl.float16, bitcast=True), (high & 0xF0).to(tl.float16, bitcast=True)
            return low_0.to(dtype), high_0.to(dtype), low_1.to(dtype), high_1.to(dtype)
        elif KIND == "int8_per_token_head":
            low, high = (words ^ 0x80) & 0xFF, ((words >> 8) ^ 0x80) & 0xFF
            return low.to(tl.float16, bitcast=True).to(dtype), high.to(tl.float16, bitcast=True).to(dtype)
        else:
            low, high = words & 0xFF, (words >> 8) & 0xFF
            return fp8_value(low, KIND, FP8_HARDWARE).to(dtype), fp8_value(high, KIND, FP8_HARDWARE).to(dtype)
    elif KIND == "int4_per_token_head":
        return assemble(words, INT4_KEYS, dtype, KIND)
    elif KIND == "int8_per_token_head":
        return assemble(words, INT8_KEYS, dtype, KIND)
    elif KIND == "fp8_e5m2":
        return assemble(words, E5M2, dtype, KIND)
    elif FP8_HARDWARE:
        return assemble(words, E4M3, dtype, KIND)
    else:
        return assemble(words, E4M3_BY_BITS, dtype, KIND)


@triton.jit
def unpack_values(words, dtype: tl.constexpr, KIND: tl.constexpr, FP8_HARDWARE: tl.constexpr):
    """Words of V (int16) -> its parts in dtype: fp8's values, an integer's code / 2**9."""
    if not is_integer(KIND):
        return unpack_keys(words, dtype, KIND, FP8_HARDWARE)
    elif dtype == tl.float32 or not ASSEMBLER:
        keys = unpack_keys(words, tl.float32, KIND, FP8_HARDWARE)
        if KIND == "int8_per_token_head":
            return (keys[0] * 32768.0 - 0.25).to(dtype), (keys[1] * 32768.0 - 0.25).to(dtype)
        else:
            low_0, high_0 = (keys[0] * 32768.0 - 0.015625).to(dtype), (keys[1] * 2048.0 - 0.015625).to(dtype)
            low_1, high_1 = (keys[2] * 32768.0 - 0.015625).to(dtype), (keys[3] * 2048.0 - 0.015625).to(dtype)
            return low_0, high_0, low_1, high_1
    elif KIND == "int8_per_token_head":
        return assemble(words, INT8_VALUES_BF16 if dtype == tl.bfloat16 else INT8_VALUES_FP16, dtype, KIND)
    else:
        return assemble(words, INT4_VALUES_BF16 if dtype == tl.bfloat16 else INT4_VALUES_FP16, dtype, KIND)


@triton.constexpr_function
def row_bytes(DIM, KIND):
    """Elements of the cache that one token's KV head takes."""
    return (DIM + 1) // 2 if KIND == "int4_per_token_head" else DIM


@triton.constexpr_function
def value_dtype(model, KIND):
    """The dtype of V's operand: weights of fp8 are scaled for float16, those of an integer have scales of any size."""
    if KIND == "auto" or is_integer(KIND) or model == tl.float32:
        return model
    else:
        return tl.float16


@triton.constexpr_function
def weight_exponent(KIND):
    """Weights are 2**this as large as they should be: float16 then holds what is 2**29 below the largest in full."""
    return 15.0 if KIND == "fp8_e4m3" or KIND == "fp8_e5m2" else 0.0


@triton.constexpr_function
def weight_unit(KIND):
    """The factor that makes the sum of such weights right again."""
    return 2.0**-15 if KIND == "fp8_e4m3" or KIND == "fp8_e5m2" else 1.0


@triton.constexpr_function
def value_unit(KIND):
    """The factor that makes the sum of weights times V's operand right again: an integer's is code / 2**9."""
    return 512.0 if KIND == "int8_per_token_head" or KIND == "int4_per_token_head" else weight_unit(KIND)


@triton.jit
def query_parts(q, score_scale, KIND: tl.constexpr):
    """Returns the parts of q [M, columns], and by what their products with K's parts become scores.

    The scores, q x k * score_scale, are (parts x K's parts) * a + b, with the second and third result a and b [M, 1].
    Each row of float16 parts is scaled by a power of two that takes its largest value to 2**14..2**15: all that
    float16 loses of bfloat16 is what lies 2**29 and more below the largest.
    """
    if KIND == "auto":
        return (q,), score_scale, 0.0
    else:
        x = q.to(tl.float32)
        a = tl.zeros([q.shape[0]], tl.float32) + score_scale
        dtype: tl.constexpr = tl.float32 if q.dtype == tl.float32 else tl.float16
        if dtype == tl.float16:
            exponent = tl.maximum(tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) >> 23, 15)  # 255: infinity or NaN
            x = x * ((268 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
            a = a * ((exponent - 14) << 23).to(tl.float32, bitcast=True)
        parts = split_columns(x, KIND)
        if KIND == "int4_per_token_head":
            parts = (
                parts[0].to(dtype),
                (parts[1] * 0.0625).to(dtype),
                parts[2].to(dtype),
                (parts[3] * 0.0625).to(dtype),
            )
            low = parts[0].to(tl.float32) + parts[2].to(tl.float32)
            high = parts[1].to(tl.float32) + parts[3].to(tl.float32)
            return parts, a[:, None] * 16777216.0, (a * -8.0 * tl.sum(low + high * 16.0, 1))[:, None]
        elif KIND == "int8_per_token_head":
            parts = (parts[0].to(dtype), parts[1].to(dtype))
            both = parts[0].to(tl.float32) + parts[1].to(tl.float32)
            return parts, a[:, None] * 16777216.0, (a * -128.0 * tl.sum(both, 1))[:, None]
        else:
            return (parts[0].to(dtype), parts[1].to(dtype)), a[:, None], 0.0


@triton.jit
def value_parts(acc, KIND: tl.constexpr):
    """The accumulator [M, columns] of its parts, without the units of weights and operands."""
    return join_columns(acc, KIND) * value_unit(KIND)
