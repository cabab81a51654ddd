"""Figures of a simulated load, gathered while it runs: exact ones, in memory that does not grow with its tokens.

Kept of each request are six numbers of 8 bytes. The gaps between tokens are kept as different values with their
counts: all sequences of a step have the same gap, so there are about as many values as steps, 16 bytes each.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from engine.counters import PHASES
from engine.sequence import TokenOutput
from kvbench.common.files import write_atomically
from kvbench.load.samples import SCHEMA
from kvbench.metrics.latency import distribution, weighted_distribution
from kvbench.metrics.rows import MS
from kvbench.metrics.sequences import gaps_within, times_per_output_token
from kvbench.metrics.steady_window import comes_at, steady_state
from kvbench.simulation.drive import Ended
from kvbench.simulation.instrument import row_of
from kvbench.simulation.replica import Replica

_ROWS, _TOKENS = 5_000, 1_000_000  # of a row group, at most
_GAPS = 1 << 20  # gaps that are kept one by one, before equal ones are counted


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
            self.add_counted(np.empty(0), np.empty(0, dtype=np.int64))

    def add_counted(self, values: np.ndarray, counts: np.ndarray) -> None:
        every = np.concatenate([self._values, values, *self._new])
        times = np.concatenate([self._counts, counts, np.ones(self._pending, dtype=np.int64)])
        self._new, self._pending = [], 0
        self._values, where = np.unique(every, return_inverse=True)
        self._counts = np.zeros(len(self._values), dtype=np.int64)
        np.add.at(self._counts, where, times)

    def counted(self) -> tuple[np.ndarray, np.ndarray]:
        """The values, and how often each came."""
        if self._pending:
            self.add_counted(np.empty(0), np.empty(0, dtype=np.int64))
        return self._values, self._counts


@dataclass
class Level:
    """A quantity that changes from step to step: its peak, and its integral over the time of the steps."""

    peak: float = 0.0
    integral: float = 0.0

    def add(self, value: float, seconds: float) -> None:
        if value > self.peak:
            self.peak = value
        self.integral += value * seconds


def _numbers() -> array:
    return array("d")


@dataclass
class Tally:
    """What one replica did. Times in s; ``due`` to ``session`` (NaN: none): of each request that was answered."""

    due: array = field(default_factory=_numbers)
    ttft: array = field(default_factory=_numbers)
    e2el: array = field(default_factory=_numbers)
    queued: array = field(default_factory=_numbers)
    session: array = field(default_factory=_numbers)
    tpot: array = field(default_factory=_numbers)  # of each sequence that has one
    gaps: Gaps = field(default_factory=Gaps)
    sent_first: float = np.inf
    last: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    good: int = 0  # requests that met every limit
    failed: int = 0
    not_sent: int = 0  # later turns of those that failed
    failure: str | None = None
    busy_s: float = 0.0
    running: Level = field(default_factory=Level)
    waiting: Level = field(default_factory=Level)
    kv_usage: Level = field(default_factory=Level)

    def end(self, ended: Ended, limits: Mapping[str, float]) -> None:
        """``limits`` [ms] of ttft_ms, ttfo_ms (the same here), tpot_ms, itl_ms and e2el_ms."""
        self.sent_first = min(self.sent_first, ended.sent)
        if ended.error is not None:
            self.failed += 1
            self.not_sent += ended.unsent
            self.failure = self.failure or ended.error
            return
        times, tokens = np.array(ended.times), ended.output_tokens
        ttft, e2el = float(times[0]) - ended.due, float(times[-1]) - ended.due
        if ended.sequences or ended.tokens:
            gaps = gaps_within(times, ended.sequences or None)
            tpots = times_per_output_token(times, ended.sequences or None, ended.tokens or [1] * len(times), tokens)
            tpots = tpots[~np.isnan(tpots)].tolist()
        else:
            gaps = np.diff(times)
            tpots = [(float(times[-1]) - float(times[0])) / (tokens - 1)] if tokens > 1 else []
        self.due.append(ended.due)
        self.ttft.append(ttft)
        self.e2el.append(e2el)
        self.queued.append(ended.sent - ended.due)
        self.session.append(math.nan if ended.spec.session is None else ended.spec.session)
        self.tpot.extend(tpots)
        self.gaps.add(gaps)
        self.last = float(times[-1])  # requests end in the order of the clock
        self.input_tokens += len(ended.spec.prompt_token_ids or ())
        self.output_tokens += tokens
        self.cached_tokens += ended.cached
        if limits:
            values = {"ttft_ms": ttft, "ttfo_ms": ttft, "e2el_ms": e2el, "tpot_ms": max(tpots, default=0.0)}
            values["itl_ms"] = float(gaps.max()) if len(gaps) else 0.0
            self.good += all(values[name] * MS <= limit for name, limit in limits.items())

    def step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        engine = replica.engine
        seconds = replica.clock.now - replica.step_began
        kv = engine.kv.stats()
        self.busy_s += seconds
        self.running.add(max(len(engine.scheduler.running), len(outputs)), seconds)
        self.waiting.add(engine.scheduler.num_waiting, seconds)
        self.kv_usage.add(kv.slots_reserved / kv.slots_total, seconds)


class Recorder:
    """The ``on_end`` and ``on_step`` of a ``Drive``.

    limits: an SLO [ms]; writer: gets each request's row; ended: so many requests have
    """

    def __init__(self, replicas: Sequence[Replica], limits: Mapping[str, float], writer: RowWriter | None) -> None:
        self._replicas, self._limits, self._writer = replicas, limits, writer
        self._tallies = [Tally() for _ in replicas]
        self.ended = 0
        self._before = [engine_counters(replica) for replica in replicas]

    def on_end(self, ended: Ended) -> None:
        self.ended += 1
        self._tallies[ended.replica].end(ended, self._limits)
        if self._writer is not None:
            self._writer.add(ended)

    def on_step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        self._tallies[replica.number].step(replica, outputs)

    def column(self, name: str) -> np.ndarray:
        """A field of ``Tally`` of all answered requests, replica by replica."""
        return _column(self._tallies, name)

    def summary(self, load: Mapping[str, Any]) -> dict[str, Any]:
        """Of all replicas together, with the names and definitions of ``metrics.latency.summarise``.

        ``load``: as in ``steady_state``. ``replicas``: of each the same figures, without those of the steady window.
        ``imbalance``: the busiest replica's output tokens and busy time over the mean.
        """
        after = [engine_counters(replica) for replica in self._replicas]
        counters = [{name: each[name] - begun[name] for name in each}
                    for each, begun in zip(after, self._before, strict=True)]  # fmt: skip
        whole = _figures(self._tallies, counters, self._limits) | self._steady(load)
        if len(counters) == 1:
            return whole
        every = [_figures([tally], [counted], self._limits)
                 for tally, counted in zip(self._tallies, counters, strict=True)]  # fmt: skip
        over_mean = {
            name: max(each[name] for each in every) * len(every) / sum(each[name] for each in every)
            for name in ("total_output_tokens", "busy_s")
            if sum(each[name] for each in every)
        }
        return whole | {"imbalance": over_mean, "replicas": every}

    def _steady(self, load: Mapping[str, Any]) -> dict[str, Any]:
        due, ttft, e2el, queued, sessions = map(self.column, ("due", "ttft", "e2el", "queued", "session"))
        known = None if np.isnan(sessions).all() else sessions
        steady = steady_state(due, due + queued, due + e2el, load, known)
        begin, end = steady.window or (math.nan, math.nan)
        moments = comes_at(due, due + queued, known)
        inside = (moments > begin) & (moments <= end)
        return {
            "steady_start_s": None if steady.window is None else begin,
            "steady_end_s": None if steady.window is None else end,
            "steady_note": steady.why,
            "steady_latency": {
                "ttft_ms": distribution(ttft[inside] * MS),
                "e2el_ms": distribution(e2el[inside] * MS),
            },
        }


def _column(tallies: Sequence[Tally], name: str) -> np.ndarray:
    return np.concatenate([np.frombuffer(getattr(tally, name)) for tally in tallies])


def engine_counters(replica: Replica) -> dict[str, float]:
    """What the engine has counted so far, and the seconds of each phase; ``prepare`` counts ``move_seconds`` too."""
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
    tallies: Sequence[Tally], counters: Sequence[Mapping[str, float]], limits: Mapping[str, float]
) -> dict[str, Any]:
    def latency(name: str) -> np.ndarray:
        return _column(tallies, name) * MS

    gaps = Gaps()
    for tally in tallies:
        gaps.add_counted(*tally.gaps.counted())
    values, counts = gaps.counted()
    queued = latency("queued")
    begin, last = min(tally.sent_first for tally in tallies), max(tally.last for tally in tallies)
    seconds = max(last - begin, 0.0) if np.isfinite(begin) else 0.0
    completed = sum(len(tally.ttft) for tally in tallies)
    totals = {name: sum(getattr(tally, name) for tally in tallies)
              for name in ("input_tokens", "output_tokens", "cached_tokens")}  # fmt: skip

    def rate(count: int) -> float | None:
        return count / seconds if seconds else None

    return {
        "completed": completed,
        "failed": sum(tally.failed for tally in tallies),
        "not_sent": sum(tally.not_sent for tally in tallies),
        "first_failure": next((tally.failure for tally in tallies if tally.failure), None),
        "duration_s": seconds,
        "request_throughput": rate(completed),
        "output_throughput": rate(totals["output_tokens"]),
        "total_token_throughput": rate(totals["input_tokens"] + totals["output_tokens"]),
        **({"goodput": rate(sum(tally.good for tally in tallies))} if limits else {}),
        "ttft_ms": distribution(latency("ttft")),
        "tpot_ms": distribution(latency("tpot")),
        "itl_ms": weighted_distribution(values * MS, counts),
        "e2el_ms": distribution(latency("e2el")),
        **({"client_queue_ms": distribution(queued)} if (queued > 0).any() else {}),
        **{f"total_{name}": total for name, total in totals.items()},
        **_engine_figures(tallies, counters),
    }


def _engine_figures(tallies: Sequence[Tally], counters: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Peaks are of one replica; means are over the time of the steps."""
    busy = sum(tally.busy_s for tally in tallies)
    figures: dict[str, Any] = {"busy_s": busy}
    for name in ("running", "waiting", "kv_usage"):
        levels: list[Level] = [getattr(tally, name) for tally in tallies]
        mean = sum(level.integral for level in levels) / busy if busy else None
        figures[name] = {"peak": max(level.peak for level in levels), "mean": mean}
    totals = {name: sum(each[name] for each in counters) for name in counters[0]}
    phases = {name: totals.pop(name) for name in PHASES}
    return figures | totals | {"phase_seconds": phases}


class RowWriter:
    """Writes requests.parquet in row groups, rows in the order in which requests end."""

    def __init__(self, writer: pq.ParquetWriter) -> None:
        self._writer = writer
        self._rows: list[dict[str, Any]] = []
        self._tokens = 0

    def add(self, ended: Ended) -> None:
        self._rows.append(row_of(ended))
        self._tokens += len(ended.times)
        if len(self._rows) >= _ROWS or self._tokens >= _TOKENS:
            self.flush()

    def flush(self) -> None:
        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, schema=SCHEMA))
        self._rows, self._tokens = [], 0


@contextmanager
def row_writer(path: Path | None) -> Iterator[RowWriter | None]:
    """Writes ``path`` while the block runs; the file is there when the block ends well. None: nothing is written."""
    if path is None:
        yield None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as scratch, pq.ParquetWriter(scratch, SCHEMA) as writer:
        rows = RowWriter(writer)
        yield rows
        rows.flush()
