"""The answers of engines, and their predictions of given answers.

Free running: the greedy answers of an engine that schedules the prompts itself. Teacher forcing: engines predict the
same tokens, the prompts and the baseline's answers to them, batch by batch; this tells their own greedy answers up to
the first token that differs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from kvbench.quality.figures import Positions
from kvbench.quality.prompts import Answers, Prompt
from kvbench_engine.engine import Engine
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.teacher_forcing import TeacherForced

ROWS = 16  # sequences side by side
_BLOCK_ELEMENTS = 2**19  # logits at once in float64, which stay in a core's cache
_MOST_LOGITS = 2**28  # of one batch: 1 GiB in float32
UNKNOWN = -1  # a token that an engine would choose after one that it was not fed
Ids = tuple[int, ...]
Key = TypeVar("Key")
Steps = Iterator[dict[int, int]]
"""The number of tokens that each row is fed in a step."""


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
        """The number of tokens from ``start`` to the next answer, to be fed in chunks."""
        return next(iter(np.flatnonzero(self.answered[start : self.fed]).tolist()), self.fed - start)


def in_order(rows: Sequence[Conversation], chunk: int) -> Steps:
    """Turn by turn: the prompts one after another in steps of ``chunk`` tokens, then all answers, token by token."""
    at = [0] * len(rows)
    while any(place < row.fed for place, row in zip(at, rows, strict=True)):
        while step := _next_prompts(rows, at, chunk):
            yield step
            for i, count in step.items():
                at[i] += count
        while ready := [i for i, row in enumerate(rows) if at[i] < row.fed and row.answered[at[i]]]:
            yield dict.fromkeys(ready, 1)
            for i in ready:
                at[i] += 1


def _next_prompts(rows: Sequence[Conversation], at: Sequence[int], chunk: int) -> dict[int, int]:
    """Takes the next tokens of prompts, row by row, until a step of ``chunk`` tokens is full; empty without any."""
    step, left = {}, chunk
    for i, row in enumerate(rows):
        if left and at[i] < row.fed and (run := row.run(at[i])):
            step[i] = min(run, left)
            left -= step[i]
    return step


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
    for i, conversation in enumerate(conversations):
        grown = (size + conversation.fed) * vocab_size
        if i - start == ROWS or (i > start and grown > _MOST_LOGITS):
            yield range(start, i)
            start, size = i, 0
        size += conversation.fed
    if conversations:
        yield range(start, len(conversations))


@torch.inference_mode()
def logits_of(
    engine: TeacherForced, rows: Sequence[Conversation], steps: Iterator[dict[int, int]]
) -> list[torch.Tensor]:
    """Computes the logits ``[fed, vocab]`` of each row in ``steps``."""
    engine.reset()
    tokens = [row.tokens.tolist() for row in rows]
    logits_by_row: list[torch.Tensor] = []
    at = [0] * len(rows)
    for step in steps:
        got = engine.feed({i: tokens[i][at[i] : at[i] + count] for i, count in step.items()})
        if not logits_by_row:
            example = next(iter(got.values()))
            logits_by_row = [example.new_empty(row.fed, example.shape[1]) for row in rows]
        for i, logits in got.items():
            logits_by_row[i][at[i] : at[i] + len(logits)] = logits
            at[i] += len(logits)
    return logits_by_row


def predictions(
    engine: TeacherForced, conversations: Sequence[Conversation], vocab_size: int, chunk: int
) -> Iterator[torch.Tensor]:
    """Computes ``[fed, vocab]`` of each conversation, turn by turn in chunks of at most ``chunk`` tokens."""
    for picked in batches(conversations, vocab_size):
        rows = [conversations[i] for i in picked]
        yield from logits_of(engine, rows, in_order(rows, chunk))


@dataclass(frozen=True)
class Arm:
    """One of the engines that are compared; ``order`` makes the steps of conversations with this ``chunk`` at most."""

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
    """Compares each arm's predictions with ``baseline``'s; ``on_batch`` hears how many conversations are done."""
    positions: dict[Key, list[Positions]] = {name: [] for name in arms}
    for picked in batches(conversations, vocab_size):
        on_batch(picked.start)
        rows = [conversations[i] for i in picked]
        expected = logits_of(baseline.engine, rows, baseline.order(rows, baseline.chunk))
        for name, arm in arms.items():
            got = expected if arm is baseline else logits_of(arm.engine, rows, arm.order(rows, arm.chunk))
            for row, old, new in zip(rows, expected, got, strict=True):
                following = torch.from_numpy(row.tokens[1:]).to(old.device)
                positions[name].append(compare_logits(old, new, following, row.answered[:-1], ~row.answered[1:]))
    return positions


def compare_logits(
    expected: torch.Tensor, got: torch.Tensor, following: torch.Tensor, decoded: np.ndarray, own: np.ndarray
) -> Positions:
    """Two engines' logits ``[N, vocab]`` of the same tokens, in float64; ``following [N]``: the next token of each."""
    parts: list[tuple[torch.Tensor, ...]] = []
    block = max(1, _BLOCK_ELEMENTS // expected.shape[-1])
    for one, other, token in zip(*(rows.split(block) for rows in (expected, got, following)), strict=True):
        log_p = one.double().log_softmax(-1)
        log_q = log_p if torch.equal(one, other) else other.double().log_softmax(-1)
        p = log_p.exp()
        terms = torch.where(p > 0, p * (log_p - log_q), 0.0)
        old, new = (log.gather(1, token[:, None])[:, 0] for log in (log_p, log_q))
        likeliest = other.argmax(-1)
        same = one.argmax(-1) == likeliest
        parts.append((terms.sum(-1).clamp_min(0.0), new.exp() - old.exp(), -old, -new, same, likeliest))
    *columns, likeliest = (torch.cat(column).cpu().numpy() for column in zip(*parts, strict=True))
    return Positions(*columns, decoded, own, likeliest)


def predicted_answers(expected: Sequence[Sequence[int]], positions: Positions) -> tuple[Ids, ...]:
    """The greedy answers of an engine that was fed the ``expected`` ones with their prompt, one a turn.

    They are known up to the first token that it would have chosen otherwise, and are ``UNKNOWN`` from there on.
    """
    tokens = np.array([token for answer in expected for token in answer])
    chosen = positions.likeliest[~positions.own]
    if len(differing := np.flatnonzero(chosen != tokens)):
        at = differing[0]
        tokens[at] = chosen[at]
        tokens[at + 1 :] = UNKNOWN
    ends = np.cumsum([len(answer) for answer in expected])[:-1]
    return tuple(tuple(part.tolist()) for part in np.split(tokens, ends))


def answer_all(engine: Engine, prompts: Sequence[Prompt]) -> Answers:
    """The engine's answers to all prompts, asked at once in this order; a later turn follows its own earlier answer."""
    by_id = {prompt.prompt_id: prompt for prompt in prompts}
    answers: dict[str, list[tuple[int, ...]]] = {name: [] for name in by_id}
    growing: dict[str, list[int]] = {}

    def ask(prompt: Prompt) -> None:
        given = answers[prompt.prompt_id]
        parts = [*itertools.chain(*zip(prompt.turns, given, strict=False)), prompt.turns[len(given)]]
        ids = tuple(itertools.chain(*parts))
        growing[prompt.prompt_id] = []
        params = SamplingParams(max_tokens=prompt.max_tokens, temperature=0.0, ignore_eos=True)
        engine.add_request(Request(prompt.prompt_id, ids, params))

    for prompt in prompts:
        ask(prompt)
    while engine.has_work():
        for output in engine.step():
            name = output.request_id
            growing[name] += output.token_ids
            if output.finish_reason is not None:
                answers[name].append(tuple(growing[name]))
                if len(answers[name]) < len(by_id[name].turns):
                    ask(by_id[name])
    return {name: tuple(given) for name, given in answers.items()}
