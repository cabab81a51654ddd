"""The smallest effect that repeats could have shown, against the noncentral t distribution by integration."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from kvbench.common.stats import detectable_shift
from kvbench.effects.comparison import Call, Comparison, call_of, contradicts, independent, paired, stored_call
from kvbench.metrics.definitions import ENGINE, SERVED


def power(shift: float, n: int) -> float:
    """Of the two-sided t test at 5 % of ``n`` values with standard deviation 1, over the distribution of their own."""
    df, middle = n - 1, shift * np.sqrt(n)
    limit = stats.t.ppf(0.975, df)

    def at(chi2: float) -> float:
        bound = limit * np.sqrt(chi2 / df)
        return (stats.norm.sf(bound - middle) + stats.norm.cdf(-bound - middle)) * stats.chi2.pdf(chi2, df)

    return quad(at, 0, np.inf)[0]


@pytest.mark.parametrize("n", [3, 5, 12])
def test_an_effect_of_this_size_is_told_four_times_in_five(n: int) -> None:
    values = np.linspace(-1, 1, n)
    values = (values - values.mean()) / values.std(ddof=1)
    assert power(detectable_shift(values), n) == pytest.approx(0.80, abs=1e-3)
    assert detectable_shift(3 * values) == pytest.approx(3 * detectable_shift(values))


def of(*ratios: float, metric: str = "output_throughput") -> Comparison:
    values = dict(enumerate(ratios))
    comparison = paired(metric, SERVED, values, dict.fromkeys(values, 1.0))
    assert comparison is not None
    return comparison


def test_the_interval_is_students_of_the_log_ratios() -> None:
    ratios = (1.2, 1.3, 1.25, 1.4)
    low, high = np.exp(stats.t.interval(0.95, 3, np.mean(np.log(ratios)), stats.sem(np.log(ratios))))
    assert (of(*ratios).low, of(*ratios).high) == (pytest.approx(low), pytest.approx(high))
    assert of(*ratios).ratio == pytest.approx(1.275) and of(*ratios).n == 4 and of(*ratios).spread == (1.2, 1.4)
    assert power(np.log1p(of(*ratios).smallest) / np.log(ratios).std(ddof=1), 4) == pytest.approx(0.80, abs=1e-3)
    assert of(0.9, 1.1).smallest is None
    comparison = paired("output_throughput", SERVED, {1: 2.0, 2: 0.0, 3: 6.0, 4: 1.0}, {1: 1.0, 2: 1.0, 3: 2.0})
    assert comparison.values == (2.0, 3.0)  # of repeats that both have, with positive values
    assert paired("output_throughput", SERVED, {1: 2.0}, {2: 1.0}) is None


@pytest.mark.parametrize(
    ("ratios", "call"),
    [
        ((0.95, 1.0, 1.05), Call.LEVEL),
        ((0.949, 1.0, 1.05), Call.UNDECIDED),
        ((0.95, 1.0, 1.051), Call.UNDECIDED),
        ((1.2, 1.21, 1.22), Call.BETTER),
        ((0.8, 0.81, 0.82), Call.WORSE),
        ((1.2, 1.21), Call.UNDECIDED),  # too few
        ((1.0, 1.2, 1.4), Call.UNDECIDED),  # its interval holds 1
    ],
)
def test_the_call_of_paired_repeats(ratios, call):
    assert of(*ratios).call == call
    opposite = {Call.BETTER: Call.WORSE, Call.WORSE: Call.BETTER}
    assert of(*ratios, metric="p95_ttft_ms").call == opposite.get(call, call)  # a latency: less is better


@pytest.mark.parametrize(
    ("low", "high", "call"),
    [
        (0.98, 1.02, Call.LEVEL),
        (0.979, 1.0, Call.UNDECIDED),
        (1.001, 1.02, Call.LEVEL),
        (1.001, 1.021, Call.BETTER),
        (0.9, 0.999, Call.WORSE),
        (1.0, 1.1, Call.UNDECIDED),
        (None, None, Call.UNDECIDED),
        (float("nan"), float("nan"), Call.UNDECIDED),
    ],
)
def test_the_call_of_an_interval_in_engine_time(low, high, call):
    assert call_of("output_throughput", ENGINE, low, high) == call
    assert call_of("kv_cache_usage_perc", ENGINE, 1.1, 1.2) == Call.UNDECIDED  # neither more nor less is better


def test_two_runs_are_compared_by_welchs_interval():
    new, old = [11.0, 12.0, 12.5], [10.0, 10.1, 9.9, 10.2]
    comparison = independent("output_throughput", SERVED, new, old)
    test = stats.ttest_ind(np.log(new), np.log(old), equal_var=False).confidence_interval(0.95)
    assert comparison is not None and comparison.call == Call.BETTER and comparison.n == 3
    assert (comparison.low, comparison.high) == (pytest.approx(np.exp(test.low)), pytest.approx(np.exp(test.high)))
    few = independent("output_throughput", SERVED, [11.0, 11.1], [10.0, 10.1])
    assert few is not None and few.low is not None and few.call == Call.UNDECIDED
    alone = independent("output_throughput", SERVED, [11.0], old)
    assert alone is not None and alone.low is None and alone.ratio == pytest.approx(11 / np.exp(np.mean(np.log(old))))
    assert independent("output_throughput", SERVED, [0.0, 1.0], old) is None
    far = independent("output_throughput", SERVED, [1e200, 1e-200], [1.0, 2.0])  # its interval is wider than floats are
    assert far is not None and far.high is not None and 1e300 < far.high < math.inf and far.call == Call.UNDECIDED


def test_the_inverse_is_the_other_against_this_one():
    comparison = of(1.2, 1.21, 1.22)
    other = comparison.inverse()
    assert (other.ratio, other.low, other.high) == (1 / comparison.ratio, 1 / comparison.high, 1 / comparison.low)
    assert other.call == Call.WORSE and other.values == tuple(1 / value for value in comparison.values)
    assert of(1.0, 1.0, 1.0).inverse().call == Call.LEVEL
    today = [Call.BETTER, Call.WORSE, Call.LEVEL, Call.UNDECIDED, Call.BETTER]
    assert [stored_call(word) for word in ("ahead", "behind", "level", "open", "better")] == today  # older versions'
    with pytest.raises(ValueError, match="sideways"):
        stored_call("sideways")


@pytest.mark.parametrize(
    ("paired", "shown", "visibly"),
    [
        (1.02, 0.98, True),  # on the other side of 1
        (0.99, 1.01, True),
        (1.02, 1.00, False),  # reads as level
        (1.004, 0.996, False),  # both are written 1.00x
        (2.00, 2.09, False),
        (2.00, 2.11, True),  # more than 5 % away
        (2.00, 1.89, True),
    ],
)
def test_which_ratio_of_the_values_shown_contradicts_the_paired_one(paired, shown, visibly):
    assert contradicts(paired, shown) == visibly
    assert contradicts(1.004, 0.996, decimals=3)
