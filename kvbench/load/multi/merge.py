"""Several workers' results as those of one load: samples on one clock, figures per process and together.

Clocks are compared as NTP does it (RFC 5905, section 8): the master notes when it asks (t1) and has the answer (t4),
the worker when it received (t2) and answered (t3), each on its own clock. Of several exchanges the one with the
smallest round trip is taken: the true offset lies within half that round trip of the measured one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent
import msgpack
import numpy as np

from kvbench.load.client_figures import Clocked, client_figures
from kvbench.load.completion import Completion
from kvbench.load.multi.shards import Shard
from kvbench.load.samples import FIRST_TIMES, Sample
from kvbench.load.validity import invalid_reasons, lag_limit_ms
from kvbench.metrics.model import ClientFigures, ProcessClock, ProcessFigures
from kvbench.requests.request import RequestSpec

_ROUNDING_S = 1e-6
_GOOD_ENOUGH_S = 1e-4
_ROWS_BETWEEN_PAUSES = 200
Data = dict[str, Any]
"""The content of a message between master and worker (multi/messages.py)."""


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
        """Returns the clock with one more reading."""
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


@dataclass(frozen=True)
class WorkerEnd:
    """A worker's streams have ended: why the server is ``gone``, or what stopped the worker; None: all returned."""

    done: int
    failed: int
    gone: str | None = None
    signal: int = 0
    error: str | None = None


@dataclass
class Member:
    """One worker as the master sees it. ``node``: Locust's name of it; ``answers``: the newest to each message.

    ``boot``: the boot id of its machine (None: not known); ``ended``: its streams have;
    ``lost``: why nothing more is expected of it. What it handed back: ``samples`` on the master's clock, ``lags`` [s]
    float64 [ticks] and ``clocked``.
    """

    node: str
    name: str
    host: str
    pid: int
    boot: str | None = None
    done: int = 0
    failed: int = 0
    ended: WorkerEnd | None = None
    lost: str | None = None
    answers: dict[str, Data] = field(default_factory=dict)
    shard: Shard | None = None
    clock: ClockMap | None = None
    samples: list[Sample] = field(default_factory=list)
    lags: np.ndarray = field(default_factory=lambda: np.empty(0))
    clocked: Clocked = field(default_factory=Clocked)

    def lose(self, why: str) -> None:
        """Counts this worker as lost from now on."""
        self.lost = self.lost or f"{self.name} was lost: {why}"


def samples_to_bytes(samples: Sequence[Sample]) -> bytes:
    """Returns what the master does not know of the samples, as msgpack."""
    return msgpack.packb(
        [(s.request.index, s.user, s.t0, s.ts, s.end, s.queued_s, vars(s.completion)) for s in in_slices(samples)]
    )


def samples_from_bytes(
    data: bytes, clock: ClockMap, requests: Mapping[int, RequestSpec], first_user: int = 0
) -> list[Sample]:
    """The reverse of ``samples_to_bytes``, every time moved onto the master's clock.

    ``requests``: by index; ``first_user`` is added to the users' numbers, which each worker counts from 0.
    """

    def moved(times: Sequence[float]) -> list[float]:
        return clock.to_master(np.asarray(times, dtype=np.float64)).tolist()

    samples = []
    for index, user, t0, ts, end, queued_s, fields in in_slices(msgpack.unpackb(data)):
        done = Completion(**fields)
        done.chunk_times, done.sent_times = moved(done.chunk_times), moved(done.sent_times)
        for name in FIRST_TIMES:
            if (moment := getattr(done, name)) is not None:
                setattr(done, name, moved([moment])[0])
        samples.append(Sample(requests[index], user + first_user, *moved([t0, ts, end]), done, queued_s))
    return samples


def in_slices(rows: Sequence[Any]) -> Iterator[Any]:
    """Yields ``rows`` with pauses for heartbeats: a process that misses them for seconds counts as lost."""
    for k, row in enumerate(rows):
        if k % _ROWS_BETWEEN_PAUSES == 0:
            gevent.sleep(0)
        yield row


def merged_client(members: Sequence[Member], mode: str, wall_s: float) -> tuple[ClientFigures, list[str]]:
    """The client's figures of the whole load, and what speaks against single workers (one sentence each).

    Lag, slip and coalesced chunks are those of all samples together; ``cpu_fraction`` is the busiest process's share of
    a core, since one process cannot have more than one. ``processes`` has each worker's own figures, which must keep
    the same limits: one slow worker of many may not hide among the others.
    """
    lags = np.concatenate([np.empty(0), *(m.lags for m in members)])
    whole = client_figures([s for m in members for s in m.samples], lags, [m.clocked for m in members], mode, wall_s)
    own = [client_figures(m.samples, m.lags, [m.clocked], mode, m.clocked.wall_s) for m in members]
    client = whole.model_copy(
        update={
            "cpu_fraction_total": whole.cpu_fraction,
            "cpu_fraction": max((c.cpu_fraction for c in own if c.cpu_fraction is not None), default=None),
            "processes": tuple(_process(m, figures) for m, figures in zip(members, own, strict=True)),
        }
    )
    reasons: list[str] = []
    if not invalid_reasons(client, 0):  # else the whole load has the same reason
        for member, figures in zip(members, own, strict=True):
            reasons += [f"{member.name}: {reason}" for reason in invalid_reasons(figures, 0)]
    for member in members:
        reasons += clock_reasons(member.name, member.clock, client.itl_p50_ms)
    return client, reasons


def _process(member: Member, figures: ClientFigures) -> ProcessFigures:
    clock = member.clock
    of_client = {name: value for name, value in figures if name in ProcessFigures.model_fields}
    return ProcessFigures(
        **of_client,
        name=member.name,
        host=member.host,
        pid=member.pid,
        requests=len(member.shard.requests),
        completed=sum(s.completion.ok for s in member.samples),
        clock=ProcessClock(
            same_clock=clock.same_clock,
            offset_ms=clock.readings[-1].offset * 1000,
            round_trip_ms=clock.round_trip_s * 1000,
            drift_ms=clock.drift_s * 1000,
            error_ms=clock.error_s * 1000,
            readings=len(clock.readings),
        ),
    )
