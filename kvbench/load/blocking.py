"""One HTTP call with blocking reads, on a connection of its own, bounded in time and bytes.

A time-out of each read would not end an answer that comes byte by byte. Nothing is unpacked: no call asks for a
compressed answer (kvbench/load/http.py).
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from kvbench.load.http import Address, MalformedStream, ResponseReader

_READ_BYTES = 65536


def connect(address: Address, due: float, tls: ssl.SSLContext | None) -> socket.socket:
    """A connection, made by ``due`` [s, perf_counter]. OSError, of which TimeoutError is one."""
    connection = socket.create_connection((address.host, address.port), _left(due))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if tls is None:
        return connection
    with contextlib.closing(connection):  # which wrap_socket takes over
        connection.settimeout(_left(due))
        return tls.wrap_socket(connection, server_hostname=address.host)


def exchange(connection: socket.socket, request: bytes, due: float, most_bytes: int) -> tuple[list[float], list[bytes]]:
    """Sends a request and reads until the response or the connection ends: when each piece came, and the pieces.

    TimeoutError if that is not by ``due`` [s, perf_counter], OSError, and MalformedStream for what is not HTTP or too
    long.
    """
    reader, times, pieces, received = ResponseReader(), list[float](), list[bytes](), 0
    unsent = memoryview(request)
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it may have answered without reading all
        while unsent:
            connection.settimeout(_left(due))
            unsent = unsent[connection.send(unsent) :]
    while not reader.complete:
        connection.settimeout(_left(due))
        if not (data := connection.recv(_READ_BYTES)):
            break
        times.append(time.perf_counter())
        pieces.append(data)
        received += len(data)
        if received > most_bytes:
            raise MalformedStream(f"the answer is longer than {most_bytes >> 20} MiB")
        reader.feed(data)
    return times, pieces


def _left(due: float) -> float:
    if (left := due - time.perf_counter()) <= 0:
        raise TimeoutError("timed out")
    return left
