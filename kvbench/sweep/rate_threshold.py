"""The highest rate that meets an SLO, with its 95 % interval, from runs that met or missed it. Pure functions.

Runs at one rate do not all end alike: arrivals are drawn anew and the machine's speed changes. The highest rate that
meets the SLO is the one at which half of the runs meet it. A run at rate r meets it with probability
(1 - LAPSE) * Phi(log(threshold / r) / spread), a probit curve in the logarithm of the rate (Finney, Probit Analysis,
3rd ed. 1971, with the lapses of Wichmann and Hill, Perception & Psychophysics 63, 2001). ``spread``, the standard
deviation of a run's own log threshold, is not known either: it is summed out on a grid. The interval holds the middle
95 % of the posterior. It does not depend on why the runs were made at these rates or when they were stopped, so it
holds for a sequential search (Kontsevich and Tyler, Vision Research 39, 1999); how often it covers the true rate is
simulated in tests/unit/sweep/test_max_rate_threshold.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

CONFIDENCE = 0.95
LAPSE = 0.03  # share of the runs that miss at any rate, by something that lasts as long as a run and is not noticed
_MOST_SPREAD, _SPREADS = 0.5, 10  # up to 50 % of the rate; in as many classes, evenly in the logarithm, alike likely
_LEAST_SPREAD = 1 / 20  # of the tolerance: what is smaller changes nothing
_STEP = 1 / 10  # of the tolerance: the grid of log thresholds
_BEYOND = 2.0  # how far beyond the rates that may be run the threshold may lie


@dataclass(frozen=True)
class Interval:
    """Rates [1/s] between which the threshold lies with 95 % confidence; None: the end is open.

    ``rate``: the estimate, None when an end is open.
    """

    low: float | None
    rate: float | None
    high: float | None


@dataclass(frozen=True)
class Posterior:
    """How likely each threshold is. ``log_rates`` [cells], ascending; ``weights`` [cells], of sum 1."""

    log_rates: np.ndarray
    weights: np.ndarray

    def quantile(self, share: float) -> float:
        """The rate [1/s] below which the threshold lies with probability ``share``."""
        return math.exp(float(np.interp(share, np.cumsum(self.weights), self.log_rates)))


def posterior(met: Sequence[float], missed: Sequence[float], low: float, high: float, tolerance: float) -> Posterior:
    """What is known of the threshold after runs at the rates ``met`` and ``missed`` [1/s].

    Before any run every log rate from half of ``low`` to twice ``high`` is as likely as another. ``tolerance``: the
    relative width that the interval is to reach.
    """
    log_rates, spreads = _grid(low, high, tolerance)
    likelihood = np.zeros((len(spreads), len(log_rates)))
    for rates, outcome in ((met, True), (missed, False)):
        for rate in rates:
            likelihood += _log_chance(rate, outcome, low, high, tolerance)
    weights = np.exp(likelihood - likelihood.max()).sum(axis=0)
    return Posterior(log_rates, weights / weights.sum())


def _grid(low: float, high: float, tolerance: float) -> tuple[np.ndarray, np.ndarray]:
    step = math.log1p(tolerance) * _STEP
    log_rates = np.arange(math.log(low / _BEYOND), math.log(high * _BEYOND) + step, step)
    classes = np.geomspace(tolerance * _LEAST_SPREAD, _MOST_SPREAD, _SPREADS + 1)
    return log_rates, np.sqrt(classes[1:] * classes[:-1])


@lru_cache(maxsize=64)
def _log_chance(rate: float, met: bool, low: float, high: float, tolerance: float) -> np.ndarray:
    """The log probability that a run at ``rate`` ends so. [spreads, thresholds]"""
    from scipy.special import ndtr  # slow to import

    log_rates, spreads = _grid(low, high, tolerance)
    chance = (1 - LAPSE) * ndtr((log_rates - math.log(rate)) / spreads[:, None])
    return np.log(np.maximum(chance, 1e-300)) if met else np.log1p(-chance)


def interval(found: Posterior, met: Sequence[float], missed: Sequence[float], low: float, high: float) -> Interval:
    """The 95 % interval. An end beyond the rates that may be run (``low`` to ``high``) is open, and so is one on whose
    side no run was made that shows it. "At least" is never more than a rate that was met, "less than" never less than
    one that was missed.
    """
    tail = (1 - CONFIDENCE) / 2
    lower = min(found.quantile(tail), max(met)) if met else None
    upper = max(found.quantile(1 - tail), min(missed)) if missed else None
    lower = None if lower is None or lower < low else lower
    upper = None if upper is None or upper > high else upper
    return Interval(lower, None if lower is None or upper is None else found.quantile(0.5), upper)
