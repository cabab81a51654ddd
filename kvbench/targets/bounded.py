"""HTTP calls that end: httpx bounds each wait, this bounds the whole exchange, and the bytes of its answer.

Without it a server that sends a byte now and then keeps a call for ever, and one that never stops fills the memory.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterable
from typing import Any

import httpcore
import httpx

MOST_BYTES = 64 << 20  # /metrics of a busy server is under 1 MiB, a page of completions under 10 MiB


class _Budget(threading.local):
    """What is left to the exchange that runs in this thread."""

    deadline = float("inf")
    left_bytes = MOST_BYTES

    def seconds(self, timeout: float | None, expired: type[Exception]) -> float | None:
        """``timeout`` cut to the time that is left; raises ``expired`` when none is."""
        if self.deadline == float("inf"):
            return timeout
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise expired("the whole answer did not come in time")
        return left if timeout is None else min(timeout, left)


class _Stream(httpcore.NetworkStream):
    """A connection whose waits and bytes are taken from the budget of the thread that uses it."""

    def __init__(self, inner: httpcore.NetworkStream, budget: _Budget) -> None:
        self._inner, self._budget = inner, budget

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        data = self._inner.read(max_bytes, self._budget.seconds(timeout, httpcore.ReadTimeout))
        self._budget.left_bytes -= len(data)
        if self._budget.left_bytes < 0:
            raise httpcore.ReadError(f"the answer is longer than {MOST_BYTES >> 20} MiB")
        return data

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._inner.write(buffer, self._budget.seconds(timeout, httpcore.WriteTimeout))

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        limit = self._budget.seconds(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, limit), self._budget)

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)

    def close(self) -> None:
        self._inner.close()


class _Backend(httpcore.NetworkBackend):
    """Opens connections that keep to the budget."""

    def __init__(self, inner: httpcore.NetworkBackend, budget: _Budget) -> None:
        self._inner, self._budget = inner, budget

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.NetworkStream:
        limit = self._budget.seconds(timeout, httpcore.ConnectTimeout)
        return _Stream(self._inner.connect_tcp(host, port, limit, local_address, socket_options), self._budget)

    def sleep(self, seconds: float) -> None:
        self._inner.sleep(seconds)


class BoundedTransport(httpx.HTTPTransport):
    """httpx's own transport; the ``timeout`` of a request bounds all of it, from the connect to the last byte.

    Takes what ``httpx.HTTPTransport`` takes (``verify`` and ``trust_env`` of the client do not reach a transport that
    is passed in). Usable from several threads; an answer must be read in the thread that asked.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._budget = _Budget()
        self._pool._network_backend = _Backend(self._pool._network_backend, self._budget)  # httpx has no way to pass it

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """As httpx; httpx.TimeoutException or httpx.ReadError when a bound is reached, now or while it is read."""
        limit = (request.extensions.get("timeout") or {}).get("read")
        self._budget.deadline = float("inf") if limit is None else time.monotonic() + limit
        self._budget.left_bytes = MOST_BYTES
        return super().handle_request(request)
