"""The steady state of a load. Pure functions on plain arrays, for the load process and the metrics.

Closed loop, and open loop with all requests at once under a cap: while the target number of requests (or, with think
times, of conversations) was in flight. Open loop: from the moment when the number of requests in the system stops
climbing (``settled``) to the last arrival. A rate that changes has one window for each of its plateaus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.metrics.model import LoadOutcome

LEAST_ARRIVALS = 20
AT_ONCE_S = 0.005  # arrivals that are no further apart came at once; clocks of other machines differ a little
_BINS = 100
_DRIFT = 0.02  # a server may become this much slower within a load and still keep up


@dataclass(frozen=True)
class RatePlateau:
    """A stretch of one offered rate [requests/s; None: the load's], and the window of its steady part or None. [s]"""

    start: float
    end: float
    rate: float | None
    window: tuple[float, float] | None


@dataclass(frozen=True)
class SteadyState:
    """The ``window`` [s] of a load; None where it has none or several (``why``). ``plateaus``: of a changing rate."""

    window: tuple[float, float] | None
    why: str | None = None
    plateaus: tuple[RatePlateau, ...] = ()


def steady_state(
    t0: Sequence[float] | np.ndarray,
    ts: Sequence[float] | np.ndarray,
    ends: Sequence[float] | np.ndarray,
    load: LoadOutcome | Mapping[str, Any],
    sessions: Sequence[float | None] | np.ndarray | None = None,
) -> SteadyState:
    """The steady state of a load whose requests have these intended starts, sends, ends [s] and sessions (None: none).

    ``load``: its mode, concurrency, max_concurrency and notes. Failed requests count: they were in flight too.
    """
    load = LoadOutcome.model_validate(load)
    t0, ts, ends = (np.asarray(x, dtype=float) for x in (t0, ts, ends))
    whole = np.isfinite(t0) & np.isfinite(ts) & np.isfinite(ends)
    t0, ts, ends = t0[whole], ts[whole], ends[whole]
    if sessions is not None:
        sessions = [s for s, there in zip(sessions, whole, strict=True) if there]
    if not len(t0):
        return SteadyState(None, "there were no requests")
    if load.mode != "open":
        starts, stops = _by_session(ts, ends, sessions)
        return _at_target(starts, stops, load.concurrency, "users")
    first, last = _arrivals_span(t0, sessions)
    if last - first <= AT_ONCE_S:
        return _at_target(ts, ends, load.max_concurrency, "requests of max_concurrency")
    changing = load.notes.get("plateaus")
    if changing is None:
        window = settled(t0, ends, first, last)
        return SteadyState(window, None if window else _unsettled(t0, first, last))
    stretches = [(float(begin), min(float(end), last), float(rate)) for begin, end, rate in changing]
    plateaus = tuple(RatePlateau(begin, end, rate, settled(t0, ends, begin, end)) for begin, end, rate in stretches)
    if not plateaus:
        return SteadyState(None, "the offered rate changed all the time")
    if len(plateaus) > 1:
        return SteadyState(
            None, f"the offered rate had {len(plateaus)} plateaus; each has figures of its own", plateaus
        )
    only = plateaus[0]
    return SteadyState(only.window, None if only.window else _unsettled(t0, only.start, only.end), plateaus)


def settled(t0: np.ndarray, ends: np.ndarray, begin: float, finish: float) -> tuple[float, float] | None:
    """The window from when the number in the system stops climbing to ``finish``; None where that is past half-time.

    The number is averaged over hundredths of [begin, finish]. It stops climbing at the first hundredth that is at least
    the mean of those after it: the crossing-of-the-mean rule (Fishman, "Concepts and Methods in Discrete Event Digital
    Simulation", 1973; Gafarian, Ancker and Morisaku, Naval Research Logistics Quarterly 25, 1978) with the mean of the
    rest. A queue that grows fast never crosses. One that grows slowly may cross by chance, so the number must also come
    back, as in every stable queue: its lowest hundredth in the last third must be no higher than the lower quartile of
    the first half.

    Share of 400 simulated queues with a window (8 servers, Poisson arrivals, exponential service), by offered load:

    ==============  ====  ====  ====  ====  ====  ====
    arrivals        0.50  0.80  0.90  1.05  1.20  1.50
    ==============  ====  ====  ====  ====  ====  ====
    100             0.90  0.74  0.64  0.43  0.28  0.05
    300             0.99  0.93  0.77  0.45  0.10  0.00
    1,000           1.00  0.99  0.90  0.29  0.01  0.00
    ==============  ====  ====  ====  ====  ====  ====

    A few hundred arrivals cannot tell 95 % from 105 %: within them the number in the system swings by more than it
    grows. None for fewer than ``LEAST_ARRIVALS``.
    """
    if ((t0 >= begin) & (t0 <= finish)).sum() < LEAST_ARRIVALS or finish <= begin:
        return None
    numbers = in_system(t0, ends, np.linspace(begin, finish, _BINS + 1))
    rest = np.cumsum(numbers[::-1])[::-1] / np.arange(_BINS, 0, -1)
    reached = int(np.flatnonzero(numbers >= rest)[0])  # the last one is its own rest
    if reached > _BINS // 2 or not _comes_back(numbers[reached:]):
        return None
    return begin + (finish - begin) * reached / _BINS, finish


def _comes_back(numbers: np.ndarray) -> bool:
    """Tests whether ``numbers`` [intervals] in the system, late, fall to the lower quartile of the first half."""
    early = float(np.quantile(numbers[: len(numbers) // 2], 0.25))
    return float(numbers[-(len(numbers) // 3) :].min()) <= early * (1 + _DRIFT)


def comes_at(t0: np.ndarray, ts: np.ndarray, sessions: Sequence[float | None] | np.ndarray | None = None) -> np.ndarray:
    """The moment [s] by which a request is inside or outside a steady window. float64 [requests]

    Its intended start, so that a request which then waits in the client for long is still inside. Its send where all
    come at once under a cap, since their intended starts are the same.
    """
    if not len(t0):
        return t0
    first, last = _arrivals_span(t0, sessions)
    return ts if last - first <= AT_ONCE_S else t0


def in_system(starts: np.ndarray, ends: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Mean number of requests between start and end over each interval between ``edges`` [s]. float64 [edges - 1]"""
    spent = np.array([np.maximum(x - starts, 0).sum() - np.maximum(x - ends, 0).sum() for x in edges])
    return np.diff(spent) / np.diff(edges)


def at_target(starts: np.ndarray, ends: np.ndarray, target: int) -> tuple[float, float] | None:
    """The window from the first moment with ``target`` in flight to the last one; None when there was none.

    Moments with fewer in between, such as between two requests of one user, do not end it.
    """
    moments = np.concatenate([starts, ends])
    steps = np.concatenate([np.ones(len(starts)), -np.ones(len(ends))])
    order = np.lexsort((-steps, moments))  # at equal times the start comes first: intervals are closed
    reached = np.flatnonzero(np.cumsum(steps[order]) >= target)
    if not reached.size:
        return None
    begin = float(moments[order][reached[0]])
    finish = float(moments[order][reached[-1] + 1])  # the step after the last time at target goes below it
    return (begin, finish) if finish > begin else None


def _at_target(starts: np.ndarray, ends: np.ndarray, target: Any, what: str) -> SteadyState:
    if not target:
        return SteadyState(None, "all requests arrived at once, so that there was no rate to hold")
    window = at_target(starts, ends, int(target))
    return SteadyState(window, None if window else f"the {int(target)} {what} were never all busy at once")


def _by_session(ts: np.ndarray, ends: np.ndarray, sessions: Any) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends of what keeps one user busy: a request, or a whole conversation with its think times."""
    if sessions is None:
        return ts, ends
    numbers = np.array([np.nan if s is None else float(s) for s in sessions], dtype=float)
    alone = np.isnan(numbers)
    which, place = np.unique(numbers[~alone], return_inverse=True)
    starts, stops = np.full(len(which), np.inf), np.full(len(which), -np.inf)
    np.minimum.at(starts, place, ts[~alone])
    np.maximum.at(stops, place, ends[~alone])
    return np.concatenate([ts[alone], starts]), np.concatenate([ends[alone], stops])


def _arrivals_span(t0: np.ndarray, sessions: Any) -> tuple[float, float]:
    """First and last arrival; a conversation arrives with its first turn."""
    starts, _ = _by_session(t0, t0, sessions)
    return float(starts.min()), float(starts.max())


def _unsettled(t0: np.ndarray, start: float, end: float) -> str:
    arrivals = int(((t0 >= start) & (t0 <= end)).sum())
    if arrivals < LEAST_ARRIVALS:
        return f"{arrivals} arrivals are too few to tell when the load was steady; {LEAST_ARRIVALS} are needed"
    return (
        "the number of requests in the system kept climbing: the server did not keep up with the offered rate, or the "
        "load was too short to tell"
    )
