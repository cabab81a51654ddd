"""What master and workers say to each other: Locust messages of ours, beside Locust's own.

    worker -> master   kvbench_hello  {boot, host, pid, proof, version}      once, when the master has answered it
    master -> worker   kvbench_call   {id, op, ...}                   the master asks, the worker answers
    worker -> master   kvbench_reply  {id, error, ...}
    worker -> master   kvbench_event  {event, done, failed, ...}      progress, ended

Large data goes in pieces of ``PIECE_BYTES``, each asked for or acknowledged before the next one, so that neither side
queues more than one. All of it is msgpack (Locust's wire format): plain data, nothing that could run.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import gevent
from gevent.event import AsyncResult
from locust.rpc import Message
from locust.runners import WorkerRunner

from kvbench.load.multi.shards import TOKEN_VARIABLE

HELLO, CALL, REPLY, EVENT = "kvbench_hello", "kvbench_call", "kvbench_reply", "kvbench_event"
PIECE_BYTES = 1 << 20
CALL_LIMIT_S = 60.0

Send = Callable[[dict[str, Any]], None]


class WorkerLost(Exception):
    """A worker that does not answer any more, or that could not do what it was told. Its text says which and why."""


def pieces(data: bytes) -> Iterator[bytes]:
    """``data`` in pieces of at most ``PIECE_BYTES``; one empty piece of nothing."""
    for start in range(0, max(1, len(data)), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def proof(name: str) -> str:
    """Shows that whoever calls itself ``name`` knows the token (environment); the token itself is never sent."""
    token = os.environ.get(TOKEN_VARIABLE, "")
    return hmac.new(token.encode(), name.encode(), hashlib.sha256).hexdigest()


def proven(name: str, given: Any) -> bool:
    """Whether ``given`` is the proof of ``name`` with our token."""
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(name).encode())


def send_statistics(runner: WorkerRunner) -> None:
    """Sends a worker's Locust statistics to the master now, and not at Locust's next three-second report."""
    report: dict[str, Any] = {}
    runner.environment.events.report_to_master.fire(client_id=runner.client_id, data=report)
    runner.client.send(Message("stats", report, runner.client_id))


@dataclass
class Link:
    """The master's end of one worker. ``node``: Locust's name of it; ``name``: what people are told."""

    node: str
    name: str
    host: str
    pid: int
    boot: str | None
    send: Send
    done: int = 0
    failed: int = 0
    ended: bool = False
    gone: str | None = None  # the server stopped answering this worker
    signal: int = 0  # somebody stopped this worker
    error: str | None = None  # it could not go on measuring
    machine: dict[str, Any] | None = None  # how it saw its machine, once it has handed back what it measured
    mute_s: float = 0.0  # during the load, since it last told its progress
    lost: str | None = None  # the worker stopped answering us
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _waiting: dict[int, AsyncResult] = field(default_factory=dict)

    def call(self, op: str, limit_s: float = CALL_LIMIT_S, **data: Any) -> dict[str, Any]:
        """Asks and waits. ``received`` in the answer: when it came [s, perf_counter]. Raises WorkerLost."""
        if self.lost is not None:
            raise WorkerLost(self.lost)
        number = next(self._numbers)
        answer = self._waiting[number] = AsyncResult()
        try:
            self.send({"id": number, "op": op, **data})
            reply = answer.get(timeout=limit_s)
        except gevent.Timeout:
            self.lose(f"it did not answer ({op}) within {limit_s:g} s")
            raise WorkerLost(self.lost) from None
        finally:
            del self._waiting[number]
        if reply.get("error"):
            raise WorkerLost(f"{self.name}: {reply['error']}")
        return reply

    def on_reply(self, data: dict[str, Any]) -> None:
        """An answer came; one that nobody waits for any more is dropped."""
        waiting = self._waiting.get(data.get("id", -1))
        if waiting is not None:
            waiting.set({**data, "received": time.perf_counter()})

    def lose(self, why: str) -> None:
        """From now on this worker counts as lost; whoever waits for it is told."""
        if self.lost is None:
            self.lost = f"{self.name} was lost: {why}"
            for waiting in self._waiting.values():
                waiting.set_exception(WorkerLost(self.lost))

    def push(self, op: str, data: bytes) -> None:
        """Sends ``data`` in pieces. Raises WorkerLost."""
        for piece in pieces(data):
            self.call(op, piece=piece)

    def pull(self, what: str, size: int) -> bytes:
        """Fetches ``size`` bytes of what the worker keeps under the name ``what``. Raises WorkerLost."""
        parts, have = [], 0
        while have < size:
            part = self.call("fetch", what=what, start=have)["piece"]
            if not part:
                raise WorkerLost(f"{self.name}: {what} ended after {have} of {size} bytes")
            parts.append(part)
            have += len(part)
        return b"".join(parts)
