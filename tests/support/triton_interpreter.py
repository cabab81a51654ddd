"""Triton's interpreter with the right arithmetic of bfloat16, with any NumPy, and without what makes it slow."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import triton.language as tl
from triton.language.semantic import TritonSemantic
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
        """Nothing: see ``make_quick``."""


def pytest_configure() -> None:
    """As a plugin of pytest (``-p``): for all checks of this process."""
    make_quick()
    right_bfloat16(pytest.MonkeyPatch())


def make_quick() -> None:
    """Take out of Triton's interpreter, once in this process, what it does again and again. The numbers are the same.

    It replaces the functions of triton.language at each call of a function from a kernel. It makes the shape, the type
    and the NumPy dtype of each value anew. It looks for integer overflow with six operations and, unless it debugs,
    drops what it finds. Triton 3.6 takes a scalar's value by ``int`` of an array of one value, which NumPy 2.4 refuses
    (triton-lang/triton issue 9171).
    """
    if interpreter._patch_lang.__name__ == "patch_new":
        return
    patch, done = interpreter._patch_lang, set()

    def patch_new(fn):
        found = {value for value in fn.__globals__.values() if value in (tl, tl.core)}
        if found - done:
            patch(fn)
            tl.tensor.__index__ = lambda scalar: scalar.handle.data.item()
            done.update(found)
        return _Kept()

    interpreter._patch_lang = patch_new
    numpy_of, pointer = lru_cache(None)(interpreter._get_np_dtype), np.dtype(np.uint64)
    interpreter._get_np_dtype = lambda kind: pointer if kind.scalar.is_ptr() else numpy_of(kind.scalar)
    TritonSemantic.binary_op_sanitize_overflow_impl = lambda *_: None
    _remember_types()


def _remember_types() -> None:
    """Values of one shape share that shape, and block types of one shape and element their attributes."""
    init_tensor, shapes = tl.core.tensor.__init__, {}
    init_block, blocks = tl.core.block_type.__init__, {}

    def tensor(self, handle, type):
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            init_tensor(self, handle, type)
            shapes[key] = {"shape": self.shape, "numel": self.numel}
        self.__dict__.update(shapes[key], handle=handle, type=type, dtype=type.scalar)

    def block_type(self, element_ty, shape):
        key = (element_ty.name, *shape)
        if key not in blocks:
            init_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        self.__dict__.update(blocks[key])

    tl.core.tensor.__init__, tl.core.block_type.__init__ = tensor, block_type


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _round(x: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    nearest = (bits + (0x7FFF + (bits >> 16 & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
