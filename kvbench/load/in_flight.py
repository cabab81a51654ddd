"""The cap on requests in flight: who waits in the client, and for how long."""

from __future__ import annotations

import time
from collections import deque

from gevent.event import AsyncResult


class Places:
    """``limit`` requests at once (None: any number); who comes first gets the next free place."""

    def __init__(self, limit: int | None) -> None:
        self._free = limit
        self._waiting: deque[AsyncResult] = deque()

    def take(self) -> float:
        """Takes a place, waiting for one if need be. Returns the seconds that there was none, counted from the call.

        Exactly 0 where one was free. Neither how late the caller came nor how long after the end of the stream that
        had the place before it goes on is in it: that is the client's own doing, not the cap's.
        """
        if self._free is None:
            return 0.0
        if self._free > 0:
            self._free -= 1
            return 0.0
        asked, turn = time.perf_counter(), AsyncResult()
        self._waiting.append(turn)
        return max(0.0, turn.get() - asked)

    def give(self, free_since: float) -> None:
        """Gives a place back, at once to whoever has waited longest; nobody has had it since then [s, perf_counter]."""
        if self._waiting:
            self._waiting.popleft().set(free_since)
        elif self._free is not None:
            self._free += 1
