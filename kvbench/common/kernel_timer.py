"""A file descriptor that becomes readable at an exact moment of perf_counter's clock: Linux's timerfd, else a pipe."""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import time
from _thread import allocate_lock, start_new_thread
from collections.abc import Callable
from itertools import count

_CLOCK_MONOTONIC, _ABSOLUTE = 1, 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_TIMES = ctypes.c_long * 4  # seconds and nanoseconds of the period, then of the first moment
_HAS_TIMERFD = hasattr(_LIBC, "timerfd_create")
_ONE = (1).to_bytes(8, "little")  # ticks since the last read, as a timerfd tells them


class _PipeTimer:
    """A thread that writes to a pipe at given moments, where the kernel has no timerfd (macOS).

    ``ends``: the descriptor that becomes readable, and the one that the thread writes to. The thread ends at the first
    tick after the first is closed. gevent's threads would be late by a millisecond, so ``kvbench.load`` imports this
    module before gevent patches.
    """

    def __init__(self) -> None:
        self.ends = os.pipe()
        for end in self.ends:
            os.set_blocking(end, False)
        self._changed = allocate_lock()  # released when the moment has changed
        self._changed.acquire()
        self._setting = allocate_lock()
        self._due, self._period = math.inf, 0.0
        start_new_thread(self._run, ())

    def set(self, first: float, period: float) -> None:
        with self._setting:
            self._due, self._period = first, period
            if self._changed.locked():
                self._changed.release()

    def _run(self) -> None:
        while True:
            with self._setting:
                left = self._due - time.perf_counter()
                if left <= 0:
                    self._due = self._due + self._period if self._period else math.inf
            if left > 0:
                self._changed.acquire(timeout=min(left, 1e6))
                continue
            try:
                os.write(self.ends[1], _ONE)
            except BlockingIOError:
                pass  # nobody reads
            except OSError:  # the owner closed the other end
                os.close(self.ends[1])
                return


_pipe_timers: dict[int, _PipeTimer] = {}  # by descriptor


def kernel_timer() -> int:
    """Opens a timer that is not set yet, for ``os.read`` and ``os.close``. Raises OSError."""
    if not _HAS_TIMERFD:
        timer = _PipeTimer()
        _pipe_timers[timer.ends[0]] = timer
        return timer.ends[0]
    fd = int(_LIBC.timerfd_create(_CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC))
    if fd < 0:
        raise OSError(ctypes.get_errno(), f"no timer: {os.strerror(ctypes.get_errno())}")
    return fd


def set_timer(fd: int, first: float, period: float = 0.0) -> None:
    """Makes ``fd`` readable at ``first`` [s, perf_counter] and every ``period`` [s] after."""
    if not _HAS_TIMERFD:
        _pipe_timers[fd].set(first, period)
        return
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
