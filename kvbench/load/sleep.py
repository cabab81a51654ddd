"""Waiting for a moment: gevent's own sleeps are rounded up to whole milliseconds, 0.7 ms late at the median."""

from __future__ import annotations

import heapq
import os
import time
from itertools import count

import gevent
from gevent.event import Event

from kvbench.common.kernel_timer import kernel_timer, set_timer


class Alarms:
    """Wakes greenlets at due moments by one kernel timer (timerfd), 0.1 ms late; by gevent's sleep without one."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self._fd = kernel_timer()
        if self._fd >= 0:
            self._watcher = gevent.get_hub().loop.io(self._fd, 1)
            self._watcher.start(self._on_timer)

    def wait_until(self, when: float) -> None:
        """Blocks the greenlet until ``when`` [s, perf_counter]; at once when that is past."""
        while (left := when - time.perf_counter()) > 0:
            if self._fd < 0:
                gevent.sleep(left)
                continue
            ring = Event()
            heapq.heappush(self._due, (when, next(self._numbers), ring))
            if self._due[0][2] is ring:
                self._arm()
            ring.wait()

    def close(self) -> None:
        """Gives the timer back; who still waits is not woken."""
        if self._fd >= 0:
            self._watcher.stop()
            self._watcher.close()
            os.close(self._fd)
            self._fd = -1

    def _arm(self) -> None:
        set_timer(self._fd, max(self._due[0][0], time.perf_counter() + 1e-6))  # 0 or the past would disarm it

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew after it had fired
        while self._due and self._due[0][0] <= time.perf_counter():
            heapq.heappop(self._due)[2].set()
        if self._due:
            self._arm()
