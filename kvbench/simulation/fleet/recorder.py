"""The rows and figures of a simulated load, gathered while it runs, in memory that its tokens do not fill.

Requests that ended become rows of requests.parquet. The functions of ``kvbench.metrics`` read them in batches, after
which six numbers of 8 bytes are kept of each request. The gaps between tokens are kept as different values with their
counts: all sequences of a step have the same gap, so there are about as many values as steps, 16 bytes each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import Field

from kvbench.common.files import write_atomically
from kvbench.common.records import Record
from kvbench.load.samples import SCHEMA
from kvbench.metrics import rows
from kvbench.metrics.definitions import METRICS, over_slo
from kvbench.metrics.latency import SESSION_BROKEN, distribution, in_steady, weighted_distribution
from kvbench.metrics.model import Distribution, LoadMetrics, LoadOutcome, PooledLatencies
from kvbench.metrics.steady_window import steady_state
from kvbench.requests.request import RequestSpec
from kvbench.simulation.fleet.drive import EndedRequest, Replica
from kvbench_engine.counters import PHASES
from kvbench_engine.sequence import TokenOutput

_ROWS, _TOKENS = 5_000, 1_000_000  # of a batch, which is a row group of the file
_GAPS = 1 << 20  # gaps that are kept one by one, before equal ones are counted
_KEPT = ("ok", "t0", "ts", "first", "end", "session")
_TOTALS = {
    "prompt_tokens": "total_input_tokens",
    "output_tokens": "total_output_tokens",
    "cached_tokens": "total_cached_tokens",
}
_LEVELS = ("running", "waiting", "kv_usage")
_EMPTY_ROW = dict.fromkeys(SCHEMA.names) | {"user": 0, "unstreamed_tokens": 0, "coalesced": 0, "queued_s": 0.0}
_EMPTY_ROW |= {"chunk_times": [], "chunk_tokens": [], "text": ""}
Count = int | float
Row = Mapping[str, Any]


class Level(Record):
    """A quantity that changes from step to step. peak: of one replica; mean: over the time of the steps."""

    peak: Count
    mean: float | None


class SimulatedFigures(LoadMetrics):
    """The figures of a simulated load, and what the engine did. Fields that are not set are not stored."""

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
    """The figures of all replicas together.

    imbalance: the busiest replica's output tokens and busy time over the mean; replicas: of each the same figures
    seconds_by_class: of the steps' time, by class of operator; notes: how the requests were made, and on step times
    """

    imbalance: dict[str, float] = Field(default_factory=dict)
    replicas: tuple[SimulatedFigures, ...] = ()
    seconds_by_class: dict[str, float]
    notes: Mapping[str, Any]


@dataclass
class Tally:
    """The requests of one replica, and its engine over the time of the steps.

    kept: ``_KEPT`` of each request, a batch each; tpot: [ms] of each sequence that has one
    gaps: different times between tokens [ms] and how often each came
    totals: of ``_TOTALS``; ``good``: requests that met every limit; ``not_sent``: later turns of those that failed
    peaks, integrals: of ``_LEVELS``
    """

    kept: list[np.ndarray] = field(default_factory=lambda: [np.empty((0, len(_KEPT)))])
    tpot: list[np.ndarray] = field(default_factory=lambda: [np.empty(0)])
    gaps: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=lambda: [(np.empty(0), np.empty(0))])
    totals: Counter[str] = field(default_factory=Counter)
    failure: str | None = None
    busy_s: float = 0.0
    peaks: list[Count] = field(default_factory=lambda: [0.0] * len(_LEVELS))
    integrals: list[float] = field(default_factory=lambda: [0.0] * len(_LEVELS))

    def add(self, batch: pd.DataFrame, slo: Mapping[str, float]) -> None:
        """Takes what is kept of ``batch``, rows of requests.parquet; ``slo``: limits [ms] by path."""
        good, failed = rows.successful(batch), batch.loc[~batch["ok"], "error"]
        self.kept.append(batch[list(_KEPT)].to_numpy(dtype=float))
        self.tpot.append(_samples("tpot", good))
        self.gaps.append(np.unique(_samples("itl", good), return_counts=True))
        if sum(len(values) for values, _ in self.gaps) > _GAPS + 2 * len(self.gaps[0][0]):
            self.gaps = [_counted(self.gaps)]
        for column, total in _TOTALS.items():
            self.totals[total] += int(good[column].sum())
        missed = list(over_slo(good, slo).values())
        self.totals["good"] += len(good) - int(np.any(missed, axis=0).sum())
        self.failure = self.failure or next(iter(failed), None)

    def step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        engine, seconds = replica.engine, replica.clock.now - replica.step_began
        kv = engine.kv.stats()
        running = max(len(engine.scheduler.running), len(outputs))
        self.busy_s += seconds
        for i, value in enumerate((running, engine.scheduler.num_waiting, kv.slots_reserved / kv.slots_total)):
            if value > self.peaks[i]:
                self.peaks[i] = value
            self.integrals[i] += value * seconds


def _samples(name: str, good: pd.DataFrame) -> np.ndarray:
    """Returns the samples [ms] of the latency ``name`` of successful rows."""
    samples = METRICS[name].samples
    assert samples is not None
    return samples(good)


def _counted(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Merges values and their counts: returns the different values, ascending, and how often each came."""
    values, counts = map(np.concatenate, zip(*parts, strict=True))
    values, where = np.unique(values, return_inverse=True)
    return values, np.bincount(where, counts).astype(np.int64)


class Recorder:
    """The ``on_end`` and ``on_step`` of a ``Drive``.

    slo: limits [ms] by path; write: gets the rows of each batch; ended: so many requests have
    """

    def __init__(
        self, replicas: Sequence[Replica], slo: Mapping[str, float], write: Callable[[list[Row]], None]
    ) -> None:
        self._replicas, self._slo, self._write = replicas, slo, write
        self._tallies = [Tally() for _ in replicas]
        self.ended = 0
        self._before = [engine_counters(replica) for replica in replicas]
        self._rows: list[Row] = []
        self._numbers: list[int] = []  # of the replica of each row
        self._tokens = 0

    def on_end(self, ended: EndedRequest) -> None:
        self.ended += 1
        self._tallies[ended.replica].totals["not_sent"] += ended.unsent
        self._rows.append(row_of(ended))
        self._numbers.append(ended.replica)
        self._tokens += len(ended.times)
        if len(self._rows) >= _ROWS or self._tokens >= _TOKENS:
            self.flush()

    def flush(self) -> None:
        """Counts and writes the rows that came since the last time. Call it at the end of the load."""
        if not self._rows:
            return
        self._write(self._rows)
        for number, batch in pd.DataFrame(self._rows).groupby(np.array(self._numbers)):
            self._tallies[number].add(batch, self._slo)
        self._rows, self._numbers, self._tokens = [], [], 0

    def on_step(self, replica: Replica, outputs: Sequence[TokenOutput]) -> None:
        self._tallies[replica.number].step(replica, outputs)

    def requests(self) -> pd.DataFrame:
        """Returns the columns that are kept of every row, replica by replica."""
        return _requests(self._tallies)

    def figures(self, load: LoadOutcome, seconds_by_class: Mapping[str, float]) -> FleetFigures:
        """Computes the figures of all replicas together, and of several each one's."""
        counters = [
            {name: value - before[name] for name, value in engine_counters(replica).items()}
            for replica, before in zip(self._replicas, self._before, strict=True)
        ]
        whole = _figures(self._tallies, counters, self._slo) | _steady(self.requests(), load)
        whole |= {"seconds_by_class": dict(seconds_by_class), "notes": load.notes}
        if len(counters) == 1:
            return FleetFigures(**whole)
        pairs = zip(self._tallies, counters, strict=True)
        replicas = [SimulatedFigures(**_figures([tally], [counted], self._slo)) for tally, counted in pairs]
        imbalance = {}
        for name in ("total_output_tokens", "busy_s"):
            values = [getattr(replica, name) for replica in replicas]
            if sum(values):
                imbalance[name] = max(values) * len(values) / sum(values)
        return FleetFigures(**whole, imbalance=imbalance, replicas=tuple(replicas))


def _requests(tallies: Sequence[Tally]) -> pd.DataFrame:
    kept = np.concatenate([batch for tally in tallies for batch in tally.kept])
    requests = pd.DataFrame(kept, columns=list(_KEPT))
    return requests.assign(last=requests["end"], queued_s=requests["ts"] - requests["t0"])


def _steady(requests: pd.DataFrame, load: LoadOutcome) -> dict[str, Any]:
    steady = steady_state(*rows.starts(requests), rows.ends(requests), load, rows.sessions(requests))
    inside = rows.successful(in_steady(requests, steady.window))
    latency = PooledLatencies(**_distributions(("ttft", "e2el"), inside))
    begin, end = steady.window or (None, None)
    return {"steady_start_s": begin, "steady_end_s": end, "steady_note": steady.why, "steady_latency": latency}


def _distributions(names: Sequence[str], good: pd.DataFrame) -> dict[str, Distribution]:
    """Computes these latencies of successful rows; of those that need not be there, the ones with a sample."""
    spread = {METRICS[name]: distribution(_samples(name, good)) for name in names}
    return {metric.path: values for metric, values in spread.items() if metric.always or values.n}


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
    tallies: Sequence[Tally], counters: Sequence[Mapping[str, Count]], slo: Mapping[str, float]
) -> dict[str, Any]:
    """Computes the fields of ``SimulatedFigures``."""
    requests, totals = _requests(tallies), sum((tally.totals for tally in tallies), Counter())
    good, seconds = rows.successful(requests), 0.0
    if len(requests):
        seconds = float(requests["end"].max() - requests["ts"].min())

    def rate(number: int) -> float | None:
        return number / seconds if seconds else None

    engine = {name: sum(counted[name] for counted in counters) for name in counters[0]}
    phases = {name: engine.pop(name) for name in PHASES}
    busy = sum(tally.busy_s for tally in tallies)
    for i, name in enumerate(_LEVELS):
        mean = sum(tally.integrals[i] for tally in tallies) / busy if busy else None
        engine[name] = Level(peak=max(tally.peaks[i] for tally in tallies), mean=mean)
    return {
        "completed": len(good),
        "failed": len(requests) - len(good),
        "not_sent": totals["not_sent"],
        "first_failure": next((tally.failure for tally in tallies if tally.failure), None),
        "duration_s": seconds,
        "request_throughput": rate(len(good)),
        "output_throughput": rate(totals["total_output_tokens"]),
        "total_token_throughput": rate(totals["total_input_tokens"] + totals["total_output_tokens"]),
        **({"goodput": rate(totals["good"])} if slo else {}),
        **_distributions(("ttft", "e2el", "client_queue"), good),
        "tpot_ms": distribution(np.concatenate([batch for tally in tallies for batch in tally.tpot])),
        "itl_ms": weighted_distribution(*_counted([part for tally in tallies for part in tally.gaps])),
        **{name: totals[name] for name in _TOTALS.values()},
        "busy_s": busy,
        **engine,
        "phase_seconds": phases,
    }


@contextmanager
def row_writer(path: Path | None) -> Iterator[Callable[[list[Row]], None]]:
    """Gives a function that writes rows to ``path`` as a row group; None: nothing is written.

    The file is there when the block ends well. Rows are in the order in which requests end.
    """
    if path is None:
        yield lambda batch: None
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as scratch, pq.ParquetWriter(scratch, SCHEMA) as writer:
        yield lambda batch: writer.write_table(pa.Table.from_pylist(batch, schema=SCHEMA))


def with_unsent(ended: Sequence[EndedRequest], requests: Sequence[RequestSpec]) -> list[EndedRequest]:
    """Returns every request in the order of the load; turns after a refused one were not sent."""
    sent = {one.spec.index: one for one in ended}
    last = {one.spec.session: one.sent for one in ended}
    unsent = [spec for spec in requests if spec.index not in sent]
    for spec in unsent:
        sent[spec.index] = EndedRequest(spec, last[spec.session], last[spec.session], 0, reason=SESSION_BROKEN)
    return [sent[spec.index] for spec in requests]


def row_of(ended: EndedRequest) -> Row:
    """Makes the row of requests.parquet. What no engine of ours says, such as reasoning, is empty."""
    spec, times = ended.spec, ended.times
    ok = ended.error is None and ended.reason != SESSION_BROKEN
    row = _EMPTY_ROW | {
        "index": spec.index,
        "class": spec.cls,
        "priority": spec.priority,
        "session": spec.session,
        "turn": spec.turn,
        "prompt_tokens": len(spec.prompt_token_ids or ()),
        "prefix_tokens": spec.prefix_tokens,
        "max_tokens": spec.max_tokens,
        "canary": spec.canary,
        "t0": ended.due,
        "ts": ended.sent,
        "ok": ok,
    }
    if not ok:
        refused = ended.error is not None
        why = {"error_kind": "http_error", "error": ended.error, "http_status": ended.status}
        broken = {"error_kind": SESSION_BROKEN, "error": "an earlier turn was refused"}
        return row | {"end": ended.sent, "output_tokens": 0} | (why if refused else broken)
    return row | {
        "output_tokens": ended.output_tokens,
        "cached_tokens": ended.cached,
        "queued_s": ended.sent - ended.due,
        "first": times[0],
        "first_output": times[0],
        "last": times[-1],
        "end": times[-1],
        "chunk_times": np.array(times),
        "chunk_tokens": ended.tokens or [1] * len(times),
        "chunk_choices": ended.sequences or None,
        "finish_reason": ended.reason,
    }
