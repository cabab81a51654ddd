"""The worth of the conclusion to who runs the service: requests within the SLO, and hardware or money for them."""

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
class Service:
    """The service of one configuration at the reported load.

    rates: requests/s within the SLO, else output tokens/s, one for each repeat
    """

    cell: MeasuredCell
    rates: tuple[float, ...]

    @property
    def rate(self) -> float:
        """The median over the repeats."""
        return median(dict(enumerate(self.rates))) or 0.0

    def cost(self, price_per_hour: float) -> str:
        """The price of a million requests or tokens."""
        return words.significant(price_per_hour * 1e6 / (3600 * self.rate))


def meaning(decision: Decision, price_per_hour: float | None) -> ReportAnswer | None:
    """Answers what the advised configuration is worth: requests within an SLO, else money by a price.

    Both configurations are taken at the reported load. None without either, without an advised configuration, or
    without figures of both.
    """
    slo, advised = words.slo_words(decision.run.load_section.get("slo")), decision.conclusion.candidate
    if advised is None or decision.conclusion.advice in _WITHOUT_A_CHOICE or not (slo or price_per_hour):
        return None
    pair = (advised.cell, advised.base)
    steady = all(cell.has_steady for cell in pair)
    best, other = (_service(cell, bool(slo), steady) for cell in pair)
    if best is None or other is None or not best.rate or not (slo or other.rate):
        return None
    title, name = say("meaning.title"), say("meaning.other", other.cell.is_baseline)
    if not slo:
        money = say("meaning.cost", cost=best.cost(price_per_hour or 0.0))
        against = say("meaning.against", cost=other.cost(price_per_hour or 0.0), other=name)
        return ReportAnswer(title, money, against, say("meaning.cost_numbers", best=best, other=other))
    numbers = say("meaning.slo_numbers", slo=slo, best=best, other=other, name=name)
    answer = say("meaning.served", best=best)
    if not other.rate:
        return ReportAnswer(title, answer, say("meaning.none", other=name), numbers)
    if price_per_hour:
        numbers += say("meaning.slo_cost", best=best.cost(price_per_hour), cost=other.cost(price_per_hour))
    if best.cell.load.mode == "open" or min(best.rates) <= max(other.rates):  # arrivals set the rate, or not told apart
        return ReportAnswer(title, answer, say("meaning.beside", other=name, rate=other.rate), numbers)
    times, machine = best.rate / other.rate, decision.run.manifest.simulated
    numbers += say("meaning.hardware", other=name, times=times)
    if machine and (gpus := machine.tensor_parallel):
        numbers += say("meaning.gpus", n=gpus, needed=gpus * times)
    return ReportAnswer(title, answer, say("meaning.times", other=name, times=times), numbers)


def _service(cell: MeasuredCell, with_slo: bool, steady: bool) -> Service | None:
    """The service of a valid cell; None where it has not the figure. ``steady``: tokens/s of the steady window."""
    rates = cell.per_repeat("goodput") if with_slo else cell.throughput(steady)
    return Service(cell, tuple(rates.values())) if cell.valid and rates else None
