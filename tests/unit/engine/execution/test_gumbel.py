"""The noise that tokens are drawn with: the right distribution, and no two of its coordinates know of each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from kvbench_engine.execution.gumbel import add_gumbel_, random_bits, row_keys

MASK = 2**64 - 1
POSITIONS = 32  # of each seed


def keys_of(seeds: int, positions: int = POSITIONS) -> torch.Tensor:
    """Seeds and positions as requests have them: small and adjacent, where a weak mixer shows."""
    seed, position = np.divmod(np.arange(seeds * positions), positions)
    return torch.from_numpy(row_keys(seed.astype(np.uint64), position))


def uniforms(seeds: int = 64, vocab: int = 500) -> np.ndarray:
    return random_bits(keys_of(seeds), vocab).numpy() * 2.0**-63


def mix64(x: int) -> int:
    """SplitMix64's output function on a Python integer; ``>>`` is logical there."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


def test_a_key_is_splitmix64_of_seed_and_position():
    weyl = 0x9E3779B97F4A7C15
    assert mix64(weyl) == 0xE220A8397B1DCDAF, "the first output of the published generator for seed 0"
    seeds, positions = [0, 1, 2**64 - 1, 12345], [0, 7, 100_000, 2**31]
    expected = [mix64(mix64(s + weyl & MASK) + p * weyl & MASK) for s, p in zip(seeds, positions, strict=True)]
    got = row_keys(np.array(seeds, dtype=np.uint64), np.array(positions))
    assert got.view(np.uint64).tolist() == expected


def test_the_bits_are_plain_integer_arithmetic():
    """Exact, so that any device gives the same ones: against Python's integers, with the sign-copying shift."""

    def one(key: int, token: int) -> int:
        def signed(x: int) -> int:
            return (x + 2**63) % 2**64 - 2**63

        x = signed(key + token * 0x9E3779B97F4A7C15)
        x = signed((x ^ (x >> 32)) * 0xBF58476D1CE4E5B9)
        x = signed((x ^ (x >> 29)) * 0x94D049BB133111EB)
        return x ^ (x >> 32)

    keys = [0, -1, 2**63 - 1, -(2**63), 987654321]
    got = random_bits(torch.tensor(keys), 300)
    assert got.tolist() == [[one(key, token) for token in range(300)] for key in keys]
    assert int(got.min()) >= 0


def test_uniform_over_the_unit_interval_and_over_the_token_ids():
    u = uniforms()
    assert stats.kstest(u[::3].ravel(), "uniform").pvalue > 1e-4
    assert stats.chisquare(np.bincount(u.argmin(1) // 25, minlength=20)).pvalue > 1e-4, "each token wins as often"


@pytest.mark.parametrize("axis", ["token", "position", "seed", "seed against position"])
def test_neighbours_are_independent(axis):
    """Pairs of neighbouring coordinates fill the unit square evenly: chi-square over 20 x 20 fields."""
    u = uniforms().reshape(-1, POSITIONS, 500)
    first, second = {
        "token": (u[..., :-1], u[..., 1:]),
        "position": (u[:, :-1], u[:, 1:]),
        "seed": (u[:-1], u[1:]),
        "seed against position": (u[:-1, 1:], u[1:, :-1]),
    }[axis]
    fields = np.histogram2d(first.ravel(), second.ravel(), bins=20, range=[[0, 1], [0, 1]])[0]
    assert stats.chisquare(fields.ravel()).pvalue > 1e-4


def test_the_noise_is_gumbel_and_its_tail_is_there():
    noise = add_gumbel_(torch.zeros(2048, 500), keys_of(64)).numpy()
    assert stats.kstest(noise[::7].ravel(), "gumbel_r").pvalue > 1e-4
    largest = noise.max(1) - np.log(500)  # the maximum of n Gumbels is one Gumbel, log n further on
    assert stats.kstest(largest, "gumbel_r").pvalue > 1e-4
    assert len(np.unique(np.sort(noise, axis=None)[-1000:])) > 990, "what may win does not tie"


def test_the_ends_of_the_interval_stay_finite():
    """The extreme integers, through the same arithmetic: a row's only allowed token must beat -inf."""
    for bits in (0, 2**63 - 1):
        u = torch.tensor([bits]).to(torch.float32).mul_(2.0**-63).clamp_(2.0**-64, 1 - 2.0**-24)
        assert torch.isfinite(torch.log(-torch.log1p(-u))).all()
    scores = torch.full((2048, 3), -torch.inf)
    scores[:, 1] = 0.0
    assert add_gumbel_(scores, keys_of(64)).argmax(-1).unique().tolist() == [1]
