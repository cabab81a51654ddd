"""Time in the client's event loop: how late it notices something (LagProbe), and exact waits (PreciseSleep).

A timer of the kernel becomes readable every 10 ms, exactly on time, and is served by the same kind of read callback
that stamps the streams; how late that callback runs is how late stamps are.
"""

from __future__ import annotations

import os
import time
from typing import Any

import gevent
from gevent.event import Event

from kvbench.common.kernel_timer import DueCalls, kernel_timer, set_timer
from kvbench.load.validity import PROBE_PERIOD_S


class LagProbe:
    """``lags``: lateness [s] of each tick so far. Between ``start`` and ``stop`` it ticks every 10 ms."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._fd = -1
        self._watcher: Any = None
        self._due = 0.0

    def start(self) -> None:
        self._due = time.perf_counter() + PROBE_PERIOD_S
        self._fd = kernel_timer()
        set_timer(self._fd, self._due, PROBE_PERIOD_S)
        self._watcher = gevent.get_hub().loop.io(self._fd, 1)
        self._watcher.start(self._on_tick)

    def stop(self) -> None:
        """Ends; ``lags`` stays."""
        if self._watcher is not None:
            _close(self._watcher, self._fd)
            self._watcher = None

    def _on_tick(self) -> None:
        now = time.perf_counter()
        ticks = int.from_bytes(os.read(self._fd, 8), "little")
        for k in range(ticks):  # after a pause several are due at once; each was late by its own amount
            self.lags.append(max(0.0, now - self._due - k * PROBE_PERIOD_S))
        self._due += ticks * PROBE_PERIOD_S


class PreciseSleep:
    """Wakes greenlets at due moments, 0.1 ms late; gevent's own sleeps are rounded up to milliseconds, 0.7 ms late."""

    def __init__(self) -> None:
        self._calls = DueCalls()
        self._watcher = gevent.get_hub().loop.io(self._calls.fd, 1)
        self._watcher.start(self._calls.on_readable)

    def wait_until(self, when: float) -> None:
        """Blocks the greenlet until ``when`` [s, perf_counter]; at once when that is past."""
        while time.perf_counter() < when:
            ring = Event()
            self._calls.add(when, ring.set)
            ring.wait()

    def close(self) -> None:
        """Closes the timer. Greenlets that still wait are not woken."""
        if self._calls.fd >= 0:
            _close(self._watcher, self._calls.fd)
            self._calls.fd = -1


def _close(watcher: Any, fd: int) -> None:
    watcher.stop()
    watcher.close()
    os.close(fd)
