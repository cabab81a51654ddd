"""Intervals, shares and the comparison of logits, against scipy's and numpy's own in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import special, stats

from kvbench.quality.answering import compare_logits
from kvbench.quality.figures import Positions, interval_of, share_of


def mean_of(total: np.ndarray) -> np.ndarray:
    return total[..., 0] / total[..., 1]


def test_the_interval_of_a_ratio_is_the_known_one_of_independent_prompts():
    """Prompts of one token each: the ratio is a mean, whose t interval is known."""
    values = np.random.default_rng(1).normal(5.0, 2.0, 400)
    found = interval_of("it", np.stack([values, np.ones(400)], axis=1), mean_of)
    low, high = stats.t.interval(0.95, 399, values.mean(), stats.sem(values))
    assert found["it"] == pytest.approx(values.mean())
    assert [found["it_low"], found["it_high"]] == pytest.approx([low, high], abs=0.05)


def test_prompts_are_the_units_and_not_their_tokens():
    """A thousand tokens of one prompt that all say the same are worth one."""
    values = np.random.default_rng(2).normal(0.0, 1.0, 20)
    one = interval_of("it", np.stack([values, np.ones(20)], axis=1), mean_of)
    many = interval_of("it", np.stack([1000 * values, np.full(20, 1000)], axis=1), mean_of)
    assert [many[end] for end in ("it_low", "it_high")] == pytest.approx([one[end] for end in ("it_low", "it_high")])


def test_a_skewed_statistic_has_a_longer_upper_side():
    values = np.random.default_rng(3).lognormal(0.0, 1.5, 60)
    found = interval_of("it", np.stack([values, np.ones(60)], axis=1), mean_of)
    assert found["it_high"] - found["it"] > 1.2 * (found["it"] - found["it_low"]) > 0


@pytest.mark.parametrize("columns", [[[2.0, 4.0]], [[2.0, 4.0]] * 9])
def test_prompts_that_are_all_alike_have_an_interval_of_no_width(columns):
    found = interval_of("it", np.array(columns), mean_of)
    assert found == {"it": 0.5, "it_low": 0.5, "it_high": 0.5}


@pytest.mark.parametrize(("right", "asked"), [(0, 10), (10, 10), (63, 64)])
def test_shares_have_wilsons_interval(right, asked):
    found, z = share_of(right, asked), stats.norm.ppf(0.975)
    share = right / asked
    middle, width = share + z * z / (2 * asked), z * np.sqrt(share * (1 - share) / asked + (z / (2 * asked)) ** 2)
    ends = (np.array([middle - width, middle + width])) / (1 + z * z / asked)
    assert [found["share"], found["low"], found["high"]] == pytest.approx([share, *ends], abs=1e-9)
    assert share_of(0, 0) == {}


def compared(expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor) -> Positions:
    flags = np.zeros(len(expected), dtype=bool)
    return compare_logits(expected, got, following, flags, ~flags)


def test_two_engines_logits_are_compared_as_scipy_compares_them():
    generator = torch.Generator().manual_seed(0)
    expected, got = (torch.randn(700, 997, generator=generator) * scale for scale in (3, 5))
    expected[3, 7], got[4, 8] = 900.0, -900.0  # a certain token; one that is nearly ruled out
    following = torch.randint(0, 997, (700,), generator=generator)
    found = compared(expected, got, following)
    log_p, log_q = (special.log_softmax(x.double().numpy(), axis=-1) for x in (expected, got))
    kld = special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(-1)
    finite = np.isfinite(kld)
    assert finite.sum() >= 698
    np.testing.assert_allclose(found.kld[finite], kld[finite], rtol=1e-9)
    theirs = torch.nn.functional.kl_div(
        got.double().log_softmax(-1), expected.double().log_softmax(-1), log_target=True, reduction="none"
    )
    np.testing.assert_allclose(found.kld, theirs.sum(-1).numpy(), rtol=1e-9)
    at = np.arange(700), following.numpy()
    np.testing.assert_allclose(found.expected_loss, -log_p[at])
    np.testing.assert_allclose(found.loss, -log_q[at])
    np.testing.assert_allclose(found.change, np.exp(log_q[at]) - np.exp(log_p[at]), atol=1e-12)
    assert (found.same == (log_p.argmax(-1) == log_q.argmax(-1))).all() and 0 < found.same.sum() < 700


def test_equal_logits_have_no_divergence_at_all():
    logits = torch.randn(9, 50)
    found = compared(logits, logits.clone(), torch.zeros(9, dtype=torch.int64))
    assert not found.kld.any() and not found.change.any() and found.same.all()
