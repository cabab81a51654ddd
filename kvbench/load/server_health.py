"""Watches whether the server is still there: one request without an answer proves little, many in a row do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import gevent

from kvbench.common.server_errors import SERVER_FAULT, in_its_words
from kvbench.load.client import RawStream, StreamingClient, Timeouts
from kvbench.load.http import Response, call_bytes
from kvbench.load.spec import LoadSpec

_ABSENT = ("refused", "connect_timeout", "connection", "timeout")
_AWAY = ("refused", "connection", "dropped", "truncated")  # nobody is there, or no longer
_MIN_IN_A_ROW = 8
_ANSWER_LIMIT_S = 5.0
_ASK_AGAIN_S = 1.0


class ServerHealth:
    """Follows how requests end. ``gone``: why the load ends early; None while it goes on.

    A server is suspected when max(8, twice the requests in flight) requests in a row could not connect, timed out or
    were answered 5xx, and no stream has brought a byte since the first of them ended. It is gone when GET /health gets
    no answer within 5 s, or twice 5xx. With a limit on requests in flight (closed loop, or max_concurrency) one that
    lets requests time out is gone whatever /health says: each request left would wait for its time-out. Else slowness
    and refusals are a result. A load may have too few requests left for that: ``look_once_more`` after the last one.
    """

    def __init__(self, spec: LoadSpec, new_client: Callable[[], StreamingClient]) -> None:
        self.gone: str | None = None
        self.open: set[StreamingClient] = set()  # those with a request under way
        self._limit = spec.concurrency if spec.mode == "closed" else spec.max_concurrency
        self._new_client = new_client
        self._in_a_row = 0
        self._since = 0.0
        self._last_kind, self._last_error, self._is_closed = "", "", False
        self._is_refused = False  # the newest answer was 5xx
        self._asking: gevent.Greenlet | None = None

    def begin(self, client: StreamingClient) -> None:
        """Notes that a request is sent."""
        self.open.add(client)

    def end(self, client: StreamingClient, raw: RawStream) -> None:
        """Notes that the request has ended with ``raw``."""
        self.open.discard(client)
        self._is_closed = not client.is_open
        self._is_refused = raw.error_kind is None and client.status >= SERVER_FAULT
        if raw.error_kind is not None:
            self._last_kind, self._last_error = raw.error_kind, raw.error or raw.error_kind
        if raw.error_kind not in _ABSENT and not self._is_refused:
            self._in_a_row = 0
            return
        if self._in_a_row == 0 or (self._heard(raw) and not self._is_refused):
            self._in_a_row, self._since = 0, raw.end
        self._in_a_row += 1
        if self._in_a_row < max(_MIN_IN_A_ROW, 2 * (self._limit or len(self.open))) or self._asking is not None:
            return
        if any(self._heard(client.raw) for client in self.open):
            self._in_a_row = 0
        elif self._limit and self._last_kind in _AWAY and not self._is_refused:
            self._is_gone()
        else:
            self._asking = gevent.spawn(self._ask, self._limit is not None and not self._is_refused)

    def _is_gone(self, health: str | None = None) -> None:
        """Notes that the server is gone; ``health``: what /health says, where it says why."""
        if self._last_kind in _AWAY and health is None:
            self.gone = f"the server went away ({self._last_error})"
        else:
            self.gone = f"the server stopped answering: {health or self._last_error}"

    def look_once_more(self) -> None:
        """Checks the server after the last request: one that closed its connection, or answered 5xx, may be gone."""
        if self.gone is not None or not (self._is_closed or self._is_refused):
            return
        answer = self._get_health()
        if answer.error_kind in _AWAY:
            self._last_kind, self._last_error = answer.error_kind, answer.error or answer.error_kind
            self._is_gone()
        elif reason := self._why_unhealthy(answer):
            self._is_gone(reason)

    def _get_health(self) -> RawStream:
        """Returns what GET /health brings within 5 s."""
        client = self._new_client()
        client.timeouts = Timeouts(*(min(limit, _ANSWER_LIMIT_S) for limit in dataclasses.astuple(client.timeouts)))
        answer = client.exchange(call_bytes(client.address, "GET", "/health", ["Connection: close"]))
        client.close()
        return answer

    def _why_unhealthy(self, answer: RawStream) -> str | None:
        """Returns what /health says after 5xx, if it still does a second later; None where it serves."""
        for wait_s in (_ASK_AGAIN_S, 0.0):
            response = Response(answer.chunks) if answer.error_kind is None else None
            if response is None or response.status < SERVER_FAULT:
                return None
            if wait_s:
                gevent.sleep(wait_s)
                answer = self._get_health()
        return f"/health answers {response.status}{in_its_words(response.sentence)}"

    def _ask(self, hangs: bool) -> None:
        """Ends the load if /health does not answer or says no, or if the server ``hangs``."""
        answer = self._get_health()
        if self._is_refused and answer.error_kind is not None:
            self._last_kind, self._last_error = answer.error_kind, f"/health: {answer.error or answer.error_kind}"
        reason = self._why_unhealthy(answer)
        answered = (answer.error_kind is None and not reason and not hangs) or not self._in_a_row
        if answered or any(self._heard(client.raw) for client in self.open):
            self._in_a_row = 0
        else:
            self._is_gone(reason)
        self._asking = None

    def _heard(self, raw: RawStream) -> bool:
        """Tests whether it brought a byte since the first failure in a row."""
        return bool(raw.times) and raw.times[-1] > self._since
