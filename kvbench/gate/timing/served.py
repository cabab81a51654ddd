"""The statistics of the served check: single requests to two live servers, one to each in every round.

Within a round a coin decides which server is asked first. If the two do not differ, a round's difference is as likely
above 0 as below, whatever the machine did, so the sign test is exact, and so are bounds of the median difference that
are order statistics (Gibbons and Chakraborti, Nonparametric Statistical Inference, 5.2 and 5.4). Medians, because a
round in which another program took the processor is off by any amount.

Rounds of one launch share what launches differ in, and that is no regression. Two things keep it from failing a check:
floors and margins that are far wider than launches differ, and that a FAIL needs each of two launches to be beyond the
floor. A check is for what is missing from engine time (the HTTP layer, streaming, the server's threads), which costs
milliseconds when it goes wrong; the engine itself is held to its own, tighter margins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom

from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, PASS

LAUNCHES = 2  # a second one only where the first does not pass
ALPHA = 0.001  # the chance of a FAIL without any difference, of all tests of a comparison together
ALPHA_PASS = 0.01  # that of a PASS at each launch although a median difference is at its margin
FLOOR, FLOOR_MS = 0.15, 2.0  # a share of the base's median, and at least so much
MARGIN, MARGIN_MS = 0.40, 5.0


@dataclass(frozen=True)
class ServedJudgement:
    """The outcome of one latency. Times in ms.

    ``base``, ``candidate``: medians. ``difference``: the median of candidate - base in a round, ``interval`` its 95 %
    interval, ``most`` its upper bound. ``p``: of no difference, adjusted for all tests. ``differences``: by round.
    """

    outcome: str
    base: float
    candidate: float
    difference: float
    interval: tuple[float, float]
    most: float
    p: float
    floor: float
    margin: float
    launches: int
    differences: tuple[float, ...]


def judge_served(base: Sequence[Sequence[float]], candidate: Sequence[Sequence[float]], tests: int) -> ServedJudgement:
    """Judges one latency. ``base``, ``candidate``: its ms by launch and round; ``tests``: latencies that are judged.

    Slower: every launch is beyond the floor, and the sign test excludes chance. FAIL: slower in two launches. PASS: the
    margin is ruled out, and it is not slower. INCONCLUSIVE: neither.
    """
    by_launch = [np.subtract(c, b) for b, c in zip(base, candidate, strict=True)]
    differences, of_base = np.concatenate(by_launch), float(np.median(np.concatenate(base)))
    floor, margin = max(FLOOR * of_base, FLOOR_MS), max(MARGIN * of_base, MARGIN_MS)
    p = min(1.0, tests * sign_p(differences))
    slower = p <= ALPHA and all(np.median(differences) >= floor for differences in by_launch)
    low, high = median_bounds(differences, 0.025)
    most = median_bounds(differences, ALPHA_PASS)[1]
    passes = most < margin and not slower
    return ServedJudgement(
        outcome=FAIL if slower and len(by_launch) >= LAUNCHES else PASS if passes else INCONCLUSIVE,
        base=of_base,
        candidate=float(np.median(np.concatenate(candidate))),
        difference=float(np.median(differences)),
        interval=(low, high),
        most=most,
        p=p,
        floor=floor,
        margin=margin,
        launches=len(by_launch),
        differences=tuple(map(float, differences)),
    )


def sign_p(differences: np.ndarray) -> float:
    """The exact one-sided p of "no more often above 0 than below"; rounds without a difference say nothing."""
    above, below = int((differences > 0).sum()), int((differences < 0).sum())
    return float(binom.sf(above - 1, above + below, 0.5))


def median_bounds(values: np.ndarray, alpha: float) -> tuple[float, float]:
    """Bounds the median from below and above, each with a confidence of 1 - alpha; infinite of too few values."""
    count = len(values)
    rank = int(binom.isf(alpha, count, 0.5)) + 1  # fewer than alpha have so many values below their median
    if rank > count:
        return -np.inf, np.inf
    ordered = np.sort(values)
    return float(ordered[count - rank]), float(ordered[rank - 1])
