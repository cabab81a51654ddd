"""The sequences of a request: n > 1 and beam search return several, whose chunks share one stream. Pure functions.

A gap between two chunks is one only within a sequence: between two sequences it says nothing about either.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Choices = Sequence[int] | np.ndarray | None
"""Which sequence each chunk of a request belongs to; None: the request has one sequence."""


def by_sequence(values: Sequence[float] | np.ndarray, choices: Choices) -> list[np.ndarray]:
    """``values`` of a request's chunks [chunks], those of each sequence by themselves, in order of their numbers."""
    values = np.asarray(values, dtype=float)
    if choices is None:
        return [values]
    choices = np.asarray(choices)
    return [values[choices == choice] for choice in np.unique(choices)]


def last_to_end(times: Sequence[float] | np.ndarray, choices: Choices) -> np.ndarray:
    """The chunks' times of the sequence that ended last. float64 [chunks of it]"""
    return max(by_sequence(times, choices), key=lambda own: own[-1] if len(own) else -np.inf)


def times_per_output_token(
    times: Sequence[float] | np.ndarray, choices: Choices, tokens: Sequence[int] | np.ndarray | None, total: float
) -> np.ndarray:
    """(last - first chunk) / (tokens - 1) of each sequence; NaN for one token, or all in one chunk. float64 [sequences]

    tokens: of each chunk; None where that is not known: the request's ``total`` is then shared out evenly over them
    """
    if choices is None or tokens is None:
        tokens = np.full(len(times), total / max(len(times), 1))
    further = np.array([own.sum() - 1 for own in by_sequence(tokens, choices)])
    spans = np.array([own[-1] - own[0] if len(own) > 1 else np.nan for own in by_sequence(times, choices)])
    return np.divide(spans, further, out=np.full(len(spans), np.nan), where=further > 0)


def gaps_within(times: Sequence[float] | np.ndarray, choices: Choices) -> np.ndarray:
    """The gaps between neighbouring chunks of the same sequence, all sequences together. float64 [gaps]"""
    return np.concatenate([np.empty(0), *map(np.diff, by_sequence(times, choices))])
