"""kvbench's own streaming HTTP client: timestamps when bytes arrive, everything else later.

While a stream runs, the event loop's read callback reads, stamps and keeps; no greenlet is switched to. Of the bytes
only the HTTP framing is followed, by a C parser (kvbench/load/http.py), to know the response's end; events and JSON
are left to kvbench/load/completion.py. Used in the load process only (gevent must have patched first).

Linux stamps a packet as it arrives (SO_TIMESTAMPNS). A read returns that moment, so that a client that is late to read,
because it served another stream or the machine was busy, still tells when the bytes came. Where the system does not
stamp, the moment of the read counts.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import struct
import time
from dataclasses import dataclass, field

import gevent
from gevent import monkey
from gevent.event import Event
from gevent.socket import wait_read, wait_write

from kvbench.load.http import Address, MalformedStream, ResponseReader, tls_context

_READ_BYTES = 65536
_SO_TIMESTAMPNS = 35  # with the layout of 64-bit Linux
_ANCILLARY_BYTES = 64
_STAMP = struct.Struct("qq")
_CLOCK_STEP_S = 0.001
_MOST_BYTES = 64 << 20
# A server that closes an idle connection may cross with a request on its way. One that closes later than this after the
# send may have worked on it: that is a failure, and is not sent again.
_CROSSED_S = 0.005
_RawSocket = monkey.get_original("socket", "socket")  # gevent's own would wait inside the read callback


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``connect``: name, TCP and TLS handshake together; ``first_byte`` counts from the request's send,
    ``idle`` from the last bytes, ``total`` from the exchange's beginning."""

    connect: float = 5.0
    first_byte: float = 120.0
    idle: float = 120.0
    total: float = 120.0


class StreamFailure(Exception):
    """A connection that could not be made or used: refused, connect_timeout, tls, connection, timeout."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Connection:
    """One open TCP connection. ``ended``: nothing comes after the bytes received last.

    ``unstamped``: reads whose moment is that of the read, because the kernel gave no stamp or the wall clock, of which
    its stamps are, was set while the bytes lay there.
    """

    ended = False

    def __init__(self, sock: socket.socket) -> None:
        self._sock = _RawSocket(fileno=sock.detach())
        self._sock.setblocking(False)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            self._sock.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        self.fd = self._sock.fileno()
        self._recvmsg = self._sock.recvmsg
        self.unstamped = 0
        self._found_empty()

    def _found_empty(self) -> None:
        """Notes that nothing has arrived yet at ``_read_at``, and how far wall time was ``_ahead`` of perf_counter."""
        self._read_at = time.perf_counter()
        self._ahead = time.time() - self._read_at

    def send(self, data: bytes, due: float) -> None:
        """Sends all by ``due`` [s, perf_counter]. StreamFailure."""
        view = memoryview(data)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                late = StreamFailure("timeout", "the request could not be sent in time: the server does not read")
                wait_write(self.fd, max(0.001, due - time.perf_counter()), late)
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise StreamFailure("connection", f"sending failed: {error}") from error
                return  # the server closed before it had read all, perhaps after an answer (413): read what there is

    def receive(self) -> tuple[bytes | None, float]:
        """Returns what has arrived, and when [s, perf_counter]: b"" at the end, None if nothing. OSError."""
        try:
            data, ancillary, _, _ = self._recvmsg(_READ_BYTES, _ANCILLARY_BYTES)
        except BlockingIOError:
            self._found_empty()
            return None, 0.0
        earliest, before = self._read_at, self._ahead
        wall, now = time.time(), time.perf_counter()
        if not -_CLOCK_STEP_S < wall - now - before < _CLOCK_STEP_S:  # this process stood still between the two calls,
            wall, now = time.time(), time.perf_counter()  # or else the wall clock was set
        self._read_at, self._ahead = now, wall - now
        if not data:
            return data, now
        if not ancillary or not -_CLOCK_STEP_S < self._ahead - before < _CLOCK_STEP_S:
            self.unstamped += 1
            return data, now
        seconds, nanoseconds = _STAMP.unpack_from(ancillary[0][2])
        arrived = now - max(0.0, wall - seconds - nanoseconds * 1e-9)
        return data, arrived if arrived > earliest else earliest

    def close(self) -> None:
        self._sock.close()


class TlsConnection(Connection):
    """A connection through TLS. Bytes that arrive are decrypted at once; their moment is that of the last packet."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, host: str) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    def handshake(self) -> None:
        """Waits for the server; the caller bounds it. ssl.SSLError, OSError."""
        while True:
            try:
                self._tls.do_handshake()
                return
            except ssl.SSLWantReadError:
                self._flush()
                wait_read(self.fd)
                with contextlib.suppress(BlockingIOError):
                    data = self._sock.recv(_READ_BYTES)
                    self._incoming.write(data) if data else self._incoming.write_eof()
            finally:
                self._flush()

    def _flush(self) -> None:
        """Sends TLS's own messages (handshakes, alerts). They are small: the socket's buffer takes them."""
        if self._outgoing.pending:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self._sock.send(self._outgoing.read())

    def send(self, data: bytes, due: float) -> None:
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        super().send(self._outgoing.read(), due)

    def receive(self) -> tuple[bytes | None, float]:
        cipher, arrived = super().receive()
        if cipher is None:
            return None, 0.0
        self._incoming.write(cipher) if cipher else self._incoming.write_eof()
        plain = []
        try:
            while piece := self._tls.read(_READ_BYTES):
                plain.append(piece)
            self.ended = True  # the closing alert may come together with data
        except ssl.SSLWantReadError:
            pass  # all that was pending is read
        except ssl.SSLZeroReturnError:
            self.ended = True
        except ssl.SSLError as error:
            if not plain:
                raise ConnectionError(f"TLS: {error.reason or error}") from None
            # else the next read finds the same error
        self._flush()
        return (b"".join(plain), arrived) if plain or self.ended else (None, 0.0)


def open_connection(address: Address, timeouts: Timeouts, tls: ssl.SSLContext | None) -> Connection:
    """A connection that is ready to send. StreamFailure: refused, connect_timeout, tls, connection."""
    where, phase = address.authority, "did not accept"
    timer = gevent.Timeout(timeouts.connect)
    connection = sock = None
    try:
        with timer:
            sock = socket.create_connection((address.host, address.port), timeouts.connect)
            if tls is None:
                return Connection(sock)
            phase = "accepted but did not finish the TLS handshake"
            connection = TlsConnection(sock, tls, address.host)
            connection.handshake()
            return connection
    except BaseException as error:
        if connection is not None:
            connection.close()
        elif sock is not None:
            sock.close()
        if error is timer or isinstance(error, TimeoutError):
            raise StreamFailure("connect_timeout", f"{where} {phase} within {timeouts.connect:g} s") from None
        if isinstance(error, OSError):
            raise _failure(error, where) from error
        raise


def _failure(error: OSError, where: str) -> StreamFailure:
    if isinstance(error, ConnectionRefusedError):
        return StreamFailure("refused", f"{where} refused the connection")
    if isinstance(error, ssl.SSLCertVerificationError):
        way_out = "name its authority with --tls-ca-file, or give --no-tls-verify"
        return StreamFailure("tls", f"the certificate of {where} is not trusted ({error.verify_message}); {way_out}")
    if isinstance(error, ssl.SSLError):
        return StreamFailure("tls", f"no TLS with {where}: {error.reason or error}")
    return StreamFailure("connection", f"cannot connect to {where}: {error}")


@dataclass
class RawStream:
    """One exchange as it came over the wire. ``times[i]`` [s, perf_counter] stamps the arrival of ``chunks[i]``.

    ``ts``: the exchange's beginning, ``sent``: when the request was out. ``reopened``: a kept connection turned out to
    be closed, and a new one was opened. ``unstamped``: reads that the kernel did not stamp. ``error_kind`` is None when
    a whole HTTP response arrived (whatever its status): refused, connect_timeout, tls, connection, timeout, dropped
    (the server closed without a byte of an answer), truncated, malformed, too_long, interrupted.
    """

    ts: float
    sent: float = 0.0
    end: float = 0.0
    times: list[float] = field(default_factory=list)
    chunks: list[bytes] = field(default_factory=list)
    reopened: bool = False
    unstamped: int = 0
    error_kind: str | None = None
    error: str | None = None


class StreamingClient:
    """One keep-alive connection; one exchange at a time. ``tls``: for an https address.

    ``raw``: the newest exchange, also when it was interrupted.
    """

    def __init__(self, address: Address, timeouts: Timeouts, tls: ssl.SSLContext | None = None) -> None:
        self.address = address
        self.timeouts = timeouts
        self._tls = tls if tls is not None or not address.tls else tls_context()
        self._connection: Connection | None = None
        self._watcher = None
        self._done = Event()
        self.raw = RawStream(0.0)
        self._reader = ResponseReader()
        self._left = 0  # bytes that the response may still bring

    def connect(self) -> None:
        """Opens the connection if there is none. StreamFailure when that fails."""
        if self._connection is None:
            self._connection = open_connection(self.address, self.timeouts, self._tls)
            self._watcher = gevent.get_hub().loop.io(self._connection.fd, 1)

    @property
    def is_open(self) -> bool:
        """Tests whether the next exchange has a connection already."""
        return self._connection is not None

    def close(self) -> None:
        """Closes the connection; the next exchange opens a new one."""
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def exchange(self, request: bytes, most_bytes: int = _MOST_BYTES) -> RawStream:
        """Sends the bytes of one HTTP request and keeps what comes back until the response is whole.

        Never raises for what the network does: the failure's kind is in the result. Nothing is tried again, but for a
        kept-alive connection that the server had closed before or while the request was on its way: it is opened anew,
        once (``reopened``); ``ts`` stays that of the first try. A response of more than ``most_bytes`` is given up:
        what never ends must not fill the memory.
        """
        ts, reopened = time.perf_counter(), False
        kept = self._connection is not None  # from an exchange before, or opened for this one some time ago
        if kept and not self._is_quiet():
            self.close()
            kept, reopened = False, True
        raw = self._attempt(request, ts, most_bytes)
        if kept and raw.error_kind == "dropped" and raw.end - raw.sent < _CROSSED_S:
            self.close()
            reopened = True
            raw = self._attempt(request, ts, most_bytes)
        raw.reopened = reopened
        if raw.error_kind is not None or not self._reader.reusable:
            self.close()
        self._reader.release()
        return raw

    @property
    def status(self) -> int:
        """The HTTP status of the newest exchange; 0: it had no whole response head."""
        return self._reader.status

    def _is_quiet(self) -> bool:
        """Tests whether nothing, not even a close, came over the kept connection: stray bytes would shift answers."""
        try:
            return self._connection.receive()[0] is None
        except OSError:
            return False

    def _attempt(self, request: bytes, ts: float, most_bytes: int) -> RawStream:
        raw = self.raw = RawStream(ts)
        self._left = most_bytes
        self._reader = ResponseReader()
        self._done.clear()
        try:
            self.connect()
            unstamped = self._connection.unstamped
            self._connection.send(request, ts + self.timeouts.total)
            raw.sent = time.perf_counter()
            self._watcher.start(self._on_readable)
            self._wait()
            raw.unstamped = self._connection.unstamped - unstamped
        except StreamFailure as failure:
            self._fail(failure.kind, str(failure))
        except gevent.GreenletExit:
            self._fail("interrupted", "the load was stopped")
            self.close()
            raise
        finally:
            if self._watcher is not None:
                self._watcher.stop()
        if raw.times and raw.error_kind is None:
            raw.end = raw.times[-1]
        return raw

    def _wait(self) -> None:
        """Waits for the read callback to see the end, no longer than the time-outs allow."""
        while True:
            due, what = self._deadline()
            left = due - time.perf_counter()
            if left <= 0:
                self._fail("timeout", what)
                return
            # No byte wakes this greenlet, so that the nearest time-out may be the idle one meanwhile.
            if self._done.wait(min(left, self.timeouts.idle)):
                return

    def _deadline(self) -> tuple[float, str]:
        """The nearest time-out [s, perf_counter], which moves on as bytes arrive, and what it would mean."""
        limits, raw = self.timeouts, self.raw
        total = (raw.ts + limits.total, f"not done within {limits.total:g} s")
        if raw.times:
            return min(total, (raw.times[-1] + limits.idle, f"nothing more came for {limits.idle:g} s"))
        return min(total, (raw.sent + limits.first_byte, f"no byte came within {limits.first_byte:g} s"))

    def _on_readable(self) -> None:
        """Runs in the event loop: read, stamp, keep, and follow the framing."""
        try:
            data, arrived = self._connection.receive()
        except OSError as error:
            self._finish("truncated" if self.raw.times else "dropped", f"the connection broke: {error}")
            return
        if data is None:
            return
        if not data:
            self._on_closed()
            return
        raw, reader = self.raw, self._reader
        raw.times.append(arrived)
        raw.chunks.append(data)
        self._left -= len(data)
        if self._left < 0:
            self._finish("too_long", f"the response is {-self._left} bytes longer than it may be")
            return
        try:
            reader.feed(data)
        except MalformedStream as error:
            self._finish("malformed", str(error))
            return
        if reader.complete:
            self._finish(None, None)
        elif self._connection.ended:
            self._on_closed()

    def _on_closed(self) -> None:
        if self._reader.begun and self._reader.until_close:
            self._finish(None, None)  # a body that ends with the connection
        elif self.raw.times:
            self._finish("truncated", "the connection closed before the response's end")
        else:
            self._finish("dropped", "the connection closed without a response")

    def _finish(self, kind: str | None, message: str | None) -> None:
        if self._watcher is not None:
            self._watcher.stop()
        if kind is not None:
            self._fail(kind, message or kind)
        self._done.set()

    def _fail(self, kind: str, message: str) -> None:
        self.raw.error_kind, self.raw.error, self.raw.end = kind, message, time.perf_counter()
