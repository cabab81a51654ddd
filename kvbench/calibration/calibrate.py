"""Measures the load client against the mock server: how exact it is on this machine, at so many streams.

The mock server notes when it sent each chunk, and the load process that measures engines streams from it for a few
seconds; what the client saw is compared with what was sent. Some streams are cut off, refused or dropped on purpose,
and must be counted as failures. A load whose calibration is over the limits is invalid.

There are up to 3 attempts, and the client is good if it keeps to every limit in one of them: a stall of the machine
spoils one attempt, a client that cannot keep up fails each time. All attempts are kept, with what else ran meanwhile.
What a load needs is measured once and kept in the folder of the sweep or load (``Calibrator``).
"""

from __future__ import annotations

import dataclasses
import json
import math
import platform
import ssl
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import TypeAdapter

from kvbench.calibration.mock.process import MockProcess, self_signed
from kvbench.calibration.mock.settings import Stamp
from kvbench.common.files import read_json, write_json
from kvbench.common.foreign_cpu import MAX_STEAL_SHARE, MachineReport, MachineWatch, ServerProcess, foreign_limit
from kvbench.common.machine import machine, usable_cores, versions
from kvbench.common.records import read_record
from kvbench.load import launch
from kvbench.load.client_figures import percentile_ms
from kvbench.load.completion import SENT_TOGETHER_S
from kvbench.load.spec import LoadSpec
from kvbench.load.validity import MAX_COALESCED_SHARE, MAX_CPU_FRACTION, MAX_SLIP_MS, RATE_MARGIN, lag_limit_ms
from kvbench.metrics.model import ClientFigures, LoadOutcome
from kvbench.requests.request import RequestSpec, write_requests

if TYPE_CHECKING:
    import pandas as pd

DEFAULT_SECONDS, DEFAULT_ITL_MS = 3.0, 20.0
ATTEMPTS = 3
_LEAST_ROUNDS, _LEAST_REQUESTS = 2, 8
_FAULT_SHARE = 0.02  # of each of three kinds
_LEAST_TTFT_MS = 20.0  # a kept connection that closes within 5 ms of a send crossed with it: that is sent again
_BUSY_EVENTS_PER_S = 1000  # of one process
_TIMEOUT_S, _MARGIN_S = 10.0, 60.0
FILE = "calibration.json"
_SIZES = (4, 16, 32, 64, 256, 512, 1024, 2048, 4096, 8192)  # streams of one process, and at most so many in all
_LEAST_EVENTS_PER_S = 500.0  # few streams may be fast ones, and so many chunks a second cost any client little
_FULL_STREAMS = 256  # of one process with more, chunks are as many a second, until a load shows how many they are


@dataclass(frozen=True)
class CalibrationSettings:
    """A load of ``streams`` over ``processes`` load processes; a chunk every ``itl_ms`` on each, for ``seconds``."""

    streams: int = 64
    itl_ms: float = DEFAULT_ITL_MS
    processes: int = 1
    seconds: float = DEFAULT_SECONDS
    tls: bool = False

    @property
    def events_per_s(self) -> float:
        """Chunks a second of all streams together."""
        return self.streams * 1000 / self.itl_ms

    @property
    def requests(self) -> int:
        """Requests of all users; each user sends two or more, one after the other."""
        return self.streams * max(_LEAST_ROUNDS, -(-_LEAST_REQUESTS // self.streams))

    def tokens_of(self, request: int) -> int:
        """Chunks of a request's stream: half to 1.5 times the mean, so that users' next requests come one by one.

        Requests of every second round have the opposite lengths, so that all users end at about the same time.
        """
        mean = self.seconds * 1000 / self.itl_ms * self.streams / self.requests
        turn, place = divmod(request, self.streams)
        share = (place + 0.5) / self.streams
        return max(2, round(mean * (1.5 - share if turn % 2 else 0.5 + share)))


@dataclass(frozen=True)
class Limits:
    """The largest allowed figures; None: no limit."""

    lag_p99_ms: float | None
    itl_error_p99_ms: float | None = None
    cpu_us_per_event: float | None = None
    coalesced_share: float | None = None
    cpu_fraction: float | None = None
    turnaround_p50_ms: float | None = MAX_SLIP_MS


def aims(settings: CalibrationSettings) -> Limits:
    """Returns what the client is built to reach. CPU an event is judged where events are most of its work."""
    rate = settings.events_per_s / settings.processes
    return Limits(
        lag_p99_ms=0.7,
        itl_error_p99_ms=0.5,
        cpu_us_per_event=30.0 if rate >= _BUSY_EVENTS_PER_S else None,
        coalesced_share=0.001,
    )


def validity_limits(itl_ms: float) -> Limits:
    """The limits of a load; gaps have the limit of timestamps."""
    lag = lag_limit_ms(itl_ms)
    return Limits(lag, itl_error_p99_ms=lag, coalesced_share=MAX_COALESCED_SHARE, cpu_fraction=MAX_CPU_FRACTION)


@dataclass(frozen=True)
class CalibrationFigures:
    """Times in ms. None: too little came back to tell.

    ``lag``: receipt minus the server's send, its p99 that of its size, since a stamp that is too early is as wrong;
    ``itl_error``: |gap seen - gap sent|; ``turnaround``: from a stream's end to the same user's next send.
    ``coalesced_share``: chunks that share their receipt with the one before, though they were sent more than 0.5 ms
    apart. ``faults``: streams that the server cut off, refused or dropped on purpose, and
    ``faults_counted``: those of them that the client counts as successes; ``whole_failed``: the reverse.
    ``requests_repeated``: sent again by the client, which must leave a failed request alone. ``unstamped_share``: of
    the reads, those whose moment is not the kernel's stamp of the arrival.
    """

    events: int
    events_lost: int
    requests: int
    requests_lost: int
    requests_repeated: int
    faults: int
    faults_counted: int
    whole_failed: int
    lag_p50_ms: float | None
    lag_p99_ms: float | None
    itl_error_p99_ms: float | None
    coalesced_share: float | None
    turnaround_p50_ms: float | None
    cpu_us_per_event: float | None
    cpu_fraction: float | None
    loop_lag_p99_ms: float | None
    server_late_p99_ms: float | None
    priority: str
    unstamped_share: float | None = None


def figures_of(
    samples: pd.DataFrame, stamps: Sequence[Stamp], client: ClientFigures, zero: float, planned: int
) -> CalibrationFigures:
    """Compares what the client saw with what was sent.

    ``samples``: requests.parquet, times since ``zero`` [s, perf_counter]; ``stamps``: the mock's /stamps, whose
    prompts' last ids are the requests' indices; ``client``: of load.json; ``planned``: requests of the load.
    """
    rows = {int(row["index"]): row for row in samples.to_dict("records")}
    sent = {int(stamp.prompt[-1]): stamp for stamp in stamps}
    lags, errors, shared, lost = [np.empty(0)], [np.empty(0)], 0, 0
    for index, stamp in sent.items():
        sends = np.asarray(stamp.sends, dtype=np.float64) - zero
        row = rows.get(index)
        seen = np.asarray(row["chunk_times"] if row is not None else (), dtype=np.float64)
        lost += abs(len(sends) - len(seen))
        if len(seen) == len(sends):
            lags.append(seen - sends)
            errors.append(np.abs(np.diff(seen) - np.diff(sends)))
            shared += int(((np.diff(seen) == 0) & (np.diff(sends) > SENT_TOGETHER_S)).sum())
    lag, error = np.concatenate(lags), np.concatenate(errors)
    faulty = {i for i, stamp in sent.items() if stamp.fault}
    ok = {i for i, row in rows.items() if row["ok"]}
    late = [s - d for stamp in stamps for s, d in zip(stamp.sends, stamp.due, strict=True)]
    return CalibrationFigures(
        events=sum(len(stamp.sends) for stamp in stamps),
        events_lost=lost,
        requests=len(sent),
        requests_lost=planned - len(rows.keys() & sent.keys()),
        requests_repeated=len(stamps) - len(sent),
        faults=len(faulty),
        faults_counted=len(faulty & ok),
        whole_failed=len((sent.keys() & rows.keys()) - faulty - ok),
        lag_p50_ms=percentile_ms(lag, 50),
        lag_p99_ms=percentile_ms(np.abs(lag), 99),
        itl_error_p99_ms=percentile_ms(error, 99),
        coalesced_share=shared / len(lag) if len(lag) else None,
        turnaround_p50_ms=client.turnaround_p50_ms,
        cpu_us_per_event=client.cpu_us_per_chunk,
        cpu_fraction=client.cpu_fraction,
        loop_lag_p99_ms=client.loop_lag_p99_ms,
        server_late_p99_ms=percentile_ms(late, 99),
        priority=str(client.priority),
        unstamped_share=client.unstamped_share,
    )


@dataclass(frozen=True)
class Attempt:
    """One calibration. ``reasons``: one sentence for each figure over its limit and each loss.

    ``foreign_cpu_cores``: what other processes used meanwhile; ``steal_share``: what the host took of all cores' time;
    None: not known.
    """

    figures: CalibrationFigures
    reasons: tuple[str, ...] = ()
    foreign_cpu_cores: float | None = None
    steal_share: float | None = None

    @property
    def disturbed(self) -> str:
        """The other work on the machine that would have made a load invalid, in words; empty if there was none."""
        foreign, steal = self.foreign_cpu_cores or 0.0, self.steal_share or 0.0
        causes = [f"other processes used {foreign:.2f} of a core"] if foreign > foreign_limit(usable_cores()) else []
        causes += [f"the host took {steal:.1%} of the CPU time away"] if steal > MAX_STEAL_SHARE else []
        return " and ".join(causes)


@dataclass(frozen=True)
class ClientCalibration:
    """A client measured on this machine; without ``reasons`` (sentences on what is over ``limits`` or lost) it is good.

    ``figures`` and ``reasons`` are those of the attempt in which least was over the limits. ``attempts``: all of them,
    in their order.
    """

    settings: CalibrationSettings
    figures: CalibrationFigures
    limits: Limits
    reasons: tuple[str, ...]
    machine: str
    taken: str
    attempts: tuple[Attempt, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ClientCalibration:
        """The reverse of ``to_json``; ValueError for something else."""
        return TypeAdapter(cls).validate_python(data)


_WORDS = {  # of a limit that is exceeded: what happened, with the value and the limit, and what to do
    "lag_p99_ms": ("its timestamps are wrong: p99 {:.2f} ms, the limit is {:g} ms", "give it a core of its own"),
    "itl_error_p99_ms": ("it sees wrong gaps: p99 error {:.2f} ms, the limit is {:g} ms", "give it a core of its own"),
    "cpu_us_per_event": ("it takes {:.1f} us of CPU an event, the limit is {:g} us", "use a faster or an idle core"),
    "coalesced_share": ("{:.2%} of the chunks were read together with the one before, the limit is {:.1%}",
                        "use fewer streams a process or a free core"),
    "cpu_fraction": ("it used {:.0%} of a core, the limit is {:.0%}", "use fewer streams a process"),
    "turnaround_p50_ms": ("its users wait {:.1f} ms (median) between two requests, the limit is {:g} ms",
                          "use fewer streams a process or a free core"),
}  # fmt: skip


def judge_figures(figures: CalibrationFigures, limits: Limits, settings: CalibrationSettings) -> tuple[str, ...]:
    """One sentence for each limit that is exceeded and each kind of loss."""
    reasons = []
    for name, limit in dataclasses.asdict(limits).items():
        value = getattr(figures, name)
        if limit is not None and value is not None and value > limit:
            what, remedy = _WORDS[name]
            reasons.append(f"{what.format(value, limit)}; {remedy}")
    for count, what in (
        (figures.requests_lost, "requests were lost"),
        (figures.requests_repeated, "requests were sent again"),
        (figures.events_lost, "chunks that the server sent were lost or made up"),
        (figures.faults_counted, "streams that the server cut off, refused or dropped were counted as successes"),
        (figures.whole_failed, "streams that the server sent whole were counted as failures"),
    ):
        if count:
            reasons.append(f"{count} {what}")
    if not figures.faults:
        reasons.append("no stream was cut off, so it is not known whether the client recognises cut streams")
    if figures.lag_p99_ms is None:
        reasons.append("no stream came back whole, so nothing is known of its timestamps")
    at = f"{settings.streams} streams of {settings.itl_ms:g} ms ITL{' through TLS' if settings.tls else ''}"
    return tuple(f"the load client does not keep up with the mock server at {at}: {reason}." for reason in reasons)


def calibrate(
    settings: CalibrationSettings, limits: Limits | None = None, attempts: int = ATTEMPTS
) -> ClientCalibration:
    """Runs the mock server and the load process for ``settings.seconds``, and compares. ``limits``: default validity.

    While something is over the limits and attempts are left it runs again; see the top of this file.
    Raises MeasurementError when one of the two processes fails.
    """
    limits = limits or validity_limits(settings.itl_ms)
    made: list[Attempt] = []
    while not made or (made[-1].reasons and len(made) < attempts):
        figures, machine = _measure(settings)
        reasons = judge_figures(figures, limits, settings)
        made.append(Attempt(figures, reasons, machine.foreign_cpu_cores, machine.steal_share))
    best = min(reversed(made), key=lambda attempt: len(attempt.reasons))
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return ClientCalibration(settings, best.figures, limits, best.reasons, machine_key(), taken, tuple(made))


def _measure(settings: CalibrationSettings) -> tuple[CalibrationFigures, MachineReport]:
    """One attempt: what it found, and how the machine was meanwhile."""
    import pandas as pd

    count = settings.requests
    rate = max(_FAULT_SHARE, 1.0 / count)  # exact for the mock: at least one of each kind
    with tempfile.TemporaryDirectory(prefix="kvbench-calibration-") as scratch:
        folder = Path(scratch)
        requests = [RequestSpec(i, "calibration", (1, 2, i), None, settings.tokens_of(i)) for i in range(count)]
        write_requests(folder / "requests.jsonl", requests)
        flags: dict[str, object] = {"ttft-ms": max(settings.itl_ms, _LEAST_TTFT_MS), "itl-ms": settings.itl_ms}
        flags |= dict.fromkeys(("truncate-rate", "fail-rate", "drop-rate"), rate)
        trust, context = {}, None
        if settings.tls:
            cert, key = self_signed(folder)
            flags |= {"tls-cert": cert, "tls-key": key}
            trust, context = {"tls_ca_file": str(cert)}, ssl.create_default_context(cafile=cert)
        mock = MockProcess(folder, flags)
        with mock as url:
            watch = MachineWatch(ServerProcess(mock.pid))
            spec = LoadSpec(
                base_url=url,
                model="mock",
                mode="closed",
                concurrency=settings.streams,
                requests_file=str(folder / "requests.jsonl"),
                out_dir=str(folder / "out"),
                timeout_s=settings.seconds + _TIMEOUT_S,
                processes=settings.processes,
                **trust,
            )
            launch.drive(
                spec,
                total=count,
                limit_s=settings.seconds + _MARGIN_S,
                on_progress=lambda done, total, failed, s: None,
                on_phase=watch.on_phase,
            )
            with urllib.request.urlopen(url + "/stamps", timeout=10, context=context) as answer:
                stamps = [Stamp(**stamp) for stamp in json.load(answer)]
        load = read_record(LoadOutcome, folder / "out" / "load.json", "calibrate again")
        samples = pd.read_parquet(folder / "out" / "requests.parquet")
    return figures_of(samples, stamps, load.client, load.zero_perf_counter or 0.0, count), watch.report()


@lru_cache(maxsize=1)
def machine_key() -> str:
    """Names what a calibration depends on besides its settings."""
    here, installed = machine(), versions()
    parts = (here["cpu"]["model"], f"{here['cpu']['cores']} cores", here["os"], f"python {platform.python_version()}")
    return ", ".join((*parts, *(f"{name} {installed[name]}" for name in ("kvbench", "gevent", "locust"))))


@dataclass(frozen=True)
class ClientLoad:
    """The load on the client: ``streams`` at once and chunks a second (None: not known), over ``processes``."""

    streams: int
    processes: int = 1
    events_per_s: float | None = None
    tls: bool = False

    def covered_by(self, settings: CalibrationSettings) -> bool:
        """Tests whether a client calibrated with ``settings`` has kept up with at least as much."""
        return self.streams <= settings.streams and (self.events_per_s or 0.0) <= RATE_MARGIN * settings.events_per_s


def settings_for(demand: ClientLoad) -> CalibrationSettings:
    """Rounds up to steps what a load needs, so that a sweep's many loads need few calibrations.

    Streams a process are rounded up to 4, 16, 32, 64, 256, 512 and so on, 8,192 in all; chunks a second, where they
    are known to be more than 20 ms of ITL make and more than 500, to half powers of 2.
    """
    share = -(-demand.streams // demand.processes)
    streams = min(demand.processes * next((size for size in _SIZES if share <= size), _SIZES[-1]), _SIZES[-1])
    rate = max(_LEAST_EVENTS_PER_S, min(streams, demand.processes * _FULL_STREAMS) * 1000 / DEFAULT_ITL_MS)
    if demand.events_per_s is not None and demand.events_per_s > RATE_MARGIN * rate:
        rate = 2 ** (math.ceil(2 * math.log2(demand.events_per_s / RATE_MARGIN)) / 2)
    return CalibrationSettings(streams, streams * 1000 / rate, demand.processes, tls=demand.tls)


@dataclass(frozen=True)
class Calibrator:
    """Calibrates the client before a load, once per machine and settings. ``wanted`` False: nothing is measured.

    ``folder``: of a sweep or a load; its calibration.json keeps what was measured. Only a calibration that the client
    passed is used again: one that failed in all its attempts has one more before each further load, and by --resume.
    ``say``: progress for the user; ``warn``: warnings, which are to be read later, too. ``check``: called before a load
    is begun with a new calibration, with the seconds that it takes; may raise.
    """

    folder: Path
    wanted: bool = True
    say: Callable[[str], None] = lambda text: None
    warn: Callable[[str], None] = lambda text: None
    check: Callable[[float], None] = lambda seconds: None

    def __call__(self, demand: ClientLoad, before: ClientCalibration | None = None) -> ClientCalibration | None:
        """The calibration for ``demand``: ``before``, if that is enough; None where none is wanted.

        Raises MeasurementError.
        """
        if not self.wanted:
            return None
        if before is not None and demand.covered_by(before.settings):
            return before
        settings = settings_for(demand)
        calibration = self._at(settings, again=before is not None)
        if demand.covered_by(settings):
            return calibration
        too_much = (
            f"the load had up to {demand.streams} streams at once, and the client can be calibrated at "
            f"{settings.streams} at most; use fewer."
        )
        return dataclasses.replace(calibration, reasons=(*calibration.reasons, too_much))

    def _at(self, settings: CalibrationSettings, again: bool) -> ClientCalibration:
        """A stored good calibration, else a new one. ``again``: the load needed more than was expected before it."""
        stored = _stored(self.folder)
        same = [c for c in stored if (c.machine, c.settings) == (machine_key(), settings)]
        failed = [c for c in same if c.reasons]
        if good := [c for c in same if not c.reasons]:
            return good[-1]
        where = f"{settings.streams} streams{' through TLS' if settings.tls else ''}"
        why = "again, as the load needed more than expected, " if again else ""
        at = f"{where} of {settings.itl_ms:.4g} ms ITL"
        if not again:  # else it judges what is measured already
            self.check(settings.seconds + 2)
        self.say(f"calibrating the load client {why}at {at} (about {settings.seconds + 2:.0f} s, once)")
        new = calibrate(settings, attempts=1 if failed else ATTEMPTS)
        for reason in new.reasons:
            self.warn(f"loads of {where} will be invalid: {reason}")
        if new.reasons and (disturbed := [attempt.disturbed for attempt in new.attempts if attempt.disturbed]):
            self.warn(f"while the client was calibrated {disturbed[-1]}: stop what runs there and try again")
        kept = [c for c in stored if c not in failed] if new.reasons else stored
        write_json(self.folder / FILE, [c.to_json() for c in (*kept, new)])
        return new

    def facts(self) -> dict[str, Any]:
        """Returns the calibration as a manifest stores it: what was measured so far, or that it was left out."""
        return {"left_out": not self.wanted, "measured": [c.to_json() for c in _stored(self.folder)]}


def passed_since(folder: Path, failed: ClientCalibration) -> bool:
    """Tests whether the client later passed what it had failed before a load of the run in ``folder``."""
    return any(
        not stored.reasons
        and (stored.machine, stored.settings) == (failed.machine, failed.settings)
        and stored.taken != failed.taken
        for stored in _stored(folder)
    )


def _stored(folder: Path) -> list[ClientCalibration]:
    if not (folder / FILE).is_file():
        return []
    try:
        return [ClientCalibration.from_json(row) for row in read_json(folder / FILE)]
    except (KeyError, TypeError, ValueError):  # of another version: measured anew
        return []
