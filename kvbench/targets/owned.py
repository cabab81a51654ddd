"""A server that kvbench launches: in a session of its own, logged, waited for within a bound, always stopped.

Stopped with its whole family; when kvbench itself is killed, by the watchdog.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from kvbench.common import processes
from kvbench.common.errors import MeasurementError, UsageError
from kvbench.common.foreign_cpu import Server
from kvbench.common.watchdog import Watchdog
from kvbench.targets.base import HttpTarget

_Found = TypeVar("_Found")


class OwnServer(HttpTarget):
    """The process; ``start`` is the subclass's, made of ``_launched``, ``_wait_ready`` and ``_connect``."""

    starts_cold = True
    grace_s = 6.0  # between TERM and KILL
    poll_s = 0.05  # between two looks whether it is ready

    def __init__(self, *, port: int, start_timeout_s: float) -> None:
        self.port, self.start_timeout_s = port, start_timeout_s
        self._process: processes.Child | None = None
        self._watchdog: Watchdog | None = None
        self._log: Path | None = None
        self._said_at_start = 0  # bytes of its log when it was ready

    @contextmanager
    def _launched(
        self,
        command: Sequence[str],
        log: Path,
        *,
        env: Mapping[str, str | None] | None = None,
        scratch: Path | None = None,
    ) -> Iterator[None]:
        """Launches; what is raised inside stops the server again. ``scratch``: removed if kvbench is killed."""
        self._log, self._said_at_start = log, 0
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = processes.launch(
                command,
                stdout=file,
                stderr=subprocess.STDOUT,
                background=True,
                env={"PYTHONUNBUFFERED": "1", **(env or {})},
            )
        self._watchdog = Watchdog(self._process.pid, self._process.mark, scratch)
        try:
            yield
            self._watchdog.watch(self._process.remember())
        except BaseException:
            self.stop()
            raise

    def _wait_ready(self, ready: Callable[[], _Found | None]) -> _Found:
        """What ``ready`` finds. Raises MeasurementError with the last words of a server that ends or takes too long."""
        assert self._process is not None and self._log is not None
        deadline = time.monotonic() + self.start_timeout_s
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise self._ended_at_start(code)  # whoever answers there now is somebody else
            said = self._log.stat().st_size  # before it is asked: what it says from now on may be its last words
            if found := ready():
                self._said_at_start = said
                return found
            time.sleep(self.poll_s)
        raise MeasurementError(
            f"{self.preset.title} was not ready after {self.start_timeout_s:g} s and was stopped; allow more with "
            f"--start-timeout, or read its last lines:\n{self._last_lines()}"
        )

    def _ended_at_start(self, code: int) -> Exception:
        return MeasurementError(
            f"{self.preset.title} ended with exit code {code} before it was ready; its last lines:\n"
            f"{self._last_lines()}"
        )

    def _connect(self, url: str, **options: Any) -> None:
        """From here on it can be asked; ``options`` of ``HttpTarget``."""
        super().__init__(url, **options)

    def _last_lines(self) -> str:
        assert self._log is not None
        return processes.last_lines(self._log) or "(no output)"

    def server(self) -> Server:
        return Server(None if self._process is None else self._process.pid)

    def check_alive(self) -> None:
        if self._process is None:
            raise MeasurementError("the server was not started")
        code = self._process.poll()
        if code is not None:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            said = processes.last_lines(self._log, after=self._said_at_start) if self._log else ""
            words = f"its last lines:\n{said}" if said else "it said nothing after it was ready"
            raise MeasurementError(f"{self.preset.title} {how}; {words}")

    def stop(self) -> None:
        if self._process is not None:
            processes.stop(self._process, self.grace_s)
            self._process = None
        if self._watchdog is not None:
            self._watchdog.release()
            self._watchdog = None
        if hasattr(self, "_http"):
            self.close()


def require_free_port(host: str, port: int) -> None:
    """Raises UsageError when something listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UsageError(
                f"port {port} on {host} cannot be used ({error.strerror}): stop what listens there, or leave --port "
                "out to get a free one"
            ) from None
