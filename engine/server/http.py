"""The HTTP server around an engine's client: uvicorn, which stops on a signal after it has aborted the requests."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from engine.async_engine import EngineClient
from engine.server.app import create_app
from engine.server.arguments import ServeOptions
from engine.server.tokenizer import ServerTokenizer

GRACE_SECONDS = 2  # for handlers to send their last events after the requests have been aborted
EXIT_SIGNALS = (signal.SIGTERM, signal.SIGINT)


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
        create_app(engine, tokenizer, options.served_model_name),
        http="httptools",
        ws="none",
        loop="auto",  # uvloop where it is installed
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    return Server(config, engine, on_ready)
