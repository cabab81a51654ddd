"""The sampling kernel against torch's way of the same draws. Run like triton_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode
from triton_cases import DEVICE, full

from kvbench_engine.execution import gumbel, sampler
from kvbench_engine.execution.gumbel import allowed_tokens, random_bits, row_keys
from kvbench_engine.sequence import Drawn, Request, SamplingParams, Sequence
from kvbench_kernels import triton_sample
from kvbench_kernels.triton_sample import gumbel_bits, noisy_score
from tests.support.sampling import prepared, sample


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


@triton.jit
def write_noise(keys_ptr, out_ptr, BLOCK: tl.constexpr):
    draw = tl.program_id(0)
    token = tl.arange(0, BLOCK)
    score = noisy_score(tl.zeros((BLOCK,), tl.float32), 0.0, 1.0, tl.load(keys_ptr + draw), token)
    tl.store(out_ptr + draw * BLOCK + token, score)


@triton.jit
def worst_log2(x):
    """log2 with the largest error that a GPU's may have, up or down by the last bit of x."""
    up = (x.to(tl.int32, bitcast=True) & 1) * 2 - 1
    exact = tl.log2(x)
    return exact + up * 2.384185791015625e-07 * tl.where((x >= 0.5) & (x <= 2), 1.0, tl.abs(exact))


@pytest.mark.parametrize(
    "worst", [False, pytest.param(True, marks=pytest.mark.skipif(DEVICE == "cuda", reason="real"))]
)
def test_the_noise_is_gumbel(worst, monkeypatch):
    """In units of log 2 and shifted by a constant: torch's values one by one."""
    if worst:
        monkeypatch.setattr(triton_sample, "hardware_log2", worst_log2)
    keys = keys_of(64)
    out = torch.empty(len(keys), 1024, device=DEVICE)
    write_noise[(len(keys),)](keys, out, BLOCK=1024)
    noise = out.cpu() * np.log(2) + np.log(np.log2(np.e))
    expected = gumbel.add_gumbel_(torch.zeros(len(keys), 1024), keys.cpu())
    assert float((noise - expected).abs().max()) < 2e-5
    assert torch.equal(noise.argmax(1), expected.argmax(1))


class Draws:
    """Draws from rows in any order and more than once, with their settings."""

    def __init__(self, logits: torch.Tensor, settings: list[tuple[int, float, int, float]], seed: int = 3):
        rows, temperature, top_k, top_p = map(np.array, zip(*settings, strict=True))
        vocab = logits.shape[1]
        self.logits, self.settings, self.count = logits, settings, len(settings)
        self.columns = [
            torch.from_numpy(rows),
            torch.from_numpy(temperature.astype(np.float32)),
            keys_of(len(rows), seed).cpu(),
            torch.from_numpy(np.where(top_k == 0, vocab, np.minimum(top_k, vocab))),
            torch.from_numpy(top_p.astype(np.float32)),
        ]

    def by(self, draw_into, device: str) -> list[int]:
        rows, *rest = (column.to(device) for column in self.columns)
        out = torch.full((self.count + 1,), -7, device=device)
        draw_into(out, torch.arange(self.count, device=device).flip(0), self.logits.to(device), rows, *rest)
        assert int(out[-1]) == -7
        return out[:-1].flip(0).tolist()


def check_draws(draws: Draws) -> list[int]:
    """The kernels draw what torch draws, whose distribution is a matter of tests/unit/engine/execution."""
    got = draws.by(triton_sample.draw_into, DEVICE)
    assert got == draws.by(gumbel.draw_into, "cpu")
    return got


@pytest.mark.parametrize(
    ("vocab", "dtype"),
    [(1, torch.float32), (4097, torch.bfloat16), full(4096, torch.float32), full(9000, torch.float16)],
)
def test_draws_are_those_of_torch(vocab, dtype):
    """Some logits -inf, rows of a wider tensor; hot, cold and freezing; with every kind of limit."""
    generator = torch.Generator().manual_seed(vocab)
    wide = (torch.randn(6, vocab + 3, generator=generator) * 4).to(dtype).to(DEVICE)
    logits = wide[:, 3:]
    logits[2, torch.rand(vocab, generator=generator).to(DEVICE) < 0.7] = -torch.inf
    logits[2, vocab // 2] = 1.0
    heats = [1.0, 0.5, 2.0, 1.0, 1.0, 100.0, 0.01, 1e-30, 0.7, 1.0]
    rows = [0, 2, 1, 5, 5, 2, 3, 4, 0, 0]
    limits = [(0, 1.0), (40, 1.0), (0, 0.7), (300, 0.8), (3, 0.99), (1, 0.5), (0, 1e-30), (vocab - 1, 0.5)]
    check_draws(Draws(logits, [(row, heat, 0, 1.0) for row, heat in zip(rows, heats, strict=True)]))
    check_draws(Draws(logits, [(i % 6, (1.0, 3.0)[i // 3 % 2], *limit) for i, limit in enumerate(limits)]))


@pytest.mark.parametrize("limit", [(5, 1.0), (0, 0.5), (9, 0.6)], ids=["top_k", "top_p", "both"])
def test_nothing_is_drawn_but_what_is_allowed(limit):
    """A few values only, both zeros among them, so that ties lie at every edge; a flat row is searched for long."""
    values = torch.tensor([0.0, -0.0, -0.5, -1.0, 1.0])
    logits = values[torch.arange(40) * 7 % 5][None].to(DEVICE)
    scores = (logits[0] - 1).cpu().numpy()
    allowed = allowed_tokens(scores, np.float32(2), limit[0] or 40, np.float32(limit[1]))
    assert set(check_draws(Draws(logits, [(0, 2.0, *limit)] * 4))) <= set(allowed.tolist())


@pytest.mark.parametrize(
    ("logits", "top_k", "top_p", "count"),
    [((0, 0, 0, 0), 0, 0.5, 2), ((0, -0.1, -0.2, -0.3), 3, 1.0, 3), ((0, 0, -0.1, -0.1), 2, 0.5, 1)],
    ids=["top_p", "top_k", "both"],
)
def test_what_is_drawn_at_the_very_limit(logits, top_k, top_p, count):
    """The tokens before one reach top-p exactly, in float32 too; no other one equals the last of top-k."""
    draws = Draws(torch.tensor([logits], dtype=torch.float32, device=DEVICE), [(0, 1.0, top_k, top_p)] * 12)
    for draw_into, device in ((triton_sample.draw_into, DEVICE), (gumbel.draw_into, "cpu")):
        assert set(draws.by(draw_into, device)) == set(range(count))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, None])
def test_a_row_that_cannot_be_drawn_from_gives_a_token_of_the_vocabulary(bad):
    """NaN or infinity anywhere, or all of it -inf (None); its neighbours draw as ever."""
    logits = torch.randn(3, 2100, generator=torch.Generator().manual_seed(0)) * 4
    settings = [(i % 3, 1.0, *limit) for limit in [(0, 1.0), (7, 0.8)] for i in range(3)]
    good = Draws(logits.to(DEVICE), settings).by(triton_sample.draw_into, DEVICE)
    logits[1] = -torch.inf if bad is None else logits[1]
    if bad is not None:
        logits[1, 2099] = bad
    got = Draws(logits.to(DEVICE), settings).by(triton_sample.draw_into, DEVICE)
    assert all(0 <= token < 2100 for token in got)
    assert [t for i, t in enumerate(got) if i % 3 != 1] == [t for i, t in enumerate(good) if i % 3 != 1]


SETTINGS = [{}, {"temperature": 0.6}, {"top_k": 20}, {"top_p": 0.8}, {"top_k": 9, "top_p": 0.9}]
SETTINGS += [{"n": 3, "seed": 5}, {"temperature": 0.0}]


class Allocations(TorchDispatchMode):
    """Bytes of the results that have memory of their own, and the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function._schema.name)
        result = function(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in held:
                self.bytes += tensor.untyped_storage().nbytes()
        return result


@pytest.mark.parametrize("asked", [SETTINGS, SETTINGS[1:5]], ids=["every kind", "none is greedy"])
def test_the_sampler_with_the_kernels_draws_what_it_draws_on_a_cpu_and_copies_no_logits(asked, monkeypatch):
    logits = torch.randn(len(asked), 2100, generator=torch.Generator().manual_seed(0)) * 3
    logits[2, 7] = torch.nan
    sequences = [
        Sequence.of(Request(f"r{i}", tuple(range(3 + i)), SamplingParams(**params)))
        for i, params in enumerate(asked)
    ]
    theirs = sample(logits, sequences, 1)
    monkeypatch.setattr(sampler, "draw_into", triton_sample.draw_into)
    there = logits.to(DEVICE)
    ready, columns = prepared(sequences, 1, there.device)
    with Allocations() as seen:
        ours = ready.draw(there, columns)
        assert ours.tokens.shape == (len(asked),)
    assert ours.read() == theirs.read() and ours.read()[2] == Drawn(())
    assert ours.tokens.cpu().tolist() == theirs.tokens.tolist()
    assert 0 < seen.bytes < logits[0].nbytes, "not even one row"
    assert not seen.names & {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select"}, "the host waits"
