"""``kvbench dev calibrate-client``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbench.common.errors import UsageError
from kvbench.common.options import Options, OutputFile, option, switch, takes

if TYPE_CHECKING:
    from rich.table import Table

    from kvbench.calibration.calibrate import ClientCalibration


@dataclass(frozen=True, kw_only=True)
class CalibrateClientRequest(Options):
    """The request of ``kvbench dev calibrate-client``."""

    streams: int = option("Run N streams at once.", default=64, least=1, most=8192)
    itl_ms: float = option("Milliseconds between two chunks of a stream.", default=20.0, least=0.5, most=10_000)
    processes: int = option("Share the streams among N load processes.", default=1, least=1, most=256)
    seconds: float = option("Stream for N seconds in each attempt.", default=10.0, least=1, most=600)
    attempts: int = option("Try up to N times, until an attempt is good.", default=3, least=1, most=100)
    tls: bool = switch("Go through TLS, as a load on an https:// server does (needs the openssl program).")
    json_path: OutputFile | None = option("Write the figures into a file, too.", "--json", metavar="PATH")


@takes(CalibrateClientRequest)
def calibrate_client(request: CalibrateClientRequest) -> int:
    """Measure how well the load client measures here.

    The real load process streams from a mock server that notes when it sent each chunk; what the client saw is
    compared with what was sent, and lost, cut-off and refused streams must be counted as what they were.

    The client is good if it keeps to every limit in one of up to 3 --attempts: a stall of the machine may spoil one,
    and a client that cannot keep up fails each time. All attempts are shown, with the CPU time that others used
    meanwhile. Before a load it is the same, with the limits that a load is held to.

    \b
    Examples:
      kvbench dev calibrate-client --streams 64 --itl-ms 20
      kvbench dev calibrate-client --streams 256 --processes 4
    \b
    No files are written but --json's.
    Exit codes: 0 within the limits, 1 over them each time, 2 bad input, 4 it could not be measured.
    """
    from rich.console import Console

    from kvbench.calibration.calibrate import CalibrationSettings, aims, calibrate
    from kvbench.common.console import print_plain, print_table
    from kvbench.common.files import write_json
    from kvbench.common.foreign_cpu import busy_notice

    settings = CalibrationSettings(request.streams, request.itl_ms, request.processes, request.seconds, request.tls)
    if settings.streams < settings.processes:
        raise UsageError(
            f"--streams {settings.streams} is less than --processes {settings.processes}: every process needs a stream"
        )
    console = Console()
    if notice := busy_notice():
        print_plain(console, f"note: {notice}")
    with console.status(f"{settings.streams} streams of {settings.itl_ms:g} ms ITL for {settings.seconds:g} s"):
        calibration = calibrate(settings, aims(settings), request.attempts)
    if request.json_path is not None:
        write_json(request.json_path, calibration.to_json())
    print_table(console, _table(calibration))
    for line in _attempts(calibration):
        print_plain(console, line)
    return 1 if calibration.reasons else 0


_TITLE = "load client: {streams} streams of {itl_ms:g} ms ITL, load processes: {processes}, priority {priority}"
_COUNTED = "{events} chunks of {requests} requests, {faults} of them spoilt on purpose"
_OVER = "OVER THE LIMIT in attempt {number} of {count}{meanwhile}: {reason}"
_KEPT = "attempt {number} of {count} kept to every limit: the client is good"


def _attempts(calibration: ClientCalibration) -> Iterator[str]:
    """Says what happened in each attempt; nothing where the first was good."""
    count = len(calibration.attempts)
    for number, attempt in enumerate(calibration.attempts, 1):
        meanwhile = f" (meanwhile {attempt.disturbed})" if attempt.disturbed else ""
        for reason in attempt.reasons:
            yield _OVER.format(number=number, count=count, meanwhile=meanwhile, reason=reason)
        if not attempt.reasons and count > 1:
            yield _KEPT.format(number=number, count=count)


_ROWS = (  # figure, words, format
    ("lag_p50_ms", "timestamp lag p50: receipt - send (ms)", "{:.3f}"),
    ("lag_p99_ms", "timestamp lag p99, early or late (ms)", "{:.3f}"),
    ("itl_error_p99_ms", "ITL error p99: |gap seen - gap sent| (ms)", "{:.3f}"),
    ("cpu_us_per_event", "CPU of the client an event (us)", "{:.1f}"),
    ("unstamped_share", "reads without the kernel's stamp of their arrival", "{:.3%}"),
    ("coalesced_share", "chunks read with the one before, though sent apart", "{:.3%}"),
    ("turnaround_p50_ms", "own pause between an answer and the next request, median (ms)", "{:.2f}"),
    ("events_lost", "chunks lost", "{}"),
    ("requests_lost", "requests lost", "{}"),
    ("requests_repeated", "requests sent again", "{}"),
    ("faults_counted", "cut-off, refused or dropped streams counted as successes", "{}"),
    ("whole_failed", "whole streams counted as failures", "{}"),
    ("loop_lag_p99_ms", "client's event loop late, p99 (ms)", "{:.3f}"),
    ("server_late_p99_ms", "mock server's own lateness, p99 (ms)", "{:.3f}"),
)
_NONE_ALLOWED = ("events_lost", "requests_lost", "requests_repeated", "faults_counted", "whole_failed")


def _table(calibration: ClientCalibration) -> Table:
    from rich.text import Text

    from kvbench.common.console import make_table

    figures, rows = calibration.figures, []
    limits = dataclasses.asdict(calibration.limits) | dict.fromkeys(_NONE_ALLOWED, 0)
    for name, words, form in _ROWS:
        value, limit = getattr(figures, name), limits.get(name)
        over = value is not None and limit is not None and value > limit
        shown, most = (form.format(number) if number is not None else "" for number in (value, limit))
        rows.append((words, Text(shown or "-", style="red" if over else ""), most))
    facts = dataclasses.asdict(calibration.settings) | dataclasses.asdict(figures)
    table = make_table(("", "measured", "limit"), rows, title=_TITLE.format(**facts))
    attempts = [attempt.figures for attempt in calibration.attempts]
    which = f"attempt {attempts.index(figures) + 1} of {len(attempts)}: " if len(attempts) > 1 else ""
    table.caption = which + _COUNTED.format(**facts)
    return table
