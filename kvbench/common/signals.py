"""Signals that end a long command, as one exception in the main thread."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from kvbench.common.errors import Interrupted


class Interruption:
    """SIGINT, SIGTERM and SIGHUP (the terminal is gone) become one Interrupted in the main thread.

    Further ones are ignored, the way out is bounded; a SIGHUP that was ignored before (nohup) stays so.

    Python drops an exception that a signal handler raises inside a fork hook or a finaliser ("Exception ignored in
    ..."), and a sweep forks often: so ``check`` raises it again at the next place where it is called.
    """

    def __init__(self) -> None:
        self._name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    def check(self) -> None:
        if self._name is not None:
            raise Interrupted(self._name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._name is None:
            self._name = signal.Signals(number).name
            raise Interrupted(self._name)

    def __enter__(self) -> Interruption:
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            numbers.append(signal.SIGHUP)
        self._before = {number: signal.signal(number, self._handle) for number in numbers}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
