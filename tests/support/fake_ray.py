"""A cluster without Ray: its tasks run in this process, one yielded value at a time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.ray.cluster import Cluster, ClusterNode, Lost, Raised, Task, TaskEnded


def node(name: str, **resources: float) -> ClusterNode:
    return ClusterNode(name * 14, {"CPU": 4.0, **resources})


@dataclass
class FakeCluster(Cluster):
    """``members``: its machines; ``busy``: names of those on which nothing begins; ``dies``: by name after how many
    values of its tasks a machine is gone; ``started``: where each task ran.
    """

    members: list[ClusterNode]
    busy: Sequence[str] = ()
    dies: dict[str, int] = field(default_factory=dict)
    started: list[str] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)

    def nodes(self) -> list[ClusterNode]:
        return self.members

    def is_alive(self, node: ClusterNode) -> bool:
        return node in self.members

    def start(
        self, node: ClusterNode, needs: Mapping[str, float], function: Callable[..., Iterator[Any]], *arguments: Any
    ) -> Task:
        assert all(node.resources.get(name, 0.0) >= value for name, value in needs.items())
        self.started.append(node.name)
        return Task(node, function(*arguments), time.monotonic())  # type: ignore[arg-type]

    def next_of(self, tasks: Sequence[Task]) -> tuple[Task, Any] | None:
        for task in tasks:
            if task.node.name not in self.busy:
                return task, self._next(task)
        return None

    def _next(self, task: Task) -> Any:
        name = task.node.name
        if name in self.dies:
            self.dies[name] -= 1
            if self.dies[name] < 0:
                self.members = [each for each in self.members if each.name != name]
                return Lost("NodeDiedError", task.began)
        try:
            found = next(task.stream)
        except StopIteration:
            return TaskEnded()
        except Exception as error:
            return Raised(error)
        task.began = True
        return found

    def cancel(self, tasks: Sequence[Task]) -> None:
        self.cancelled += [task.node.name for task in tasks]
