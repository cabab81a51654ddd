"""kvbench's own streaming HTTP client: timestamps when bytes arrive, everything else later.

While a stream runs, the event loop's read callback does three things: read, stamp, keep. No greenlet is switched
to and nothing is parsed, so with many streams the last one of a batch is stamped soon after the first. Headers
are looked at once; the end of a chunked body is recognised by its last five bytes and only then verified.
Parsing is left to kvbench/load/sse.py. Used in the load process only (gevent must have patched first).
"""

from __future__ import annotations

import errno
import os
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import gevent
from gevent.event import Event

from kvbench.load.requests import no_tls
from kvbench.load.sse import Head, MalformedStream, dechunk, parse_head

_READ_BYTES = 65536
_CHUNKED_END = b"0\r\n\r\n"
_MOST_BYTES = 64 << 20


@dataclass(frozen=True)
class Address:
    """Where the server is, and the path prefix below which its API lives."""

    host: str
    port: int
    prefix: str

    @classmethod
    def from_url(cls, url: str) -> Address:
        """ValueError for anything but http://host[:port][/prefix]."""
        parts = urlsplit(url)
        if parts.scheme != "http":
            raise ValueError(no_tls(url))
        if not parts.hostname:
            raise ValueError(f"the URL {url!r} names no host; write http://127.0.0.1:8000.")
        try:
            port = parts.port or 80
        except ValueError as error:
            raise ValueError(f"the URL {url!r} has an impossible port ({error}).") from error
        return cls(parts.hostname, port, parts.path.rstrip("/"))


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``first_byte`` counts from the send, ``idle`` from the last bytes, ``total`` from the send."""

    connect: float = 5.0
    first_byte: float = 120.0
    idle: float = 120.0
    total: float = 120.0


@dataclass
class RawStream:
    """One exchange as it came over the wire. ``times[i]`` [s, perf_counter] stamps ``chunks[i]``.

    ``error_kind`` is None when a whole HTTP response arrived (whatever its status): refused, connect_timeout,
    connection, timeout, truncated, malformed, too_long, interrupted.
    """

    ts: float
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    error_kind: str | None = None
    error: str | None = None


class StreamFailure(Exception):
    """A connection that could not be made. ``kind`` as in ``RawStream.error_kind``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class StreamingClient:
    """One keep-alive connection; one exchange at a time."""

    def __init__(self, address: Address, timeouts: Timeouts) -> None:
        self.address = address
        self.timeouts = timeouts
        self._sock: socket.socket | None = None
        self._fd = -1
        self._watcher = None
        self._done = Event()
        self._raw = RawStream(0.0)
        self._tail = b""
        self._received = 0
        self._most_bytes = _MOST_BYTES
        self._head: Head | None = None
        self._used = False  # the connection that stands has had an exchange

    def connect(self) -> None:
        """Opens the connection if there is none. StreamFailure when that fails."""
        if self._sock is not None:
            return
        where = f"{self.address.host}:{self.address.port}"
        try:
            sock = socket.create_connection((self.address.host, self.address.port), self.timeouts.connect)
        except TimeoutError as error:
            raise StreamFailure(
                "connect_timeout", f"{where} did not accept within {self.timeouts.connect} s"
            ) from error
        except ConnectionRefusedError as error:
            raise StreamFailure("refused", f"{where} refused the connection") from error
        except OSError as error:
            raise StreamFailure("connection", f"cannot connect to {where}: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock, self._fd, self._used = sock, sock.fileno(), False
        self._watcher = gevent.get_hub().loop.io(self._fd, 1)

    def close(self) -> None:
        """Closes the connection; the next exchange opens a new one."""
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None
        if self._sock is not None:
            self._sock.close()
            self._sock = None
            self._used = False

    def exchange(self, request: bytes, most_bytes: int = _MOST_BYTES) -> RawStream:
        """Sends the bytes of one HTTP request and keeps what comes back until the response is whole.

        A response of more than ``most_bytes`` is given up: what never ends must not fill the memory.

        Never raises for what the network does: the failure's kind is in the result. A kept-alive connection that
        the server had closed meanwhile is opened anew, once, before anything was received; ``ts`` stays the
        first send.
        """
        self._most_bytes = most_bytes
        if self._used and not self._is_quiet():
            self.close()
        raw = self._attempt(request, time.perf_counter())
        stale = self._used and not raw.times and raw.error_kind == "truncated"
        if stale:
            self.close()
            raw = self._attempt(request, raw.ts)
        self._used = self._sock is not None
        if raw.error_kind is not None or self._head is None or self._head.close:
            self.close()
        return raw

    def _is_quiet(self) -> bool:
        """Nothing has come over the kept connection since the last response's end, not even its close.

        What did come would be taken for the beginning of the next response, and every later one would be another's.
        """
        try:
            os.read(self._fd, 1)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def _attempt(self, request: bytes, ts: float) -> RawStream:
        raw = self._raw = RawStream(ts)
        self._head, self._tail, self._received = None, b"", 0
        self._done.clear()
        try:
            self.connect()
            self._send(request)
            self._watcher.start(self._on_readable)
            self._wait()
        except StreamFailure as failure:
            self._fail(failure.kind, str(failure))
        except gevent.GreenletExit:
            self._fail("interrupted", "the load was stopped")
            raw.end = time.perf_counter()
            self.close()
            raise
        finally:
            if self._watcher is not None:
                self._watcher.stop()
        raw.end = raw.times[-1] if raw.times and raw.error_kind is None else time.perf_counter()
        return raw

    @property
    def last_raw(self) -> RawStream:
        """The newest exchange, also when it was interrupted."""
        return self._raw

    def _send(self, request: bytes) -> None:
        try:
            self._sock.settimeout(self.timeouts.total)
            self._sock.sendall(request)
        except TimeoutError:
            raise StreamFailure("timeout", f"sending took longer than {self.timeouts.total} s") from None
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                raise StreamFailure("connection", f"sending failed: {error}") from error
            # The server closed before it had read all, perhaps after an answer (413): read what there is.

    def _wait(self) -> None:
        """Waits for the read callback to see the end, no longer than the time-outs allow."""
        while True:
            due, what = self._deadline()
            left = due - time.perf_counter()
            if left <= 0:
                self._fail("timeout", what)
                return
            if self._done.wait(left):
                return

    def _deadline(self) -> tuple[float, str]:
        """The nearest time-out [s, perf_counter], which moves on as bytes arrive, and what it would mean."""
        limits, raw = self.timeouts, self._raw
        total = (raw.ts + limits.total, f"not done within {limits.total:g} s")
        if raw.times:
            return min(total, (raw.times[-1] + limits.idle, f"nothing more came for {limits.idle:g} s"))
        return min(total, (raw.ts + limits.first_byte, f"no byte came within {limits.first_byte:g} s"))

    def _on_readable(self) -> None:
        """Runs in the event loop: read, stamp, keep."""
        try:
            data = os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._finish("truncated", f"the connection broke: {error}")
            return
        now = time.perf_counter()
        raw = self._raw
        if not data:
            self._on_closed()
            return
        raw.times.append(now)
        raw.chunks.append(data)
        self._received += len(data)
        if self._received > self._most_bytes:
            self._finish("too_long", f"the response is longer than {self._most_bytes} bytes")
            return
        self._tail = tail = data[-5:] if len(data) >= 5 else (self._tail + data)[-5:]
        if self._head is None or self._is_last() or tail == _CHUNKED_END:
            self._check_complete()

    def _is_last(self) -> bool:
        """All of a body is there whose length the head told."""
        head = self._head
        return head.length is not None and self._received - head.size >= head.length

    def _on_closed(self) -> None:
        if self._head is not None and not self._head.chunked and self._head.length is None:
            self._finish(None, None)  # a body that ends with the connection
        elif self._raw.times:
            self._finish("truncated", "the connection closed before the response's end")
        else:
            self._finish("truncated", "the connection closed without a response")

    def _check_complete(self) -> None:
        data = b"".join(self._raw.chunks)
        try:
            if self._head is None:
                self._head = parse_head(data)
            head = self._head
            if head is None:
                return
            done = self._is_last() or (
                head.chunked and self._tail == _CHUNKED_END and dechunk(data, head.size).complete
            )
        except MalformedStream as error:
            self._finish("malformed", str(error))
            return
        if done:
            self._finish(None, None)

    def _finish(self, kind: str | None, message: str | None) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        if kind is not None:
            self._fail(kind, message or kind)
        self._done.set()

    def _fail(self, kind: str, message: str) -> None:
        self._raw.error_kind, self._raw.error = kind, message
