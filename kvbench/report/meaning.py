"""The worth of the conclusion to who runs the service: requests within the SLO, and GPUs or money for them."""

from __future__ import annotations

from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.report.answers import ReportAnswer
from kvbench.report.comparisons import median
from kvbench.report.decision import Advice, Decision
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell

_WITHOUT_A_CHOICE = (Advice.WRONG_ANSWERS, Advice.OUTSIDE, Advice.ONLY)


@dataclass(frozen=True)
class MostServed:
    """The most that a configuration served at any load. rate: requests/s within the SLO, else output tokens/s."""

    cell: MeasuredCell
    rate: float

    @property
    def place(self) -> str:
        return f"{self.cell.name} {self.cell.load.where}"

    def cost(self, price_per_hour: float) -> str:
        """The price of a million requests or tokens."""
        return words.significant(price_per_hour * 1e6 / (3600 * self.rate))


def meaning(decision: Decision, price_per_hour: float | None) -> ReportAnswer | None:
    """Answers what the advised configuration is worth: requests within an SLO, else money by a price.

    None without either, without an advised configuration, or without figures of both.
    """
    slo, advised = words.slo_words(decision.run.load_section.get("slo")), decision.conclusion.candidate
    if advised is None or decision.conclusion.advice in _WITHOUT_A_CHOICE or not (slo or price_per_hour):
        return None
    best, other = (_most_served(decision, cell.name, bool(slo)) for cell in (advised.cell, advised.base))
    if best is None or other is None or not best.rate or not (slo or other.rate):
        return None
    title, name = say("meaning.title"), say("meaning.other", other.cell.is_baseline)
    if not slo:
        money = say("meaning.cost", cost=best.cost(price_per_hour or 0.0))
        against = say("meaning.against", cost=other.cost(price_per_hour or 0.0), other=name)
        return ReportAnswer(title, money, against, say("meaning.cost_numbers", best=best.place, other=other.place))
    gpus = len(decision.run.manifest.gpus)
    hardware = {0: "machine", 1: "gpu"}.get(gpus, "gpus")
    measured_on = say("meaning.hardware", hardware, n=gpus)
    numbers = say("meaning.slo_numbers", slo=slo, hardware=measured_on, best=best, other=other)
    answer = say("meaning.served", best=best)
    if not other.rate:
        return ReportAnswer(title, answer, say("meaning.none", other=name), numbers)
    if price_per_hour:
        numbers += say("meaning.slo_cost", best=best.cost(price_per_hour), cost=other.cost(price_per_hour))
    needed = say("meaning.needed", hardware, n=max(1, gpus) * best.rate / other.rate)
    return ReportAnswer(title, answer, say("meaning.needs", other=name, needed=needed), numbers)


def _most_served(decision: Decision, name: str, with_slo: bool) -> MostServed | None:
    """The valid load at which a configuration served most; None where none has the figure."""
    served = []
    for cell in decision.comparisons.cells:
        rate = median(cell.per_repeat("goodput") if with_slo else cell.throughput())
        if cell.name == name and cell.valid and rate is not None:
            served.append(MostServed(cell, rate))
    return max(served, key=lambda one: one.rate, default=None)
