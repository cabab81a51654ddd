"""The master's door: only who has shown the token, and is wanted, ever becomes one of Locust's workers.

Locust takes everybody who connects for a worker, deals users out to it, and starts its test again when one comes during
it. Here a stranger gets an answer to its greeting and nothing else: whatever more it sends is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from locust import __version__ as locust_version
from locust.env import Environment
from locust.rpc import Message
from locust.runners import MasterRunner

from kvbench.load.multi.wire import CALL, HELLO

_LOG = logging.getLogger(__name__)
_TOLD = 8
_HOST_CHARS = 64


class GuardedMaster(MasterRunner):
    """Locust's master behind the door.

    ``unwanted``: given a greeting's data and the node's name, why it is turned away, or None. ``welcome``: is given the
    same of one that was let in.
    """

    def __init__(
        self,
        environment: Environment,
        host: str,
        port: int,
        unwanted: Callable[[Mapping[str, Any], str], str | None],
        welcome: Callable[[Mapping[str, Any], str], None],
    ) -> None:
        self._unwanted, self._welcome = unwanted, welcome
        self.refused: list[str] = []  # what the first few strangers were told
        super().__init__(environment, host, port)

    def client_listener(self) -> NoReturn:
        """Locust's, which a message that is none would end."""
        while True:
            try:
                super().client_listener()
            except Exception as error:
                _LOG.debug("a message that cannot be read was dropped: %r", error)

    def handle_message(self, client_id: str, msg: Message) -> None:
        """``client_id``: who sent it, as the socket knows; ``msg.node_id``: as the sender says."""
        if client_id != msg.node_id:
            return
        if client_id in self.clients:
            super().handle_message(client_id, msg)
        elif msg.type == "client_ready":
            self.send_message("ack", client_id=client_id)  # without it the worker does not say who it is
        elif msg.type == HELLO and isinstance(msg.data, dict):
            self._on_hello(msg.data, client_id)

    def _on_hello(self, data: Mapping[str, Any], node: str) -> None:
        why = self._unwanted(data, node)
        if why is not None:
            if len(self.refused) < _TOLD:
                self.refused.append(f"{ascii(str(data.get('host'))[:_HOST_CHARS])[1:-1]}: {why}")
            self.send_message(CALL, {"id": -1, "op": "refused", "why": why}, client_id=node)
            return
        super().handle_message(node, Message("client_ready", locust_version, node))
        self._welcome(data, node)
