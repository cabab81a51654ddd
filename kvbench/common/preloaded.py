"""Launches a module of ours by a fork of a process that has imported it already: kvbench/common/fork_server.py.

Importing takes a load client 0.9 s of CPU time and an engine's server 2.5 s. A fork has the memory layout of its
parent, and so have all children of one fork server. What ``kvbench compare`` and engine time count are launches,
each with a layout of its own (kvbench/lockstep/intervals.py): they start their engines plainly. Forked are load
clients, the built-in servers of sweeps, and the launches of ``kvbench claims``, which shift their memory by a random
number of pages (engine/lockstep.py). Code lies at the same addresses in all of them, and what that alone does to a
ratio is not known: 6 forks scattered by 3.4 %, 6 plain launches by 3.3 % on a noisy machine, which would hide 1 %. A
load's done.json says which (``server_forked``).

The plain start, which gives the same child, is used for other commands, where ``KVBENCH_NO_FORK=1``, on other systems
than Linux, and whenever the fork server does not start or refuses.

``KVBENCH_FORK_SERVERS`` in the environment names the servers that an ancestor shares with all below it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from types import TracebackType
from typing import IO

import psutil

from kvbench.common.child_setup import MARK, NO_MARK
from kvbench.common.fork_server import ForkRequest, circumstances
from kvbench.common.processes import Child, LaunchRequest

_OFF, _SHARED = "KVBENCH_NO_FORK", "KVBENCH_FORK_SERVERS"
_ANSWER_S = 120.0  # the imports, on a busy machine
_END_S = 5.0
_LOST_S = 2.0  # after the fork server's death, until its children are gone
_ANSWER_BYTES = 1 << 16
_log = logging.getLogger(__name__)


class Preloaded:
    """The children ``python -m MODULE`` of some ``modules``, forked from a server that has imported ``imports``.

    The server is started by the first launch, in this process, and ends with it. ``reads_later``: beginnings of
    variables that ``imports`` do not read when they are imported, and that may differ from child to child.
    """

    def __init__(self, modules: Sequence[str], *imports: str, reads_later: Sequence[str] = ()) -> None:
        self.modules, self.imports = tuple(modules), imports
        self._lock = threading.Lock()
        self._address: str | None = None
        self._owner = 0  # the process that started the server: a fork of it has none
        self._hangs = self._told = False
        self._reads_later = ("KVBENCH_", *reads_later)

    def start(self, launch: LaunchRequest) -> Child | None:
        """Forks the child; None if it is to be started plainly."""
        *begins, module = launch.command[:3]
        is_ours = begins == [sys.executable, "-m"] and module in self.modules
        if not is_ours or not launch.own_session or self._hangs or not _forks():
            return None
        with contextlib.ExitStack() as opened:
            try:
                connection = opened.enter_context(self._connected())
                child = _request(connection, module, launch)
            except (OSError, ValueError) as error:
                self._hangs = isinstance(error, TimeoutError)
                self._say_plain(str(error))
                return None
            opened.pop_all()
            return child

    def share(self) -> None:
        """Starts the server for this process and all below it, if no ancestor has."""
        if not _forks() or self._shared() is not None:
            return
        with self._lock:
            entries = [os.environ.get(_SHARED), f"{self.modules[0]}={self._started()}"]
        os.environ[_SHARED] = ",".join(filter(None, entries))

    def _shared(self) -> str | None:
        entries = (entry.partition("=") for entry in os.environ.get(_SHARED, "").split(","))
        return next((address for module, _, address in entries if module == self.modules[0]), None)

    def _connected(self) -> socket.socket:
        """A connection to the server, which may still be at its imports. OSError."""
        with self._lock:
            address = self._shared() or self._started()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.settimeout(_ANSWER_S)
            connection.connect(f"\0{address}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _started(self) -> str:
        """The address of this process's own server, started if it is the first launch."""
        if self._address is None or self._owner != os.getpid():
            self._address, self._owner = f"kvbench-{uuid.uuid4().hex}", os.getpid()
            _start_server(self._address, self._reads_later, self.imports)
        return self._address

    def _say_plain(self, why: str) -> None:
        if not self._told:
            self._told = True
            _log.info("%s is started plainly: %s", self.modules[0], why)


def _forks() -> bool:
    return hasattr(os, "pidfd_open") and os.environ.get(_OFF, "0") in ("", "0")


def _start_server(address: str, reads_later: Sequence[str], imports: Sequence[str]) -> None:
    """Starts a fork server. Whoever connects before it has begun waits in the listening socket's queue."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with listener:
        listener.bind(f"\0{address}")
        listener.listen(128)
        number = listener.fileno()
        server = subprocess.Popen(
            [sys.executable, "-m", "kvbench.common.fork_server", str(number), ",".join(reads_later), *imports],
            stdin=subprocess.PIPE,  # ends when this process does, however it dies
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=(number,),
            env={**os.environ, MARK: NO_MARK},  # a place for the children's own
            start_new_session=True,
        )
    atexit.register(_end_server, server, os.getpid())


def _end_server(server: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner and server.stdin is not None:
        server.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_S)


class _Pipes:
    """The files of a child and our ends of its pipes, as ``subprocess`` takes them."""

    def __init__(self, launch: LaunchRequest) -> None:
        self._opened: list[int] = []  # to close once the child has them
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        try:
            inner = self._file(launch.stdin, 0, "stdin")
            outer = self._file(launch.stdout, 1, "stdout")
            errors = outer if launch.stderr == subprocess.STDOUT else self._file(launch.stderr, 2, "stderr")
            self.files = [inner, outer, errors]
        except BaseException:
            self.close_all()
            raise

    def _file(self, given: int | IO[bytes] | None, own: int, name: str) -> int:
        if given is None:
            return own
        if given == subprocess.DEVNULL:
            self._opened.append(os.open(os.devnull, os.O_RDWR))
            return self._opened[-1]
        if given == subprocess.PIPE:
            reading, writing = os.pipe()
            theirs, ours, mode = (reading, writing, "wb") if own == 0 else (writing, reading, "rb")
            self._opened.append(theirs)
            setattr(self, name, os.fdopen(ours, mode))
            return theirs
        return given if isinstance(given, int) else given.fileno()

    def close_theirs(self) -> None:
        for number in self._opened:
            os.close(number)
        self._opened.clear()

    def close_all(self) -> None:
        self.close_theirs()
        for pipe in (self.stdin, self.stdout, self.stderr):
            if pipe is not None:
                pipe.close()


def _request(connection: socket.socket, module: str, launch: LaunchRequest) -> Child:
    """Asks for a child. OSError where the server has gone, ValueError where it refuses."""
    request = ForkRequest(
        module=module,
        argv=list(launch.command[3:]),
        env=dict(launch.env),
        cwd=os.path.abspath(launch.cwd or os.getcwd()),
        background=launch.background,
        own_session=launch.own_session,
        death_signal=int(launch.death_signal),
        circumstances=circumstances(),
    )
    pipes = _Pipes(launch)
    try:
        socket.send_fds(connection, [json.dumps(request._asdict()).encode()], pipes.files)
        answer = json.loads(connection.recv(_ANSWER_BYTES) or '{"refused": "the fork server has ended"}')
        if "refused" in answer:
            raise ValueError(answer["refused"])
    except BaseException:
        pipes.close_all()
        raise
    pipes.close_theirs()
    return ForkedChild(answer["pid"], launch, pipes, connection)


class ForkedChild(Child):
    """A child of a fork server, with what ``subprocess.Popen`` offers. It gets its death signal when this is gone."""

    forked = True

    def __init__(self, pid: int, launch: LaunchRequest, pipes: _Pipes, connection: socket.socket) -> None:
        self.pid, self.args, self.mark = pid, launch.command, launch.mark
        self.stdin, self.stdout, self.stderr = pipes.stdin, pipes.stdout, pipes.stderr
        self.returncode: int | None = None
        self._connection, self._death_signal = connection, launch.death_signal
        self._lock = threading.Lock()
        connection.setblocking(False)

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(BlockingIOError):
                    self._receive_code()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        waiting = select.poll()
        waiting.register(self._connection.fileno(), select.POLLIN)
        while (code := self.poll()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            waiting.poll(None if left is None else left * 1000 + 1)
        return code

    def _receive_code(self) -> None:
        try:
            answer = self._connection.recv(_ANSWER_BYTES)
        except ConnectionError:
            answer = b""
        self.returncode = json.loads(answer)["code"] if answer else self._lost()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # the server lets the pid go; who waits is woken

    def _lost(self) -> int:
        """The code of a child whose fork server was killed: the kernel has sent it its death signal."""
        deadline = time.monotonic() + _LOST_S
        while psutil.pid_exists(self.pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        return -int(self._death_signal)

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:  # until we have its code, nobody else gets its pid
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> ForkedChild:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for pipe in (self.stdout, self.stderr, self.stdin):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.wait()

    def __del__(self) -> None:
        self._connection.close()
