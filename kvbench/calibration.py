"""The load client measured against the mock server: can it be believed on this machine, at this many streams?

The mock server notes when it sent each chunk, and the very load process that measures engines streams from it for a few
seconds; what the client saw is compared with what was sent. Some streams are cut off or refused on purpose, and must
be counted as failures. A load whose calibration is over the limits is invalid.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import tempfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd

from kvbench import loadrun
from kvbench.calibration_figures import Figures, figures_of
from kvbench.load.probe import LAG_SHARE_OF_ITL, MAX_COALESCED_SHARE, MAX_CPU_FRACTION, MAX_SLIP_MS, MIN_LAG_LIMIT_MS
from kvbench.load.requests import RequestSpec, write_requests
from kvbench.manifest import machine, versions
from kvbench.mock.process import MockProcess
from kvbench.results import read_json, write_json

FILE = "calibration.json"
DEFAULT_SECONDS, DEFAULT_ITL_MS = 3.0, 20.0
MAX_STREAMS = 256  # of one process: beyond, a load needs more of them
_LEAST_ROUNDS, _LEAST_REQUESTS = 2, 8
_FAULT_SHARE = 0.05
_BUSY_EVENTS_PER_S = 1000  # of one process
_TIMEOUT_S, _MARGIN_S, _ATTEMPTS = 10.0, 60.0, 3
_UNKNOWN_STREAMS = 64  # in open loop without a cap


@dataclass(frozen=True)
class CalibrationSettings:
    """``streams`` at once, over ``processes`` load processes; a chunk every ``itl_ms`` on each, for ``seconds``."""

    streams: int = 64
    itl_ms: float = DEFAULT_ITL_MS
    processes: int = 1
    seconds: float = DEFAULT_SECONDS

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
    rate = settings.streams * 1000 / settings.itl_ms / settings.processes
    return Limits(
        lag_p99_ms=0.7,
        itl_error_p99_ms=0.5,
        cpu_us_per_event=30.0 if rate >= _BUSY_EVENTS_PER_S else None,
        coalesced_share=0.001,
    )


def validity_limits(itl_ms: float) -> Limits:
    """What a load is held to, too."""
    lag = max(MIN_LAG_LIMIT_MS, LAG_SHARE_OF_ITL * itl_ms)
    return Limits(lag_p99_ms=lag, coalesced_share=MAX_COALESCED_SHARE, cpu_fraction=MAX_CPU_FRACTION)


@dataclass(frozen=True)
class Calibration:
    """``reasons``: one sentence for everything that is over ``limits`` or was lost; empty when the client is good."""

    settings: CalibrationSettings
    figures: Figures
    limits: Limits
    reasons: tuple[str, ...]
    machine: str
    taken: str
    attempts: int = 1

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"reasons": list(self.reasons)}

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
            attempts=data["attempts"],
        )


_WORDS = {  # of a limit that is exceeded: what happened, with the value and the limit, and what to do
    "lag_p99_ms": ("its timestamps lag: p99 {:.2f} ms, the limit is {:g} ms", "give it a core of its own"),
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
        (figures.faults_counted, "streams that the server cut off or refused were counted as successes"),
        (figures.whole_failed, "streams that the server sent whole were counted as failures"),
    ):
        if count:
            found.append(f"{count} {what}")
    if not figures.faults:
        found.append("no stream was cut off, so it is not known whether cut streams are told from whole ones")
    if figures.lag_p99_ms is None:
        found.append("no stream came back whole, so nothing is known of its timestamps")
    at = f"{settings.streams} streams of {settings.itl_ms:g} ms ITL"
    return tuple(f"the load client does not keep up with the mock server at {at}: {reason}." for reason in found)


def calibrate(settings: CalibrationSettings, limits: Limits | None = None, attempts: int = 1) -> Calibration:
    """Runs the mock server and the load process for ``settings.seconds``, and compares. ``limits``: default validity.

    While something is over the limits and attempts are left it runs again: another program may have interfered, and
    a client that cannot keep up fails each time. Raises MeasurementError when one of the two processes fails.
    """
    limits = limits or validity_limits(settings.itl_ms)
    reasons: tuple[str, ...] = ()
    attempt = 0
    while not attempt or (reasons and attempt < attempts):
        attempt += 1
        figures = _measure(settings)
        reasons = judge_figures(figures, limits, settings)
    taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Calibration(settings, figures, limits, reasons, machine_key(), taken, attempt)


def _measure(settings: CalibrationSettings) -> Figures:
    count = settings.requests
    rate = max(_FAULT_SHARE, 1.0 / count)  # exact for the mock: at least one of each
    with tempfile.TemporaryDirectory(prefix="kvbench-calibration-") as scratch:
        folder = Path(scratch)
        requests = [RequestSpec(i, "calibration", (1, 2, i), None, settings.tokens) for i in range(count)]
        write_requests(folder / "requests.jsonl", requests)
        flags = {"ttft-ms": settings.itl_ms, "itl-ms": settings.itl_ms, "truncate-rate": rate, "fail-rate": rate / 2}
        with MockProcess(folder, flags) as url:
            spec = {
                "base_url": url,
                "model": "mock",
                "mode": "closed",
                "concurrency": settings.streams,
                "requests_file": str(folder / "requests.jsonl"),
                "out_dir": str(folder / "out"),
                "timeout_s": settings.seconds + _TIMEOUT_S,
                "processes": settings.processes,
            }
            loadrun.drive(
                spec, total=count, limit_s=settings.seconds + _MARGIN_S, on_progress=lambda done, total, failed, s: None
            )
            with urllib.request.urlopen(url + "/stamps", timeout=10) as answer:
                stamps = json.load(answer)
        told = read_json(folder / "out" / "load.json")
        samples = pd.read_parquet(folder / "out" / "requests.parquet")
    return figures_of(samples, stamps, told["client"], told["zero_perf_counter"], count)


@lru_cache(maxsize=1)
def machine_key() -> str:
    """What a calibration depends on besides its settings."""
    here, installed = machine(), versions()
    parts = (here["cpu"]["model"], f"{here['cpu']['cores']} cores", here["os"], f"python {platform.python_version()}")
    return ", ".join((*parts, *(f"{name} {installed[name]}" for name in ("kvbench", "gevent", "locust"))))


def settings_for(streams: int, itl_ms: float = DEFAULT_ITL_MS, load_processes: int = 1) -> CalibrationSettings:
    """Few different settings for a sweep's many loads: streams a process are rounded up to 4, 16, 64 or 256."""
    each = -(-streams // load_processes)
    rounded = next((size for size in (4, 16, 64) if each <= size), MAX_STREAMS)
    return CalibrationSettings(rounded * load_processes, itl_ms, load_processes)


_KNOWN: dict[tuple[str, CalibrationSettings], Calibration] = {}


def calibration_for(
    settings: CalibrationSettings,
    folder: Path | None = None,
    on_begin: Callable[[], None] = lambda: None,
) -> Calibration:
    """The calibration of this machine at ``settings``: of this process, else of ``folder``, else measured now.

    ``folder``: of a sweep or a load; its calibration.json keeps what was measured. ``on_begin`` is called before
    anything is measured. Raises MeasurementError.
    """
    key = (machine_key(), settings)
    stored = {(c.machine, c.settings): c for c in _stored(folder)}
    if key not in _KNOWN:
        if key not in stored:
            on_begin()
        _KNOWN[key] = stored.get(key) or calibrate(settings, attempts=_ATTEMPTS)
    if folder is not None and key not in stored:
        write_json(folder / FILE, [c.to_json() for c in (*stored.values(), _KNOWN[key])])
    return _KNOWN[key]


def _stored(folder: Path | None) -> list[Calibration]:
    if folder is None or not (folder / FILE).is_file():
        return []
    try:
        return [Calibration.from_json(row) for row in read_json(folder / FILE)]
    except (KeyError, TypeError, ValueError):  # of another version: measured anew
        return []


@dataclass(frozen=True)
class Calibrator:
    """Calibrates the client before a load, once per machine and settings. ``say``: what a user is told meanwhile.

    ``wanted`` False: nothing is measured, and the loads say so.
    """

    folder: Path
    wanted: bool = True
    say: Callable[[str], None] = lambda text: None

    def __call__(self, streams: int | None, load_processes: int = 1) -> Calibration | None:
        """``streams``: most at once, None where nothing limits them. Raises MeasurementError."""
        if not self.wanted:
            return None
        settings = settings_for(streams or _UNKNOWN_STREAMS, load_processes=load_processes)
        text = f"calibrating the load client at {settings.streams} streams (about {settings.seconds + 2:.0f} s, once)"
        return calibration_for(settings, self.folder, on_begin=lambda: self.say(text))

    def facts(self) -> dict[str, Any]:
        """For a manifest: what was measured so far, or that it was left out."""
        return {"left_out": not self.wanted, "measured": [c.to_json() for c in _stored(self.folder)]}
