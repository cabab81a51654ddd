"""Child processes that never outlive us: own process group, a lower priority, a bounded stop."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

_PR_SET_PDEATHSIG = 1
_BACKGROUND_NICE = 5  # the load client gets the better priority where both share a small machine


def _libc() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True)
    except OSError:
        return None


_LIBC = _libc() if sys.platform == "linux" else None  # loaded before any fork: no import in the child


def _in_child(background: bool) -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        if background:
            os.nice(_BACKGROUND_NICE)  # the kernel caps the sum at 19
            if hasattr(os, "SCHED_BATCH"):  # its wake-ups do not interrupt whoever runs, the load client above all
                with contextlib.suppress(OSError):
                    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        if _LIBC is not None:
            # When kvbench is killed outright (SIGKILL, OOM), the kernel tells its children.
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def launch(
    command: Sequence[str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes],
    background: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a session (and so a process group) of its own; a terminal's Ctrl-C reaches only us.

    ``background``: at a lower priority and as a batch job, for a server that shares its cores with the load client.
    """
    return subprocess.Popen(
        list(command),
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
        preexec_fn=_in_child(background),
        env={**os.environ, **(env or {})},
        cwd=cwd,
    )


def stop(process: subprocess.Popen[bytes], grace_s: float = 6.0) -> int:
    """TERM to the whole group, then KILL; returns the exit code. At most ``grace_s`` + 5 s.

    -SIGKILL when not even that has ended it in time: a process stuck in the kernel goes as soon as it gets out.
    """
    _signal_group(process, signal.SIGTERM)
    try:
        code = process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(process, signal.SIGKILL)
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
    _signal_group(process, signal.SIGKILL)  # grandchildren that the leader left behind
    return code


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
        os.killpg(process.pid, number)


def last_lines(path: Path, count: int = 8, limit: int = 1500) -> str:
    """The last lines of a log as one text, for a message; empty when there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])[-limit:]
