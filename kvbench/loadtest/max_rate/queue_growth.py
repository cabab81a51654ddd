"""Whether a server kept up with an open loop: requests in flight early and late, and how many ended of those that came.

Pure functions. A run cannot show every overload. One of a share x of the capacity lets the queue grow by x of the
arrivals, while the number of n arrivals of a Poisson process itself swings by sqrt(n): x shows from about 1/x^2
arrivals on (``arrivals_to_tell`` asks for three times as many). Where a limit on a latency is asked for, x shows after
limit/x seconds as well: by then the last ones wait that long.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.metrics.steady_window import in_system

GROWTH_SHARE = 0.05  # of the arrivals meanwhile: fewer were served than came
GROWTH_DEVIATIONS = 3.0  # of a Poisson count: what the number in flight of a server that keeps up swings by
_CERTAINTY = 3.0  # a settled part of 3/4 has then 1.5 deviations, and two of three runs decide
_SETTLED_QUANTILE = 0.95  # of the times in the system: the number in flight climbs until the long ones end, too


def arrivals_to_tell(share: float) -> float:
    """Arrivals of a run that shows an overload of ``share`` of the capacity by their number alone."""
    return _CERTAINTY / share**2


def share_told(arrivals: int) -> float:
    """The inverse of ``arrivals_to_tell``: the least overload that so many arrivals show."""
    return math.sqrt(_CERTAINTY / max(arrivals, 1))


@dataclass(frozen=True)
class Backlog:
    """Requests in flight, time averages over an ``early`` and a ``late`` part of the arrivals.

    ``arrivals``: from the middle of the one part to the middle of the other. ``came`` and ``ended``: requests between
    the moment at which even the long ones of the beginning had ended and the last arrival; both 0 where that was
    after the middle of the run.
    """

    early: float
    late: float
    arrivals: int
    came: int = 0
    ended: int = 0

    def falls_behind(self, tolerance: float) -> bool:
        """Whether fewer than (1 - tolerance) of what came was served, by numbers that can tell so much."""
        return self.came >= 1.0 / tolerance**2 and self.ended < (1.0 - tolerance) * self.came

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

    meanwhile = ((start > settled + third / 2) & (start <= last - third / 2)).sum()
    early, _, late = in_system(start, end, np.array([settled, settled + third, last - third, last]))
    return Backlog(float(early), float(late), int(meanwhile), *_came_and_ended(start, end))


def _came_and_ended(start: np.ndarray, end: np.ndarray) -> tuple[int, int]:
    begin, last = float(start[0]), float(start[-1])
    first = max(1, len(start) // 4)
    long = float(np.quantile(end[:first] - start[:first], _SETTLED_QUANTILE, method="lower"))
    settled = max(begin + (last - begin) / 4, begin + long)
    if settled > begin + (last - begin) / 2:
        return 0, 0
    return int(((start > settled) & (start <= last)).sum()), int(((end > settled) & (end <= last)).sum())


def _ordered(starts: Sequence[float], ends: Sequence[float]) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(np.asarray(starts, dtype=float), kind="stable")
    end = np.asarray(ends, dtype=float)[order]
    return np.asarray(starts, dtype=float)[order], np.where(np.isfinite(end), end, np.inf)
