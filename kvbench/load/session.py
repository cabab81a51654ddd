"""State that the users of one load share: the list of requests, the start line, what has come back."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gevent
from gevent.event import Event
from gevent.queue import Queue

from kvbench.load.client import Address, RawStream, StreamFailure, StreamingClient, Timeouts
from kvbench.load.completion import Completion, judge
from kvbench.load.requests import RequestSpec
from kvbench.load.samples import Sample
from kvbench.load.spec import LoadSpec

# An engine's step ends many streams' waits at once: the chunks that arrive with a stream's last one must be stamped
# before that stream is parsed. Bursts of 64 chunks take under 2 ms.
_PARSE_DELAY_S = 0.004
_ENDPOINT = "/v1/completions"
_MOST_BYTES, _MOST_BYTES_PER_TOKEN = 1 << 20, 4096  # of an answer; an event of one token has 200 to 400
_GONE_KINDS = ("refused", "connect_timeout", "connection", "timeout")


@dataclass(frozen=True)
class _Returned:
    request: RequestSpec
    user: int
    t0: float
    raw: RawStream


class LoadSession:
    """Hands out requests and collects outcomes; parsing runs in a greenlet of its own, in small slices.

    A user that has its stream's end goes on at once: what it costs to parse does not delay its next request.
    """

    def __init__(
        self, spec: LoadSpec, address: Address, timeouts: Timeouts, requests: list[RequestSpec]
    ) -> None:
        self.spec = spec
        self.address = address
        self.timeouts = timeouts
        self.pending = deque((request, http_request(spec, address, request)) for request in requests)
        self.total = len(requests)
        self.fire: Callable[..., None] = lambda **_: None
        self.samples: list[Sample] = []
        self.zero = 0.0
        self.go = Event()
        self.ended = Event()
        self.ready = 0
        self.stopping = False
        self.start_failure: StreamFailure | None = None
        self.in_flight = 0
        self.max_in_flight = 0
        self.done = 0
        self.failed = 0
        self.last_error = ""
        self._dead_in_a_row = 0
        self._users = 0
        self._queue: Queue = Queue()
        self._parser = gevent.spawn(self._parse_all)

    def new_client(self) -> StreamingClient:
        """A client of the load's server, not yet connected."""
        return StreamingClient(self.address, self.timeouts)

    def next_user(self) -> int:
        """The number of the next user, from 0."""
        self._users += 1
        return self._users - 1

    def begin(self, zero: float | None = None) -> None:
        """The start. ``zero`` [s, perf_counter]: time 0 of the load where it was agreed on before, else now."""
        self.zero = time.perf_counter() if zero is None else zero
        self.go.set()

    def elapsed(self) -> float:
        """Seconds since the start (0 before it)."""
        return time.perf_counter() - self.zero if self.go.is_set() else 0.0

    @property
    def server_gone(self) -> bool:
        """True when so many requests in a row found no server that going on is pointless."""
        return self._dead_in_a_row >= max(8, 2 * int(self.spec.concurrency or 1))

    def perform(
        self, client: StreamingClient, user: int, request: RequestSpec, body: bytes, t0: float | None = None
    ) -> None:
        """Sends one request, waits for its stream and hands it to the parser. ``t0``: intended start."""
        self.in_flight += 1
        self.max_in_flight = max(self.max_in_flight, self.in_flight)
        try:
            raw = client.exchange(body, _MOST_BYTES + _MOST_BYTES_PER_TOKEN * request.max_tokens)
        except gevent.GreenletExit:
            raw = client.last_raw
            self._queue.put(_Returned(request, user, raw.ts if t0 is None else t0, raw))
            raise
        except Exception as error:  # a bug here must end this request, not the load: Locust would go on for ever
            raw = client.last_raw
            raw.error_kind, raw.error, raw.end = "client_error", repr(error), time.perf_counter()
            client.close()
        finally:
            self.in_flight -= 1
        self._dead_in_a_row = self._dead_in_a_row + 1 if raw.error_kind in _GONE_KINDS else 0
        if raw.error_kind is not None:
            self.last_error = raw.error or raw.error_kind
        self._queue.put(_Returned(request, user, raw.ts if t0 is None else t0, raw))

    def drain(self) -> None:
        """Waits until everything that came back is parsed."""
        self._queue.put(None)
        self._parser.join()

    def _parse_all(self) -> None:
        while (item := self._queue.get()) is not None:
            if not self.stopping:
                gevent.sleep(_PARSE_DELAY_S)
            sample = self._parse(item)
            self.samples.append(sample)
            self.done += 1
            self.failed += not sample.completion.ok
            self._tell_locust(sample)
            if self.done == self.total:
                self.ended.set()

    def _parse(self, item: _Returned) -> Sample:
        raw = item.raw
        # Pausing lets other streams' bytes be stamped; after a stop there is nothing left to stamp.
        pause = (lambda: None) if self.stopping else (lambda: gevent.sleep(0))
        try:
            outcome = judge(
                raw.times, raw.chunks, item.request.max_tokens, raw.error_kind, raw.error, pause=pause
            )
        except Exception as error:  # as above: one answer that the parser did not foresee is one failed request
            outcome = Completion(error_kind="client_error", error=repr(error))
        return Sample(item.request, item.user, item.t0, raw.ts, raw.end, outcome)

    def _tell_locust(self, sample: Sample) -> None:
        outcome = sample.completion
        self.fire(
            request_type="POST",
            name=sample.request.cls,
            response_time=(sample.end - sample.t0) * 1000.0,
            response_length=len(outcome.text),
            response=None,
            exception=None if outcome.ok else RuntimeError(f"{outcome.error_kind}: {outcome.error}"),
            context={"sample": sample},
            start_time=sample.t0,
            url=_ENDPOINT,
        )


def http_request(spec: LoadSpec, address: Address, request: RequestSpec) -> bytes:
    """The whole HTTP request, made before the load starts so that sending costs one system call."""
    body: dict[str, Any] = {
        "model": spec.model,
        "prompt": list(request.prompt_token_ids or ()) if request.prompt is None else request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": spec.temperature,
        "ignore_eos": spec.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if spec.return_token_ids:
        body["return_token_ids"] = True
    if spec.send_priority and request.priority:  # 0 is what a server takes where nothing is said
        body["priority"] = request.priority
    payload = json.dumps(body, separators=(",", ":")).encode()
    head = [
        f"POST {address.prefix}{_ENDPOINT} HTTP/1.1",
        f"Host: {address.host}:{address.port}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
        "x-kvbench-stamp: 1",  # the built-in server then says when it sent each chunk; others ignore it
        f"Content-Length: {len(payload)}",
    ]
    return "\r\n".join(head).encode() + b"\r\n\r\n" + payload
