"""The verdict on paired launches: FAIL, PASS or INCONCLUSIVE, per cell, class and overall. Pure functions of a table.

FAIL: in some hypothesis the adjusted p of "harm" is at most the look's alpha *and* the mean harm is at least the
practical floor. The p are adjusted for all hypotheses (sign-flip max-T) and the looks' alphas add up to 0.01, so a
candidate that is the base fails in at most 1 % of comparisons, whatever the noise; the floor makes it rarer still.

PASS: every hypothesis is shown to be worse by less than its margin, each at the look's ``alpha_pass`` without
correction. That is an intersection-union test (Berger 1982): if some true harm reaches its margin, that hypothesis
alone passes with at most ``alpha_pass``, so all do. Over three looks (0.02 + 0.015 + 0.015) at most 5 % of such
candidates pass. 2^-8 = 0.0039, so 8 pairs can show it.

INCONCLUSIVE: neither. Each hypothesis then has the smallest effect that the pairs at hand would have caught with 80 %
power, and the pairs that would settle it in 80 % if its true change is the one measured (kvbench/gate/timing/power.py).
A FAIL goes before a PASS: a cell can be slower beyond doubt by more than the floor and still within its margin.

A metric that only one side has cannot be compared, and is no reason to PASS. If the candidate has lost it, that is a
FAIL from as many pairs on as could show one (K pairs without it by chance: 2^-K at most, like any p of theirs), and
INCONCLUSIVE before; if the base does not have it, the comparison is INVALID.

A comparison that the clock ends between two looks may take its next look early, with the pairs it has: how long a pair
took does not depend on which side of it was launched first, so neither does where the clock stopped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy import stats

from kvbench.common.text import plural
from kvbench.gate.timing.pairs import Hypotheses, Hypothesis, OneSided, PairTable, hypotheses
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.power import MOST_USEFUL, pairs_to_settle, seen_by
from kvbench.gate.timing.rules import CELL, Look, MetricRule, TimingRules
from kvbench.gate.timing.signflip import adjusted_p, noninferior_p
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, worst
from kvbench.gate.verdict.wording import percent, probability

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Result:
    """What came of one hypothesis.

    ``change``: candidate / base - 1, of the geometric means over the pairs (and cells); ``interval``: its 95 % Student
    t interval on the log ratio, for display only: no decision is taken by it; None below 2 pairs. ``harm`` and ``sd``
    of the pairs [log ratio, worse is positive]. ``smallest_detectable``: a relative change for the worse, None where
    so few pairs catch none. ``pairs_needed``: in all; None where it is settled, or where that is more than 200.
    ``series``: the change in each pair.
    """

    hypothesis: Hypothesis
    outcome: str
    change: float
    interval: tuple[float, float] | None
    harm: float
    sd: float | None
    p: float
    p_noninferior: float
    smallest_detectable: float | None
    pairs_needed: int | None
    series: tuple[float, ...]

    @property
    def worse(self) -> float:
        """The measured change for the worse, relative; negative: it became better."""
        return self.hypothesis.metric.relative_of(self.harm)


@dataclass(frozen=True)
class Lost:
    """What came of a metric of a cell that only one side has; ``sentence`` says which."""

    one_sided: OneSided
    where: str
    metric: MetricRule
    outcome: str
    sentence: str


@dataclass(frozen=True)
class Judgement:
    """The outcome of one look at ``pairs`` pairs, and of each hypothesis.

    ``most_pairs``: those of the last look. ``lost``: metrics that one side has and the other has not.
    ``notes``: metrics that cells do not have on either side.
    """

    outcome: str
    pairs: int
    look: Look
    most_pairs: int
    results: tuple[Result, ...]
    lost: tuple[Lost, ...] = ()
    notes: tuple[str, ...] = ()

    def of(self, outcome: str) -> tuple[Result, ...]:
        return tuple(result for result in self.results if result.outcome == outcome)


def judge(table: PairTable, rules: TimingRules, look_index: int) -> Judgement:
    """The verdict at look ``look_index`` (from 0) on the pairs that it is for, or on fewer where the clock ended them.

    ValueError for a table of other metrics, or with pairs that belong to another look.
    """
    look = rules.looks[look_index]
    before = rules.looks[look_index - 1].pairs if look_index else 0
    if not before < table.pairs <= look.pairs:
        raise ValueError(f"{table.pairs} pairs for the look at {look.pairs}: it takes {before + 1} to {look.pairs}")
    if table.metrics != rules.metrics:
        raise ValueError("the table's metrics are not those of the rules: make both from one policy")
    tested, most, lost = hypotheses(table), rules.looks[-1].pairs, _lost(table, look)
    results = _results(tested, look, rules) if tested.each else ()
    outcome = worst([*(each.outcome for each in results), *(each.outcome for each in lost)])
    return Judgement(outcome, table.pairs, look, most, results, lost, tested.notes)


def _lost(table: PairTable, look: Look) -> tuple[Lost, ...]:
    by_candidate = FAIL if 2.0**-table.pairs <= look.alpha else INCONCLUSIVE
    return tuple(
        Lost(
            each,
            table.cells[each.cell],
            table.metrics[each.metric],
            by_candidate if each.lacking == CANDIDATE else INVALID,
            f"{words} it in {'the one pair' if table.pairs == 1 else f'all {table.pairs} pairs'}.",
        )
        for each, words in zip(table.one_sided, table.lost, strict=True)
    )


def _results(tested: Hypotheses, look: Look, rules: TimingRules) -> tuple[Result, ...]:
    pairs = len(tested.harm)
    floors, margins = (np.array([getattr(h, name) for h in tested.each]) for name in ("floor", "margin"))
    p, p_noninferior = adjusted_p(tested.harm), noninferior_p(tested.harm, margins)
    mean = tested.harm.mean(axis=0)
    failed = (p <= look.alpha) & (mean >= floors)
    outcomes = np.where(failed, FAIL, np.where(p_noninferior <= look.alpha_pass, PASS, INCONCLUSIVE))
    sd = tested.harm.std(axis=0, ddof=1) if pairs > 1 else np.full(mean.shape, np.nan)
    seen, tests = seen_by(tested.harm, floors, look.alpha)
    undecided = np.flatnonzero(outcomes == INCONCLUSIVE)
    needed = pairs_to_settle(mean[undecided], sd[undecided], floors[undecided], margins[undecided], pairs, tests, rules)
    pairs_needed = dict(zip(undecided.tolist(), needed, strict=True))
    changes = np.expm1(tested.log_ratio())
    return tuple(
        Result(
            hypothesis,
            str(outcomes[i]),
            float(np.expm1(tested.log_ratio()[:, i].mean())),
            _interval(tested.log_ratio()[:, i]),
            float(mean[i]),
            float(sd[i]) if pairs > 1 else None,
            float(p[i]),
            float(p_noninferior[i]),
            hypothesis.metric.relative_of(float(seen[i])) if np.isfinite(seen[i]) else None,
            pairs_needed.get(i),
            tuple(float(x) for x in changes[:, i]),
        )
        for i, hypothesis in enumerate(tested.each)
    )


def _interval(log_ratio: np.ndarray) -> tuple[float, float] | None:
    pairs = len(log_ratio)
    if pairs < 2:
        return None
    half = stats.t.ppf((1 + CONFIDENCE) / 2, pairs - 1) * log_ratio.std(ddof=1) / np.sqrt(pairs)
    return float(np.expm1(log_ratio.mean() - half)), float(np.expm1(log_ratio.mean() + half))


def findings_of(judgement: Judgement, base: np.ndarray, candidate: np.ndarray) -> tuple[Finding, ...]:
    """One finding a hypothesis, in order: overall, classes, cells; then the metrics that only one side has.

    ``base`` and ``candidate`` [pairs, cells, metrics]: the values that the table was made of; a finding has their
    geometric means over the pairs and its cells, whose ratio is 1 + its change.
    """
    found = [_finding(judgement, result, base, candidate) for result in judgement.results]
    return (*found, *(_lost_finding(each, base, candidate) for each in judgement.lost))


def _lost_finding(lost: Lost, base: np.ndarray, candidate: np.ndarray) -> Finding:
    where, metric = (slice(None), lost.one_sided.cell, lost.one_sided.metric), lost.metric
    of_base, of_candidate = (
        None if lost.one_sided.lacking == side else float(np.exp(np.log(values[where]).mean()))
        for side, values in ((BASE, base), (CANDIDATE, candidate))
    )
    return Finding(
        id=f"{CELL}/{lost.where}/{metric.name}",
        suite=CELL,
        title=f"{metric.title} of {lost.where}",
        outcome=lost.outcome,
        sentence=lost.sentence,
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        base=of_base,
        candidate=of_candidate,
    )


def _finding(judgement: Judgement, result: Result, base: np.ndarray, candidate: np.ndarray) -> Finding:
    hypothesis, metric = result.hypothesis, result.hypothesis.metric
    of_base, of_candidate = (
        float(np.exp(np.log(side[:, hypothesis.cells, hypothesis.metric_index]).mean())) for side in (base, candidate)
    )
    return Finding(
        id=hypothesis.id,
        suite=hypothesis.level,
        title=hypothesis.title,
        outcome=result.outcome,
        sentence=sentence_of(result, judgement),
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        base=of_base,
        candidate=of_candidate,
        change=result.change,
        interval=result.interval,
        p=result.p,
        figures={
            "floor": metric.floor,
            "margin": hypothesis.margin_share,
            "smallest_detectable": result.smallest_detectable,
            "p_noninferior": result.p_noninferior,
            "pairs": judgement.pairs,
            "pairs_needed": result.pairs_needed,
        },
        series=result.series,
    )


def sentence(judgement: Judgement) -> str:
    """What the comparison found, in one line: the surest of what is shown, or the widest gap in what is known."""
    comparisons, pairs = len(judgement.results), plural(judgement.pairs, "pair")
    if judgement.outcome == EMPTY:
        return "Nothing was compared: no cell has any of the metrics on both sides."
    if not judgement.of(judgement.outcome):
        lost = [each.sentence for each in judgement.lost if each.outcome == judgement.outcome]
        return lost[0] + (f" So it is with {len(lost)} metrics of cells." if len(lost) > 1 else "")
    if judgement.outcome == FAIL:
        # Of several with the smallest p there can be, the one that stands out most from its noise: the whole where all
        # cells are slower, the cell where one is.
        failed = sorted(judgement.of(FAIL), key=lambda r: (r.p, -r.harm / r.sd if r.sd else -np.inf))
        rest = f" {len(failed)} of {comparisons} comparisons fail." if len(failed) > 1 else ""
        return sentence_of(failed[0], judgement) + rest
    if judgement.outcome == PASS:
        whole = "the one comparison" if comparisons == 1 else f"each of {comparisons} comparisons"
        return f"No regression: after {pairs}, {whole} is shown to be worse by less than its margin, if at all."
    open_ = judgement.of(INCONCLUSIVE)
    widest = max(open_, key=lambda r: (r.smallest_detectable is None, r.smallest_detectable or 0.0))
    counted = f"{len(open_)} of {comparisons} comparisons are undecided, least known: " if comparisons > 1 else ""
    return counted + sentence_of(widest, judgement)


def sentence_of(result: Result, judgement: Judgement) -> str:
    """One hypothesis in one line: what became of it, where, by how much, how sure; what could have gone unseen."""
    hypothesis, metric, pairs = result.hypothesis, result.hypothesis.metric, plural(judgement.pairs, "pair")
    low = "lower" if metric.higher_is_better else "higher"
    between = "" if result.interval is None else f" (95 % interval {' to '.join(map(percent, result.interval))})"
    measured = f"{hypothesis.title}: {percent(result.change)}{between} after {pairs}"
    margin = _limit(hypothesis.margin_share)
    if result.outcome == FAIL:
        return (
            f"{hypothesis.title} is {percent(abs(result.change), signed=False)} {low}{between} after {pairs}; "
            f"{_p(result.p)} for all {len(judgement.results)} comparisons together, and it matters from "
            f"{_limit(metric.floor)} on."
        )
    if result.outcome == PASS:
        return f"{measured}; {margin} {low} or more is ruled out ({_p(result.p_noninferior)})."
    if result.sd is None:
        return f"{measured}; {margin} {low} is not ruled out: one pair does not tell how much pairs scatter."
    if result.smallest_detectable is None:
        seen = (
            f"so few pairs can show no regression, however large (p is {probability(2.0**-judgement.pairs)} at least)"
        )
    else:
        seen = f"the least that so many pairs show, in 4 of 5 cases, is {_limit(result.smallest_detectable)} {low}"
    needed = f"more than {MOST_USEFUL}" if result.pairs_needed is None else f"about {result.pairs_needed}"
    way = ""
    if result.pairs_needed is None or result.pairs_needed > judgement.most_pairs:
        way = (
            f", and a comparison takes {judgement.most_pairs} at most: longer loads or a quieter machine make pairs "
            "scatter less"
        )
    return f"{measured}; {margin} {low} is not ruled out: {seen}; {needed} pairs would settle it{way}."


def _limit(share: float) -> str:
    return f"{share * 100:.2g} %" if share < 0.1 else f"{share * 100:.3g} %"


def _p(p: float) -> str:
    words = probability(p)
    return f"p {words}" if words.startswith("<") else f"p = {words}"
