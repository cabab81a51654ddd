"""Requests drawn at random, and what other requests are drawn with: exact shares, even quantiles, random token ids."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.requests.request import Notes, RequestSpec, compact
from kvbench.workload.prompts_section import (
    PERCENTILES,
    Length,
    PromptClass,
    Sessions,
    SharedPrefix,
    SyntheticPrompts,
    Think,
    Turns,
    fit_scale,
    scale_lengths,
)

LOWEST_TOKEN = 16  # ids below are where small vocabularies keep their special tokens


@dataclass(frozen=True)
class DrawContext:
    """The model that requests are drawn for, and the random numbers that they are drawn from.

    ``prefix_rng``: what the contents of shared prefixes are drawn from.
    """

    vocab_size: int
    max_model_len: int
    rng: np.random.Generator
    prefix_rng: np.random.Generator

    def tokens(self, count: int) -> tuple[int, ...]:
        """Draws random token ids. int [count]"""
        return random_tokens(count, self.vocab_size, self.rng)


def scale_of(prompts: SyntheticPrompts, longest: int, max_model_len: int) -> float:
    """The factor of all lengths; ``longest``: tokens that the longest request has beside a shared prefix."""
    if prompts.length_scale != "auto":
        return float(prompts.length_scale)
    return fit_scale(longest, max_model_len - max((prefix.tokens for prefix in prompts.shared_prefix), default=0))


def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Whole counts that add up to ``total`` and differ from share x total by less than 1 (Hamilton's method)."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(x + 1e-9) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def _shared_counts(shares: Sequence[float], counts: list[int]) -> list[list[int]]:
    """The prompts of each class that get each prefix, exact in total. [shares][classes]"""
    left, given, parts = list(counts), 0, []
    for upto in itertools.accumulate(shares):
        total = min(int(np.floor(upto * sum(counts) + 0.5)), sum(counts)) - given
        part = largest_remainder([float(c) for c in left], total) if total else [0] * len(left)
        left = [a - b for a, b in zip(left, part, strict=True)]
        given += total
        parts.append(part)
    return parts


def draw_prefixes(
    families: Sequence[SharedPrefix], counts: list[int], context: DrawContext
) -> Callable[[int], list[tuple[int, ...]]]:
    """Draws the shared prefixes. Returns a function: index of a class -> a prefix for each of its prompts, () for none.

    Which prompts get one is random, and drawn when the function is called: once for each class. The prefixes of a
    length take turns over all classes, so that they are used equally often.
    """
    turns = [
        itertools.cycle([random_tokens(f.tokens, context.vocab_size, context.prefix_rng) for _ in range(f.families)])
        for f in families
    ]
    shared = _shared_counts([f.share for f in families], counts)

    def give(which: int) -> list[tuple[int, ...]]:
        labels = np.full(counts[which], -1)
        labels[: sum(part[which] for part in shared)] = np.repeat(np.arange(len(shared)), [p[which] for p in shared])
        return [next(turns[label]) if label >= 0 else () for label in context.rng.permutation(labels)]

    return give


def even_quantiles(count: int, rng: np.random.Generator) -> np.ndarray:
    """Returns probabilities evenly spaced in (0, 1), in random order. float64 [count]"""
    return rng.permutation((np.arange(count) + 0.5) / max(count, 1))


def draw_lengths(length: Length, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws token counts at evenly spaced quantiles of the distribution, in random order. int64 [count]"""
    u = (np.arange(count) + 0.5) / max(count, 1)
    if length.percentiles is not None:
        given = {"min": 1.0, **length.percentiles}
        points = sorted((PERCENTILES[name], value) for name, value in given.items())
        values = np.interp(u, [p for p, _ in points], [v for _, v in points])
        lengths = np.maximum(1, np.rint(values)).astype(np.int64)
    else:
        lengths = (length.low + np.floor(u * (length.high - length.low + 1))).astype(np.int64)
    return rng.permutation(lengths)


def random_tokens(count: int, vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    """Draws random token ids, none of the lowest ones. int [count]"""
    low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
    return compact(rng.integers(low, vocab_size, size=count).tolist())


def check_fits(name: str, prompt: int, output: int, max_model_len: int) -> None:
    """Raises ValueError for a request of class ``name`` that is longer than ``max_model_len`` tokens."""
    if prompt + output > max_model_len:
        raise ValueError(
            f"a request of class {name!r} needs {prompt} + {output} = {prompt + output} tokens, more than "
            f"max_model_len {max_model_len}; shorten prompt_tokens or output_tokens (a shared prefix counts too), or "
            "set length_scale: auto."
        )


def draw_requests(prompts: SyntheticPrompts, count: int, context: DrawContext) -> tuple[list[RequestSpec], Notes]:
    """Draws ``count`` single requests, their classes in random order, and notes for the report."""
    classes, rng = prompts.classes, context.rng
    longest = max(c.prompt_tokens.maximum + c.output_tokens.maximum for c in classes)
    scale = scale_of(prompts, longest, context.max_model_len)
    counts = largest_remainder([c.share for c in classes], count)
    give = draw_prefixes(prompts.shared_prefix, counts, context)
    drawn: list[RequestSpec] = []
    for which, item in enumerate(classes):
        lengths = scale_lengths(draw_lengths(item.prompt_tokens, counts[which], rng), scale)
        outputs = scale_lengths(draw_lengths(item.output_tokens, counts[which], rng), scale)
        for prompt_len, output_len, prefix in zip(lengths, outputs, give(which), strict=True):
            check_fits(item.name, len(prefix) + int(prompt_len), int(output_len), context.max_model_len)
            body = context.tokens(int(prompt_len))
            drawn.append(
                RequestSpec(
                    len(drawn), item.name, prefix + body, None, int(output_len),
                    prefix_tokens=len(prefix), priority=item.priority, **item.answers,
                )
            )  # fmt: skip
    requests = [dataclasses.replace(drawn[j], index=i) for i, j in enumerate(rng.permutation(len(drawn)))]
    return requests, {"length_scale": scale} if scale != 1.0 else {}


def draw_conversations(
    prompts: SyntheticPrompts, sessions: Sessions, count: int, context: DrawContext
) -> tuple[list[RequestSpec], Notes]:
    """Draws ``count`` conversations, their classes in random order, and notes for the report.

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
    scale = scale_of(prompts, longest, context.max_model_len)
    counts = largest_remainder([c.share for c in classes], count)
    give = draw_prefixes(prompts.shared_prefix, counts, context)
    drawn: list[list[RequestSpec]] = []
    for which, item in enumerate(classes):
        drawn += _of_class(item, give(which), sessions, scale, context)
    requests: list[RequestSpec] = []
    for number, which in enumerate(context.rng.permutation(len(drawn))):
        first = len(requests)
        requests += [dataclasses.replace(turn, index=first + i, session=number) for i, turn in enumerate(drawn[which])]
    notes: Notes = {"sessions": count, "history": sessions.history}
    return requests, notes | ({"length_scale": scale} if scale != 1.0 else {})


def draw_turns(turns: Turns, count: int, rng: np.random.Generator) -> np.ndarray:
    """Turns of ``count`` conversations: even quantiles of the range, in random order. int64 [count]"""
    return (turns.low + np.floor(even_quantiles(count, rng) * (turns.high - turns.low + 1))).astype(np.int64)


def draw_thinks(think: Think, count: int, rng: np.random.Generator) -> np.ndarray:
    """Draws think times [s]: even quantiles of their distribution, in random order. float64 [count]"""
    u = even_quantiles(count, rng)
    if think.exponential is not None:
        return -think.exponential * np.log1p(-u)
    return think.low + u * (think.high - think.low)


def _of_class(
    item: PromptClass, prefixes: list[tuple[int, ...]], sessions: Sessions, scale: float, context: DrawContext
) -> list[list[RequestSpec]]:
    """The conversations of one class, one for each of ``prefixes``; not yet numbered."""
    rng = context.rng
    turns = draw_turns(sessions.turns, len(prefixes), rng)
    every, later = int(turns.sum()), int(turns.sum()) - len(prefixes)
    firsts = iter(scale_lengths(draw_lengths(item.prompt_tokens, len(prefixes), rng), scale))
    users = iter(scale_lengths(draw_lengths(sessions.user_tokens or item.prompt_tokens, later, rng), scale))
    outputs = iter(scale_lengths(draw_lengths(item.output_tokens, every, rng), scale))
    thinks = iter(draw_thinks(sessions.think_s, later, rng))
    actual = sessions.history == "actual"
    conversations = []
    for prefix, total in zip(prefixes, turns, strict=True):
        ids, conversation = prefix, []
        for turn in range(int(total)):
            new = int(next(users) if turn else next(firsts))
            output = int(next(outputs))
            check_fits(item.name, len(ids) + new, output, context.max_model_len)
            ids += context.tokens(new)
            conversation.append(
                RequestSpec(
                    0, item.name, ids, None, output, prefix_tokens=len(prefix), priority=item.priority, turn=turn,
                    think_s=float(next(thinks)) if turn else 0.0, new_tokens=new if turn and actual else 0,
                    **item.answers,
                )
            )  # fmt: skip
            ids += context.tokens(output)
        conversations.append(conversation)
    return conversations
