"""The server's client of the engine's loop, and the loop on a thread of this process.

Each request has an ``OutputStream``. The client hands commands to the loop and gets one call for all outputs of a step
(``engine_loop``). Whatever ends the engine, each stream gets an end and each command a reply. While it hangs
they wait, and ``failure`` says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import EngineStats
from kvbench_engine.describe import describe_engine
from kvbench_engine.engine import Engine
from kvbench_engine.engine_loop import (
    STOP,
    Command,
    Delivery,
    EngineLoop,
    EngineUnavailable,
    OpenSequences,
    Recipient,
    Reply,
)
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.sequence import Request, TokenOutput

UNHEALTHY_AFTER = 3  # failed steps in a row after which /health is 503; the engine continues
SHUTTING_DOWN = "the server is shutting down"


class EngineThread:
    """A daemon thread that runs functions in order: it loads the model, then steps the engine.

    Both on one thread, because each thread that enters an OpenMP region gets its own team of workers, and with more
    OpenMP threads than cores GNU OpenMP lets them spin only shortly before they sleep. A model loaded on another
    thread decodes 1.25 to 1.5 times as slowly (2 cores, llama-32m: 15.4 ms a step of 3 sequences instead of 10.5).
    A daemon, unlike a ThreadPoolExecutor's threads: a step that never ends must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``function(*args)`` after the earlier ones; the future gets its result or exception."""
        future: Future[Any] = Future()
        self._work.put((future, lambda: function(*args)))
        return future

    def stop(self) -> None:
        """End the thread after the functions submitted so far; does not wait."""
        self._work.put(None)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)


Abort = Callable[[str, str, int | None], None]
"""Ends a request: its id, the reason, and the index of the sequence to end (None: all that are left)."""


class OutputStream:
    """The outputs of the requests of one ``submit``, in order. Used on the event loop only.

    ``take``: is offered each token that ends nothing while a reader waits, and tells whether it took it. It spares the
    reader's task a turn of the event loop a token.
    """

    def __init__(self, requests: Sequence[Request], abort: Abort):
        self._abort = abort
        self._open = OpenSequences()
        for request in requests:
            self._open.open(request)
        self._ready: list[Delivery] = []
        self._waiter: asyncio.Future[None] | None = None
        self._interruption: Exception | None = None
        self.take: Callable[[Delivery], bool] | None = None

    @property
    def done(self) -> bool:
        """Tests whether every sequence has ended and every output has been taken."""
        return not self._open and not self._ready

    def expects(self, request_id: str) -> bool:
        """Tests whether a sequence of this request has not ended."""
        return request_id in self._open

    async def get(self) -> list[Delivery]:
        """Wait for at least one delivery. Raises the exception given to ``interrupt``."""
        while not self._ready and self._interruption is None:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._interruption is not None:
            raise self._interruption
        ready, self._ready = self._ready, []
        return ready

    def interrupt(self, reason: Exception) -> None:
        """Make ``get`` raise ``reason``: the client has disconnected."""
        self._interruption = reason
        self._wake()

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence at a stop string; the engine counts it as stopped."""
        if self._open.close(request_id, index):
            self._abort(request_id, "stop", index)

    def close(self) -> None:
        """Abort the sequences that have not ended, and let go of the reader."""
        self.take = None
        for request_id in self._open.request_ids():
            self._open.close_all(request_id)
            self._abort(request_id, "abort", None)

    def put(self, delivery: Delivery) -> None:
        """Add an output of the engine."""
        output = delivery.output
        if output.finish_reason is not None:
            self._open.close(output.request_id, output.index)
        elif self.take is not None and self._waited_for():
            try:
                if self.take(delivery):
                    return
            except Exception as error:
                self.interrupt(error)
        self._ready.append(delivery)
        self._wake()

    def end(self, request_id: str, finish_reason: str, error: str) -> None:
        """End the request: each open sequence gets a last output with the reason."""
        now = time.monotonic()
        for index in self._open.close_all(request_id):
            self._ready.append(Delivery(now, None, TokenOutput(request_id, (), finish_reason, 0, error, index)))
        self._wake()

    def _waited_for(self) -> bool:
        return self._waiter is not None and not self._waiter.done()

    def _wake(self) -> None:
        if self._waited_for():
            self._waiter.set_result(None)


class EngineClient(ABC):
    """The engine as the server sees it. Call all methods on the event loop that called ``start``.

    ``capacity`` and ``last_stats`` are the engine's when it was loaded, and the latest snapshot.
    ``watchdog_timeout_s``: how long the engine's loop may owe a sign of life, which it gives with every step and reply,
    before ``failure`` says so.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_info: ModelInfo,
        capacity: KVCapacity,
        stats: EngineStats,
        watchdog_timeout_s: float = math.inf,
    ):
        self.config = config
        self.model_info = model_info
        self.capacity = capacity
        self.last_stats = stats
        self._streams: dict[str, OutputStream] = {}
        self._recipients: list[Recipient] = []  # of the last step's ordinary tokens
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._stopping = False
        self._failure: str | None = None
        self._failed_steps = 0  # consecutive ones
        self._last_failure = ""
        self._watchdog_timeout_s = watchdog_timeout_s
        self._heard_at = 0.0  # when the loop last reported anything; times of ``time.monotonic``
        self._asked = False  # whether a command that the loop answers was sent after that
        self._owing_since = 0.0  # when the loop last began to owe a sign of life

    @abstractmethod
    async def start(self) -> None:
        """Start taking commands. Call on the event loop that serves."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Describe the engine for /server_info: see ``kvbench_engine.describe``."""

    @abstractmethod
    def process_ids(self) -> tuple[int, ...]:
        """The processes that make up the server, this one first."""

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Hand a command to the engine's loop; does not wait."""

    @abstractmethod
    async def _ended(self, timeout_s: float) -> bool:
        """Wait until the loop has ended after ``STOP``; False if it has not within ``timeout_s``."""

    @property
    def failure(self) -> str | None:
        """The reason for which the engine is unhealthy, or None."""
        if self._failure is not None:
            return self._failure
        if self._failed_steps >= UNHEALTHY_AFTER:
            return f"the last {self._failed_steps} steps failed: {self._last_failure}"
        silent_s = self._silent_s()
        if silent_s > self._watchdog_timeout_s:
            return (
                f"the engine has ended no step and answered no command for {silent_s:.0f} s: it hangs, or its process "
                "is stopped; if a step may take that long, raise --watchdog-timeout"
            )
        return None

    def _silent_s(self) -> float:
        """Seconds for which the loop has owed a sign of life; 0 while it owes none."""
        return time.monotonic() - max(self._owing_since, self._heard_at) if self._owes() else 0.0

    def _owes(self) -> bool:
        return self._asked or bool(self._streams)

    def _begin_to_owe(self) -> None:
        """Call before a stream or a question is added: a later one does not begin the wait again."""
        if not self._owes():
            self._owing_since = time.monotonic()

    def ping(self) -> None:
        """Ask the loop for a sign of life, unless a command waits for one. Does not wait: see ``failure``."""
        if not self._asked and self._failure is None and not self._stopping:
            self._ask(Command("ping"))

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue all ``requests`` or none of them; returns once they are queued.

        Raises:
            ValueError: a request could never run; the message is for the client.
            QueueFull: the waiting queue is full (also a ValueError).
            EngineUnavailable: the engine has failed or is shutting down.
        """
        stream = OutputStream(requests, self.abort)
        self._begin_to_owe()
        for request in requests:
            self._streams[request.request_id] = stream
        try:
            await self._call("add", requests)
        except BaseException as error:
            for request in requests:
                self._streams.pop(request.request_id, None)
            if isinstance(error, asyncio.CancelledError):
                stream.close()
            raise
        return stream

    def abort(self, request_id: str, reason: str = "abort", index: int | None = None) -> None:
        """End a request, or only its sequence ``index``, if it has not ended. Does not wait."""
        stream = self._streams.get(request_id)
        if stream is not None and (index is None or not stream.expects(request_id)):
            del self._streams[request_id]
        with contextlib.suppress(EngineUnavailable):  # a stopping engine aborts everything anyway
            self._post(Command("remove", (request_id, reason, index)))

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; False, with nothing done, while a sequence owns pages."""
        return await self._call("reset_prefix_cache")

    async def stats(self, timeout_s: float = 2.0) -> EngineStats:
        """A snapshot between two steps; the last one taken if no step ends in time or the engine has failed."""
        with contextlib.suppress(TimeoutError, EngineUnavailable):
            self.last_stats = await asyncio.wait_for(self._call("stats"), timeout_s)
        return self.last_stats

    async def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Abort everything and stop the engine's loop; False if a step did not end within ``timeout_s``."""
        if not self._stopping:
            self._stopping = True
            self._send(STOP)
        self._end_all("abort", SHUTTING_DOWN)
        return await self._ended(timeout_s)

    async def _call(self, name: str, *args: Any) -> Any:
        number, reply = next(self._numbers), asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        try:
            self._ask(Command(name, args, number))
            return await reply
        finally:
            self._replies.pop(number, None)

    def _ask(self, command: Command) -> None:
        """Post a command that the loop has to answer."""
        self._post(command)
        self._begin_to_owe()
        self._asked = True

    def _post(self, command: Command) -> None:
        if self._failure is not None:
            raise EngineUnavailable(self._failure)
        if self._stopping:
            raise EngineUnavailable(SHUTTING_DOWN)
        self._send(command)

    # The reports of the engine's loop.

    def report(self, event: str, *args: Any) -> None:
        """Call ``on_<event>``. Every report is a sign of life; "alive" is only that."""
        self._heard_at, self._asked = time.monotonic(), False
        if event != "alive":
            getattr(self, f"on_{event}")(*args)

    def on_outputs(
        self, at: float, recipients: list[Recipient] | None, tokens: list[int], deliveries: Sequence[Delivery]
    ) -> None:
        """Hand the outputs of one step, which ended at ``at``, to their streams.

        ``tokens``: one for each of ``recipients``; None: for those of the last call with tokens.
        """
        if recipients is not None:
            self._recipients = recipients
        streams = self._streams
        for recipient, token in zip(self._recipients, tokens, strict=True) if tokens else ():
            if (stream := streams.get(recipient.request_id)) is not None:  # not aborted meanwhile
                stream.put(recipient.delivery(at, token))
        for delivery in deliveries:
            request_id = delivery.output.request_id
            stream = streams.get(request_id)
            if stream is None:
                continue  # aborted meanwhile
            stream.put(delivery)
            if not stream.expects(request_id):
                del streams[request_id]

    def on_replies(self, replies: Sequence[Reply]) -> None:
        """Set the results of commands."""
        for number, result, error in replies:
            reply = self._replies.get(number)
            if reply is None or reply.done():  # cancelled meanwhile
                continue
            if error is None:
                reply.set_result(result)
            else:
                reply.set_exception(error)

    def on_ended(self, request_ids: Sequence[str], finish_reason: str, error: str) -> None:
        """End the streams of these requests: each open sequence gets a last output."""
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.end(request_id, finish_reason, error)

    def on_failed_steps(self, count: int, reason: str) -> None:
        """Note that ``count`` steps in a row have failed, the last one for ``reason``."""
        self._failed_steps, self._last_failure = count, reason

    def on_failed(self, reason: str) -> None:
        """The engine cannot go on: all requests end, all later ones are refused."""
        self._failure = reason
        self._end_all("error", reason)

    def _end_all(self, finish_reason: str, reason: str) -> None:
        self.on_ended(list(self._streams), finish_reason, reason)
        self.on_replies([(number, None, EngineUnavailable(reason)) for number in self._replies])


class _ThreadPort:
    """Joins a loop on a thread of this process to its client on the event loop."""

    def __init__(
        self, client: EngineClient, event_loop: asyncio.AbstractEventLoop, commands: queue.SimpleQueue[Command]
    ):
        self._client = client
        self._event_loop = event_loop
        self._commands = commands

    def receive(self, wait: bool) -> list[Command]:
        commands = [self._commands.get()] if wait else []
        while not self._commands.empty():
            commands.append(self._commands.get())
        return commands

    def send(self, event: str, *args: Any) -> None:
        try:
            self._event_loop.call_soon_threadsafe(self._client.report, event, *args)
        except RuntimeError:  # the event loop has closed
            self._commands.put(STOP)


class AsyncEngine(EngineClient):
    """Runs ``engine`` on a thread of this process from ``start`` to ``shutdown``.

    ``thread``: the one that loaded the model (see ``EngineThread``). ``options``: see ``EngineClient``.
    """

    def __init__(self, engine: Engine, thread: EngineThread | None = None, **options: Any):
        super().__init__(engine.config, engine.model_info, engine.capacity, engine.stats(), **options)
        self.engine = engine
        self._thread = thread or EngineThread()
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._running: Future[None] | None = None

    async def start(self) -> None:
        port = _ThreadPort(self, asyncio.get_running_loop(), self._commands)
        self._engine_loop = EngineLoop(self.engine, port)
        self._running = self._thread.submit(self._engine_loop.run)

    def describe(self) -> dict[str, Any]:
        return describe_engine(self.engine)

    def process_ids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    async def _ended(self, timeout_s: float) -> bool:
        if self._running is None:
            return True
        await asyncio.wait([asyncio.wrap_future(self._running)], timeout=timeout_s)
        return self._running.done()
