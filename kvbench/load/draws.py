"""Draws that the makers of requests share: shares met exactly, lengths at even quantiles, random token ids."""

from __future__ import annotations

import numpy as np

from kvbench.load.length import Length

_LOWEST_TOKEN = 16  # ids below are where small vocabularies keep their special tokens
_QUANTILE_OF = {"min": 0.0, "p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99, "max": 1.0}


def largest_remainder(shares: list[float], total: int) -> list[int]:
    """Whole counts that add up to ``total`` and differ from share x total by less than 1 (Hamilton's method)."""
    exact = [share * total / sum(shares) for share in shares]
    counts = [int(x + 1e-9) for x in exact]
    order = sorted(range(len(shares)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: total - sum(counts)]:
        counts[i] += 1
    return counts


def shared_counts(share: float, counts: list[int]) -> list[int]:
    """How many of each class get the prefix: exact in total, and in proportion to the classes."""
    total = int(np.floor(share * sum(counts) + 0.5))
    return largest_remainder([float(c) for c in counts], total)


def even_quantiles(count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` probabilities evenly spaced in (0, 1), in random order. float64 [count]"""
    return rng.permutation((np.arange(count) + 0.5) / max(count, 1))


def draw_lengths(length: Length, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` token counts at evenly spaced quantiles of the distribution, in random order. int64 [count]"""
    u = (np.arange(count) + 0.5) / max(count, 1)
    if length.percentiles is not None:
        given = {"min": 1.0, **length.percentiles}
        points = sorted((_QUANTILE_OF[name], value) for name, value in given.items())
        values = np.interp(u, [p for p, _ in points], [v for _, v in points])
        lengths = np.maximum(1, np.rint(values)).astype(np.int64)
    else:
        low, high = int(length.low or 1), int(length.high or 1)
        lengths = (low + np.floor(u * (high - low + 1))).astype(np.int64)
    return rng.permutation(lengths)


def random_tokens(count: int, vocab_size: int, rng: np.random.Generator) -> tuple[int, ...]:
    """``count`` random token ids, none of the lowest ones. int [count]"""
    low = _LOWEST_TOKEN if vocab_size > 2 * _LOWEST_TOKEN else 0
    return tuple(rng.integers(low, vocab_size, size=count).tolist())
