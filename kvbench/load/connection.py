"""A connection of the streaming client: opened, sent on and read without blocking, with or without TLS.

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
from dataclasses import dataclass

import gevent
from gevent import monkey
from gevent.socket import wait_read, wait_write

from kvbench.load.http import Address

_READ_BYTES = 65536
_SO_TIMESTAMPNS = 35  # with the layout of 64-bit Linux
_ANCILLARY_BYTES = 64
_STAMP = struct.Struct("qq")
_CLOCK_STEP_S = 0.001
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
    """One open TCP connection. ``ended``: after what was last received nothing comes.

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
        """What has arrived, and when [s, perf_counter]: b"" at the connection's end, None if nothing. OSError."""
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
    """The same through TLS. Bytes that arrive are decrypted at once; their moment is that of the last packet."""

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
                data = self._wait_and_read()
                self._incoming.write(data) if data else self._incoming.write_eof()
            finally:
                self._flush()

    def _wait_and_read(self) -> bytes:
        while True:
            try:
                return self._sock.recv(_READ_BYTES)
            except BlockingIOError:
                wait_read(self.fd)

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
        if (failure := _failure(error, where)) is not None:
            raise failure from error
        raise


def _failure(error: BaseException, where: str) -> StreamFailure | None:
    if isinstance(error, ConnectionRefusedError):
        return StreamFailure("refused", f"{where} refused the connection")
    if isinstance(error, ssl.SSLCertVerificationError):
        return StreamFailure(
            "tls",
            f"the certificate of {where} is not trusted ({error.verify_message}); name its authority with "
            "--tls-ca-file, or give --no-tls-verify",
        )
    if isinstance(error, ssl.SSLError):
        return StreamFailure("tls", f"no TLS with {where}: {error.reason or error}")
    if isinstance(error, OSError):
        return StreamFailure("connection", f"cannot connect to {where}: {error}")
    return None
