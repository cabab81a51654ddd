"""A thread for the engine and asyncio queues for its clients.

    event loop                                    engine thread
    submit / abort / stats / reset  -- commands ->  run commands, then one step, then again
    OutputStream.get                <-- outputs --  one call_soon_threadsafe a step, not one a token

Everything that touches the engine runs on its thread, between two steps, so neither the engine nor the statistics
need a lock. An idle thread waits on a condition. Nothing waits for ever: a step that fails ends its requests with an
error, and an engine that cannot continue ends all requests and refuses new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from engine.counters import EngineStats
from engine.engine import Engine
from engine.sequence import Request, TokenOutput
from engine.sequence import Sequence as EngineSequence

UNHEALTHY_AFTER = 3  # failed steps in a row after which /health is 503; the engine continues
SHUTTING_DOWN = "the server is shutting down"

_log = logging.getLogger(__name__)


class EngineUnavailable(RuntimeError):
    """The engine accepts no more requests; the message says why."""


class Command(NamedTuple):
    work: Callable[[], Any]
    reply: asyncio.Future[Any] | None  # None: the result is not needed


def resolve(replies: list[tuple[asyncio.Future[Any], Any, Exception | None]]) -> None:
    """On the event loop: give each future its result or its error."""
    for reply, result, error in replies:
        if reply.done():  # cancelled meanwhile
            continue
        if error is None:
            reply.set_result(result)
        else:
            reply.set_exception(error)


def describe(error: BaseException) -> str:
    """The error's class and text."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


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
        """Whether any sequence of the request is open."""
        return request_id in self._indices

    def __bool__(self) -> bool:
        return bool(self._indices)

    def request_ids(self) -> list[str]:
        return list(self._indices)


class OutputStream:
    """The outputs of the requests of one ``submit``, in order. Used on the event loop only."""

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
        """Whether every sequence has ended and every output has been taken."""
        return not self._open and not self._ready

    def expects(self, request_id: str) -> bool:
        """Whether a sequence of this request has not ended."""
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
        """Abort the sequences that have not ended."""
        for request_id in self._open.request_ids():
            self._open.close_all(request_id)
            self._abort(request_id, "abort", None)

    def put(self, delivery: Delivery) -> None:
        """Add an output of the engine."""
        output = delivery.output
        if output.finish_reason is not None:
            self._open.close(output.request_id, output.index)
        self._ready.append(delivery)
        self._wake()

    def end(self, request_id: str, finish_reason: str, error: str) -> None:
        """End the request: each open sequence gets a last output with the reason."""
        now = time.monotonic()
        for index in self._open.close_all(request_id):
            self._ready.append(Delivery(now, None, TokenOutput(request_id, (), finish_reason, 0, error, index)))
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncEngine:
    """Owns ``engine`` from ``start`` to ``shutdown``. Call all methods on the event loop that called ``start``.

    ``thread``: the one that loaded the model (see ``EngineThread``).
    """

    def __init__(self, engine: Engine, thread: EngineThread | None = None):
        self.engine = engine
        self.config = engine.config
        self.model_info = engine.model_info
        self.last_stats: EngineStats = engine.stats()
        self._streams: dict[str, OutputStream] = {}  # event loop only
        self._live: dict[str, EngineSequence] = {}  # engine thread only: sequence 0 of each request
        self._open = OpenSequences()  # engine thread only: of the requests in _live
        self._failed_steps = 0  # in a row
        self._last_failure = ""
        self._condition = threading.Condition()  # guards the next three
        self._commands: list[Command] = []
        self._stopping = False
        self._failure: str | None = None
        self._thread = thread or EngineThread()
        self._running: Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # Event loop side.

    def start(self) -> None:
        """Start the engine's thread. Call on the event loop that serves."""
        self._loop = asyncio.get_running_loop()
        self._running = self._thread.submit(self._run)

    @property
    def failure(self) -> str | None:
        """Why the engine is unhealthy, or None."""
        if self._failure is not None:
            return self._failure
        if self._failed_steps >= UNHEALTHY_AFTER:
            return f"the last {self._failed_steps} steps failed: {self._last_failure}"
        return None

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue all ``requests`` or none of them; returns once they are queued.

        Raises:
            ValueError: a request could never run; the message is for the client.
            QueueFull: the waiting queue is full (also a ValueError).
            EngineUnavailable: the engine has failed or is shutting down.
        """
        stream = OutputStream(requests, self.abort)
        for request in requests:
            self._streams[request.request_id] = stream
        try:
            await self._call(lambda: self._add(requests))
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
            self._post(lambda: self._remove(request_id, reason, index), None)

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; False, with nothing done, while a sequence owns pages."""
        return await self._call(self.engine.reset_prefix_cache)

    async def stats(self, timeout_s: float = 2.0) -> EngineStats:
        """A snapshot between two steps; the last one taken if no step ends in time or the engine has failed."""
        with contextlib.suppress(TimeoutError, EngineUnavailable):
            self.last_stats = await asyncio.wait_for(self._call(self.engine.stats), timeout_s)
        return self.last_stats

    async def shutdown(self, timeout_s: float = 5.0) -> bool:
        """Abort everything and stop the thread; False if a step did not end within ``timeout_s``."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._end_all_streams("abort", SHUTTING_DOWN)
        if self._running is None:
            return True
        await asyncio.wait([asyncio.wrap_future(self._running)], timeout=timeout_s)
        return self._running.done()

    async def _call(self, work: Callable[[], Any]) -> Any:
        reply = asyncio.get_running_loop().create_future()
        self._post(work, reply)
        return await reply

    def _post(self, work: Callable[[], Any], reply: asyncio.Future[Any] | None) -> None:
        with self._condition:
            if self._failure is not None:
                raise EngineUnavailable(self._failure)
            if self._stopping:
                raise EngineUnavailable(SHUTTING_DOWN)
            self._commands.append(Command(work, reply))
            self._condition.notify()

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for delivery in deliveries:
            request_id = delivery.output.request_id
            stream = self._streams.get(request_id)
            if stream is None:
                continue  # aborted meanwhile
            stream.put(delivery)
            if not stream.expects(request_id):
                del self._streams[request_id]

    def _end_streams(self, request_ids: Sequence[str], finish_reason: str, error: str) -> None:
        for request_id in request_ids:
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.end(request_id, finish_reason, error)

    def _end_all_streams(self, finish_reason: str, error: str) -> None:
        self._end_streams(list(self._streams), finish_reason, error)

    # Engine thread side.

    def _run(self) -> None:
        try:
            while self._run_once():
                pass
        except BaseException as error:  # without its thread the engine cannot serve
            _log.exception("the engine cannot go on")
            self._fail(f"the engine cannot go on: {describe(error)}")

    def _run_once(self) -> bool:
        """Run the commands, then one step. False: stop."""
        with self._condition:
            while not (self._commands or self._stopping or self.engine.has_work()):
                self._condition.wait()
            commands, self._commands = self._commands, []
            stopping = self._stopping
        self._run_commands(commands)
        if stopping:
            self._remove_all(list(self._live), "abort")
            return False
        if self.engine.has_work():
            self._step()
        return True

    def _run_commands(self, commands: list[Command]) -> None:
        """Run ``commands`` and reply to all; then raise an error that is not a ValueError, which ends the engine."""
        replies = []
        fatal: Exception | None = None
        for work, reply in commands:
            result, error = None, None
            try:
                result = work()
            except ValueError as refused:
                error = refused
            except Exception as failed:
                fatal = failed
                error = EngineUnavailable(f"the engine cannot go on: {describe(failed)}")
            if reply is not None:
                replies.append((reply, result, error))
        if replies:
            self._to_loop(resolve, replies)
        if fatal is not None:
            raise fatal

    def _step(self) -> None:
        try:
            outputs = self.engine.step()
        except Exception as error:
            _log.exception("a step failed")
            self._fail_step(describe(error))
            return
        if outputs or not self.engine.pipelined:  # pipelined, a step that was only launched may still fail
            self._failed_steps = 0
        if not outputs:
            return
        now = time.monotonic()
        deliveries = []
        for output in outputs:
            seq = self._live.get(output.request_id)
            deliveries.append(Delivery(now, seq.first_scheduled if seq else None, output))
            if output.finish_reason is not None:
                self._close(output.request_id, output.index)
        self._to_loop(self._deliver, deliveries)

    def _fail_step(self, reason: str) -> None:
        """End the requests whose KV the step may have damaged (all if the engine names none); the others go on.

        If an abort raises, the engine fails.
        """
        self._failed_steps += 1
        self._last_failure = reason
        victims = self.engine.fail_step() or list(self._live)
        self._remove_all(victims, "error")
        error = f"the engine failed in a step that this request was part of: {reason}"
        self._to_loop(self._end_streams, victims, "error", error)
        if self.engine.has_work() and not self._live:
            raise RuntimeError(f"unknown requests are left in the engine after a failed step: {reason}")

    def _add(self, requests: Sequence[Request]) -> None:
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

    def _fail(self, reason: str) -> None:
        with self._condition:
            self._failure = reason
            commands, self._commands = self._commands, []
        unavailable = EngineUnavailable(reason)
        self._to_loop(resolve, [(reply, None, unavailable) for _, reply in commands if reply is not None])
        self._to_loop(self._end_all_streams, "error", reason)

    def _to_loop(self, function: Callable[..., None], *args: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has closed
            with self._condition:
                self._stopping = True
