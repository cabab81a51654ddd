"""Runs fused_layer_checks.py, and checks on the CPU what needs no kernel to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from engine.build import assemble_engine
from engine.config import EngineConfig
from kernels.compile_ahead import compile_for, read_resources
from kernels.triton_layers import (
    Heads,
    Norm,
    Rotation,
    act_mul,
    add_norm,
    rotate_and_write,
    rotate_constants,
    rotate_write_kernel,
)
from tests.support.hf_parts import loaded, model_folder

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)


@pytest.mark.timeout(600)
def test_in_the_interpreter():
    here = Path(__file__).parent
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-o", "addopts="]
    command += [str(here / "fused_layer_checks.py")]
    run = subprocess.run(
        command, env=env, capture_output=True, text=True, cwd=here.parents[3], timeout=590, check=False
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


@compiles
def test_one_kernel_serves_every_batch(monkeypatch):
    """Whatever Triton distinguishes launches by, batches of 1 to 300 tokens are one to it, and so are slots that begin
    anywhere in memory."""
    found: dict[str, set[str]] = {}
    backend = make_backend(GPUTarget("cuda", 80, 32))

    def run(self, *args, grid, warmup, **kwargs):
        binder = create_function_from_signature(self.signature, self.params, backend)
        _, specialised, options = binder(*args, **kwargs)
        found.setdefault(self.fn.__name__, set()).add(f"{specialised} {options}")

    monkeypatch.setattr(JITFunction, "run", run)
    norm = Norm(torch.ones(64), 1e-6, 0.0)
    heads, slots = Heads(4, 2, 16, 16), torch.zeros(302, dtype=torch.int64)
    caches = [torch.zeros(8, 2, 16) for _ in "kv"]
    for tokens in range(1, 301):
        x = torch.zeros(tokens, 64)
        add_norm(x, norm, x)
        angles = (torch.zeros(tokens, 16), torch.zeros(tokens, 16))
        rows = torch.zeros(tokens, 8 * 16)
        rotate_and_write(rows, angles, heads, Rotation(16), None, *caches, slots[tokens % 2 :][:tokens])
        act_mul(torch.zeros(tokens, 96), "silu")
    assert {name: len(kinds) for name, kinds in found.items()} == {
        "add_norm_kernel": 1, "rotate_write_kernel": 1, "act_mul_kernel": 1,
    }  # fmt: skip


@compiles
@pytest.mark.parametrize("kind", ["auto", "int4_per_token_head"])
def test_what_a_program_rotates_stays_in_registers(kind):
    heads = Heads(64, 8, 256, 256)
    constants = rotate_constants(heads, Rotation(256), 256, (1.0, 1.0), kind)
    types = {"slots_ptr": "i64", "q_eps": "fp32", "k_eps": "fp32"}
    if kind != "auto":
        types |= dict.fromkeys(("k_cache_ptr", "v_cache_ptr"), "u8")
        types |= dict.fromkeys(("k_scales_ptr", "v_scales_ptr"), "fp32")
    resources = read_resources(compile_for(rotate_write_kernel, constants, 90, types))
    assert resources.spills == resources.stack_bytes == 0


def test_settings_that_cannot_work_are_refused(tmp_path):
    with pytest.raises(ValueError, match="fused_layers cannot be true with torch_compile"):
        EngineConfig(fused_layers=True, torch_compile=True)
    with pytest.raises(ValueError, match="fused_layers cannot be 'yes': it is true, false or left out"):
        EngineConfig(fused_layers="yes")
    folder = model_folder(str(tmp_path))
    config = EngineConfig(model=folder, device="cpu", fused_layers=True, max_model_len=64, kernel_backend="torch")
    with pytest.raises(ValueError, match="fused_layers cannot be true with kernel_backend 'torch'"):
        assemble_engine(config, loaded(folder, "torch"))
