"""Linux's timerfd: a file descriptor that becomes readable at an exact moment of perf_counter's clock."""

from __future__ import annotations

import ctypes
import heapq
import os
import time
from collections.abc import Callable
from itertools import count

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_TIMES = ctypes.c_long * 4  # seconds and nanoseconds of the period, then of the first moment


def kernel_timer() -> int:
    """A timer that is not set yet. OSError."""
    fd = int(_LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"no timer: {os.strerror(ctypes.get_errno())}")
    return fd


def set_timer(fd: int, first: float, period: float = 0.0) -> None:
    """Makes ``fd`` readable at ``first`` [s, perf_counter] and every ``period`` [s] after."""
    times = _TIMES(int(period), int(period % 1 * 1e9), int(first), int(first % 1 * 1e9))
    _LIBC.timerfd_settime(fd, _ABSOLUTE, times, None)


class DueCalls:
    """Calls functions at given moments; the owner calls ``on_readable`` whenever ``fd`` is readable."""

    def __init__(self) -> None:
        self.fd = kernel_timer()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def add(self, when: float, call: Callable[[], None]) -> None:
        """Plans ``call()`` for ``when`` [s, perf_counter], or soon if that is past."""
        heapq.heappush(self._due, (when, next(self._numbers), call))
        if self._due[0][2] is call:
            self._arm()

    def _arm(self) -> None:
        set_timer(self.fd, max(self._due[0][0], time.perf_counter() + 1e-6))  # 0 or the past would disarm it

    def on_readable(self) -> None:
        """Makes the calls that are due."""
        try:
            os.read(self.fd, 8)
        except BlockingIOError:
            return  # it was set anew after it had fired
        while self._due and self._due[0][0] <= time.perf_counter():
            heapq.heappop(self._due)[2]()
        if self._due:
            self._arm()
