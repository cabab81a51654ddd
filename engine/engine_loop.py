"""The engine's side of a server: takes commands between two steps and reports what the steps brought.

    client                                    engine loop, on one thread
    add / remove / stats / reset  -- port ->  run the commands, then one step, then again
    on_outputs, on_ended, ...     <- port --  one event a step, not one a token; names only when they change

The port joins a loop to its client: ``async_engine`` in one process, ``engine_process`` in two. All that
touches the engine is done here, between two steps, so neither the engine nor the statistics need a lock. An idle loop
waits for a command. A step that fails ends its requests with an error; an engine that cannot continue ends all
requests and refuses new ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from kvbench_engine.engine import Engine
from kvbench_engine.sequence import Request, TokenOutput
from kvbench_engine.sequence import Sequence as EngineSequence

_log = logging.getLogger(__name__)


class EngineUnavailable(RuntimeError):
    """The engine accepts no more requests; the message says why."""


class Command(NamedTuple):
    """A command to the loop.

    ``name``: a method of ``EngineLoop`` less its underscore (add, remove, reset_prefix_cache, stats, ping), or stop.

    ``reply``: the number under which the client waits for the result; None: it does not.
    """

    name: str
    args: tuple[Any, ...] = ()
    reply: int | None = None


STOP = Command("stop")
Reply = tuple[int, Any, Exception | None]
"""The number of a command, its result, its error."""


class Port(Protocol):
    """The loop's end of the connection to its client."""

    def receive(self, wait: bool) -> list[Command]:
        """The commands that have come, in order. ``wait``: wait for at least one. ``STOP`` when the client has gone."""
        ...

    def send(self, event: str, *args: Any) -> None:
        """Call the client's ``report``. Nothing happens if the client has gone."""
        ...


def describe(error: BaseException) -> str:
    """The error's class and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


class Recipient(NamedTuple):
    """A sequence that the client waits for: where its ordinary tokens go, and what comes with each of them."""

    request_id: str
    index: int
    num_cached_tokens: int
    scheduled_at: float | None  # seconds of ``time.monotonic``

    def delivery(self, at: float, token: int) -> Delivery:
        """Make the delivery of a token."""
        output = TokenOutput(self.request_id, (token,), None, self.num_cached_tokens, None, self.index)
        return Delivery(at, self.scheduled_at, output)


class Delivery(NamedTuple):
    """One output for a client. Times in seconds of ``time.monotonic``."""

    at: float  # end of the step
    scheduled_at: float | None  # when the request was first scheduled
    output: TokenOutput


class OpenSequences:
    """The sequences that have not ended, by (request id, index); index from 0 to n - 1."""

    def __init__(self) -> None:
        self._indices: dict[str, set[int]] = {}

    def open(self, request: Request) -> None:
        self._indices[request.request_id] = set(range(request.params.n))

    def close(self, request_id: str, index: int) -> bool:
        """Close a sequence; False if it was not open."""
        indices = self._indices.get(request_id)
        if indices is None or index not in indices:
            return False
        indices.remove(index)
        if not indices:
            del self._indices[request_id]
        return True

    def close_all(self, request_id: str) -> list[int]:
        """Close all sequences of a request; the indices that were open."""
        return sorted(self._indices.pop(request_id, ()))

    def __contains__(self, request_id: str) -> bool:
        """Tests whether any sequence of the request is open."""
        return request_id in self._indices

    def __bool__(self) -> bool:
        return bool(self._indices)

    def request_ids(self) -> list[str]:
        return list(self._indices)


class EngineLoop:
    """Owns ``engine`` while ``run`` runs."""

    def __init__(self, engine: Engine, port: Port):
        self.engine = engine
        self._port = port
        self._live: dict[str, EngineSequence] = {}  # sequence 0 of each request
        self._open = OpenSequences()  # of the requests in _live
        self._failed_steps = 0  # in a row
        self._sequences: list[EngineSequence] = []  # which the client knows as the recipients of ordinary tokens

    def run(self) -> None:
        """Run commands and steps until ``STOP``, which aborts everything, or until the engine cannot go on."""
        try:
            while self._run_once():
                pass
        except BaseException as error:  # without its loop the engine cannot serve
            _log.exception("the engine cannot go on")
            self._port.send("failed", f"the engine cannot go on: {describe(error)}")

    def _run_once(self) -> bool:
        """Run the commands, then one step. False: stop."""
        commands = self._port.receive(wait=not self.engine.has_work())
        started = time.monotonic()
        if not self._run_commands(commands):
            self._remove_all(list(self._live), "abort")
            return False
        self.engine.count_seconds("schedule", time.monotonic() - started)
        if self.engine.has_work():
            self._step()
        return True

    def _run_commands(self, commands: Sequence[Command]) -> bool:
        """Run ``commands`` up to ``STOP`` and reply to them; False if ``STOP`` was among them.

        An error that is not a ValueError ends the engine; it is raised after the replies.
        """
        replies: list[Reply] = []
        fatal: Exception | None = None
        handlers = {"add": self._add, "remove": self._remove, "stats": self.engine.stats}
        handlers |= {"reset_prefix_cache": self.engine.reset_prefix_cache, "ping": self._ping}
        for name, args, reply in commands:
            if name == STOP.name:
                return False
            result, error = None, None
            try:
                result = handlers[name](*args)
            except ValueError as refused:
                error = refused
            except Exception as failed:
                fatal = failed
                error = EngineUnavailable(f"the engine cannot go on: {describe(failed)}")
            if reply is not None:
                replies.append((reply, result, error))
        if replies:
            self._port.send("replies", replies)
        if fatal is not None:
            raise fatal
        return True

    def _step(self) -> None:
        try:
            outputs = self.engine.advance()
        except Exception as error:
            _log.exception("a step failed")
            self._fail_step(describe(error))
            return
        if self._failed_steps and (outputs or not self.engine.pipelined):  # a step only launched may still fail
            self._failed_steps = 0
            self._port.send("failed_steps", 0, "")
        if not outputs:  # a step of a prompt's part, or of beams, has no outputs
            self._ping()
            return
        now = time.monotonic()
        recipients = None
        if outputs.tokens and outputs.sequences != self._sequences:
            self._sequences = outputs.sequences
            recipients = [Recipient(s.request_id, s.index, s.num_cached, s.first_scheduled) for s in outputs.sequences]
        deliveries = []
        for output in outputs.others:
            seq = self._live.get(output.request_id)
            deliveries.append(Delivery(now, seq.first_scheduled if seq else None, output))
            if output.finish_reason is not None:
                self._close(output.request_id, output.index)
        self._port.send("outputs", now, recipients, outputs.tokens, deliveries)
        self.engine.count_seconds("output", time.monotonic() - now)

    def _ping(self) -> None:
        self._port.send("alive")

    def _fail_step(self, reason: str) -> None:
        """End the requests whose KV the step may have damaged (all if the engine names none); the others go on.

        If an abort raises, the engine fails.
        """
        self._failed_steps += 1
        victims = self.engine.fail_step() or list(self._live)
        self._remove_all(victims, "error")
        self._port.send("failed_steps", self._failed_steps, reason)
        error = f"the engine failed in a step that this request was part of: {reason}"
        self._port.send("ended", victims, "error", error)
        if self.engine.has_work() and not self._live:
            raise RuntimeError(f"unknown requests are left in the engine after a failed step: {reason}")

    def _add(self, requests: Sequence[Request]) -> None:
        """Queue all or none of them. Raises ValueError."""
        added: list[str] = []
        try:
            for request in requests:
                self._live[request.request_id] = self.engine.add_request(request)
                self._open.open(request)
                added.append(request.request_id)
        except ValueError:
            self._remove_all(added, "abort")
            raise

    def _remove_all(self, request_ids: Sequence[str], reason: str) -> None:
        for request_id in request_ids:
            self._remove(request_id, reason, None)

    def _remove(self, request_id: str, reason: str, index: int | None) -> None:
        if request_id not in self._live:
            return
        if index is None:
            self._open.close_all(request_id)
            del self._live[request_id]
        elif not self._close(request_id, index):
            return
        self.engine.abort(request_id, reason, index)

    def _close(self, request_id: str, index: int) -> bool:
        """Record that a sequence has ended, and with the last one its request; False if it had ended before."""
        was_open = self._open.close(request_id, index)
        if request_id not in self._open:
            self._live.pop(request_id, None)
        return was_open
