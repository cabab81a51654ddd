"""The power of a number of pairs, the smallest effect that they detect, and how many pairs a gate needs.

Take pairs that scatter normally around a harm h with a sd s (log ratios both). Their mean is normal around h with
s / sqrt(K), and independent of their sd S, which has s sqrt(chi2(K - 1) / (K - 1)). A FAIL needs a mean of at least
the floor and a t above the critical one, so

    power(h) = E over S of P(mean >= max(floor, t_critical S / sqrt(K))),

the noncentral t's tail where the floor is 0. The critical t comes from the flips of the very pairs at hand
(``signflip.critical_t``), so it knows how many hypotheses there are and how much they have in common. For other numbers
of pairs it is that of the effective number of independent tests M that explains it: M P(T(K-1) > t) = alpha.

The smallest detectable effect is the h with a power of 80 %, at one look at so many pairs; what earlier looks may catch
besides is not counted.
"""

from __future__ import annotations

import functools

import numpy as np
from scipy import special, stats

from kvbench.gate.timing.rules import TimingRules
from kvbench.gate.timing.signflip import critical_t

POWER = 0.80
MOST_USEFUL = 200  # pairs: nobody measures more
_QUANTILES = (np.arange(400) + 0.5) / 400  # of S; power is their mean


def power(
    harm: np.ndarray, sd: np.ndarray, pairs: int, t_critical: float, floor: np.ndarray | float = -np.inf
) -> np.ndarray:
    """The probability of a mean of at least ``floor`` and a t above ``t_critical`` [hypotheses], for ``pairs`` >= 2.

    ``harm`` (true), ``sd`` of pairs and ``floor`` [hypotheses], log ratios; ``sd`` above 0.
    """
    error = np.asarray(sd, dtype=float)[..., None] / np.sqrt(pairs)
    limit = np.maximum(np.asarray(floor, dtype=float)[..., None], t_critical * _scatter(pairs) * error)
    return special.ndtr((np.asarray(harm, dtype=float)[..., None] - limit) / error).mean(axis=-1)


@functools.cache
def _scatter(pairs: int) -> np.ndarray:
    """Quantiles of S / s."""
    return np.sqrt(2 * special.gammaincinv((pairs - 1) / 2, _QUANTILES) / (pairs - 1))


def smallest_detectable(sd: np.ndarray, pairs: int, t_critical: float, floor: np.ndarray | float = 0.0) -> np.ndarray:
    """The harm that is caught with a power of 80 % [hypotheses, log ratio]; infinite where none could be."""
    sd, floor = np.broadcast_arrays(np.asarray(sd, dtype=float), np.asarray(floor, dtype=float))
    if pairs < 2 or not np.isfinite(t_critical):
        return np.full(sd.shape, np.inf)
    noisy = np.where(sd > 0, sd, 1.0)
    low, high = np.zeros(sd.shape), floor + (t_critical + 3) * noisy * 3 / np.sqrt(pairs)  # S is below 3 s
    for _ in range(50):
        middle = (low + high) / 2
        enough = power(middle, noisy, pairs, t_critical, floor) >= POWER
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return np.where(sd > 0, high, floor)


def effective_tests(t_critical: float, pairs: int, alpha: float, hypotheses: int) -> float:
    """Counts the independent tests that have this critical t at ``alpha``: 1 to ``hypotheses``."""
    if not np.isfinite(t_critical) or pairs < 2:
        return float(hypotheses)
    return float(np.clip(alpha / stats.t.sf(t_critical, pairs - 1), 1, hypotheses))


def critical_t_of(tests: float, pairs: int, alpha: float) -> float:
    """The critical t of ``pairs`` for so many independent tests; infinite where no p is as small as ``alpha``."""
    return float(stats.t.isf(alpha / tests, pairs - 1)) if pairs > 1 and 2.0**-pairs <= alpha else np.inf


def smallest_margin(sd: np.ndarray, pairs: int, alpha_pass: float) -> np.ndarray:
    """The margin within which an unchanged candidate is shown with 80 % power [hypotheses, log ratio]."""
    return smallest_detectable(sd, pairs, critical_t_of(1, pairs, alpha_pass))


def unbiased(pairs: int) -> float:
    """The mean sd of so many normal values over the true sd (c4 of control charts): 0.965 for 8."""
    half = pairs / 2
    return float(np.sqrt(1 / (half - 0.5)) * np.exp(special.gammaln(half) - special.gammaln(half - 0.5)))


def seen_by(harm: np.ndarray, floors: np.ndarray, alpha: float) -> tuple[np.ndarray, float]:
    """The smallest detectable harm [hypotheses] of ``harm`` [pairs, hypotheses], and the effective tests."""
    pairs, hypotheses = harm.shape
    if pairs < 2:
        return np.full(hypotheses, np.inf), float(hypotheses)
    t_critical = critical_t(harm - harm.mean(axis=0), alpha)
    sd = harm.std(axis=0, ddof=1) / unbiased(pairs)
    seen = smallest_detectable(sd, pairs, t_critical, floors)
    return seen, effective_tests(t_critical, pairs, alpha, hypotheses)


def pairs_to_settle(
    mean: np.ndarray,
    sd: np.ndarray,
    floors: np.ndarray,
    margins: np.ndarray,
    pairs: int,
    tests: float,
    rules: TimingRules,
) -> list[int | None]:
    """Finds for each hypothesis the pairs, more than ``pairs``, that settle it with a power of 80 %.

    If its true harm is the ``mean`` that was measured: by a PASS or, from the floor on, by a FAIL, whichever takes
    fewer. None: more than 200, or nothing known of its scatter.
    """
    needed: list[int | None] = [None] * len(mean)
    sd = np.maximum(sd, 1e-12)  # a constant harm just below its margin is settled by one pair more
    for more in range(pairs + 1, MOST_USEFUL + 1) if pairs > 1 else ():
        if not (open_ := [i for i, settled_at in enumerate(needed) if settled_at is None]):
            break
        look = rules.look_for(more)
        to_pass = power((margins - mean)[open_], sd[open_], more, critical_t_of(1, more, look.alpha_pass))
        to_fail = power(mean[open_], sd[open_], more, critical_t_of(tests, more, look.alpha), floors[open_])
        for i, chance in zip(open_, np.maximum(to_pass, to_fail), strict=True):
            needed[i] = more if chance >= POWER else None
    return needed
