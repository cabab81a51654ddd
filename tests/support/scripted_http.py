"""The scripted server in a thread of the test process (see ``fake_engine_server.ScriptedServer``)."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.fake_engine_server import Script, ScriptedServer, Wire

__all__ = ["ScriptedServer", "Wire", "scripted_server"]


@contextlib.contextmanager
def scripted_server(script: Script, **options: Any) -> Iterator[ScriptedServer]:
    """Serves ``script`` until the block ends, whatever is still being answered."""
    server, ready = ScriptedServer(script, **options), threading.Event()
    loop = asyncio.new_event_loop()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(server.run(ready.set))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        assert ready.wait(20), "the server did not start"
        yield server
    finally:
        loop.call_soon_threadsafe(server.stopping.set)
        thread.join(20)
