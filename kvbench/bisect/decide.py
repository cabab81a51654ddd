"""Sequential tests of a search in history. Pure functions.

A *harm* is log(commit / GOOD) of one pair of engines in a metric, positive where it is worse. BAD has the *effect*, and
a commit is tested for being closer to GOOD or to BAD: its mean harm is held against half of the effect.

Two tests need no assumption but that a coin orders each pair (exact sign flips, kvbench/gate/timing/signflip.py): that
BAD is worse than GOOD, and that the culprit is worse than its parent. The pairs of the second had no part in choosing
the culprit, so a commit that made nothing worse is named in at most ``ERROR`` of all searches, whatever the noise is.

The steps between may then be quick. They take the scatter of all pairs of the search together, as a machine's noise
does not depend on the commit, or their own where it is larger, and Student's t. If pairs scatter normally, all steps
together err in at most ``ERROR`` of searches, which then find a culprit that its parent does not confirm. Each step
gets an equal part of what is left for the steps to come, and spends it on its looks (union bounds).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kvbench.common.stats import welch_interval
from kvbench.gate.timing.signflip import single_p

ERROR = 0.01
STEP_LOOKS = (4, 6, 9, 14, 20)  # pairs
EXACT_LOOKS = ((8, 0.007), (12, 0.002), (16, 0.001))  # pairs, and the part of ERROR that a look spends
PIECE = 0.2  # of the effect: a smaller part is no cause of its own

Answer = Literal["good", "bad", "skip", "between"]


@dataclass(frozen=True)
class StepRule:
    """The rule of one step. ``effect``: the mean harm of BAD; ``others``: the harms of other commits' pairs.

    ``alpha``: the chance of a wrong answer.
    """

    effect: float
    others: Sequence[Sequence[float]]
    alpha: float

    def answer(self, harms: Sequence[float]) -> Answer | None:
        """Tests the pairs so far; None where they cannot tell, "between" where the commit has a part of the effect."""
        low, high = pooled_interval(harms, self.others, self.alpha / len(STEP_LOOKS))
        if low > self.effect / 2:
            return "bad"
        if high < self.effect / 2:
            return "good"
        return "between" if PIECE * self.effect < low and high < (1 - PIECE) * self.effect else None


def step_alpha(spent: float, commits: int) -> float:
    """The alpha of the next step where ``commits`` may still be the one: bisection halves them with each step."""
    return (ERROR - spent) / max(1, math.ceil(math.log2(max(commits, 2))))


def pooled_interval(harms: Sequence[float], others: Sequence[Sequence[float]], alpha: float) -> tuple[float, float]:
    """Student's t bounds of the mean harm, each of which is wrong with probability ``alpha``.

    The scatter is that of all series about their own means, or of ``harms`` alone where that is larger.
    """
    from scipy.special import stdtrit  # slow to import

    series = [np.asarray(one, dtype=np.float64) for one in (harms, *others)]
    freedom = sum(len(one) - 1 for one in series)
    if freedom < 1:
        return -math.inf, math.inf
    pooled = math.sqrt(sum(float(((one - one.mean()) ** 2).sum()) for one in series) / freedom)
    own = float(series[0].std(ddof=1)) if len(harms) > 1 else math.inf
    half = float(stdtrit(freedom, 1 - alpha)) * max(pooled, own) / math.sqrt(len(harms))
    return float(series[0].mean()) - half, float(series[0].mean()) + half


def is_worse(harms: Sequence[float]) -> bool | None:
    """Tests exactly whether the mean harm is above (True) or below (False) 0; None where no look can tell yet."""
    for pairs, alpha in EXACT_LOOKS:
        if len(harms) < pairs:
            return None
        for sign, answer in ((1, True), (-1, False)):
            if single_p(sign * np.asarray(harms[:pairs], dtype=np.float64)[:, None])[0] <= alpha:
                return answer
    return None


def has_part(before: Sequence[float], after: Sequence[float], effect: float) -> bool:
    """Tests whether ``after`` is worse than ``before`` by a part of the effect that is a cause of its own."""
    low, _ = welch_interval(before, after, 1 - 2 * ERROR)
    return low > 0 and float(np.mean(after) - np.mean(before)) >= PIECE * effect
