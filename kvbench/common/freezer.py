"""Stops a child's whole family for a while, and lets it go on: by a cgroup (v2), or by SIGSTOP where there is none.

A cgroup freezes every process of the family at one moment, those that it starts meanwhile too. It needs a folder below
our own cgroup that we may write (root on a machine of its own; rarely a container). SIGSTOP reaches the processes that
``Child.remember`` knew when the freezer was made, and everybody in the child's process group. SIGKILL ends a process
that either has frozen; SIGTERM waits until it is thawed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import psutil

from kvbench.common.errors import MeasurementError
from kvbench.common.processes import Child, signal_family

_STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
_FREEZE_LIMIT_S = 5.0  # a process deep in the kernel stops as it leaves it: what it does until then is still its own
_LOOK_S = 0.0002
_CGROUP_NAME = "kvbench-twin-"
_RUNS_ON = f"the server was still running {_FREEZE_LIMIT_S:g} s after it was frozen"


class Freezer(Protocol):
    """Freezes and thaws one family; both return when it is done. ``kind``: ``cgroup`` or ``signals``.

    Raises MeasurementError where it has not stopped within 5 s.
    ``freeze`` gives the moment [s, perf_counter] from which on nothing of it computes: a thread that was running is
    interrupted at once, one that waited for a core never gets to its own code. It may take long until all have stopped,
    on a busy machine, since each needs a core to do so.
    """

    kind: str

    def freeze(self) -> float: ...

    def thaw(self) -> None: ...


@contextmanager
def freezer_of(child: Child, cgroups: Path | None = None) -> Iterator[Freezer]:
    """A freezer of the child's family, which is thawed at the end. ``cgroups``: our own cgroup's folder, if not found.

    Nothing of it is left when we are killed: the child's watchdog kills what is frozen.
    """
    folder = _new_cgroup(child, cgroups or own_cgroup())
    freezer: Freezer = SignalFreezer(child) if folder is None else CgroupFreezer(folder)
    try:
        yield freezer
    finally:
        freezer.thaw()
        if folder is not None:
            _remove_cgroup(folder)


class SignalFreezer:
    """By SIGSTOP and SIGCONT."""

    kind = "signals"

    def __init__(self, child: Child) -> None:
        self._child, self._members = child, list(child.remember())
        with contextlib.suppress(psutil.Error):
            self._members.append(psutil.Process(child.pid))

    def freeze(self) -> float:
        signal_family(self._child, signal.SIGSTOP)
        at = time.perf_counter()
        if not _wait(lambda: all(map(_is_stopped, self._members))):
            raise MeasurementError(_RUNS_ON)
        return at

    def thaw(self) -> None:
        signal_family(self._child, signal.SIGCONT)


class CgroupFreezer:
    """By ``cgroup.freeze`` of the cgroup in ``folder``, which holds the family."""

    kind = "cgroup"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def freeze(self) -> float:
        with contextlib.suppress(OSError):  # removed by somebody
            (self._folder / "cgroup.freeze").write_text("1")
            at = time.perf_counter()
            if self._reaches("frozen 1"):
                return at
        raise MeasurementError(_RUNS_ON)

    def thaw(self) -> None:
        with contextlib.suppress(OSError):  # removed by somebody: nothing is frozen then
            (self._folder / "cgroup.freeze").write_text("0")
            self._reaches("frozen 0")

    def _reaches(self, state: str) -> bool:
        events = self._folder / "cgroup.events"
        return _wait(lambda: state in (text := events.read_text()) or "populated 0" in text)


def own_cgroup() -> Path | None:
    """The folder of the cgroup (v2) that we are in, None where none is mounted."""
    try:
        own = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        mounted = next(words[1] for words in mounts if words[2] == "cgroup2")
    except (OSError, StopIteration, IndexError):
        return None
    return Path(mounted + own.removeprefix("0::"))


def _new_cgroup(child: Child, parent: Path | None) -> Path | None:
    """A cgroup below ``parent`` with the child's family in it; None where we may not make one."""
    if parent is None:
        return None
    folder = parent / f"{_CGROUP_NAME}{os.getpid()}-{child.pid}"
    try:
        for left in parent.glob(f"{_CGROUP_NAME}*"):  # by one that was killed; one that is in use cannot be removed
            with contextlib.suppress(OSError):
                left.rmdir()
        folder.mkdir()
        if not (folder / "cgroup.freeze").exists():  # Linux before 5.2
            raise OSError
        for pid in (child.pid, *(each.pid for each in child.remember())):
            with contextlib.suppress(ProcessLookupError):
                (folder / "cgroup.procs").write_text(str(pid))
    except OSError:
        _remove_cgroup(folder)
        return None
    return folder


def _remove_cgroup(folder: Path) -> None:
    """Moves what is in it back to the cgroup above it, and removes it."""
    with contextlib.suppress(OSError):
        for pid in (folder / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                (folder.parent / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        folder.rmdir()


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() in _STOPPED
    except psutil.Error:
        return True


def _wait(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _FREEZE_LIMIT_S
    while not (ended := done()) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)
    return ended
