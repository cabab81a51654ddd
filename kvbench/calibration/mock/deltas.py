"""Scripts of an answer's deltas: of which kind its tokens are, in order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

TEXT, REFUSAL, CALL, ROLE, EMPTY, HIDDEN, HELD = "text", "refusal", "tool_calls", "role", "empty", "hidden", "held"
THOUGHTS = ("reasoning_content", "reasoning", "reasoning_details")
KINDS = (TEXT, *THOUGHTS, REFUSAL, CALL, ROLE, EMPTY, HIDDEN, HELD)


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
        """One a moment of the schedule; None where no chunk is sent.

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
