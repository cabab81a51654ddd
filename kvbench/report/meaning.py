"""What the conclusion is worth to who runs the service: requests served within the SLO, and GPUs or money for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.answers import ReportAnswer
from kvbench.report.comparisons import median
from kvbench.report.decision import Advice, Decision
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

_WITHOUT_A_CHOICE = (Advice.WRONG_ANSWERS, Advice.OUTSIDE, Advice.ONLY)


@dataclass(frozen=True)
class Served:
    """The most that one configuration served, over all loads.

    cell: at which load; rate: requests/s within the SLO, or output tokens/s without one; share: of requests within it
    """

    cell: MeasuredCell
    rate: float
    share: float | None

    @classmethod
    def of(cls, decision: Decision, name: str, with_slo: bool) -> Served | None:
        """The load at which a configuration served most; None where none of its loads is valid and has the figure."""
        served = []
        for cell in decision.comparisons.cells:
            rate = median(cell.per_repeat("goodput") if with_slo else cell.throughput())
            if cell.name == name and cell.valid and rate is not None:
                served.append(cls(cell, rate, cell.share_within_slo))
        return max(served, key=lambda one: one.rate, default=None)


@dataclass(frozen=True)
class Meaning:
    """What the advised configuration and the one that it replaces served, on ``machines`` machines or GPUs each."""

    best: Served
    other: Served
    machines: int

    @property
    def needed(self) -> float | None:
        """The machines that the replaced configuration needs to serve as much as the best; None where it served 0."""
        return self.machines * self.best.rate / self.other.rate if self.other.rate else None

    @classmethod
    def of(cls, decision: Decision, with_slo: bool) -> Meaning | None:
        """None without an advised configuration, or without figures of both."""
        advised = decision.conclusion.candidate
        if advised is None or decision.conclusion.advice in _WITHOUT_A_CHOICE:
            return None
        best, other = (Served.of(decision, cell.name, with_slo) for cell in (advised.cell, advised.base))
        machines = len(decision.run.manifest.gpus) or 1
        return cls(best, other, machines) if best and other and best.rate else None


def meaning(decision: Decision, price_per_hour: float | None) -> ReportAnswer | None:
    """One answer, with an SLO in requests within it, else with a price in money; None without either."""
    slo = words.slo_words(decision.run.load_section.get("slo"))
    if not slo and not price_per_hour:
        return None
    made = Meaning.of(decision, with_slo=bool(slo))
    if made is None:
        return None
    other = say("meaning.other", made.other.cell.is_baseline)
    title, names = say("meaning.title"), _names(made)
    if not slo:
        best_cost, other_cost = (_cost(price_per_hour, served.rate, 1e6) for served in (made.best, made.other))
        against = say("meaning.against", cost=other_cost, other=other)
        return ReportAnswer(title, say("meaning.cost", cost=best_cost), against, say("meaning.cost_numbers", **names))
    kind = ("machine", "gpu", "gpus")[min(2, len(decision.run.manifest.gpus))]
    answer = say("meaning.served", rate=words.significant(made.best.rate, 2))
    hardware = say("meaning.hardware", kind, n=made.machines)
    numbers = say("meaning.slo_numbers", slo=slo, hardware=hardware, **names, **_rates(made))
    if made.needed is None:
        return ReportAnswer(title, answer, say("meaning.none", other=other), numbers)
    if price_per_hour:
        best_cost, other_cost = (_cost(price_per_hour, served.rate, 1e6) for served in (made.best, made.other))
        numbers += say("meaning.slo_cost", best=best_cost, cost=other_cost)
    needed = say("meaning.needed", kind, n=words.significant(made.needed, 2))
    return ReportAnswer(title, answer, say("meaning.needs", other=other, needed=needed), numbers)


def _cost(price_per_hour: float | None, rate: float, count: float) -> str:
    """The price of so many tokens or requests at ``rate`` a second."""
    return words.significant((price_per_hour or 0.0) * count / (3600 * rate))


def _names(made: Meaning) -> Mapping[str, str]:
    sides = {"best": made.best.cell, "other": made.other.cell}
    return {side: f"{cell.name} {cell.load.where}" for side, cell in sides.items()}


def _rates(made: Meaning) -> Mapping[str, str]:
    """Rates and shares of both sides, as places of ``meaning.slo_numbers``."""
    sides = {"best": made.best, "other": made.other}
    rates = {f"{side}_rate": words.significant(served.rate, 3) for side, served in sides.items()}
    return rates | {f"{side}_share": words.percent(served.share) for side, served in sides.items()}
