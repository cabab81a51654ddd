"""The settings that a decision supports: the best configuration, what pays beside it, where to go back."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.report.decision import Candidate, Decision, open_ones, safe_ones, wins
from kvbench.report.quality import is_quantised
from kvbench.runs.model import MeasuredCell, MeasuredLoad


@dataclass(frozen=True)
class Selection:
    """The settings that a decision supports.

    best: the configuration to set; None where the baseline is kept
    unknown: what would be set, had its answers been measured
    alone: what pays beside the best by other settings, and was not measured together with it
    """

    decision: Decision
    base: MeasuredCell
    best: Candidate | None
    ahead: tuple[Candidate, ...]
    unknown: tuple[Candidate, ...]
    alone: tuple[Candidate, ...]

    @classmethod
    def of(cls, decision: Decision, base: MeasuredCell) -> Selection:
        """Selects the best configuration whose answers are safe."""
        ahead = wins(decision.candidates)
        safe, unknown = safe_ones(ahead), open_ones(ahead)
        best = next(iter(safe), None)
        others = [one for one in safe + unknown if best and one is not best and not one.changed & best.changed]
        alone = [one for one in others if best and not decision.measured_together(best, one)]
        return cls(decision, base, best, tuple(ahead), tuple(unknown), tuple(alone))

    @property
    def chosen(self) -> MeasuredCell:
        return self.best.cell if self.best else self.base

    @property
    def pair(self) -> tuple[str, ...]:
        return self.decision.pair or ()

    def at(self, load: MeasuredLoad) -> Candidate | None:
        """The chosen configuration at a load; None for the baseline, or where it was not measured there."""
        return next((one for one in self.decision.by_load[load] if one.cell.name == self.chosen.name), None)

    @property
    def back(self) -> MeasuredCell:
        """The configuration to go back to: the baseline, or the best safe one without quantised KV."""
        plain = [one.cell for one in safe_ones(self.ahead) if not is_quantised(one.cell)]
        return plain[0] if plain and is_quantised(self.chosen) else self.base
