"""Teacher forcing: engines predict the same tokens, the prompts and the baseline's answers to them, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from engine.teacher_forcing import TeacherForced
from kvbench.quality.prompts import Prompt
from kvbench.quality.statistics import Positions, compare_logits

ROWS = 8  # sequences side by side
_MOST_LOGITS = 2**28  # of one batch: 1 GiB in float32
Key = TypeVar("Key")
Steps = Iterator[dict[int, int]]
"""How many tokens each row is fed in a step."""


@dataclass(frozen=True)
class Conversation:
    """A prompt and the answers to its turns: ``tokens [N]``, and ``answered [N]``, whether each is of an answer.

    All tokens but the last are fed, and the token that follows each of them is known.
    """

    tokens: np.ndarray
    answered: np.ndarray

    @classmethod
    def of(cls, prompt: Prompt, answers: Sequence[Sequence[int]]) -> Conversation:
        parts = prompt.conversation(answers)
        answered = np.repeat(np.arange(len(parts)) % 2 == 1, [len(part) for part in parts])
        return cls(np.concatenate([np.asarray(part, dtype=np.int64) for part in parts]), answered)

    @property
    def fed(self) -> int:
        return len(self.tokens) - 1

    def run(self, start: int) -> int:
        """Tokens from ``start`` to the next answer, to be fed in chunks."""
        ends = np.flatnonzero(self.answered[start : self.fed])
        return int(ends[0]) if len(ends) else self.fed - start


def in_order(rows: Sequence[Conversation], chunk: int) -> Steps:
    """Turn by turn: one prompt after another in chunks, then all answers side by side, token by token."""
    at = [0] * len(rows)
    while any(place < row.fed for place, row in zip(at, rows, strict=True)):
        for i, row in enumerate(rows):
            while at[i] < row.fed and (left := row.run(at[i])):
                yield {i: min(chunk, left)}
                at[i] += min(chunk, left)
        while ready := [i for i, row in enumerate(rows) if at[i] < row.fed and row.answered[at[i]]]:
            yield dict.fromkeys(ready, 1)
            for i in ready:
                at[i] += 1


def otherwise(rows: Sequence[Conversation], chunk: int) -> Steps:
    """The same tokens with other batch-mates, chunks and order: each step takes some of the rows, as far as it may."""
    rng = np.random.default_rng(0)
    at = [0] * len(rows)
    while unfinished := [i for i, row in enumerate(rows) if at[i] < row.fed]:
        step, left = {}, chunk
        for i in rng.permutation(unfinished)[: rng.integers(1, len(unfinished) + 1)].tolist():
            run = rows[i].run(at[i])
            count = min(run, left, int(rng.integers(1, chunk + 1))) if run else min(1, left)
            if count:
                step[i], left = count, left - count
        for i, count in step.items():
            at[i] += count
        yield step


def batches(conversations: Sequence[Conversation], vocab_size: int) -> Iterator[range]:
    """Indices that are computed side by side."""
    start, size = 0, 0
    for i, each in enumerate(conversations):
        grown = (size + each.fed) * vocab_size
        if i - start == ROWS or (i > start and grown > _MOST_LOGITS):
            yield range(start, i)
            start, size = i, 0
        size += each.fed
    if conversations:
        yield range(start, len(conversations))


@torch.inference_mode()
def logits_of(
    engine: TeacherForced, rows: Sequence[Conversation], steps: Iterator[dict[int, int]]
) -> list[torch.Tensor]:
    """``[fed, vocab]`` of each row, computed in ``steps``."""
    engine.reset()
    tokens = [row.tokens.tolist() for row in rows]
    found: list[torch.Tensor] = []
    at = [0] * len(rows)
    for step in steps:
        got = engine.feed({i: tokens[i][at[i] : at[i] + count] for i, count in step.items()})
        if not found:
            example = next(iter(got.values()))
            found = [example.new_empty(row.fed, example.shape[1]) for row in rows]
        for i, logits in got.items():
            found[i][at[i] : at[i] + len(logits)] = logits
            at[i] += len(logits)
    return found


def predictions(
    engine: TeacherForced, conversations: Sequence[Conversation], vocab_size: int, chunk: int
) -> Iterator[torch.Tensor]:
    """``[fed, vocab]`` of each conversation, turn by turn in chunks of at most ``chunk`` tokens."""
    for picked in batches(conversations, vocab_size):
        rows = [conversations[i] for i in picked]
        yield from logits_of(engine, rows, in_order(rows, chunk))


@dataclass(frozen=True)
class Arm:
    """One of the engines that are compared. ``order``: from conversations and most tokens of a chunk to its steps."""

    engine: TeacherForced
    chunk: int
    order: Callable[[Sequence[Conversation], int], Steps] = in_order


def compare_arms(
    baseline: Arm,
    arms: Mapping[Key, Arm],
    conversations: Sequence[Conversation],
    vocab_size: int,
    on_batch: Callable[[int], None] = lambda done: None,
) -> dict[Key, list[Positions]]:
    """What each arm predicts beside ``baseline``, conversation by conversation; ``done`` of them before each batch."""
    found: dict[Key, list[Positions]] = {name: [] for name in arms}
    for picked in batches(conversations, vocab_size):
        on_batch(picked.start)
        rows = [conversations[i] for i in picked]
        expected = logits_of(baseline.engine, rows, baseline.order(rows, baseline.chunk))
        for name, arm in arms.items():
            got = expected if arm is baseline else logits_of(arm.engine, rows, arm.order(rows, arm.chunk))
            for row, one, other in zip(rows, expected, got, strict=True):
                following = torch.from_numpy(row.tokens[1:]).to(one.device)
                found[name].append(compare_logits(one, other, following, row.answered[:-1], ~row.answered[1:]))
    return found
