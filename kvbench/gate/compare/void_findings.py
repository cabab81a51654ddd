"""What the attempts that were no measurement say of the two sides: a server that fails is a result, too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from kvbench.common.text import plural
from kvbench.gate.compare.pair_runner import Void
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.rules import CELL
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, PASS, Finding

ALPHA = 0.004  # 8 attempts to none; beside the looks' alphas


def void_findings(manifest: Mapping[str, Any]) -> tuple[Finding, ...]:
    """How often either side's server failed alone, and the pair that was given up, if one was.

    With no change an attempt in which one server alone failed is as likely the candidate's as base's, since the sides
    take turns in going first: an exact sign test at ``ALPHA`` makes a FAIL of them. Fewer leave the comparison open:
    the loads that such a candidate finished are not all that it was asked for. A pair that was given up without such
    proof could not be measured.
    """
    voids = [Void(**each) for each in manifest["voids"]]
    given_up = manifest["void"]
    found = _served(voids)
    if given_up is None or (found and found[0].outcome == FAIL):
        return found
    of = [void for void in voids if (void.pair, void.turn) == (given_up["pair"], given_up["turn"])]
    of = [void for void in of if void.resume == of[-1].resume]  # those that it was given up after
    said = f"{of[-1].turn} could not be measured in {plural(len(of), 'attempt')}: {of[-1].words()}"
    title = f"{of[-1].turn} is measured"
    return (Finding(f"measured/{of[-1].turn}", CELL, title, INVALID, said, details=_words(of)), *found)


def _served(voids: Sequence[Void]) -> tuple[Finding, ...]:
    """Empty where no server failed alone."""
    alone = {side: [void for void in voids if void.guilty == side] for side in (BASE, CANDIDATE)}
    base, candidate = len(alone[BASE]), len(alone[CANDIDATE])
    if not base + candidate:
        return ()
    p = float(stats.binomtest(candidate, base + candidate, 0.5, alternative="greater").pvalue)
    outcome = FAIL if p <= ALPHA else INCONCLUSIVE if candidate > base else PASS
    said = f"the candidate's server failed alone in {plural(candidate, 'attempt')} and base's in {base} (p = {p:.2g})"
    if outcome == INCONCLUSIVE:
        said += ": too few to tell it from chance, but what it finished is not all that it was asked"
    if candidate:
        said += f"; the last time: {'; '.join(alone[CANDIDATE][-1].faults[CANDIDATE])}"
    return (
        Finding(
            "served", CELL, "servers that fail", outcome, said, base=float(base), candidate=float(candidate),
            higher_is_better=False, p=p, details=_words([*alone[CANDIDATE], *alone[BASE]]),
        ),
    )  # fmt: skip


def _words(voids: Sequence[Void]) -> tuple[str, ...]:
    return tuple(
        f"pair {v.pair}, attempt {v.attempt}{f' after resume {v.resume}' if v.resume else ''} ({v.first} first): "
        f"{v.words()}"
        for v in voids
    )
