"""Many clients of one server over keep-alive connections, as light as can be, that check every answer they get."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tests.support.soak_plan import ANSWER, BAD, LEAVE_EARLY, LEAVE_MID, Ask

PATIENCE_S = 60.0  # no single answer takes longer, or the server has stalled
FULL_QUEUE_PAUSE_S = 0.05


@dataclass
class Tally:
    """What the clients saw. ``statuses`` of the requests that were read to their end."""

    done: int = 0  # planned requests
    sent: int = 0  # requests: more, because a request that a full queue refuses is sent again
    statuses: Counter[int] = field(default_factory=Counter)
    left: int = 0  # gone before their answer was complete
    choices_answered: int = 0
    choices_left: int = 0  # requested by the clients that left
    probes: int = 0


class Connection:
    """One keep-alive connection, opened when needed."""

    def __init__(self, port: int):
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def send(self, raw: bytes) -> None:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writer.write(raw)

    def leave(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
        self._reader = self._writer = None

    async def head(self) -> tuple[int, dict[str, str]]:
        assert self._reader is not None
        lines = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:-2])}
        return int(lines[0].split(" ")[1]), headers

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        assert self._reader is not None
        size = int(await self._reader.readline(), 16)
        return (await self._reader.readexactly(size + 2))[:-2]

    async def body(self, headers: dict[str, str]) -> bytes:
        assert self._reader is not None
        if "content-length" in headers:
            return await self._reader.readexactly(int(headers["content-length"]))
        parts = []
        while part := await self.chunk():
            parts.append(part)
        return b"".join(parts)


class Soak:
    """``asks`` sent by ``workers`` clients side by side. ``at``: called after so many requests, for measurements."""

    def __init__(self, port: int, answers: dict[int, Any], at: dict[int, Callable[[], None]] | None = None):
        self.tally = Tally()
        self._port = port
        self._answers = answers  # of the probes
        self._at = dict(at or {})

    async def run(self, asks: Iterable[Ask], workers: int) -> Tally:
        queue = deque(asks)
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work(queue))
        return self.tally

    async def _work(self, queue: deque[Ask]) -> None:
        connection = Connection(self._port)
        try:
            while queue:
                ask = queue.popleft()
                async with asyncio.timeout(PATIENCE_S):
                    while not await self._taken(connection, ask):
                        await asyncio.sleep(FULL_QUEUE_PAUSE_S)
                self.tally.done += 1
                if measure := self._at.pop(self.tally.done, None):
                    measure()
        finally:
            connection.leave()

    async def _taken(self, connection: Connection, ask: Ask) -> bool:
        """Send ``ask`` and take what comes; False when the queue was full."""
        await connection.send(ask.http())
        self.tally.sent += 1
        if ask.kind == LEAVE_EARLY:
            if ask.leave_after:
                await asyncio.sleep(ask.leave_after)
            self._leave(connection, ask)
            return True
        status, headers = await connection.head()
        if ask.kind == LEAVE_MID and status == 200:
            for _ in range(int(ask.leave_after)):
                if not await connection.chunk():
                    break
            self._leave(connection, ask)
            return True
        body = await connection.body(headers)
        self.tally.statuses[status] += 1
        if status == 429:
            assert int(headers["retry-after"]) >= 1, headers
            return False
        if ask.kind == BAD or status != 200:
            assert status == ask.status, (ask, status, body)
            assert json.loads(body)["error"]["message"], body
        else:
            self._check(ask, body)
        return True

    def _leave(self, connection: Connection, ask: Ask) -> None:
        connection.leave()
        self.tally.left += 1
        self.tally.choices_left += ask.choices

    def _check(self, ask: Ask, body: bytes) -> None:
        """Every choice is there, has ended, and ``length`` means max_tokens."""
        assert ask.kind in (ANSWER, LEAVE_MID)
        said: list[list[int]] = [[] for _ in range(ask.choices)]
        reasons: list[str | None] = [None] * ask.choices
        answers, usage = _events(body) if ask.stream else _whole(body)
        for choice in answers:
            index = choice["index"]
            assert reasons[index] is None, f"choice {index} went on after its end"
            said[index] += choice["token_ids"]
            reasons[index] = choice["finish_reason"]
        for tokens, reason in zip(said, reasons, strict=True):
            assert reason in ("length", "stop"), (ask, reasons)
            assert len(tokens) == ask.max_tokens if reason == "length" else 1 <= len(tokens) <= ask.max_tokens
        assert usage["completion_tokens"] >= sum(map(len, said))
        self.tally.choices_answered += ask.choices
        if ask.probe is not None:
            self.tally.probes += 1
            known = self._answers.setdefault(ask.probe, said)
            assert said == known, f"probe {ask.probe} was answered otherwise on the idle server"


def _whole(body: bytes) -> tuple[list[Any], Any]:
    answer = json.loads(body)
    return answer["choices"], answer["usage"]


def _events(body: bytes) -> tuple[list[Any], Any]:
    parts = body.split(b"\n\n")
    assert parts[-2:] == [b"data: [DONE]", b""], parts[-3:]
    events = [json.loads(part.removeprefix(b"data: ")) for part in parts[:-2]]
    return [choice for event in events for choice in event["choices"]], events[-1]["usage"]
