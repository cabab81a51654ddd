"""Ends a launched server and removes its scratch folder when kvbench itself is killed outright.

    python -m kvbench.common.watchdog PID MARK [FOLDER]   (started by ``Watchdog``, stdin is a pipe that kvbench holds)

The pipe ends with kvbench, however that dies (SIGKILL, out of memory): then the server's family is killed and the
folder removed. Lines of the pipe name members of the family, which may be found by nothing else once the first process
has gone; a last word says that kvbench has done all this itself. A process of its own in a session of its own, since
the kernel's parent-death signal reaches the server's first process only, and a shell there passes nothing on.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

_RELEASED = b"released"


class Watchdog:
    """Watches over one launched server until ``release``."""

    def __init__(self, pid: int, mark: str, folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbench.common.watchdog", str(pid), mark, *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def watch(self, members: Iterable[psutil.Process]) -> None:
        """These belong to the server too."""
        assert self._process.stdin is not None
        lines = "".join(f"{each.pid} {each.create_time()!r}\n" for each in members if each.is_running())
        with contextlib.suppress(OSError):
            self._process.stdin.write(lines.encode())
            self._process.stdin.flush()

    def release(self) -> None:
        """The server is stopped: nothing is left to do."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(_RELEASED, timeout=10)


def main(pid: int, mark: str, folder: str | None = None) -> None:
    """Waits for the pipe's end."""
    told = sys.stdin.buffer.read()
    if told.endswith(_RELEASED):
        return
    from kvbench.common.processes import kill_family

    kill_family(pid, mark, filter(None, map(_member, told.decode().splitlines())))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _member(line: str) -> psutil.Process | None:
    """The process of a line of ``watch``; None when it has gone and its number may be somebody else's."""
    pid, _, created = line.partition(" ")
    try:
        process = psutil.Process(int(pid))
        return process if process.create_time() == float(created) else None
    except (psutil.Error, ValueError):
        return None


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
