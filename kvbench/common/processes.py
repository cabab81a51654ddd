"""Child processes that never outlive us: own session, a lower priority, a bounded stop of the whole family.

A server starts helpers, and helpers change their process group, session or parent, or shed their environment. So a
child's family is everybody who descends from it, shares its session, or carries the mark that its environment got. On
Linux the child adopts its orphaned descendants (PR_SET_CHILD_SUBREAPER), so that also a daemon that has shed all three
descends from it as long as the child lives; ``Child.remember`` keeps the family in mind for when it does not.

    python -m kvbench.common.processes PID MARK [FOLDER]   (started by ``Child.watch``; we hold the pipe to its stdin)

is the watchdog of one child. The pipe ends when kvbench does, however that dies (SIGKILL, out of memory): then the
watchdog kills the child's family and removes the folder. It is needed since the kernel's parent-death signal reaches
the child's first process only, and a shell there passes nothing on.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

import psutil

from kvbench.common.child_setup import MARK, prepare_child

_KILLED_S = 2.0  # a killed process is gone as soon as the kernel has taken it apart
_RELEASED = b"released"
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)  # the latter is how a shell reports it


class Child:
    """A launched process. ``mark``: stands in its environment and its descendants', and so identifies its family.

    ``known``: members of its family that were seen while it lived. ``forked``: from a process that had imported it.
    The rest is as of ``subprocess.Popen``.
    """

    mark: str = ""
    forked: bool = False
    known: frozenset[psutil.Process] = frozenset()
    _watchdog: subprocess.Popen[bytes] | None = None
    pid: int
    returncode: int | None
    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def poll(self) -> int | None:
        raise NotImplementedError

    def wait(self, timeout: float | None = None) -> int:
        raise NotImplementedError

    def watch(self, folder: Path | None = None) -> None:
        """Starts a watchdog that kills the family and removes ``folder`` if we are killed before ``stop``."""
        self._watchdog = subprocess.Popen(
            [sys.executable, "-m", "kvbench.common.processes", str(self.pid), self.mark, *([folder] if folder else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def remember(self) -> frozenset[psutil.Process]:
        """Stores the family of now, so that ``stop`` and the watchdog find it even if the child dies first."""
        self.known |= family(self.pid, self.mark)
        if self._watchdog is not None and self._watchdog.stdin is not None:
            lines = "".join(f"{p.pid} {p.create_time()!r}\n" for p in self.known if p.is_running())
            with contextlib.suppress(OSError):
                self._watchdog.stdin.write(lines.encode())
                self._watchdog.stdin.flush()
        return self.known

    def release_watchdog(self) -> None:
        """Ends the watchdog, when the family is stopped."""
        if self._watchdog is not None:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self._watchdog.communicate(_RELEASED, timeout=10)
            self._watchdog = None


class _Started(subprocess.Popen[bytes], Child):
    """A child with an interpreter and a memory layout of its own."""


@dataclass(frozen=True)
class LaunchRequest:
    """The arguments of ``launch``. ``env``: the whole environment, with the ``mark``."""

    command: Sequence[str]
    stdin: int | IO[bytes] | None
    stdout: int | IO[bytes] | None
    stderr: int | IO[bytes] | None
    background: bool
    own_session: bool
    death_signal: signal.Signals
    env: Mapping[str, str]
    cwd: Path | None
    mark: str


class Starter(Protocol):
    """A quicker way to start some commands; None for one that is to be started plainly."""

    def start(self, launch: LaunchRequest) -> Child | None: ...


def launch(
    command: Sequence[str],
    *,
    stdout: int | IO[bytes],
    stderr: int | IO[bytes] | None,
    stdin: int = subprocess.DEVNULL,
    background: bool = False,
    own_session: bool = True,
    death_signal: signal.Signals = signal.SIGTERM,
    env: Mapping[str, str | None] | None = None,
    cwd: Path | None = None,
    preloaded: Starter | None = None,
) -> Child:
    """Starts ``command`` in a session (and so a process group) of its own; a terminal's Ctrl-C reaches only us.

    ``background``: at a lower priority and as a batch job, for a server that shares its cores with the load client.
    ``own_session`` False: in our process group, for one that is to be stopped together with us.
    ``death_signal``: what the kernel sends it when we are killed outright.
    ``env``: added to our environment; a variable that is None there is taken away.
    ``preloaded``: what forks the child instead, if it can (``kvbench.common.preloaded``).
    """
    mark = uuid.uuid4().hex
    merged = {**os.environ, **(env or {}), MARK: mark}
    whole = {name: value for name, value in merged.items() if value is not None}
    asked = LaunchRequest(list(command), stdin, stdout, stderr, background, own_session, death_signal, whole, cwd, mark)
    return (preloaded and preloaded.start(asked)) or _start_plainly(asked)


def _start_plainly(asked: LaunchRequest) -> Child:
    parent = os.getpid()
    process = _Started(
        asked.command,
        stdin=asked.stdin,
        stdout=asked.stdout,
        stderr=asked.stderr,
        start_new_session=asked.own_session,
        preexec_fn=lambda: prepare_child(parent, asked.background, asked.own_session, asked.death_signal),
        env=asked.env,
        cwd=asked.cwd,
    )
    process.mark = asked.mark
    return process


def stop(process: Child, grace_s: float = 6.0) -> int:
    """Sends TERM to the whole family, then KILL; returns the exit code after at most ``grace_s`` + 7 s.

    -SIGKILL when not even that has ended it in time: a process stuck in the kernel goes as soon as it gets out.
    """
    members = process.remember()
    _signal_family(process, signal.SIGTERM)
    _signal_family(process, signal.SIGCONT)  # a stopped process gets a TERM only when it goes on
    try:
        code = process.wait(timeout=grace_s)
    except subprocess.TimeoutExpired:
        _signal_group(process.pid, signal.SIGKILL)
        try:
            code = process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            code = -signal.SIGKILL
    kill_family(process.pid, process.mark, members)  # those that the leader left behind
    process.release_watchdog()
    return code


def _signal_family(process: Child, number: int) -> None:
    """Sends a signal to the child's process group and to all members of its family that ``remember`` has seen."""
    _signal_group(process.pid, number)
    _signal_each((p for p in process.known if _group(p) != process.pid), number)


def family(pid: int, mark: str) -> set[psutil.Process]:
    """The living descendants of ``pid``, the members of its session, and whoever carries ``mark``; without itself."""
    members = {p for p in psutil.process_iter() if p.pid not in (pid, os.getpid()) and _belongs(p, pid, mark)}
    with contextlib.suppress(psutil.Error):  # it has ended, and its children have another parent now
        members.update(psutil.Process(pid).children(recursive=True))
    return members


def kill_family(pid: int, mark: str, remembered: Iterable[psutil.Process] = ()) -> None:
    """Kills the group of ``pid`` and its family, ``remembered`` members first; waits until they are gone (2 s)."""
    _signal_group(pid, signal.SIGKILL)
    members = {*remembered, *family(pid, mark)}
    _signal_each(members, signal.SIGKILL)
    deadline = time.monotonic() + _KILLED_S
    while any(map(_runs, members)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE  # some inits do not reap
    except psutil.Error:
        return False


def _belongs(process: psutil.Process, pid: int, mark: str) -> bool:
    try:
        return os.getsid(process.pid) == pid or process.environ().get(MARK) == mark
    except (psutil.Error, OSError):  # it has ended, or it is somebody else's
        return False


def _group(process: psutil.Process) -> int | None:
    try:
        return os.getpgid(process.pid)
    except OSError:
        return None


def _signal_each(processes: Iterable[psutil.Process], number: int) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):  # psutil checks that the pid is still the same process
            process.send_signal(number)


def _signal_group(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is gone
        os.killpg(pid, number)


def how_it_ended(code: int) -> str:
    """Says ``was killed by signal 9`` or ``ended with exit code 1`` of a code; after a KILL also where to look."""
    how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if code not in _KILLED:
        return how
    return f"{how}, perhaps because memory ran out (`dmesg` or the container's log tells; a smaller kv_budget helps)"


def last_lines(path: Path, count: int = 8, limit: int = 1500, after: int = 0) -> str:
    """The last lines of a log as one text, for a message; empty when there is none. ``after``: bytes to skip."""
    try:
        with path.open("rb") as file:
            file.seek(max(after, path.stat().st_size - 16384))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join([line for line in text.splitlines() if line.strip()][-count:])[-limit:]


def _known_member(line: str) -> psutil.Process | None:
    """The process of a line of ``remember``; None when it has gone and its number may be another process's."""
    pid, _, created = line.partition(" ")
    try:
        process = psutil.Process(int(pid))
        return process if process.create_time() == float(created) else None
    except (psutil.Error, ValueError):
        return None


def _watchdog(pid: int, mark: str, folder: str | None = None) -> None:
    """Waits for the pipe's end, then ends what the child has left."""
    received = sys.stdin.buffer.read()
    if received.endswith(_RELEASED):
        return
    kill_family(pid, mark, filter(None, map(_known_member, received.decode().splitlines())))
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watchdog(int(sys.argv[1]), *sys.argv[2:])
