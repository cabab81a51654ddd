"""One worker: it gets its shard from the master, runs it from the common time zero and returns its samples.

It ends when the master says so, and by itself when the master has not been heard of for ``MASTER_LIMIT_S``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import gevent
import numpy as np
from gevent.event import AsyncResult, Event
from locust.env import Environment
from locust.rpc import Message
from locust.runners import WorkerRunner

from kvbench import __version__
from kvbench.common.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE
from kvbench.common.machine import boot_id
from kvbench.common.parsing import json_at
from kvbench.load import process
from kvbench.load.client import StreamFailure
from kvbench.load.multi import messages
from kvbench.load.multi.merge import Data, in_slices, samples_to_bytes
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestList, RequestSpec

CONNECT_LIMIT_S = 300.0  # Locust's own
MASTER_LIMIT_S = 10.0  # Locust's master answers a heartbeat every second
_MERGE_LIMIT_S = 60.0  # the same while the master puts all samples together and writes them
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOOK_S = 0.25
_OPEN_LEAD_S = 0.05


def run_worker(host: str, port: int) -> int:
    """Connects to the master and works for it until the load has ended. Returns the exit code."""
    try:
        host.encode("idna")  # as getaddrinfo does, in a thread of which gevent would print a traceback
        socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a possible name"
        return _failed(EXIT_USAGE, f"--master-host {host!r} is no machine's name or address: {why}")
    waiting = f"while it waited for the master at {host}:{port}"
    handlers = [gevent.signal_handler(number, _end_now, number, waiting) for number in _STOP_SIGNALS]
    print(f"kvbench load: waiting up to {CONNECT_LIMIT_S:g} s for the master at {host}:{port}", flush=True)
    env = Environment()
    try:
        runner = env.create_worker_runner(host, port)
    except Exception as error:  # Locust's, after its last attempt
        return _failed(EXIT_INVALID, f"no master at {host}:{port} ({error!r}); is `kvbench load --master` running?")
    for handler in handlers:
        handler.cancel()
    print("kvbench load: the master has answered; the load begins when all its workers are there", flush=True)
    return Worker(env, runner).run()


def _end_now(number: int, when: str) -> None:
    _failed(EXIT_INTERRUPTED, f"stopped by {signal.Signals(number).name} {when}")
    os._exit(EXIT_INTERRUPTED)


def _failed(code: int, why: str) -> int:
    print(f"kvbench load: {why}", file=sys.stderr, flush=True)
    return code


class Worker:
    """Does what the master's messages say (kvbench/load/multi/messages.py)."""

    def __init__(self, env: Environment, runner: WorkerRunner) -> None:
        self.env, self.runner = env, runner
        self.session: LoadSession | None = None
        self.over = Event()
        self.code = EXIT_INVALID
        self._stopped = False
        self._signal = 0
        self._parent = os.getppid()
        self._joined = False  # the master knows the token, too
        self._silent_s, self._patience_s = 0.0, MASTER_LIMIT_S
        self._measuring: process.Measuring | None = None
        self._measured: gevent.Greenlet | None = None
        self._zero: AsyncResult = AsyncResult()

    def run(self) -> int:
        """Works until the master says how the load ended, or is gone. Returns the exit code."""
        process.allow_many_sockets()
        runner = self.runner
        for number in _STOP_SIGNALS:
            gevent.signal_handler(number, self._on_signal, number)
        self.env.events.heartbeat_received.add_listener(self._on_heartbeat)
        runner.register_message(messages.JOIN, self._on_joined)
        runner.register_message(messages.CLOCK, self._on_clock)
        acts = {messages.SHARD: self._prepare, messages.START: self._start, messages.SAMPLES: self._samples}
        for name, act in acts.items():
            runner.register_message(name, partial(self._answer, act), concurrent=True)
        runner.register_message(messages.STOP, lambda msg, **_: self._stop())
        runner.register_message(messages.END, lambda msg, **_: self._end(**msg.data))
        here = {"boot": boot_id(), "host": socket.gethostname(), "pid": os.getpid(), "version": __version__}
        runner.send_message(messages.JOIN, here | {"proof": messages.proof(runner.client_id)})
        while not self.over.wait(_LOOK_S):
            self._silent_s += _LOOK_S  # counts turns, not time: a process that was stopped has heard nothing meanwhile
            if self._silent_s > self._patience_s:
                self._end(EXIT_INVALID, f"the master has been silent for {self._silent_s:.0f} s")
        with gevent.Timeout(process.STOP_LIMIT_S, False):
            runner.send_message("quit")  # Locust's: another may have this one's place
            runner.quit()
        return self.code

    def _on_heartbeat(self, **_: Any) -> None:
        self._silent_s = 0.0
        # Locust compares this with the wall clock, and would end the load when somebody sets that clock forward.
        self.runner.last_heartbeat_timestamp = None

    def _on_signal(self, number: int) -> None:
        """Stops the load. The worker itself goes on: the master, if there still is one, asks for what was measured."""
        self._signal = number
        self._stop()
        if os.getppid() != self._parent or self.session is None:
            self._end(EXIT_INTERRUPTED, f"stopped by {signal.Signals(number).name}")

    def _stop(self) -> None:
        self._stopped = True
        if self.session is not None:
            self.session.stop()

    def _end(self, code: int, why: str) -> None:
        """The load has ended with exit code ``code``; ``why``: the message to this worker's user."""
        if self.over.is_set():
            return
        self._stop()
        self.code = EXIT_INTERRUPTED if self._signal else code
        if why:
            _failed(self.code, f"this worker ends: {why}")
        self.over.set()

    def _on_joined(self, msg: Message, **_: Any) -> None:
        if why := json_at(msg.data, "error"):
            self._end(EXIT_INVALID, f"the master turned it away, {why}")
        elif not messages.proven(f"master {self.runner.client_id}", json_at(msg.data, "proof")):
            self._end(EXIT_INVALID, f"the master has another {messages.TOKEN_VARIABLE}; give both the same")
        else:
            self._joined = True

    def _on_clock(self, msg: Message, **_: Any) -> None:
        received = time.perf_counter()
        self.runner.send_message(messages.CLOCK, {"t2": received, "t3": time.perf_counter()})

    def _answer(self, act: Callable[..., Data | None], msg: Message, **_: Any) -> None:
        if not self._joined:
            return
        try:
            reply = act(**msg.data) or {}
        except Exception as error:  # whatever it was, the master must hear of it and end the load
            reply = {"error": str(error) if isinstance(error, ValueError) else repr(error)}
        self.runner.send_message(msg.type, reply)

    def _report(self, name: str, **more: Any) -> None:
        self.runner.send_message(name, {"done": self.session.done, "failed": self.session.failed, **more})

    def _prepare(self, spec: str, rows: bytes) -> None:
        """Makes the requests, connects all users, and waits until everything is ready for the start."""
        requests = [RequestSpec.from_row(json.loads(line)) for line in in_slices(rows.splitlines())]
        self.session = LoadSession(LoadSpec.model_validate_json(spec), RequestList(requests))
        if self._stopped:
            self.session.stop()
        try:
            process.line_up(self.runner, self.session)
        except StreamFailure as failure:
            raise ValueError(f"{failure}; is the server running at {self.session.spec.base_url}?") from failure
        armed = Event()
        self._measured = gevent.spawn(self._measure, armed)
        armed.wait()

    def _start(self, zero: float) -> Data:
        """The load begins at ``zero`` [s, this process's clock]. Answers how much time is left until then."""
        self._zero.set(zero)
        return {"left_s": zero - time.perf_counter()}

    def _measure(self, armed: Event) -> None:
        """Does everything slow (garbage collection, priority), then waits for the start and runs the load."""
        gone = error = None
        try:
            with process.undisturbed() as priority:
                armed.set()
                gone = self._run_from(self._zero.get(), priority)
        except Exception as failure:  # whatever it was: the load ends now, and its user reads why
            self.session.stopping, error = True, repr(failure)
        finally:
            armed.set()
        self._report(messages.ENDED, gone=gone, signal=self._signal, error=error)

    def _run_from(self, zero: float, priority: str) -> str | None:
        """Runs the load. Why the server is gone; None when all streams have returned or the load was stopped."""
        early = _OPEN_LEAD_S if self.session.spec.mode == "open" else 0.0  # arrivals have their own times after zero
        gevent.sleep(max(0.0, zero - early - time.perf_counter()))
        measuring = process.Measuring(self.session)
        measuring.clocked.priority = priority
        measuring.begin(zero)
        gone = process.watch(self.session, lambda: self._report(messages.PROGRESS))
        measuring.end()
        self._measuring = measuring
        return gone

    def _samples(self) -> Data:
        """Ends the users, waits until all answers are parsed, and returns what was measured."""
        self._patience_s = _MERGE_LIMIT_S
        if self._measured is not None:
            self._measured.join(timeout=process.STOP_LIMIT_S)
        process.end_users(self.runner)
        session, measuring = self.session, self._measuring
        if measuring is not None:
            measuring.parse_rest(lambda: self._report(messages.PROGRESS))
        session.close()
        self._report(messages.PROGRESS)
        messages.send_statistics(self.runner)  # before the answer, so that the master has them when it has that
        return {
            "samples": samples_to_bytes(session.samples),
            "lags": np.asarray(measuring.probe.lags if measuring else (), dtype=np.float64).tobytes(),
            "clocked": vars(measuring.clocked) if measuring else {},
        }
