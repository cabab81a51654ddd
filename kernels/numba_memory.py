"""Raw memory and C calls for the CPU kernels: addresses are ``intp``, nothing is checked."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numba
import torch
from llvmlite import binding, ir
from numba import types
from numba.core import cgutils, config
from numba.extending import intrinsic


def compiles_for(feature: str) -> bool:
    """Tests whether Numba compiles for an x86 machine with this feature (LLVM's name), such as avx512f."""
    if config.CPU_NAME or config.CPU_FEATURES is not None:  # a target named by hand, older than the machine perhaps
        return f"+{feature}" in (config.CPU_FEATURES or "")
    return bool(binding.get_host_cpu_features().get(feature))


@cache
def has_amx() -> bool:
    """Tests whether Numba compiles for AMX's bfloat16 here and the system lets this process use the tile registers."""
    return compiles_for("amx-bf16") and compiles_for("avx512f") and bool(torch.cpu._init_amx())


def _cache_folder() -> str:
    """The folder of compiled kernels, named after all the kernels' sources and the leave to use AMX.

    Numba looks only at the file that defines a kernel, so an edit of a helper in another file would leave machine code
    of the old one in use.
    """
    here = Path(__file__).parent
    digest = blake2b(bytes([has_amx()]), digest_size=8)
    for source in sorted([*here.glob("numba_*.py"), here / "kv_formats.py"]):
        digest.update(source.read_bytes())
    return str(Path(config.CACHE_DIR or here / "__pycache__") / f"numba-{digest.hexdigest()}")


def _can_cache() -> bool:
    """Tests whether Numba finds a folder for compiled code: beside the sources, or the user's cache folder."""

    def probe():
        return 0

    try:
        numba.njit(cache=True)(probe)
    except RuntimeError:  # no writable folder at all
        return False
    return True


config.CACHE_DIR = _cache_folder()
# For every kernel: no GIL, on-disk cache where there is a place for it, division without Python's checks.
JIT = {"nogil": True, "cache": _can_cache(), "error_model": "numpy"}


_WORKER = types.void(types.intp)


def compile_c(function: Callable[..., Any], signature: Any = _WORKER) -> Any:
    """Compile ``function`` as a C function, by one process at a time.

    Numba's cache stores each variant of a function under the first free number. Two processes that compile variants at
    once would take the same number, and a third would then run one in place of the other: on memory of other sizes.
    """
    folder = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(folder, fcntl.LOCK_EX)
        return numba.cfunc(signature, **JIT)(function)
    finally:
        os.close(folder)


F32 = ir.FloatType()
I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """The address as a pointer to ``kind``."""
    return builder.inttoptr(address, ir.PointerType(kind))


@intrinsic(prefer_literal=True)
def stack_bytes(typingctx, count):
    """Address of ``count`` (a constant) bytes of the calling function's stack, aligned to a cache line."""
    size = count.literal_value

    def codegen(context, builder, signature, args):
        place = cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), size + 63))
        address = builder.add(builder.ptrtoint(place, I64), ir.Constant(I64, 63))
        return builder.and_(address, ir.Constant(I64, -64))

    return types.intp(count), codegen


@intrinsic
def copy_bytes(typingctx, target, source, count):
    """Copy ``count`` bytes by memcpy."""

    def codegen(context, builder, signature, args):
        pointer_type = ir.PointerType(ir.IntType(8))
        target_at, source_at = (builder.inttoptr(a, pointer_type) for a in args[:2])
        cgutils.raw_memcpy(builder, target_at, source_at, args[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


@intrinsic
def fill_bytes(typingctx, target, value, count):
    """Set ``count`` bytes to ``value`` by memset."""

    def codegen(context, builder, signature, args):
        place = builder.inttoptr(args[0], ir.PointerType(ir.IntType(8)))
        cgutils.memset(builder, place, args[2], builder.trunc(args[1], ir.IntType(8)))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), codegen


def emit_prefetch(builder: ir.IRBuilder, address: ir.Value, level: int) -> None:
    """Ask for the cache line at ``address``, into the L1 or L2 cache (``level`` 1 or 2)."""
    pointer_type = ir.PointerType(ir.IntType(8))
    kind = ir.FunctionType(ir.VoidType(), [pointer_type, I32, I32, I32])
    fetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    read, locality, data = 0, 4 - level, 1
    constants = [ir.Constant(I32, c) for c in (read, locality, data)]
    builder.call(fetch, [builder.inttoptr(address, pointer_type), *constants])


@intrinsic(prefer_literal=True)
def prefetch_line(typingctx, address, level):
    """Ask for the cache line at ``address``; ``level`` (1 or 2) is a constant."""

    def codegen(context, builder, signature, args):
        emit_prefetch(builder, args[0], level.literal_value)
        return context.get_dummy_value()

    return types.void(types.intp, level), codegen


@intrinsic
def load_f32(typingctx, address):
    """The float at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(pointer(builder, args[0], F32))

    return types.float32(types.intp), codegen


@intrinsic
def store_f32(typingctx, address, value):
    """Store a float at a byte address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], F32))
        return context.get_dummy_value()

    return types.void(types.intp, types.float32), codegen


@intrinsic
def load_i64(typingctx, address):
    """The int64 at a byte address."""

    def codegen(context, builder, signature, args):
        return builder.load(pointer(builder, args[0], I64))

    return types.int64(types.intp), codegen


@intrinsic
def store_i64(typingctx, address, value):
    """Store an int64 at a byte address."""

    def codegen(context, builder, signature, args):
        builder.store(args[1], pointer(builder, args[0], I64))
        return context.get_dummy_value()

    return types.void(types.intp, types.int64), codegen


@intrinsic
def call_get_int(typingctx, function):
    """Call the C function ``int f(void)`` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(I32, [])
        return builder.sext(builder.call(pointer(builder, args[0], kind), []), I64)

    return types.int64(types.intp), codegen


@intrinsic
def call_work(typingctx, function, data):
    """Call the C function ``void f(void *)`` at an address."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(pointer(builder, args[0], kind), [args[1]])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), codegen


@intrinsic
def call_parallel(typingctx, function, work, data, num_threads):
    """Call ``void GOMP_parallel(void (*work)(void *), void *data, unsigned num_threads, unsigned flags)``."""

    def codegen(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I32, I32])
        entry = pointer(builder, args[0], kind)
        builder.call(entry, [args[1], args[2], builder.trunc(args[3], I32), ir.Constant(I32, 0)])
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp, types.intp), codegen
