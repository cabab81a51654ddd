"""Statistics that several rooms share: pure functions on plain arrays."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np

_LARGEST_LOG = 700.0  # exp of more than 709 is no finite float64


def time_mean(at: Sequence[float] | np.ndarray, values: Sequence[float] | np.ndarray) -> float:
    """The mean over time of ``values`` read at ``at`` [s, ascending], without NaN (unknown) ones; NaN of none.

    Each reading stands for half the time to its neighbours, the outer two for the whole: readings are rarer where
    reading is slow, so in a mean of the readings alone a busy server would seem less busy.
    """
    times, readings = np.asarray(at, dtype=np.float64), np.asarray(values, dtype=np.float64)
    is_known = ~np.isnan(readings)
    times, readings = times[is_known], readings[is_known]
    if len(readings) < 2 or times[-1] <= times[0]:
        return float(readings.mean()) if len(readings) else float("nan")
    return float(np.average(readings, weights=np.gradient(times)))


def t_interval(values: Sequence[float] | np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the mean; of fewer than two values nothing is known: (nan, nan)."""
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return math.nan, math.nan
    from scipy.stats import t  # slow to import

    error = float(sample.std(ddof=1)) / math.sqrt(len(sample))
    half = float(t.ppf((1 + confidence) / 2, len(sample) - 1)) * error
    return float(sample.mean()) - half, float(sample.mean()) + half


def welch_interval(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, confidence: float = 0.95
) -> tuple[float, float]:
    """Welch's t interval of mean(b) - mean(a), with Satterthwaite's degrees of freedom.

    The samples are independent of each other. (nan, nan) of fewer than two values on a side.
    """
    samples = [np.asarray(sample, dtype=np.float64) for sample in (a, b)]
    if min(map(len, samples)) < 2:
        return math.nan, math.nan
    from scipy.stats import t  # slow to import

    shift = float(samples[1].mean() - samples[0].mean())
    parts = [float(sample.var(ddof=1)) / len(sample) for sample in samples]
    if not sum(parts):
        return shift, shift
    freedom = sum(parts) ** 2 / sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, samples, strict=True))
    half = float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(sum(parts))
    return shift - half, shift + half


def bounded_log(log_ratio: float | np.ndarray) -> np.ndarray:
    """Returns the log ratio, or 700 where it is more: of two far values an interval's end may be without bound."""
    return np.minimum(log_ratio, _LARGEST_LOG)


def detectable_shift(values: Sequence[float] | np.ndarray) -> float:
    """Returns the smallest shift that ``t_interval`` tells from 0 in 4 of 5 cases; nan of fewer than 2 values."""
    sample = np.asarray(values, dtype=np.float64)
    if len(sample) < 2:
        return math.nan
    return detectable_errors(len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))


@functools.cache
def detectable_errors(freedom: int, confidence: float = 0.95, power: float = 0.80) -> float:
    """The shift, in standard errors, at which Student's t test rejects with a chance of ``power`` (noncentral t)."""
    from scipy import optimize, stats  # slow to import

    critical = float(stats.t.ppf((1 + confidence) / 2, freedom))
    return float(optimize.brentq(lambda shift: stats.nct.sf(critical, freedom, shift) - power, 0.1, 10 * critical))
