"""The oracle itself, against loops written from the definitions and against torch's own SDPA."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kvbench_kernels import get_backend
from kvbench_kernels.api import AttentionOptions, PrefillBatch


def by_loops(q, k, v, position, scale, window, softcap, sink):
    """One query of one head over tokens 0..position, in plain Python."""
    scores = []
    for j in range(position + 1):
        if window is not None and j <= position - window:
            continue
        s = scale * sum(a * b for a, b in zip(q.tolist(), k[j].tolist(), strict=True))
        scores.append((j, softcap * math.tanh(s / softcap) if softcap else s))
    total = sum(math.exp(s) for _, s in scores) + (math.exp(sink) if sink is not None else 0.0)
    return sum((math.exp(s) / total * v[j] for j, s in scores), torch.zeros_like(v[0]))


@pytest.mark.parametrize(("window", "softcap", "with_sinks"), [(None, None, False), (4, 3.0, True)])
def test_reference_is_the_definition(window, softcap, with_sinks):
    torch.manual_seed(0)
    seq_len, new, heads, kv_heads, page_size = 11, 6, 4, 2, 3
    k, v = torch.randn(seq_len, kv_heads, 8).double(), torch.randn(seq_len, kv_heads, 5).double()
    q, sinks = torch.randn(new, heads, 8).double(), torch.randn(heads).double()
    page_starts = torch.tensor([[12, 1, 7, 20]])
    slots = torch.tensor([12, 13, 14, 1, 2, 3, 7, 8, 9, 20, 21])
    k_cache, v_cache = torch.full((24, 2, 8), math.nan).double(), torch.full((24, 2, 5), math.nan).double()
    get_backend("torch").write_kv(k, v, k_cache, v_cache, slots)
    out = get_backend("torch").prefill_attention(
        q, k_cache, v_cache, PrefillBatch(page_starts, torch.tensor([0, new]), torch.tensor([seq_len]), page_size),
        AttentionOptions(0.3, window, softcap, sinks if with_sinks else None),
    )  # fmt: skip
    for i in range(new):
        for h in range(heads):
            kv = h // (heads // kv_heads)
            sink = sinks[h].item() if with_sinks else None
            expected = by_loops(q[i, h], k[:, kv], v[:, kv], seq_len - new + i, 0.3, window, softcap, sink)
            torch.testing.assert_close(out[i, h], expected)


def test_reference_agrees_with_sdpa():
    torch.manual_seed(1)
    q, k, v = torch.randn(40, 8, 16), torch.randn(40, 2, 16), torch.randn(40, 2, 16)
    batch = PrefillBatch(torch.tensor([[0]]), torch.tensor([0, 40]), torch.tensor([40]), 64)
    out = get_backend("torch").prefill_attention(q, k, v, batch, AttentionOptions(scale=0.25))
    heads_first = [x.transpose(0, 1)[None] for x in (q, k, v)]
    expected = F.scaled_dot_product_attention(*heads_first, is_causal=True, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write_skips_padding_and_touches_nothing_else(backend, dtype, index_dtype):
    k, v = torch.randn(2, 4, 8).transpose(0, 1), torch.randn(4, 2, 6)  # k: heads first in memory
    k_cache, v_cache = torch.zeros(9, 2, 8, dtype=dtype), torch.zeros(9, 2, 6, dtype=dtype)
    slots = torch.tensor([7, -1, 0, -5], dtype=index_dtype)
    get_backend(backend).write_kv(k, v, k_cache, v_cache, slots)
    for cache, new in ((k_cache, k), (v_cache, v)):
        assert torch.equal(cache[7], new[0].to(dtype)) and torch.equal(cache[0], new[2].to(dtype))
        assert not cache[[1, 2, 3, 4, 5, 6, 8]].any()
