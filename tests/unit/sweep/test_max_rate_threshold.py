"""The threshold rate and its interval: against direct integration, and how often simulated searches cover the truth."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from kvbench.sweep.rate_search import (
    FOUND,
    LAPSE,
    OUT_OF_RUNS,
    Bounds,
    SearchAnswer,
    Trial,
    interval,
    next_step,
    posterior,
)


def test_the_posterior_is_that_of_a_probit_curve_with_unknown_spread():
    """Against a fine grid of thresholds and spreads, summed by the trapezoidal rule."""
    met, missed, low, high = [7.0, 9.0, 9.0], [11.0, 12.0, 9.5], 6.0, 15.0
    log_threshold = np.linspace(math.log(low / 2), math.log(high * 2), 1500)
    log_spread = np.linspace(math.log(0.005), math.log(0.5), 150)
    likelihood = 1.0
    for rate in (*met, *missed):
        chance = (1 - LAPSE) * norm.cdf((log_threshold - math.log(rate)) / np.exp(log_spread)[:, None])
        likelihood = likelihood * (chance if rate in met else 1 - chance)
    below = np.cumsum(np.trapezoid(likelihood, log_spread, axis=0))
    found = posterior(met, missed, low, high, 0.1)
    for share in (0.025, 0.1, 0.5, 0.9, 0.975):
        quantile = math.exp(np.interp(share, below / below[-1], log_threshold))
        assert found.quantile(share) == pytest.approx(quantile, rel=0.02)  # ten spreads stand for all


@pytest.mark.parametrize(
    ("met", "missed", "closed"),
    [([8.0], [], (True, False)), ([], [8.0], (False, True)), ([8.0] * 3, [10.0] * 3, (True, True))],
)
def test_an_end_that_no_run_shows_is_open(met, missed, closed):
    found = interval(posterior(met, missed, 0.1, 100, 0.1), met, missed, 0.1, 100)
    assert (found.low is not None, found.high is not None) == closed
    assert (found.rate is not None) == all(closed)
    assert found.rate is None or found.low < found.rate < found.high
    assert found.low is None or found.low <= 8
    assert found.high is None or found.high >= 8


def test_an_end_beyond_the_rates_that_may_be_run_is_open():
    met, missed = [9.0, 9.5, 10.0, 10.0], [10.0]
    found = posterior(met, missed, 1.0, 10.0, 0.1)
    assert interval(found, met, missed, 1.0, 10.0).high is None
    assert interval(found, met, missed, 1.0, 100.0).high > 10


def search(threshold, spread, lapse, disturbed, rng):
    """One search of a server whose own threshold differs from run to run; ``disturbed``: share of invalid runs."""
    trials, bounds = [], Bounds(4.0, 2.0, 40.0, 0.1)
    while not isinstance(step := next_step(trials, bounds), SearchAnswer):
        invalid, below = rng.random() < disturbed, step <= threshold * math.exp(rng.normal(0, spread))
        met = None if invalid else bool(below and rng.random() >= lapse)
        trials.append(Trial(step, met, ("other work",) if invalid else (), "invalid" if invalid else None))
    assert isinstance(step, SearchAnswer) and len(trials) <= bounds.max_runs
    return step, trials


@pytest.mark.parametrize(("lapse", "disturbed"), [(0.0, 0.0), (0.03, 0.1)])
def test_intervals_cover_the_rate_at_which_half_of_the_runs_meet_the_slo(lapse, disturbed):
    """95 % intervals of 200 searches, of servers whose runs scatter by 1 to 20 % of the rate."""
    covered, found, steady = [], [], []
    for seed in range(200):
        rng = np.random.default_rng([seed, 15])
        threshold, spread = (
            10 * math.exp(rng.uniform(-0.35, 0.35)),
            math.exp(rng.uniform(math.log(0.01), math.log(0.2))),
        )
        answer, _ = search(threshold, spread, lapse, disturbed, rng)
        known = answer.interval
        covered.append((known.low or 0) <= threshold <= (known.high or math.inf))
        found.append(answer.outcome == FOUND)
        steady.append(spread < 0.04)
        assert answer.outcome in (FOUND, OUT_OF_RUNS)
        assert answer.outcome != FOUND or known.high <= known.low * 1.1
    assert 0.92 <= np.mean(covered) <= 0.98, np.mean(covered)
    assert np.mean(np.array(found)[steady]) > 0.9


def test_a_server_that_always_ends_alike_is_found_in_few_runs():
    for seed in range(15):
        rng = np.random.default_rng([seed, 16])
        threshold = 10 * math.exp(rng.uniform(-0.35, 0.35))
        answer, trials = search(threshold, 0.0, 0.0, 0.0, rng)
        assert answer.outcome == FOUND and answer.interval.low <= threshold <= answer.interval.high
        assert len(trials) <= 28
