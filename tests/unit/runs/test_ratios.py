"""The smallest effect that repeats could have shown, against the noncentral t distribution by integration."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from scipy.integrate import quad

from kvbench.common.stats import detectable_shift
from kvbench.runs.ratios import contradicts, paired_ratio


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


def test_a_ratio_tells_the_smallest_effect_from_three_repeats_on() -> None:
    scattered = {1: 0.9, 2: 1.0, 3: 1.1}
    r = paired_ratio(scattered, dict.fromkeys(scattered, 1.0))
    assert r is not None and r.verdict == "unclear" and r.ci is not None
    logs = np.log(list(scattered.values()))
    assert power(np.log1p(r.detectable) / logs.std(ddof=1), 3) == pytest.approx(0.80, abs=1e-3)
    two = paired_ratio({1: 0.9, 2: 1.1}, {1: 1.0, 2: 1.0})
    assert two is not None and two.detectable is None


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
