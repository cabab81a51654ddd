"""One load: the client process (``python -m kvbench.load``), watched and bounded."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvbench.common import processes
from kvbench.common.errors import EXIT_INVALID, EXIT_USAGE, MeasurementError
from kvbench.common.parsing import json_at
from kvbench.common.preloaded import Preloaded
from kvbench.common.text import plural
from kvbench.load.endpoints import Fields
from kvbench.load.spec import ARRIVE_S, LoadSpec
from kvbench.requests.request import conversations
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.load_section import LoadConfig, LoadPoint
from kvbench.workload.settings import Settings, effective

_PREFIX = "kvbench load: "  # before what the client says of an end that it foresaw
_MARGIN_S = 60.0  # start of the client, its last writes, a slow machine
_WATCH_S = 0.5
_EXIT_LIMIT_S = 10.0
# How long the client may say nothing: while it starts (workers on other machines arrive), while it measures (it speaks
# four times a second), while it writes.
_SILENCE_S = {"start": 400.0, "begin": 30.0, "measured": 120.0}
_SILENCE_PER_REQUEST_S = 0.05  # to read and write them

LOAD_CLIENT = Preloaded(("kvbench.load",), "kvbench.load.__main__")

Progress = Callable[[int, int, int, float], None]  # done, total, failed, elapsed seconds
Phase = Callable[[str, int], None]  # "begin", DRAIN or "measured", the client's pid
DRAIN = "drain"  # the last request is sent, and answers are still to come


def bound_s(load: LoadConfig, point: LoadPoint, requests: list[Any]) -> float:
    """The seconds that a load takes at most: every request has its own time-out."""
    last_arrival = max((r.arrival_s or 0.0 for r in requests), default=0.0)
    chains = [len(turns) * load.timeout_s + sum(r.think_s for r in turns) for turns in conversations(requests)]
    at_once = point.concurrency or load.max_concurrency or len(chains) or 1
    return last_arrival + -(-len(chains) // at_once) * max(chains, default=0.0) + _MARGIN_S


def takes_priority(settings: Settings, info: ServerInfo) -> bool:
    """Tests whether the server is sent the requests' priorities: one that works first come, first served refuses them.

    ``settings``: the configuration under test; ``info``: /server_info. A server that was running before
    (``target`` in ``settings``) and does not tell how it schedules is sent what the workload sets.
    """
    policy = info.engine.scheduling_policy
    if policy is None and "target" not in settings:
        policy = effective(settings, "scheduling_policy")
    return policy in (None, "priority")


def drive(
    spec: LoadSpec,
    *,
    total: int,
    limit_s: float,
    on_progress: Progress,
    check: Callable[[], None] = lambda: None,
    on_phase: Phase = lambda phase, pid: None,
    arguments: Sequence[str] = (),
) -> None:
    """Run the client to its end. ``check`` is called twice a second and may raise (the server is gone).

    ``arguments``: further ones of the load process (``--master`` ...; the wait for workers counts beside ``limit_s``).
    ``on_phase`` is called as the first request is due, as all are sent (by a client of one process) and as the last
    one has ended, while the client still runs.

    Raises:
        MeasurementError: the client could not drive the load or did not end within ``limit_s``.
    """
    out = Path(spec.out_dir)
    out.mkdir(parents=True, exist_ok=True)
    spec.write(out / "spec.json")
    log, answered = out / "client.log", _Answered(total)
    with log.open("wb") as errors:
        process = processes.launch(
            [sys.executable, "-m", "kvbench.load", str(out / "spec.json"), *arguments],
            stdout=subprocess.PIPE,
            stderr=errors,
            death_signal=signal.SIGKILL,  # without us nothing reads its output, and it may hang
            preloaded=LOAD_CLIENT,
        )
        try:
            limit_s += ARRIVE_S if arguments else 0.0
            code, error = _follow(process, answered, limit_s, check, on_progress, on_phase)
            if code != 0:
                raise MeasurementError(_why_it_ended(code, processes.last_lines(log, 4) or error))
        except MeasurementError as failure:
            failure.after, failure.answered = answered.words, answered.count
            raise
        finally:
            processes.stop(process, grace_s=5.0)


def _why_it_ended(code: int, output: str | None) -> str:
    """The client's own sentence where it foresaw its end, else how it ended and its ``output``."""
    _, own, sentence = (output or "").rpartition(_PREFIX)
    if own and code in (EXIT_USAGE, EXIT_INVALID):
        return sentence
    return f"the load client {processes.how_it_ended(code)}: {output or '(it said nothing)'}"


@dataclass
class _Answered:
    """The number of a load's requests that have been answered so far; None before the first is due."""

    total: int
    count: int | None = None

    @property
    def words(self) -> str:
        return "" if self.count is None else f"after {self.count} of {plural(self.total, 'request')}"


def _follow(
    process: processes.Child,
    answered: _Answered,
    limit_s: float,
    check: Callable[[], None],
    on_progress: Progress,
    on_phase: Phase,
) -> tuple[int, str | None]:
    """Reads the client's lines to its end: its exit code, and why it could not go on."""
    lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read_lines() -> None:
        with process.stdout as stream:
            for line in stream:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read_lines, daemon=True).start()
    phase, error = "start", None
    start = checked = heard = time.monotonic()
    while True:
        try:
            line = lines.get(timeout=_WATCH_S)
        except queue.Empty:
            line = b""
        if line is None:
            break
        now = time.monotonic()
        if line.strip():
            heard, event = now, _event(line)
            name = json_at(event, "event")
            if name in ("begin", DRAIN, "measured"):
                phase = phase if name == DRAIN else name
                on_phase(name, process.pid)
            elif name == "progress":
                on_progress(event["done"], event["total"], event["failed"], event["elapsed_s"])
            elif name == "end":
                error = json_at(event, "error") or error
            if phase != "start" and "done" in event:
                answered.count = event["done"] - event["failed"]
        if now - checked >= _WATCH_S:
            check()
            checked = now
        if now - start > limit_s:
            raise MeasurementError(f"the load did not end within {limit_s:.0f} s and was stopped")
        patience_s = _SILENCE_S[phase] + (_SILENCE_PER_REQUEST_S * answered.total if phase != "begin" else 0.0)
        if now - heard > patience_s:
            raise MeasurementError(f"the load client hung (it said nothing for {now - heard:.0f} s) and was stopped")
    try:
        return process.wait(timeout=_EXIT_LIMIT_S), error
    except subprocess.TimeoutExpired:
        raise MeasurementError(
            f"the load client closed its output but did not end within {_EXIT_LIMIT_S:g} s and was stopped"
        ) from None


def _event(line: bytes) -> Fields:
    """Returns what a line of the client says; nothing where it is a library's stray print."""
    try:
        return dict(json.loads(line))
    except (ValueError, TypeError):
        return {}
