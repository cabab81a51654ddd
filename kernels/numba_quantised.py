"""Stores and loads rows of a quantised cache on CPU, in Numba, on one thread. Bit for bit as QuantizedKV.store."""

from __future__ import annotations

import math
import struct
import threading
from functools import cache

import numba
import torch

from kvbench_kernels.api import dense_rows
from kvbench_kernels.numba_codes import (
    KIND_BF16,
    KIND_FLOAT,
    KIND_INT4,
    KIND_OF,
    PER_HEAD_KINDS,
    UNIT,
    decode_row,
    encode_row,
    largest_of,
    row_code_bytes,
)
from kvbench_kernels.numba_memory import compile_c, fill_bytes, load_f32, load_i64, store_f32
from kvbench_kernels.quantized import SMALLEST_SCALE, QuantizedKV

(
    R_FLOATS, R_CODES, R_SCALES, R_SLOTS, R_TOKENS, R_HEADS, R_STRIDE, R_HEAD_STRIDE, R_FACTOR,
) = range(9)  # fmt: skip
# R_FLOATS: rows of floats, strides in bytes; R_SLOTS: int64; R_FACTOR: one float32, fp8's scale.
_ARGS = struct.Struct("8qf4x")
KIND_OF_DTYPE = {torch.float32: KIND_FLOAT, torch.bfloat16: KIND_BF16}  # what a model computes in


@cache
def build_store(kind: int, dim: int):
    """Compile the function that quantises rows of ``dim`` floats into their slots; slot < 0 is skipped."""
    row_bytes, per_head = row_code_bytes(kind, dim), kind in PER_HEAD_KINDS
    largest_code, smallest = (7.0 if kind == KIND_INT4 else 127.0), SMALLEST_SCALE

    def store(args):
        heads, scales = load_i64(args + 8 * R_HEADS), load_i64(args + 8 * R_SCALES)
        scale = load_f32(args + 8 * R_FACTOR)
        for t in range(load_i64(args + 8 * R_TOKENS)):
            slot = load_i64(load_i64(args + 8 * R_SLOTS) + 8 * t)
            if slot < 0:
                continue
            for n in range(heads):
                row = load_i64(args + 8 * R_FLOATS) + t * load_i64(args + 8 * R_STRIDE)
                row += n * load_i64(args + 8 * R_HEAD_STRIDE)
                codes = load_i64(args + 8 * R_CODES) + (slot * heads + n) * row_bytes
                if per_head:
                    scale = largest_of(row, dim) / numba.float32(largest_code)
                    if scale < smallest:
                        scale = numba.float32(0.0)
                    elif not scale < math.inf:
                        scale = numba.float32(math.nan)
                    store_f32(scales + 4 * (slot * heads + n), scale)
                    if not scale > 0:
                        fill_bytes(codes, 0, row_bytes)
                        continue
                encode_row(row, codes, scale, dim, kind)

    return compile_c(store)


@cache
def build_load(kind: int, dim: int):
    """Compile the function that turns the rows of given slots into ``dim`` floats each."""
    row_bytes, per_head = row_code_bytes(kind, dim), kind in PER_HEAD_KINDS

    def load(args):
        heads, scales = load_i64(args + 8 * R_HEADS), load_i64(args + 8 * R_SCALES)
        factor = load_f32(args + 8 * R_FACTOR)
        for t in range(load_i64(args + 8 * R_TOKENS)):
            slot = load_i64(load_i64(args + 8 * R_SLOTS) + 8 * t)
            for n in range(heads):
                row = load_i64(args + 8 * R_FLOATS) + t * load_i64(args + 8 * R_STRIDE)
                row += n * load_i64(args + 8 * R_HEAD_STRIDE)
                if per_head:
                    factor = load_f32(scales + 4 * (slot * heads + n))
                decode_row(load_i64(args + 8 * R_CODES) + (slot * heads + n) * row_bytes, row, factor, dim, kind)

    return compile_c(load)


class _Args(threading.local):
    """One calling thread's argument block, kept because these calls are short."""

    def __init__(self) -> None:
        self.memory = torch.zeros(_ARGS.size, dtype=torch.uint8)
        self.view = memoryview(self.memory.numpy())
        self.address = self.memory.data_ptr()


_args = _Args()


# A cfunc's ctypes entry is made anew at each access.
@cache
def _store_entry(kind: int, dim: int):
    return build_store(kind, dim).ctypes


@cache
def _load_entry(kind: int, dim: int):
    return build_load(kind, dim).ctypes


def store_rows(cache: QuantizedKV, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Quantise ``x [T, Hkv, dim]`` into ``slots [T] int64``, skipping slots < 0."""
    x = dense_rows(x.to(torch.float32))
    kind = KIND_OF[cache.format]
    _run(_store_entry(kind, cache.dim), cache, slots, x, cache.scale)


def load_rows(cache: QuantizedKV, slots: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Dequantise the rows at ``slots [n] int64`` into ``out [n, Hkv, dim] float32``, and return it."""
    kind = KIND_OF[cache.format]
    _run(_load_entry(kind, cache.dim), cache, slots, out, cache.scale * UNIT[kind])
    return out


def _run(function, cache: QuantizedKV, slots: torch.Tensor, rows: torch.Tensor, factor: float) -> None:
    """Call ``function`` over rows ``[n, heads, dim]`` with dense last dimension; ctypes releases the GIL meanwhile."""
    assert cache.codes.is_contiguous() and rows.dtype == torch.float32 and slots.dtype == torch.int64
    stride, head_stride, _ = rows.stride()
    args = _args
    _ARGS.pack_into(
        args.view, 0,
        rows.data_ptr(), cache.codes.data_ptr(), 0 if cache.scales is None else cache.scales.data_ptr(),
        slots.data_ptr(), rows.shape[0], rows.shape[1], stride * 4, head_stride * 4, factor,
    )  # fmt: skip
    function(args.address)
