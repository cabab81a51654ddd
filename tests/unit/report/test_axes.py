"""Points of curves and ticks of axes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from kvbench.report.style import ecdf, log_axis, thin


def test_every_point_of_a_thinned_ecdf_is_one_of_the_full_curve() -> None:
    samples = np.random.default_rng(0).exponential(10, 50_000)
    x, y = ecdf(samples, 120)
    whole = stats.ecdf(samples).cdf
    assert len(x) == 120 and (x[0], x[-1], y[-1]) == (samples.min(), samples.max(), 1.0)
    assert y == pytest.approx(whole.evaluate(x), abs=1e-12) and np.isin(x, whole.quantiles).all()


def test_a_short_curve_keeps_all_its_samples() -> None:
    x, y = ecdf(np.array([3.0, 1.0, 2.0, 2.0]))
    assert x.tolist() == [1, 2, 2, 3] and y.tolist() == [0.25, 0.5, 0.75, 1]


def test_thin_keeps_first_and_last() -> None:
    short = thin(pd.DataFrame({"t": range(10_000)}))
    assert len(short) <= 400 and (short["t"].iloc[0], short["t"].iloc[-1]) == (0, 9_999)


def test_log_axis_ticks_lie_on_one_two_five() -> None:
    assert log_axis(np.array([12.0, 300.0]))["tickvals"] == [20, 50, 100, 200]
    assert log_axis(np.array([1.0, 1.0, 1.0, 2000.0]))["tickvals"] == [1, 10, 100, 1000]
    assert log_axis(np.array([100.0, 110.0]))["tickvals"]  # too narrow for two ticks
    assert log_axis(np.array([0.0])) == {}
