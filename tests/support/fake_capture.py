"""Stands in for CUDA's graph capture on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class FakeCapture:
    """Runs the body as a capture would, and again, on whatever lies in the buffers, as a replay.

    ``fails_at``: the number of the capture that raises what a stream under capture raises when it is waited for.
    """

    fails_at: int | None = None
    captured: int = 0
    replayed: int = 0

    def __call__(self, body: Callable[[], None]) -> Callable[[], None]:
        if self.captured == self.fails_at:
            raise RuntimeError("operation not permitted when stream is capturing\nmore lines")
        self.captured += 1
        body()

        def replay() -> None:
            self.replayed += 1
            body()

        return replay
