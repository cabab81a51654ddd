"""The variants of every Triton kernel that are compiled ahead of time: a set that covers what the engine may ask for.

Every KV kind at the commonest shape, every shape at the commonest kind, and each option, page size and way of writing
at least once: not their product, which would compile for an hour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kernels.launch import next_power_of_two
from kernels.triton_decode import decode_constants, decode_kernel, reduce_kernel
from kernels.triton_kv import write_kv_kernel
from kernels.triton_move import move_constants, move_kernel
from kernels.triton_prefill import prefill_constants, prefill_kernel

ARCHITECTURES = (80, 89, 90, 100)
KV_HEADS = 8
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
COMMON = (4, 128, 128)  # query heads a KV head, head dim of K, of V
SHAPES = [(1, 64, 64), (8, 80, 80), (16, 96, 96), (8, 256, 256), (16, 192, 128)]
_INDICES = dict.fromkeys(("pages_ptr", "lens_ptr", "slots_ptr", "query_starts_ptr"), "i64")
_TABLES = dict.fromkeys(("source_table_ptr", "target_table_ptr", "sources_ptr", "targets_ptr"), "i64")


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments. ``types``, ``default``: see compile_ahead.compile_for."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    default: str = "bf16"


@dataclass(frozen=True)
class Options:
    """Attention of one layer; ``splits`` for decode."""

    page_size: int = 16
    splits: int = 4
    window: int | None = None
    softcap: bool = False
    sinks: bool = False

    def __str__(self) -> str:
        words = [f"page {self.page_size}"] if self.page_size != 16 else []
        words += ["window"] if self.window else []
        words += [word for word in ("softcap", "sinks") if getattr(self, word)]
        return "".join(f", {word}" for word in words)


EVERYTHING = {"window": 4096, "softcap": True, "sinks": True}


def _shape_name(shape: tuple[int, int, int]) -> str:
    group, dim, v_dim = shape
    return f"D {dim}{f'/{v_dim}' if v_dim != dim else ''}, group {group}"


def decode(arch: int, kind: str, shape: tuple[int, int, int], options: Options) -> Variant:
    """The decode kernel, writing its result (one split) or parts of it."""
    group, dim, v_dim = shape
    constants = decode_constants(
        group * KV_HEADS, KV_HEADS, dim, v_dim, ITEMSIZE[kind], options.page_size, options.splits,
        options.window, options.softcap, options.sinks,
    )  # fmt: skip
    way = "direct" if options.splits == 1 else "split"
    types = _INDICES | ({} if options.splits == 1 else {"out_ptr": "fp32", "lse_ptr": "fp32"})
    return Variant(f"decode {way}, {kind}, {_shape_name(shape)}{options}", decode_kernel, constants, types, kind)


def prefill(arch: int, kind: str, shape: tuple[int, int, int], options: Options) -> Variant:
    """The prefill kernel."""
    group, dim, v_dim = shape
    constants = prefill_constants(
        group * KV_HEADS, KV_HEADS, dim, v_dim, ITEMSIZE[kind], options.page_size,
        options.window, options.softcap, options.sinks,
    )  # fmt: skip
    return Variant(f"prefill, {kind}, {_shape_name(shape)}{options}", prefill_kernel, constants, _INDICES, kind)


def reduce(v_dim: int, splits: int, sinks: bool) -> Variant:
    """The reduction over splits."""
    constants = {
        "HEADS": 32, "DV": v_dim, "DV_PAD": next_power_of_two(v_dim), "SPLITS": splits,
        "SPLITS_PAD": next_power_of_two(splits), "HAS_SINKS": sinks, "num_warps": 4,
    }  # fmt: skip
    name = f"reduce, D {v_dim}, {splits} splits{', sinks' if sinks else ''}"
    return Variant(name, reduce_kernel, constants, {"parts_ptr": "fp32", "lse_ptr": "fp32"})


def write(kind: str, dim: int, v_dim: int) -> Variant:
    """The KV write."""
    k_row, v_row = KV_HEADS * dim, KV_HEADS * v_dim
    constants = {
        "D": dim, "DV": v_dim, "K_ROW": k_row, "V_ROW": v_row,
        "K_PAD": next_power_of_two(k_row), "V_PAD": next_power_of_two(v_row), "num_warps": 4,
    }  # fmt: skip
    return Variant(f"write, {kind}, {_shape_name((1, dim, v_dim))}", write_kv_kernel, constants, _INDICES, kind)


def move(unit_bytes: int, align: int) -> Variant:
    """Copy, gather and scatter of units: one kernel."""
    name = f"move, {unit_bytes} bytes a unit, aligned to {align}"
    return Variant(name, move_kernel, move_constants(unit_bytes, align), _TABLES)


def variants(arch: int) -> list[Variant]:
    """All of sm_``arch``; every name once."""
    found = []
    for kind in ITEMSIZE:
        found += [decode(arch, kind, COMMON, Options(splits=splits)) for splits in (4, 1)]
        found += [prefill(arch, kind, COMMON, Options()), write(kind, 128, 128)]
    for i, shape in enumerate(SHAPES):
        found += [
            decode(arch, "bf16", shape, Options(splits=1 if i % 2 else 8)),
            prefill(arch, "bf16", shape, Options()),
        ]
    for page_size in (1, 256):
        options = Options(page_size=page_size)
        found += [decode(arch, "bf16", COMMON, options), prefill(arch, "bf16", COMMON, options)]
    everything = Options(**EVERYTHING)
    found += [decode(arch, "bf16", COMMON, Options(splits=s, **EVERYTHING)) for s in (1, 4)]
    found += [prefill(arch, "bf16", COMMON, everything), write("bf16", 192, 128)]
    found += [reduce(64, 2, False), reduce(128, 8, True), reduce(256, 64, False)]
    found += [move(32768, 16), move(1024, 16), move(24, 8), move(3, 1)]
    return found
