"""The sampling kernel without a GPU: run in the interpreter, and compiled ahead of time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kernels.compile_ahead import compile_for, read_resources
from kernels.triton_sample import BLOCK, NUM_WARPS, gumbel_argmax_kernel

CHECKS = Path(__file__).with_name("triton_sample_checks.py")
TYPES = {
    "rows_ptr": "i64", "keys_ptr": "i64", "token_ptr": "i64",
    "largest_ptr": "fp32", "temperature_ptr": "fp32", "score_ptr": "fp32",
}  # fmt: skip


def run_checks(interpret: str) -> None:
    env = os.environ | {"TRITON_INTERPRET": interpret, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=CHECKS.parents[3])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


def test_draws_in_the_interpreter() -> None:
    run_checks("1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_draws_on_the_gpu() -> None:
    run_checks("0")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize("arch", [80, 100])
def test_the_noise_stays_in_registers(arch: int) -> None:
    compiled = compile_for(gumbel_argmax_kernel, {"BLOCK": BLOCK, "num_warps": NUM_WARPS}, arch, TYPES)
    resources = read_resources(compiled)
    assert resources.spills == resources.stack_bytes == 0
    assert resources.registers * 32 * NUM_WARPS <= 65536 // 2, "two blocks an SM at least"
