"""Runs one load or trace on a simulated fleet, and finds the highest rate that meets a limit."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.errors import as_usage_error
from kvbench.common.files import pack, write_json
from kvbench.common.records import Record
from kvbench.metrics.model import LoadOutcome
from kvbench.metrics.rows import successful
from kvbench.requests.build import LoadDraw, RequestStream, stream_requests
from kvbench.runs.results import COST_NOTES
from kvbench.simulation.choose import machine_of
from kvbench.simulation.cost.machine import SettingsByName
from kvbench.simulation.fleet.drive import ROUTERS, TURNAROUND_S, Drive, EndedRequest, Replica, prime
from kvbench.simulation.fleet.recorder import FleetFigures, Recorder, row_writer
from kvbench.sweep.rate_run import at_rate, mean_rate
from kvbench.sweep.rate_search import Condition, misses, queue_growth
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import SimulateSection
from kvbench.workload.load_section import LoadConfig, load_point

_REPEAT = 1  # of a load that `kvbench load` sends: the same requests
_OVERLOAD = 0.05  # a share by which more may come than is served, before a rate counts as missed
_MOST_DOUBLINGS = 20
_LEAST_REQUESTS = 200  # of a run of a search: more than a p95 needs
FIRST_RATE = 1.0  # of a search over a closed loop
_ENDED_A_REPORT = 100

Progress = Callable[[int, int | None], None]
"""Gets how many requests have ended, and of how many, where that is known."""


class SimulationFacts(Record):
    """The simulated load and machine, which summary.json has before the figures."""

    simulated: bool = True
    name: str
    machine: str
    cost_model: str
    model: str
    device: str
    tensor_parallel: int
    ops: str | None
    calibration: str | None
    files_sha256: str | None
    replica_count: int
    router: str | None
    seed: int
    engine: SettingsByName
    kv_slots: int
    load: Mapping[str, Any]
    load_id: str
    kvbench: str
    git: Mapping[str, str | bool | None]


@dataclass(frozen=True)
class SimulationJob:
    """A load on ``replicas`` engines of these ``settings``; it can be sent to another process.

    name: in messages and tables; model, section: the machine of each replica
    folder: where summary.json and requests.parquet go; None: nowhere
    """

    name: str
    section: SimulateSection
    model: str
    settings: SettingsByName
    load: LoadConfig
    point: LoadPoint
    seed: int
    replicas: int = 1
    router: str = "round-robin"
    folder: Path | None = None
    facts: SimulationFacts | None = None

    def stream(self, replica: Replica) -> RequestStream:
        """Makes the requests for engines such as ``replica``. Raises UsageError."""
        longest = replica.engine.config.max_model_len
        assert longest is not None
        with as_usage_error():
            return stream_requests(LoadDraw(
                self.load, vocab_size=replica.engine.model_info.vocab_size, max_model_len=longest, seed=self.seed,
                repeat=_REPEAT, concurrency=self.point.concurrency, rate=self.point.request_rate,
            ))  # fmt: skip


@dataclass(frozen=True)
class Simulation:
    """The result of a job. ``due``, ``ends``: of each answered request [s]."""

    facts: SimulationFacts | None
    figures: FleetFigures
    due: np.ndarray
    ends: np.ndarray

    def to_json(self) -> dict[str, Any]:
        return (self.facts.model_dump() if self.facts else {}) | self.figures.to_json()


def simulate_and_pack(job: SimulationJob) -> tuple[Simulation, bytes | None]:
    """Simulates a job of another machine; returns its files as a tar too, None without a folder."""
    if job.folder is None:
        return simulate(job), None
    with tempfile.TemporaryDirectory(prefix="kvbench-simulate-") as scratch:
        folder = Path(scratch)
        return simulate(replace(job, folder=folder)), pack(folder, sorted(folder.iterdir()))


def simulate(job: SimulationJob, on_progress: Progress | None = None) -> Simulation:
    """Runs the load to its end and writes the job's files. Raises UsageError for a load or settings that cannot be."""
    machine = machine_of(job.section, job.model)
    replicas = [Replica.on(machine, job.settings, number) for number in range(job.replicas)]
    stream = job.stream(replicas[0])
    if job.load.cache_state != "cold" and stream.prefixes:
        for replica in replicas:
            prime(replica, stream.prefixes)
    primed = _seconds_by_class(replicas)
    slo = job.load.slo.model_dump(exclude_none=True) if job.load.slo else {}
    with row_writer(job.folder / "requests.parquet" if job.folder is not None else None) as writer:
        recorder = Recorder(replicas, slo, writer)

        def on_end(ended: EndedRequest) -> None:
            recorder.on_end(ended)
            if on_progress is not None and recorder.ended % _ENDED_A_REPORT == 0:
                on_progress(recorder.ended, stream.requests)

        Drive(
            replicas,
            stream.conversations,
            on_end,
            users=job.point.concurrency,
            most_in_flight=job.load.max_concurrency,
            turnaround_s=TURNAROUND_S,
            router=ROUTERS[job.router](),
            on_step=recorder.on_step,
        ).run()
        recorder.flush()
    cost_notes = list(dict.fromkeys(note for replica in replicas for note in replica.cost_notes))
    load = LoadOutcome(
        mode=job.point.mode,
        concurrency=job.point.concurrency,
        max_concurrency=job.load.max_concurrency,
        notes=stream.notes | {COST_NOTES: cost_notes},
    )
    figures = recorder.figures(load, _seconds_by_class(replicas) - primed)
    answered = successful(recorder.requests())
    result = Simulation(job.facts, figures, answered["t0"].to_numpy(), answered["end"].to_numpy())
    if job.folder is not None:
        write_json(job.folder / "summary.json", result.to_json())
    return result


def _seconds_by_class(replicas: Sequence[Replica]) -> Counter[str]:
    """Adds up the seconds of all replicas' steps so far by class of operator, where the cost model knows them."""
    total: Counter[str] = Counter()
    for replica in replicas:
        total.update(replica.seconds_by_class)
    return total


class TriedRate(Record):
    """A rate [1/s] that was tried, and why it does not meet the conditions."""

    rate: float
    met: bool
    missed: list[str]
    requests: int


@dataclass(frozen=True)
class SimulatedRateSearch:
    """The highest rate [1/s] that meets ``slo``, each of the ``trials``; None: all that were tried meet it."""

    facts: SimulationFacts
    slo: list[str]
    max_rate: float | None
    trials: list[TriedRate]

    def to_json(self) -> dict[str, Any]:
        return {
            **self.facts.model_dump(),
            "slo": self.slo,
            "max_rate": self.max_rate,
            "always_met": self.max_rate is None,
            "trials": [trial.to_json() for trial in self.trials],
        }


def find_rate(
    job: SimulationJob, *, conditions: Sequence[Condition], run_seconds: float, tolerance: float
) -> SimulatedRateSearch:
    """Finds the highest rate that meets ``conditions``."""
    trials: list[TriedRate] = []
    first, is_trace = job.point.request_rate or FIRST_RATE, job.load.arrivals == "trace"
    if is_trace:
        replica = Replica.on(machine_of(job.section, job.model), job.settings)
        first = mean_rate([turns[0] for turns in job.stream(replica).conversations])

    def meets(rate: float) -> bool:
        point, requests = job.point, 0
        if not is_trace:  # whose own requests come sooner or later
            point = load_point("open", concurrency=None, rate=rate, num_requests=None)
            requests = max(_LEAST_REQUESTS, round(rate * run_seconds))
        load = at_rate(job.load, rate, requests, first)
        result = simulate(replace(job, load=load, point=point, folder=None))
        metrics = result.figures.model_copy(update={"ttfo_ms": result.figures.ttft_ms})  # nothing is reasoned
        growth = queue_growth(result.due, result.ends)
        missed = [miss.text for miss in misses(conditions, metrics, growth, _OVERLOAD)]
        trials.append(TriedRate(rate=rate, met=not missed, missed=missed, requests=result.figures.completed))
        return not missed

    rate = sustainable_rate(meets, first, tolerance)
    assert job.facts is not None
    return SimulatedRateSearch(job.facts, [c.text for c in conditions], None if rate == float("inf") else rate, trials)


def sustainable_rate(run: Callable[[float], bool], first: float, tolerance: float = 0.02) -> float:
    """Finds the highest rate [1/s] at which ``run(rate)`` says that the limits are met, by bisection.

    A simulation gives the same answer each time, so no rate is tried twice: from ``first`` the rate is doubled or
    halved until one is met and one missed, then the geometric mean of both is tried until they are within
    ``tolerance`` of one another; the met one is returned. 0: none was met; infinite: all were.
    """
    met = missed = None
    rate = first
    for _ in range(_MOST_DOUBLINGS):
        if run(rate):
            met, rate = rate, rate * 2
        else:
            missed, rate = rate, rate / 2
        if met is not None and missed is not None:
            break
    if met is None or missed is None:
        return 0.0 if met is None else float("inf")
    while missed > met * (1 + tolerance):
        rate = (met * missed) ** 0.5
        if run(rate):
            met = rate
        else:
            missed = rate
    return met
