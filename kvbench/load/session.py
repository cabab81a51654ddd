"""The users of one load, closed loop and open loop, and what they share: the requests, the start, what came back."""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import gevent
from gevent.event import AsyncResult, Event
from gevent.pool import Group
from gevent.queue import Queue
from locust import User, constant, task
from locust.exception import StopUser

from kvbench.common.kernel_timer import DueCalls
from kvbench.load.client import RawStream, StreamFailure, StreamingClient, Timeouts
from kvbench.load.completion import Completion, judge
from kvbench.load.http import Address, tls_context
from kvbench.load.samples import Sample, with_history
from kvbench.load.server_health import ServerHealth
from kvbench.load.spec import LoadSpec, http_request
from kvbench.metrics.latency import SESSION_BROKEN
from kvbench.requests.request import RequestSpec, conversations

# An engine's step ends many streams' waits at once: the chunks that arrive with a stream's last one must be stamped
# before that stream is parsed. Bursts of 64 chunks take under 2 ms.
_PARSE_DELAY_S = 0.004
_MOST_BYTES, _MOST_BYTES_PER_TOKEN = 1 << 20, 4096  # of an answer; an event of one token has 200 to 400
_LOOK_S = 0.5  # how often a long wait looks whether the load is over

# A server may have a thread for each connection and few of them: one that waits on a connection held in reserve serves
# nobody else. Connections opened as they are needed, even 200 at once, made no request later than reserves did.
_OPEN_AT_START = 4

Turn = tuple[RequestSpec, bytes | None]
"""A request and its bytes; None: they are made when the answers before it are known."""


@dataclass(frozen=True)
class Returned:
    """A stream that has ended. ``at``: when its user went on [s, perf_counter]."""

    request: RequestSpec
    user: int
    t0: float
    raw: RawStream
    queued_s: float
    at: float


class _Pauses:
    """Pauses of the parser, in which other streams' bytes are read. ``seconds``: their sum."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> None:
        before = time.perf_counter()
        gevent.sleep(0)
        self.seconds += time.perf_counter() - before


class PreciseSleep:
    """Wakes greenlets at due moments, 0.1 ms late; gevent's own sleeps are rounded up to milliseconds, 0.7 ms late."""

    def __init__(self) -> None:
        self._calls = DueCalls()
        self._watcher = gevent.get_hub().loop.io(self._calls.fd, 1)
        self._watcher.start(self._calls.on_readable)

    def wait_until(self, when: float) -> None:
        """Blocks the greenlet until ``when`` [s, perf_counter]; at once when that is past."""
        while time.perf_counter() < when:
            ring = Event()
            self._calls.add(when, ring.set)
            ring.wait()

    def close(self) -> None:
        """Closes the timer. Greenlets that still wait are not woken."""
        if self._calls.fd >= 0:
            self._watcher.stop()
            self._watcher.close()
            os.close(self._calls.fd)
            self._calls.fd = -1


class LoadSession:
    """Hands out requests and collects outcomes; parsing runs in a greenlet of its own, in small slices.

    A user that has its stream's end goes on at once: what it costs to parse does not delay its next request. Only
    within a conversation the answer is judged first, as the next turn depends on it. ``pending``: conversations, a
    request by itself being one of a single turn. ``ended``: no stream will come any more; what came is not necessarily
    parsed. ``done``: requests whose outcome is known. ``stopping``: nothing more is sent; ``stopped``: on request.
    """

    def __init__(self, spec: LoadSpec, requests: list[RequestSpec]) -> None:
        """ValueError for a URL that cannot be spoken to."""
        self.spec = spec
        self.address = address = Address.from_url(spec.base_url)
        self.timeouts = Timeouts(
            connect=spec.connect_timeout_s,
            first_byte=spec.first_byte_timeout_s or spec.timeout_s,
            idle=spec.idle_timeout_s or spec.timeout_s,
            total=spec.timeout_s,
        )
        started = conversations(requests)
        if spec.mode == "open":
            started.sort(key=lambda turns: turns[0].arrival_s or 0.0)
        self.pending: deque[list[Turn]] = deque(
            [(r, None if r.new_tokens else http_request(spec, address, r)) for r in turns] for turns in started
        )
        self.total = len(requests)
        self.fire: Callable[..., None] = lambda **_: None
        self.samples: list[Sample] = []
        self.zero = 0.0
        self.go, self.ended = Event(), Event()
        self.ready = self.thinking = self.returned = self.done = self.failed = 0
        self.reads = self.unstamped_reads = self.reopened = 0
        self.stopping = self.stopped = False
        self.start_failure: StreamFailure | None = None
        self.health = ServerHealth(spec, self.new_client)
        self.user_numbers = itertools.count()
        self._tls = tls_context(spec.tls_verify, spec.tls_ca_file) if address.tls else None
        self._sleep = PreciseSleep()
        self._queue: Queue = Queue()
        self._parser = gevent.spawn(self._parse_all)

    def new_client(self) -> StreamingClient:
        """A client of the load's server, not yet connected."""
        return StreamingClient(self.address, self.timeouts, self._tls)

    def begin(self, zero: float | None = None) -> None:
        """The start: time 0 of the load [s, perf_counter]; None: now."""
        self.zero = time.perf_counter() if zero is None else zero
        self.go.set()

    def stop(self) -> None:
        """Ends the load early: somebody stopped it."""
        self.stopping = self.stopped = True

    def elapsed(self) -> float:
        """The seconds since the start (0 before it)."""
        return time.perf_counter() - self.zero if self.go.is_set() else 0.0

    @property
    def over(self) -> bool:
        """True when nothing more is to be sent: the load was stopped, or the server is gone."""
        return self.stopping or self.health.gone is not None

    @property
    def waits(self) -> bool:
        """True when nothing is in flight because the next request is not due yet."""
        return not self.health.open and bool(self.pending or self.thinking)

    @property
    def all_sent(self) -> bool:
        """True when the last request is under way or has come back."""
        return self.returned + len(self.health.open) == self.total

    @property
    def unparsed(self) -> int:
        """The number of requests that have come back and are not judged yet."""
        return self.returned - self.done

    def wait_until(self, when: float) -> bool:
        """Waits for a moment [s, perf_counter]; False as soon as the load is over."""
        while not self.over:
            now = time.perf_counter()
            if now >= when:
                return True
            self._sleep.wait_until(min(when, now + _LOOK_S))
        return False

    def converse(
        self,
        user: int,
        turns: Sequence[Turn],
        send: Callable[[RequestSpec, bytes, float | None], Returned | None],
        start: float | None = None,
    ) -> None:
        """The turns of one conversation, one after the other. ``start``: intended start of the first (open loop).

        ``send`` gets a request, its bytes and its intended start (None in closed loop); it returns what came back, or
        None when the load was over. A later turn is due after the user's think time, or after the time that parsing
        the answer takes, whichever is longer. Any further delay of this process is slip. A turn that failed ends the
        conversation: the later ones are never sent, and counted as ``session_broken``.
        """
        before: Sample | None = None
        due, reading_s = start, 0.0
        for number, (request, body) in enumerate(turns):
            if before is not None:
                due = before.end + max(request.think_s, reading_s)
                if body is None:
                    request = with_history(request, turns[number - 1][0], before)
                    body = http_request(self.spec, self.address, request)
                self.thinking += 1
                in_time = self.wait_until(due)
                self.thinking -= 1
                if not in_time:
                    return
            returned = send(request, body, None if start is None else due)
            if returned is None:
                return
            if number + 1 == len(turns):
                self._queue.put(returned)
                return
            before, reading_s = self._read(returned, turns[number + 1][0].think_s)
            if not before.completion.ok:
                self._break(user, [turn for turn, _ in turns[number + 1 :]], before)
                return

    def _read(self, returned: Returned, think_s: float) -> tuple[Sample, float]:
        """Judges an answer whose next turn waits for it. The outcome, and the seconds that parsing alone took."""
        try:
            gevent.sleep(min(_PARSE_DELAY_S, think_s / 2))
            begun, pauses = time.perf_counter(), _Pauses()
            sample = self._parse(returned, pauses)
        except gevent.GreenletExit:
            self._queue.put(returned)
            raise
        self._keep(sample)
        return sample, time.perf_counter() - begun - pauses.seconds

    def _break(self, user: int, turns: Sequence[RequestSpec], failed: Sample) -> None:
        self._count(len(turns))
        now, request = time.perf_counter(), failed.request
        which = f"turn {request.turn + 1} of session {request.session}"
        why = f"{which} failed ({failed.completion.error_kind}), so this one was never sent"
        for turn in turns:
            self._keep(Sample(turn, user, now, now, now, Completion(error_kind=SESSION_BROKEN, error=why)))

    def _count(self, requests: int) -> None:
        self.returned += requests
        if self.returned == self.total:
            self.ended.set()

    def perform(
        self,
        client: StreamingClient,
        user: int,
        request: RequestSpec,
        body: bytes,
        t0: float | None = None,
        queued_s: float = 0.0,
    ) -> Returned:
        """Sends one request and waits for its stream. ``t0``: intended start."""
        self.health.begin(client)
        interrupted: gevent.GreenletExit | None = None
        try:
            raw = client.exchange(body, _MOST_BYTES + _MOST_BYTES_PER_TOKEN * request.n * request.max_tokens)
        except gevent.GreenletExit as stop:
            raw, interrupted = client.raw, stop
        except Exception as error:  # a bug here must end this request, not the load: Locust would go on for ever
            raw = client.raw
            raw.error_kind, raw.error, raw.end = "client_error", repr(error), time.perf_counter()
            client.close()
        self.health.end(client, raw)
        self.reopened += raw.reopened
        self.reads += len(raw.times)
        self.unstamped_reads += raw.unstamped
        returned = Returned(request, user, raw.ts if t0 is None else t0, raw, queued_s, time.perf_counter())
        self._count(1)
        if interrupted is not None:
            self._queue.put(returned)
            raise interrupted
        return returned

    def close(self) -> None:
        """Ends the parser and gives the timer back; what is not parsed by now never is."""
        self._parser.kill()
        self._sleep.close()

    def _parse_all(self) -> None:
        while True:
            item: Returned = self._queue.get()
            gevent.sleep(max(0.0, item.at + _PARSE_DELAY_S - time.perf_counter()))
            self._keep(self._parse(item, lambda: gevent.sleep(0)))

    def _keep(self, sample: Sample) -> None:
        self.samples.append(sample)
        self.done += 1
        outcome = sample.completion
        self.failed += sample.sent and not outcome.ok
        self.fire(
            request_type="POST",
            name=sample.request.cls,
            response_time=(sample.end - sample.t0) * 1000.0,
            response_length=len(outcome.text),
            response=None,
            exception=None if outcome.ok else RuntimeError(f"{outcome.error_kind}: {outcome.error}"),
            context={"sample": sample},
            start_time=sample.t0,
            url=self.spec.dialect.api.path,
        )

    def _parse(self, item: Returned, pause: Callable[[], None]) -> Sample:
        raw, request = item.raw, item.request
        try:
            outcome = judge(
                raw.times, raw.chunks, request.max_tokens, raw.error_kind, raw.error, pause, self.spec.dialect,
                request.n, request.best_of,
            )  # fmt: skip
        except Exception as error:  # as above: one answer that the parser did not foresee is one failed request
            outcome = Completion(error_kind="client_error", error=repr(error))
        outcome.hide_key(self.spec.api_key_env, self.spec.dialect)
        return Sample(item.request, item.user, item.t0, raw.ts, raw.end, outcome, item.queued_s)


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


class LoadUser(User):
    """One of a load's users, of either kind."""

    abstract = True
    wait_time = constant(0)
    session: LoadSession

    def line_up(self, clients: Sequence[StreamingClient]) -> None:
        """Connects and waits for the start."""
        try:
            for client in clients:
                client.connect()
        except StreamFailure as failure:
            self.session.start_failure = failure
            raise StopUser from failure
        self.session.ready += 1
        self.session.go.wait()


class ClosedLoopUser(LoadUser):
    """Sends one conversation of the shared list after the other, until the list is empty."""

    abstract = True

    def on_start(self) -> None:
        self.number = next(self.session.user_numbers)
        self.client = self.session.new_client()
        self.line_up([self.client])

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


class OpenLoopUser(LoadUser):
    """Starts every conversation at its own time in its own greenlet, whatever happens to the ones before it.

    Under ``max_concurrency`` a request that is due waits for its place in its own greenlet, so that the next arrival is
    on time. Connections are kept and reused, last used first, so that a steady load opens few.
    """

    abstract = True

    def on_start(self) -> None:
        session = self.session
        self.streams = Group()
        self.cap = InFlightCap(session.spec.max_concurrency)
        count = min(_OPEN_AT_START, len(session.pending), session.spec.max_concurrency or _OPEN_AT_START)
        self.idle = [session.new_client() for _ in range(count)]
        self.line_up(self.idle)

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
