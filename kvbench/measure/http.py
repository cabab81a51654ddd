"""Loads over HTTP: a server is launched or found, warmed up, and sent each load by a client process of its own.

Before a load the server is idle and its cache in the declared state; after it no page may stay owned. Then the load is
judged: comparable with other loads, or the reasons why it is not.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.calibration.calibrate import ClientCalibration, ClientLoad
from kvbench.common.errors import MeasurementError
from kvbench.common.files import utc_now
from kvbench.common.foreign_cpu import MachineReport, MachineWatch, contention_reasons
from kvbench.common.records import read_record
from kvbench.load import launch
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import UNKNOWN_STREAMS, client_reasons
from kvbench.measure import server_state
from kvbench.measure.instrument import Instrument, Job, UnstoredError
from kvbench.measure.result import ServerReadings, client_cost, judge
from kvbench.measure.server import MeasuredServer
from kvbench.measure.warm_up import warm_up
from kvbench.metrics.latency import summarise
from kvbench.metrics.model import LoadMetrics, LoadOutcome
from kvbench.requests.request import RequestList, RequestSpec, store_requests
from kvbench.runs.results import Capacity, LoadResult
from kvbench.targets.base import Target, contradiction, reason_of
from kvbench.targets.prometheus import MetricsPoller, MetricsSample
from kvbench.workload.design import Block, Cell, LoadPoint
from kvbench.workload.load_section import LoadConfig

PREPARE, DRAIN = "prepare", launch.DRAIN
_MEMORY_DISK = Path("/dev/shm")
_GUESS_TOKENS_PER_S = {"cpu": 400.0, "gpu": 4000.0}  # until the first load is measured


class TargetInstrument(Instrument):
    """An instrument for a server, or for an engine that takes requests as a server does.

    A subclass sends the load.
    server: the server that is up
    facts: its start and warm-up, for done.json
    requests: those of the load that was begun last
    """

    server: MeasuredServer

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self.target = Target("")  # until one is opened
        self.facts: dict[str, Any] = {}
        self.requests = RequestList(())
        self.started = False
        self.loads = 0  # begun on this server

    def open(self, block: Block) -> None:
        """Starts the server and reads what it says of itself."""
        job, configuration, began = self.job, block.configuration, time.monotonic()
        self.started, self.loads = False, 0
        target = self.target = job.new_target()
        target.check = job.check
        log = job.folder.server_log(block.block_id)
        target.start(configuration.settings, log)
        self.started = True
        load, info = server_state.with_server_defaults(job.workload.load, target), target.server_info()
        capacity = job.capacity.get(configuration.config_id, Capacity())
        if wrong := contradiction(configuration.settings, capacity, info):
            raise MeasurementError(f"the server of {configuration.label} has other settings: {wrong}")
        self.server = MeasuredServer(load, job.workload.seed, target, configuration.settings, info, log, self._check)
        job.on_server(block, info, target)
        job.check()
        self.facts = {"server_start_s": time.monotonic() - began, "server_forked": target.server().forked}

    def _check(self) -> None:
        self.job.check()
        self.target.check_alive()

    def close(self) -> None:
        """Stops the server, if it was launched here."""
        self.target.stop()

    def needs_new_engine(self) -> bool:
        """Tests whether the next load needs an empty prefix cache, and only another server of ours has one."""
        if not self.target.starts_cold or self.job.workload.load.cache_state == "steady":
            return False
        try:
            return self.target.reset_prefix_cache() is None
        except MeasurementError:
            return False  # the load itself will say why

    def is_gone(self) -> bool:
        """Tests whether a launched server has ended."""
        try:
            self.target.check_alive()
        except MeasurementError:
            return True
        return False

    def reason_of(self, error: MeasurementError) -> str:
        """Tells how the server ended if it has, else the error itself."""
        return reason_of(self.target, error) if self.started else str(error)

    def run(self, cell: Cell, repeat: int, out: Path) -> LoadResult:
        """Draws the load's requests, stores them and sends them."""
        self._check()
        folder, listener = self.job.folder.path, self.job.listener
        requests = self.requests = self.server.requests(cell.load, repeat)
        path, digest = store_requests(requests, folder / "requests", f"{cell.load.load_id}-{repeat}")
        listener.load_started(cell, repeat, len(requests))
        drawn = {"requests_file": str(path.relative_to(folder)), "requests_sha256": digest}
        return self.send(cell.load, requests, path, out).model_copy(update=drawn | self.facts)

    def send(self, point: LoadPoint, requests: RequestList, requests_file: Path, out: Path) -> LoadResult:
        """Sends the requests, writes the load's files into ``out``, and returns its result."""
        raise NotImplementedError


class HttpInstrument(TargetInstrument):
    """Sends the loads of a server in a client process, over HTTP."""

    @classmethod
    def guess_s(cls, point: LoadPoint, requests: Sequence[RequestSpec], profile: str) -> float:
        rate = _GUESS_TOKENS_PER_S["gpu" if profile == "gpu" else "cpu"]
        work = sum(r.width * r.max_tokens for r in requests) / (rate * min(1.0, (point.concurrency or 8) / 4))
        return max(work, max((r.arrival_s or 0.0 for r in requests), default=0.0)) + 3.0

    def warm_up(self, block: Block, point: LoadPoint) -> None:
        """Sends requests that are not measured; a server that turns out to take no token ids is reported anew."""
        notes = len(self.server.target.notes)
        self.facts["warm_up"] = warm_up(self.server, point)
        if len(self.server.target.notes) > notes:
            self.job.on_server(block, self.server.target.server_info(), self.server.target)

    def send(self, point: LoadPoint, requests: RequestList, requests_file: Path, out: Path) -> LoadResult:
        """Raises MeasurementError for a load that does not end, UnstoredError for one that cannot be written."""
        load = _HttpLoad(self.job, self.server, point, requests, requests_file, out, first=self.loads == 0)
        self.loads += 1
        load.prepare()
        self.job.listener.load_progress(0, len(requests), 0, 0.0)  # a display has shown a calibration until now
        memory = str(_MEMORY_DISK) if os.access(_MEMORY_DISK, os.W_OK) else None  # has room where the disk is full
        with tempfile.TemporaryDirectory(prefix="kvbench-load-", dir=memory) as spare:
            return load.judge(Path(spare), *load.drive(Path(spare)))


@dataclass
class _HttpLoad:
    """One load over HTTP. ``first``: nothing was measured on this server before.

    ``cache_reasons``: why the state of its cache is not known; ``log_from``: bytes of the server's log before it;
    ``before``: its /metrics.
    """

    job: Job
    server: MeasuredServer
    point: LoadPoint
    requests: RequestList
    requests_file: Path
    out: Path
    first: bool
    calibration: ClientCalibration | None = None
    cache_reasons: Sequence[str] = ()
    started_at: str = ""
    began: float = 0.0
    log_from: int = 0
    before: MetricsSample | None = None

    def prepare(self) -> None:
        """Calibrates the client and brings the server into its declared state. Raises MeasurementError."""
        server, load = self.server, self.server.load
        server.check()
        if self.job.calibrate:  # for as many streams as the load may have
            most = self.point.concurrency or load.max_concurrency or UNKNOWN_STREAMS
            self.calibration = self.job.calibrate(client_load(self.job, server, most), None)
        self.job.listener.load_phase(PREPARE)
        self.cache_reasons = server_state.prepare_cache(server.target, load, self.requests, first=self.first)
        self.started_at, self.began = utc_now(), time.monotonic()
        log = server.log
        self.log_from = log.stat().st_size if log is not None and log.is_file() else 0
        self.before = server_state.read_metrics(server.target)

    def drive(self, spare: Path) -> tuple[ServerReadings, MachineReport]:
        """Sends the load to its end; reads server and machine. ``spare``: where the client writes without room."""
        job, server, target = self.job, self.server, self.server.target
        machine = MachineWatch(target.server())
        spec = LoadSpec.of(
            server.load, self.point, base_url=target.base_url, model=target.model.name,
            requests_file=str(self.requests_file.resolve()), out_dir=str(self.out.resolve()),
            send_priority=launch.takes_priority(server.settings, server.info), spare_dir=str(spare),
            **target.client_fields() | dict(job.clients.spec),
        )  # fmt: skip

        def on_phase(phase: str, pid: int) -> None:
            job.listener.load_phase(phase)
            if phase != DRAIN:
                machine.on_phase(phase, pid)

        with MetricsPoller(lambda: target.metrics(), job.poll_s, job.listener.server_read) as poller:
            launch.drive(
                spec,
                total=len(self.requests),
                limit_s=launch.bound_s(server.load, self.point, self.requests),
                on_progress=job.listener.load_progress,
                check=server.check,
                on_phase=on_phase,
                arguments=job.clients.arguments,
            )
        after = server_state.wait_release(target)
        return ServerReadings(self.before, poller.samples, after, poller.failures), machine.report()

    def judge(self, spare: Path, readings: ServerReadings, machine: MachineReport) -> LoadResult:
        """Returns the result, from the files that the client left. Raises UnstoredError."""
        job, server = self.job, self.server
        left = spare if (spare / "load.json").is_file() else self.out
        outcome = read_record(LoadOutcome, left / "load.json", "measure the load again")
        metrics = read_metrics(left, server.load, outcome)
        server_here = server.target.server().local
        if not judges_this_machine(job.clients.workers is None, server_here, metrics.client.workers_here):
            machine = machine.model_copy(update={"foreign_cpu_cores": None, "steal_share": None})
        calibration = recalibrated(job, server, self.calibration, outcome, metrics)
        client = metrics.client.model_copy(update={"cpu_s_per_1000_output_tokens": client_cost(machine, metrics)})
        metrics = metrics.model_copy(update={"client": client})
        disturbed = contention_reasons(machine)
        uncalibrated = calibration.reasons if calibration else ()
        reasons = [*uncalibrated, *self.cache_reasons, *outcome.invalid_reasons]
        reasons += [*disturbed, *self._lost(readings, outcome, metrics)]
        if calibration and not any(attempt.disturbed for attempt in calibration.attempts):
            uncalibrated = ()  # undisturbed it would fail again
        result = judge(
            server,
            self.requests,
            metrics,
            readings,
            reasons=reasons,
            strict=job.failures_invalidate,
            disturbances=(*uncalibrated, *client_reasons(outcome), *disturbed),
            calibration=calibration.to_json() if calibration else None,
            endpoint=server.target.dialect.endpoint,
            template_tokens=server.target.template_tokens,
            prompt_tokens_added=outcome.prompt_tokens_added,
            machine=machine,
            started_at=self.started_at,
            ended_at=utc_now(),
            wall_s=time.monotonic() - self.began,
        )
        try:
            for file in left.iterdir() if left != self.out else ():  # there may be room by now
                (self.out / file.name).write_bytes(file.read_bytes())
            readings.store(self.out, outcome, metrics)
            if server.log is not None and server.log.is_file():
                with server.log.open("rb") as file:
                    file.seek(self.log_from)
                    (self.out / "server.log").write_bytes(file.read())
        except OSError as error:
            raise UnstoredError(error, result) from error
        return result

    def _lost(self, readings: ServerReadings, outcome: LoadOutcome, metrics: LoadMetrics) -> list[str]:
        """Says what is not known of the load: its last requests, or what the server did while it ran."""
        lost = ["the load client was stopped before its last request"] if outcome.incomplete else []
        unread = readings.before is not None and readings.failures and not readings.during(outcome, metrics)
        if unread and self.job.failures_invalidate:
            lost.append(
                f"the server's /metrics did not answer while the load ran ({readings.failures} readings failed), so "
                "what the server did is not known: let it answer them under load"
            )
        return lost


def judges_this_machine(sends_here: bool, server_here: bool, workers_here: bool) -> bool:
    """Tests whether CPU of other programs on this machine makes the load invalid.

    A master of workers elsewhere disturbs nothing unless the server is here; workers here, which are not its children,
    would count as other programs.
    """
    return sends_here or (server_here and not workers_here)


def client_load(job: Job, server: MeasuredServer, streams: int, events_per_s: float | None = None) -> ClientLoad:
    """The work of the load client: so many streams, and chunks a second (None: not known)."""
    processes = int(job.clients.spec.get("processes") or server.load.processes)
    return ClientLoad(streams, processes, events_per_s, tls=server.target.base_url.startswith("https:"))


def recalibrated(
    job: Job, server: MeasuredServer, before: ClientCalibration | None, outcome: LoadOutcome, metrics: LoadMetrics
) -> ClientCalibration | None:
    """The calibration for the load's busiest second: measured now if that was more than expected before the load."""
    if before is None or job.calibrate is None:
        return None
    chunks, busiest = outcome.client.chunks, outcome.client.chunks_of_busiest_second or 0
    rate = max(chunks / metrics.duration_s, busiest) if chunks and metrics.duration_s else None
    return job.calibrate(client_load(job, server, outcome.max_in_flight or 1, rate), before)


def read_metrics(folder: Path, load: LoadConfig, outcome: LoadOutcome) -> LoadMetrics:
    import pandas as pd

    slo = load.slo.model_dump() if load.slo else None
    return summarise(pd.read_parquet(folder / "requests.parquet"), outcome, slo)
