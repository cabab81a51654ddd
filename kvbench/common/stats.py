"""Statistics that several rooms share: pure functions on plain arrays."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def time_mean(at: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """The mean over time of what was read at ``at`` [s, ascending]; NaN values are unknown. NaN of none.

    Each reading stands for half the time to its neighbours, the outer two for the whole: readings are rarer where
    reading is slow, so in a mean of the readings alone a busy server would seem less busy.
    """
    times, found = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    known = ~np.isnan(found)
    times, found = times[known], found[known]
    if len(found) < 2 or times[-1] <= times[0]:
        return float(found.mean()) if len(found) else float("nan")
    return float(np.average(found, weights=np.gradient(times)))


def t_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean; of fewer than two values nothing is known: (nan, nan)."""
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return math.nan, math.nan
    from scipy.stats import t  # slow to import

    error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
    half = float(t.ppf((1 + confidence) / 2, len(sample) - 1)) * error
    return float(sample.mean()) - half, float(sample.mean()) + half


def detectable_shift(values: Sequence[float] | np.ndarray, confidence: float = 0.95, power: float = 0.80) -> float:
    """The smallest shift of the mean that ``t_interval`` would tell from 0 with ``power``; nan of fewer than 2 values.

    (t(1 - alpha/2) + t(power)) times the standard error, as in H. S. Bloom, "Minimum detectable effects", Evaluation
    Review 19(5), 1995. With 3 values it is 5 % less than the noncentral t distribution says, with 5 or more 1 %.
    """
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return math.nan
    from scipy.stats import t  # slow to import

    quantiles = t.ppf([(1 + confidence) / 2, power], len(sample) - 1)
    return float(quantiles.sum()) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
