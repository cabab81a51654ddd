"""The noise of a runner, from pairs of one build against itself (A/A), and whether the gate's limits suit it.

For each metric and level: the scatter of pairs, their bias to one side, their autocorrelation, the smallest regression
that each look detects with 80 % power, and the smallest margin with which each look passes an unchanged candidate with
80 % power (``power.py``). A sd from 20 pairs is known to within -24 % and +46 % (95 %, chi-squared with 19 degrees of
freedom), one from 8 pairs to within -34 % and +104 %: hence 20 or more.

Which side of a pair goes first is random, so pairs are unbiased and independent even on a machine that drifts. If they
are not, the two sides differ in more than the build.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field
from scipy import stats

from kvbench.common.records import Record
from kvbench.gate.sentences import say
from kvbench.gate.timing.pairs import Hypotheses, PairTable, hypotheses, in_words
from kvbench.gate.timing.power import critical_t_of, effective_tests, smallest_detectable, smallest_margin
from kvbench.gate.timing.rules import CELL, CLASS, OVERALL, MetricRule, TimingRules
from kvbench.gate.timing.signflip import critical_t
from kvbench.gate.verdict.wording import share

ENOUGH_PAIRS = 20
FEWEST_PAIRS = 4
_SURE = 0.01  # a bias this improbable, over all hypotheses of the table, is one
_LEVELS = {OVERALL: "over all cells", CLASS: "of a class", CELL: "of a cell"}

Level = Literal["overall", "class", "cell"]
ByLook = Mapping[int, float | None]
"""Pairs of a look -> a relative change for the worse; None where so few pairs show nothing."""


@dataclass(frozen=True)
class Noise:
    """The noise of one metric at one level, over its ``hypotheses`` (cells, classes or the whole).

    ``stands_for``: the levels whose margins apply (the only cell of a class is also that class). ``sd``: of
    log(candidate / base) of pairs, the median over the hypotheses; ``worst``: the largest, which is of ``where``.
    ``bias``: candidate / base - 1 of the hypothesis where a bias is most certain, and ``bias_p`` its two-sided p,
    adjusted for all hypotheses of the table. ``autocorrelation``: of a pair with the next, the median. ``detectable``
    and ``margin``: from the median sd; ``worst_detectable`` and ``worst_margin``: from the largest.
    """

    metric: str
    level: Level
    stands_for: tuple[Level, ...]
    hypotheses: int
    sd: float
    worst: float
    where: str
    bias: float
    bias_p: float
    autocorrelation: float
    detectable: ByLook
    worst_detectable: ByLook
    margin: ByLook
    worst_margin: ByLook

    def __post_init__(self) -> None:
        looks = (self.detectable, self.worst_detectable, self.margin, self.worst_margin)
        if not self.stands_for or any(look.keys() != self.detectable.keys() for look in looks):
            raise ValueError("it has no level, or not the same looks for detectable and margin")


class RunnerNoise(Record):
    """The noise of a runner, from ``pairs`` A/A pairs of ``cells`` cells, and how it was measured.

    ``side``: the name of what was compared with itself; ``method``: as in the manifest of a comparison.
    """

    FORMAT: ClassVar[str] = "kvbench-noise/2"

    pairs: int = Field(ge=1)
    cells: int
    each: tuple[Noise, ...]
    runner_class: str = ""
    side: str = ""
    workloads: tuple[str, ...] = ()
    started: str | None = None
    ended: str | None = None
    method: str = "launched"

    def of(self, metric: str, level: str | None = None) -> tuple[Noise, ...]:
        return tuple(noise for noise in self.each if noise.metric == metric and level in (None, noise.level))


def noise_of(table: PairTable, rules: TimingRules) -> RunnerNoise:
    """The noise of an A/A table of at least ``FEWEST_PAIRS`` at the looks of ``rules``. ValueError without a metric."""
    tested = hypotheses(table)
    if not tested.each:
        raise ValueError("no cell has any of the metrics: there is no noise to look at")
    t_criticals = {look.pairs: _critical_t(tested.harm, look.pairs, look.alpha) for look in rules.looks}
    groups: dict[tuple[int, str, tuple[str, ...]], list[int]] = {}
    for i, h in enumerate(tested.each):
        groups.setdefault((h.metric_index, h.level, h.stands_for), []).append(i)
    by_metric = sorted(groups.items(), key=lambda item: item[0][0])
    lines = tuple(_noise(tested, columns, t_criticals, rules) for _, columns in by_metric)
    return RunnerNoise(pairs=table.pairs, cells=len(table.cells), each=lines)


def _critical_t(harm: np.ndarray, pairs: int, alpha: float) -> float:
    """Takes it from the flips of the first ``pairs``; of fewer it is extrapolated by the effective number of tests."""
    there = min(len(harm), pairs)
    first = harm[:there] - harm[:there].mean(axis=0)
    if there == pairs:
        return critical_t(first, alpha)
    at = max(alpha, 2.0**-there)
    tests = effective_tests(critical_t(first, at), there, at, harm.shape[1])
    return critical_t_of(tests, pairs, alpha)


def _noise(tested: Hypotheses, columns: Sequence[int], t_criticals: Mapping[int, float], rules: TimingRules) -> Noise:
    first = tested.each[columns[0]]
    y = tested.log_ratio()[:, columns]
    sd, mean = y.std(axis=0, ddof=1), y.mean(axis=0)
    t = np.divide(mean, sd / np.sqrt(len(y)), out=np.zeros_like(mean), where=sd > 0)
    biased, worst = int(np.abs(t).argmax()), int(sd.argmax())
    apart = y - mean
    lagged = (apart[1:] * apart[:-1]).sum(axis=0)
    autocorrelation = np.divide(lagged, (apart**2).sum(axis=0), out=np.zeros_like(mean), where=sd > 0)

    relative = first.metric.relative_of

    def detectable(sd: float) -> ByLook:
        return {k: relative(float(smallest_detectable(sd, k, t))) for k, t in t_criticals.items()}

    def margin(sd: float) -> ByLook:
        return {look.pairs: relative(float(smallest_margin(sd, look.pairs, look.alpha_pass))) for look in rules.looks}

    median_sd, worst_sd = float(np.median(sd)), float(sd[worst])
    return Noise(
        metric=first.metric.name,
        level=first.level,
        stands_for=first.stands_for,
        hypotheses=len(columns),
        sd=median_sd,
        worst=worst_sd,
        where=tested.each[columns[worst]].where,
        bias=float(np.expm1(mean[biased])),
        bias_p=min(1.0, float(2 * stats.t.sf(abs(t[biased]), len(y) - 1)) * len(tested.each)),
        autocorrelation=float(np.median(autocorrelation)),
        detectable=detectable(median_sd),
        worst_detectable=detectable(worst_sd),
        margin=margin(median_sd),
        worst_margin=margin(worst_sd),
    )


def warnings_of(noise: RunnerNoise, rules: TimingRules) -> tuple[str, ...]:
    """Warns where ``rules`` ask for more than this runner shows at their last look, and of pairs that are biased."""
    last = rules.looks[-1].pairs
    notes = []
    if noise.pairs < ENOUGH_PAIRS:
        notes.append(say("noise.few_pairs", pairs=noise.pairs, enough=ENOUGH_PAIRS))
    if other_looks := [sorted(line.detectable) for line in noise.each if last not in line.detectable]:
        return (*notes, say("noise.other_looks", known=other_looks[0], last=last))
    for metric in rules.metrics:
        notes += _limit_warnings(metric, noise.of(metric.name), last)
        for line in noise.of(metric.name):
            level = _LEVELS[line.level]
            if line.bias_p <= _SURE:
                notes.append(say("noise.bias", metric=metric.name, level=level, bias=line.bias * 100, p=line.bias_p))
            elif line.level == OVERALL and abs(line.autocorrelation) > 3 / np.sqrt(noise.pairs):
                notes.append(say("noise.autocorrelation", metric=metric.name, level=level, value=line.autocorrelation))
    return tuple(notes)


def _limit_warnings(metric: MetricRule, lines: Sequence[Noise], last: int) -> list[str]:
    """Warnings of a floor or margins below what the worst of this runner's hypotheses can show."""
    low, narrow, notes = [], [], []
    for line in lines:
        where, margin = in_words(line.level, line.where), metric.margin_at(line.stands_for)
        detectable, least = line.worst_detectable[last], line.worst_margin[last]
        if detectable is None or detectable > metric.floor:
            low.append(f"{share(detectable)} {where}")
        if least is None or least > margin:
            narrow.append(say("noise.margin_line", margin=share(margin), where=where, least=share(least)))
    if low:
        notes.append(say("noise.floor", metric=metric.name, floor=share(metric.floor), last=last, lines=", ".join(low)))
    if narrow:
        notes.append(say("noise.margin", metric=metric.name, last=last, lines="; ".join(narrow)))
    return notes
