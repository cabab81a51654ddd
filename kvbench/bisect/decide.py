"""Sequential tests of a search in history. Pure functions.

A *harm* is log(commit / GOOD) of one pair of engines in a metric, positive where it is worse. BAD has the *effect*, and
a commit is tested for being closer to GOOD or to BAD: its mean harm is held against half of the effect.

Two tests need no assumption but that a coin orders each pair, which makes either side slower with equal chance where
they are the same: that BAD is worse than GOOD, and that the culprit is worse than its parent (sign tests: 8 of 8, 11 of
12 or 14 of 16 pairs). The pairs of the second had no part in choosing the culprit, so a commit that made nothing worse
is named in at most ``ERROR`` of all searches, whatever the noise is.

The steps between may then be quick. They take the scatter of all pairs of the search together, as a machine's noise
does not depend on the commit, or their own where it is larger, and Student's t. If pairs scatter normally about an
effect that is known, all steps together err in at most ``ERROR`` of searches, which then find a culprit that its parent
does not confirm. (The effect is the mean of BAD's own 8 to 16 pairs, and half of it is far from both ends.) Each step
gets an equal part of what is left for the steps to come, and spends it on its looks (union bounds).

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
STEP_LOOKS = (4, 6, 9, 14, 20, 32)  # pairs
EXACT_LOOKS = ((8, 0.004), (12, 0.0035), (16, 0.0025))  # pairs, and the part of ERROR that a look spends
TRIM = 0.2  # of the pairs on each side
PIECE = 0.2  # of the effect: a smaller part is no cause of its own

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
        low, high = trimmed_interval(harms, self.others, self.alpha / len(STEP_LOOKS))
        if low > self.effect / 2:
            return "bad"
        if high < self.effect / 2:
            return "good"
        return "between" if PIECE * self.effect < low and high < (1 - PIECE) * self.effect else None


def step_alpha(spent: float, commits: int) -> float:
    """The alpha of the next step where ``commits`` may still be the one: bisection halves them with each step."""
    return (ERROR - spent) / max(1, math.ceil(math.log2(max(commits, 2))))


def resolves(effect: Sequence[float], commits: int) -> bool:
    """Tests whether a step can tell half of the ``effect``, by the scatter of BAD's pairs against GOOD."""
    low, high = trimmed_interval(effect, alpha=step_alpha(0.0, commits) / len(STEP_LOOKS))
    kept = [Trimmed.of([0.0] * pairs).kept for pairs in (len(effect), STEP_LOOKS[-1])]
    return (high - low) / 2 * math.sqrt(kept[0] / kept[1]) < trimmed_mean(effect) / 2


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


def trimmed_interval(
    harms: Sequence[float], others: Sequence[Sequence[float]] = (), alpha: float = 0.025
) -> tuple[float, float]:
    """Student's t bounds of the trimmed mean, each of which is wrong with probability ``alpha``.

    The scatter is that of all series about their own means, or of ``harms`` alone where that is larger.
    """
    from scipy.special import stdtrit  # slow to import

    series = [Trimmed.of(one) for one in (harms, *others)]
    freedom = sum(one.kept - 1 for one in series)
    own = series[0]
    if freedom < 1 or own.kept < 2:
        return -math.inf, math.inf
    variance = max(sum(one.squares for one in series) / freedom, own.squares / (own.kept - 1))
    half = float(stdtrit(freedom, 1 - alpha)) * math.sqrt(variance / own.kept)
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
    ends = [trimmed_interval(one, alpha=ERROR) for one in (before, after)]
    return ends[0][1] < ends[1][0] and trimmed_mean(after) - trimmed_mean(before) >= PIECE * effect
