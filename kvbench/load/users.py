"""The two kinds of Locust user: closed loop and open loop."""

from __future__ import annotations

import time

import gevent
from gevent.pool import Group
from locust import User, constant, task
from locust.exception import StopUser

from kvbench.load.client import StreamFailure, StreamingClient
from kvbench.load.requests import RequestSpec
from kvbench.load.session import LoadSession


class ClosedLoopUser(User):
    """Takes the next request off the shared list, one at a time, until the list is empty."""

    abstract = True
    wait_time = constant(0)
    session: LoadSession

    def on_start(self) -> None:
        """Connects and waits at the start line."""
        self.number = self.session.next_user()
        self.client = self.session.new_client()
        try:
            self.client.connect()
        except StreamFailure as failure:
            self.session.start_failure = failure
            raise StopUser from failure
        self.session.ready += 1
        self.session.go.wait()

    @task
    def one_request(self) -> None:
        """One request from send to end of stream."""
        session = self.session
        if session.stopping or session.server_gone or not session.pending:
            raise StopUser
        request, body = session.pending.popleft()
        session.perform(self.client, self.number, request, body)

    def on_stop(self) -> None:
        """Closes the connection."""
        self.client.close()


class OpenLoopUser(User):
    """Starts every request at its own time, whatever became of the ones before: one greenlet an arrival.

    Connections are kept and reused, last used first, so that a steady load opens few.
    """

    abstract = True
    wait_time = constant(0)
    session: LoadSession

    def on_start(self) -> None:
        """Opens a few connections and waits at the start line."""
        self.idle: list[StreamingClient] = []
        self.streams = Group()
        try:
            for _ in range(min(8, self.session.total)):
                client = self.session.new_client()
                client.connect()
                self.idle.append(client)
        except StreamFailure as failure:
            self.session.start_failure = failure
            raise StopUser from failure
        self.session.ready += 1
        self.session.go.wait()

    @task
    def all_arrivals(self) -> None:
        """Dispatches the whole list, then waits for the streams that are still open."""
        session = self.session
        while session.pending and not session.stopping and not session.server_gone:
            request, body = session.pending[0]
            due = session.zero + float(request.arrival_s or 0.0)
            left = due - time.perf_counter()
            if left > 0:
                gevent.sleep(min(left, 0.5))
                continue
            session.pending.popleft()
            self.streams.spawn(self._one, request, body, due)
        self.streams.join()
        raise StopUser

    def _one(self, request: RequestSpec, body: bytes, due: float) -> None:
        client = self.idle.pop() if self.idle else self.session.new_client()
        try:
            self.session.perform(client, 0, request, body, t0=due)
        finally:
            self.idle.append(client)

    def on_stop(self) -> None:
        """Ends what is still open and closes the connections."""
        self.streams.kill()
        for client in self.idle:
            client.close()
