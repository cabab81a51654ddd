"""The one thread that ever computes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class EngineThread:
    """A daemon thread that runs what it is given, in order: the loading of the model first, then the engine.

    Why both on one thread: each thread that enters an OpenMP region gets a team of workers of its own, and once there
    are more OpenMP threads than cores, GNU OpenMP lets them spin for a moment only before they sleep. A model that was
    loaded and warmed up on another thread than the one that runs it decodes 1.25 to 1.5 times as slowly (2 cores,
    llama-32m: 15.4 ms a step of 3 sequences instead of 10.5, 27 ms of 16 instead of 22).
    Daemon, unlike a ThreadPoolExecutor's: a step that never ends must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Run ``function(*args)`` after what was given before; the future has its result or its exception."""
        future: Future[Any] = Future()
        self._work.put((future, lambda: function(*args)))
        return future

    def stop(self) -> None:
        """End after what was given before; does not wait."""
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
