"""The lag probe: how late the client's event loop notices something, measured all through the load.

A timer of the kernel becomes readable every 10 ms, exactly on time, and is served by the same kind of read callback
that stamps the streams; how late that callback runs is how late stamps are. Where there is no timerfd (not
Linux), a greenlet sleeps 10 ms and notes how late it woke, which overestimates: timers are served after reads.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any

import gevent

PERIOD_S = 0.010
_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1


class LagProbe:
    """``lags``: lateness [s] of each tick so far. Between ``start`` and ``stop`` it ticks every 10 ms."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        self._greenlet: gevent.Greenlet | None = None
        self._fd = -1
        self._watcher: Any = None
        self._due = 0.0

    def start(self) -> None:
        """Begins to measure."""
        self._due = time.perf_counter() + PERIOD_S
        self._fd = _kernel_timer(self._due, PERIOD_S)
        if self._fd < 0:
            self._greenlet = gevent.spawn(self._sleep_and_note)
            return
        self._watcher = gevent.get_hub().loop.io(self._fd, 1)
        self._watcher.start(self._on_tick)

    def stop(self) -> None:
        """Ends; ``lags`` stays."""
        if self._greenlet is not None:
            self._greenlet.kill()
            self._greenlet = None
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher.close()
            self._watcher = None
            os.close(self._fd)

    def _on_tick(self) -> None:
        now = time.perf_counter()
        ticks = int.from_bytes(os.read(self._fd, 8), "little")
        for k in range(ticks):  # after a pause several are due at once; each was late by its own amount
            self.lags.append(max(0.0, now - self._due - k * PERIOD_S))
        self._due += ticks * PERIOD_S

    def _sleep_and_note(self) -> None:
        while True:
            before = time.perf_counter()
            gevent.sleep(PERIOD_S)
            self.lags.append(max(0.0, time.perf_counter() - before - PERIOD_S))


def _kernel_timer(first: float, period: float) -> int:
    """A timerfd that fires at ``first`` [s, perf_counter's clock] and every ``period`` after; -1 without one."""
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        fd = libc.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return -1
    if fd < 0:
        return -1
    parts = [part for t in (period, first) for part in (int(t), int(t % 1 * 1e9))]
    if libc.timerfd_settime(fd, _ABSOLUTE, (ctypes.c_long * 4)(*parts), None) != 0:
        os.close(fd)
        return -1
    return fd
