"""The set-up of a child process before its program begins: its priority, whom it adopts, when it ends."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
MARK = "KVBENCH_LAUNCH"  # the variable that a child, and whoever it starts, is known by
NO_MARK = "0" * 32  # as long as one
_BACKGROUND_NICE = 5  # the load client gets the better priority where both share a small machine

_LIBC = ctypes.CDLL(None, use_errno=True)  # loaded before any fork: no import in the child
_PRCTL = getattr(_LIBC, "prctl", None)  # Linux alone; elsewhere only a watchdog ends what is left after a kill


def prepare_child(parent: int, background: bool, adopts: bool, death_signal: int) -> None:
    """Sets up the calling process, a new child of ``parent``.

    ``background``: at a lower priority and as a batch job. ``adopts``: it becomes the parent of its orphaned
    descendants. ``death_signal``: what the kernel sends it when ``parent`` ends.
    """
    if background:
        os.nice(_BACKGROUND_NICE)  # the kernel caps the sum at 19
        with contextlib.suppress(OSError, AttributeError):  # its wake-ups do not interrupt the load client (Linux)
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    if adopts and _PRCTL:
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    die_with(parent, death_signal)


def show_mark(mark: str) -> None:
    """Puts ``mark`` in place of ``NO_MARK`` into the environment that /proc shows, for a fork of another process.

    What this process forks shows it too; what it executes has the environment of ``os.environ``.
    """
    with open("/proc/self/stat") as stat:
        start, end = map(int, stat.read().rpartition(")")[2].split()[47:49])  # env_start and env_end, of man proc
    begin, placeholder = f"{MARK}=".encode(), NO_MARK.encode()
    at = ctypes.string_at(start, end - start).find(begin + placeholder)
    if at >= 0 and len(mark) == len(placeholder):
        ctypes.memmove(start + at + len(begin), mark.encode(), len(mark))


def die_with(parent: int, death_signal: int = signal.SIGKILL) -> None:
    """Makes this child get ``death_signal`` when ``parent`` ends, even by a kill; ends it if that is gone."""
    if _PRCTL:
        _PRCTL(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os._exit(1)
