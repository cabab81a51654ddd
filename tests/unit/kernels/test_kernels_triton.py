"""Triton kernels without a GPU: run in the interpreter, and compiled ahead of time for real chips."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.triton_decode import decode_constants, decode_kernel, reduce_kernel
from kernels.triton_kv import write_kv_kernel
from kernels.triton_prefill import prefill_constants, prefill_kernel

CHECKS = Path(__file__).with_name("triton_checks.py")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
SCALARS = {"scale": "fp32", "softcap": "fp32"}
INT64_POINTERS = {"pages_ptr", "slots_ptr", "query_starts_ptr", "lens_ptr"}


def run_checks(interpret: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=CHECKS.parents[3])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_kernels_in_the_interpreter():
    run_checks("1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kernels_on_the_gpu():
    run_checks("0")


def compile_for(kernel, constants: dict, arch: int, dtype: str, float32: tuple[str, ...] = ()):
    """Compile as a launch on aligned tensors would be; ``float32`` names pointers of that type."""
    constants = dict(constants)
    launch = {k: constants.pop(k) for k in ("num_warps", "num_stages") if k in constants}
    signature, attrs = {}, {}
    for i, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name.endswith("_ptr"):
            signature[name] = (
                "*i64" if name in INT64_POINTERS else "*fp32" if name in float32 else f"*{dtype}"
            )
            attrs[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = SCALARS.get(name, "i32")
            if signature[name] == "i32" and name != "pages_stride":
                attrs[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch)


def all_kernels(arch: int, dtype: str, head_dim: int = 128, v_head_dim: int = 128):
    """Every kernel, compiled as a model with 32 / 8 heads would need it."""
    heads = (32, 8, head_dim, v_head_dim, 2, 16)
    split = decode_constants(*heads, 4, None, False, True)
    direct = decode_constants(*heads, 1, 4096, True, True)
    prefill = prefill_constants(*heads, None, False, False)
    windowed = prefill_constants(*heads, 4096, True, True)
    reduce = {
        "HEADS": 32,
        "DV": v_head_dim,
        "DV_PAD": split["DV_PAD"],
        "SPLITS": 4,
        "SPLITS_PAD": 4,
        "HAS_SINKS": True,
    }
    write = {"D": head_dim, "DV": v_head_dim, "K_ROW": 8 * head_dim, "V_ROW": 8 * v_head_dim}
    write |= {"K_PAD": 2048, "V_PAD": 2048}
    return {
        "decode": compile_for(decode_kernel, split, arch, dtype, float32=("out_ptr", "lse_ptr")),
        "decode, direct": compile_for(decode_kernel, direct, arch, dtype),
        "reduce": compile_for(reduce_kernel, reduce, arch, dtype, float32=("parts_ptr", "lse_ptr")),
        "prefill": compile_for(prefill_kernel, prefill, arch, dtype),
        "prefill, windowed": compile_for(prefill_kernel, windowed, arch, dtype),
        "write": compile_for(write_kv_kernel, write, arch, dtype),
    }


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "v_head_dim"),
    [(80, "fp16", 128, 128), (89, "bf16", 128, 128), (90, "bf16", 128, 128), (90, "bf16", 80, 256)],
)
def test_kernels_compile_ahead_of_time(arch, dtype, head_dim, v_head_dim):
    for name, compiled in all_kernels(arch, dtype, head_dim, v_head_dim).items():
        assert compiled.asm["cubin"], name
        assert compiled.metadata.shared <= 99 * 1024, name  # sm_89 has 99 KiB a block, sm_80 163
        if name.startswith(("decode", "prefill")):
            assert "mma" in compiled.asm["ptx"], f"{name} does not use tensor cores"
        if head_dim == 128 and name == "decode":
            assert "cp.async" in compiled.asm["ptx"], "KV loads are not pipelined"


def cache_pointer_offsets(ttir: str, pointers: set[str]) -> list[str]:
    """Types of all offsets that are added to the pointers named and to what derives from them."""
    derived, offsets = {f"%{p}" for p in pointers}, []
    for line in ttir.splitlines():
        found = re.match(
            r"\s*(%\S+) = (tt\.\w+) (%\S+?)(?:, (%\S+))?(?: \{.*\})? : (.*?)(?: loc\(.*)?$", line
        )
        if not found:
            continue
        result, op, first, _, types = found.groups()
        if first in derived and op in ("tt.addptr", "tt.splat", "tt.broadcast"):
            derived.add(result)
            if op == "tt.addptr":
                offsets.append(types.rsplit(", ", 1)[-1].strip())
    return offsets


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")
def test_slot_offsets_are_64_bit():
    """slot * stride passes 2**31 in a large cache: the multiplication must be int64, not only its result."""
    for name, compiled in all_kernels(90, "bf16").items():
        if name == "reduce":
            continue
        ttir = compiled.asm["ttir"]
        caches = {"k_cache_ptr", "v_cache_ptr"} if name == "write" else {"k_ptr", "v_ptr"}
        wide = [t for t in cache_pointer_offsets(ttir, caches) if "i64" in t]
        assert len(wide) >= 2, f"{name}: no 64-bit offset reaches the caches"
        stride_names = ("k_cache_stride", "v_cache_stride") if name == "write" else ("k_stride", "v_stride")
        for stride in stride_names:
            uses = [
                line
                for line in ttir.splitlines()
                if re.search(rf"%{stride}\b", line) and "tt.func" not in line
            ]
            assert uses, f"{name}: {stride} is not used"
            for line in uses:
                assert "arith.extsi" in line and "i64" in line, f"{name}: {stride} used at 32 bits: {line}"
