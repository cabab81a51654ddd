"""One load, or one trace, on a simulated fleet: what is run, its figures, and the highest rate that meets a limit."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.errors import UsageError
from kvbench.common.files import pack, write_json
from kvbench.metrics.model import LoadMetrics
from kvbench.requests.build import RequestStream, stream_requests
from kvbench.runs.model import COST_NOTES
from kvbench.simulation.choose import machine_of
from kvbench.simulation.drive import ROUTERS, TURNAROUND_S, Drive, Ended, prime
from kvbench.simulation.recorder import Recorder, row_writer
from kvbench.simulation.replica import Replica
from kvbench.sweep.rate_plan import at_rate, mean_rate
from kvbench.sweep.rate_search import Condition, misses, queue_growth
from kvbench.workload.design import LoadPoint
from kvbench.workload.file import SimulateSection
from kvbench.workload.load_section import LoadConfig, load_point

_REPEAT = 1  # of a load that `kvbench load` sends: the same requests
_OVERLOAD = 0.05  # a share by which more may come than is served, before a rate counts as missed
_MOST_DOUBLINGS = 20
_ENDED_A_REPORT = 100

Progress = Callable[[int, int | None], None]
"""Gets how many requests have ended, and of how many, where that is known."""


@dataclass(frozen=True)
class SimulationJob:
    """A load on ``replicas`` engines of these ``settings``; it can be sent to another process.

    name: in messages and tables; model, section: the machine of each replica
    folder: where summary.json and requests.parquet go; None: nowhere
    facts: stored in summary.json beside the figures
    """

    name: str
    section: SimulateSection
    model: str
    settings: Mapping[str, Any]
    load: LoadConfig
    point: LoadPoint
    seed: int
    replicas: int = 1
    router: str = "round-robin"
    folder: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulationResult:
    """``figures``: of ``Recorder.summary``. ``due``, ``ends``: of each answered request [s]."""

    figures: dict[str, Any]
    due: np.ndarray
    ends: np.ndarray


def simulate(job: SimulationJob, on_progress: Progress | None = None) -> dict[str, Any]:
    """Runs the job; what summary.json holds. Raises UsageError for a load or settings that cannot be."""
    summary = {"simulated": True, "name": job.name, **job.facts, **run_job(job, on_progress).figures}
    if job.folder is not None:
        write_json(job.folder / "summary.json", summary)
    return summary


def simulate_and_pack(job: SimulationJob) -> tuple[dict[str, Any], bytes | None]:
    """``simulate``, and a tar of the files for the job's folder, which is on another machine; None without a folder."""
    if job.folder is None:
        return simulate(job), None
    with tempfile.TemporaryDirectory(prefix="kvbench-simulate-") as scratch:
        folder = Path(scratch)
        return simulate(replace(job, folder=folder)), pack(folder, sorted(folder.iterdir()))


def run_job(job: SimulationJob, on_progress: Progress | None = None) -> SimulationResult:
    """The load to its end."""
    machine = machine_of(job.section, job.model)
    replicas = [machine.replica(job.settings, number) for number in range(job.replicas)]
    stream = _stream(job, replicas[0])
    prime_all(replicas, job.load, stream)
    primed = _seconds_by_class(replicas)
    closed = job.point.mode == "closed"
    limits = {name: limit for name, limit in (job.load.slo.model_dump() if job.load.slo else {}).items() if limit}
    with row_writer(job.folder / "requests.parquet" if job.folder is not None else None) as writer:
        recorder = Recorder(replicas, limits, writer)

        def on_end(ended: Ended) -> None:
            recorder.on_end(ended)
            if on_progress is not None and recorder.ended % _ENDED_A_REPORT == 0:
                on_progress(recorder.ended, stream.requests)

        Drive(
            replicas,
            stream.conversations,
            on_end,
            users=job.point.concurrency if closed else None,
            most_in_flight=None if closed else job.load.max_concurrency,
            turnaround_s=TURNAROUND_S,
            router=ROUTERS[job.router](),
            on_step=recorder.on_step,
        ).run()
    notes = stream.notes | {COST_NOTES: list(dict.fromkeys(note for each in replicas for note in each.cost_notes))}
    load = {"mode": job.point.mode, "concurrency": job.point.concurrency, "max_concurrency": job.load.max_concurrency}
    figures = recorder.summary(load | {"notes": notes})
    due = recorder.column("due")
    classes = dict(_seconds_by_class(replicas) - primed)
    return SimulationResult(figures | {"seconds_by_class": classes, "notes": notes}, due, due + recorder.column("e2el"))


def _seconds_by_class(replicas: Sequence[Replica]) -> Counter[str]:
    """Of all replicas' steps so far: seconds by class of operator, where the cost model knows them."""
    total: Counter[str] = Counter()
    for replica in replicas:
        total.update(replica.seconds_by_class)
    return total


def _stream(job: SimulationJob, replica: Replica) -> RequestStream:
    longest = replica.engine.config.max_model_len
    assert longest is not None
    try:
        return stream_requests(
            job.load, vocab_size=replica.engine.model_info.vocab_size, max_model_len=longest, seed=job.seed,
            repeat=_REPEAT, concurrency=job.point.concurrency, rate=job.point.request_rate,
        )  # fmt: skip
    except ValueError as error:
        raise UsageError(str(error)) from None


def prime_all(replicas: Sequence[Replica], load: LoadConfig, stream: RequestStream) -> None:
    """Puts each replica's prefix cache into the declared state, and its clock to 0."""
    if load.cache_state == "cold" or not stream.prefixes:
        return
    for replica in replicas:
        prime(replica, stream.prefixes)
        replica.rewind()


def sustainable_rate(run: Callable[[float], bool], first: float, tolerance: float = 0.02) -> float:
    """The highest rate [1/s] at which ``run(rate)`` says that the limits are met, by bisection.

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


def reasons_missed(result: SimulationResult, conditions: Sequence[Condition]) -> list[str]:
    """Why the run does not meet the conditions, or could not serve what came; empty where it does."""
    metrics = LoadMetrics.model_validate(result.figures | {"ttfo_ms": result.figures["ttft_ms"]})  # nothing is reasoned
    growth = queue_growth(result.due, result.ends)
    return [miss.text for miss in misses(conditions, metrics, growth, _OVERLOAD)]


def job_at_rate(job: SimulationJob, rate: float, seconds: float, least: int) -> SimulationJob:
    """``job`` at ``rate`` [1/s] for at least ``seconds`` and ``least`` requests; of a trace the times are scaled."""
    if job.load.arrivals == "trace":
        load, point = at_rate(job.load, rate, 0, native_rate_of(job)), job.point
    else:
        load = at_rate(job.load, rate, max(least, round(rate * seconds)))
        point = load_point("open", concurrency=None, rate=rate, num_requests=None)
    return replace(job, name=f"{job.name} at {rate:g}/s", load=load, point=point, folder=None)


def native_rate_of(job: SimulationJob) -> float:
    """The rate [1/s] at which the job's trace is played. Raises UsageError where it has no times."""
    replica = machine_of(job.section, job.model).replica(job.settings)
    return mean_rate([turns[0] for turns in _stream(job, replica).conversations])
