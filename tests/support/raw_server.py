"""A server of a few lines for what no real one does: a thread that hands every connection to a function."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """Its port. ``serve`` gets each connection, one after the other, and may raise OSError."""
    stopping = False

    def accept() -> None:
        while not stopping:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(10)
                    serve(connection)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.2)
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        stopping = True
        thread.join(timeout=15)


def read_request(connection: socket.socket) -> bytes:
    """The head of one request and what came with it."""
    data = b""
    while b"\r\n\r\n" not in data and (more := connection.recv(65536)):
        data += more
    return data
