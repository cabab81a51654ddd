"""Exit codes, the errors and signals that end a command, and the sentence for a full or lost disk."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from kvbench.common.secrets import hide_keys

EXIT_OK, EXIT_REGRESSION, EXIT_USAGE, EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_NOTHING = 0, 1, 2, 3, 4, 5
EXIT_INTERRUPTED = 130

_STORAGE = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some of your quota",
    errno.EFBIG: "allow larger files (ulimit -f)",
    errno.EROFS: "give a folder that can be written",
    errno.EACCES: "allow access to it",
    errno.EPERM: "allow access to it",
    errno.EIO: "look at the disk",
    errno.EISDIR: "move the folder that has its place away",
    errno.ENOTDIR: "move the file that has the place of its folder away",
    errno.ELOOP: "remove the link that leads to itself",
}


def storage_sentence(error: OSError, where: Path | str | None = None) -> str | None:
    """The sentence for a file that cannot be written or read; None for other errors of the operating system.

    ``where``: what was being written, for errors that name no file.
    """
    if (way_out := _STORAGE.get(error.errno or 0)) is None:
        return None
    reason = os.strerror(error.errno or 0)
    return f"{error.filename or where or 'a file'}: {reason}; {way_out}"


class UsageError(ValueError):
    """Bad input: the message is one sentence for the user with the value, the limit and the way out."""

    exit_code = EXIT_USAGE


@contextlib.contextmanager
def as_usage_error() -> Iterator[None]:
    """Raises a ValueError of the block, whose text is a sentence for the user, as a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


class MeasurementError(RuntimeError):
    """The measurement could not be taken (server died, load not driven, pages leaked).

    ``after``: how much of a load was done by then, in words; empty outside of loads. ``answered``: its requests that
    were, None before the first was due.
    """

    exit_code = EXIT_INVALID
    after = ""
    answered: int | None = None

    def __str__(self) -> str:
        return f"{self.after}: {super().__str__()}" if self.after else super().__str__()


class RefusedError(MeasurementError):
    """The server refused a request as wrong, and would refuse the same one again."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived; a KeyboardInterrupt so that no ``except Exception`` swallows it."""

    exit_code = EXIT_INTERRUPTED

    def __init__(self, signal_name: str) -> None:
        super().__init__(signal_name)
        self.signal_name = signal_name


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


def say(text: str) -> None:
    """Prints one line to stderr; a closed stderr is ignored."""
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def log_traceback(error: BaseException) -> str:
    """Writes the traceback to a temporary file; returns the words that name it."""
    path = Path(tempfile.gettempdir()) / f"kvbench-error-{time.strftime('%Y%m%dT%H%M%S')}-{os.getpid()}.log"
    try:
        path.write_text(hide_keys("".join(traceback.format_exception(error))), encoding="utf-8")
    except OSError:
        return "the traceback could not be written to a file"
    return f"the full traceback is in {path}"
