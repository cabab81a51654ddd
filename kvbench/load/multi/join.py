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

from kvbench.common.errors import EXIT_INTERRUPTED
from kvbench.load.multi.worker import STOP_SIGNALS, Worker
from kvbench.load.process import EXIT_BAD_INPUT, EXIT_NOT_DRIVEN

CONNECT_LIMIT_S = 300.0


class _NoSuchHost(ValueError):
    """The master's name cannot be an address."""


def run_worker(host: str, port: int) -> int:
    """The whole life of a worker. Returns the exit code."""
    stop = AsyncResult()
    handlers = [gevent.signal_handler(number, stop.set, number) for number in STOP_SIGNALS]
    env = Environment()
    coming = gevent.spawn(_joined, env, host, port)
    gevent.wait([coming, stop], timeout=CONNECT_LIMIT_S, count=1)
    found = coming.value if coming.ready() else None
    if stop.ready():
        name = signal.Signals(stop.value).name
        return _failed(EXIT_INTERRUPTED, f"stopped by {name} while it waited for the master at {host}:{port}")
    if isinstance(found, _NoSuchHost):
        return _failed(EXIT_BAD_INPUT, str(found))
    if not isinstance(found, WorkerRunner):
        why = (
            f"no master answered at {host}:{port} within {CONNECT_LIMIT_S:g} s"
            if found is None
            else f"{host}:{port}: {found!r}"
        )
        return _failed(EXIT_NOT_DRIVEN, f"{why}; is `kvbench load --master` running there?")
    worker = Worker(env, found)
    for handler in handlers:
        handler.cancel()  # the worker has its own
    _tell_user("the master has answered; the load begins when all its workers are there")
    return worker.run()


def _joined(env: Environment, host: str, port: int) -> WorkerRunner | Exception:
    try:
        host.encode("idna")  # as getaddrinfo does, in a thread of which gevent would print a traceback
        socket.getaddrinfo(host, port, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or "not a possible name"
        return _NoSuchHost(f"--master-host {host!r} is no machine's name or address: {why}")
    _tell_user(f"waiting up to {CONNECT_LIMIT_S:g} s for the master at {host}:{port}")
    try:
        return env.create_worker_runner(host, port)
    except Exception as error:
        return error


def _failed(code: int, why: str) -> int:
    print(f"kvbench load: {why}", file=sys.stderr)
    return code


def _tell_user(text: str) -> None:
    """On stdout, where nobody listens to a local worker; who has gone away does not end this one."""
    with contextlib.suppress(OSError):
        print(f"kvbench load: {text}", flush=True)
