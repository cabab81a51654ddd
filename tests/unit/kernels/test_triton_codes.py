"""The instructions that unpack a quantised cache, which the interpreter cannot run: their text on every 16-bit word."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from kvbench_kernels import triton_codes

WORDS = np.arange(1 << 16, dtype=np.uint32)
PAIRS = WORDS | (np.random.default_rng(0).permutation(WORDS) << 16)  # two words an instruction, unrelated
FLOATS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def halves(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
    """The two values of ``dtype`` in each of x, as float64 [n, 2]."""
    bits = np.stack([x & 0xFFFF, x >> 16], 1).astype(np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(dtype).to(torch.float64)


def packed(values: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    bits = values.to(dtype).view(torch.int16).numpy().view(np.uint16).astype(np.uint32)
    return bits[:, 0] | (bits[:, 1] << 16)


def permuted(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
    pool = [(a >> 8 * i) & 0xFF for i in range(4)] + [(b >> 8 * i) & 0xFF for i in range(4)]
    return sum(pool[(selector >> 4 * i) & 7] << 8 * i for i in range(4))


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray, name: str) -> np.ndarray:
    dtype = FLOATS[name]
    return packed(halves(a, dtype) * halves(b, dtype) + halves(c, dtype), dtype)


def combined(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Look up each bit of the result in the low byte of ``table``, by the bits of a, b and c."""
    bits = np.arange(32, dtype=np.uint32)[:, None]
    index = (a >> bits & 1) << 2 | (b >> bits & 1) << 1 | c >> bits & 1
    return np.bitwise_or.reduce((table[0] >> index & 1) << bits)


def from_e4m3(a: np.ndarray) -> np.ndarray:
    codes = torch.from_numpy(np.stack([a & 0xFF, (a >> 8) & 0xFF], 1).astype(np.uint8)).view(torch.float8_e4m3fn)
    return packed(codes.to(torch.float32), torch.float16)


def run(code: str, parts: int) -> list[np.ndarray]:
    """What ``code`` leaves in $0 and on, of PAIRS."""
    registers = {f"${parts}": PAIRS}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(PAIRS, int(name, 0))

    for line in re.findall(r"[a-z][^;]*;|\.reg[^;]*;", code):
        if line.startswith(".reg"):
            continue
        operation, rest = line.rstrip(";").split(None, 1)
        if rest.startswith("{"):  # mov.b32 {low, high}, x
            low, high, x = re.findall(r"\w+", rest)
            registers |= {low: value(x) & 0xFFFF, high: value(x) >> 16}
            continue
        to, *names = re.split(r",\s*", rest)
        given = [value(name) for name in names]
        registers[to] = {
            "mov.b32": lambda a: a,
            "and.b32": lambda a, b: a & b,
            "or.b32": lambda a, b: a | b,
            "xor.b32": lambda a, b: a ^ b,
            "add.u32": lambda a, b: a + b,
            "shl.b32": lambda a, b: a << b,
            "shr.u32": lambda a, b: a >> b,
            "lop3.b32": combined,
            "prmt.b32": lambda a, b, c: permuted(a, b, int(c[0])),
            "cvt.rn.f16x2.e4m3x2": from_e4m3,
            "fma.rn.f16x2": lambda a, b, c: fused(a, b, c, "f16x2"),
            "fma.rn.bf16x2": lambda a, b, c: fused(a, b, c, "bf16x2"),
        }[operation](*given)
    return [registers[f"${part}"] for part in range(parts)]


def codes_of_parts(bits: int) -> list[np.ndarray]:
    """The codes [n, 2] that each part of PAIRS holds, not negative: the low bits of a byte come first."""
    words = np.stack([PAIRS & 0xFFFF, PAIRS >> 16], 1)
    return [(words >> shift) & ((1 << bits) - 1) for shift in range(0, 16, bits)]


def check(code, bits: int, dtype: torch.dtype, expected) -> None:
    parts = codes_of_parts(bits)
    for part, (found, codes) in enumerate(zip(run(code.value, len(parts)), parts, strict=True)):
        wanted = torch.as_tensor(expected(codes, part), dtype=torch.float64)
        assert torch.equal(halves(found, dtype).nan_to_num(1e9), wanted.nan_to_num(1e9)), f"part {part}"
        assert torch.equal(wanted.to(dtype).to(torch.float64).nan_to_num(1e9), wanted.nan_to_num(1e9)), "not exact"


def fp8(dtype: torch.dtype):
    return lambda codes, part: torch.from_numpy(codes.astype(np.uint8)).view(dtype).to(torch.float64)


def signed(codes: np.ndarray, bits: int) -> np.ndarray:
    return (codes.astype(np.int64) ^ (1 << (bits - 1))) - (1 << (bits - 1))


def test_fp8():
    check(triton_codes.E5M2, 8, torch.float16, fp8(torch.float8_e5m2))
    check(triton_codes.E4M3, 8, torch.float16, fp8(torch.float8_e4m3fn))
    exact = fp8(torch.float8_e4m3fn)
    check(
        triton_codes.E4M3_BY_BITS, 8, torch.float16, lambda codes, part: exact(codes, part) / triton_codes.FP8_UNIT
    )  # fmt: skip


def test_keys_of_integers_are_float16_of_the_code_without_its_sign():
    check(triton_codes.INT8_KEYS, 8, torch.float16, lambda codes, part: (signed(codes, 8) + 128) / 2.0**24)
    check(
        triton_codes.INT4_KEYS, 4, torch.float16,
        lambda codes, part: (signed(codes, 4) + 8) * (16 if part % 2 else 1) / 2.0**24,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_of_integers(dtype):
    of_8, of_4 = {
        torch.float16: (triton_codes.INT8_VALUES_FP16, triton_codes.INT4_VALUES_FP16),
        torch.bfloat16: (triton_codes.INT8_VALUES_BF16, triton_codes.INT4_VALUES_BF16),
    }[dtype]
    unit = triton_codes.value_unit("int8_per_token_head")
    check(of_8, 8, dtype, lambda codes, part: signed(codes, 8) / unit)
    check(of_4, 4, dtype, lambda codes, part: signed(codes, 4) / unit)
