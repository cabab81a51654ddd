"""Draws conversations of several turns out of synthetic prompts, before the run."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvbench.requests.draw import (
    draw_lengths,
    draw_prefixes,
    even_quantiles,
    largest_remainder,
    random_tokens,
    scale_of,
)
from kvbench.requests.request import RequestSpec
from kvbench.workload.prompts_section import PromptClass, Sessions, SyntheticPrompts, Think, Turns, scale_lengths


def draw_conversations(
    prompts: SyntheticPrompts,
    sessions: Sessions,
    count: int,
    vocab_size: int,
    max_model_len: int,
    rng: np.random.Generator,
) -> tuple[list[RequestSpec], dict[str, Any]]:
    """``count`` conversations, their classes in random order, and notes for the report.

    Turn 1 is a shared prefix (in some) and a prompt of the class; turn k + 1 is the whole of turn k, its answer
    (``max_tokens`` random ids) and new tokens of the user. The classes have exactly their shares of the conversations;
    lengths are even quantiles of their distributions over all turns of a class.
    """
    classes, turns = prompts.classes, sessions.turns.high
    longest = max(
        c.prompt_tokens.maximum
        + (turns - 1) * (sessions.user_tokens or c.prompt_tokens).maximum
        + turns * c.output_tokens.maximum
        for c in classes
    )
    scale = scale_of(prompts, longest, max_model_len)
    counts = largest_remainder([c.share for c in classes], count)
    give = draw_prefixes(prompts.shared_prefix, counts, vocab_size, rng)
    drawn: list[list[RequestSpec]] = []
    for which, item in enumerate(classes):
        drawn += _of_class(item, give(which), sessions, scale, vocab_size, rng)
    requests: list[RequestSpec] = []
    for number, which in enumerate(rng.permutation(len(drawn))):
        first = len(requests)
        requests += [dataclasses.replace(turn, index=first + i, session=number) for i, turn in enumerate(drawn[which])]
    notes: dict[str, Any] = {"sessions": count, "history": sessions.history}
    return requests, notes | ({"length_scale": scale} if scale != 1.0 else {})


def draw_turns(turns: Turns, count: int, rng: np.random.Generator) -> np.ndarray:
    """Turns of ``count`` conversations: even quantiles of the range, in random order. int64 [count]"""
    return (turns.low + np.floor(even_quantiles(count, rng) * (turns.high - turns.low + 1))).astype(np.int64)


def draw_thinks(think: Think, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` think times [s]: even quantiles of their distribution, in random order. float64 [count]"""
    u = even_quantiles(count, rng)
    if think.exponential is not None:
        return -think.exponential * np.log1p(-u)
    return think.low + u * (think.high - think.low)


def _of_class(
    item: PromptClass,
    prefixes: list[tuple[int, ...]],
    sessions: Sessions,
    scale: float,
    vocab_size: int,
    rng: np.random.Generator,
) -> list[list[RequestSpec]]:
    """The conversations of one class, one for each of ``prefixes``; not yet numbered."""
    turns = draw_turns(sessions.turns, len(prefixes), rng)
    every, later = int(turns.sum()), int(turns.sum()) - len(prefixes)
    firsts = iter(scale_lengths(draw_lengths(item.prompt_tokens, len(prefixes), rng), scale))
    users = iter(scale_lengths(draw_lengths(sessions.user_tokens or item.prompt_tokens, later, rng), scale))
    outputs = iter(scale_lengths(draw_lengths(item.output_tokens, every, rng), scale))
    thinks = iter(draw_thinks(sessions.think_s, later, rng))
    actual = sessions.history == "actual"
    found = []
    for prefix, total in zip(prefixes, turns, strict=True):
        ids, conversation = prefix, []
        for turn in range(int(total)):
            new = int(next(users) if turn else next(firsts))
            ids += random_tokens(new, vocab_size, rng)
            output = int(next(outputs))
            conversation.append(
                RequestSpec(
                    0, item.name, ids, None, output, prefix_tokens=len(prefix), priority=item.priority, turn=turn,
                    think_s=float(next(thinks)) if turn else 0.0, new_tokens=new if turn and actual else 0,
                )
            )  # fmt: skip
            ids += random_tokens(output, vocab_size, rng)
        found.append(conversation)
    return found
