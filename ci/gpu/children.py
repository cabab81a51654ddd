"""A part as a child process: its output in a log, its time bounded, its whole process group gone afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.parent import die_with

STOP_GRACE_S = 5.0
MEANWHILE_S = 20.0


@dataclass(frozen=True)
class ChildEnd:
    """The end of a child. ``code``: exit code, negative for a signal. ``timed_out``: we stopped it."""

    code: int
    timed_out: bool
    seconds: float


class OnlyChild:
    """Runs at most one process at a time; ``stop`` may be called from a signal handler's exception path."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def run(
        self,
        command: Sequence[str],
        log: Path,
        seconds: float,
        cwd: Path,
        env: Mapping[str, str],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> ChildEnd:
        """Run a command to its end, or stop it after ``seconds``. ``meanwhile``: called every ``MEANWHILE_S``."""
        started, parent = time.monotonic(), os.getpid()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                list(command), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=cwd,
                env=dict(env), start_new_session=True, preexec_fn=lambda: die_with(parent),
            )  # fmt: skip
            try:
                while (left := started + seconds - time.monotonic()) > 0:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(timeout=min(left, MEANWHILE_S))
                        break
                    meanwhile()
                timed_out = self._process.poll() is None
                code = self.stop() if timed_out else self._process.returncode
            finally:
                self._signal(signal.SIGKILL)  # what it started and left behind, or all of it when we are interrupted
                self._process = None
        return ChildEnd(code, timed_out, time.monotonic() - started)

    def stop(self) -> int:
        """Ask the process to end, wait ``STOP_GRACE_S``, then kill it; its exit code."""
        assert self._process is not None
        for number in (signal.SIGINT, signal.SIGKILL):
            self._signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return self._process.wait(timeout=STOP_GRACE_S)
        return -signal.SIGKILL  # stuck in the kernel: it goes as soon as it gets out

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)
