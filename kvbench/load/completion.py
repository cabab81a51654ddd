"""Parses a finished stream: tokens with their arrival times, and success or the kind of failure."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from kvbench.common.machine import BOOT_HEADER, boot_id
from kvbench.common.secrets import without_key
from kvbench.common.server_errors import error_sentence, is_error
from kvbench.load.endpoints import (
    CALL,
    MOST_TOKENS,
    NOT_STREAMED,
    OPENAI,
    ROLE,
    THOUGHT,
    Chunk,
    Dialect,
    Stream,
    UnreadableEvent,
)
from kvbench.load.http import MalformedStream, Response, ServerEvent, events

_SLICE = 32  # events parsed between two pauses: about 0.15 ms
_BEGINNING = re.compile(rb"(?:\xef\xbb\xbf)?\s*(?:\Z|:|(?:data|event|id|retry|error)\b)")  # of a stream of events
SENT_TOGETHER_S = 0.0005
_decode = json.JSONDecoder().decode  # json.loads asks first what it got: 3 % of an event's cost


@dataclass
class Completion:
    """One request's outcome. Times [s] are those of the bytes' arrival.

    ``chunk_times``/``chunk_tokens``: chunks that carried a token (text, reasoning, a call, or token ids with text still
    held back); ``chunk_tokens`` is None where the server sent no token ids. ``first``: the first token of any kind;
    ``first_output``: the first text or call, None where all was reasoning, ``first`` where no token had any text.
    ``first_reasoning``: the first chunk of reasoning, None where none was streamed.
    ``coalesced``: token chunks that arrived in one read with the one before of their sequence although the server sent
    them apart. ``chunk_choices``: which sequence each chunk belongs to; None for a request of one. ``token_ids`` and
    ``text``: those of sequence 0, then of sequence 1 and so on, a line break between two texts; text without reasoning.
    ``output_tokens``: of the sequences that were returned. ``reasoning_tokens``: of them, by the usage;
    ``unstreamed_tokens``: of these, where no chunk came for them: they were before the first one. ``sent_times``: the
    server's own send stamps [s, monotonic clock] of the same chunks, empty where it gives none or those of another
    machine's clock. ``kv_facts``: which sequence, and as JSON where its KV was: what the built-in server says of
    canaries at their ends.
    """

    http_status: int | None = None
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] | None = field(default_factory=list)
    chunk_choices: list[int] | None = None
    sent_times: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    first: float | None = None
    first_output: float | None = None
    first_reasoning: float | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    unstreamed_tokens: int = 0
    cached_tokens: int | None = None
    coalesced: int = 0
    kv_facts: list[tuple[int, str]] = field(default_factory=list)
    done: bool = False
    error_kind: str | None = None
    error: str | None = None

    @property
    def ok(self) -> bool:
        """Tests whether the request succeeded."""
        return self.error_kind is None

    @property
    def streamed_tokens(self) -> int:
        """The output tokens that came in chunks, from the first chunk to the last."""
        return (self.output_tokens or 0) - self.unstreamed_tokens

    def fail(self, kind: str, message: str) -> None:
        """Notes a failure; the first one counts."""
        if self.error_kind is None:
            self.error_kind, self.error = kind, message

    def hide_key(self, variable: str | None, dialect: Dialect) -> None:
        """Removes the API key in that environment variable from the server's texts before they are stored."""
        self.text, self.error = without_key(self.text, variable), without_key(self.error, variable)
        if self.finish_reason not in dialect.finish_reasons:
            self.finish_reason = without_key(self.finish_reason, variable)


class _EventStream(Stream):
    """Reads the events of one response, in their order."""

    def __init__(self, dialect: Dialect, n: int, response: Response, times: Sequence[float]) -> None:
        super().__init__(n)
        self._read_event, self._times, self._ends = dialect.api.read, times, response.ends
        boot = response.headers.get(BOOT_HEADER)  # of the machine that stamps the chunks, where it tells
        self._one_clock = boot is not None and boot == boot_id()

    def take(self, event: ServerEvent) -> None:
        """Adds one event. MalformedStream."""
        data = event.data
        if event.name == b"error":
            self.fail("server_error", error_sentence(data) or "an error event without a message")
            return
        late = "{} came after the end of the stream" if self.done else None
        try:
            body = _decode(data.decode())
        except (ValueError, RecursionError):
            raise MalformedStream(late or "{} is not JSON", data) from None
        if is_error(body):
            self.fail("server_error", error_sentence(data))
            return
        if late or not isinstance(body, dict):
            raise MalformedStream(late or "{} is not an object", data)
        self.read = bisect_right(self._ends, event.end - 1)  # the piece that brought the event's last byte
        self.when = self._times[self.read]
        stamp = body.get("kvbench") if self._one_clock else None  # the built-in server's send time; else ignored
        self.sent = stamp["sent"] if isinstance(stamp, dict) and isinstance(stamp.get("sent"), float) else None
        self.counted = None  # unless the event has a usage
        try:
            self._read_event(body, self)
        except UnreadableEvent as error:
            raise MalformedStream(str(error), data) from None


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
    """Parses a stream. It succeeded only with a finish_reason, the end mark and a usage that matches.

    ``times[i]`` is the arrival of ``chunks[i]``; ``error_kind``: how the transport failed, if it did; ``pause`` is
    called between slices of work, so that the event loop can read other streams; ``dialect``: which of the three the
    server does not send; ``n``: sequences that were asked for, each of which must have its finish_reason; ``best_of``:
    of so many, all of which the usage counts.
    """
    out, response = Completion(chunk_choices=[] if n > 1 else None), Response(chunks)
    stream, problem = _EventStream(dialect, n, response, times), None
    out.http_status = response.status or None
    if response.status == 200:
        try:
            problem = _other_answer(response, dialect) or _read_events(stream, response, pause)
        except MalformedStream as error_in_it:
            problem = "malformed", str(error_in_it)
    out.prompt_tokens, out.output_tokens, out.cached_tokens, out.reasoning_tokens = stream.usage
    out.done, out.kv_facts = stream.done, stream.kv_facts
    if stream.failure is not None:
        out.fail(*stream.failure)
    if error_kind is not None:  # unless the server itself told an error before
        wording = response.problem if error_kind == "malformed" else None  # the same, with a quotation
        out.fail(error_kind, wording or error or error_kind)
    if response.problem is not None:
        out.fail("malformed", response.problem)
    if problem is not None:
        out.fail(*problem)
    if not response.status:
        out.fail("truncated", "no whole response head")
    elif response.status != 200:
        out.fail("http_error", ": ".join(filter(None, (f"HTTP {response.status}", response.sentence))))
    else:
        limited, reasoning = out.output_tokens, out.reasoning_tokens or 0
        if limited and reasoning > limited:  # the usage counts reasoning beside the output
            out.output_tokens = limited + reasoning
        brought = _with_tokens(out, stream.chunks)
        _add_chunks(out, brought, pause)
        _join(out, brought, stream.reasons, dialect)
        answered = sum(chunk.kind != THOUGHT for chunk in brought)  # a summary of reasoning has tokens of its own
        _check(out, limited, answered, max_tokens, dialect, n, best_of)
    _close(out)
    return out


def _other_answer(response: Response, dialect: Dialect) -> tuple[str, str] | None:
    """Returns kind and sentence of the failure where no stream of events came; None for a stream."""
    if response.encoding:
        return "malformed", response.sentence
    if _BEGINNING.match(response.body):
        return None
    try:
        answer = json.loads(response.body)
    except (ValueError, RecursionError):
        answer = None
    if is_error(answer):
        return "server_error", response.sentence
    if isinstance(answer, dict) and dialect.api.answer in answer:
        return "not_streamed", NOT_STREAMED
    return "malformed", f'the answer is no stream of events: "{response.sentence}"'


def _read_events(stream: _EventStream, response: Response, pause: Callable[[], None]) -> tuple[str, str] | None:
    """Adds all events. Kind and sentence of the failure where the end is missing. MalformedStream."""
    pause()
    parsed, rest = events(response.body)
    for number, event in enumerate(parsed):
        if number % _SLICE == _SLICE - 1:
            pause()
        if event.name == b"ping":
            continue
        if event.data == b"[DONE]" and event.name != b"error":
            stream.done = True
            continue
        stream.take(event)
    if not (response.complete or response.until_close):
        return "truncated", "the response's last chunk is missing"
    if rest.strip():
        inside = MalformedStream("the stream ends inside an event: {}", rest)
        return "truncated" if not stream.done else "malformed", str(inside)
    return None


def _add_chunks(out: Completion, chunks: Sequence[Chunk], pause: Callable[[], None]) -> None:
    """Adds the chunks that brought tokens. What the server sent together may share a read."""
    newest: dict[int, Chunk] = {}
    for chunk in chunks:
        before = newest.get(chunk.sequence)
        if before is not None and before.read == chunk.read:
            stamped = chunk.sent is not None and before.sent is not None
            out.coalesced += not (stamped and chunk.sent - before.sent < SENT_TOGETHER_S)
        newest[chunk.sequence] = chunk
    pause()
    out.chunk_times = [chunk.when for chunk in chunks]
    out.sent_times = [chunk.sent for chunk in chunks if chunk.sent is not None]
    if out.chunk_choices is not None:
        out.chunk_choices = [chunk.sequence for chunk in chunks]
    ids = [chunk.ids for chunk in chunks]
    ids_known = None not in ids
    out.chunk_tokens = [len(own) for own in ids] if ids_known else None
    out.first = next((chunk.when for chunk in chunks), None)
    out.first_reasoning = next((chunk.when for chunk in chunks if chunk.kind == THOUGHT), None)
    thinks = out.first_reasoning is not None
    output = (chunk.when for chunk in chunks if chunk.text or chunk.kind == CALL)
    all_reasoning = thinks or 0 < (out.output_tokens or 0) <= (out.reasoning_tokens or 0)
    out.first_output = next(output, None if all_reasoning else out.first)
    if thinks and (ids_known or not out.reasoning_tokens):  # some servers stream reasoning and count 0, or another part
        out.reasoning_tokens = _count_reasoning(out, chunks)
    out.unstreamed_tokens = _count_hidden(out, chunks)


def _count_reasoning(out: Completion, chunks: Sequence[Chunk]) -> int | None:
    """Counts the tokens in chunks of reasoning; None where chunks may hold several and no ids tell how many."""
    reasoning = [chunk for chunk in chunks if chunk.kind == THOUGHT and not chunk.text]
    if out.chunk_tokens is not None:
        return sum(len(chunk.ids or ()) for chunk in reasoning)
    return len(reasoning) if len(chunks) == out.output_tokens else None


def _count_hidden(out: Completion, chunks: Sequence[Chunk]) -> int:
    """Counts reasoning tokens without a chunk, as far as they can be told from chunks of several tokens.

    Beside chunks of reasoning there are some where each chunk of the rest has one token: a summary was streamed, or a
    part. A tag in the text shows that the reasoning is in it.
    """
    output, reasoning = out.output_tokens or 0, out.reasoning_tokens or 0
    if not reasoning:
        return 0
    if out.chunk_tokens is not None:
        return max(0, min(reasoning, output - sum(out.chunk_tokens)))
    thoughts = sum(chunk.kind == THOUGHT for chunk in chunks)
    if thoughts:
        return max(0, reasoning - thoughts) if len(chunks) - thoughts == output - reasoning else 0
    if any("think>" in chunk.text for chunk in chunks):
        return 0
    return max(0, min(reasoning, output - len(chunks)))


def _with_tokens(out: Completion, chunks: Sequence[Chunk]) -> list[Chunk]:
    """The chunks that brought tokens: those with content, and those without it where the usage tells of tokens."""
    filled = [chunk for chunk in chunks if chunk.filled]
    if out.output_tokens is None or all(chunk.ids is not None for chunk in filled or chunks):
        return filled
    first = {chunk.sequence: chunk.when for chunk in reversed(filled)}  # a role before it only announces an answer
    possible = [c for c in chunks if c.filled or c.ends or c.kind != ROLE or c.when > first.get(c.sequence, math.inf)]
    empty = _told_by_running_usage(possible) if filled else None
    if empty is None:
        empty = _told_by_tokens_left(possible, out.output_tokens - len(filled))
    return [chunk for number, chunk in enumerate(possible) if chunk.filled or number in empty]


def _told_by_running_usage(chunks: Sequence[Chunk]) -> set[int] | None:
    """The chunks whose usage counts more tokens than the one before; None where not every chunk has a usage."""
    counts = [0, *(chunk.counted for chunk in chunks)]
    if None in counts or any(chunk.sequence for chunk in chunks):
        return None
    return {number for number, (before, after) in enumerate(pairwise(counts)) if after > before}


def _told_by_tokens_left(chunks: Sequence[Chunk], left: int) -> set[int]:
    """The empty chunks that brought the ``left`` tokens of the usage, if each chunk with content brought one token.

    An end token and half a character have no text. None of the chunks after the last content if there are fewer tokens
    than chunks. The chunk of the finish_reason comes with the last token or at once after it. So it brought one if just
    one is still left over and it was not sent together with the chunk before: more are left over where chunks bring
    several tokens, and then nothing tells. Those before the last content brought one each if that makes just as many
    as are left over, and they are more than those after it that may have brought it instead. A single one before all
    content brought none: it may only announce the answer.
    """
    last = {chunk.sequence: number for number, chunk in enumerate(chunks) if chunk.filled}
    leading = defaultdict[int, list[int]](list)
    before: dict[int, float] = {}
    begun, within, after, ends = set[int](), set[int](), set[int](), set[int]()
    for number, chunk in enumerate(chunks):
        if chunk.filled:
            begun.add(chunk.sequence)
        else:
            if number < last.get(chunk.sequence, -1):
                within.add(number)
                if chunk.sequence not in begun:
                    leading[chunk.sequence].append(number)
            elif not chunk.ends:
                after.add(number)
            elif chunk.when - before.get(chunk.sequence, -math.inf) >= SENT_TOGETHER_S:
                ends.add(number)
        before[chunk.sequence] = chunk.when
    within -= {numbers[0] for numbers in leading.values() if len(numbers) == 1}
    spare, possible = left - len(within), after | ends
    brought = set[int]() if spare < len(after) else possible if spare == len(possible) else after
    certain = spare == len(brought) and len(within) > len(possible - brought)
    return within | brought if certain else brought


def _join(out: Completion, chunks: Sequence[Chunk], reasons: Sequence[list[str]], dialect: Dialect) -> None:
    """Sets text, ids and finish_reason of all sequences; the first reason that is no regular end, if there is one."""
    sequences: list[list[Chunk]] = [[] for _ in reasons]
    for chunk in chunks:
        sequences[chunk.sequence].append(chunk)
    out.text = "\n".join("".join(chunk.text for chunk in own) for own in sequences)
    if out.chunk_tokens is not None:
        out.token_ids = [token for own in sequences for chunk in own for token in chunk.ids or ()]
    if lost := [reason for own in reasons for reason in own if reason not in dialect.finish_reasons]:
        out.finish_reason = lost[0]
    elif all(reasons):
        out.finish_reason = min(own[-1] for own in reasons)


def _check(
    out: Completion, limited: int | None, answered: int, max_tokens: int, dialect: Dialect, n: int, best_of: int | None
) -> None:
    """Defines success. Each failure's sentence says what was missing.

    ``limited``: the tokens that ``max_tokens`` limits; ``answered``: chunks that are no reasoning.
    """
    if out.finish_reason is None:
        which = f" of each of the {n} choices" if n > 1 else ""
        out.fail("no_finish_reason", f"the stream ended without a finish_reason{which}")
    elif out.finish_reason not in dialect.finish_reasons:
        out.fail("not_finished", f"the server gave up: finish_reason {out.finish_reason[:40]!r}")
    if not out.done and dialect.done_marker:
        out.fail("no_done", f"the stream ended without {dialect.api.end_mark}")
    if out.output_tokens is None and not dialect.usage:
        out.output_tokens = len(out.chunk_times) if out.chunk_tokens is None else sum(out.chunk_tokens)
    if out.output_tokens is None:
        asked = " (stream_options.include_usage was asked for)" if dialect.stream_options else ""
        out.fail("no_usage", f"the stream carried no usage{asked}")
        return
    chunks, reported = len(out.chunk_times), out.output_tokens
    if (out.cached_tokens or 0) > (out.prompt_tokens or 0):
        out.fail("usage_mismatch", f"usage says {out.cached_tokens} of {out.prompt_tokens} prompt tokens were cached")
    most, which = (best_of or n) * max_tokens, f" of each of {best_of or n} sequences" if (best_of or n) > 1 else ""
    if (limited or 0) > most:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but max_tokens{which} was {max_tokens}")
    elif best_of is not None and best_of > n:
        _leave_out_candidates(out, n * max_tokens)
    elif out.chunk_tokens is not None and chunks:
        if sum(out.chunk_tokens) != out.streamed_tokens:
            out.fail("usage_mismatch", f"usage says {reported} tokens, {sum(out.chunk_tokens)} ids were streamed")
    elif answered > reported:
        out.fail("usage_mismatch", f"usage says {reported} tokens, but {answered} chunks had content")
    elif chunks == 0 and reported > (out.reasoning_tokens or 0):
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
    if ids and not (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < MOST_TOKENS):
        wild = next(i for i in ids if type(i) is not int or not 0 <= i < MOST_TOKENS)
        out.fail("malformed", f"{str(wild)[:40]!r} is no token id")
        out.token_ids = []
    for name in ("text", "error", "finish_reason"):
        text = getattr(out, name)
        if text is not None and not text.isascii():
            setattr(out, name, text.encode("utf-8", "replace").decode())
    if out.chunk_tokens is not None and len(out.chunk_tokens) != len(out.chunk_times):
        out.chunk_tokens = None
