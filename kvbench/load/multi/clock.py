"""Times of other processes on the master's clock, and how well they are known. Pure functions.

Clocks are compared as NTP does it (RFC 5905, section 8): the master notes when it asks (t1) and has the answer (t4),
the worker when it received (t2) and answered (t3), each on its own clock. Of several exchanges the one with the
smallest round trip is taken: the true offset lies within half that round trip of the measured one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.load.validity import lag_limit_ms

_ROUNDING_S = 1e-6
_GOOD_ENOUGH_S = 1e-4


@dataclass(frozen=True)
class Reading:
    """A worker's clock at ``at`` [s, its own]: it is ``offset`` [s] ahead, true to ``error`` [s]."""

    at: float
    offset: float
    error: float


def exchange(t1: float, t2: float, t3: float, t4: float) -> Reading:
    """The reading of one exchange [s]: t1 and t4 are on the master's clock, t2 and t3 on the worker's."""
    round_trip = max(0.0, (t4 - t1) - (t3 - t2))
    return Reading((t2 + t3) / 2, ((t2 - t1) + (t3 - t4)) / 2, round_trip / 2)


def best_of(readings: Sequence[Reading]) -> Reading:
    """The reading with the smallest round trip (RFC 5905's clock filter)."""
    return min(readings, key=lambda reading: reading.error)


@dataclass(frozen=True)
class ClockMap:
    """One worker's clock against the master's, by readings in order of time, from before the load to after it.

    ``same_clock``: equal boot ids, so one kernel, whose CLOCK_MONOTONIC all its processes share, and every reading
    agrees (a container may shift its clock: time_namespaces(7)). Then nothing is corrected.
    """

    readings: tuple[Reading, ...]
    same_clock: bool

    def with_reading(self, new: Reading) -> ClockMap:
        """The same clock, read once more."""
        agrees = abs(new.offset) <= new.error + _ROUNDING_S
        return ClockMap((*self.readings, new), self.same_clock and agrees)

    def to_master(self, times: np.ndarray) -> np.ndarray:
        """Times of the worker's clock [s] on the master's; between two readings the offset changes linearly."""
        times = np.asarray(times, dtype=np.float64)
        if self.same_clock:
            return times
        return times - np.interp(times, [r.at for r in self._good], [r.offset for r in self._good])

    def from_master(self, time: float) -> float:
        """A moment of the master's clock on the worker's, by the newest reading."""
        return time if self.same_clock else time + self.readings[-1].offset

    @property
    def _good(self) -> list[Reading]:
        """The first and the last reading, and those between whose error is small enough."""
        limit = max(_GOOD_ENOUGH_S, 2 * min(r.error for r in self.readings))
        last = len(self.readings) - 1
        return [r for k, r in enumerate(self.readings) if k in (0, last) or r.error <= limit]

    @property
    def drift_s(self) -> float:
        """The largest change of the offset between two readings [s]."""
        return 0.0 if self.same_clock else float(np.abs(np.diff([r.offset for r in self._good])).max(initial=0.0))

    @property
    def round_trip_s(self) -> float:
        """The largest round trip of the readings that are used [s]."""
        return 2 * max(r.error for r in self._good)

    @property
    def error_s(self) -> float:
        """A bound of the error of ``to_master`` [s]: half the worst round trip, and the drift between readings."""
        return 0.0 if self.same_clock else max(r.error for r in self._good) + self.drift_s


def clock_map(first: Reading, worker_boot: str | None, master_boot: str | None) -> ClockMap:
    """A clock of which there is one reading."""
    return ClockMap((), worker_boot is not None and worker_boot == master_boot).with_reading(first)


def clock_reasons(name: str, clock: ClockMap, itl_p50_ms: float | None) -> list[str]:
    """Says why this worker's times may not be believed; empty when they may."""
    limit, error = lag_limit_ms(itl_p50_ms), clock.error_s * 1000
    if error <= limit:
        return []
    return [
        f"the clock of {name} is known to within {error:.2f} ms only (round trip "
        f"{clock.round_trip_s * 1000:.2f} ms, drift {clock.drift_s * 1000:.2f} ms), the limit is "
        f"{limit:.2f} ms (1 ms or 2 % of the median ITL); use a nearer machine."
    ]
