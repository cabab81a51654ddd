"""What connects to a load's master without being a worker of kvbench: strangers, and one whose every word is a test's.

Speaks ZeroMQ and msgpack by itself, outside gevent.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import os
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import zmq

from kvbench import __version__

Answer = Callable[[dict[str, Any]], dict[str, Any]]


class RawWorker:
    """A node of Locust's protocol. ``token``: what it proves to know."""

    def __init__(self, port: str, token: str = "") -> None:
        self.node = f"raw_{uuid.uuid4().hex}"
        self._token = token
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, self.node.encode())
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def __enter__(self) -> RawWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._context.term()

    def send_bytes(self, *frames: bytes) -> None:
        """Whatever they are."""
        self._socket.send_multipart(frames)

    def say(self, kind: str, data: Any = None, node: str | None = None) -> None:
        """One message, as from ``node``."""
        self.send_bytes(msgpack.dumps((kind, data, node or self.node)))

    def greet(self) -> None:
        """As a worker does when it comes."""
        proof = hmac.new(self._token.encode(), self.node.encode(), hashlib.sha256).hexdigest()
        self.say("client_ready", importlib.metadata.version("locust"))
        hello = {"boot": None, "host": "raw", "pid": os.getpid(), "proof": proof, "version": __version__}
        self.say("kvbench_hello", hello)

    def heard(self, limit_s: float) -> Iterator[tuple[str, Any]]:
        """Messages as they come, until none has for ``limit_s``."""
        while self._socket.poll(int(limit_s * 1000)):
            kind, data, _ = msgpack.loads(self._socket.recv(), strict_map_key=False)
            yield kind, data

    def calls(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """What the master asks; heartbeats go on meanwhile, for ``limit_s`` in all."""
        due = time.monotonic() + limit_s
        while time.monotonic() < due:
            self.say("heartbeat", {"state": "ready", "current_cpu_usage": 0.0})
            yield from (data for kind, data in self.heard(0.5) if kind == "kvbench_call")

    def reply(self, call: dict[str, Any], **data: Any) -> None:
        """Answers ``call``."""
        self.say("kvbench_reply", {"id": call["id"], **data})
