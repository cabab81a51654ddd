"""The engine in a process of its own: the HTTP server's work never holds its loop's interpreter lock.

    server process                               engine process
    HTTP, templates, tokens to text              loads the model, then runs ``EngineLoop`` on its main thread
    ProcessEngine  -- Unix socket, commands -->  _SocketPort
                   <-- one message an event --

A message is its length in 4 bytes and a pickled tuple; the outputs of a step are plain tuples, which cost a tenth of
named ones. The engine's process ends when the socket does, and the kernel kills it with its parent (Linux). If it dies
first, the client sees the end of the socket: all requests end with an error and /health says why. It ignores SIGINT
and SIGTERM, which reach the whole process group: the server's process stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any

from kvbench_engine.async_engine import EngineClient
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import EngineStats
from kvbench_engine.describe import describe_engine
from kvbench_engine.engine import Engine
from kvbench_engine.engine_loop import STOP, Command, Delivery, EngineLoop, Recipient
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.parent import die_with
from kvbench_engine.sequence import TokenOutput

_LENGTH = struct.Struct("=I")
_CHUNK = 2**18  # bytes read at once
_BUFFER = 2**22  # bytes of the socket's buffer, if the system allows: lets the engine run ahead of a busy server
_ENDED_S = 1.0  # wait for the end of a process whose socket has closed, or that was killed

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Loaded:
    """A loaded engine's only message before its first step. ``description``: see ``kvbench_engine.describe``."""

    config: EngineConfig
    model_info: ModelInfo
    capacity: KVCapacity
    stats: EngineStats
    description: dict[str, Any]


class _Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[tuple[Any, ...]]:
        """The messages that are complete with ``data``."""
        self._bytes += data
        messages, start = [], 0
        while len(self._bytes) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes, start)
            body = start + _LENGTH.size
            if len(self._bytes) < body + length:
                break
            messages.append(pickle.loads(self._bytes[body : body + length]))
            start = body + length
        del self._bytes[:start]
        return messages


def _frame(message: tuple[Any, ...]) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class _SocketPort:
    """The loop's end of the socket. Used on one thread."""

    def __init__(self, sock: socket.socket):
        self._socket = sock
        self._frames = _Frames()

    def receive(self, wait: bool) -> list[Command]:
        commands: list[Command] = []
        while True:
            try:
                data = self._socket.recv(_CHUNK, 0 if wait and not commands else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return commands
            except OSError:
                data = b""
            if not data:
                return [*commands, STOP]
            commands += [Command(*message) for message in self._frames.feed(data)]

    def send(self, event: str, *args: Any) -> None:
        if event == "outputs":  # plain tuples: a class costs ten times as much to pickle
            at, recipients, tokens, deliveries = args
            names = None if recipients is None else [tuple(recipient) for recipient in recipients]
            args = (at, names, tokens, [(delivery.scheduled_at, *delivery.output) for delivery in deliveries])
        with contextlib.suppress(OSError):  # the server has gone: ``receive`` notices
            self._socket.sendall(_frame((event, *args)))


LoadedEngine = Callable[[], AbstractContextManager[Engine]]
"""Loads an engine; the block is its life."""


def start_process(load: LoadedEngine) -> EngineSubprocess:
    """Fork a process that loads an engine and runs it. Call on the main thread while it is the only Python thread."""
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    context = multiprocessing.get_context("fork")  # quick, and ``load`` may be any function
    process = context.Process(target=_main, args=(load, ours, theirs, os.getpid()), name="engine")
    process.start()
    theirs.close()
    return EngineSubprocess(process, ours)


def _main(load: LoadedEngine, ours: socket.socket, theirs: socket.socket, parent: int) -> None:
    ours.close()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    die_with(parent)  # the socket's end comes late during a long load
    port = _SocketPort(theirs)
    try:
        with load() as engine:
            stats, description = engine.stats(), describe_engine(engine)
            port.send("loaded", Loaded(engine.config, engine.model_info, engine.capacity, stats, description))
            EngineLoop(engine, port).run()
    except ValueError as refused:  # only while loading: the loop raises nothing
        port.send("refused", str(refused))
    sys.stderr.flush()
    os._exit(0)  # what a library has registered for the exit may wait for its threads


class EngineSubprocess:
    """The process and our end of the socket, before there is an event loop."""

    def __init__(self, process: BaseProcess, sock: socket.socket):
        self.process = process
        self.socket = sock
        self.frames = _Frames()

    def wait_loaded(self) -> Loaded:
        """Wait until the engine is loaded; a load takes as long as it takes, and ends with its process.

        Raises:
            ValueError: the engine refuses its settings, in its own sentence.
            ChildProcessError: the process ended while loading.
        """
        while data := self.socket.recv(_CHUNK):
            for event, message in self.frames.feed(data):
                if event == "refused":
                    raise ValueError(message)
                return message
        raise ChildProcessError(
            f"{how_it_ended(self.process)} while it loaded the model: free memory, or take a smaller model or kv_budget"
        )

    def stop(self) -> None:
        """Kill the process if it still runs."""
        self.socket.close()
        self.process.kill()
        self.process.join(_ENDED_S)


def how_it_ended(process: BaseProcess) -> str:
    process.join(_ENDED_S)
    code = process.exitcode
    if code is None:
        return "the engine's process closed its socket"
    if code == -signal.SIGKILL:
        return "the engine's process was killed (signal 9, perhaps because memory ran out)"
    return f"the engine's process was killed by signal {-code}" if code < 0 else f"the engine's process ended ({code})"


class ProcessEngine(EngineClient, asyncio.Protocol):
    """The client of an engine in another process, which it stops at ``shutdown``. ``options``: see ``EngineClient``."""

    def __init__(self, child: EngineSubprocess, loaded: Loaded, **options: Any):
        super().__init__(loaded.config, loaded.model_info, loaded.capacity, loaded.stats, **options)
        self._child = child
        self._description = loaded.description
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Event = asyncio.Event()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=self._child.socket)

    def describe(self) -> dict[str, Any]:
        return {**self._description, "pid": os.getpid(), "engine_pid": self._child.process.pid}

    def process_ids(self) -> tuple[int, ...]:
        return os.getpid(), self._child.process.pid or 0

    def _send(self, command: Command) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(_frame(command))

    async def _ended(self, timeout_s: float) -> bool:
        if self._transport is None:
            return True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), timeout_s)
        in_time = self._closed.is_set()
        self._transport.abort()
        self._child.process.kill()
        return in_time

    def data_received(self, data: bytes) -> None:
        """Handle bytes of the engine's process; asyncio calls it."""
        for event, *args in self._child.frames.feed(data):
            if event == "outputs":
                at, names, tokens, rows = args
                recipients = None if names is None else [Recipient(*name) for name in names]
                deliveries = [Delivery(at, scheduled_at, TokenOutput(*output)) for scheduled_at, *output in rows]
                args = at, recipients, tokens, deliveries
            self.report(event, *args)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the engine's process; asyncio calls it."""
        self._closed.set()
        if not self._stopping and self._failure is None:
            reason = f"{how_it_ended(self._child.process)}: start the server again"
            _log.error("%s", reason)
            self.on_failed(reason)
