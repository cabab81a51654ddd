"""The sampling kernel, compiled ahead of time. test_kernels_triton.py runs it."""

from __future__ import annotations

import os

import pytest

from kernels.compile_ahead import compile_for, read_resources
from kernels.triton_sample import BLOCK, NUM_WARPS, gumbel_argmax_kernel

TYPES = {
    "rows_ptr": "i64", "keys_ptr": "i64", "token_ptr": "i64",
    "largest_ptr": "fp32", "temperature_ptr": "fp32", "score_ptr": "fp32",
}  # fmt: skip


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize("arch", [80, 100])
def test_the_noise_stays_in_registers(arch: int) -> None:
    compiled = compile_for(gumbel_argmax_kernel, {"BLOCK": BLOCK, "num_warps": NUM_WARPS}, arch, TYPES)
    resources = read_resources(compiled)
    assert resources.spills == resources.stack_bytes == 0
    assert resources.registers * 32 * NUM_WARPS <= 65536 // 2, "two blocks an SM at least"
