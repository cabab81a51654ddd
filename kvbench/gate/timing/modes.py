"""Finds servers whose launches have one of two speeds, which each keeps for its whole life.

33 or 26 tokens/s by launch, with the same settings, were seen on a GPU (ROCm/ROCm#6347). Pairs then fall into two
groups: longer pairs do not help, and more of them do. The log ratios are cut where that leaves the least variance
within two groups of at least two pairs each. How far the groups are then apart, over the scatter within, is held
against the same figure of normal samples, since it is large for any sample that is cut at its best place (the
likelihood ratio of two normal components of one variance against one, whose distribution is simulated: McLachlan,
Applied Statistics 36, 1987).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

FEWEST_PAIRS = 6
SMALLEST_GAP = 0.03  # between the groups' mean log ratios
_ALPHA = 0.005  # of finding two groups among pairs of one
_DRAWS = 40_000


@dataclass(frozen=True)
class TwoSpeeds:
    """Two groups of pairs: which pairs are the `slower` ones, bool [pairs], and the `gap` of their mean log ratios."""

    slower: np.ndarray
    gap: float


def two_speeds(log_ratios: np.ndarray) -> TwoSpeeds | None:
    """Splits the log ratios of a throughput [pairs] in two groups; None where they are not clearly two."""
    pairs = len(log_ratios)
    if pairs < FEWEST_PAIRS or np.ptp(log_ratios) < SMALLEST_GAP:
        return None
    order = np.argsort(log_ratios, kind="stable")
    apart, cuts = _apart(log_ratios[order][None])
    slower = np.zeros(pairs, dtype=bool)
    slower[order[: cuts[0]]] = True
    gap = float(log_ratios[~slower].mean() - log_ratios[slower].mean())
    return TwoSpeeds(slower, gap) if gap >= SMALLEST_GAP and apart[0] > _critical(pairs) else None


def _apart(ordered: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cuts each ascending sample [samples, pairs] at its best place.

    Returns the groups' distance over the scatter within [samples], and the size of the lower group [samples].
    """
    n = ordered.shape[1]
    sizes = np.arange(2, n - 1)
    sums, total = np.cumsum(ordered, axis=1)[:, 1 : n - 2], ordered.sum(axis=1, keepdims=True)
    squares = (ordered**2).sum(axis=1, keepdims=True)
    lower, upper = sums / sizes, (total - sums) / (n - sizes)
    within = squares - sizes * lower**2 - (n - sizes) * upper**2
    best = within.argmin(axis=1)
    rows = np.arange(len(ordered))
    scatter = np.sqrt(np.maximum(within[rows, best], np.finfo(float).tiny) / (n - 2))
    return (upper - lower)[rows, best] / scatter, sizes[best]


@functools.cache
def _critical(pairs: int) -> float:
    """Returns the distance that normal samples of so many pairs exceed with probability `_ALPHA`."""
    samples = np.sort(np.random.default_rng(0).normal(size=(_DRAWS, pairs)), axis=1)
    return float(np.quantile(_apart(samples)[0], 1 - _ALPHA))
