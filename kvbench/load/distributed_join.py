"""How a worker comes to its master. It needs nothing but the master's address."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys

import gevent
from gevent.event import AsyncResult
from locust.env import Environment
from locust.runners import WorkerRunner

from kvbench.errors import EXIT_INTERRUPTED
from kvbench.load.distributed_worker import STOP_SIGNALS, Worker
from kvbench.load.process import EXIT_BAD_INPUT, EXIT_NOT_DRIVEN

CONNECT_LIMIT_S = 300.0


def run_worker(host: str, port: int) -> int:
    """The whole life of a worker. Returns the exit code."""
    try:
        socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:  # the latter: what can be no name
        why = getattr(error, "strerror", None) or error
        print(
            f"kvbench load: no machine is called {host!r} ({why}); give the master's as --master-host", file=sys.stderr
        )
        return EXIT_BAD_INPUT
    _tell_user(f"waiting up to {CONNECT_LIMIT_S:g} s for the master at {host}:{port}")
    stop = AsyncResult()
    handlers = [gevent.signal_handler(number, stop.set, number) for number in STOP_SIGNALS]
    env = Environment()
    connecting = gevent.spawn(_connected, env, host, port)
    gevent.wait([connecting, stop], timeout=CONNECT_LIMIT_S, count=1)
    if stop.ready():
        name = signal.Signals(stop.value).name
        print(f"kvbench load: stopped by {name} while it waited for the master at {host}:{port}", file=sys.stderr)
        return EXIT_INTERRUPTED
    runner = connecting.value if connecting.ready() else None
    if not isinstance(runner, WorkerRunner):
        why = f": {runner!r}" if runner is not None else ""
        print(
            f"kvbench load: no master answered at {host}:{port} within {CONNECT_LIMIT_S:g} s{why}; is "
            "`kvbench load --master` running there?",
            file=sys.stderr,
        )
        return EXIT_NOT_DRIVEN
    worker = Worker(env, runner)
    for handler in handlers:
        handler.cancel()  # the worker has its own
    _tell_user("the master has answered; the load begins when all its workers are there")
    return worker.run()


def _connected(env: Environment, host: str, port: int) -> WorkerRunner | Exception:
    try:
        return env.create_worker_runner(host, port)
    except Exception as error:
        return error


def _tell_user(text: str) -> None:
    """On stdout, where nobody listens to a local worker; who has gone away does not end this one."""
    with contextlib.suppress(OSError):
        print(f"kvbench load: {text}", flush=True)
