"""The statistics of the served check: exact against scipy, and right about simulated servers."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, quantile_test

from kvbench.gate.timing.served import FLOOR_MS, MARGIN_MS, judge_served, median_bounds, sign_p
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS


@pytest.mark.parametrize("count", [6, 7, 60])
def test_the_test_and_the_bounds_are_those_of_scipy(count):
    values = np.random.default_rng(count).normal(0.3, 1, count)
    assert sign_p(values) == pytest.approx(binomtest((values > 0).sum(), count, alternative="greater").pvalue)
    for alpha in (0.025, 0.1):
        ends = quantile_test(values, q=0, p=0.5).confidence_interval(1 - 2 * alpha)
        assert median_bounds(values, alpha) == (ends.low, ends.high)
    assert sign_p(np.array([0.0, 0.0])) == 1 and sign_p(np.array([0.0, 1.0, 1.0])) == 0.25
    assert median_bounds(np.arange(5), 0.01) == (-np.inf, np.inf)


@pytest.mark.parametrize(
    ("slower_ms", "first", "second"),
    [
        (0.0, PASS, PASS),
        (-20.0, PASS, PASS),  # faster
        (2.5, PASS, PASS),  # certain, and below the floor of 15 % of 40 ms
        (9.0, INCONCLUSIVE, FAIL),  # between floor and margin: another launch decides
        (20.0, INCONCLUSIVE, FAIL),
    ],
)
def test_what_two_launches_show(slower_ms, first, second):
    rng = np.random.default_rng(5)
    base, candidate = 40 + rng.gamma(2, 0.5, (2, 2, 60))
    candidate += slower_ms
    assert judge_served(base[:1], candidate[:1], 2).outcome == first
    found = judge_served(base, candidate, 2)
    assert (found.outcome, found.launches) == (second, 2)
    assert found.difference == pytest.approx(slower_ms, abs=0.6) and found.floor == pytest.approx(6.2, abs=0.2)
    assert found.interval[0] < found.difference < found.interval[1] < found.most


def test_one_odd_launch_is_no_regression_and_fast_servers_are_held_to_milliseconds():
    rng = np.random.default_rng(6)
    base, candidate = 40 + rng.gamma(2, 0.5, (2, 2, 60))
    odd = candidate + np.array([[12.0], [0.0]])
    assert judge_served(base, odd, 2).outcome == PASS
    tiny = judge_served(base / 100, candidate / 100 + 1, 2)  # 0.4 ms: 1 ms is 250 %, and below the floor of 2 ms
    assert (tiny.outcome, tiny.floor, tiny.margin) == (PASS, FLOOR_MS, MARGIN_MS)
    base, candidate = 40 + np.random.default_rng(7).normal(0, 400, (2, 2, 20))
    assert judge_served(base, candidate, 2).outcome == INCONCLUSIVE  # wide scatter
    base, candidate = 40 + np.random.default_rng(9).normal(0, 1, (2, 1, 12))
    alone, of_four = (judge_served(base, candidate + 1, tests).p for tests in (1, 4))
    assert alone == sign_p(candidate[0] + 1 - base[0]) and of_four == min(1.0, 4 * alone) < 1


@pytest.mark.parametrize("bursts", [0.0, 0.1])
def test_error_rates_with_bursts_drift_and_launches_that_differ(bursts):
    """Unchanged servers never fail; at the margin at most ``alpha_pass`` of the checks pass at one launch."""
    rng = np.random.default_rng(8)
    runs, rounds = 400, 60
    machine = 1 + 0.3 * np.abs(np.cumsum(rng.normal(0, 0.05, (runs, rounds)), axis=1))
    launches = rng.normal(0, 0.03, (2, runs, 1))
    noise = rng.gamma(2, 1, (2, runs, rounds)) + 50 * (rng.random((2, runs, rounds)) < bursts)
    base, candidate = (40 * machine * np.exp(launches[i]) + noise[i] for i in range(2))
    found = [judge_served([b], [c], 2) for b, c in zip(base, candidate, strict=True)]
    assert np.mean([each.outcome == PASS for each in found]) > 0.97
    twice = [judge_served(base[i : i + 2], candidate[i : i + 2], 2).outcome for i in range(0, runs, 2)]
    assert FAIL not in twice
    level = 40 + noise
    at_margin = [judge_served([b], [c + 0.4 * np.median(b)], 2) for b, c in zip(*level, strict=True)]
    assert np.mean([each.most < each.margin for each in at_margin]) <= 0.03  # of 0.01: 2.5 standard errors of 400 runs
