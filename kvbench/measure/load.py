"""Measures one load on a server that is up and warm, for a sweep and for ``kvbench load``.

Wait until the server is idle, put its cache into the declared state, send the load, check that no page stayed owned,
and judge whether the load is valid.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.calibration.cache import ClientLoad
from kvbench.calibration.calibrate import Calibration
from kvbench.common.errors import MeasurementError
from kvbench.common.files import read_json, utc_now, write_json
from kvbench.common.foreign_cpu import MachineWatch, contention_reasons
from kvbench.common.text import failed_words, failure_words
from kvbench.load import launch
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import UNKNOWN_STREAMS, client_reasons
from kvbench.measure import server_state
from kvbench.measure.canaries import as_taken, canaries_for, fails_by_one
from kvbench.metrics.canaries import wrong_words
from kvbench.metrics.latency import is_refusal, summarise, too_many_failed
from kvbench.metrics.model import LoadMetrics
from kvbench.requests.build import build_requests
from kvbench.targets.base import Target
from kvbench.targets.prometheus import (
    POLL_INTERVAL_S,
    MetricsPoller,
    MetricsSample,
    OnReading,
    counter_changes,
    gauge_summary,
)
from kvbench.workload.design import LoadPoint
from kvbench.workload.load_section import LoadConfig

PREPARE, DRAIN = "prepare", launch.DRAIN
_MEMORY_DISK = Path("/dev/shm")


@dataclass(frozen=True)
class LoadSetup:
    """What the loads on one server have in common.

    ``settings``: the configuration under test (``{"target": url}`` for a server that ran before); ``info``: its
    /server_info; ``server_log``: where its output goes, None if it is not ours; ``check``: called every 0.5 s,
    raises when the measurement must end; ``client``: further fields of LoadSpec; ``calibrate``: gives the load client's
    calibration for a load, given the one from before the load (None: nobody calibrates); ``arguments``: of the load
    process; ``sends_here`` False: it only leads workers on other machines; ``poll_s``: between readings of /metrics;
    ``on_phase``: is told what a load does from here on: ``PREPARE``, "begin", ``DRAIN`` (all is sent), "measured".
    """

    load: LoadConfig
    seed: int
    target: Target
    settings: Mapping[str, Any]
    info: Mapping[str, Any] | None
    server_log: Path | None
    check: Callable[[], None]
    client: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    sends_here: bool = True
    poll_s: float = POLL_INTERVAL_S
    calibrate: Callable[[ClientLoad, Calibration | None], Calibration | None] | None = None
    on_phase: Callable[[str], None] = lambda phase: None

    def requests(self, point: LoadPoint, repeat: int, seed: int | None = None) -> list[Any]:
        """The requests of one load. Raises MeasurementError when none can be made for this server."""
        return requests_for(self.load, point, self.target, self.seed if seed is None else seed, repeat)


def requests_for(load: LoadConfig, point: LoadPoint, target: Target, seed: int, repeat: int) -> list[Any]:
    """The requests of one load, as ``target`` takes them. Raises MeasurementError when none can be made for it.

    UsageError for canaries that are not of the model that it serves.
    """
    facts, canaries = target.model, canaries_for(load, target)
    if facts.max_model_len is None and getattr(load.prompts, "length_scale", None) == "auto":
        raise MeasurementError(
            "the server does not tell its longest sequence, which length_scale: auto needs: give --max-model-len N"
        )
    longest = facts.most_tokens - (target.template_tokens or 0)
    sizes = {"vocab_size": facts.vocab_size, "max_model_len": longest}
    try:
        made = build_requests(
            load, **sizes, seed=seed, repeat=repeat, concurrency=point.concurrency, rate=point.request_rate,
            canaries=canaries,
        )  # fmt: skip
    except ValueError as error:
        raise MeasurementError(f"no requests can be made: {error}") from None
    return target.as_sent(made if canaries is None else as_taken(made, canaries, target))


def measure_load(
    setup: LoadSetup,
    point: LoadPoint,
    requests: list[Any],
    requests_file: Path,
    out: Path,
    *,
    first: bool,
    on_progress: launch.Progress,
    on_reading: OnReading = lambda sample: None,
    failures_invalidate: bool = True,
) -> dict[str, Any]:
    """From the idle server to the judged result; raw samples, counters and logs are written to ``out``.

    ``first``: nothing was measured on this server before. ``on_reading`` gets what is read of the server's /metrics
    while the load runs. ``failures_invalidate`` False: failed requests, and
    /metrics that do not answer, are a result (an overloaded server) and no fault of the measurement.
    Returns ``valid`` (comparable with other loads), ``invalid_reasons``, ``refused`` (what the server refused by errors
    of its own, None where it did not: a finding, after which the load is not comparable), ``wrong_answers`` (how many
    canaries a server with a KV in full precision answered wrongly, None where all are right: a finding too),
    ``server_faults`` (those of the three that are the server's own doing, not the client's or the machine's),
    ``disturbances`` (those that the machine
    or the client's lateness made, and that may be gone when the load is measured again), ``calibration``, ``metrics``,
    ``endpoint``, ``template_tokens`` (that the server's chat template adds, None where not known),
    ``prompt_tokens_added`` (least, median and most tokens that it counts beyond the drawn ones of a text, or None),
    ``machine``, ``prefix_cache`` and ``prefix_cache_bounds`` [tokens], ``started_at``, ``ended_at`` and ``wall_s``.

    Raises:
        MeasurementError: the load could not be driven to its end.
        UnstoredError: it was, and cannot be written to ``out``.
    """
    prepared = prepare(setup, point, requests, requests_file, out, first=first)
    on_progress(0, len(requests), 0, 0.0)  # after a calibration, which a display has shown until now
    memory = str(_MEMORY_DISK) if os.access(_MEMORY_DISK, os.W_OK) else None  # has room where the disk is full
    with tempfile.TemporaryDirectory(prefix="kvbench-load-", dir=memory) as spare:
        driven = prepared.drive(on_progress, on_reading=on_reading, spare=Path(spare))
        return prepared.judge(driven, failures_invalidate=failures_invalidate)


class UnstoredError(OSError):
    """What was measured cannot be written. ``result``: of a load, as ``measure_load`` returns it, or of its caller."""

    def __init__(self, error: OSError, result: Mapping[str, Any]) -> None:
        super().__init__(error.errno, error.strerror, error.filename)
        self.result = result


@contextmanager
def stored_or_told(result: Mapping[str, Any]) -> Iterator[None]:
    """An OSError of the block, which stores ``result``, becomes an UnstoredError that has it."""
    try:
        yield
    except OSError as error:
        raise UnstoredError(error, result) from error


def prepare(
    setup: LoadSetup, point: LoadPoint, requests: list[Any], requests_file: Path, out: Path, *, first: bool
) -> PreparedLoad:
    """Calibrates the client and brings the server into its declared state. Raises MeasurementError."""
    setup.check()
    calibration = None
    if setup.calibrate:  # for as many streams as the load may have
        most = point.concurrency if point.mode == "closed" else setup.load.max_concurrency
        calibration = setup.calibrate(_client_load(setup, most or UNKNOWN_STREAMS), None)
    setup.on_phase(PREPARE)
    reasons = server_state.prepare_cache(setup.target, setup.load, requests, first=first)
    return PreparedLoad(
        setup, point, requests, requests_file, out, calibration, reasons,
        started_at=utc_now(), began=time.monotonic(), log_from=_size(setup.server_log),
        before=server_state.read_metrics(setup.target),
    )  # fmt: skip


@dataclass(frozen=True)
class Driven:
    """What was seen of server and machine during a load (``poller``: /metrics) and ``after`` it.

    ``out``: the folder with the client's files: the load's own, or the spare one where that had no room.
    """

    out: Path
    poller: MetricsPoller
    after: MetricsSample | None
    machine: MachineWatch


@dataclass(frozen=True)
class PreparedLoad:
    """A load whose server is ready for it.

    ``cache_reasons``: why the state of its cache is not known; ``began`` [s, time.monotonic]; ``log_from``: bytes of
    the server's log until now; ``before``: its /metrics.
    """

    setup: LoadSetup
    point: LoadPoint
    requests: list[Any]
    requests_file: Path
    out: Path
    calibration: Calibration | None
    cache_reasons: list[str]
    started_at: str
    began: float
    log_from: int
    before: MetricsSample | None

    def drive(
        self,
        on_progress: launch.Progress,
        *,
        on_reading: OnReading = lambda sample: None,
        spare: Path | None = None,
    ) -> Driven:
        """Sends the load to its end; raw samples and logs are in ``out`` then. Raises MeasurementError.

        ``on_reading``: as in ``measure_load``. ``spare``: an empty folder for the samples if ``out`` has no room.
        """
        setup, target = self.setup, self.setup.target
        machine = MachineWatch(target.server())
        fields = target.client_fields() | dict(setup.client) | ({"spare_dir": str(spare)} if spare else {})
        spec = LoadSpec.of(
            setup.load, self.point, base_url=target.base_url, model=target.model.name,
            requests_file=str(self.requests_file), out_dir=str(self.out),
            send_priority=launch.takes_priority(setup.settings, setup.info),
            **fields,
        )  # fmt: skip

        def tell(phase: str, pid: int) -> None:
            setup.on_phase(phase)
            if phase != DRAIN:
                machine.on_phase(phase, pid)

        with MetricsPoller(lambda: target.metrics(), setup.poll_s, on_reading) as poller:
            launch.drive(
                spec,
                total=len(self.requests),
                limit_s=launch.bound_s(setup.load, self.point, self.requests),
                on_progress=on_progress,
                check=setup.check,
                on_phase=tell,
                arguments=setup.arguments,
            )
        out = spare if spare is not None and (spare / "load.json").is_file() else self.out
        return Driven(out, poller, server_state.wait_release(target), machine)

    def judge(self, driven: Driven, *, failures_invalidate: bool = True) -> dict[str, Any]:
        """What ``measure_load`` returns, from the files in ``out``. Raises UnstoredError."""
        setup, before, after = self.setup, self.before, driven.after
        outcome = read_json(driven.out / "load.json")
        metrics, unread = collect_metrics(driven.out, setup.load, outcome, driven.poller, before)
        machine, report = driven.machine, driven.machine.report()
        workers_here = bool(metrics["client"].get("workers_here"))
        if not judges_this_machine(setup.sends_here, machine.server.local, workers_here):
            report["foreign_cpu_cores"] = report["steal_share"] = None
        calibration = recalibrated(setup, self.calibration, outcome, metrics)
        client = metrics.client.model_copy(update={"cpu_s_per_1000_output_tokens": client_cost(report, metrics)})
        metrics = metrics.model_copy(update={"client": client})
        complete = int(metrics.get("completed") or 0) == len(self.requests)
        cache = server_state.cache_use(
            setup.load, self.requests, setup.info, before, after, complete=complete, metrics=metrics
        )
        faults = server_state.leak_reasons(after) + cache.reasons
        refused = refusal(metrics) if failures_invalidate else None
        if failures_invalidate and not refused:
            faults += failure_reasons(metrics)
        wrong = _wrong_answers(metrics) if fails_by_one(setup.settings, setup.info) else None
        disturbed = contention_reasons(report)
        reasons = [
            *(calibration.reasons if calibration else ()),
            *self.cache_reasons,
            *(outcome.get("invalid_reasons") or ()),
            *faults,
            *disturbed,
        ]
        if outcome.get("incomplete"):
            reasons.append("the load client was stopped before its last request")
        if unread and failures_invalidate:
            reasons.append(unread)
        result = {
            "valid": not (reasons or refused or wrong),
            "invalid_reasons": reasons,
            "refused": refused,
            "wrong_answers": wrong,
            "server_faults": [*faults, *(each for each in (refused, wrong) if each)],
            "disturbances": _disturbed_calibration(calibration) + client_reasons(outcome) + disturbed,
            "calibration": calibration.to_json() if calibration else None,
            "metrics": metrics,
            "endpoint": setup.target.dialect.endpoint,
            "template_tokens": setup.target.template_tokens,
            "prompt_tokens_added": outcome.get("prompt_tokens_added"),
            "machine": report,
            "prefix_cache": cache.counts,
            "prefix_cache_bounds": dataclasses.asdict(cache.bounds) if cache.bounds else None,
            "started_at": self.started_at,
            "ended_at": utc_now(),
            "wall_s": time.monotonic() - self.began,
        }
        with stored_or_told(result):
            for file in driven.out.iterdir() if driven.out != self.out else ():  # there may be room by now
                (self.out / file.name).write_bytes(file.read_bytes())
            store_server(self.out, outcome, metrics, driven.poller, before, after)
            _copy_tail(setup.server_log, self.log_from, self.out / "server.log")
        return result


def judges_this_machine(sends_here: bool, server_here: bool, workers_here: bool) -> bool:
    """Whether CPU of other programs on this machine makes the load invalid.

    A master of workers elsewhere disturbs nothing unless the server is here; workers here, which are not its children,
    would count as other programs.
    """
    return sends_here or (server_here and not workers_here)


def _disturbed_calibration(calibration: Calibration | None) -> list[str]:
    """Why the client failed its calibration, if other work disturbed that: undisturbed it would fail again."""
    if calibration is None or not any(attempt.disturbed for attempt in calibration.attempts):
        return []
    return list(calibration.reasons)


def failure_reasons(metrics: Mapping[str, Any]) -> list[str]:
    """Why so many failed requests make a load invalid; empty when they do not."""
    if not too_many_failed(metrics):
        return []
    failed, completed = metrics["failed"], int(metrics.get("completed") or 0)
    return [failed_words(metrics["failure_messages"], failed, failed + completed, kinds=True)]


def refusal(metrics: Mapping[str, Any]) -> str | None:
    """How much of the load the server answered, and with which error it refused the rest; None where it did not."""
    if not is_refusal(metrics):
        return None
    completed, sent = metrics["completed"], metrics["completed"] + metrics["failed"]
    return f"served {completed} of {sent} requests; {failure_words(metrics['failure_messages'], sent)}"


def _wrong_answers(metrics: Mapping[str, Any]) -> str | None:
    canaries = metrics.get("canaries") or {}
    return wrong_words(canaries) if canaries.get("wrong") else None


def _client_load(setup: LoadSetup, streams: int, events_per_s: float | None = None) -> ClientLoad:
    processes = int(setup.client.get("processes") or setup.load.processes)
    return ClientLoad(streams, processes, events_per_s, tls=setup.target.base_url.startswith("https:"))


def recalibrated(
    setup: LoadSetup, before: Calibration | None, outcome: Mapping[str, Any], metrics: Mapping[str, Any]
) -> Calibration | None:
    """The calibration for the load's busiest second: measured now if that was more than expected before the load."""
    if before is None or setup.calibrate is None:
        return None
    client, seconds = outcome.get("client") or {}, metrics.get("duration_s")
    chunks, busiest = client.get("chunks"), client.get("chunks_of_busiest_second") or 0
    rate = max(chunks / seconds, busiest) if chunks and seconds else None
    return setup.calibrate(_client_load(setup, int(outcome.get("max_in_flight") or 1), rate), before)


def collect_metrics(
    out: Path, load: LoadConfig, outcome: Mapping[str, Any], poller: MetricsPoller, before: MetricsSample | None
) -> tuple[LoadMetrics, str | None]:
    """Metrics of a load that ended, and why the server's activity during it is unknown (None: it is known)."""
    metrics = summarise(pd.read_parquet(out / "requests.parquet"), outcome, load.slo.model_dump() if load.slo else None)
    if before is None or not poller.failures or _during(outcome, metrics, poller):
        return metrics, None
    return metrics, (
        f"the server's /metrics did not answer while the load ran ({poller.failures} readings failed), so what the "
        "server did is not known: let it answer them under load"
    )


def _during(outcome: Mapping[str, Any], metrics: Mapping[str, Any], poller: MetricsPoller) -> list[MetricsSample]:
    """The readings of /metrics from the first request's start to the last one's end."""
    zero = float(outcome["zero_perf_counter"])  # of a process on this machine, where all share this clock
    start = zero + float(metrics.get("first_request_s") or 0.0)
    duration = float(metrics.get("duration_s") or outcome.get("duration_s") or 0.0)
    return [s for s in poller.samples if 0.0 <= s.at - start <= duration]


def store_server(
    out: Path,
    outcome: Mapping[str, Any],
    metrics: Mapping[str, Any],
    poller: MetricsPoller,
    before: MetricsSample | None,
    after: MetricsSample | None,
) -> None:
    """Writes what /metrics told: counters.json and server.parquet."""
    start, during = float(outcome["zero_perf_counter"]), _during(outcome, metrics, poller)
    if poller.samples:
        pd.DataFrame([{"t": s.at - start, **s.gauges, **s.counters} for s in poller.samples]).to_parquet(
            out / "server.parquet", index=False
        )
    unread = before is not None and not during and poller.failures
    gauges = gauge_summary(during or ([] if unread else poller.samples))  # of a load shorter than a reading: nearby
    counters = {
        **counter_changes(before, after),
        **{f"{name}_{part}": value for name, parts in gauges.items() for part, value in parts.items()},
        "pages_owned_after": after.owned_pages if after else None,
        "swap_slots_used_after": after.gauges.get("swap_slots_used") if after else None,
        "polls": len(poller.samples),
        "polls_failed": poller.failures,
    }
    write_json(out / "counters.json", counters)


def client_cost(machine: Mapping[str, Any], metrics: Mapping[str, Any]) -> float | None:
    """CPU seconds of the client's processes per 1,000 output tokens of successful requests.

    Streaming: as the kernel counts it on this machine, or as the processes report it where some run on others. The
    parsing after the stream is added.
    """
    tokens, client = metrics.get("total_output_tokens"), metrics.get("client") or {}
    cores, seconds = machine.get("client_cpu_cores"), machine.get("seconds")
    counted = cores * seconds if cores is not None and seconds else None
    known = [cpu_s for cpu_s in (counted, client.get("cpu_s")) if cpu_s is not None]
    return (max(known) + (client.get("parse_cpu_s") or 0.0)) / tokens * 1000.0 if tokens and known else None


def _size(log: Path | None) -> int:
    return log.stat().st_size if log is not None and log.is_file() else 0


def _copy_tail(source: Path | None, start: int, to: Path) -> None:
    if source is not None and source.is_file():
        with source.open("rb") as file:
            file.seek(start)
            to.write_bytes(file.read())
