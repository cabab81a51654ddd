"""Ports of this machine."""

from __future__ import annotations

import errno
import socket

from kvbench.common.errors import UsageError

LOCUST_PORT = 5557  # where Locust's master listens unless it is told otherwise


def free_port(port: int, host: str = "127.0.0.1", *, port_option: str = "--port", host_option: str = "--host") -> int:
    """Returns a ``port`` of ``host`` (0: any) where nothing listens. Raises UsageError with the option to change."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            None if host == "*" else host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        with socket.socket(family, kind, protocol) as candidate:
            candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            candidate.bind(address)
            return int(candidate.getsockname()[1])
    except OSError as error:
        taken = error.errno in (errno.EADDRINUSE, errno.EACCES)
        given = f"{port_option} {port} cannot be used at {host}" if taken else f"{host_option} {host} cannot be used"
        raise UsageError(f"{given} ({error.strerror}): give another one, or stop what listens there") from None
