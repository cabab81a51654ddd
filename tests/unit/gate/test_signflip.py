"""Sign flips against scipy's permutation test, and max-T against all patterns tried one by one."""

import itertools

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.timing.signflip import adjusted_p, critical_t, noninferior_p, sign_patterns, single_p, t_of_u

SCALES = np.array([0.002, 0.05, 1.0, 0.3])  # hypotheses of different noise: a mean alone cannot be compared


def sample(pairs: int, seed: int, shift: float = 0.4) -> np.ndarray:
    """[pairs, 4] of which the first two are worse by part of their noise, and two depend on each other."""
    x = np.random.default_rng(seed).normal(size=(pairs, len(SCALES)))
    x[:, 3] = 0.8 * x[:, 2] + 0.6 * x[:, 3]
    x[:, :2] += shift
    return x * SCALES


def student(x: np.ndarray, axis: int = 0) -> np.ndarray:
    return x.mean(axis=axis) / (x.std(axis=axis, ddof=1) / np.sqrt(x.shape[axis]))


def every_t(x: np.ndarray) -> np.ndarray:
    """[2^pairs, hypotheses] Student's t of every sign pattern, the observed one first."""
    return np.array([student(x * np.array(signs)[:, None]) for signs in itertools.product((1, -1), repeat=len(x))])


def scipy_p(x: np.ndarray) -> float:
    test = stats.permutation_test(
        (x,), student, permutation_type="samples", alternative="greater", n_resamples=np.inf, vectorized=True
    )
    return float(test.pvalue)


@pytest.mark.parametrize(("pairs", "seed"), [(5, 1), (9, 2)])
def test_p_of_one_hypothesis_is_that_of_scipys_permutation_test(pairs, seed):
    x = sample(pairs, seed)
    assert single_p(x) == pytest.approx([scipy_p(column) for column in x.T], abs=1e-12)
    assert adjusted_p(x[:, :1]) == pytest.approx([scipy_p(x[:, 0])], abs=1e-12)


@pytest.mark.parametrize("seed", range(2))
def test_adjusted_p_is_that_of_step_down_over_all_patterns_tried_one_by_one(seed):
    x = sample(8, seed, shift=0.9)
    t = every_t(x)
    order = np.argsort(-t[0])
    expected, so_far = np.empty(len(SCALES)), 0.0
    for rank, hypothesis in enumerate(order):  # Westfall and Young's algorithm 2.8 as it is written
        largest = t[:, order[rank:]].max(axis=1)
        so_far = max(so_far, float((largest >= t[0, hypothesis] - 1e-9).mean()))
        expected[hypothesis] = so_far
    assert adjusted_p(x) == pytest.approx(expected, abs=1e-12)


def test_the_smallest_p_is_one_pattern_and_better_is_no_harm_however_clear():
    x = np.abs(sample(8, 4)) + SCALES
    assert single_p(x).min() == adjusted_p(x).min() == 2.0**-8
    assert (single_p(-x) == 1).all() and (adjusted_p(-x) == 1).all()


def test_without_variance_zero_has_p_one_and_a_constant_harm_the_smallest_there_is():
    x = np.zeros((8, 3))
    x[:, 1] = 0.02
    x[:, 2] = -0.02
    assert single_p(x).tolist() == [1, 2.0**-8, 1]
    assert adjusted_p(x[:, :2]).tolist() == [1, 2.0**-8]
    assert adjusted_p(x).tolist() == [1, 2.0**-7, 1]  # all turned, the third looks as bad as the second does
    assert t_of_u(np.sqrt(8), 8) == np.inf


def test_neither_unit_nor_order_of_hypotheses_matters_and_more_of_them_never_make_p_smaller():
    x = sample(9, 6, shift=0.8)
    assert adjusted_p(x * [1, 1000, 1, 1e-3]) == pytest.approx(adjusted_p(x), abs=1e-12)
    assert adjusted_p(x[:, ::-1])[::-1] == pytest.approx(adjusted_p(x), abs=1e-12)
    assert len(set(adjusted_p(np.repeat(x[:, :1], 3, axis=1)))) == 1
    assert (adjusted_p(x)[:2] >= adjusted_p(x[:, :2]) - 1e-12).all()
    assert (adjusted_p(x) >= single_p(x) - 1e-12).all()
    assert adjusted_p(np.empty((8, 0))).shape == (0,)


def test_noninferiority_is_the_same_test_from_the_margin():
    x, margins = sample(8, 9), np.array([0.003, 0.06, 1.5, 0.2])
    expected = [scipy_p(margin - column) for column, margin in zip(x.T, margins, strict=True)]
    assert noninferior_p(x, margins) == pytest.approx(expected, abs=1e-12)
    assert noninferior_p(np.full((8, 1), 0.02), np.array([0.02])).tolist() == [1]  # at the margin is not below it


@pytest.mark.parametrize(("pairs", "alpha", "may_reach"), [(8, 0.004, 1), (8, 0.02, 5), (10, 0.003, 3)])
def test_critical_t_is_reached_by_as_many_patterns_as_alpha_allows(pairs, alpha, may_reach):
    x = sample(pairs, 10, shift=0.0)
    x -= x.mean(axis=0)
    largest = every_t(x).max(axis=1)
    assert (largest >= critical_t(x, alpha) - 1e-9).sum() == may_reach
    assert critical_t(x[:7], 2.0**-7 / 2) == np.inf  # no p is as small
    for many in (0, 21):
        with pytest.raises(ValueError, match=f"{many} pairs"):
            next(sign_patterns(many))
