"""The variants of every Triton kernel that are compiled ahead of time.

The set covers what the engine may ask for.

On every architecture each KV kind at the commonest shape; on two of them also every shape at the commonest kind, and
each option, page size and way of writing at least once: not their product, which would compile for hours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvbench_kernels.kv_formats import KV_FORMATS, find_format
from kvbench_kernels.launch import ONE_PAGE, KernelShape
from kvbench_kernels.triton_decode import decode_constants, decode_kernel
from kvbench_kernels.triton_kv import write_constants, write_kv_kernel
from kvbench_kernels.triton_layers import (
    MAX_NORM,
    Heads,
    Rotation,
    act_constants,
    act_mul_kernel,
    add_norm_kernel,
    norm_constants,
    rotate_constants,
    rotate_write_kernel,
)
from kvbench_kernels.triton_move import move_constants, move_kernel
from kvbench_kernels.triton_plan import CONSTANTS as PLAN_CONSTANTS
from kvbench_kernels.triton_plan import PIECE_CONSTANTS, piece_kernel, plan_kernel
from kvbench_kernels.triton_prefill import prefill_constants, prefill_kernel, reduce_constants, reduce_kernel
from kvbench_kernels.triton_sample import noise_constants, noise_kernel, settle_constants, settle_kernel

ARCHITECTURES = (80, 89, 90, 100)
THOROUGH = (80, 90)  # the others compile much like these: their limits and largest variants are enough
KV_HEADS = 8
ITEMSIZE = {"bf16": 2, "fp16": 2, "fp32": 4}
KINDS = (*ITEMSIZE, *KV_FORMATS)  # a cache in the model's dtype, or in a format under a model in bf16
COMMON = (4, 128, 128)  # query heads a KV head, head dim of K, of V
LARGEST = (8, 256, 256)
EXTREME = (64, 256, 256)  # the largest that the backend admits
LATENT = (128, 576, 512)  # DeepSeek V3's rows, which all query heads share
SHAPES = [(1, 64, 64), (8, 80, 80), (16, 96, 96), (16, 192, 128)]
# Of split attention: where the parts of pieces are written, and what says which pieces there are.
_PARTS = dict.fromkeys(("work_ptr", "arrived_ptr", "pieces_ptr", "piece_ptr"), "i32")
_PARTS |= dict.fromkeys(("parts_ptr", "lse_ptr"), "fp32")
_INDICES = {"pages_ptr": "i32"} | dict.fromkeys(("lens_ptr", "slots_ptr", "query_starts_ptr"), "i64")
_TABLES = dict.fromkeys(("source_table_ptr", "target_table_ptr", "sources_ptr", "targets_ptr"), "i64")
_DRAWS = (
    dict.fromkeys(("out_ptr", "at_ptr", "rows_ptr", "keys_ptr", "top_k_ptr"), "i64")
    | dict.fromkeys(("temperature_ptr", "top_p_ptr", "score_ptr", "tops_ptr", "largest_ptr"), "fp32")
    | {"token_ptr": "i32", "pieces": "i32"}
)


@dataclass(frozen=True)
class Variant:
    """One kernel with its compile-time arguments. ``types``, ``default``: see compile_ahead.compile_for."""

    name: str
    kernel: Any
    constants: Mapping[str, Any]
    types: Mapping[str, str]
    default: str = "bf16"


@dataclass(frozen=True)
class VariantOptions:
    """The attention options of a variant.

    ``split``: sequences may be cut; ``short``: prefill of few queries; ``latent``: V is a part of K's rows.
    """

    page_size: int = 16
    split: bool = False
    short: bool = False
    window: int | None = None
    softcap: bool = False
    sinks: bool = False
    latent: bool = False

    def __str__(self) -> str:
        words = [] if self.page_size == 16 else ["one page" if self.page_size == ONE_PAGE else f"page {self.page_size}"]
        words += ["window"] if self.window else []
        words += [word for word in ("latent", "split", "short", "softcap", "sinks") if getattr(self, word)]
        return "".join(f", {word}" for word in words)


EVERYTHING = {"window": 4096, "softcap": True, "sinks": True}


def _shape_name(shape: tuple[int, int, int]) -> str:
    group, dim, v_dim = shape
    return f"D {dim}{f'/{v_dim}' if v_dim != dim else ''}, group {group}"


def _model_dtype(kind: str) -> str:
    return kind if kind in ITEMSIZE else "bf16"


def _format_name(kind: str) -> str:
    return "auto" if kind in ITEMSIZE else kind


def _cache_types(kind: str) -> dict[str, str]:
    """Element types of the cache: a format's codes; the rows again where there are no scales."""
    kv_format = find_format(_format_name(kind))
    rows = kind if kv_format is None else "i8" if kind == "int8_per_token_head" else "u8"
    scales = "fp32" if kv_format is not None and kv_format.scale_bytes else rows
    return dict.fromkeys(("k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"), rows) | dict.fromkeys(
        ("k_scales_ptr", "v_scales_ptr"), scales
    )


def _attention(
    name: str,
    kernel: Any,
    constants: Mapping[str, Any],
    kind: str,
    shape: tuple[int, int, int],
    options: VariantOptions,
) -> Variant:
    types = _INDICES | _cache_types(kind) | (_PARTS if options.split else {})
    return Variant(f"{name}, {kind}, {_shape_name(shape)}{options}", kernel, constants, types, _model_dtype(kind))


def _kernel_shape(arch: int, kind: str, shape: tuple[int, int, int], options: VariantOptions) -> KernelShape:
    (group, dim, v_dim), kv_heads = shape, 1 if options.latent else KV_HEADS
    return KernelShape(
        group * kv_heads, kv_heads, dim, v_dim, ITEMSIZE[_model_dtype(kind)], options.page_size, _format_name(kind),
        arch, options.window, options.softcap, options.sinks, latent=options.latent,
    )  # fmt: skip


def decode(arch: int, kind: str, shape: tuple[int, int, int], options: VariantOptions) -> Variant:
    """The decode kernel, writing its result or parts of it."""
    constants = decode_constants(_kernel_shape(arch, kind, shape, options), options.split)
    return _attention("decode", decode_kernel, constants, kind, shape, options)


def prefill(arch: int, kind: str, shape: tuple[int, int, int], options: VariantOptions) -> Variant:
    """The prefill kernel."""
    kernel_shape = _kernel_shape(arch, kind, shape, options)
    constants = prefill_constants(kernel_shape, 4 if options.split else 1, options.short)
    return _attention("prefill", prefill_kernel, constants, kind, shape, options)


def reduce(v_dim: int, sinks: bool) -> Variant:
    """The reduction over any number of parts of prefill."""
    constants = reduce_constants(32, v_dim, sinks)
    return Variant(f"reduce, D {v_dim}{', sinks' if sinks else ''}", reduce_kernel, constants, _PARTS)


def plan() -> Variant:
    """The work list of decode."""
    return Variant("plan", plan_kernel, PLAN_CONSTANTS, {"lens_ptr": "i64", "table_ptr": "i32", "arrived_ptr": "i32"})


def piece() -> Variant:
    """The length of prefill's pieces."""
    return Variant("piece", piece_kernel, PIECE_CONSTANTS, _INDICES | {"piece_ptr": "i32"})


def write(kind: str, dim: int, v_dim: int, kv_heads: int = KV_HEADS) -> Variant:
    """The KV write; of latent rows, ``v_dim`` 0 and one KV head."""
    constants = write_constants(kv_heads, dim, v_dim, _format_name(kind))
    name = f"write, {kind}, {_shape_name((1, dim, v_dim))}"
    return Variant(name, write_kv_kernel, constants, _INDICES | _cache_types(kind) | _inputs(kind), _model_dtype(kind))


def _inputs(kind: str) -> dict[str, str]:
    """Element types of the written rows: the model's dtype, under the names that attention gives the cache."""
    return dict.fromkeys(("k_ptr", "v_ptr"), _model_dtype(kind))


def move(unit_bytes: int, align: int) -> Variant:
    """Copy, gather and scatter of units: one kernel."""
    name = f"move, {unit_bytes} bytes a unit, aligned to {align}"
    return Variant(name, move_kernel, move_constants(unit_bytes, align), _TABLES)


def sample(dtype: str) -> list[Variant]:
    """The draw of a token from logits of ``dtype``: both kernels."""
    vocab = 128 * 1024
    return [
        Variant(f"noise, {dtype}", noise_kernel, noise_constants(), _DRAWS, dtype),
        Variant(f"settle, {dtype}", settle_kernel, settle_constants(vocab), _DRAWS, dtype),
    ]


def add_norm(dtype: str, size: int) -> Variant:
    """Norm, residual sum and norm: what the others are a part of."""
    types = dict.fromkeys(("post_eps", "eps"), "fp32")
    return Variant(f"norm, {dtype}, {size}", add_norm_kernel, norm_constants(size, 1.0, True, 1.0), types, dtype)


def rotate(kind: str, dim: int) -> Variant:
    """Norm and rotation of Q and K with the KV write."""
    heads = Heads(4 * KV_HEADS, KV_HEADS, dim, dim)
    constants = rotate_constants(heads, Rotation(dim), dim, (0.0, 0.0), _format_name(kind))
    types = _INDICES | _cache_types(kind) | dict.fromkeys(("q_eps", "k_eps"), "fp32")
    return Variant(f"rotate, {kind}, D {dim}", rotate_write_kernel, constants, types, _model_dtype(kind))


def act_mul(dtype: str, activation: str) -> Variant:
    """The product of a gated MLP."""
    constants = act_constants(4096, activation)
    return Variant(f"product, {dtype}, {activation}", act_mul_kernel, constants, {}, dtype)


def variants(arch: int) -> list[Variant]:
    """List all variants of sm_``arch``; every name once."""
    return core(arch) + (_rest(arch) if arch in THOROUGH else [])


def core(arch: int) -> list[Variant]:
    """List the variants of every KV kind, and those that take the most."""
    chosen = []
    for kind in KINDS:
        if kind != "fp16" or arch == 90:  # bf16's instructions with another suffix: once is enough
            chosen += [
                decode(arch, kind, COMMON, VariantOptions(split=True)),
                prefill(arch, kind, COMMON, VariantOptions()),
            ]
            chosen += [write(kind, 128, 128)]
    chosen += [decode(arch, "bf16", LARGEST, VariantOptions()), prefill(arch, "bf16", LARGEST, VariantOptions())]
    chosen += [prefill(arch, "int8_per_token_head", COMMON, VariantOptions(**EVERYTHING))]
    chosen += [prefill(arch, "fp8_e4m3", COMMON, VariantOptions(split=True, short=True))]
    chosen += [prefill(arch, "bf16", COMMON, VariantOptions(split=True))]  # what mixed graphs replay
    # The extremes of what TritonBackend.check_support admits.
    for kind in ("fp32", "int8_per_token_head", "bf16"):
        chosen += [
            decode(arch, kind, EXTREME, VariantOptions(split=True)),
            prefill(arch, kind, EXTREME, VariantOptions()),
        ]
        chosen += [prefill(arch, kind, EXTREME, VariantOptions(split=True, short=True))]
    chosen += [prefill(arch, kind, LARGEST, VariantOptions(split=True, short=True)) for kind in ("fp32", "bf16")]
    for kind in ("bf16", "fp32", "int8_per_token_head", "fp8_e4m3"):
        chosen += [
            decode(arch, kind, LATENT, VariantOptions(split=True, latent=True)),
            prefill(arch, kind, LATENT, VariantOptions(latent=True)),
        ]
    chosen += [prefill(arch, "bf16", LATENT, VariantOptions(split=True, short=True, latent=True))]
    chosen += [rotate(kind, 128) for kind in KINDS if kind not in ("fp16", "fp32")]
    chosen += [add_norm("bf16", 4096), act_mul("bf16", "silu")]
    return [*chosen, reduce(256, False), plan(), piece(), move(32768, 16), *sample("bf16")]


def _rest(arch: int) -> list[Variant]:
    chosen = [decode(arch, kind, COMMON, VariantOptions()) for kind in KINDS if kind != "fp16"]
    for i, shape in enumerate(SHAPES):
        chosen += [
            decode(arch, "bf16", shape, VariantOptions(split=i % 2 == 0)),
            prefill(arch, "bf16", shape, VariantOptions()),
        ]
    for page_size in (1, 256, ONE_PAGE):
        options = VariantOptions(page_size=page_size)
        chosen += [decode(arch, "bf16", COMMON, options), prefill(arch, "bf16", COMMON, options)]
    chosen += [decode(arch, kind, COMMON, VariantOptions(**EVERYTHING)) for kind in ("bf16", "int8_per_token_head")]
    chosen += [prefill(arch, "bf16", COMMON, VariantOptions(**EVERYTHING))]
    chosen += [decode(arch, "fp8_e4m3", SHAPES[0], VariantOptions())]
    chosen += [decode(arch, "int4_per_token_head", LARGEST, VariantOptions(split=True))]
    chosen += [prefill(arch, "bf16", COMMON, VariantOptions(split=True, short=True))]
    chosen += [write("bf16", 192, 128), write("int4_per_token_head", 80, 80)]
    chosen += [decode(arch, "bf16", (16, *LATENT[1:]), VariantOptions(split=True, latent=True))]
    chosen += [write(kind, LATENT[1], 0, kv_heads=1) for kind in ("bf16", "fp8_e4m3")]
    chosen += [reduce(64, False), reduce(128, True), reduce(512, False)]
    chosen += [rotate("fp32", 128), rotate("bf16", 256), rotate("int4_per_token_head", 256)]
    chosen += [add_norm("bf16", MAX_NORM), add_norm("fp32", MAX_NORM), add_norm("bf16", 1024)]
    chosen += [act_mul("fp32", "gelu"), act_mul("bf16", "gelu_tanh")]
    return [*chosen, move(1024, 16), move(24, 8), move(3, 1), *sample("fp32")]
