"""Figures of a simulated load, gathered while it runs: exact ones, in memory that does not grow with its tokens.

Kept of each request are six numbers of 8 bytes. The gaps between tokens are kept as different values with their
counts: all sequences of a step have the same gap, so there are about as many values as steps, 16 bytes each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from engine.counters import PHASES
from engine.sequence import TokenOutput
from kvbench.common.files import write_atomically
from kvbench.common.records import Record
from kvbench.load.completion import Completion
from kvbench.load.samples import SCHEMA, Sample
from kvbench.lockstep.instrument import result_row
from kvbench.metrics.latency import SESSION_BROKEN, distribution, weighted_distribution
from kvbench.metrics.model import LoadMetrics, LoadOutcome, PooledLatencies
from kvbench.metrics.rows import MS, gaps_within, sequence_tpots
from kvbench.metrics.steady_window import comes_at, steady_state
from kvbench.requests.request import RequestSpec
from kvbench.simulation.fleet.drive import EndedRequest, Replica

_ROWS, _TOKENS = 5_000, 1_000_000  # of a row group, at most
_GAPS = 1 << 20  # gaps that are kept one by one, before equal ones are counted
_COLUMNS = ("due", "ttft", "e2el", "queued", "session")  # of each answered request [s]; session NaN: none
_LEVELS = ("running", "waiting", "kv_usage")
Count = int | float


class Level(Record):
    """A quantity that changes from step to step. peak: of one replica; mean: over the time of the steps."""

    peak: Count
    mean: float | None


class SimulatedFigures(LoadMetrics):
    """Figures of a simulated load, and what the engine did. Fields that are not set are not stored."""

    busy_s: float
    running: Level
    waiting: Level
    kv_usage: Level
    steps: Count
    num_preemptions: Count
    recomputed_tokens: Count
    swapped_out_slots: Count
    swapped_in_slots: Count
    prefix_cache_queries: Count
    prefix_cache_hits: Count
    move_seconds: float
    phase_seconds: dict[str, Count]

    @property
    def hit_rate(self) -> float | None:
        return self.prefix_cache_hits / self.prefix_cache_queries if self.prefix_cache_queries else None


class FleetFigures(SimulatedFigures):
    """Figures of all replicas together.

    imbalance: the busiest replica's output tokens and busy time over the mean; replicas: of each the same figures
    seconds_by_class: of the steps' time, by class of operator; notes: how the requests were made, and on step times
    """

    imbalance: dict[str, float] = Field(default_factory=dict)
    replicas: tuple[SimulatedFigures, ...] = ()
    seconds_by_class: dict[str, float]
    notes: Mapping[str, Any]


class Gaps:
    """Times between tokens [s]: different values, ascending, and how often each came."""

    def __init__(self) -> None:
        self._values, self._counts = np.empty(0), np.empty(0, dtype=np.int64)
        self._new: list[np.ndarray] = []
        self._pending = 0

    def add(self, gaps: np.ndarray) -> None:
        self._new.append(gaps)
        self._pending += len(gaps)
        if self._pending > max(_GAPS, len(self._values)):
            self.counted()

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """The values, and how often each came."""
        if self._pending:
            self.add_counted(np.empty(0), np.empty(0, dtype=np.int64))
        return self._values, self._counts

    def add_counted(self, values: np.ndarray, counts: np.ndarray) -> None:
        every = np.concatenate([self._values, values, *self._new])
        times = np.concatenate([self._counts, counts, np.ones(self._pending, dtype=np.int64)])
        self._new, self._pending = [], 0
        self._values, where = np.unique(every, return_inverse=True)
        self._counts = np.zeros(len(self._values), dtype=np.int64)
        np.add.at(self._counts, where, times)


@dataclass
class Tally:
    """The work of one replica. ``rows``: ``_COLUMNS`` of each answered request; ``tpot``: of each sequence with one.

    good: requests that met every limit; not_sent: later turns of those that failed
    peaks, integrals: of ``_LEVELS``, over the time of the steps
    """

    rows: array = field(default_factory=lambda: array("d"))
    tpot: array = field(default_factory=lambda: array("d"))
    gaps: Gaps = field(default_factory=Gaps)
    sent_first: float = math.inf
    last: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    completed: int = 0
    good: int = 0
    failed: int = 0
    not_sent: int = 0
    failure: str | None = None
    busy_s: float = 0.0
    peaks: list[Count] = field(default_factory=lambda: [0.0] * len(_LEVELS))
    integrals: list[float] = field(default_factory=lambda: [0.0] * len(_LEVELS))

    def end(self, ended: EndedRequest, limits: Mapping[str, float]) -> None:
        """Counts a request; ``limits`` [ms] of ttft_ms, ttfo_ms (the same here), tpot_ms, itl_ms and e2el_ms."""
        self.sent_first = min(self.sent_first, ended.sent)
        if ended.error is not None:
            self.failed += 1
            self.not_sent += ended.unsent
            self.failure = self.failure or ended.error
            return
        times, tokens = np.array(ended.times), ended.output_tokens
        self.last = float(times[-1])  # requests end in the order of the clock
        ttft, e2el = float(times[0]) - ended.due, self.last - ended.due
        if ended.sequences or ended.tokens:
            gaps = gaps_within(times, ended.sequences or None)
            tpots = sequence_tpots(times, ended.sequences or None, ended.tokens or [1] * len(times), tokens)
            tpots = tpots[~np.isnan(tpots)].tolist()
        else:
            gaps = np.diff(times)
            tpots = [(self.last - float(times[0])) / (tokens - 1)] if tokens > 1 else []
        session = math.nan if ended.spec.session is None else ended.spec.session
        self.rows.extend((ended.due, ttft, e2el, ended.sent - ended.due, session))
        self.tpot.extend(tpots)
        self.gaps.add(gaps)
        self.completed += 1
        self.input_tokens += len(ended.spec.prompt_token_ids or ())
        self.output_tokens += tokens
        self.cached_tokens += ended.cached
        if limits:
            values = {"ttft_ms": ttft, "ttfo_ms": ttft, "e2el_ms": e2el, "tpot_ms": max(tpots, default=0.0)}
            values["itl_ms"] = float(gaps.max()) if len(gaps) else 0.0
            self.good += all(values[name] * MS <= limit for name, limit in limits.items())

    def step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        engine, seconds = replica.engine, replica.clock.now - replica.step_began
        kv = engine.kv.stats()
        running = max(len(engine.scheduler.running), len(outputs))
        self.busy_s += seconds
        for i, value in enumerate((running, engine.scheduler.num_waiting, kv.slots_reserved / kv.slots_total)):
            if value > self.peaks[i]:
                self.peaks[i] = value
            self.integrals[i] += value * seconds


class Recorder:
    """The ``on_end`` and ``on_step`` of a ``Drive``.

    limits: an SLO [ms]; write: gets each request that ended; ended: so many requests have
    """

    def __init__(
        self, replicas: Sequence[Replica], limits: Mapping[str, float], write: Callable[[EndedRequest], None]
    ) -> None:
        self._replicas, self._limits, self._write = replicas, limits, write
        self._tallies = [Tally() for _ in replicas]
        self.ended = 0
        self._before = [engine_counters(replica) for replica in replicas]

    def on_end(self, ended: EndedRequest) -> None:
        self.ended += 1
        self._tallies[ended.replica].end(ended, self._limits)
        self._write(ended)

    def on_step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        self._tallies[replica.number].step(replica, outputs)

    def columns(self) -> list[np.ndarray]:
        """Returns ``_COLUMNS`` of all answered requests, replica by replica."""
        return list(_rows(self._tallies).T.copy())

    def figures(self, load: LoadOutcome, seconds_by_class: Mapping[str, float]) -> FleetFigures:
        """The figures of all replicas together."""
        counters = [
            {name: value - before[name] for name, value in engine_counters(replica).items()}
            for replica, before in zip(self._replicas, self._before, strict=True)
        ]
        whole = _figures(self._tallies, counters, self._limits) | self._steady(load)
        whole |= {"seconds_by_class": dict(seconds_by_class), "notes": load.notes}
        if len(counters) == 1:
            return FleetFigures(**whole)
        replicas = [
            SimulatedFigures(**_figures([tally], [counted], self._limits))
            for tally, counted in zip(self._tallies, counters, strict=True)
        ]
        imbalance = {}
        for name in ("total_output_tokens", "busy_s"):
            values = [getattr(replica, name) for replica in replicas]
            if sum(values):
                imbalance[name] = max(values) * len(values) / sum(values)
        return FleetFigures(**whole, imbalance=imbalance, replicas=tuple(replicas))

    def _steady(self, load: LoadOutcome) -> dict[str, Any]:
        due, ttft, e2el, queued, sessions = self.columns()
        sessions = None if np.isnan(sessions).all() else sessions
        steady = steady_state(due, due + queued, due + e2el, load, sessions)
        begin, end = steady.window or (math.nan, math.nan)
        moments = comes_at(due, due + queued, sessions)
        inside = (moments > begin) & (moments <= end)
        latency = PooledLatencies(ttft_ms=distribution(ttft[inside] * MS), e2el_ms=distribution(e2el[inside] * MS))
        begin, end = steady.window or (None, None)
        return {"steady_start_s": begin, "steady_end_s": end, "steady_note": steady.why, "steady_latency": latency}


def _rows(tallies: Sequence[Tally]) -> np.ndarray:
    return np.concatenate([np.frombuffer(tally.rows).reshape(-1, len(_COLUMNS)) for tally in tallies])


def engine_counters(replica: Replica) -> dict[str, Count]:
    """Reads the engine's counters, and the seconds of each phase; ``prepare`` counts ``move_seconds`` too."""
    stats = replica.engine.stats()
    return {
        "steps": stats.steps,
        "num_preemptions": stats.num_preemptions,
        "recomputed_tokens": stats.recomputed_tokens,
        "swapped_out_slots": stats.counters.swapped_out_slots,
        "swapped_in_slots": stats.counters.swapped_in_slots,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        **stats.phase_seconds,
        "move_seconds": replica.engine.executor.phase_seconds["move"],
    }


def _figures(
    tallies: Sequence[Tally], counters: Sequence[Mapping[str, Count]], limits: Mapping[str, float]
) -> dict[str, Any]:
    """The fields of ``SimulatedFigures``."""
    _, ttft, e2el, queued, _ = _rows(tallies).T.copy() * MS
    gaps = Gaps()
    for tally in tallies:
        gaps.add_counted(*tally.gaps.counted())
    values, counts = gaps.counted()
    begin, last = min(tally.sent_first for tally in tallies), max(tally.last for tally in tallies)
    seconds = max(last - begin, 0.0) if np.isfinite(begin) else 0.0

    def total(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies)

    def rate(*names: str) -> float | None:
        return sum(map(total, names)) / seconds if seconds else None

    engine = {name: sum(counted[name] for counted in counters) for name in counters[0]}
    phases = {name: engine.pop(name) for name in PHASES}
    busy = sum(tally.busy_s for tally in tallies)
    for i, name in enumerate(_LEVELS):
        mean = sum(tally.integrals[i] for tally in tallies) / busy if busy else None
        engine[name] = Level(peak=max(tally.peaks[i] for tally in tallies), mean=mean)
    return {
        **{name: total(name) for name in ("completed", "failed", "not_sent")},
        "first_failure": next((tally.failure for tally in tallies if tally.failure), None),
        "duration_s": seconds,
        "request_throughput": rate("completed"),
        "output_throughput": rate("output_tokens"),
        "total_token_throughput": rate("input_tokens", "output_tokens"),
        **({"goodput": rate("good")} if limits else {}),
        "ttft_ms": distribution(ttft),
        "tpot_ms": distribution(np.concatenate([np.frombuffer(tally.tpot) for tally in tallies]) * MS),
        "itl_ms": weighted_distribution(values * MS, counts),
        "e2el_ms": distribution(e2el),
        **({"client_queue_ms": distribution(queued)} if (queued > 0).any() else {}),
        **{f"total_{name}": total(name) for name in ("input_tokens", "output_tokens", "cached_tokens")},
        "busy_s": busy,
        **engine,
        "phase_seconds": phases,
    }


@contextmanager
def row_writer(path: Path | None) -> Iterator[Callable[[EndedRequest], None]]:
    """Gives a function that writes a request to ``path``, in row groups; None: nothing is written.

    The file is there when the block ends well. Rows are in the order in which requests end.
    """
    if path is None:
        yield lambda ended: None
        return
    rows: list[Mapping[str, Any]] = []
    tokens = 0

    def flush() -> None:
        nonlocal tokens
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
        rows.clear()
        tokens = 0

    def write(ended: EndedRequest) -> None:
        nonlocal tokens
        rows.append(row_of(ended))
        tokens += len(ended.times)
        if len(rows) >= _ROWS or tokens >= _TOKENS:
            flush()

    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as scratch, pq.ParquetWriter(scratch, SCHEMA) as writer:
        yield write
        flush()


def with_unsent(ended: Sequence[EndedRequest], requests: Sequence[RequestSpec]) -> list[EndedRequest]:
    """Returns every request in the order of the load; turns after a refused one were not sent."""
    sent = {one.spec.index: one for one in ended}
    last = {one.spec.session: one.sent for one in ended}
    unsent = [spec for spec in requests if spec.index not in sent]
    for spec in unsent:
        sent[spec.index] = EndedRequest(spec, last[spec.session], last[spec.session], 0, reason=SESSION_BROKEN)
    return [sent[spec.index] for spec in requests]


def row_of(one: EndedRequest) -> Mapping[str, Any]:
    """A row of requests.parquet."""
    if one.reason == SESSION_BROKEN or one.error is not None:
        refused = one.error is not None
        done = Completion(http_status=one.status if refused else None)
        done.fail("http_error" if refused else SESSION_BROKEN, one.error or "an earlier turn was refused")
        return Sample(one.spec, 0, one.due, one.sent, one.sent, done).to_row(0.0)
    tokens = one.tokens or [1] * len(one.times)
    sequences = one.sequences or None
    row = result_row(one.spec, one.due, one.sent, one.times, tokens, one.cached, one.reason, (), sequences)
    return {**row, "queued_s": one.sent - one.due}
