"""The load client measured against the mock server: can it be believed on this machine, at this many streams?

The mock server notes when it sent each chunk, and the very load process that measures engines streams from it for a few
seconds; what the client saw is compared with what was sent. Some streams are cut off, refused or dropped on purpose,
and must be counted as failures. A load whose calibration is over the limits is invalid.

The rule, of ``kvbench calibrate-client`` and before a load alike: there are up to 3 attempts, and the client is good if
it keeps to every limit in one of them. The question is what the client can do. A stall of the machine puts an attempt
of a few seconds over a limit and is none of its doing, while a client that cannot keep up fails each time; whether a
load was disturbed is judged by that load's own figures. All attempts are kept, with what else ran meanwhile.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import ssl
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench.calibration.figures import Figures, figures_of
from kvbench.calibration.mock.certificate import self_signed
from kvbench.calibration.mock.process import MockProcess
from kvbench.common.files import read_json
from kvbench.common.foreign_cpu import MAX_FOREIGN_CORES, MAX_STEAL_SHARE, MachineWatch, Server
from kvbench.common.machine import machine, versions
from kvbench.load import launch as loadrun
from kvbench.load.validity import MAX_COALESCED_SHARE, MAX_CPU_FRACTION, MAX_SLIP_MS, lag_limit_ms
from kvbench.requests.request import RequestSpec, write_requests

DEFAULT_SECONDS, DEFAULT_ITL_MS = 3.0, 20.0
ATTEMPTS = 3
_LEAST_ROUNDS, _LEAST_REQUESTS = 2, 8
_FAULT_SHARE = 0.02  # of each of three kinds
_BUSY_EVENTS_PER_S = 1000  # of one process
_TIMEOUT_S, _MARGIN_S = 10.0, 60.0


@dataclass(frozen=True)
class CalibrationSettings:
    """``streams`` at once, over ``processes`` load processes; a chunk every ``itl_ms`` on each, for ``seconds``.

    ``tls``: they are encrypted.
    """

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
        """Of all users, each of whom sends two or more one after the other."""
        return self.streams * max(_LEAST_ROUNDS, -(-_LEAST_REQUESTS // self.streams))

    @property
    def tokens(self) -> int:
        """Chunks of one stream."""
        return max(2, round(self.seconds * 1000 / self.itl_ms * self.streams / self.requests))


@dataclass(frozen=True)
class Limits:
    """The most that a calibration may show; None: whatever it is."""

    lag_p99_ms: float | None
    itl_error_p99_ms: float | None = None
    cpu_us_per_event: float | None = None
    coalesced_share: float | None = None
    cpu_fraction: float | None = None
    turnaround_p50_ms: float | None = MAX_SLIP_MS


def aims(settings: CalibrationSettings) -> Limits:
    """What the client is built to reach. CPU an event is judged where events outweigh what the process does anyway."""
    rate = settings.events_per_s / settings.processes
    return Limits(
        lag_p99_ms=0.7,
        itl_error_p99_ms=0.5,
        cpu_us_per_event=30.0 if rate >= _BUSY_EVENTS_PER_S else None,
        coalesced_share=0.001,
    )


def validity_limits(itl_ms: float) -> Limits:
    """What a load is held to, too; gaps are held to what timestamps are."""
    lag = lag_limit_ms(itl_ms)
    return Limits(lag, itl_error_p99_ms=lag, coalesced_share=MAX_COALESCED_SHARE, cpu_fraction=MAX_CPU_FRACTION)


@dataclass(frozen=True)
class Attempt:
    """One measurement. ``reasons``: one sentence for everything that was over the limits or lost.

    ``foreign_cpu_cores``: what other processes used meanwhile; ``steal_share``: what the host took of all cores' time;
    None: not known.
    """

    figures: Figures
    reasons: tuple[str, ...] = ()
    foreign_cpu_cores: float | None = None
    steal_share: float | None = None

    @property
    def disturbed(self) -> str:
        """What would make a load invalid, in words; empty when there was nothing of the kind."""
        foreign, steal = self.foreign_cpu_cores or 0.0, self.steal_share or 0.0
        said = [f"other processes used {foreign:.2f} of a core"] if foreign > MAX_FOREIGN_CORES else []
        said += [f"the host took {steal:.1%} of the CPU time away"] if steal > MAX_STEAL_SHARE else []
        return " and ".join(said)


@dataclass(frozen=True)
class Calibration:
    """``reasons``: one sentence for everything that is over ``limits`` or was lost; empty when the client is good.

    ``figures`` and ``reasons`` are those of the attempt in which least was over the limits. ``attempts``: all of them,
    in their order.
    """

    settings: CalibrationSettings
    figures: Figures
    limits: Limits
    reasons: tuple[str, ...]
    machine: str
    taken: str
    attempts: tuple[Attempt, ...] = ()

    def reasons_at(self, limits: Limits) -> tuple[str, ...]:
        """``reasons``, had the attempts been held to other limits."""
        tried = [each.figures for each in self.attempts] or [self.figures]
        return min((judge_figures(figures, limits, self.settings) for figures in reversed(tried)), key=len)

    def to_json(self) -> dict[str, Any]:
        attempts = [dataclasses.asdict(each) | {"reasons": list(each.reasons)} for each in self.attempts]
        return dataclasses.asdict(self) | {"reasons": list(self.reasons), "attempts": attempts}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """The reverse of ``to_json``; KeyError or TypeError for something else."""
        return cls(
            settings=CalibrationSettings(**data["settings"]),
            figures=Figures(**data["figures"]),
            limits=Limits(**data["limits"]),
            reasons=tuple(data["reasons"]),
            machine=data["machine"],
            taken=data["taken"],
            attempts=tuple(_attempt(each) for each in data["attempts"]),
        )


def _attempt(data: Mapping[str, Any]) -> Attempt:
    return Attempt(**{**data, "reasons": tuple(data["reasons"]), "figures": Figures(**data["figures"])})


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


def judge_figures(figures: Figures, limits: Limits, settings: CalibrationSettings) -> tuple[str, ...]:
    """One sentence for each limit that is exceeded and each kind of loss."""
    found = []
    for name, limit in dataclasses.asdict(limits).items():
        value = getattr(figures, name)
        if limit is not None and value is not None and value > limit:
            what, remedy = _WORDS[name]
            found.append(f"{what.format(value, limit)}; {remedy}")
    for count, what in (
        (figures.requests_lost, "requests were lost"),
        (figures.requests_repeated, "requests were sent again"),
        (figures.events_lost, "chunks that the server sent were lost or made up"),
        (figures.faults_counted, "streams that the server cut off, refused or dropped were counted as successes"),
        (figures.whole_failed, "streams that the server sent whole were counted as failures"),
    ):
        if count:
            found.append(f"{count} {what}")
    if not figures.faults:
        found.append("no stream was cut off, so it is not known whether cut streams are told from whole ones")
    if figures.lag_p99_ms is None:
        found.append("no stream came back whole, so nothing is known of its timestamps")
    at = f"{settings.streams} streams of {settings.itl_ms:g} ms ITL{' through TLS' if settings.tls else ''}"
    return tuple(f"the load client does not keep up with the mock server at {at}: {reason}." for reason in found)


def calibrate(settings: CalibrationSettings, limits: Limits | None = None, attempts: int = ATTEMPTS) -> Calibration:
    """Runs the mock server and the load process for ``settings.seconds``, and compares. ``limits``: default validity.

    While something is over the limits and attempts are left it runs again; why is said at the top of this file.
    Raises MeasurementError when one of the two processes fails.
    """
    limits = limits or validity_limits(settings.itl_ms)
    made: list[Attempt] = []
    while not made or (made[-1].reasons and len(made) < attempts):
        figures, seen = _measure(settings)
        reasons = judge_figures(figures, limits, settings)
        made.append(Attempt(figures, reasons, seen["foreign_cpu_cores"], seen["steal_share"]))
    best = min(reversed(made), key=lambda each: len(each.reasons))
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Calibration(settings, best.figures, limits, best.reasons, machine_key(), taken, tuple(made))


def _measure(settings: CalibrationSettings) -> tuple[Figures, dict[str, Any]]:
    """One attempt: what it found, and how the machine was meanwhile (``contention.machine_report``)."""
    count = settings.requests
    rate = max(_FAULT_SHARE, 1.0 / count)  # exact for the mock: at least one of each kind
    with tempfile.TemporaryDirectory(prefix="kvbench-calibration-") as scratch:
        folder = Path(scratch)
        requests = [RequestSpec(i, "calibration", (1, 2, i), None, settings.tokens) for i in range(count)]
        write_requests(folder / "requests.jsonl", requests)
        flags: dict[str, Any] = {"ttft-ms": settings.itl_ms, "itl-ms": settings.itl_ms}
        flags |= dict.fromkeys(("truncate-rate", "fail-rate", "drop-rate"), rate)
        trust, context = {}, None
        if settings.tls:
            cert, key = self_signed(folder)
            flags |= {"tls-cert": cert, "tls-key": key}
            trust, context = {"tls_ca_file": str(cert)}, ssl.create_default_context(cafile=cert)
        mock = MockProcess(folder, flags)
        with mock as url:
            watch = MachineWatch(Server(mock.pid))
            spec = {
                "base_url": url,
                "model": "mock",
                "mode": "closed",
                "concurrency": settings.streams,
                "requests_file": str(folder / "requests.jsonl"),
                "out_dir": str(folder / "out"),
                "timeout_s": settings.seconds + _TIMEOUT_S,
                "processes": settings.processes,
                **trust,
            }
            loadrun.drive(
                spec,
                total=count,
                limit_s=settings.seconds + _MARGIN_S,
                on_progress=lambda done, total, failed, s: None,
                on_phase=watch.on_phase,
            )
            with urllib.request.urlopen(url + "/stamps", timeout=10, context=context) as answer:
                stamps = json.load(answer)
        told = read_json(folder / "out" / "load.json")
        samples = pd.read_parquet(folder / "out" / "requests.parquet")
    return figures_of(samples, stamps, told["client"], told["zero_perf_counter"], count), watch.report()


@lru_cache(maxsize=1)
def machine_key() -> str:
    """What a calibration depends on besides its settings."""
    here, installed = machine(), versions()
    parts = (here["cpu"]["model"], f"{here['cpu']['cores']} cores", here["os"], f"python {platform.python_version()}")
    return ", ".join((*parts, *(f"{name} {installed[name]}" for name in ("kvbench", "gevent", "locust"))))
