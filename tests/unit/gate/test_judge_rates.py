"""How often the gate errs, by simulation with fixed seeds; the whole tables: tests/benchmarks/gate_power.md.

24 cells in 4 classes, 3 metrics, launches in time order, three looks. About a minute where two cores are shared.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from kvbench.gate.detectable import seen_by
from kvbench.gate.judge import judge
from kvbench.gate.rules import DEFAULT_RULES
from kvbench.gate.signflip import adjusted_p
from kvbench.gate.verdict import FAIL, PASS
from tests.support.gate_simulation import (
    NOISES,
    Decisions,
    decide,
    harms,
    log_ratios,
    passes_at_margin,
    table,
    worsened,
)

RUNS = 2000
LAST = DEFAULT_RULES.looks[-1].pairs
EVERYWHERE, ONE_CLASS, ONE_CELL = slice(None), slice(0, 6), 0
CASES = [*((noise, 0.0) for noise in NOISES), ("normal", 0.5)]


@functools.cache
def unchanged(noise: str, shared: float) -> Decisions:
    """2,000 comparisons of a build with itself; none of them ends by a PASS, which would only make alarms rarer."""
    rng = np.random.default_rng([5, CASES.index((noise, shared))])
    return decide(log_ratios(noise, rng, RUNS, LAST, shared), passes=False)


def bounds(count: int, runs: int = RUNS) -> tuple[float, float]:
    """95 % Clopper-Pearson interval."""
    interval = stats.binomtest(count, runs).proportion_ci(0.95, "exact")
    return interval.low, interval.high


@pytest.mark.parametrize(("noise", "shared"), CASES)
def test_a_build_against_itself_fails_in_at_most_one_and_a_half_percent(noise, shared):
    found = unchanged(noise, shared)
    assert bounds((found.failed > 0).sum())[1] <= 0.015
    # without the floors: the p-values themselves keep to the looks' alphas
    count = int((found.rejected > 0).sum())
    assert stats.binomtest(count, RUNS, DEFAULT_RULES.alpha, alternative="greater").pvalue > 0.01


def test_p_values_alone_spend_their_alpha_and_no_more():
    """An exact test is not too careful either: 8 pairs reject in 1 of 256, all looks in a little under 1 %."""
    rejected = np.concatenate([unchanged(*case).rejected for case in CASES])
    low, high = bounds((rejected == 1).sum(), len(rejected))
    assert low <= 2.0**-8 <= high
    low, high = bounds((rejected > 0).sum(), len(rejected))
    assert low >= 0.005
    assert high <= 0.0105


def caught(metric: int, share: float, cells: slice | int, runs: int = 200, shared: float = 0.0) -> float:
    rng = np.random.default_rng([6, metric, round(share * 1000)])
    y = log_ratios("normal", rng, runs, LAST, shared)
    return float((decide(worsened(y, metric, share, cells), passes=False).failed > 0).mean())


@pytest.mark.parametrize(
    ("metric", "share", "cells", "least"),
    [
        (0, 0.03, EVERYWHERE, 0.99),
        (0, 0.03, ONE_CLASS, 0.99),
        (0, 0.03, ONE_CELL, 0.97),
        (1, 0.05, EVERYWHERE, 0.99),
        (1, 0.05, ONE_CLASS, 0.97),
        (1, 0.10, ONE_CELL, 0.95),
        (2, 0.03, EVERYWHERE, 0.99),
        (2, 0.05, ONE_CELL, 0.97),
    ],
)
def test_a_slowdown_is_caught(metric, share, cells, least):
    assert caught(metric, share, cells) >= least


def test_a_slowdown_is_caught_where_half_of_the_noise_is_common_to_all_cells():
    assert caught(0, 0.03, EVERYWHERE, shared=0.5) >= 0.99
    assert caught(1, 0.10, EVERYWHERE, shared=0.5) >= 0.99


def test_a_small_slowdown_of_one_noisy_cell_is_not_caught_and_the_pairs_say_what_would_be():
    assert caught(1, 0.03, ONE_CELL, runs=60) < 0.3


def test_a_build_against_itself_passes_and_a_slower_one_does_not():
    y = log_ratios("normal", np.random.default_rng(8), 150, LAST, shared=0.5)
    assert (decide(y).passed > 0).mean() >= 0.95
    assert (decide(worsened(y[:60], 0, 0.03, EVERYWHERE)).passed > 0).mean() <= 0.05


@pytest.mark.parametrize("noise", NOISES)
def test_a_harm_of_its_margin_passes_in_at_most_five_percent(noise):
    count = passes_at_margin(noise, np.random.default_rng([9, NOISES.index(noise)]), RUNS)
    low, _ = bounds(count)
    assert low <= sum(look.alpha_pass for look in DEFAULT_RULES.looks)
    assert count / RUNS >= 0.02  # 5 of 256 patterns at the first look: a PASS is not out of reach


@pytest.mark.parametrize("look", [0, 1])
def test_what_is_called_detectable_is_caught_in_about_four_of_five_cases(look):
    """The mean of what 50 comparisons say of one cell's TTFT, put into that cell in 250 others, at this one look."""
    pairs, alpha = DEFAULT_RULES.looks[look].pairs, DEFAULT_RULES.looks[look].alpha
    each, harm = harms(log_ratios("normal", np.random.default_rng([10, look]), 50, pairs))
    floors = np.array([h.floor for h in each])
    place = [h.id for h in each].index("cell/w0/c0/p95_ttft_ms")
    said = np.mean([seen_by(x, floors, alpha)[0][place] for x in harm])
    others = worsened(log_ratios("normal", np.random.default_rng([11, look]), 250, pairs), 1, np.expm1(said), ONE_CELL)
    power = np.mean([_cell_fails(y, look, place) for y in others])
    assert 0.7 <= power <= 0.9


def _cell_fails(y: np.ndarray, look: int, place: int) -> bool:
    each, harm = harms(y[None])
    return bool(
        adjusted_p(harm[0])[place] <= DEFAULT_RULES.looks[look].alpha and harm[0][:, place].mean() >= each[place].floor
    )


def test_the_simulated_decisions_are_those_of_judge():
    rng = np.random.default_rng(12)
    y = np.concatenate(
        [worsened(log_ratios("t4", rng, 8, 12), 1, share, ONE_CLASS) for share in (0.0, 0.03, 0.05, 0.10)]
    )
    found, seen = decide(y, replace(DEFAULT_RULES, looks=DEFAULT_RULES.looks[:2])), set()
    for run, log_ratio in enumerate(y):
        for number, look in enumerate(DEFAULT_RULES.looks[:2], start=1):
            outcome = judge(table(log_ratio[: look.pairs]), DEFAULT_RULES, number - 1).outcome
            assert (found.failed[run] == number) == (outcome == FAIL)
            assert (found.passed[run] == number) == (outcome == PASS)
            seen.add((number, outcome))
            if outcome in (FAIL, PASS):
                break
    assert len(seen) >= 4
