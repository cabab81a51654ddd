"""Whether a server kept up with an open loop: the number of requests in flight, early and late. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

GROWTH_SHARE = 0.05  # of the arrivals meanwhile: fewer were served than came
GROWTH_DEVIATIONS = 3.0  # of a Poisson count: what the number in flight of a server that keeps up swings by


@dataclass(frozen=True)
class Backlog:
    """Requests in flight, time averages over an ``early`` and a ``late`` part of the arrivals.

    ``arrivals``: from the middle of the one part to the middle of the other.
    """

    early: float
    late: float
    arrivals: int

    @property
    def grows(self) -> bool:
        """More came than was served: such a run has no latency of its own, a longer one would show a higher one.

        The growth must be beyond what the number in flight of a server that keeps up swings by (Poisson, as in an
        M/G/inf queue), and a share of the arrivals.
        """
        growth = self.late - self.early
        return growth > GROWTH_SHARE * self.arrivals and growth > GROWTH_DEVIATIONS * math.sqrt(max(self.early, 1.0))


def filling_s(starts: Sequence[float], ends: Sequence[float]) -> float:
    """Seconds until as many are in flight as will be: the median time of the first quarter of the arrivals."""
    start, end = _ordered(starts, ends)
    first = max(1, len(start) // 4)
    return float(np.median(end[:first] - start[:first]))


def backlog_of(starts: Sequence[float], ends: Sequence[float]) -> Backlog | None:
    """The backlog of an open loop from intended starts and ends [s], each [requests].

    The first quarter of the arrivals is left out, and ``filling_s``; of the rest the first third is compared with the
    last. None when that cannot be told: under 8 arrivals, or in less than twice ``filling_s``. An end that is not
    known (NaN) is one after the last arrival.
    """
    if len(starts) < 8:
        return None
    start, end = _ordered(starts, ends)
    begin, last = float(start[0]), float(start[-1])
    settled = max(begin + (last - begin) / 4, begin + filling_s(starts, ends))
    if settled >= begin + (last - begin) / 2:
        return None
    third = (last - settled) / 3

    def mean_in_flight(low: float, high: float) -> float:
        """Time average: each request's share of the window, added up."""
        return float(np.clip(np.minimum(end, high) - np.maximum(start, low), 0.0, None).sum() / (high - low))

    meanwhile = ((start > settled + third / 2) & (start <= last - third / 2)).sum()
    return Backlog(mean_in_flight(settled, settled + third), mean_in_flight(last - third, last), int(meanwhile))


def _ordered(starts: Sequence[float], ends: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.asarray(starts, dtype=float), kind="stable")
    end = np.asarray(ends, dtype=float)[order]
    return np.asarray(starts, dtype=float)[order], np.where(np.isfinite(end), end, np.inf)
