"""The event loop's end of the engine: outputs in order, waiting for one reader."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from engine.sequence import Request, TokenOutput

Abort = Callable[[str, str, int | None], None]
"""Take a request out of the engine: its id, the reason, and the one sequence that goes (None: all that are left)."""


class Delivery(NamedTuple):
    """One output on its way to a client. Times in seconds of ``time.monotonic``."""

    at: float  # the step that brought it ended
    scheduled_at: float | None  # the request was first scheduled
    output: TokenOutput


class OpenSequences:
    """The sequences that requests still have to end: (request id, index), index from 0 to n - 1."""

    def __init__(self) -> None:
        self._indices: dict[str, set[int]] = {}

    def open(self, request: Request) -> None:
        self._indices[request.request_id] = set(range(request.params.n))

    def close(self, request_id: str, index: int) -> bool:
        """Whether it was open."""
        indices = self._indices.get(request_id)
        if indices is None or index not in indices:
            return False
        indices.remove(index)
        if not indices:
            del self._indices[request_id]
        return True

    def close_all(self, request_id: str) -> list[int]:
        """The indices that were open."""
        return sorted(self._indices.pop(request_id, ()))

    def __contains__(self, request_id: str) -> bool:
        """Whether any sequence of the request is open."""
        return request_id in self._indices

    def __bool__(self) -> bool:
        return bool(self._indices)

    def request_ids(self) -> list[str]:
        return list(self._indices)


class OutputStream:
    """The outputs of the requests of one ``submit``, in order. Belongs to the event loop."""

    def __init__(self, requests: Sequence[Request], abort: Abort):
        self._abort = abort
        self._open = OpenSequences()
        for request in requests:
            self._open.open(request)
        self._ready: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Exception | None = None

    @property
    def done(self) -> bool:
        """Every sequence has ended and every output has been taken."""
        return not self._open and not self._ready

    def expects(self, request_id: str) -> bool:
        """Whether a sequence of this request has still to end."""
        return request_id in self._open

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

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence early on its reader's wish (a stop string): the engine counts it as stopped."""
        if self._open.close(request_id, index):
            self._abort(request_id, "stop", index)

    def close(self) -> None:
        """Abort what has not ended."""
        for request_id in self._open.request_ids():
            self._open.close_all(request_id)
            self._abort(request_id, "abort", None)

    def put(self, delivery: Delivery) -> None:
        """One more output, from the engine."""
        output = delivery.output
        if output.finish_reason is not None:
            self._open.close(output.request_id, output.index)
        self._ready.append(delivery)
        self._wake()

    def end(self, request_id: str, finish_reason: str, error: str) -> None:
        """The engine is done with the request: each open sequence gets a last output that says why."""
        now = time.monotonic()
        for index in self._open.close_all(request_id):
            self._ready.append(Delivery(now, None, TokenOutput(request_id, (), finish_reason, 0, error, index)))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
