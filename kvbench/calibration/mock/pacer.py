"""Calls functions at exact moments: asyncio's own timers are rounded to milliseconds."""

from __future__ import annotations

import asyncio
import heapq
import os
import time
from collections.abc import Callable
from itertools import count

from kvbench.common.kernel_timer import kernel_timer, set_timer


class Pacer:
    """A heap of due moments [s, perf_counter] behind one kernel timer (timerfd); asyncio's timers without one."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._armed = 0.0
        self._fd = kernel_timer()
        if self._fd >= 0:
            loop.add_reader(self._fd, self._on_timer)

    def at(self, when: float, call: Callable[[], None]) -> None:
        """``call()`` at ``when``; at the next turn of the loop if that is past."""
        if self._fd < 0:
            self._loop.call_later(max(0.0, when - time.perf_counter()), call)
            return
        heapq.heappush(self._due, (when, next(self._numbers), call))
        if self._due[0][0] == when:
            self._arm()

    def _arm(self) -> None:
        self._armed = self._due[0][0]
        set_timer(self._fd, max(self._armed, time.perf_counter() + 1e-6))  # 0 or the past would disarm it

    def _on_timer(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # it was set anew after it had fired
        due = self._due
        while due and due[0][0] <= time.perf_counter():
            heapq.heappop(due)[2]()
        if due:
            self._arm()
