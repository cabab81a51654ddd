"""Settings of the mock server, some of which a request may change by its model's name; scripts of answers."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

from kvbench.load.endpoints import PATHS

TEXT, REFUSAL, CALL, ROLE, EMPTY, HIDDEN, HELD = "text", "refusal", "tool_calls", "role", "empty", "hidden", "held"
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
KINDS = (TEXT, *THOUGHTS, REFUSAL, CALL, ROLE, EMPTY, HIDDEN, HELD)
FAULTS = ("truncate", "drop", "stall", "silent", "close_after", "no_ids")
_HTTP_ERROR = re.compile(r"http[45]\d\d")  # a status and no stream
_ROUNDING = 1e-9  # of shares that are 1 together
Event = dict[str, Any]
"""A JSON object that is sent: a request's body, or an event of its answer."""


class TokenRun(NamedTuple):
    """Consecutive tokens of one kind. ``count``: None takes the rest; ``held``: tokens more, sent with the first."""

    kind: str
    count: int | None
    held: int = 0


@lru_cache(maxsize=256)
def script(text: str) -> tuple[TokenRun, ...]:
    """Reads ``kind[:count],...``; without a count the last kind takes the rest, another one token. ValueError."""
    runs, held, parts = list[TokenRun](), 0, text.split(",")
    for number, part in enumerate(parts, 1):
        kind, colon, digits = part.strip().partition(":")
        if kind not in KINDS:
            raise ValueError(f"deltas {text!r}: there is no kind {kind!r}; it is one of {', '.join(KINDS)}")
        if colon and not (digits.isdecimal() and int(digits)):
            raise ValueError(f"deltas {text!r}: {digits!r} is no number of tokens from 1 on; write {kind}:4")
        count = int(digits) if colon else 1 if number < len(parts) else None
        if kind == HELD and number < len(parts):
            held += count or 0
        elif kind == HELD or (held and kind in (ROLE, EMPTY, HIDDEN)):
            raise ValueError(f"deltas {text!r}: held text comes with the next chunk, so text must follow it")
        else:
            runs.append(TokenRun(kind, count, held))
            held = 0
    return tuple(runs)


class AnswerPlan:
    """The deltas of one answer: of ``most`` tokens, or of fewer where all runs of the script have a count.

    ``textless``: so many of the last tokens have no text. A role takes a moment of the schedule and is no token.
    """

    def __init__(self, runs: tuple[TokenRun, ...], most: int, per_chunk: int = 1, textless: int = 0) -> None:
        self.runs, self.tokens, self.thoughts = list[tuple[str, int, int]](), 0, 0
        for kind, count, held in runs:
            if kind == ROLE:
                self.runs.append((kind, count or 1, 0))
                continue
            left = most - self.tokens
            if not left:
                break
            held = min(held, left - 1)
            count = left - held if count is None else min(count, left - held)
            self.runs.append((kind, count, held))
            self.tokens += held + count
            self.thoughts += held + count if kind in (*THOUGHTS, HIDDEN) else 0
        self.limited = self.tokens == most
        self._per_chunk, self._worded = per_chunk, self.tokens - textless
        self.kinds = [(kind, -(-count // per_chunk)) for kind, count, _ in self.runs if kind != HIDDEN]
        self.moments = sum(-(-count // per_chunk) - (-held // per_chunk) for _, count, held in self.runs)

    def deltas(self) -> Iterator[tuple[str, str, int, int, int] | None]:
        """Yields one delta for each moment of the schedule; None where no chunk is sent.

        Kind, text, the first token and the one after the last, and the place in its run (from 0).
        """
        moment = begin = limit = 0
        size = self._per_chunk
        for kind, count, held in self.runs:
            places, idle = -(-count // size), -(-held // size)
            if kind == HIDDEN:
                places, idle = 0, places
            for _ in range(idle):
                yield None
            moment += idle
            end, limit = begin + held, limit + held + (0 if kind == ROLE else count)
            worded = 0 if kind == EMPTY else self._worded
            for place in range(places):
                end = min(end + size, limit)
                words = f" w{moment}" * (min(end, worded) - begin)
                yield kind, _arguments(words, place, places) if kind == CALL else words, begin, end, place
                begin = end
                moment += 1
            begin = limit


def _arguments(words: str, place: int, places: int) -> str:
    """A piece of a call's arguments, which are one JSON object; the first piece has the function's name instead."""
    if place == 0:
        return "{}" if places == 1 else ""
    return ('{"words":"' if place == 1 else "") + words + ('"}' if place + 1 == places else "")


@dataclass
class Stamp:
    """The mock's notes on a request: receipt, sends and dues of its chunks, and its end, all [s, perf_counter]."""

    number: int
    prompt: str | list[int]
    received: float
    fault: str
    kinds: list[tuple[str, int]]  # of the chunks in their order, and how many
    body: Event
    sends: list[float] = field(default_factory=list)
    due: list[float] = field(default_factory=list)
    end: float | None = None


@dataclass(frozen=True)
class MockSettings:
    """Settings of the server; one request can change the fields from ``ttft_ms`` to ``fault``.

    ``ttft_ms``: from a request's receipt to its first chunk; ``itl_ms``: between chunks. ``jitter``: their coefficient
    of variation (gamma distributed, the means stay). ``tokens_per_chunk``: tokens in one chunk, ``events_per_write``:
    chunks sent at once. ``in_step``: the chunks of all streams fall on common ticks of ``itl_ms``, as those of an
    engine's steps do. ``textless``: so many of the last tokens have no text, as an end token has none.
    ``cached_tokens``: of every prompt, as its usage tells. ``deltas``: the kinds of the answer's tokens in their order,
    ``kind[:count],...`` (see ``script``); ``split``: what is written goes out in pieces of so many bytes, whose
    last one is stamped. ``endpoints``: those that are served. ``template_tokens``: those that a chat template adds to
    the tokens of messages. ``fail_rate``, ``truncate_rate``,
    ``drop_rate``: of the requests, this share is answered 500, closed in the middle, or closed without an answer at the
    moment of its first chunk; exact in every stretch of 1/rate requests, at places drawn from ``seed``. ValueError for
    shares that are more than all requests together.
    """

    ttft_ms: float = 50.0
    itl_ms: float = 20.0
    jitter: float = 0.0
    tokens_per_chunk: int = 1
    events_per_write: int = 1
    in_step: bool = False
    textless: int = 0
    cached_tokens: int = 0
    deltas: str = TEXT
    split: int = 0
    fault: str = ""
    fail_rate: float = 0.0
    truncate_rate: float = 0.0
    drop_rate: float = 0.0
    seed: int = 0
    vocab_size: int = 32000
    max_model_len: int = 32768
    endpoints: tuple[str, ...] = tuple(PATHS)
    template_tokens: int = 0

    def __post_init__(self) -> None:
        shares = {"fail rate": self.fail_rate, "truncate rate": self.truncate_rate, "drop rate": self.drop_rate}
        if sum(shares.values()) > 1 + _ROUNDING:
            shown = ", ".join(f"{name} {share:g}" for name, share in shares.items())
            raise ValueError(f"{shown}: together they are more than 1, which is every request; lower one of them")
        script(self.deltas)

    def for_request(self, number: int, model: str) -> MockSettings:
        """Settings of request ``number`` (from 0) to ``model``, whose query changes them: ``mock?itl_ms=5``.

        Raises:
            ValueError: an unknown name or an impossible value in the query.
        """
        fault = self.fault
        if _struck(number, self.truncate_rate, self.seed + 1):
            fault = "truncate"
        if _struck(number, self.fail_rate, self.seed):
            fault = "http500"
        if _struck(number, self.drop_rate, self.seed + 2):
            fault = "drop"
        changes = {name: _value(name, text) for name, text in parse_qsl(model.partition("?")[2])}
        return dataclasses.replace(self, **{"fault": fault, **changes})

    def gaps_s(self, count: int, number: int) -> Iterator[float]:
        """Seconds from receipt to the first write, then from each write to the next, ``count`` in all."""
        draw = random.Random(f"{self.seed}:{number}")
        shape = 1 / self.jitter**2 if self.jitter else 0.0
        for k in range(count):
            mean = (self.itl_ms if k else self.ttft_ms) / 1000
            yield mean * draw.gammavariate(shape, 1 / shape) if shape and mean else mean


def _struck(number: int, rate: float, seed: int) -> bool:
    """Tests whether request ``number`` is one of the share ``rate``: every 1/rate-th, from a place drawn by seed."""
    offset = random.Random(seed).random()
    return int((number + 1) * rate + offset) > int(number * rate + offset)


_CONVERT = {
    "ttft_ms": float, "itl_ms": float, "jitter": float, "fault": str,
    "tokens_per_chunk": int, "events_per_write": int, "cached_tokens": int, "textless": int,
    "deltas": str, "split": int,
    "in_step": lambda text: text not in ("0", "false"),
}  # fmt: skip


def _value(name: str, text: str) -> object:
    if name not in _CONVERT:
        raise ValueError(f"the model's query cannot set {name!r}: it is one of {', '.join(_CONVERT)}")
    try:
        value = _CONVERT[name](text)
    except ValueError:
        raise ValueError(f"{name}={text!r} in the model's query is not a number") from None
    if name == "fault" and text not in FAULTS and not _HTTP_ERROR.fullmatch(text):
        raise ValueError(f"there is no fault {text!r}: it is httpNNN or one of {', '.join(FAULTS)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name}={text} in the model's query is not a finite number")
    if isinstance(value, float | int) and (value < 0 or (value < 1 and name.endswith(("_chunk", "_write")))):
        raise ValueError(f"{name}={text} in the model's query is too small")
    return value
