"""When a load was in its steady state. Pure functions on plain arrays, for the load process and the metrics alike.

Closed loop, and an open loop that sends all at once under a cap: while the target number of requests (or, with think
times, of conversations) was in flight. Open loop: from the moment at which the number of requests in the system, which
begins empty, has stopped climbing for good, to the last arrival, found by ``settled``. A rate that changes has a window
for each of its plateaus.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

LEAST_ARRIVALS = 20
AT_ONCE_S = 0.005  # arrivals no further apart are of one moment: over another machine's clock they are not equal
_BINS = 100
_DRIFT = 0.02  # a server whose answers become that much slower is still the same one


@dataclass(frozen=True)
class Plateau:
    """A stretch of one offered rate [requests/s; None: that of the whole load] from ``start`` to ``end`` [s].

    ``window``: its steady part, None where there is none.
    """

    start: float
    end: float
    rate: float | None
    window: tuple[float, float] | None


@dataclass(frozen=True)
class SteadyState:
    """``window`` [s]: of the whole load, None where it has none or several, and ``why``, a sentence, then.

    ``plateaus``: of a rate that changes.
    """

    window: tuple[float, float] | None
    why: str | None = None
    plateaus: tuple[Plateau, ...] = ()


def steady_state(
    t0: Sequence[float] | np.ndarray,
    ts: Sequence[float] | np.ndarray,
    ends: Sequence[float] | np.ndarray,
    load: Mapping[str, Any],
    sessions: Sequence[float | None] | np.ndarray | None = None,
) -> SteadyState:
    """Of requests with intended starts, sends and ends [s] and the session of each (None: of none), each [requests].

    ``load``: load.json's mode, concurrency, max_concurrency and notes. Failed requests were in flight too, so all rows
    count.
    """
    t0, ts, ends = (np.asarray(x, dtype=float) for x in (t0, ts, ends))
    known = np.isfinite(t0) & np.isfinite(ts) & np.isfinite(ends)
    t0, ts, ends = t0[known], ts[known], ends[known]
    if sessions is not None:
        sessions = [s for s, there in zip(sessions, known, strict=True) if there]
    if not len(t0):
        return SteadyState(None, "there were no requests")
    if load.get("mode") != "open":
        starts, stops = _by_session(ts, ends, sessions)
        return _at_target(starts, stops, load.get("concurrency"), "users")
    first, last = _arrivals_span(t0, sessions)
    if last - first <= AT_ONCE_S:
        return _at_target(ts, ends, load.get("max_concurrency"), "requests of max_concurrency")
    changing = (load.get("notes") or {}).get("plateaus")
    if changing is None:
        window = settled(t0, ends, first, last)
        return SteadyState(window, None if window else _unsettled(t0, first, last))
    stretches = [(float(begin), min(float(end), last), float(rate)) for begin, end, rate in changing]
    plateaus = tuple(Plateau(begin, end, rate, settled(t0, ends, begin, end)) for begin, end, rate in stretches)
    if not plateaus:
        return SteadyState(None, "the offered rate changed all the time")
    if len(plateaus) > 1:
        return SteadyState(
            None, f"the offered rate had {len(plateaus)} plateaus; each has figures of its own", plateaus
        )
    only = plateaus[0]
    return SteadyState(only.window, None if only.window else _unsettled(t0, only.start, only.end), plateaus)


def settled(t0: np.ndarray, ends: np.ndarray, begin: float, finish: float) -> tuple[float, float] | None:
    """From when the number in the system had stopped climbing, to ``finish``; None where it had not by half-time.

    That moment is the first at which the number, averaged over hundredths of [begin, finish], is at least the mean of
    what follows: the crossing-of-the-mean rule (Fishman, "Concepts and Methods in Discrete Event Digital Simulation",
    1973; Gafarian, Ancker and Morisaku, Naval Research Logistics Quarterly 25, 1978) with the mean of the rest. While a
    queue grows fast, the rest is always larger. One that grows slowly crosses by chance, so that from there on the
    number must also come back to where it was, as that of every stable queue does again and again: its lowest
    hundredth in the last third is no higher than the lower quartile of the first half.

    Share of simulated queues with a window, 400 of each kind (Poisson arrivals, exponential service unless said), by
    offered load (1: all that the servers can do):

    ========================  ====  ====  ====  ====  ====  ====  ====  ====
    servers, arrivals         0.50  0.80  0.90  0.95  1.05  1.10  1.20  1.50
    ========================  ====  ====  ====  ====  ====  ====  ====  ====
    8, 300                    0.99  0.93  0.77  0.67  0.45  0.32  0.10  0.00
    8, 1,000                  1.00  0.99  0.90  0.78  0.29  0.12  0.01  0.00
    64, 1,500                 0.98  0.95  0.89  0.79  0.25  0.06  0.01  0.00
    1, 300                    1.00  0.95  0.82  0.69  0.45  0.32  0.12  0.00
    8, 300, constant service  1.00  0.98  0.85  0.74  0.43  0.24  0.06  0.00
    8, 100                    0.90  0.75  0.64  0.60  0.43  0.39  0.28  0.05
    ========================  ====  ====  ====  ====  ====  ====  ====  ====

    A few hundred arrivals do not tell 95 % from 105 %: the number in the system swings by more than it grows by within
    them. Fewer than ``LEAST_ARRIVALS`` tell nothing: None.
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
    """Whether the number in the system [intervals] late falls to where it was for a quarter of the early time."""
    early = float(np.quantile(numbers[: len(numbers) // 2], 0.25))
    return float(numbers[-(len(numbers) // 3) :].min()) <= early * (1 + _DRIFT)


def comes_at(t0: np.ndarray, ts: np.ndarray, sessions: Sequence[float | None] | np.ndarray | None = None) -> np.ndarray:
    """The moment [s] that puts each request inside or outside a steady window. float64 [requests]

    Its intended start, so that one which then waits in the client stays in, however long; where all come at once under
    a cap, and the intended start tells nothing, its send. In closed loop the two are the same.
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
    """From the first moment with ``target`` in flight to the last such; None when there was none.

    The instants between one request and the same user's next do not end it.
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
    """Starts and ends of what a user is busy with: a request, or a conversation with its think times."""
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
