"""Parses a finished stream: tokens with their arrival times, and success or the kind of failure."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbench.common.machine import boot_id
from kvbench.common.secrets import without_key
from kvbench.load.http import OPENAI, Dialect, MalformedStream, Response, events

_SLICE = 32  # events parsed between two pauses: about 0.15 ms
_ERROR_CHARS = 300
_MOST_TOKENS = 1 << 31  # ids and counts are stored in 32 bits
_TEXT, _IDS = (str, type(None)), (list, type(None))
SENT_TOGETHER_S = 0.0005


@dataclass
class Completion:
    """One request's outcome. Times [s] are those of the bytes' arrival.

    ``chunk_times``/``chunk_tokens``: chunks that carried a token (text, or token ids with text still held
    back); ``chunk_tokens`` is None where the server sent no token ids. ``first``: first non-empty text, or the
    first token if no token had text. ``coalesced``: token chunks that arrived in one read with the one before
    although the server sent them apart. ``sent_times``: the server's own send stamps [s, monotonic clock] of the same
    chunks, empty where it gives none or those of another machine's clock.
    """

    http_status: int | None = None
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] | None = field(default_factory=list)
    chunk_choices: list[int] | None = None
    sent_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    coalesced: int = 0
    done: bool = False
    error_kind: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Succeeded: nothing spoke against it."""
        return self.error_kind is None

    def fail(self, kind: str, message: str) -> None:
        """The first failure counts."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, message

    def hide_key(self, variable: str | None, dialect: Dialect) -> None:
        """Removes the API key in that environment variable from the server's texts before they are stored."""
        self.text, self.error = without_key(self.text, variable), without_key(self.error, variable)
        if self.finish_reason not in dialect.finish_reasons:
            self.finish_reason = without_key(self.finish_reason, variable)


def judge(
    times: Sequence[float],
    chunks: Sequence[bytes],
    max_tokens: int,
    error_kind: str | None = None,
    error: str | None = None,
    pause: Callable[[], None] = lambda: None,
    dialect: Dialect = OPENAI,
) -> Completion:
    """Parses a stream. It succeeded only with a finish_reason, a [DONE] and a usage that matches.

    ``times[i]`` is the arrival of ``chunks[i]``; ``error_kind``: how the transport failed, if it did; ``pause`` is
    called between slices of work, so that the event loop can read other streams; ``dialect``: which of the three the
    server does not send.
    """
    out, response = Completion(), Response(chunks)
    if error_kind is not None:
        problem = response.problem if error_kind == "malformed" else None  # the same, with a quotation
        out.fail(error_kind, problem or error or error_kind)
    out.http_status = response.status or None
    if response.problem is not None:
        out.fail("malformed", response.problem)
    if not response.status:
        out.fail("truncated", "no whole response head")
    elif response.status != 200:
        out.fail("http_error", f"HTTP {response.status}: {_error_text(response.body)}")
    else:
        try:
            _read_events(out, response, times, pause)
        except MalformedStream as problem:
            out.fail("malformed", str(problem))
        _check(out, max_tokens, dialect)
    _close(out)
    return out


def _read_events(out: Completion, response: Response, times: Sequence[float], pause: Callable[[], None]) -> None:
    pause()
    found, rest = events(response.body)
    last_read, one_clock = -1, response.boot is not None and response.boot == boot_id()
    for number, (data, position) in enumerate(found):
        if number % _SLICE == _SLICE - 1:
            pause()
        if data == b"[DONE]":
            out.done = True
            continue
        if out.done:
            raise MalformedStream("{} came after [DONE]", data)
        read = bisect_right(response.ends, position - 1)  # the piece that brought the event's last byte
        if _take(out, data, times[read], one_clock):
            out.coalesced += read == last_read and not _sent_together(out)
            last_read = read
    if not (response.complete or response.until_close):
        out.fail("truncated", "the response's last chunk is missing")
    if rest.strip():
        inside = MalformedStream("the stream ends inside an event: {}", rest)
        out.fail("truncated" if not out.done else "malformed", str(inside))


def _take(out: Completion, data: bytes, when: float, one_clock: bool) -> bool:
    """Adds one event; True when it carried a token. ``one_clock``: the server's stamps are of this machine's clock."""
    try:
        event = json.loads(data.decode())  # of bytes, json would first guess the encoding
    except (ValueError, RecursionError):
        raise MalformedStream("{} is not JSON", data) from None
    if not isinstance(event, dict):
        raise MalformedStream("{} is not an object", data)
    if event.get("error"):
        out.fail("server_error", _error_text(data))
        return False
    if event.get("usage"):
        _take_usage(out, event["usage"])
    choices = event.get("choices")
    if not choices:
        return False
    try:
        choice = choices[0]
        text = choice.get("text")
        if text is None:
            text = (choice.get("delta") or {}).get("content")
        ids, reason = choice.get("token_ids"), choice.get("finish_reason")
    except (AttributeError, KeyError, TypeError):
        raise MalformedStream("{} has no readable choice", data) from None
    if not (isinstance(text, _TEXT) and isinstance(ids, _IDS) and isinstance(reason, _TEXT)):
        raise MalformedStream("a choice of {} has a field of another type than the API's", data)
    out.finish_reason = reason or out.finish_reason
    if not text and not ids:
        return False
    out.chunk_times.append(when)
    if one_clock:
        stamp = event.get("kvbench")  # the built-in server's send time of this chunk; any other value is ignored
        if isinstance(stamp, dict) and isinstance(stamp.get("sent"), float):
            out.sent_times.append(stamp["sent"])
    if text:
        out.text += text
        if out.first is None:
            out.first = when
    if ids is None:
        out.chunk_tokens = None
    elif out.chunk_tokens is not None:
        out.chunk_tokens.append(len(ids))
        out.token_ids.extend(ids)
    return True


def _sent_together(out: Completion) -> bool:
    """Whether the server itself sent the newest two chunks as one: then sharing a read is no fault of the client."""
    if len(out.sent_times) != len(out.chunk_times) or len(out.sent_times) < 2:
        return False
    return out.sent_times[-1] - out.sent_times[-2] < SENT_TOGETHER_S


def _take_usage(out: Completion, usage: Any) -> None:
    try:
        details = usage.get("prompt_tokens_details") or {}
        counts = usage["prompt_tokens"], usage["completion_tokens"], details.get("cached_tokens") or 0
        if not all(0 <= int(count) < _MOST_TOKENS for count in counts):
            raise ValueError
        out.prompt_tokens, out.output_tokens = int(counts[0]), int(counts[1])
        cached = details.get("cached_tokens")
        out.cached_tokens = None if cached is None else int(cached)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        lacks = "usage {} lacks readable prompt_tokens or completion_tokens"
        raise MalformedStream(lacks, str(usage)) from None


def _check(out: Completion, max_tokens: int, dialect: Dialect) -> None:
    """The definition of success. Each failure's sentence says what was missing."""
    if out.finish_reason is None:
        out.fail("no_finish_reason", "the stream ended without a finish_reason")
    elif out.finish_reason not in dialect.finish_reasons:
        out.fail("not_finished", f"the server gave up: finish_reason {out.finish_reason[:40]!r}")
    if not out.done and dialect.done_marker:
        out.fail("no_done", "the stream ended without [DONE]")
    if out.output_tokens is None and not dialect.usage:
        out.output_tokens = len(out.chunk_times) if out.chunk_tokens is None else sum(out.chunk_tokens)
    if out.output_tokens is None:
        out.fail("no_usage", "the stream carried no usage (stream_options.include_usage was asked for)")
        return
    chunks, reported = len(out.chunk_times), out.output_tokens
    if (out.cached_tokens or 0) > (out.prompt_tokens or 0):
        out.fail("usage_mismatch", f"usage says {out.cached_tokens} of {out.prompt_tokens} prompt tokens were cached")
    if reported > max_tokens:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but max_tokens was {max_tokens}")
    elif out.chunk_tokens is not None and chunks:
        if sum(out.chunk_tokens) != reported:
            out.fail("usage_mismatch", f"usage says {reported} tokens, {sum(out.chunk_tokens)} ids were streamed")
    elif chunks > reported:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but {chunks} chunks had content")
    elif chunks == 0 and reported > 0:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but no chunk had content")


def _close(out: Completion) -> None:
    """Removes what Parquet cannot store: impossible token ids, halves of characters."""
    ids = out.token_ids
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < _MOST_TOKENS):
        wild = next(i for i in ids if type(i) is not int or not 0 <= i < _MOST_TOKENS)
        out.fail("malformed", f"{str(wild)[:40]!r} is no token id")
        out.token_ids = []
    out.text, out.error, out.finish_reason = map(_storable, (out.text, out.error, out.finish_reason))
    if out.first is None and out.chunk_times:
        out.first = out.chunk_times[0]
    if out.chunk_tokens is not None and len(out.chunk_tokens) != len(out.chunk_times):
        out.chunk_tokens = None


def _storable(text: Any) -> Any:
    """Text that UTF-8 can hold: JSON may carry half of a surrogate pair."""
    return text if text is None or text.isascii() else text.encode("utf-8", "replace").decode()


def _error_text(body: bytes) -> str:
    """The message of an OpenAI-shaped error, or the body's beginning."""
    text = body.decode("utf-8", "replace")
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return text[:_ERROR_CHARS].strip()
