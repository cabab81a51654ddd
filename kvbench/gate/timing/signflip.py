"""Exact one-sided sign-flip tests of paired launches, for one hypothesis and for all of them at once (max-T).

Why flips. In each pair a coin decides which side is launched first. If candidate and base are the same, swapping them
in a pair flips the sign of its log ratios and changes nothing else, so all 2^K sign patterns of K pairs are equally
likely. That holds under any noise (drift, autocorrelation, heavy tails, two modes of the machine) and any dependence
between the cells and metrics of a pair, since all of a pair flip together. The p-value, the share of patterns that look
at least as bad as the one observed, is therefore exact. An order that is balanced over the pairs, instead of random in
each, would not have this.

Why launches. Requests of one launch share its memory layout, its clocks, its neighbours: with a sd of 3 % from launch
to launch, a rank test over pooled requests at 0.05 rejects one time in three with no change at all. The launch is what
was repeated, so it is what is counted.

Why 8 pairs. No p-value is below 2^-K, the observed pattern being one of them: 0.0078 of 7 pairs, 0.0039 of 8. Under
max-T that bound holds for the smallest p of all hypotheses together; Holm's correction over 72 would need 13 pairs.

Max-T. In each pattern: the largest studentised mean t of all hypotheses. The adjusted p of a hypothesis is the share of
patterns whose largest t, over it and those with a smaller t than its own, reaches its own (step-down: Westfall and
Young, Resampling-Based Multiple Testing, 1993, algorithm 2.8), made monotone. It controls the family-wise error, and
dependence between hypotheses makes it sharper. Flips leave a hypothesis' sum of squares as it is, so
t = u sqrt((K - 1) / (K - u^2)) grows with u = sum(x) / |x|, the same function for all hypotheses; only u is computed.
A hypothesis without variance needs no special case: all 0 has u = 0 and p = 1, a constant harm the largest u there can
be (t infinite) and a p of 2^-K at least.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvbench.gate.timing.rules import MOST_PAIRS

_CHUNK = 128  # patterns: their sums stay in the cache, and a product so small is not worth a BLAS thread
_TIE = 1e-9  # of u, which lies within +-sqrt(pairs): a difference by rounding counts as none


def sign_patterns(pairs: int) -> Iterator[np.ndarray]:
    """Yields all 2^pairs patterns of +-1 in chunks [patterns, pairs]; the first is the one observed, all +1."""
    if not 1 <= pairs <= MOST_PAIRS:
        raise ValueError(f"{pairs} pairs: all sign patterns are made of 1 to {MOST_PAIRS} pairs")
    bits = np.arange(pairs)
    for begin in range(0, 2**pairs, _CHUNK):
        numbers = np.arange(begin, min(begin + _CHUNK, 2**pairs))[:, None]
        yield 1.0 - 2.0 * ((numbers >> bits) & 1)


def scaled(harm: np.ndarray) -> np.ndarray:
    """Scales ``harm`` [..., pairs, hypotheses] to columns of length 1, whose signed sums are the u."""
    length = np.sqrt((harm * harm).sum(axis=-2, keepdims=True))
    return np.divide(harm, length, out=np.zeros_like(harm), where=length > 0)


def single_p(harm: np.ndarray) -> np.ndarray:
    """The p of "no harm" against "harm" for each alone [hypotheses], from ``harm`` [pairs, hypotheses]."""
    x = scaled(harm)
    observed = x.sum(axis=0) - _TIE
    reached = sum((signs @ x >= observed).sum(axis=0) for signs in sign_patterns(len(x)))
    return reached / 2.0 ** len(x)


def noninferior_p(harm: np.ndarray, margins: np.ndarray) -> np.ndarray:
    """The p of "worse by the margin or more" against "by less" for each alone [hypotheses].

    The same flips of (margin - harm): exact where the candidate differs from the base by a constant factor, as its
    distance from that factor has the coin's sign again.
    """
    return single_p(margins - harm)


def adjusted_p(harm: np.ndarray) -> np.ndarray:
    """The step-down max-T p of "harm" [hypotheses], adjusted for all of them, from ``harm`` [pairs, hypotheses]."""
    x = scaled(harm)
    order = np.argsort(x.sum(axis=0), kind="stable")  # smallest first: the running maximum is over those below
    x = x[:, order]
    observed = x.sum(axis=0) - _TIE
    reached = np.zeros(x.shape[1])
    for signs in sign_patterns(len(x)):
        reached += (np.maximum.accumulate(signs @ x, axis=1) >= observed).sum(axis=0)
    p = np.empty_like(reached)
    p[order] = np.maximum.accumulate(reached[::-1])[::-1] / 2.0 ** len(x)  # none below that of a larger t
    return p


def critical_t(harm: np.ndarray, alpha: float) -> float:
    """The t that one hypothesis must exceed for an adjusted p of at most ``alpha``, by the flips of ``harm``.

    ``harm`` [pairs, hypotheses] without effects (of an A/A run, or with its means taken off). Infinite where 2^-pairs
    is above ``alpha``.
    """
    pairs = len(harm)
    may_reach = int(alpha * 2.0**pairs + _TIE)  # patterns, the observed one among them
    if not may_reach:
        return np.inf
    x = scaled(harm)
    largest = np.concatenate([(signs @ x).max(axis=1) for signs in sign_patterns(pairs)])
    return float(t_of_u(np.partition(largest, -may_reach)[-may_reach], pairs))


def t_of_u(u: float, pairs: int) -> float:
    """Student's t of a u; infinite where all pairs are equal."""
    rest = pairs - u * u
    return u * np.sqrt((pairs - 1) / rest) if rest > _TIE else np.inf
