"""The two kinds of Locust user: closed loop and open loop."""

from __future__ import annotations

import time
from collections import deque

from gevent.event import AsyncResult
from gevent.pool import Group
from locust import User, constant, task
from locust.exception import StopUser

from kvbench.load.connection import StreamFailure
from kvbench.load.session import LoadSession, Returned
from kvbench.requests.request import RequestSpec

# A server may have a thread for each connection and few of them: one that waits on a connection held in reserve serves
# nobody else. Connections opened as they are needed, even 200 at once, made no request later than reserves did.
_OPEN_AT_START = 4


class InFlightCap:
    """Lets ``limit`` requests be in flight at once (None: any number). The longest waiting one is next."""

    def __init__(self, limit: int | None) -> None:
        self._free = limit
        self._waiting: deque[AsyncResult] = deque()

    def take(self) -> float:
        """Takes a place, waiting if none is free. Returns the seconds from the call until one became free, else 0.

        Delays of the client itself, before the call and after the place became free, are not part of it.
        """
        if self._free is None:
            return 0.0
        if self._free > 0:
            self._free -= 1
            return 0.0
        began, turn = time.perf_counter(), AsyncResult()
        self._waiting.append(turn)
        return max(0.0, turn.get() - began)

    def give(self, free_since: float) -> None:
        """Returns a place that is free since ``free_since`` [s, perf_counter]; who waited longest gets it."""
        if self._waiting:
            self._waiting.popleft().set(free_since)
        elif self._free is not None:
            self._free += 1


class ClosedLoopUser(User):
    """Sends one conversation of the shared list after the other, until the list is empty."""

    abstract = True
    wait_time = constant(0)
    session: LoadSession

    def on_start(self) -> None:
        """Connects and waits for the start."""
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
    def one_conversation(self) -> None:
        """One conversation, mostly a single request, from the first send to the end of the last stream."""
        session = self.session
        if session.over or not session.pending:
            raise StopUser
        session.converse(self.number, session.pending.popleft(), self._send)

    def _send(self, request: RequestSpec, body: bytes, due: float | None) -> Returned:
        return self.session.perform(self.client, self.number, request, body, due)

    def on_stop(self) -> None:
        """Closes the connection."""
        self.client.close()


class OpenLoopUser(User):
    """Starts every conversation at its own time in its own greenlet, whatever happens to the ones before it.

    Under ``max_concurrency`` a request that is due waits for its place in its own greenlet, so that the next arrival is
    on time. Connections are kept and reused, last used first, so that a steady load opens few.
    """

    abstract = True
    wait_time = constant(0)
    session: LoadSession

    def on_start(self) -> None:
        """Opens some connections and waits for the start."""
        session = self.session
        self.streams = Group()
        self.cap = InFlightCap(session.spec.max_concurrency)
        count = min(_OPEN_AT_START, len(session.pending), session.spec.max_concurrency or _OPEN_AT_START)
        self.idle = [session.new_client() for _ in range(count)]
        try:
            for client in self.idle:
                client.connect()
        except StreamFailure as failure:
            session.start_failure = failure
            raise StopUser from failure
        session.ready += 1
        session.go.wait()

    @task
    def all_arrivals(self) -> None:
        """Dispatches the whole list, then waits for the streams that are still open."""
        session = self.session
        while session.pending:
            due = session.zero + float(session.pending[0][0][0].arrival_s or 0.0)
            if not session.wait_until(due):
                break
            self.streams.spawn(session.converse, 0, session.pending.popleft(), self._send, due)
        self.streams.join()
        raise StopUser

    def _send(self, request: RequestSpec, body: bytes, due: float | None) -> Returned | None:
        queued_s, returned = self.cap.take(), None
        try:
            if self.session.over:
                return None
            client = self.idle.pop() if self.idle else self.session.new_client()
            try:
                returned = self.session.perform(client, 0, request, body, due, queued_s)
                return returned
            finally:
                self.idle.append(client)
        finally:
            self.cap.give(time.perf_counter() if returned is None else returned.raw.end)

    def on_stop(self) -> None:
        """Ends what is still open and closes the connections."""
        self.streams.kill()
        for client in self.idle:
            client.close()
