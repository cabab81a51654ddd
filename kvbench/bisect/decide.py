"""Sequential tests of a search in history. Pure functions.

A *harm* is log(commit / GOOD) of one pair of engines in a metric, positive where it is worse. BAD has the *effect*, and
a commit is tested for having it, as BAD does, or not, as GOOD does.

Two tests need no assumption but that a coin orders each pair, which makes either side slower with equal chance where
they are the same: that BAD is worse than GOOD, and that the culprit is worse than its parent (sign tests: 8 of 8, 11 of
12, 14 of 16 or 20 of 24 pairs). The pairs of the second had no part in choosing the culprit, so a commit that made
nothing worse is named in at most ``ERROR`` of all searches, whatever the noise is.

The steps between may then be quick: they need not measure a commit, only tell whether it has the effect or not. That is
Wald's sequential test (Sequential Analysis, 1947): after each pair, how much likelier is the mean harm under the one
than under the other? The likelihoods are Student's, with the scatter of all pairs of the search together, as a
machine's noise does not depend on the commit, or the commit's own where it is larger. If pairs scatter normally, all
steps together err in at most ``ERROR`` of searches, which then find a culprit that its parent does not confirm. Each
step gets an equal part of what is left for the steps to come (union bound). A commit that lies between, where the
effect is in pieces, is told by its likelihood at half of the effect.

A program that disturbs one pair in ten must not cost dozens of others. So means are trimmed by a fifth on each side
(Tukey and McLaughlin, Sankhya A 25, 1963; Yuen, Biometrika 61, 1974).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

ERROR = 0.01
STEP_PAIRS = (3, 32)  # of a step, at least and at most
EXACT_LOOKS = (
    (8, 0.0039063),
    (12, 0.0032),
    (16, 0.0021),
    (24, 0.00079),
)  # pairs, and the part of ERROR that a look spends
TRIM = 0.2  # of the pairs on each side
PIECE = 0.2  # of the effect: a smaller part is no cause of its own
_RESOLVED = 0.8  # of a pair's scatter: a smaller effect takes more than 32 pairs a step

StepAnswer = Literal["good", "bad", "skip", "between"]


@dataclass(frozen=True)
class StepRule:
    """The rule of one step. ``effect``: the mean harm of BAD; ``others``: the harms of other commits' pairs.

    ``alpha``: the chance of a wrong answer.
    """

    effect: float
    others: Sequence[Sequence[float]]
    alpha: float

    def answer(self, harms: Sequence[float]) -> StepAnswer | None:
        """Tests the pairs so far; None where they cannot tell, "between" where the commit has a part of the effect."""
        if len(harms) < STEP_PAIRS[0]:
            return None
        mean, variance, freedom = Trimmed.of(harms), *pooled_variance(harms, self.others)

        def likelier(one: float, other: float) -> float:
            """The log of how much likelier the mean is at ``one`` than at ``other``, both in parts of the effect."""
            far = [1 + mean.kept * (mean.mean - at * self.effect) ** 2 / (variance * freedom) for at in (one, other)]
            return (freedom + 1) / 2 * math.log(far[1] / far[0])

        limit = -math.log(self.alpha)
        for at, answer in ((0.0, "good"), (1.0, "bad")):
            if likelier(at, 1.0 - at) > limit and likelier(at, 0.5) > _against_a_part(len(harms)):
                return answer
        return "between" if min(likelier(0.5, 0.0), likelier(0.5, 1.0)) > limit else None


def _against_a_part(pairs: int) -> float:
    """The log likelihood ratio against a part of the effect that an answer takes.

    It falls with the pairs: BAD's own effect is not known well, so a commit may seem to lie a little short of it.
    """
    if pairs >= STEP_PAIRS[1]:
        return -math.inf
    return 1.5 if pairs < 12 else 0.0


def step_alpha(spent: float, commits: int) -> float:
    """The alpha of the next step where ``commits`` may still be the one: bisection halves them with each step."""
    return (ERROR - spent) / max(1, math.ceil(math.log2(max(commits, 2))))


def resolves(effect: Sequence[float]) -> bool:
    """Tests whether steps can tell the ``effect`` of BAD's pairs against GOOD, by how they scatter."""
    variance, _ = pooled_variance(effect, ())
    return trimmed_mean(effect) > _RESOLVED * math.sqrt(variance)


@dataclass(frozen=True)
class Trimmed:
    """A sample without its extremes. ``kept``: values in the mean; ``squares``: of the winsorised deviations."""

    mean: float
    kept: int
    squares: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Trimmed:
        """Leaves out ``TRIM`` of the values on each side."""
        ordered = np.sort(np.asarray(values, dtype=np.float64))
        cut = int(TRIM * len(ordered))
        kept = ordered[cut : len(ordered) - cut]
        winsorised = np.clip(ordered, kept[0], kept[-1])
        return cls(float(kept.mean()), len(kept), float(((winsorised - winsorised.mean()) ** 2).sum()))


def trimmed_mean(values: Sequence[float]) -> float:
    return Trimmed.of(values).mean


def pooled_variance(harms: Sequence[float], others: Sequence[Sequence[float]]) -> tuple[float, int]:
    """The variance of a pair and its degrees of freedom: of all series about their own means, or the larger own."""
    series = [Trimmed.of(one) for one in (harms, *others)]
    own, freedom = series[0], sum(one.kept - 1 for one in series)
    variance = max(sum(one.squares for one in series) / freedom, own.squares / (own.kept - 1))
    return max(variance, 1e-12), freedom


def trimmed_interval(harms: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Student's t interval of the trimmed mean."""
    from scipy.special import stdtrit  # slow to import

    own = Trimmed.of(harms)
    variance, freedom = pooled_variance(harms, ())
    half = float(stdtrit(freedom, (1 + confidence) / 2)) * math.sqrt(variance / own.kept)
    return own.mean - half, own.mean + half


def is_worse(harms: Sequence[float]) -> bool | None:
    """Tests exactly whether harms lie above (True) or below (False) 0; None where no look can tell yet."""
    for pairs, alpha in EXACT_LOOKS:
        if len(harms) < pairs:
            return None
        for sign, answer in ((1, True), (-1, False)):
            against = sum(sign * harm <= 0 for harm in harms[:pairs])
            if sum(math.comb(pairs, k) for k in range(against + 1)) <= alpha * 2**pairs:
                return answer
    return None


def has_part(before: Sequence[float], after: Sequence[float], effect: float) -> bool:
    """Tests whether ``after`` is worse than ``before`` by a part of the effect that is a cause of its own."""
    ends = [trimmed_interval(one, 1 - 2 * ERROR) for one in (before, after)]
    return ends[0][1] < ends[1][0] and trimmed_mean(after) - trimmed_mean(before) >= PIECE * effect
