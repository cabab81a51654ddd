"""Several workers' results as those of one load: samples on one clock, figures per process and together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent
import msgpack
import numpy as np

from kvbench.load.completion import Completion
from kvbench.load.multi.clock import ClockMap, clock_reasons
from kvbench.load.multi.shards import Shard
from kvbench.load.outcome import Clocked, client_figures
from kvbench.load.samples import FIRST_TIMES, Sample
from kvbench.load.validity import invalid_reasons
from kvbench.metrics.model import ClientFigures, ProcessClock, ProcessFigures
from kvbench.requests.request import RequestSpec

_ROWS_BETWEEN_PAUSES = 200
Data = dict[str, Any]
"""The content of a message between master and worker (multi/messages.py)."""


@dataclass(frozen=True)
class Ended:
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
    ended: Ended | None = None
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
    """``rows``, with pauses in which heartbeats are answered: a process that misses them for seconds counts as lost."""
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
