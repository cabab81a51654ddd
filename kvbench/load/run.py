"""Drives one load from SPEC.json to requests.parquet and load.json. Runs in the load process only."""

from __future__ import annotations

import gc
import json
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment

from kvbench.load.client import Address, StreamFailure, Timeouts
from kvbench.load.lag import LagProbe
from kvbench.load.outcome import Measured, write_outcome
from kvbench.load.priority import better_priority
from kvbench.load.requests import RequestList, read_requests
from kvbench.load.session import LoadSession
from kvbench.load.spec import LoadSpec, read_spec
from kvbench.load.users import ClosedLoopUser, OpenLoopUser

EXIT_OK, EXIT_BAD_INPUT, EXIT_NOT_DRIVEN = 0, 2, 4
_PROGRESS_S = 0.25
_START_LIMIT_S = 30.0
_STOP_LIMIT_S = 1.2
_STALL_MARGIN_S = 30.0
_SWITCH_S = 0.0002


def main(argv: list[str]) -> int:
    """``python -m kvbench.load SPEC.json``. Returns the exit code."""
    if len(argv) != 1:
        print("usage: python -m kvbench.load SPEC.json", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        spec, requests, session = prepare(argv[0])
        Path(spec.out_dir).mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"kvbench load: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    return Load(spec, requests, session).run()


def prepare(spec_path: str) -> tuple[LoadSpec, RequestList, LoadSession]:
    """Reads the spec and the requests it names. ValueError with a sentence for what is wrong in them."""
    spec = read_spec(spec_path)
    address = Address.from_url(spec.base_url)
    requests = _read(spec)
    timeouts = Timeouts(
        connect=spec.connect_timeout_s,
        first_byte=spec.first_byte_timeout_s or spec.timeout_s,
        idle=spec.idle_timeout_s or spec.timeout_s,
        total=spec.timeout_s,
    )
    return spec, requests, LoadSession(spec, address, timeouts, requests)


def _read(spec: LoadSpec) -> RequestList:
    try:
        requests = read_requests(spec.requests_file)
    except OSError as error:
        raise ValueError(f"requests_file {spec.requests_file} cannot be read: {error.strerror}.") from error
    if spec.mode == "open" and any(r.arrival_s is None for r in requests):
        raise ValueError("mode open needs arrival_s in every row of requests_file; build the requests anew.")
    return requests


class Load:
    """One load: users, probe, progress, end."""

    def __init__(self, spec: LoadSpec, requests: RequestList, session: LoadSession) -> None:
        self.spec = spec
        self.requests = requests
        self.session = session
        self.probe = LagProbe()
        self.signal: int | None = None
        self.gone: str | None = None

    def run(self) -> int:
        """Returns the exit code; 128 + signal when it was stopped by one."""
        for number in (signal.SIGINT, signal.SIGTERM):
            gevent.signal_handler(number, self._on_signal, number)
        _allow_many_sockets()
        user = ClosedLoopUser if self.spec.mode == "closed" else OpenLoopUser
        env = Environment(user_classes=[type(user.__name__, (user,), {"session": self.session})])
        self.session.fire = env.events.request.fire
        runner = env.create_local_runner()
        try:
            self._check_server()
            runner.start(self._users(), spawn_rate=self._users())
            self._wait_ready()
            gc.collect()
            gc.freeze()
            gc.disable()  # a collection would stop all streams' stamps for milliseconds
            gevent.setswitchinterval(_SWITCH_S)  # else the parser's pauses let 5 ms pass before bytes are read
            with better_priority(self.spec.better_priority) as priority:
                self._emit("begin")
                started_unix = time.time()
                cpu = time.process_time()
                self.probe.start()
                self.session.begin()
                self._watch()
                cpu, wall = time.process_time() - cpu, self.session.elapsed()
                self._emit("measured")
        except StreamFailure as failure:
            print(f"kvbench load: {failure}; is the server running at {self.spec.base_url}?", file=sys.stderr)
            self._emit("end", exit_code=EXIT_NOT_DRIVEN, error=str(failure))
            return EXIT_NOT_DRIVEN
        finally:
            self.probe.stop()
            with gevent.Timeout(_STOP_LIMIT_S, False):
                runner.quit()
        with gevent.Timeout(_STOP_LIMIT_S, False):
            self.session.drain()
        gc.enable()
        return self._finish(env, Measured(started_unix, cpu, wall, priority, self.probe.lags))

    def _users(self) -> int:
        return int(self.spec.concurrency or 1) if self.spec.mode == "closed" else 1

    def _check_server(self) -> None:
        client = self.session.new_client()
        client.connect()
        client.close()

    def _wait_ready(self) -> None:
        """Until every user stands at the line with an open connection."""
        with gevent.Timeout(
            _START_LIMIT_S, StreamFailure("connect_timeout", f"the users were not ready in {_START_LIMIT_S:g} s")
        ):
            while self.session.ready < self._users():
                if self.session.start_failure is not None:
                    raise self.session.start_failure
                if self.signal is not None:
                    return
                gevent.sleep(0.005)

    def _watch(self) -> None:
        """Progress lines until the load has ended, was stopped, or the server is gone."""
        session = self.session
        moved, done = time.monotonic(), 0
        limit = self.spec.timeout_s + self.spec.connect_timeout_s + _STALL_MARGIN_S
        while not session.ended.wait(_PROGRESS_S):
            if self.signal is not None:
                return
            if session.server_gone:
                self.gone = session.last_error
                return
            if session.done != done or (session.pending and not session.in_flight):
                moved, done = time.monotonic(), session.done
            if time.monotonic() - moved > limit:  # cannot happen while the time-outs work
                self.gone = f"no request ended for {limit:g} s"
                return
            self._emit("progress")

    def _on_signal(self, number: int) -> None:
        self.signal = int(number)
        self.session.stopping = True

    def _emit(self, event: str, **more: Any) -> None:
        session = self.session
        line = {
            "event": event,
            "done": session.done,
            "total": len(self.requests),
            "failed": session.failed,
            "elapsed_s": round(session.elapsed(), 3),
            **more,
        }
        try:
            print(json.dumps(line), flush=True)
        except BrokenPipeError:
            self._on_signal(signal.SIGTERM)  # nobody reads any more: whoever started the load is gone

    def _finish(self, env: Environment, measured: Measured) -> int:
        code = EXIT_OK if self.signal is None else 128 + self.signal
        if self.signal is None and self.gone is not None:
            code = EXIT_NOT_DRIVEN
            print(f"kvbench load: the server stopped answering: {self.gone}", file=sys.stderr)
        totals = (env.stats.total.num_requests, env.stats.total.num_failures)
        load = write_outcome(self.spec, self.requests, self.session, measured, totals, ended_well=code == EXIT_OK)
        self._emit("end", exit_code=code, incomplete=load["incomplete"], invalid_reasons=load["invalid_reasons"])
        return code


def _allow_many_sockets() -> None:
    """Raises the soft limit of open files to the hard one: one stream is one socket."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (ValueError, OSError):
            return  # the limit stays; too many streams then fail with a sentence of their own
