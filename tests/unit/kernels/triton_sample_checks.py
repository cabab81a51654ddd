"""The sampling kernel against torch's way of the same draws: in Triton's interpreter, on the GPU where there is one.

Not collected by itself (no test_ prefix): TRITON_INTERPRET must be set before Triton is imported, so
test_kernels_triton.py runs it in a process of its own.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from scipy import stats

from engine.execution.gumbel import add_gumbel_, random_bits, row_keys
from engine.execution.sampler import sample
from engine.sequence import Request, SamplingParams, Sequence
from kernels.triton_sample import gumbel_argmax, gumbel_bits

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def keys_of(count: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(row_keys(np.full(count, seed, dtype=np.uint64), np.arange(count))).to(DEVICE)


@triton.jit
def write_bits(keys_ptr, out_ptr, BLOCK: tl.constexpr):
    draw = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    tl.store(out_ptr + draw * BLOCK + token, gumbel_bits(tl.load(keys_ptr + draw), token.to(tl.int64)))


def test_the_bits_are_those_of_torch():
    keys = torch.cat([keys_of(5), torch.tensor([0, -1, 2**63 - 1, -(2**63)], device=DEVICE)])
    out = torch.empty(len(keys), 512, dtype=torch.int64, device=DEVICE)
    write_bits[(len(keys),)](keys, out, BLOCK=512)
    assert torch.equal(out, random_bits(keys, 512))


@pytest.mark.parametrize(
    ("vocab", "dtype"), [(1, torch.float32), (2049, torch.float32), (2048, torch.bfloat16), (5000, torch.float16)]
)
def test_draws_are_those_of_torch(vocab, dtype):
    """Rows in any order and more than once, some with -inf, some of a wider tensor; hot, cold and freezing."""
    generator = torch.Generator().manual_seed(vocab)
    wide = (torch.randn(6, vocab + 3, generator=generator) * 4).to(dtype).to(DEVICE)
    logits = wide[:, 3:]
    logits[2, torch.rand(vocab, generator=generator).to(DEVICE) < 0.7] = -torch.inf
    logits[2, vocab // 2] = 1.0
    rows = torch.tensor([0, 2, 1, 5, 5, 2, 3, 4, 0, 0], device=DEVICE)
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.0, 1.0, 100.0, 0.01, 1e-30, 0.7, 1.0], device=DEVICE)
    keys = keys_of(len(rows), seed=3)
    largest = logits.float().amax(1)[rows]
    got = gumbel_argmax(logits, rows, largest, temperature, keys)
    scores = (logits[rows].float() - largest[:, None]) / temperature[:, None]
    noisy = add_gumbel_(scores, keys)
    assert torch.equal(got, noisy.argmax(1))
    assert torch.isfinite(logits[rows, got]).all()


@pytest.mark.skipif(DEVICE == "cpu", reason="the interpreter is slow, and its draws are torch's by the test above")
def test_frequencies_follow_the_softmax():
    logits = torch.tensor([[0.5, 2.0, -1.0, 0.0]], device=DEVICE)
    count = 100_000
    rows = torch.zeros(count, dtype=torch.int64, device=DEVICE)
    ones = torch.ones(count, device=DEVICE)
    tokens = gumbel_argmax(logits, rows, 2 * ones, 1.5 * ones, keys_of(count)).cpu().numpy()
    expected = torch.softmax(logits[0].double() / 1.5, 0).cpu().numpy()
    assert stats.chisquare(np.bincount(tokens, minlength=4), expected * count).pvalue > 1e-4


@pytest.mark.skipif(DEVICE == "cpu", reason="the sampler takes the kernel for CUDA tensors")
def test_the_sampler_draws_on_the_gpu_what_it_draws_on_the_cpu():
    settings = [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}]
    settings += [{"n": 3}, {"seed": 5}, {"temperature": 0.0}, {"best_of": 3}]
    logits = torch.randn(len(settings), 5000, generator=torch.Generator().manual_seed(0)) * 3
    sequences = [
        Sequence.of(Request(f"r{i}", tuple(range(3 + i)), SamplingParams(**params)))
        for i, params in enumerate(settings)
    ]
    ours, theirs = sample(logits.to(DEVICE), sequences, 1), sample(logits, sequences, 1)
    assert [drawn.token_ids for drawn in ours.read()] == [drawn.token_ids for drawn in theirs.read()]
    assert ours.tokens.cpu().tolist() == theirs.tokens.tolist()
