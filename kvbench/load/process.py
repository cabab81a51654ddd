"""Parts of a load process, alone or one of several: start users, measure without interruptions, watch for the end."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import gevent
from locust.runners import STATE_STOPPED, Runner

from kvbench.common.errors import EXIT_INVALID, EXIT_OK
from kvbench.common.kernel_timer import kernel_timer, set_timer
from kvbench.load.client import StreamFailure
from kvbench.load.client_figures import PROBE_PERIOD_S, Clocked
from kvbench.load.session import ClosedLoopUser, LoadSession, OpenLoopUser

PROGRESS_S = 0.25
START_LIMIT_S = 30.0
STOP_LIMIT_S = 1.2
_STALL_MARGIN_S = 30.0
_SWITCH_S = 0.0002
_LOOK_S = 0.005
_NICENESS = -10
_MACOS_FILES = 10240  # the most there (OPEN_MAX), though its hard limit says that there is none
_REALTIME = 1  # the lowest real-time priority: before every ordinary process, behind every other real-time one


def _nothing() -> None: ...


def line_up(runner: Runner, session: LoadSession) -> None:
    """Spawns the load's users; returns when all are connected, or when the load is stopped. StreamFailure."""
    env, spec = runner.environment, session.spec
    session.fire = env.events.request.fire
    base = ClosedLoopUser if spec.mode == "closed" else OpenLoopUser
    env.user_classes = [type(base.__name__, (base,), {"session": session, "abstract": False})]
    client = session.new_client()
    client.connect()  # a server that is not there fails once, and not for every user
    client.close()
    count = spec.concurrency or 1  # in open loop one user dispatches all arrivals
    runner.spawn_users({base.__name__: count})
    wait_ready(session, count)


def wait_ready(session: LoadSession, users: int) -> None:
    """Waits until every user is connected, or the load is stopped. StreamFailure."""
    late = StreamFailure("connect_timeout", f"the users were not ready in {START_LIMIT_S:g} s")
    with gevent.Timeout(START_LIMIT_S, late):
        while session.ready < users:
            if session.start_failure is not None:
                raise session.start_failure
            if session.stopped:
                return
            gevent.sleep(0.005)


def end_users(runner: Runner) -> None:
    """Ends all users at once, within a bound. Locust's own stop() would first look up its caller's source: 0.2 s."""
    with gevent.Timeout(STOP_LIMIT_S, False):
        runner.stop_users(runner.user_classes_count)
    runner.update_state(STATE_STOPPED)


def _raise() -> str:
    with contextlib.suppress(OSError, AttributeError):  # Linux alone
        # Children must not inherit it, hence the flag.
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(_REALTIME))
        return "realtime"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, _NICENESS)
    now = os.getpriority(os.PRIO_PROCESS, 0)
    return f"nice {now}" if now else "normal"


@contextlib.contextmanager
def undisturbed() -> Iterator[str]:
    """Keeps garbage collection and slow thread switches from delaying timestamps, and runs this thread first.

    Yields its priority, as far as the system allows: ``realtime`` (SCHED_RR, needs CAP_SYS_NICE), ``nice N`` or
    ``normal``. The old one comes back after the block, so that writing results disturbs nobody.
    """
    before = (os.sched_getscheduler(0), os.sched_getparam(0)) if hasattr(os, "sched_getscheduler") else None
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection would stop all streams' stamps for milliseconds
    gevent.setswitchinterval(_SWITCH_S)  # else the parser's pauses let 5 ms pass before bytes are read
    try:
        yield _raise()
    finally:
        with contextlib.suppress(OSError):
            if before:
                os.sched_setscheduler(0, *before)
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        gc.enable()


class LagProbe:
    """Measures how late the event loop notices something: ``lags`` [s] of each tick between ``start`` and ``stop``.

    A timer of the kernel becomes readable every 10 ms, exactly on time, and is served by the same kind of read callback
    that stamps the streams; how late that callback runs is how late stamps are.
    """

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._fd = -1
        self._watcher: Any = None
        self._due = 0.0

    def start(self) -> None:
        self._due = time.perf_counter() + PROBE_PERIOD_S
        self._fd = kernel_timer()
        set_timer(self._fd, self._due, PROBE_PERIOD_S)
        self._watcher = gevent.get_hub().loop.io(self._fd, 1)
        self._watcher.start(self._on_tick)

    def stop(self) -> None:
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            os.close(self._fd)
            self._watcher = None

    def _on_tick(self) -> None:
        now = time.perf_counter()
        ticks = int.from_bytes(os.read(self._fd, 8), "little")
        for k in range(ticks):  # after a pause several are due at once; each was late by its own amount
            self.lags.append(max(0.0, now - self._due - k * PROBE_PERIOD_S))
        self._due += ticks * PROBE_PERIOD_S


class Measuring:
    """Measures this process from ``begin`` to ``end``: the lag of its loop, its CPU time and its clocks."""

    def __init__(self, session: LoadSession) -> None:
        self.session, self.probe = session, LagProbe()
        self.clocked = Clocked()
        self._cpu = time.process_time()

    def begin(self, zero: float | None = None) -> None:
        """Starts the load at ``zero`` [s, perf_counter] (None: now)."""
        now = time.perf_counter()
        self.clocked.started_unix = time.time() + ((now if zero is None else zero) - now)
        self._cpu = time.process_time()
        self.probe.start()
        self.session.begin(zero)

    def end(self) -> None:
        """Ends the measuring, when the last stream has returned."""
        clocked = self.clocked
        self.probe.stop()
        now = time.process_time()
        clocked.cpu_s, self._cpu = now - self._cpu, now
        clocked.wall_s = self.session.elapsed()
        clocked.reopened = self.session.reopened
        clocked.reads, clocked.unstamped_reads = self.session.reads, self.session.unstamped_reads
        clocked.wall_step_s = time.time() - clocked.started_unix - clocked.wall_s

    def parse_rest(self, tick: Callable[[], None] = _nothing) -> None:
        """Calls ``parse_rest``, after ``end``."""
        parse_rest(self.session, tick)
        self.clocked.parse_cpu_s = time.process_time() - self._cpu


def parse_rest(session: LoadSession, tick: Callable[[], None] = _nothing) -> None:
    """Waits until all answers are parsed. ``tick`` is called 4 times a second.

    It gives up ``STOP_LIMIT_S`` after the load was ``stopped``, or when nothing was parsed for 30 s.
    """
    moved = ticked = time.monotonic()
    stopped_at, done = float("inf"), session.done
    while session.unparsed:
        gevent.sleep(_LOOK_S)
        now = time.monotonic()
        if session.done != done:
            moved, done = now, session.done
        if session.stopped:
            stopped_at = min(stopped_at, now)
        if now - moved > _STALL_MARGIN_S or now - stopped_at > STOP_LIMIT_S:
            break
        if now - ticked >= PROGRESS_S:
            tick()
            ticked = now


class LoadEvents:
    """Prints the events of a load, one JSON object a line, and keeps the signal that stopped it."""

    def __init__(self, total: int, on_stop: Callable[[], None] = _nothing) -> None:
        self.total, self._on_stop = total, on_stop
        self.signal: int | None = None

    def listen(self) -> None:
        """Lets SIGINT and SIGTERM stop the load from here on."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self._stop, number)

    @property
    def stopped(self) -> bool:
        """Tests whether the load is to end early."""
        return self.signal is not None

    def _stop(self, number: int) -> None:
        self.signal = int(number)
        self._on_stop()

    def say(self, event: str, done: int, failed: int, elapsed_s: float, **more: Any) -> None:
        """Prints one event. A closed stdout stops the load: the process that started it is gone."""
        line = {"event": event, "done": done, "total": self.total, "failed": failed, "elapsed_s": round(elapsed_s, 3)}
        try:
            print(json.dumps({**line, **more}), flush=True)
        except BrokenPipeError:
            self._stop(signal.SIGTERM)

    def exit_code(self, gone: str | None) -> int:
        """The exit code: 128 + signal when one stopped the load, 4 when it could not be driven (``gone``), else 0."""
        if self.signal is not None:
            return 128 + self.signal
        return EXIT_OK if gone is None else EXIT_INVALID


def watch(session: LoadSession, tick: Callable[[], None] = _nothing) -> str | None:
    """Waits for the end: None when the last stream has returned or the load was stopped, else why the server is gone.

    Once it is gone nothing more is sent. ``tick`` is called 4 times a second.
    """
    spec = session.spec
    moved, returned = time.monotonic(), 0
    limit = spec.timeout_s + spec.connect_timeout_s + _STALL_MARGIN_S
    while not session.ended.wait(PROGRESS_S):
        if session.stopped:
            return None
        if session.health.gone is not None:
            session.stopping = True
            return session.health.gone
        if session.returned != returned or session.waits:
            moved, returned = time.monotonic(), session.returned
        if time.monotonic() - moved > limit:  # cannot happen while the time-outs work
            session.stopping = True
            return f"the server stopped answering: no request ended for {limit:g} s"
        tick()
    session.health.look_once_more()
    return session.health.gone


def allow_many_sockets() -> None:
    """Raises the soft limit of open files to the hard one: one stream is one socket."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for limit in (_MACOS_FILES, hard):  # too many streams then fail with a sentence of their own
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
