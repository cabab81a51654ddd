"""The ``Verdict`` of a gate with its ``Finding``s, the same for counters, paired timings and absolute limits.

Each gate returns one, and all outputs (verdict.json, JUnit, the GitHub summary, the terminal) are made from it alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kvbench.common.errors import EXIT_INCONCLUSIVE, EXIT_INVALID, EXIT_NOTHING, EXIT_OK, EXIT_REGRESSION

FORMAT = "kvbench-verdict/1"

Outcome = Literal["pass", "fail", "inconclusive", "invalid"]
PASS, FAIL, INCONCLUSIVE, INVALID, EMPTY = "pass", "fail", "inconclusive", "invalid", "empty"
EXIT_CODES = {
    PASS: EXIT_OK,
    FAIL: EXIT_REGRESSION,
    INCONCLUSIVE: EXIT_INCONCLUSIVE,
    INVALID: EXIT_INVALID,
    EMPTY: EXIT_NOTHING,
}


@dataclass(frozen=True)
class Finding:
    """A hypothesis, limit or scenario with its outcome.

    ``id``: unique in its verdict and the same in every run of the same gate. ``suite``: ``overall``, ``class``,
    ``cell``, ``served``, ``limit``, ``counters``. ``sentence``: what was found, with its numbers. ``base``,
    ``candidate``: in ``unit``. ``change``: candidate / base - 1 (of ``served``: the median difference over the base's
    median), and ``interval`` its 95 % interval (a limit on a ratio has no base: its candidate is the ratio). ``p``:
    adjusted for all hypotheses. ``figures``: further numbers by name (floor, margin, smallest_detectable, pairs_needed
    ...). ``details``: further lines. ``series``: the change in each pair, of ``served`` in each round.
    """

    id: str
    suite: str
    title: str
    outcome: Outcome
    sentence: str
    metric: str | None = None
    unit: str | None = None
    higher_is_better: bool | None = None
    base: float | None = None
    candidate: float | None = None
    change: float | None = None
    interval: tuple[float, float] | None = None
    p: float | None = None
    figures: Mapping[str, float | None] = field(default_factory=dict)
    details: tuple[str, ...] = ()
    series: tuple[float, ...] = ()

    def figure(self, name: str) -> float | None:
        """Returns one of ``figures``; None where it has none or no finite one."""
        value = self.figures.get(name)
        return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class Moved:
    """A counter or a step phase that differs between base and candidate beyond chance; it explains a finding.

    ``where``: its cell. ``change``: candidate / base - 1 (None where the base is 0), and ``interval`` its 95 % interval
    over the pairs. ``share``: of a time, its part of the judged latency's difference (0..1).
    """

    name: str
    title: str
    where: str
    unit: str
    base: float
    candidate: float
    change: float | None
    interval: tuple[float, float] | None = None
    share: float | None = None


@dataclass(frozen=True)
class Verdict:
    """The gate's outcome with all findings. ``outcome`` ``empty``: nothing was compared, which is never a pass.

    ``base``, ``candidate``: ``name``, ``sha``, ``command`` ... ``reproduce``: the command that repeats it. ``accept``:
    the command that makes an intended change the new baseline. ``facts``: pairs, looks, times, machine.
    """

    kind: Literal["counters", "compare", "limits", "bisect", "audit"]
    outcome: str
    sentence: str
    findings: tuple[Finding, ...] = ()
    base: Mapping[str, Any] = field(default_factory=dict)
    candidate: Mapping[str, Any] = field(default_factory=dict)
    moved: tuple[Moved, ...] = ()
    reproduce: str = ""
    accept: str | None = None
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    def of(self, *outcomes: str) -> tuple[Finding, ...]:
        """The findings with one of these outcomes, in their order."""
        return tuple(finding for finding in self.findings if finding.outcome in outcomes)

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **dataclasses.asdict(self), "exit_code": self.exit_code}


def worst(outcomes: Sequence[str]) -> str:
    """The outcome of a whole from its parts. A regression goes before invalid parts: it was shown all the same."""
    return next((outcome for outcome in (FAIL, INVALID, INCONCLUSIVE, PASS) if outcome in outcomes), EMPTY)
