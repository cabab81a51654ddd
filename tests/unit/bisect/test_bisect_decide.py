"""The tests of a search against simulated pairs: how often they err, whatever the scatter looks like."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvbench.bisect.decide import (
    ERROR,
    EXACT_LOOKS,
    STEP_PAIRS,
    StepRule,
    has_part,
    is_worse,
    resolves,
    step_alpha,
    trimmed_mean,
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
    pairs = harm + sd * scatter(rng, STEP_PAIRS[1])
    return next((answer for n in range(STEP_PAIRS[0], len(pairs) + 1) if (answer := rule.answer(pairs[:n]))), None)


@pytest.mark.parametrize("name", SCATTERS)
@pytest.mark.parametrize("sd", [0.003, 0.02], ids=["sharp", "noisy"])
def test_a_step_errs_as_seldom_as_it_may(name, sd):
    rng, alpha, runs = np.random.default_rng(7), 0.05, 1500
    wrong = [step(rng, SCATTERS[name], 0.0, 0.02, sd, alpha) == "bad" for _ in range(runs)]
    wrong += [step(rng, SCATTERS[name], 0.02, 0.02, sd, alpha) == "good" for _ in range(runs)]
    assert np.mean(wrong) <= alpha + 3 * math.sqrt(alpha / (2 * runs))


def test_a_commit_with_half_of_the_effect_is_mostly_told():
    rng, runs = np.random.default_rng(3), 600
    answers = [step(rng, SCATTERS["normal"], 0.01, 0.02, 0.004, ERROR / 6) for _ in range(runs)]
    assert answers.count("between") > 0.95 * runs
    assert answers.count("good") + answers.count("bad") < 0.04 * runs


def test_steps_are_quick_where_pairs_are_sharp_and_affordable_where_they_are_not():
    rng = np.random.default_rng(1)
    for harm, answer in ((0.0, "good"), (0.02, "bad"), (0.01, "between")):
        effect = [0.02 + 0.001 * rng.normal(size=8)]
        assert StepRule(0.02, effect, ERROR / 6).answer(harm + 0.001 * rng.normal(size=STEP_PAIRS[0])) == answer
    rule, taken = StepRule(0.02, [0.02 + 0.013 * rng.normal(size=40)], ERROR / 6), []
    for _ in range(300):
        pairs = 0.013 * rng.normal(size=STEP_PAIRS[1])
        taken.append(next(n for n in range(3, 33) if n == 32 or rule.answer(pairs[:n])))
    assert np.mean(taken) < 12  # a fixed sample would take 31


def test_an_effect_below_the_scatter_of_its_pairs_is_not_resolved():
    spread = np.array([-1.5, -0.7, -0.2, 0.2, 0.7, 1.5, -0.4, 0.4])
    assert resolves(0.02 + 0.02 * spread) and not resolves(0.01 + 0.02 * spread)


def test_a_whole_search_is_right_in_an_affordable_number_of_pairs():
    """64 commits of which one is 2 % slower, as a search runs: opening, steps, the culprit against its parent."""
    rng, effect, sd, right, pairs = np.random.default_rng(4), 0.02, 0.005, 0, []

    def exact(harm):
        harms = harm + sd * rng.normal(size=EXACT_LOOKS[-1][0])
        used = next(n for n, _ in EXACT_LOOKS if is_worse(harms[:n]) is not None or n == len(harms))
        pairs[-1] += used
        return list(harms[:used])

    for _ in range(150):
        culprit, good, bad, spent = rng.integers(1, 65), 0, 64, 0.0
        pairs.append(0)
        series = [exact(effect)]
        while bad - good > 1:
            middle, alpha = (good + bad) // 2, step_alpha(spent, bad - good)
            rule, harms = StepRule(trimmed_mean(series[0]), series, alpha), sd * rng.normal(size=STEP_PAIRS[1])
            harms += effect if middle >= culprit else 0.0
            used = next(n for n in range(STEP_PAIRS[0], 33) if n == 32 or rule.answer(harms[:n]))
            answer, spent = rule.answer(harms[:used]), spent + alpha
            series.append(harms[:used])
            pairs[-1] += used
            if answer not in ("good", "bad"):
                break
            good, bad = (middle, bad) if answer == "good" else (good, middle)
        else:
            right += bad == culprit and is_worse(exact(effect)) is True
    assert right >= 145 and np.mean(pairs) < 45


def test_one_noisy_commit_is_not_answered_by_the_scatter_of_the_others():
    others = [0.02 + 1e-4 * np.arange(8)]
    assert StepRule(0.02, others, ERROR).answer([0.0, 0.0, 0.06, 0.02]) is None
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
