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
from kvbench.common.git import code_sha256
from kvbench.common.machine import environment

if TYPE_CHECKING:
    from ray import ObjectRefGenerator

INSTALL = "install it here and on every machine of the cluster with: pip install 'kvbench[ray]'"
START = "start one with `ray start --head`, and `ray start --address HOST:6379` on the other machines"
_REACH_S = 5.0  # until the head's port answers
_LOOK_S = 0.5  # how long one wait for tasks lasts
_CANCEL_S = 30.0  # a task stops its server within 13 s; after this its process is killed
_KILL_S = 10.0


@dataclass(frozen=True)
class Node:
    """A machine of the cluster. ``resources``: what Ray may hand out on it, by name."""

    node_id: str
    resources: Mapping[str, float] = field(hash=False)

    @property
    def name(self) -> str:
        """The beginning of Ray's id, which tells nothing of the machine's address."""
        return self.node_id[:8]


@dataclass(eq=False)
class Task:
    """A generator that runs on ``node``. ``began``: whether anything of it has come; ``sent``: time.monotonic()."""

    node: Node
    stream: ObjectRefGenerator
    sent: float
    began: bool = False


@dataclass(frozen=True)
class Lost:
    """The end of a task whose process or machine died. ``reason``: Ray's word for it."""

    reason: str


@dataclass(frozen=True)
class Raised:
    """The end of a task that raised ``error``, by the type that it had there."""

    error: Exception


@dataclass(frozen=True)
class Ended:
    """The end of a task that has yielded everything."""


ENDS = (Lost, Raised, Ended)


class Cluster:
    """A cluster that this process is connected to."""

    def nodes(self) -> list[Node]:
        """Those that are alive, the one that this process is on first, then by their ids."""
        ray = _ray()
        here = ray.get_runtime_context().get_node_id()
        alive = sorted((n for n in ray.nodes() if n["Alive"]), key=lambda n: (n["NodeID"] != here, n["NodeID"]))
        return [Node(each["NodeID"], _resources(each["Resources"])) for each in alive]

    def is_alive(self, node: Node) -> bool:
        return any(each["NodeID"] == node.node_id and each["Alive"] for each in _ray().nodes())

    def start(
        self, node: Node, needs: Mapping[str, float], function: Callable[..., Iterator[Any]], *arguments: Any
    ) -> Task:
        """Runs the generator ``function(*arguments)`` on ``node``, as soon as what it ``needs`` is free there."""
        ray = _ray()
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        remote = ray.remote(num_returns="streaming", max_retries=0)(function).options(
            num_cpus=needs.get("CPU", 0),
            num_gpus=needs.get("GPU", 0),
            resources={name: value for name, value in needs.items() if name not in ("CPU", "GPU")},
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
        )
        return Task(node, remote.remote(*arguments), time.monotonic())

    def next_of(self, tasks: Sequence[Task]) -> tuple[Task, Any] | None:
        """What one of the tasks has yielded, or one of ``ENDS``; None when nothing came for 0.5 s."""
        ray = _ray()
        ready, _ = ray.wait([task.stream for task in tasks], num_returns=1, timeout=_LOOK_S)
        task = next((task for task in tasks if ready and task.stream is ready[0]), None)
        if task is None:
            return None
        try:
            found = ray.get(next(task.stream))
        except StopIteration:
            return task, Ended()
        except ray.exceptions.RayTaskError as error:
            return task, Raised(error.cause if isinstance(error.cause, Exception) else error)
        except ray.exceptions.RayError as error:
            return task, Lost(type(error).__name__)
        task.began = True
        return task, found

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Ends the tasks: each gets a KeyboardInterrupt and time to stop what it has started, then it is killed."""
        ray = _ray()
        for force, limit_s in ((False, _CANCEL_S), (True, _KILL_S)):
            for task in tasks:
                with suppress(Exception):  # its machine is gone
                    ray.cancel(task.stream, force=force)
            deadline = time.monotonic() + limit_s
            while tasks and time.monotonic() < deadline:
                task, found = self.next_of(tasks) or (None, None)
                tasks = [each for each in tasks if each is not task or not isinstance(found, ENDS)]


@contextmanager
def cluster_at(address: str | None) -> Iterator[Cluster]:
    """A connection to the cluster at ``address`` (HOST:PORT of its head), None: the one that this machine is part of.

    Raises UsageError where Ray is not installed or no cluster answers.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray = _ray()
    found = _reachable(address)
    try:
        ray.init(address=found, log_to_driver=False, logging_level="ERROR")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise UsageError(f"{_named(address)} cannot be used from here: {_first_line(error)}") from None
    try:
        yield Cluster()
    finally:
        ray.shutdown()


def ray_version() -> str:
    """The version of Ray here. Raises UsageError where it is not installed."""
    return _ray().__version__


def facts_of_machine() -> Iterator[dict[str, Any]]:
    """Of the machine on which it runs: ``code``: hash of kvbench's files; ``environment``; ``ray``: its version."""
    yield {"code": code_sha256(), "environment": environment(), "ray": ray_version()}


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise UsageError(f"Ray is not installed: {INSTALL}") from None
    return ray


def _reachable(address: str | None) -> str:
    """HOST:PORT of the head, which listens: Ray itself would try for minutes. Raises UsageError."""
    from ray._private.services import canonicalize_bootstrap_address

    if address and "://" in address:
        raise UsageError(f"--ray-address {address!r} is not HOST:PORT of the cluster's head, such as 10.0.0.1:6379")
    found = ""
    try:
        found = canonicalize_bootstrap_address(address or "auto") or ""
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except (OSError, ValueError) as error:
        where = f" at {found}" if found and found != address else ""
        way = START if address is None else f"give HOST:PORT of its head, or {START}"
        raise UsageError(f"{_named(address)} does not answer{where} ({_first_line(error)}): {way}") from None
    return found


def _named(address: str | None) -> str:
    return f"the Ray cluster at {address}" if address else "the Ray cluster of this machine"


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _resources(given: Mapping[str, float]) -> dict[str, float]:
    """Without Ray's own, which hold addresses."""
    return {name: value for name, value in given.items() if not re.match(r"node:|memory$|object_store_memory$", name)}
