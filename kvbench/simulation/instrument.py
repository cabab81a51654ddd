"""Runs loads on a simulated engine, and leaves the files that a load over HTTP leaves.

All times in them are of the engine's virtual clock, which ``clock: simulated`` in load.json and done.json says. The
same load gives the same bytes of requests.parquet, server.parquet and counters.json on any machine. There is no client
to be calibrated, no machine to be disturbed, and no time-out of a request: one that waits for an hour is answered.
"""

from __future__ import annotations

import dataclasses
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.common.files import utc_now
from kvbench.common.foreign_cpu import MachineReport
from kvbench.common.records import write_record
from kvbench.load.outcome import most_in_flight
from kvbench.measure.http import TargetInstrument
from kvbench.measure.result import ServerReadings, judge
from kvbench.metrics.definitions import SIMULATED
from kvbench.metrics.latency import summarise
from kvbench.metrics.model import ClientFigures, LoadOutcome
from kvbench.requests.request import RequestList, RequestSpec, conversations, distinct_prefixes
from kvbench.runs.metric_names import SIMULATED_SECONDS as SECONDS
from kvbench.runs.results import COST_NOTES, Capacity, LoadResult, WarmUpResult
from kvbench.runs.server_info import ServerInfo
from kvbench.simulation.cost.machine import Machine, SettingsByName
from kvbench.simulation.fleet.drive import TURNAROUND_S, Drive, EndedRequest, Replica, prime
from kvbench.simulation.fleet.recorder import row_of, row_writer, with_unsent
from kvbench.targets.base import ModelFacts, Target
from kvbench.targets.builtin import known_capacity
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.design import Block, LoadPoint
from kvbench.workload.load_section import LoadConfig
from kvbench_engine.planning import window_note
from kvbench_engine.sequence import TokenOutput

BACKEND = CLOCK = SIMULATED


class SimulatedTarget(Target):
    """A target whose ``start`` makes the engine; nothing is launched, and nothing called over HTTP."""

    starts_cold = True
    replica: Replica

    def __init__(self, machine: Machine, facts: Mapping[str, Any]) -> None:
        self._machine, self._facts = machine, facts
        self.base_url = CLOCK

    def start(self, settings: SettingsByName, log: Path) -> None:
        self._settings = settings
        self.restart()
        length = self.replica.engine.config.max_model_len
        assert length is not None
        self.model = ModelFacts(self._machine.model.name, self._machine.vocab_size, length)

    def restart(self) -> None:
        """Makes a new engine: nothing of an earlier load is in a figure of the next."""
        self.replica = Replica.on(self._machine, self._settings)

    def stop(self) -> None:
        """Stops nothing."""

    def as_sent(self, requests: list[RequestSpec]) -> list[RequestSpec]:
        return requests

    def server_info(self) -> ServerInfo:
        engine, spec = self.replica.engine, self._machine.model.spec
        capacity = engine.capacity
        counts = {"capacity_tokens": capacity.num_tokens}
        counts["max_concurrency_at_max_len"] = capacity.max_concurrency(self.model.max_model_len)
        return ServerInfo.model_validate(
            {
                "engine": dataclasses.asdict(engine.config),
                "resolved": {"device": CLOCK, "device_name": self._machine.title, "dtype": spec.default_dtype},
                "model": {"name": self.model.name, "vocab_size": self.model.vocab_size},
                "capacity": dataclasses.asdict(capacity) | counts,
                "versions": {"python": platform.python_version()},
                "simulated": dict(self._facts),
            }
        )

    def metrics(self) -> MetricsSample:
        """Reads the engine's state, at its own time."""
        from kvbench_engine.server.metrics import readings

        gauges, counters = readings(self.replica.engine.stats())
        counters |= {f"{SECONDS}{name}": seconds for name, seconds in self.replica.seconds_by_class.items()}
        return MetricsSample(self.replica.clock.now, gauges, counters)

    def reset_prefix_cache(self) -> bool:
        return self.replica.engine.reset_prefix_cache()


def checked(machine: Machine, settings: SettingsByName) -> Capacity:
    """Returns the KV of a simulated engine with these settings. Raises UsageError."""
    config, capacity = machine.settle(settings)
    assert config.max_model_len is not None
    spec, length = machine.model.spec, config.max_model_len
    return known_capacity(capacity, length, machine.vocab_size, spec.default_dtype, window_note(spec, length))


_MOST_READINGS = 400  # of a load
_FIRST_INTERVAL_S = 1e-3  # about the shortest step
_STEPS_A_CHECK = 2000
_ENDED_A_REPORT = 64
_GUESS_TOKENS_PER_S = 60_000.0  # of answers, of real time on one core


class SampledReadings:
    """The engine's gauges and counters at even distances of virtual time: at most ``_MOST_READINGS`` of a load.

    They begin ``_FIRST_INTERVAL_S`` apart; where there are too many, every other one is dropped and the distance
    doubled. While the engine computes a step, a reading is of that step's end; while it is idle, of the step before.
    """

    def __init__(self, target: SimulatedTarget) -> None:
        self.samples: list[MetricsSample] = []
        self._target, self._interval, self._due = target, _FIRST_INTERVAL_S, 0.0
        self._idle: MetricsSample | None = None

    def after_step(self) -> None:
        """Takes the readings that are due by the end of a step."""
        now = self._target.replica.clock.now
        if now >= self._due:
            sample = self._idle or self._target.metrics()
            while self._due <= now:
                self._keep(sample)
        self._idle = None if self._target.replica.busy else self._target.metrics()

    def _keep(self, sample: MetricsSample) -> None:
        self.samples.append(dataclasses.replace(sample, at=self._due))
        if len(self.samples) > _MOST_READINGS:
            del self.samples[1::2]
            self._interval *= 2
        self._due = self.samples[-1].at + self._interval


class SimulatedInstrument(TargetInstrument):
    """Runs loads on a ``SimulatedTarget``, whose clock it reads."""

    clock = CLOCK
    disturbed_by_machine = False

    @classmethod
    def guess_s(cls, point: LoadPoint, requests: Sequence[RequestSpec], profile: str) -> float:
        return sum(r.width * r.max_tokens for r in requests) / _GUESS_TOKENS_PER_S + 0.1

    def warm_up(self, block: Block, point: LoadPoint) -> None:
        """Notes that nothing was warmed up."""
        self.facts["warm_up"] = WarmUpResult(requests=0, answered=0, failures=0, last=None)

    def send(self, point: LoadPoint, requests: RequestList, requests_file: Path, out: Path) -> LoadResult:
        """Runs the load to its end and judges it. Raises what ``Job.check`` raises."""
        started_at, began = utc_now(), time.monotonic()
        server, target = self.server, self.server.target
        assert isinstance(target, SimulatedTarget)
        prepare(target, server.load, requests, first=self.loads == 0)
        self.loads += 1
        before = target.metrics()
        ended, readings = self._drive(target, point, requests)
        rows = [row_of(one) for one in with_unsent(ended, requests)]
        with row_writer(out / "requests.parquet") as write:
            write(rows)
        starts, ends = [one.sent for one in ended], [one.end for one in ended]
        notes = target.replica.cost_notes
        outcome = LoadOutcome(
            clock=CLOCK,
            duration_s=max(ends, default=0.0),
            mode=point.mode,
            concurrency=point.concurrency,
            max_concurrency=server.load.max_concurrency,
            request_rate=point.request_rate,
            num_requests=len(requests),
            completed=sum(one.error is None for one in ended),
            failed=sum(one.error is not None for one in ended),
            incomplete=False,
            max_in_flight=most_in_flight(starts, ends),
            client=ClientFigures(),
            notes=requests.notes | ({COST_NOTES: notes} if notes else {}),
        )
        write_record(out / "load.json", outcome)
        metrics = summarise(pd.DataFrame(rows), outcome, server.load.slo.model_dump() if server.load.slo else None)
        read = ServerReadings(before, readings, target.metrics())
        read.store(out, outcome, metrics)
        return judge(
            server,
            requests,
            metrics,
            read,
            disturbances=(),
            calibration=None,
            clock=CLOCK,
            machine=MachineReport(),
            started_at=started_at,
            ended_at=utc_now(),
            wall_s=time.monotonic() - began,
        )

    def _drive(
        self, target: SimulatedTarget, point: LoadPoint, requests: Sequence[RequestSpec]
    ) -> tuple[list[EndedRequest], list[MetricsSample]]:
        """Sends all requests. Returns how they ended, and what was read of the engine meanwhile."""
        ended: list[EndedRequest] = []
        readings, began = SampledReadings(target), time.monotonic()
        failed = steps = 0

        def on_end(one: EndedRequest) -> None:
            nonlocal failed
            ended.append(one)
            failed += one.error is not None
            if len(ended) % _ENDED_A_REPORT == 0:
                self.job.listener.load_progress(len(ended), len(requests), failed, time.monotonic() - began)

        def on_step(replica: Replica, outputs: Sequence[TokenOutput]) -> None:
            nonlocal steps
            steps += 1
            readings.after_step()
            if steps % _STEPS_A_CHECK == 0:
                self.server.check()

        Drive(
            [target.replica],
            conversations(requests),
            on_end,
            users=point.concurrency,
            most_in_flight=self.server.load.max_concurrency,
            turnaround_s=TURNAROUND_S,
            on_step=on_step,
        ).run()
        return ended, readings.samples


def prepare(target: SimulatedTarget, load: LoadConfig, requests: Sequence[RequestSpec], *, first: bool) -> None:
    """Puts the prefix cache into the declared state, as a load over HTTP does, and sets the clock to 0.

    Without a state to keep, the engine is made anew: the bytes of a load's files do not depend on loads before it.
    """
    if load.cache_state != "steady":
        target.restart()
    if load.cache_state == "primed" or (load.cache_state == "steady" and first):
        prime(target.replica, distinct_prefixes(requests))
    target.replica.rewind()
