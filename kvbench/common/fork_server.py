"""A process that has imported what others need, and forks itself for each of them (Linux).

    python -m kvbench.common.fork_server LISTENER NAMES MODULE...   (started by ``kvbench.common.preloaded``)

LISTENER is the number of an inherited socket; NAMES are beginnings of variables that may differ, with commas. The
modules are imported at the first request, so that a server nobody asks costs nothing. A connection is one child: the
first message is a ``ForkRequest`` with the child's three standard files, the answers are its process id and, when it
has ended, its exit code. Whoever asked closes the connection when it has the code; the child's number stays taken until
then. A connection that closes before (its other end was killed) gets the child its death signal. The server ends with
the pipe on its stdin, and with its last child.

The child goes on as ``python -m MODULE`` would, up to Python's own exit. It is refused where it would differ from one
that was started plainly: another environment (but for variables that are read later), directory of modules, user,
namespace, limit or priority.

The server must have no threads, since a fork copies only one, unless their library knows forks: OpenBLAS's end for one.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import io
import json
import os
import resource
import runpy
import signal
import socket
import struct
import sys
import warnings
from collections.abc import Sequence
from os import close, fork  # the system's own: a module that is imported may patch those of ``os``
from pathlib import Path
from select import POLLIN, poll
from typing import Any, NamedTuple

from kvbench.common.child_setup import MARK, prepare_child, show_mark

Socket, waitid = socket.socket, getattr(os, "waitid", None)  # as above; macOS has it from Python 3.13 on
MESSAGE_BYTES = 1 << 20
_READ_LATER = frozenset(
    {"PYTHONUNBUFFERED", "COLUMNS", "LINES", "PWD", "OLDPWD", "SHLVL", "_", "PATH", "NO_COLOR", "TMPDIR"}
)
# Threads whose library knows forks: pyarrow's allocator takes its locks before one, and the child has no such thread.
_KNOW_FORKS = frozenset({"jemalloc_bg_thd"})
_LIMITS = 16  # kinds of resource limits of Linux


class ForkRequest(NamedTuple):
    """A message that says what a child is to be; its stdin, stdout and stderr go with it.

    ``circumstances``: those of whoever asks. ``argv``: without the module's name.
    """

    module: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    background: bool
    own_session: bool
    death_signal: int
    circumstances: dict[str, Any]


def circumstances() -> dict[str, Any]:
    """Returns what a child inherits besides its environment, and where its code is: both sides must agree in it."""
    code = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    limits = [list(resource.getrlimit(number)) for number in range(_LIMITS)]
    spaces = [os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))]
    with open("/proc/self/status") as status:
        signals = [line.split() for line in status if line.startswith(("Umask", "SigBlk", "SigIgn"))]
    priority = [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
    return {
        "code": code,
        "python": sys.executable,
        "user": os.geteuid(),
        "limits": limits,
        "namespaces": spaces,
        "umask or signals": signals,
        "priority": priority,
        "cores": sorted(os.sched_getaffinity(0)),
    }


class _Child:
    """A child from its fork until its exit code is known to whoever asked for it."""

    def __init__(self, pid: int, death_signal: int, connection: Socket) -> None:
        self.pid, self.death_signal, self.connection = pid, death_signal, connection
        self.pidfd = os.pidfd_open(pid)
        self.ended = self.unwatched = False  # nobody waits for the code any more

    def tell(self) -> None:
        """Sends the exit code, when the child has ended."""
        end = waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self.ended = True
        with contextlib.suppress(OSError):
            _send(self.connection, code=end.si_status if end.si_code == os.CLD_EXITED else -end.si_status)

    def reap(self) -> None:
        waitid(os.P_PID, self.pid, os.WEXITED)
        close(self.pidfd)

    def lose(self) -> None:
        """Ends the child, whose other end has gone; a code that was told needs nothing more."""
        self.unwatched = True
        self.connection.close()
        if not self.ended:
            os.kill(self.pid, self.death_signal)


class ForkServer:
    """The server's loop. ``lifeline``: a descriptor that ends when the server is to end.

    ``reads_later``: beginnings of variables that the modules do not read when they are imported.
    """

    def __init__(self, listener: Socket, lifeline: int, modules: Sequence[str], reads_later: Sequence[str]) -> None:
        self._listener, self._lifeline, self._modules = listener, lifeline, modules
        self._reads_later = tuple(reads_later)
        self._start_env, self._circumstances = dict(os.environ), circumstances()
        self._folder = os.getcwd()  # which may be removed later
        self._added_env: dict[str, str] = {}  # by the modules
        self._loaded, self._unfit = False, ""
        self._poll = poll()
        self._callers: dict[int, Socket] = {}  # connections without a child yet
        self._children: dict[int, _Child] = {}  # by connection and by pidfd

    def serve(self) -> ForkRequest | None:
        """Serves until the lifeline ends; returns the request in each child, None in the server itself."""
        open_ = True
        self._poll.register(self._lifeline, POLLIN)
        self._poll.register(self._listener.fileno(), POLLIN)
        while open_ or self._children:
            for number, _ in self._poll.poll():
                if number == self._lifeline:
                    open_ = False
                    self._close()
                elif open_ and number == self._listener.fileno():
                    self._accept()
                elif number in self._callers:
                    request = self._answer(self._callers.pop(number))
                    if request is not None:
                        return request
                elif number in self._children:
                    self._watch(number, self._children[number])
        return None

    def _accept(self) -> None:
        try:
            number, _ = self._listener._accept()  # type: ignore[attr-defined]  # accept() makes a patched socket
        except OSError:  # it has gone, or no file is left
            return
        connection = Socket(fileno=number)
        user = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[1]
        if user != os.geteuid():
            connection.close()
            return
        self._callers[number] = connection
        self._poll.register(number, POLLIN)

    def _close(self) -> None:
        """Ends all children, when whoever started this server has gone."""
        self._poll.unregister(self._lifeline)
        self._poll.unregister(self._listener.fileno())
        self._listener.close()
        for number, connection in self._callers.items():
            self._poll.unregister(number)
            connection.close()
        self._callers.clear()
        for number, child in list(self._children.items()):
            if number != child.pidfd:
                self._watch(number, child)

    def _watch(self, number: int, child: _Child) -> None:
        """Acts when the child has ended (``number`` is its pidfd) or its connection closed."""
        self._poll.unregister(number)
        del self._children[number]
        if number == child.pidfd:
            child.tell()
        else:
            child.lose()
        if child.ended and child.unwatched:
            child.reap()

    def _answer(self, connection: Socket) -> ForkRequest | None:
        """Forks the child that is asked for, or says why not. Returns its request in the child."""
        self._poll.unregister(connection.fileno())
        data, files = _receive(connection)
        if not data or _has_gone(connection):
            for file in files:
                close(file)
            connection.close()
            return None
        parent, pid = os.getpid(), 0
        try:
            request = ForkRequest(**json.loads(data))
            why = "" if len(files) == 3 else "the three standard files did not arrive"
            why = why or self._why_not_forked(request) or self._why_unfit()
            if not why and (pid := fork()) == 0:
                self._become(request, files, parent, connection)
                return request
            child = None if why else _Child(pid, request.death_signal, connection)
        except (OSError, ValueError, TypeError) as error:  # no process or file is left, a folder is gone, no request
            if os.getpid() != parent:
                raise
            why, child = str(error), None
            if pid:  # it cannot be watched
                os.kill(pid, signal.SIGKILL)
                waitid(os.P_PID, pid, os.WEXITED)
        finally:
            for file in files:
                close(file)
        with contextlib.suppress(OSError):
            _send(connection, **({"pid": pid} if child else {"refused": why}))
        if child is None:
            connection.close()
            return None
        for number in (connection.fileno(), child.pidfd):
            self._children[number] = child
            self._poll.register(number, POLLIN)
        return None

    def _why_not_forked(self, request: ForkRequest) -> str:
        """Says in what a child of this server would differ from one that is started plainly; empty if in nothing."""
        own = json.loads(json.dumps(self._circumstances))
        if other := [name for name, value in own.items() if request.circumstances.get(name) != value]:
            return f"it has other {', '.join(other)}"
        names = {name for name, _ in request.env.items() ^ self._start_env.items()} - _READ_LATER
        if names := sorted(name for name in names if not name.startswith(self._reads_later)):
            return f"it has another environment: {', '.join(names)}"
        if request.cwd not in (self._folder, own["code"]) and _shadows(request.cwd):
            return f"its folder {request.cwd} has modules of its own"
        return ""

    def _why_unfit(self) -> str:
        """Imports the modules, once; says why their children would not work, empty if they would."""
        if not self._loaded:
            self._loaded = True
            try:
                for module in self._modules:
                    importlib.import_module(module)
                self._added_env = {k: v for k, v in os.environ.items() if self._start_env.get(k) != v}
                gc.freeze()  # collections in children would copy the pages of all objects
                close(os.pidfd_open(os.getpid()))  # OSError where the kernel has none
                self._unfit = _threads_after_a_fork()
            except Exception as error:
                self._unfit = f"{type(error).__name__}: {error}"
        return self._unfit

    def _become(self, request: ForkRequest, files: Sequence[int], parent: int, connection: Socket) -> None:
        """Makes this process, just forked, the child that ``request`` asks for."""
        if request.own_session:
            os.setsid()
        for place, file in enumerate(files):
            os.dup2(file, place)
        connection.close()
        self._listener.close()
        for other in self._callers.values():
            other.close()
        for number, child in self._children.items():
            if number == child.pidfd:
                close(number)
            else:
                child.connection.close()
        prepare_child(parent, request.background, request.own_session, request.death_signal)
        os.chdir(request.cwd)
        if sys.path[0] == self._folder and not sys.flags.safe_path:
            sys.path[0] = request.cwd
        os.environ.clear()
        os.environ.update({**self._added_env, **request.env})
        show_mark(request.env.get(MARK, ""))
        _renew_streams(bool(request.env.get("PYTHONUNBUFFERED")))
        if "tempfile" in sys.modules:
            sys.modules["tempfile"].tempdir = None  # TMPDIR may be another
        if "numpy.random" in sys.modules:  # random itself draws anew after a fork
            sys.modules["numpy.random"].seed()
        sys.modules.pop(f"{request.module}.__main__", None)  # it is about to run
        sys.argv = [request.module, *request.argv]
        sys.orig_argv = [sys.executable, "-m", *sys.argv]


def _shadows(folder: str) -> bool:
    """Tests whether a Python started in ``folder`` would find other modules there than those that are imported."""
    tops = {name.partition(".")[0] for name in sys.modules}
    with contextlib.suppress(OSError):
        return any(entry.partition(".")[0] in tops for entry in os.listdir(folder))
    return False


def _threads_after_a_fork() -> str:
    """Says which threads are left after a fork, before which some libraries end theirs; empty for none."""
    if (pid := fork()) == 0:
        os._exit(0)
    waitid(os.P_PID, pid, os.WEXITED)
    others = [number for number in os.listdir("/proc/self/task") if int(number) != os.getpid()]
    names = {Path(f"/proc/self/task/{number}/comm").read_text().strip() for number in others} - _KNOW_FORKS
    return f"its modules have started threads: {', '.join(sorted(names))}" if names else ""


def _renew_streams(unbuffered: bool) -> None:
    """Sets up stdout and stderr as Python does at its start. Those that modules have kept stay usable."""
    if unbuffered:
        for name, old in (("stdout", sys.stdout), ("stderr", sys.stderr)):
            raw = io.FileIO(old.fileno(), "wb", closefd=False)
            new = io.TextIOWrapper(raw, encoding=old.encoding, errors=old.errors, write_through=True)
            new.mode = "w"
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)
    elif os.isatty(1):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def _send(connection: Socket, **answer: Any) -> None:
    connection.send(json.dumps(answer).encode(), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def _has_gone(connection: Socket) -> bool:
    """Tests whether the other end is closed, as that of somebody who has not waited so long."""
    with contextlib.suppress(BlockingIOError):
        return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    return False


def _receive(connection: Socket) -> tuple[bytes, list[int]]:
    """One message and the files that came with it; nothing from a connection that was closed."""
    files = array.array("i")
    try:
        data, parts, _, _ = connection.recvmsg(MESSAGE_BYTES, socket.CMSG_LEN(3 * files.itemsize))
    except OSError:
        return b"", []
    for level, kind, content in parts:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(content[: len(content) - len(content) % files.itemsize])
    return data, list(files)


def _main(listener: str, reads_later: str, *modules: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # a kernel told to ignore it keeps no exit codes
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)  # see _KNOW_FORKS
    request = ForkServer(Socket(fileno=int(listener)), sys.stdin.fileno(), modules, reads_later.split(",")).serve()
    if request is None:
        os._exit(0)  # nothing is left to be taken apart
    runpy.run_module(request.module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main(*sys.argv[1:])
