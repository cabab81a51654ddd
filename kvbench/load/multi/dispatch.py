"""Locust dispatchers of a load that is dealt out once, when it begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from locust import User
from locust.dispatch import UsersDispatcher
from locust.runners import WorkerNode


class DealtOnce(UsersDispatcher):
    """Locust's dispatcher among the workers of the beginning: the requests are dealt out to them, and to nobody else.

    Locust would spawn again, and move users, when a worker comes, goes or comes back.
    """

    @property
    def dispatch_in_progress(self) -> bool:
        """Always: Locust begins no other one on its own."""
        return True

    def add_worker(self, worker_node: WorkerNode) -> None: ...

    def remove_worker(self, worker_node: WorkerNode) -> None: ...


def fixed_shares(users_of: Callable[[str], int]) -> type[UsersDispatcher]:
    """Gives each worker ``users_of(its id)`` users at once."""

    class FixedShares(DealtOnce):
        def __init__(self, worker_nodes: list[WorkerNode], user_classes: list[type[User]]) -> None:
            super().__init__(worker_nodes, user_classes)
            self._shares = {node.id: {user_classes[0].__name__: users_of(node.id)} for node in worker_nodes}

        def new_dispatch(self, target_user_count: int, spawn_rate: float, user_classes: Any = None) -> None:
            self._rounds = iter([self._shares])

        def __next__(self) -> dict[str, dict[str, int]]:
            return next(self._rounds)

    return FixedShares
