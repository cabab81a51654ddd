"""A Ray cluster: its machines, and functions that run on them. Every ``import ray`` of kvbench is in this file.

A task is a generator that runs on one machine, with the resources that it asks for, and streams what it yields. No
wait is without an end: Ray's own would last for minutes, or for ever.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvbench.common.errors import UsageError
from kvbench.common.git import code_sha256, git_state
from kvbench.common.machine import environment
from kvbench.common.text import and_more, plural
from kvbench.ray.sentences import sentence

if TYPE_CHECKING:
    from ray import ObjectRefGenerator

_HTTP2_BEGIN = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
_REACH_S = 5.0  # until the head's port answers
MAX_LOST = 3  # processes or machines that one task may cost
_GONE = ("NodeDiedError", "TaskUnschedulableError", "LocalRayletDiedError")  # the machine, not the process alone
_RAYS_OWN = re.compile(r"node:|memory$|object_store_memory$")  # resources that hold addresses
_LOOK_S = 0.5  # how long one wait for tasks lasts
_CANCEL_S = 30.0  # a task stops its server within 13 s; after this its process is killed
_KILL_S = 10.0


@dataclass(frozen=True)
class ClusterNode:
    """A machine of the cluster. ``resources``: what Ray may hand out on it, by name."""

    node_id: str
    resources: Mapping[str, float] = field(hash=False)

    @property
    def name(self) -> str:
        """The beginning of Ray's id, which tells nothing of the machine's address."""
        return self.node_id[:8]


Needs = Callable[[ClusterNode], Mapping[str, float] | None]
"""What a task asks of a machine, by resource; None: the machine does not have it."""


@dataclass(eq=False)
class Task:
    """A generator that runs on ``node``. ``began``: whether anything of it has come; ``sent``: time.monotonic()."""

    node: ClusterNode
    stream: ObjectRefGenerator
    sent: float
    began: bool = False


@dataclass(frozen=True)
class Lost:
    """The end of a task whose process or machine died, or that could not begin. ``reason``: Ray's word for it."""

    reason: str
    began: bool = True


@dataclass(frozen=True)
class Raised:
    """The end of a task that raised ``error``, by the type that it had there."""

    error: Exception


@dataclass(frozen=True)
class TaskEnded:
    """The end of a task that has yielded everything."""


ENDS = (Lost, Raised, TaskEnded)


class Cluster:
    """A cluster that this process is connected to."""

    def nodes(self) -> list[ClusterNode]:
        """The machines that are alive, the one that this process is on first, then by their ids."""
        ray = _ray()
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != here, n["NodeID"]))
        nodes = []
        for node in alive:
            given = {name: number for name, number in node["Resources"].items() if not _RAYS_OWN.match(name)}
            nodes.append(ClusterNode(node["NodeID"], given))
        return nodes

    def is_alive(self, node: ClusterNode) -> bool:
        return any(other["NodeID"] == node.node_id and other["Alive"] for other in _ray().nodes())

    def start(
        self, node: ClusterNode, needs: Mapping[str, float], function: Callable[..., Iterator[Any]], *arguments: Any
    ) -> Task:
        """Runs the generator ``function(*arguments)`` on ``node``, as soon as what it ``needs`` is free there."""
        ray, asked = _ray(), {"CPU": 0, "GPU": 0, **needs}
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_returns="streaming", max_retries=0)(_run_in).options(
            num_cpus=asked.pop("CPU"),
            num_gpus=asked.pop("GPU"),
            resources=asked,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        )
        return Task(node, remote.remote(os.getcwd(), function, *arguments), time.monotonic())

    def next_of(self, tasks: Sequence[Task]) -> tuple[Task, Any] | None:
        """Waits 0.5 s at most for what one of the tasks yields, or one of ``ENDS``; None when nothing came."""
        ray = _ray()
        ready, _ = ray.wait([task.stream for task in tasks], num_returns=1, timeout=_LOOK_S)
        task = next((task for task in tasks if ready and task.stream is ready[0]), None)
        if task is None:
            return None
        try:
            value = ray.get(next(task.stream))
        except StopIteration:
            return task, TaskEnded()
        except ray.exceptions.RayTaskError as error:
            return task, Raised(error.cause if isinstance(error.cause, Exception) else error)
        except ray.exceptions.RayError as error:
            return task, Lost(type(error).__name__, task.began)
        task.began = True
        return task, value

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Ends the tasks: each gets a KeyboardInterrupt and time to stop what it has started, then it is killed."""
        ray = _ray()
        for force, limit_s in ((False, _CANCEL_S), (True, _KILL_S)):
            for task in tasks:
                with suppress(Exception):  # its machine is gone
                    ray.cancel(task.stream, force=force)
            deadline = time.monotonic() + limit_s
            while tasks and time.monotonic() < deadline:
                ended, end = self.next_of(tasks) or (None, None)
                tasks = [task for task in tasks if task is not ended or not isinstance(end, ENDS)]


@dataclass
class TaskSlots:
    """The places for tasks on machines, and what runs there.

    ``free``: the machine of each free place; ``needs``: what a task asks of a machine; ``wait_s``: until it has that
    free. A machine that is gone, or has not free what a task needs, loses its places.
    """

    cluster: Cluster
    free: list[ClusterNode]
    needs: Needs
    wait_s: float
    running: dict[Task, Any] = field(default_factory=dict)

    @property
    def left(self) -> bool:
        """Tests whether there is any place."""
        return bool(self.free or self.running)

    @property
    def nodes(self) -> set[ClusterNode]:
        """The machines that have places."""
        return {*self.free, *(task.node for task in self.running)}

    def submit(self, what: Any, node: ClusterNode, function: Callable[..., Iterator[Any]], *arguments: Any) -> None:
        """Begins ``function(*arguments)`` in a free place on ``node``; ``what`` stands for it in ``running``."""
        self.free.remove(node)
        self.running[self.cluster.start(node, self.needs(node) or {}, function, *arguments)] = what

    def next(self) -> tuple[Any, Any] | None:
        """``what`` runs, and what it has yielded or one of ``ENDS``; None when nothing came for 0.5 s.

        A task that could not begin in time is ``Lost``.
        """
        if (came := self.cluster.next_of(list(self.running))) is None:
            late = [t for t in self.running if not t.began and time.monotonic() - t.sent > self.wait_s]
            if not late:
                return None
            self.cluster.cancel(late[:1])
            came = late[0], Lost(sentence("machines.not_free", seconds=self.wait_s), began=False)
        task, value = came
        if not isinstance(value, ENDS):
            return self.running[task], value
        what = self.running.pop(task)
        lost = isinstance(value, Lost) and (not value.began or value.reason in _GONE)
        if lost or (isinstance(value, Lost) and not self.cluster.is_alive(task.node)):
            self.free = [node for node in self.free if node != task.node]
        else:
            self.free.append(task.node)
        return what, value

    def close(self) -> None:
        """Ends what runs."""
        self.cluster.cancel(list(self.running))
        self.running.clear()


@contextmanager
def cluster_at(address: str | None) -> Iterator[Cluster]:
    """A connection to the cluster at ``address`` (HOST:PORT of its head), None: the one that this machine is part of.

    Raises UsageError where Ray is not installed or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _ray()
    head = _reachable(address)
    try:
        ray.init(address=head, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        cluster = sentence("cluster.name", bool(address), address=address)
        raise UsageError(sentence("cluster.unusable", cluster=cluster, error=_line_of(error))) from None
    try:
        yield Cluster()
    finally:
        ray.shutdown()


@dataclass(frozen=True)
class MachineFacts:
    """The software of a machine of the cluster. ``code``: hash of kvbench's files; ``ray``: the version of Ray."""

    code: str
    environment: Mapping[str, Any]
    ray: str


@dataclass(frozen=True)
class Usable:
    """Machines that have what is needed and run the code of this one, and why others are ``left_out``."""

    nodes: Sequence[ClusterNode]
    facts: Mapping[str, MachineFacts]  # by node id
    left_out: Sequence[str]


def usable_nodes(cluster: Cluster, needs: Needs, needed: str, wait_s: float, say: Callable[[str], None]) -> Usable:
    """The machines that have what a task ``needs``, as soon as there is one; ``what``: it in words.

    Raises UsageError where after ``wait_s`` there is none.
    """
    deadline, is_said = time.monotonic() + wait_s, False
    while not (nodes := [node for node in cluster.nodes() if needs(node) is not None]):
        if time.monotonic() > deadline:
            machines = [_resources_of(node) for node in cluster.nodes()]
            listed = and_more(machines, 3, between="; ")
            number = plural(len(machines), "machine")
            raise UsageError(sentence("machines.none_has", needed=needed, machines=number, resources=listed))
        if not is_said:
            say(sentence("machines.waiting", needed=needed, seconds=wait_s))
        is_said = True
        time.sleep(min(_LOOK_S, wait_s))
    answers = _answers(cluster, needs, nodes, wait_s)
    code, left_out, facts = code_sha256(), [], {}
    for node in nodes:
        answer = answers[node.node_id]
        if isinstance(answer, MachineFacts) and answer.code != code:
            there, here = answer.environment["git"]["short_sha"], git_state()["short_sha"]
            answer = sentence("machines.other_code", there == here, there=there, here=here)
        if isinstance(answer, MachineFacts):
            facts[node.node_id] = answer
        else:
            left_out.append(sentence("machines.left_out", machine=node.name, reason=answer))
    if not facts:
        raise UsageError(sentence("machines.none_usable", reasons=and_more(left_out, 3, between="; ")))
    return Usable([node for node in nodes if node.node_id in facts], facts, left_out)


def _answers(
    cluster: Cluster, needs: Needs, nodes: Sequence[ClusterNode], wait_s: float
) -> dict[str, MachineFacts | str]:
    """Asks each machine for its facts; returns them, or why it cannot be used, by node id."""
    left = [cluster.start(node, needs(node) or {}, facts_of_machine) for node in nodes]
    deadline = time.monotonic() + wait_s
    answers: dict[str, MachineFacts | str] = dict.fromkeys(
        (node.node_id for node in nodes), sentence("machines.not_free", seconds=wait_s)
    )
    while left and time.monotonic() < deadline:
        task, answer = cluster.next_of(left) or (None, None)
        if task is None:
            continue
        if isinstance(answer, Raised):
            answer = sentence("machines.no_kvbench", error=_line_of(answer.error, -1))
        elif isinstance(answer, Lost):
            answer = sentence("machines.lost", reason=answer.reason)
        if not isinstance(answer, TaskEnded):
            answers[task.node.node_id] = answer
        if not isinstance(answer, MachineFacts):
            left.remove(task)
    cluster.cancel([task for task in left if not task.began])
    return answers


def _run_in(folder: str, function: Callable[..., Iterator[Any]], *arguments: Any) -> Iterator[Any]:
    """Runs ``function`` in ``folder`` where the machine has it: relative paths mean what they do here."""
    with suppress(OSError):
        os.chdir(folder)
    yield from function(*arguments)


def facts_of_machine() -> Iterator[MachineFacts]:
    """The facts of the machine on which it runs. Raises UsageError where Ray is not installed."""
    yield MachineFacts(code_sha256(), environment(), _ray().__version__)


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError(sentence("cluster.not_installed")) from None
    return ray


def _reachable(address: str | None) -> str:
    """HOST:PORT of the head, which listens: Ray itself would try for minutes. Raises UsageError."""
    from ray._private.services import canonicalize_bootstrap_address

    if address and "://" in address:
        raise UsageError(sentence("cluster.no_address", address=address))
    head = ""
    try:
        head = canonicalize_bootstrap_address(address or "auto") or ""
        host, _, port = head.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S) as connection:
            if os.environ.get("RAY_USE_TLS", "0") == "0":
                connection.sendall(_HTTP2_BEGIN)
                if connection.recv(9)[3:4] != b"\x04":  # gRPC's first frame of HTTP/2 has this type: settings
                    raise ConnectionError("this is no Ray")
    except (OSError, ValueError) as error:
        cluster = sentence("cluster.name", bool(address), address=address)
        where = sentence("cluster.head", head not in ("", address), head=head)
        silent = sentence("cluster.silent", address is not None, cluster=cluster, head=where, error=_line_of(error))
        raise UsageError(silent) from None
    return head


def _resources_of(node: ClusterNode) -> str:
    return ", ".join(sentence("machines.resource", name=name, amount=n) for name, n in node.resources.items())


def _line_of(error: BaseException, number: int = 0) -> str:
    return str(error).strip().split("\n")[number] or type(error).__name__
