"""A Locust dispatcher whose shares are said beforehand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from locust import User
from locust.dispatch import UsersDispatcher
from locust.runners import WorkerNode


def fixed_shares(users_of: Callable[[str], int]) -> type[UsersDispatcher]:
    """Gives each worker ``users_of(its id)`` users at once, once.

    The users of a lost worker are never moved to another, and one that comes later gets none.
    """

    class FixedShares(UsersDispatcher):
        def __init__(self, worker_nodes: list[WorkerNode], user_classes: list[type[User]]) -> None:
            super().__init__(worker_nodes, user_classes)
            self._dispatch_in_progress = True  # else Locust spawns users again when a worker comes, goes or comes back
            self._shares = {node.id: {user_classes[0].__name__: users_of(node.id)} for node in worker_nodes}

        def new_dispatch(self, target_user_count: int, spawn_rate: float, user_classes: Any = None) -> None:
            self._rounds = iter([self._shares])

        def __next__(self) -> dict[str, dict[str, int]]:
            return next(self._rounds)

        def add_worker(self, worker_node: WorkerNode) -> None: ...

        def remove_worker(self, worker_node: WorkerNode) -> None: ...

    return FixedShares
