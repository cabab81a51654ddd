"""Verdicts on claims, and their parts: what an interval or an exact count says of a limit."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.common.text import listing
from kvbench.lockstep.intervals import Effect
from kvbench.report.comparisons import amount

HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED = "held", "did not hold", "depends", "undecided"
VERDICTS = (HELD, DID_NOT_HOLD, DEPENDS, UNDECIDED)
MORE = "more launches would tell (--minutes)"


@dataclass(frozen=True)
class Verdict:
    """``word``: one of the four; ``evidence``: its numbers; ``reason``: why it is undecided, or on what it depends."""

    word: str
    evidence: str
    reason: str = ""


def words(effect: Effect) -> str:
    """+65 % (+59.0 to +72.1), 2.7x (2.67 to 2.82): a ratio with its interval."""
    if math.isnan(effect.low):
        return amount(effect.ratio)
    low, high = (f"{x:.2f}" if effect.ratio >= 2 else f"{100 * (x - 1):+.1f}" for x in (effect.low, effect.high))
    return f"{amount(effect.ratio)} ({low} to {high})".replace("-", "\N{MINUS SIGN}")


def is_above(effect: Effect, limit: float) -> str:
    """HELD if the interval lies above ``limit``, DID_NOT_HOLD if below, else UNDECIDED, as one launch always is."""
    if effect.within_launch:
        return UNDECIDED
    return HELD if effect.low > limit else DID_NOT_HOLD if effect.high < limit else UNDECIDED


def is_below(effect: Effect, limit: float) -> str:
    """HELD if the interval lies below ``limit``, DID_NOT_HOLD if above, else UNDECIDED."""
    return _CONTRARY[is_above(effect, limit)]


_CONTRARY = {HELD: DID_NOT_HOLD, DID_NOT_HOLD: HELD, UNDECIDED: UNDECIDED}


def held_if(condition: bool) -> str:
    """The word of an exact count."""
    return HELD if condition else DID_NOT_HOLD


def any_of(parts: Sequence[str]) -> str:
    """HELD if one part did, UNDECIDED while one is open, else DID_NOT_HOLD."""
    return next((word for word in (HELD, UNDECIDED) if word in parts), DID_NOT_HOLD)


def too_wide(effect: Effect, limit: str) -> str:
    """The reason why an interval decides nothing."""
    if effect.within_launch or math.isnan(effect.low):
        return f"one launch does not tell how launches differ: {MORE}"
    return f"the interval {words(effect)} holds {limit}: {MORE}"


def verdict(parts: Sequence[str], evidence: str, reason: str = "", depends: str = "") -> Verdict:
    """The verdict on a claim of several parts: undecided for ``reason`` while one is; ``depends``: how they differ."""
    if UNDECIDED in parts:
        return Verdict(UNDECIDED, evidence, reason)
    return Verdict(parts[0], evidence) if len(set(parts)) == 1 else Verdict(DEPENDS, evidence, depends)


def by_counts(parts: Mapping[str, bool], evidence: str, depends: str) -> Verdict:
    """Held if all parts are so, did not hold if none is; else it ``depends``, with the names of those that are."""
    names = [name for name, is_so in parts.items() if is_so]
    return verdict([held_if(is_so) for is_so in parts.values()], evidence, depends=depends.format(listing(names)))
