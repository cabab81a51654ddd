"""The cap on requests in flight: who waits in the client, and for how long."""

from __future__ import annotations

import time
from collections import deque

from gevent.event import Event


class Places:
    """``limit`` requests at once (None: any number); who comes first gets the next free place."""

    def __init__(self, limit: int | None) -> None:
        self._free = limit
        self._waiting: deque[Event] = deque()

    def take(self, due: float) -> float:
        """Takes a place, waiting for one if need be. Returns the seconds from ``due`` [s, perf_counter] until then.

        Exactly 0 where one was free: what made the request late then was not the cap.
        """
        if self._free is None:
            return 0.0
        if self._free > 0:
            self._free -= 1
            return 0.0
        turn = Event()
        self._waiting.append(turn)
        turn.wait()
        return time.perf_counter() - due

    def give(self) -> None:
        """Gives a place back, at once to whoever has waited longest."""
        if self._waiting:
            self._waiting.popleft().set()
        elif self._free is not None:
            self._free += 1
