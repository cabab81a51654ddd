"""The event loop's end of the engine: outputs in order, waiting for one reader."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.sequence import TokenOutput


class Delivery(NamedTuple):
    """One output on its way to a client. Times in seconds of ``time.monotonic``."""

    at: float  # the step that brought it ended
    scheduled_at: float | None  # the request was first scheduled
    output: TokenOutput


class OutputStream:
    """The outputs of the requests of one ``submit``, in order. Belongs to the event loop."""

    def __init__(self, request_ids: Sequence[str], abort: Callable[[list[str], str], None]):
        self._abort = abort
        self._open = set(request_ids)
        self._ready: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Exception | None = None

    @property
    def done(self) -> bool:
        """Every request has ended and every output has been taken."""
        return not self._open and not self._ready

    async def get(self) -> list[Delivery]:
        """At least one delivery; waits for it. Raises what ``interrupt`` was given."""
        while not self._ready and self._interruption is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._interruption is not None:
            raise self._interruption
        ready, self._ready = self._ready, []
        return ready

    def interrupt(self, reason: Exception) -> None:
        """Make the reader's ``get`` raise ``reason``: its client has gone."""
        self._interruption = reason
        self._wake()

    def stop(self, request_id: str) -> None:
        """End one request early on its reader's wish (a stop string): the engine counts it as stopped."""
        if request_id in self._open:
            self._open.discard(request_id)
            self._abort([request_id], "stop")

    def close(self) -> None:
        """Abort what has not ended."""
        if self._open:
            self._abort(list(self._open), "abort")
            self._open.clear()

    def put(self, delivery: Delivery) -> None:
        """One more output, from the engine."""
        if delivery.output.finish_reason is not None:
            self._open.discard(delivery.output.request_id)
        self._ready.append(delivery)
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
