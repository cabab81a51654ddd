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


def gaps_within(times: Sequence[float] | np.ndarray, choices: Choices) -> np.ndarray:
    """The gaps between neighbouring chunks of the same sequence, all sequences together. float64 [gaps]"""
    return np.concatenate([np.empty(0), *map(np.diff, by_sequence(times, choices))])
