"""The tests of a search against simulated pairs: how often they err, whatever the scatter looks like."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.bisect.decide import (
    ERROR,
    EXACT_LOOKS,
    STEP_LOOKS,
    StepRule,
    has_part,
    is_worse,
    step_alpha,
)

SCATTERS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "heavy tails": lambda rng, n: rng.standard_t(3, size=n) / math.sqrt(3),
    "two speeds": lambda rng, n: rng.choice([-1.0, 1.0], size=n),
    "disturbed": lambda rng, n: rng.normal(size=n) * np.where(rng.random(n) < 0.1, 10.0, 1.0),
}


def step(rng, scatter, harm, effect, sd, alpha):
    """The answer of one step, after a first comparison of 8 pairs."""
    rule = StepRule(effect, [effect + sd * scatter(rng, 8)], alpha)
    pairs = harm + sd * scatter(rng, STEP_LOOKS[-1])
    return next((answer for n in STEP_LOOKS if (answer := rule.answer(pairs[:n]))), None)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("sd", [0.003, 0.02], ids=["sharp", "noisy"])
def test_a_step_errs_as_seldom_as_it_may(name, sd):
    rng, alpha, runs = np.random.default_rng(7), 0.05, 1500
    wrong = [step(rng, SCATTERS[name], 0.0, 0.02, sd, alpha) == "bad" for _ in range(runs)]
    wrong += [step(rng, SCATTERS[name], 0.02, 0.02, sd, alpha) == "good" for _ in range(runs)]
    assert np.mean(wrong) <= alpha + 3 * math.sqrt(alpha / (2 * runs))


def test_a_step_at_the_threshold_is_not_answered_more_often_than_it_may_err():
    rng, alpha, runs = np.random.default_rng(3), 0.05, 1500
    answers = [step(rng, SCATTERS["normal"], 0.01, 0.02, 0.004, alpha) for _ in range(runs)]
    decided = np.mean([answer in ("good", "bad") for answer in answers])
    assert decided <= 2 * alpha + 3 * math.sqrt(2 * alpha / runs)
    assert answers.count("between") > 0.5 * runs  # it has half of the effect, which is a part


def test_steps_are_quick_where_pairs_are_sharp():
    rng = np.random.default_rng(1)
    for harm, answer in ((0.0, "good"), (0.02, "bad"), (0.01, "between")):
        effect = [0.02 + 0.001 * rng.normal(size=8)]
        assert StepRule(0.02, effect, ERROR / 6).answer(harm + 0.001 * rng.normal(size=STEP_LOOKS[0])) == answer


def test_one_noisy_commit_is_not_answered_by_the_scatter_of_the_others():
    others = [0.02 + 1e-4 * np.arange(8)]
    assert StepRule(0.02, others, ERROR).answer([0.0, 0.0, 0.06, 0.04]) is None
    assert StepRule(0.02, others, ERROR).answer([0.024, 0.026, 0.025, 0.025]) == "bad"


def test_a_disturbed_pair_costs_little():
    rng = np.random.default_rng(2)
    effect, pairs = [0.02 + 0.001 * rng.normal(size=8)], 0.02 + 0.001 * rng.normal(size=9)
    pairs[2] = -0.05
    assert StepRule(0.02, effect, ERROR / 6).answer(pairs[:4]) is None
    assert StepRule(0.02, effect, ERROR / 6).answer(pairs[:6]) == "bad"
    assert is_worse([*pairs, 0.02, 0.021, 0.019]) is True


def test_the_steps_of_a_search_spend_what_it_may_err():
    spent, left = 0.0, 64
    while left > 1:
        spent, left = spent + step_alpha(spent, left), math.ceil(left / 2)
    assert spent == pytest.approx(ERROR)
    skewed = 0.0
    for left in (64, 60, 55, 40, 20, 10, 5, 2):  # skipped commits: git cannot halve them
        skewed += step_alpha(skewed, left)
    assert skewed <= ERROR * (1 + 1e-9)


@pytest.mark.parametrize("name", SCATTERS)
def test_no_change_is_confirmed_as_worse_seldom_whatever_the_scatter_is(name):
    rng, runs = np.random.default_rng(5), 3000
    worse = [is_worse(SCATTERS[name](rng, EXACT_LOOKS[-1][0])) is True for _ in range(runs)]
    assert np.mean(worse) <= ERROR + 3 * math.sqrt(ERROR / runs)


def test_the_fewest_pairs_that_can_confirm_anything_do():
    harms = [0.01] * EXACT_LOOKS[0][0]
    assert is_worse(harms) is True and is_worse([-harm for harm in harms]) is False
    assert is_worse(harms[:-1]) is None
    assert is_worse([*harms[:-1], -0.01]) is None
    assert is_worse([-0.5] + [0.01] * 11) is True and is_worse([-0.5] * 2 + [0.01] * 10) is None
    assert is_worse([-0.5] * 2 + [0.01] * 14) is True and is_worse([-0.5] * 3 + [0.01] * 13) is None
    assert is_worse([0.0] * 16) is None


def test_a_rest_is_a_part_only_if_it_is_shown_and_large_enough():
    spread = 1e-4 * np.arange(8)
    assert has_part(spread, 0.0101 + spread, 0.05)
    assert not has_part(spread, 0.009 + spread, 0.05)  # below a fifth of the effect
    assert not has_part(200 * spread, 0.0101 + 200 * spread, 0.05)  # not shown
    assert not has_part(0.0101 + spread, spread, 0.05)
