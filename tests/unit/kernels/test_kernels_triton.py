"""Triton kernels without a GPU: run in the interpreter, and compiled ahead of time for real chips."""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from triton_cases import INTERPRETED, full

from kvbench_kernels.compile_ahead import compile_for, read_resources
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.launch import KernelShape, shared_bytes_limit
from kvbench_kernels.triton_decode import decode_constants, decode_kernel
from kvbench_kernels.triton_kv import write_constants, write_kv_kernel
from kvbench_kernels.triton_move import move_constants, move_kernel
from kvbench_kernels.triton_prefill import prefill_constants, prefill_kernel
from kvbench_kernels.variants import core, sample
from tests.support.run_checks import run_checks

CHECKS = [*sorted(Path(__file__).parent.glob("triton_*checks.py")), Path(__file__).with_name("triton_bugs.py")]
WITHOUT_A_GPU = [Path(__file__).with_name("tune_device_checks.py")]
CACHES = {"k_ptr", "v_ptr", "k_cache_ptr", "v_cache_ptr"}
SCALES = {"k_scales_ptr", "v_scales_ptr"}
CODES = {"int8_per_token_head": "i8"}  # else bytes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ring", ["not full", full("full")], ids=["main", "full"])
def test_kernels_in_the_interpreter(ring, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", f"{os.environ.get('PYTEST_ADDOPTS', '')} -m '{ring}'")
    run_checks(*CHECKS, *WITHOUT_A_GPU)


@pytest.mark.timeout(900)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu():
    run_checks(*CHECKS, interpret=False)


@cache
def compiled(name: str, arch: int, kind: str = "auto", dtype: str = "bf16", dims=(128, 128), **options):
    """A kernel as a model with 32 / 8 heads would need it."""
    shape = KernelShape(32, 8, *dims, 2, options.pop("page_size", 16), kind, arch, **options)
    kernel, constants = {
        "decode": lambda: (decode_kernel, decode_constants(shape, True)),
        "decode, direct": lambda: (decode_kernel, decode_constants(shape, False)),
        "prefill": lambda: (prefill_kernel, prefill_constants(shape, 1, False)),
        "prefill, short": lambda: (prefill_kernel, prefill_constants(shape, 4, True)),
        "write": lambda: (write_kv_kernel, write_constants(8, *dims, kind)),
    }[name]()
    types = {"pages_ptr": "i32"} | dict.fromkeys(("slots_ptr", "query_starts_ptr", "lens_ptr"), "i64")
    if constants.get("SPLIT"):
        types |= dict.fromkeys(("work_ptr", "arrived_ptr", "pieces_ptr", "piece_ptr"), "i32")
        types |= dict.fromkeys(("parts_ptr", "lse_ptr"), "fp32")
    if kind != "auto":
        types |= dict.fromkeys(CACHES, CODES.get(kind, "u8")) | dict.fromkeys(SCALES, "fp32")
    return compile_for(kernel, constants, arch, types, dtype)


compiles = pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")
EVERYTHING = {"dims": (80, 256), "page_size": 256, "window": 4096, "softcap": True, "sinks": True}
VARIANTS = [
    ("decode", 90, "auto", "bf16", {}),
    ("prefill", 90, "auto", "bf16", {}),
    ("decode", 90, "int4_per_token_head", "bf16", {}),
    full("decode", 80, "auto", "fp16", {}),
    full("decode, direct", 89, "auto", "bf16", {}),
    full("prefill", 89, "auto", "bf16", {}),
    full("prefill, short", 90, "auto", "bf16", {}),
    *(full("decode", 90, kind, "bf16", {}) for kind in KV_FORMATS if kind != "int4_per_token_head"),
    full("decode", 80, "fp8_e4m3", "bf16", {}),
    full("prefill", 90, "fp8_e4m3", "bf16", {}),
    full("prefill", 80, "int4_per_token_head", "bf16", {}),
    *(full(name, 90, "auto", "bf16", EVERYTHING) for name in ("decode", "prefill")),
]


@compiles
@pytest.mark.parametrize(("name", "arch", "kind", "dtype", "options"), VARIANTS)
def test_kernels_compile_ahead_of_time(name, arch, kind, dtype, options):
    kernel = compiled(name, arch, kind, dtype, **options)
    assert kernel.asm["cubin"]
    assert kernel.metadata.shared <= shared_bytes_limit(arch)
    assert "mma" in kernel.asm["ptx"], "no tensor cores"
    assert "cp.async" in kernel.asm["ptx"], "KV loads are not pipelined"


EARLY = {v.kernel.__name__: v for v in reversed(core(90)) if any(p.name == "PDL" for p in v.kernel.params)}


@compiles
@pytest.mark.parametrize("kernel", sorted(EARLY))
def test_a_kernel_that_starts_early_waits_before_it_touches_memory(kernel):
    """Else it would read what the kernel before it is still writing; older chips start none early."""
    variant = EARLY[kernel]
    new, old = (
        compile_for(variant.kernel, variant.constants, arch, variant.types, variant.default) for arch in (90, 89)
    )
    before, after = new.asm["ptx"].split("griddepcontrol.wait", 1)
    assert new.metadata.launch_pdl and "griddepcontrol.launch_dependents" in after
    assert not re.search(r"\b(ld|st|atom|red)\.global|cp\.async|griddepcontrol", before)
    assert not old.metadata.launch_pdl and "griddepcontrol" not in old.asm["ptx"]


def test_the_kernels_of_a_layer_start_early():
    assert set(EARLY) == {
        "decode_kernel", "prefill_kernel", "reduce_kernel", "write_kv_kernel", "rotate_write_kernel", "add_norm_kernel",
        "act_mul_kernel",
    }  # fmt: skip


@pytest.mark.full
@compiles
def test_fp8_is_converted_by_the_chip_where_it_can():
    convert = "cvt.rn.f16x2.e4m3x2"
    assert convert in compiled("decode", 90, "fp8_e4m3").asm["ptx"]
    assert convert not in compiled("decode", 80, "fp8_e4m3").asm["ptx"]


@compiles
@pytest.mark.parametrize(
    ("kind", "keys", "values"),
    [
        ("auto", "bf16", "bf16"),
        ("int4_per_token_head", "f16", "bf16"),
        full("int8_per_token_head", "f16", "bf16"),
        full("fp8_e4m3", "f16", "f16"),
        full("fp8_e5m2", "f16", "f16"),
    ],
)
def test_no_dot_takes_fp8_and_all_sum_in_float32(kind, keys, values):
    """Two-level accumulation: Hopper's fp8 tensor cores lose a needle in a long context, 16-bit operands do not."""
    ttir = compiled("decode", 90, kind).asm["ttir"]
    dots = re.findall(r"tt\.dot .* : tensor<\w*x(\w+)> \* tensor<\w*x(\w+)> -> tensor<\w*x(\w+)>", ttir)
    assert len(dots) >= 4 and set(dots) == {(keys, keys, "f32"), (values, values, "f32")}


@compiles
@pytest.mark.parametrize("name", ["decode", full("prefill")])
def test_whole_page_tiles_read_the_page_table_once(name):
    """One scalar load of int32 a tile where the tile divides the page; else one for each token."""
    a_load_for_each_token = r"tt\.load .* : tensor<\d+x!tt\.ptr<i32>>"
    assert re.search(a_load_for_each_token, compiled(name, 90).asm["ttir"])
    assert not re.search(a_load_for_each_token, compiled(name, 90, page_size=256).asm["ttir"])


def cache_pointer_offsets(ttir: str, pointers: set[str]) -> list[str]:
    """Types of all offsets that are added to the pointers named and to what derives from them."""
    derived, offsets = {f"%{p}" for p in pointers}, []
    for line in ttir.splitlines():
        found = re.match(r"\s*(%\S+) = (tt\.\w+) (%\S+?)(?:, (%\S+))?(?: \{.*\})? : (.*?)(?: loc\(.*)?$", line)
        if not found:
            continue
        result, op, first, _, types = found.groups()
        if first in derived and op in ("tt.addptr", "tt.splat", "tt.broadcast"):
            derived.add(result)
            if op == "tt.addptr":
                offsets.append(types.rsplit(", ", 1)[-1].strip())
    return offsets


OFFSETS = [("decode", 90, 16, "int4_per_token_head"), ("prefill", 90, 16, "auto"), ("write", 90, 16, "auto")]


@compiles
@pytest.mark.parametrize(
    ("name", "arch", "page_size", "kind"),
    [
        *OFFSETS,
        *(
            full(name, arch, page_size, kind)
            for kind in ("auto", "fp8_e4m3", "int8_per_token_head", "int4_per_token_head")
            for name, arch in (("decode", 90), ("prefill", 80), ("write", 90))
            for page_size in (16, 256)
            if (name, arch, page_size, kind) not in OFFSETS and (name, page_size) != ("write", 256)
        ),
    ],
)
def test_slot_offsets_are_64_bit(name, arch, page_size, kind):
    """slot * stride passes 2**31 in a large cache (vllm#47671, sglang#20389): the multiplication must be int64, not
    only its result. For scales too."""
    ttir = compiled(name, arch, kind, page_size=page_size).asm["ttir"]
    for group in (CACHES, SCALES if "int" in kind else set()):
        for pointer in group:
            if f"%{pointer}" in ttir:
                wide = [t for t in cache_pointer_offsets(ttir, {pointer}) if "i64" in t]
                assert wide, f"no 64-bit offset reaches {pointer}"
    # Heads lie as far apart as all tokens of a batch.
    strides = ("k_cache_stride", "v_cache_stride", "k_head_stride", "v_head_stride")
    for stride in strides if name == "write" else ("k_stride", "v_stride", "q_head_stride"):
        uses = [line for line in ttir.splitlines() if re.search(rf"%{stride}\b", line) and "tt.func" not in line]
        assert uses, f"{stride} is not used"
        for line in uses:
            assert "arith.extsi" in line and "i64" in line, f"{stride} used at 32 bits: {line}"


MOVE_TYPES = dict.fromkeys(("source_table_ptr", "target_table_ptr", "sources_ptr", "targets_ptr"), "i64")


@compiles
@pytest.mark.parametrize(
    ("unit_bytes", "align", "widest"),
    [
        (32768, 16, "v2.b64"),
        *(full(*unit) for unit in ((240, 16, "v2.b64"), (24, 8, "b64"), (36, 4, "b32"), (3, 1, "b8"))),
    ],
)
def test_accesses_are_as_wide_as_the_alignment(unit_bytes, align, widest):
    """16 bytes a thread where a page allows: half as wide a word would halve what is in flight."""
    ptx = compile_for(move_kernel, move_constants(unit_bytes, align), 90, MOVE_TYPES).asm["ptx"]
    stores = set(re.findall(r"st\.global\.(\S+)", ptx))
    assert stores == {widest}
    assert f"ld.global.{widest}" in ptx


@compiles
def test_addresses_are_computed_in_64_bits():
    """Every product and sum on the way to an address: unit x step passes 2**31 in a large cache."""
    ttir = compile_for(move_kernel, move_constants(32768, 16), 90, MOVE_TYPES).asm["ttir"]
    operations = dict(re.findall(r"(%\S+) = (.*)", ttir))
    wanted = re.findall(r"(%\S+) = tt\.int_to_ptr", ttir)
    assert len(wanted) == 2
    products, left = 0, [name for at in wanted for name in re.findall(r"%[\w.]+", operations[at])]
    while left:
        operation = operations.get(left.pop(), "")
        if not operation.startswith(("arith.", "tt.splat", "tt.broadcast")):
            continue  # a load: its own addresses are the index arrays'
        assert re.search(r"(?:<\d+x)?i64\b", operation.rsplit(" : ", 1)[-1]), operation
        products += operation.startswith("arith.muli")
        left += re.findall(r"%[\w.]+", operation)
    assert products == 2


@compiles
@pytest.mark.parametrize("arch", [80, full(100)])
def test_the_noise_of_a_draw_stays_in_registers_and_its_logarithms_are_the_chip_s(arch):
    for variant in sample("bf16"):
        kernel = compile_for(variant.kernel, variant.constants, arch, variant.types, variant.default)
        resources = read_resources(kernel)
        assert resources.spills == resources.stack_bytes == 0
        assert resources.registers * 32 * variant.constants["num_warps"] <= 65536, "a block fits"
        assert "lg2.approx" in kernel.asm["ptx"] and "__nv_log" not in kernel.asm["ptx"]
