"""A temporary folder of this process, and the removal of those whose process was killed before it could.

Each holds a file that its process has locked; the kernel drops the lock when the process dies in any way, so a folder
whose lock can be had is nobody's. The file appears under its name only once it is locked.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from pathlib import Path

_LOCK = ".lock"


class Scratch:
    """The folder at ``path``, kept until ``remove``. Those of the same ``prefix`` that were left behind go first."""

    def __init__(self, prefix: str) -> None:
        remove_stale(Path(tempfile.gettempdir()), prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix))
        new = self.path / f"{_LOCK}.new"
        self._lock = new.open("wb")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        new.rename(self.path / _LOCK)

    def remove(self) -> None:
        """Everything in it, too. Does nothing the second time."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def remove_stale(parent: Path, prefix: str) -> None:
    """Removes this user's folders of that name whose process has ended; what cannot be removed stays."""
    for folder in parent.glob(f"{prefix}*"):
        try:
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            with (folder / _LOCK).open("rb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: somebody works in it
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            continue
