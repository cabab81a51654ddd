"""Parses a finished stream: tokens with their arrival times, and success or the kind of failure."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kvbench.common.machine import boot_id
from kvbench.common.secrets import without_key
from kvbench.common.server_errors import error_sentence
from kvbench.load.http import OPENAI, Dialect, MalformedStream, Response, events

_SLICE = 32  # events parsed between two pauses: about 0.15 ms
_MOST_TOKENS = 1 << 31  # ids and counts are stored in 32 bits
_TEXT, _IDS = (str, type(None)), (list, type(None))
SENT_TOGETHER_S = 0.0005


@dataclass
class Completion:
    """One request's outcome. Times [s] are those of the bytes' arrival.

    ``chunk_times``/``chunk_tokens``: chunks that carried a token (text, or token ids with text still held
    back); ``chunk_tokens`` is None where the server sent no token ids. ``first``: first non-empty text, or the
    first token if no token had text. ``coalesced``: token chunks that arrived in one read with the one before of their
    sequence although the server sent them apart. ``chunk_choices``: which sequence each chunk belongs to; None for a
    request of one. ``token_ids`` and ``text``: those of sequence 0, then of sequence 1 and so on, a line break between
    two texts. ``output_tokens``: of the sequences that were returned. ``sent_times``: the server's own send stamps [s,
    monotonic clock] of the same chunks, empty where it gives none or those of another machine's clock. ``kv_facts``:
    which sequence, and as JSON where its KV was: what the built-in server says of canaries at their ends.
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
    kv_facts: list[tuple[int, str]] = field(default_factory=list)
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


@dataclass(frozen=True)
class EmptyChunk:
    """A chunk without text or ids. ``told``: tokens until then by its usage, None without; ``ends``: it is the last."""

    when: float
    read: int
    sent: float | None
    told: int | None
    ends: bool


@dataclass
class _Sequence:
    """What has come of one of a request's sequences.

    ``read``, ``sent``: the piece that brought its newest chunk, and the server's send stamp of it [s]. ``told``: tokens
    until its newest text, where chunks have a usage. ``tail``: empty chunks since its newest text; ``skipped``: those
    before it.
    """

    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    read: int = -1
    sent: float | None = None
    when: float = 0.0
    told: int | None = None
    tail: list[EmptyChunk] = field(default_factory=list)
    skipped: int = 0


def judge(
    times: Sequence[float],
    chunks: Sequence[bytes],
    max_tokens: int,
    error_kind: str | None = None,
    error: str | None = None,
    pause: Callable[[], None] = lambda: None,
    dialect: Dialect = OPENAI,
    n: int = 1,
    best_of: int | None = None,
) -> Completion:
    """Parses a stream. It succeeded only with a finish_reason, a [DONE] and a usage that matches.

    ``times[i]`` is the arrival of ``chunks[i]``; ``error_kind``: how the transport failed, if it did; ``pause`` is
    called between slices of work, so that the event loop can read other streams; ``dialect``: which of the three the
    server does not send; ``n``: sequences that were asked for, each of which must have its finish_reason; ``best_of``:
    of so many, all of which the usage counts.
    """
    out, response = Completion(chunk_choices=[] if n > 1 else None), Response(chunks)
    sequences = [_Sequence() for _ in range(n)]
    if error_kind is not None:
        problem = response.problem if error_kind == "malformed" else None  # the same, with a quotation
        out.fail(error_kind, problem or error or error_kind)
    out.http_status = response.status or None
    if response.problem is not None:
        out.fail("malformed", response.problem)
    if not response.status:
        out.fail("truncated", "no whole response head")
    elif response.status != 200:
        out.fail("http_error", ": ".join(filter(None, (f"HTTP {response.status}", error_sentence(response.body)))))
    else:
        try:
            _read_events(out, sequences, response, times, pause)
        except MalformedStream as problem:
            out.fail("malformed", str(problem))
        _add_textless_end(out, sequences)
        _join(out, sequences, dialect)
        _check(out, max_tokens, dialect, n, best_of)
    _close(out)
    return out


def _read_events(
    out: Completion,
    sequences: Sequence[_Sequence],
    response: Response,
    times: Sequence[float],
    pause: Callable[[], None],
) -> None:
    pause()
    found, rest = events(response.body)
    one_clock = response.boot is not None and response.boot == boot_id()
    for number, (data, position) in enumerate(found):
        if number % _SLICE == _SLICE - 1:
            pause()
        if data == b"[DONE]":
            out.done = True
            continue
        if out.done:
            raise MalformedStream("{} came after [DONE]", data)
        read = bisect_right(response.ends, position - 1)  # the piece that brought the event's last byte
        _take(out, sequences, data, times[read], read, one_clock)
    if not (response.complete or response.until_close):
        out.fail("truncated", "the response's last chunk is missing")
    if rest.strip():
        inside = MalformedStream("the stream ends inside an event: {}", rest)
        out.fail("truncated" if not out.done else "malformed", str(inside))


def _take(
    out: Completion, sequences: Sequence[_Sequence], data: bytes, when: float, read: int, one_clock: bool
) -> None:
    """Adds one event. ``one_clock``: the server's stamps are of this machine's clock."""
    try:
        event = json.loads(data.decode())  # of bytes, json would first guess the encoding
    except (ValueError, RecursionError):
        raise MalformedStream("{} is not JSON", data) from None
    if not isinstance(event, dict):
        raise MalformedStream("{} is not an object", data)
    if event.get("error") or event.get("object") == "error":
        out.fail("server_error", error_sentence(data))
        return
    told = None
    if event.get("usage"):
        _take_usage(out, event["usage"])
        told = out.output_tokens
    choices = event.get("choices")
    if not choices:
        return
    stamp = event.get("kvbench") if one_clock else None  # the built-in server's send time; any other value is ignored
    sent = stamp["sent"] if isinstance(stamp, dict) and isinstance(stamp.get("sent"), float) else None
    try:
        for choice in choices:
            text = choice.get("text")
            if text is None:
                text = (choice.get("delta") or {}).get("content")
            ids, reason, number = choice.get("token_ids"), choice.get("finish_reason"), choice.get("index") or 0
            if not (isinstance(text, _TEXT) and isinstance(ids, _IDS) and isinstance(reason, _TEXT)):
                raise MalformedStream("a choice of {} has a field of another type than the API's", data)
            if not (isinstance(number, int) and 0 <= number < len(sequences)):
                raise MalformedStream(f"a choice of {{}} has an index beyond the {len(sequences)} asked for", data)
            sequence = sequences[number]
            sequence.finish_reason = reason or sequence.finish_reason
            if isinstance(facts := choice.get("kv_facts"), dict):
                out.kv_facts.append((number, json.dumps(facts)))
            if text or ids:
                _add_chunk(out, sequence, text or "", ids, when, read, sent)
                if out.chunk_choices is not None:
                    out.chunk_choices.append(number)
                if sequence.tail:
                    sequence.skipped, sequence.tail = sequence.skipped + len(sequence.tail), []
                sequence.told = told
            elif sequence.text or not (choice.get("delta") or {}).get("role"):  # which only announces an answer
                sequence.tail.append(EmptyChunk(when, read, sent, told, reason is not None))
    except (AttributeError, KeyError, TypeError):
        raise MalformedStream("{} has no readable choice", data) from None


def _add_chunk(
    out: Completion, sequence: _Sequence, text: str, ids: list[int] | None, when: float, read: int, sent: float | None
) -> None:
    """Adds a chunk with tokens. ``sent``: the server's stamp; what it sent together may share a read."""
    together = sent is not None and sequence.sent is not None and sent - sequence.sent < SENT_TOGETHER_S
    out.coalesced += read == sequence.read and not together
    sequence.read, sequence.sent, sequence.when = read, sent, when
    out.chunk_times.append(when)
    if sent is not None:
        out.sent_times.append(sent)
    if text:
        sequence.text.append(text)
        if out.first is None:
            out.first = when
    if ids is None:
        out.chunk_tokens = None
    elif out.chunk_tokens is not None:
        out.chunk_tokens.append(len(ids))
        sequence.ids.extend(ids)


def _add_textless_end(out: Completion, sequences: Sequence[_Sequence]) -> None:
    """Adds the chunks after the last text that brought tokens without text, where no token ids tell which did.

    An end token and half a character have no text.
    """
    if out.output_tokens is None or out.chunk_tokens is not None:
        return
    found = _told_by_running_usage(sequences)
    if found is None:
        found = _told_by_tokens_left(out, sequences)
    for number, empty in found:
        _add_chunk(out, sequences[number], "", None, empty.when, empty.read, empty.sent)
        if out.chunk_choices is not None:
            out.chunk_choices.append(number)
    if out.chunk_choices is not None and found:  # one sequence may have ended before another's last text
        both = sorted(zip(out.chunk_times, out.chunk_choices, strict=True), key=lambda each: each[0])
        out.chunk_times, out.chunk_choices = [when for when, _ in both], [number for _, number in both]
        out.sent_times.sort()


def _told_by_running_usage(sequences: Sequence[_Sequence]) -> list[tuple[int, EmptyChunk]] | None:
    """The empty chunks whose usage counts more tokens than the one before; None where not every chunk has a usage."""
    tail = sequences[0].tail
    counts = [sequences[0].told, *(empty.told for empty in tail)]
    if len(sequences) > 1 or None in counts:
        return None
    return [(0, empty) for (before, after), empty in zip(pairwise(counts), tail, strict=True) if after > before]


def _told_by_tokens_left(out: Completion, sequences: Sequence[_Sequence]) -> list[tuple[int, EmptyChunk]]:
    """The empty chunks for which the usage has tokens left over, if each chunk with text brought one.

    None of them if there are fewer tokens than chunks. The chunk of the finish_reason comes with the last token or at
    once after it. So it brought one if just one is still left over and it was not sent together with the chunk before:
    more are left over where chunks bring several tokens, and then nothing tells.
    """
    left = (out.output_tokens or 0) - len(out.chunk_times) - sum(sequence.skipped for sequence in sequences)
    within = [(number, e) for number, sequence in enumerate(sequences) for e in sequence.tail if not e.ends]
    ends = [
        (number, empty)
        for number, sequence in enumerate(sequences)
        for before, empty in pairwise((sequence, *sequence.tail))
        if empty.ends and empty.when - before.when >= SENT_TOGETHER_S
    ]
    if left < len(within):
        return []
    return [*within, *ends] if len(ends) == left - len(within) else within


def _join(out: Completion, sequences: Sequence[_Sequence], dialect: Dialect) -> None:
    """Text, ids and finish_reason of all sequences; the reason of one that did not come to its end, if there is one."""
    out.text = "\n".join("".join(sequence.text) for sequence in sequences)
    out.token_ids = [token for sequence in sequences for token in sequence.ids]
    reasons = [sequence.finish_reason for sequence in sequences if sequence.finish_reason is not None]
    if lost := [reason for reason in reasons if reason not in dialect.finish_reasons]:
        out.finish_reason = lost[0]
    elif len(reasons) == len(sequences):
        out.finish_reason = min(reasons)


def _take_usage(out: Completion, usage: Any) -> None:
    try:
        details = usage.get("prompt_tokens_details") or {}
        cached, prompt, output = details.get("cached_tokens"), usage["prompt_tokens"], usage["completion_tokens"]
    except (KeyError, TypeError, AttributeError):
        lacks = "usage {} lacks readable prompt_tokens or completion_tokens"
        raise MalformedStream(lacks, str(usage)) from None
    told = {"prompt_tokens": prompt, "completion_tokens": output, "cached_tokens": 0 if cached is None else cached}
    for name, count in told.items():
        if type(count) is not int or not 0 <= count < _MOST_TOKENS:
            raise MalformedStream(f"usage has {name} {{}}, which is no whole number of tokens", json.dumps(count))
    out.prompt_tokens, out.output_tokens, out.cached_tokens = prompt, output, cached


def _check(out: Completion, max_tokens: int, dialect: Dialect, n: int, best_of: int | None) -> None:
    """The definition of success. Each failure's sentence says what was missing."""
    if out.finish_reason is None:
        of = f" of each of the {n} choices" if n > 1 else ""
        out.fail("no_finish_reason", f"the stream ended without a finish_reason{of}")
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
    most, of = (best_of or n) * max_tokens, f" of each of {best_of or n} sequences" if (best_of or n) > 1 else ""
    if reported > most:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but max_tokens{of} was {max_tokens}")
    elif best_of is not None and best_of > n:
        _leave_out_candidates(out, n * max_tokens)
    elif out.chunk_tokens is not None and chunks:
        if sum(out.chunk_tokens) != reported:
            out.fail("usage_mismatch", f"usage says {reported} tokens, {sum(out.chunk_tokens)} ids were streamed")
    elif chunks > reported:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but {chunks} chunks had content")
    elif chunks == 0 and reported > 0:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but no chunk had content")


def _leave_out_candidates(out: Completion, most: int) -> None:
    """The usage counts all candidates of ``best_of``, as OpenAI does; only those that are returned are output."""
    reported, returned = out.output_tokens or 0, sum(out.chunk_tokens or ())
    if out.chunk_tokens is None:
        out.fail("usage_mismatch", "which tokens were returned is not known: with best_of, token ids must be told")
    elif not 0 < returned <= min(reported, most):
        out.fail("usage_mismatch", f"usage says {reported} tokens of all candidates, {returned} ids were returned")
    out.output_tokens = returned


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
