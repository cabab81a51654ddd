"""Runs fused_layer_checks.py, and checks on the CPU what needs no kernel to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.config import EngineConfig
from engine.planning import plan_engine
from kernels.compile_ahead import compile_for, read_resources
from kernels.layer_parts import Heads, Rotation
from kernels.triton_layers import rotate_constants, rotate_write_kernel

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


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="fused_layers cannot be true with torch_compile"):
        EngineConfig(fused_layers=True, torch_compile=True)
    with pytest.raises(ValueError, match="fused_layers cannot be 'yes': it is true, false or left out"):
        EngineConfig(fused_layers="yes")
    for device, backend in (("cpu", "torch"), ("cpu", "auto"), ("cuda", "numba")):
        with pytest.raises(ValueError, match=f"fused_layers cannot be true with kernel_backend '{backend}'"):
            EngineConfig(device=device, fused_layers=True, kernel_backend=backend)


@pytest.mark.parametrize("setting", ["fused_layers", "cuda_graphs"])
def test_what_only_a_gpu_has_is_refused_before_anything_is_loaded(setting):
    config = EngineConfig(**{setting: True})
    with pytest.raises(ValueError, match=f"{setting} cannot be true"):
        plan_engine(config, on_cpu=True)
