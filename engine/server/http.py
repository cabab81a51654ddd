"""The HTTP server around an engine's client: uvicorn, which stops on a signal after it has aborted the requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from kvbench_engine.async_engine import EngineClient
from kvbench_engine.server.app import create_app
from kvbench_engine.server.arguments import ServeOptions
from kvbench_engine.server.streaming import DIRECT
from kvbench_engine.server.tokenizer import ServerTokenizer

GRACE_SECONDS = 2  # time for handlers to send their last events once the requests are aborted
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT)
PEER_SECONDS = 0.2  # between checks of a connection whose client has ended its side


class DirectWriter:
    """Writes parts of an answer at once, where ASGI's ``send`` is a coroutine that a task has to await."""

    def __init__(self, cycle: RequestResponseCycle):
        self._cycle = cycle

    def ready(self) -> bool:
        """Tests whether a part can be written now: the answer has begun, in chunks, and the client reads it."""
        cycle = self._cycle
        if cycle.flow.write_paused or cycle.disconnected or cycle.transport.is_closing():
            return False
        return cycle.response_started and bool(cycle.chunked_encoding) and not cycle.response_complete

    def write(self, part: bytes) -> None:
        """Write one chunk."""
        self._cycle.transport.write(b"%x\r\n%b\r\n" % (len(part), part))


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol with what that leaves out.

    A client may end its side of the connection after its request (RFC 9112, 9.6) and gets its answer. Until something
    is sent it looks like one that has closed its connection, whose system answers with a reset: so it is sent at once
    what every client ignores. HTTP/1.0 has nothing of the kind, so there a client that ends its side has left; it gets
    no chunks. Nothing is sent on a connection that is closing, for which uvloop raises.
    """

    def eof_received(self) -> bool:
        """Tells the event loop whether the connection stays open."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        if cycle.scope["http_version"] == "1.0":
            return False
        cycle.keep_alive = False
        if self.pipeline:
            return True
        if not cycle.response_started:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif cycle.chunked_encoding:  # events, of which this is a comment
            self.transport.write(b"3\r\n:\n\n\r\n")
        self._look_at_peer()
        return True

    def _look_at_peer(self) -> None:
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(PEER_SECONDS, self._look_at_peer)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            async def send_open(message: Any) -> None:
                if cycle.transport.is_closing():  # uvicorn tells only the last request of a connection
                    cycle.disconnected = True
                    cycle.message_event.set()
                if scope["http_version"] == "1.0":
                    end_by_closing(cycle, message)
                await send(message)

            extensions = scope.setdefault("extensions", {})
            extensions[DIRECT] = DirectWriter(cycle)
            try:
                await app(scope, receive, send_open)
            finally:
                del extensions[DIRECT]  # it holds the cycle, which holds the scope

        super()._start_asgi_task(cycle, guarded)


def end_by_closing(cycle: RequestResponseCycle, message: Any) -> None:
    """Prepare ``cycle`` to end its answer by closing the connection, unless the answer has a length."""
    if message["type"] == "http.response.start":
        if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
            cycle.chunked_encoding = False
    elif cycle.expected_content_length == 0:  # of this message
        cycle.expected_content_length = len(message["body"])


class Server(uvicorn.Server):
    """uvicorn's server; calls ``on_ready`` when it listens, and aborts the requests on a signal."""

    def __init__(self, config: uvicorn.Config, engine: EngineClient, on_ready: Callable[[], None]):
        super().__init__(config)
        self._engine = engine
        self._on_ready = on_ready

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: uvicorn would raise the signal again after a clean stop."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        for number in EXIT_SIGNALS:
            with contextlib.suppress(ValueError, RuntimeError):  # not the main thread: the caller stops us
                loop.add_signal_handler(number, self.stop)
        await super().startup(sockets=sockets)
        if self.started:
            self._on_ready()

    def stop(self) -> None:
        """Accept no more requests and abort the running ones."""
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        stopping = asyncio.create_task(self._engine.shutdown(GRACE_SECONDS))
        await super().shutdown(sockets=sockets)
        await stopping


def make_server(
    engine: EngineClient, tokenizer: ServerTokenizer, options: ServeOptions, on_ready: Callable[[], None]
) -> Server:
    """The server for a loaded engine, ready to ``serve(sockets=[...])``."""
    config = uvicorn.Config(
        create_app(engine, tokenizer, options),
        http=Protocol,
        ws="none",
        loop="auto",  # uvloop where it is installed
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return Server(config, engine, on_ready)
