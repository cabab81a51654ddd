"""The Triton kernels against float64: on CPU tensors in Triton's interpreter, on the GPU where there is one.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_kernels_triton.py runs this file in a process of its own.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from kernel_cases import Problem, check_decode, check_prefill

from kernels import get_backend
from kernels.api import AttentionOptions
from kernels.triton_backend import DecodePlan

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
BASE = Problem(lens=(70, 1, 33, 0), new=(20, 1, 33, 0), device=DEVICE)
PROBLEMS = {
    "plain": BASE,
    "one token a page": replace(BASE, page_size=1),
    "odd pages, odd dims, v smaller": replace(BASE, page_size=7, shape=(3, 20, 36), kv_heads=2),
    "contiguous, no groups": replace(BASE, contiguous=True, shape=(1, 80, 48)),
    "window": replace(BASE, window=9, page_size=5),
    "window that nobody reaches": replace(BASE, window=500),
    "window of one": replace(BASE, window=1),
    "softcap": replace(BASE, softcap=2.0),
    "sinks": replace(BASE, with_sinks=True, index_dtype=torch.int32),
    "everything": replace(BASE, window=40, softcap=5.0, with_sinks=True, shape=(8, 32, 32), kv_heads=1),
    "wide": replace(BASE, shape=(4, 128, 128)),
    "half": replace(BASE, dtype=torch.float16, with_sinks=True),
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_decode_and_prefill(name):
    p = PROBLEMS[name]
    tolerance = 1e-5 if p.dtype == torch.float32 else 5e-3
    check_decode("triton", p, tolerance, planned=True)
    check_prefill("triton", p, tolerance, planned=True)


@pytest.mark.parametrize("options", [{}, {"with_sinks": True}, {"window": 700, "softcap": 9.0}])
@pytest.mark.parametrize("splits", [1, 2, 5, 12])
def test_splits_and_their_reduction(monkeypatch, splits, options):
    """Splits with nothing in them, lengths that end inside a split, and the direct write."""
    monkeypatch.setattr("kernels.triton_backend.num_kv_splits", lambda *args: splits)
    p = replace(BASE, lens=(800, 64, 1, 0, 129), new=(1,) * 5, shape=(2, 16, 16), kv_heads=1, page_size=3)
    check_decode("triton", replace(p, **options), 1e-5)


def test_a_plan_with_a_larger_bound_changes_nothing():
    """What a captured graph does: the bound of the largest step serves every step."""
    backend = get_backend("triton")
    q, kv = torch.randn(2, 4, 32, device=DEVICE), torch.randn(40, 2, 32, device=DEVICE)
    args = torch.tensor([[0], [20]], device=DEVICE), torch.tensor([20, 3], device=DEVICE), 20
    exact = backend.decode_attention(
        q, kv, kv, *args, AttentionOptions(scale=0.2), plan=backend.plan_decode(*args, max_tokens=20)
    )
    bounded = backend.decode_attention(q, kv, kv, *args, AttentionOptions(scale=0.2), plan=DecodePlan(4096))
    torch.testing.assert_close(exact, bounded, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_write_skips_padding_and_touches_nothing_else(dtype):
    k = torch.randn(3, 4, 8, device=DEVICE).transpose(0, 1)  # heads first in memory
    v = torch.randn(4, 3, 6, device=DEVICE)
    k_cache = torch.zeros(9, 3, 8, dtype=dtype, device=DEVICE)
    v_cache = torch.zeros(9, 3, 6, dtype=dtype, device=DEVICE)
    slots = torch.tensor([7, -1, 0, -5], device=DEVICE)
    get_backend("triton").write_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[7], new[0].to(dtype)) and torch.equal(cache[0], new[2].to(dtype))
        assert not cache[[1, 2, 3, 4, 5, 6, 8]].any()
