"""A node that connects to a load's master and is no worker of kvbench: a stranger, or one whose every word is a test's.

Speaks ZeroMQ and msgpack by itself, outside gevent.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.metadata
import os
import time
import uuid
from collections.abc import Iterator
from typing import Any

import msgpack
import zmq

from kvbench import __version__


class RawWorker:
    """A node of Locust's protocol. ``token``: what it proves to know."""

    def __init__(self, port: str, token: str = "") -> None:
        self.node, self._token = f"raw_{uuid.uuid4().hex}", token
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

    def send_bytes(self, frame: bytes) -> None:
        self._socket.send(frame)

    def say(self, kind: str, data: Any = None, node: str | None = None) -> None:
        """One message, as from ``node``."""
        self.send_bytes(msgpack.dumps((kind, data, node or self.node)))

    def join(self) -> dict[str, Any]:
        """Greets as a worker does when it comes; the master's answer."""
        proof = hmac.new(self._token.encode(), self.node.encode(), hashlib.sha256).hexdigest()
        self.say("client_ready", importlib.metadata.version("locust"))
        self.say(
            "kvbench_join", {"boot": None, "host": "raw", "pid": os.getpid(), "proof": proof, "version": __version__}
        )
        return next(data for kind, data in self.heard(20.0) if kind == "kvbench_join")

    def heard(self, limit_s: float) -> Iterator[tuple[str, Any]]:
        """Messages as they come, for ``limit_s`` in all; heartbeats go on meanwhile."""
        due = time.monotonic() + limit_s
        while time.monotonic() < due:
            self.say("heartbeat", {"state": "ready", "current_cpu_usage": 0.0})
            while self._socket.poll(200):
                kind, data, _ = msgpack.loads(self._socket.recv(), strict_map_key=False)
                yield kind, data
