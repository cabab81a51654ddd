"""Ends a launched server and removes its scratch folder when kvbench itself is killed outright.

    python -m kvbench.watchdog PID MARK [FOLDER]       (started by ``Watchdog``, stdin is a pipe that kvbench holds)

The pipe ends with kvbench, however that dies (SIGKILL, out of memory): then the server's family is killed and the
folder removed. A word in the pipe says that kvbench has done both itself. A process of its own in a session of its own,
since the kernel's parent-death signal reaches the server's first process only, and a shell there passes nothing on.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

_RELEASED = b"released"


class Watchdog:
    """Watches over one launched server until ``release``."""

    def __init__(self, pid: int, mark: str, folder: Path | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvbench.watchdog", str(pid), mark, *([str(folder)] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def release(self) -> None:
        """The server is stopped: nothing is left to do."""
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self._process.communicate(_RELEASED, timeout=10)


def main(pid: int, mark: str, folder: str | None = None) -> None:
    """Waits for the pipe's end."""
    if sys.stdin.buffer.read() == _RELEASED:
        return
    from kvbench.processes import kill_family

    kill_family(pid, mark)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
