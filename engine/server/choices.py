"""One choice of a request: turns the engine's tokens into text, and measures its times."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvbench_engine.engine_loop import Delivery
from kvbench_engine.sequence import SamplingParams
from kvbench_engine.server.answer_parts import AnswerParts, Delta
from kvbench_engine.server.detokenizer import StopStrings, TextDecoder
from kvbench_engine.server.metrics import ServerMetrics

FAILURE_OF = {"abort": "shutdown", "error": "engine_error"}  # the engine's finish reason -> kind in /metrics


class Piece(NamedTuple):
    """The part of one choice that one engine output adds. ``text`` is empty while a character is incomplete.

    ``delta``: the text split by ``AnswerParts``; None where it is not.
    """

    choice: Choice
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    delta: Delta | None = None


class EngineFailure(Exception):
    """The engine ended a request with an error; the message is for the client. ``shutdown``: the server stops."""

    def __init__(self, message: str, shutdown: bool):
        super().__init__(message)
        self.shutdown = shutdown


class Choice:
    """Detokenises one sequence, finds stop strings, counts its tokens and measures its times."""

    __slots__ = (
        "_arrival", "_decoder", "_first_at", "_last_at", "_metrics", "_scheduled_at", "_stop_ids", "_stops",
        "finish_reason", "index", "kv_facts", "num_cached", "num_discarded", "num_tokens", "parts", "stop_reason",
    )  # fmt: skip

    def __init__(
        self,
        index: int,
        decoder: TextDecoder,
        stops: tuple[str, ...],
        params: SamplingParams,
        arrival: float,
        metrics: ServerMetrics,
    ):
        self.index = index
        self.num_tokens = 0
        self.num_cached = 0
        self.num_discarded = 0  # tokens of candidates that were not chosen
        self.finish_reason: str | None = None
        self.kv_facts: dict[str, Any] | None = None  # in its last event, where the request asks for it
        self.stop_reason: str | int | None = None  # the stop string, or the id among stop_token_ids, that ended it
        self.parts = decoder if isinstance(decoder, AnswerParts) else None
        self._decoder = decoder
        self._stops = StopStrings(stops) if stops else None
        self._stop_ids = params.stop_token_ids
        self._metrics = metrics
        self._arrival = arrival
        self._scheduled_at: float | None = None
        self._first_at: float | None = None
        self._last_at = arrival

    @property
    def has_stops(self) -> bool:
        """Tests whether a stop string can end it."""
        return self._stops is not None

    def advance(self, delivery: Delivery) -> Piece:
        """Take one output.

        Raises:
            EngineFailure: the output is the engine's error.
        """
        output = delivery.output
        reason = output.finish_reason
        if reason in FAILURE_OF:
            self.finish_reason = reason
            raise EngineFailure(output.error or f"the engine ended the request: {reason}", reason == "abort")
        tokens = output.token_ids
        self._time(delivery)
        self.num_tokens += len(tokens)
        self.num_cached = output.num_cached_tokens
        self.num_discarded += output.num_discarded
        if reason is None:
            text = self._decoder.push(tokens)
        else:
            # The token that stopped the sequence is counted and not shown, as in vLLM.
            shown = tokens[:-1] if reason == "stop" else tokens
            text = self._decoder.push(shown) + self._decoder.flush()
            if reason == "stop" and tokens and tokens[-1] in self._stop_ids:
                self.stop_reason = tokens[-1]
            if output.kv_facts is not None:
                self.kv_facts = {"request_id": output.request_id, **output.kv_facts._asdict()}
        if self._stops is not None:
            text = self._stops.push(text, final=reason is not None)
            if self._stops.matched is not None:
                reason, self.stop_reason = "stop", self._stops.matched
        if reason is not None:
            self._finish(reason)
        if self.parts is None:
            return Piece(self, text, tokens, reason)
        delta = self.parts.split(text, final=reason is not None)
        if reason == "stop" and self.parts.num_calls:
            reason = self.finish_reason = "tool_calls"
        return Piece(self, text, tokens, reason, delta)

    def _time(self, delivery: Delivery) -> None:
        now = delivery.at
        if self._first_at is None:
            self._first_at = now
            self._scheduled_at = delivery.scheduled_at
            self._metrics.ttft.observe(now - self._arrival)
        else:
            self._metrics.itl.observe(now - self._last_at)
        self._last_at = now

    def _finish(self, reason: str) -> None:
        self.finish_reason = reason
        metrics = self._metrics
        metrics.finished(reason)
        metrics.e2e.observe(self._last_at - self._arrival)
        if self._scheduled_at is not None and self._first_at is not None:
            metrics.queue.observe(max(0.0, self._scheduled_at - self._arrival))
            metrics.prefill.observe(self._first_at - self._scheduled_at)
            metrics.decode.observe(self._last_at - self._first_at)
