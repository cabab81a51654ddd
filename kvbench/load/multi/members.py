"""The workers of one load: who takes part, who is lost, and how all are asked the same at once.

Local workers are started by the master and end with it; workers on other machines are started there by
``kvbench load --worker``.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event
from locust.env import Environment
from locust.rpc import Message
from locust.runners import HEARTBEAT_LIVENESS, WorkerNode

from kvbench import __version__
from kvbench.common import processes
from kvbench.load.multi.door import GuardedMaster
from kvbench.load.multi.shards import TOKEN_VARIABLE
from kvbench.load.multi.wire import CALL, CALL_LIMIT_S, EVENT, REPLY, Link, WorkerLost, proven

LOCAL_ARRIVAL_S = 60.0
LOST_S = 4.0  # without a heartbeat during the load
LEFT_S = 10.0  # the same while a worker has nothing to do: so long does it wait for a silent master, too
_LOOK_S = 0.25
_STOP_S = 5.0


class LoadStopped(Exception):
    """Somebody stopped the load before it began."""


@dataclass(frozen=True)
class Meeting:
    """Where workers come to, and how many. ``local``: the master starts them itself."""

    workers: int
    local: bool = True
    host: str = "127.0.0.1"
    port: int = 0
    arrive_s: float = LOCAL_ARRIVAL_S


class Members:
    """``wanted`` workers. ``links``: those that are there, in the order in which they were let in."""

    def __init__(self, env: Environment, meeting: Meeting, wanted: int) -> None:
        """Opens the port and starts the local workers. ValueError for a port that cannot be."""
        self.meeting, self.wanted = meeting, wanted
        self.links: list[Link] = []
        self.news = Event()  # a worker has ended
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            self.runner = env.runner = GuardedMaster(env, meeting.host, meeting.port, self._unwanted, self._welcome)
        except (Exception, SystemExit) as error:  # Locust ends the process when the port is taken
            raise ValueError(
                f"no workers can be awaited at {meeting.host}:{meeting.port} ({error}); give a free --bind-port."
            ) from error
        self.port = self.runner.master_bind_port = self.runner.server.port
        self.runner.register_message(REPLY, self._on_reply)
        self.runner.register_message(EVENT, self._on_event)
        if meeting.local:
            self._children = [self._launch() for _ in range(wanted)]

    def _launch(self) -> subprocess.Popen[bytes]:
        place = ("--master-host", self.meeting.host, "--master-port", str(self.port))
        command = [sys.executable, "-m", "kvbench.load", "--worker", *place]
        # In our own process group, so that whoever stops us stops them; they also end when we do (PDEATHSIG).
        return processes.launch(command, stdout=subprocess.DEVNULL, stderr=None, own_session=False)

    def _unwanted(self, data: Mapping[str, Any], node: str) -> str | None:
        if not proven(node, data.get("proof")):
            return f"it has another {TOKEN_VARIABLE} than the master"
        if data.get("version") != __version__:
            return f"it is kvbench {data.get('version')}, the master is {__version__}"
        return "the load has all its workers" if len(self.links) == self.wanted else None

    def _welcome(self, data: Mapping[str, Any], node: str) -> None:
        host, pid = str(data["host"]), int(data["pid"])
        self.links.append(
            Link(
                node,
                f"a worker (pid {pid} on {host})",
                host,
                pid,
                data.get("boot"),
                send=lambda call: self.runner.send_message(CALL, call, client_id=node),
            )
        )

    def _link_of(self, node: str) -> Link | None:
        return next((link for link in self.links if link.node == node), None)

    def _on_reply(self, msg: Message, **_: Any) -> None:
        if link := self._link_of(msg.node_id):
            link.on_reply(msg.data)

    def _on_event(self, msg: Message, **_: Any) -> None:
        if link := self._link_of(msg.node_id):
            link.done, link.failed = int(msg.data["done"]), int(msg.data["failed"])
            link.mute_s = 0.0
            if msg.data["event"] == "ended":
                link.ended, link.gone, link.signal = True, msg.data["gone"], msg.data["signal"]
                link.error = msg.data.get("error")
                self.news.set()

    def gather(self, stopped: Callable[[], bool]) -> None:
        """Until all have come; who goes again leaves a free place. WorkerLost when they do not in time; LoadStopped."""
        due = time.monotonic() + self.meeting.arrive_s
        while len(self.links) < self.wanted or self.ready < self.wanted:
            if stopped():
                raise LoadStopped
            for number, child in enumerate(self._children, 1):
                if child.poll() is not None:
                    raise WorkerLost(f"worker process {number} ended with exit code {child.returncode} before the load")
            if not self.meeting.local:
                self._let_go()
            if time.monotonic() > due:
                refused = f" (turned away: {'; '.join(self.runner.refused)})" if self.runner.refused else ""
                raise WorkerLost(
                    f"{len(self.links)} of {self.wanted} workers came within {self.meeting.arrive_s:g} s{refused}"
                )
            gevent.sleep(0.02)
        for number, link in enumerate(self.links, 1):
            link.name = f"worker {number} of {self.wanted} (pid {link.pid} on {link.host})"

    def _let_go(self) -> None:
        """Who has left makes room for another, and would have to come in by the door again."""
        for link in list(self.links):
            node = self._node(link)
            if node is not None and not _silent(node, LEFT_S):
                continue
            self.links.remove(link)
            self.runner.clients.pop(link.node, None)

    @property
    def ready(self) -> int:
        """How many can be given users."""
        return len(self.runner.clients.ready)

    def with_each(
        self,
        work: Callable[[Link, int], Any],
        stopped: Callable[[], bool] = lambda: False,
        silent_s: float = CALL_LIMIT_S,
    ) -> list[Any]:
        """``work(link, its place)`` for all at once; the first failure is raised when all have ended.

        Who is silent for ``silent_s`` meanwhile (a worker that has its hands full may be), or whose process ends,
        counts as lost. LoadStopped as soon as ``stopped``.
        """
        jobs = [gevent.spawn(_caught, work, link, place) for place, link in enumerate(self.links)]
        while not all(job.ready() for job in jobs):
            gevent.joinall(jobs, timeout=_LOOK_S)
            if stopped():
                gevent.killall(jobs)
                raise LoadStopped
            self.find_lost(silent_s)
        for job in jobs:
            if isinstance(job.value, Exception):
                raise job.value
        return [job.value for job in jobs]

    def find_lost(self, silent_s: float = LOST_S) -> str | None:
        """Why a worker is gone, if one is: its process ended (local), or its heartbeats did for ``silent_s``."""
        for link in self.links:
            child = next((c for c in self._children if c.pid == link.pid), None)
            node = self._node(link)
            if child is not None and child.poll() is not None:
                link.lose(f"its process ended ({_how(child.returncode)})")
            elif node is None:
                link.lose("it went away")
            elif _silent(node, silent_s):
                link.lose("its heartbeats stopped")
        return self.first_loss()

    def find_mute(self, passed_s: float) -> str | None:
        """Why one that lives is gone: it tells its progress 4 times a second, and did not for ``LEFT_S``.

        ``passed_s``: since this was asked last.
        """
        for link in self.links:
            link.mute_s += passed_s
            if not link.ended and link.mute_s > LEFT_S:
                link.lose(f"it told no progress for {LEFT_S:g} s")
        return self.first_loss()

    def _node(self, link: Link) -> WorkerNode | None:
        return self.runner.clients.get(link.node)

    def first_loss(self) -> str | None:
        """Why the first worker that counts as lost does."""
        return next((link.lost for link in self.links if link.lost is not None), None)

    def dismiss(self, code: int, why: str) -> None:
        """Sends all home with the load's exit code; local ones that do not go are killed. At most about 10 s."""
        told = "" if self.meeting.local else why  # the local ones' stderr is ours
        for link in self.links:
            if link.lost is None:
                gevent.spawn(ignoring_loss, lambda link=link: link.call("quit", 1.0, code=code, why=told))
        gevent.sleep(0.1)
        with gevent.Timeout(_STOP_S, False):
            self.runner.quit()
        due = time.monotonic() + _STOP_S
        lost = {link.pid for link in self.links if link.lost is not None}
        for child in self._children:
            if child.pid in lost:
                child.kill()
            while child.poll() is None and time.monotonic() < due:
                gevent.sleep(0.02)
            if child.poll() is None:
                child.kill()
                child.wait()


def ignoring_loss(work: Callable[[], Any]) -> Any:
    """What ``work`` returns; None when its worker is lost."""
    try:
        return work()
    except WorkerLost:
        return None


def _silent(node: WorkerNode, limit_s: float) -> bool:
    return node.heartbeat < HEARTBEAT_LIVENESS - limit_s  # Locust counts down once a second


def _caught(work: Callable[..., Any], *args: Any) -> Any:
    try:
        return work(*args)
    except Exception as error:
        return error


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
