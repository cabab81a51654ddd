"""Triton's interpreter with the right arithmetic of bfloat16, with any NumPy, and without what makes it slow."""

from __future__ import annotations

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def right_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter keeps bfloat16 as bits: its dot multiplies them as integers, and its cast from float32 cuts them
    off. Hand the dot floats, and round to nearest even as chips do."""
    dot, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

    def floats(x: TensorHandle) -> TensorHandle:
        return TensorHandle(_widen(x.data), tl.float32) if x.dtype.scalar == tl.bfloat16 else x

    def create_dot(self, a, b, *args):
        return dot(self, floats(a), floats(b), *args)

    def cast_impl(self, src, dst_type):
        kinds = (src.dtype.scalar, dst_type.scalar)
        if kinds == (tl.float32, tl.bfloat16):
            return TensorHandle(_round(src.data), tl.bfloat16)
        return floats(src) if kinds == (tl.bfloat16, tl.float32) else cast(self, src, dst_type)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
    for name in ("create_fp_ext", "create_fp_trunc"):
        monkeypatch.setattr(InterpreterBuilder, name, lambda self, src, dst_type: self.cast_impl(src, dst_type))


class _Kept:
    def restore(self) -> None:
        """Nothing: see ``patch_once``."""


def patch_once() -> None:
    """Replace the functions of triton.language once in this process.

    The interpreter does it at each call of a function from a kernel and takes it back only at the kernel's end, so
    that every such call costs more than its arithmetic. Triton 3.6 takes a scalar's value by ``int`` of an array of one
    value, which NumPy 2.4 refuses (triton-lang/triton issue 9171).
    """
    patch, done = interpreter._patch_lang, set()

    def patch_new(fn):
        found = {value for value in fn.__globals__.values() if value in (tl, tl.core)}
        if found - done:
            patch(fn)
            tl.tensor.__index__ = lambda scalar: scalar.handle.data.item()
            done.update(found)
        return _Kept()

    interpreter._patch_lang = patch_new


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
