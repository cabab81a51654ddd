"""Draws that all kinds of requests use: shares met exactly, lengths at even quantiles, random token ids."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from kvbench.requests.request import compact
from kvbench.workload.prompts_section import PERCENTILES, Length, SharedPrefix, SyntheticPrompts, fit_scale

LOWEST_TOKEN = 16  # ids below are where small vocabularies keep their special tokens


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
    """How many prompts of each class get each prefix: exact in total, in proportion by class. [shares][classes]"""
    left, given, found = list(counts), 0, []
    for upto in itertools.accumulate(shares):
        total = min(int(np.floor(upto * sum(counts) + 0.5)), sum(counts)) - given
        part = largest_remainder([float(c) for c in left], total) if total else [0] * len(left)
        left = [a - b for a, b in zip(left, part, strict=True)]
        given += total
        found.append(part)
    return found


def draw_prefixes(
    families: Sequence[SharedPrefix], counts: list[int], vocab_size: int, rng: np.random.Generator
) -> Callable[[int], list[tuple[int, ...]]]:
    """Draws the shared prefixes. Returns a function: index of a class -> a prefix for each of its prompts, () for none.

    Which prompts get one is random, and drawn when the function is called: once for each class. The prefixes of a
    length take turns over all classes, so that they are used equally often.
    """
    turns = [itertools.cycle([random_tokens(f.tokens, vocab_size, rng) for _ in range(f.families)]) for f in families]
    shared = _shared_counts([f.share for f in families], counts)

    def give(which: int) -> list[tuple[int, ...]]:
        labels = np.full(counts[which], -1)
        labels[: sum(part[which] for part in shared)] = np.repeat(np.arange(len(shared)), [p[which] for p in shared])
        return [next(turns[label]) if label >= 0 else () for label in rng.permutation(labels)]

    return give


def even_quantiles(count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` probabilities evenly spaced in (0, 1), in random order. float64 [count]"""
    return rng.permutation((np.arange(count) + 0.5) / max(count, 1))


def draw_lengths(length: Length, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` token counts at evenly spaced quantiles of the distribution, in random order. int64 [count]"""
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
    """``count`` random token ids, none of the lowest ones. int [count]"""
    low = LOWEST_TOKEN if vocab_size > 2 * LOWEST_TOKEN else 0
    return compact(rng.integers(low, vocab_size, size=count).tolist())
