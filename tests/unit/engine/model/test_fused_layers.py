"""Runs fused_layer_checks.py, and checks on the CPU what needs no kernel to run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.support_check import logits_differ
from kvbench_engine.planning import plan_engine
from kvbench_kernels.compile_ahead import compile_for, read_resources
from kvbench_kernels.layer_parts import Heads, Rotation
from kvbench_kernels.triton_layers import rotate_constants, rotate_write_kernel
from tests.support.run_checks import run_checks

compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler"
)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_in_the_interpreter():
    run_checks(Path(__file__).with_name("fused_layer_checks.py"))


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
    for settings, words in (
        ({"fused_layers": True, "torch_compile": True}, "true with torch_compile"),
        ({"fused_layers": "yes"}, "'yes': it is true, false or left out"),
        ({"fused_layers": True, "kernel_backend": "torch"}, "true with kernel_backend 'torch'"),
        ({"fused_layers": True, "dtype": "float16", "device": "cpu"}, "true with dtype 'float16' on device 'cpu'"),
    ):
        with pytest.raises(ValueError, match=f"fused_layers cannot be {words}"):
            EngineConfig(**settings)
    with pytest.raises(ValueError, match="fused_layers cannot be true with dtype 'float16' on device 'cpu'"):
        EngineConfig(fused_layers=True, dtype="float16").check_against_device("cpu")
    assert EngineConfig(fused_layers=True, dtype="float16", device="cuda").fused_layers


def test_what_only_a_gpu_has_is_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="cuda_graphs cannot be true"):
        plan_engine(EngineConfig(cuda_graphs=True), on_cpu=True)


def test_in_half_precision_an_error_of_one_part_is_seen_and_that_of_one_token_is_rounding():
    """A rounding may send a token to another expert; wrong pages or positions damage, say, all decodes of a prompt."""
    expected = [torch.randn(23, 50, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    one_token, decodes = ([t.clone() for t in expected] for _ in "ab")
    one_token[0][3] += 1
    decodes[1][19:] += 1
    assert logits_differ(expected, one_token, torch.bfloat16) is None
    assert "in the worst part" in logits_differ(expected, decodes, torch.bfloat16)
    assert logits_differ(expected, one_token, torch.float32) is not None
