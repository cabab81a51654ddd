"""The verdict on paired launches: FAIL, PASS or INCONCLUSIVE, per cell, class and overall. Pure functions of a table.

FAIL: in some hypothesis the adjusted p of "harm" is at most the look's alpha *and* the mean harm is at least the
practical floor. The p are adjusted for all hypotheses (sign-flip max-T) and the looks' alphas add up to 0.01, so a
candidate that is the base fails in at most 1 % of comparisons, whatever the noise; the floor makes it rarer still.

PASS: every hypothesis is shown to be worse by less than its margin, each at the look's ``alpha_pass`` without
correction. That is an intersection-union test (Berger 1982): if some true harm reaches its margin, that hypothesis
alone passes with at most ``alpha_pass``, so all do. Over three looks (0.02 + 0.015 + 0.015) at most 5 % of such
candidates pass. 2^-8 = 0.0039, so 8 pairs can show it.

INCONCLUSIVE: neither. Each hypothesis then has the smallest effect that the pairs at hand would have caught with 80 %
power, and the pairs that would settle it in 80 % if its true change is the one measured (power.py).
A FAIL goes before a PASS: a cell can be slower beyond doubt by more than the floor and still within its margin.

A metric that only one side has cannot be compared, and is no reason to PASS. If the candidate has lost it, that is a
FAIL from as many pairs on as could show one (K pairs without it by chance: 2^-K at most, like any p of theirs), and
INCONCLUSIVE before; if the base does not have it, the comparison is INVALID.

A comparison that the clock ends between two looks may take its next look early, with the pairs it has: how long a pair
took does not depend on which side of it was launched first, so neither does where the clock stopped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvbench.common.stats import t_interval
from kvbench.common.text import plural
from kvbench.gate.timing.pairs import Hypotheses, Hypothesis, OneSided, PairTable, hypotheses
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.power import MOST_USEFUL, pairs_to_settle, seen_by
from kvbench.gate.timing.rules import CELL, Look, TimingRules
from kvbench.gate.timing.signflip import adjusted_p, noninferior_p
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, worst


@dataclass(frozen=True)
class Result:
    """What came of one hypothesis.

    ``change``: candidate / base - 1, of the geometric means over the pairs (and cells). ``interval``: its 95 % Student
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


@dataclass(frozen=True)
class Judgement:
    """The outcome of one look at ``pairs`` pairs, and of each hypothesis.

    ``most_pairs``: those of the last look. ``lost``: metrics that one side has and the other has not, each with its
    finding. ``notes``: metrics that cells do not have on either side.
    """

    outcome: str
    pairs: int
    look: Look
    most_pairs: int
    results: tuple[Result, ...]
    lost: tuple[tuple[OneSided, Finding], ...] = ()
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
    tested, most = hypotheses(table), rules.looks[-1].pairs
    lost = tuple((each, _lost(each, table, look)) for each in table.one_sided)
    results = _results(tested, look, rules) if tested.each else ()
    outcome = worst([*(result.outcome for result in results), *(finding.outcome for _, finding in lost)])
    return Judgement(outcome, table.pairs, look, most, results, lost, tested.notes)


def _lost(one_sided: OneSided, table: PairTable, look: Look) -> Finding:
    where, metric = table.cells[one_sided.cell], table.metrics[one_sided.metric]
    by_candidate = FAIL if 2.0**-table.pairs <= look.alpha else INCONCLUSIVE
    pairs = "the one pair" if table.pairs == 1 else f"all {table.pairs} pairs"
    return Finding(
        id=f"{CELL}/{where}/{metric.name}",
        suite=CELL,
        title=f"{metric.title} of {where}",
        outcome=by_candidate if one_sided.lacking == CANDIDATE else INVALID,
        sentence=wording.sentence("lost", lost=table.words(one_sided), pairs=pairs),
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
    )


def _results(tested: Hypotheses, look: Look, rules: TimingRules) -> tuple[Result, ...]:
    pairs = len(tested.harm)
    floors, margins = (np.array([getattr(h, name) for h in tested.each]) for name in ("floor", "margin"))
    p, p_noninferior = adjusted_p(tested.harm), noninferior_p(tested.harm, margins)
    mean = tested.harm.mean(axis=0)
    failed = (p <= look.alpha) & (mean >= floors)
    outcomes = np.where(failed, FAIL, np.where(p_noninferior <= look.alpha_pass, PASS, INCONCLUSIVE))
    sd = tested.harm.std(axis=0, ddof=1) if pairs > 1 else np.full(mean.shape, np.nan)
    detectable, tests = seen_by(tested.harm, floors, look.alpha)
    undecided = np.flatnonzero(outcomes == INCONCLUSIVE)
    needed = pairs_to_settle(mean[undecided], sd[undecided], floors[undecided], margins[undecided], pairs, tests, rules)
    pairs_needed = dict(zip(undecided.tolist(), needed, strict=True))
    log_ratio = tested.log_ratio()
    return tuple(
        Result(
            hypothesis,
            str(outcomes[i]),
            float(np.expm1(log_ratio[:, i].mean())),
            tuple(float(np.expm1(end)) for end in t_interval(log_ratio[:, i])) if pairs > 1 else None,
            float(mean[i]),
            float(sd[i]) if pairs > 1 else None,
            float(p[i]),
            float(p_noninferior[i]),
            hypothesis.metric.relative_of(float(detectable[i])) if np.isfinite(detectable[i]) else None,
            pairs_needed.get(i),
            tuple(float(x) for x in np.expm1(log_ratio[:, i])),
        )
        for i, hypothesis in enumerate(tested.each)
    )


def findings_of(judgement: Judgement, base: np.ndarray, candidate: np.ndarray) -> tuple[Finding, ...]:
    """One finding a hypothesis, in order: overall, classes, cells; then the metrics that only one side has.

    ``base`` and ``candidate`` [pairs, cells, metrics]: the values that the table was made of; a finding has their
    geometric means over the pairs and its cells, whose ratio is 1 + its change.
    """
    sides = {BASE: base, CANDIDATE: candidate}

    def means(cells: int | tuple[int, ...], metric: int, *missing: str) -> dict[str, float]:
        return {
            side: float(np.exp(np.log(values[:, cells, metric]).mean()))
            for side, values in sides.items()
            if side not in missing
        }

    found = []
    for result in judgement.results:
        hypothesis = result.hypothesis
        found.append(_finding(judgement, result, means(hypothesis.cells, hypothesis.metric_index)))
    for each, finding in judgement.lost:
        found.append(replace(finding, **means(each.cell, each.metric, each.lacking)))
    return tuple(found)


def _finding(judgement: Judgement, result: Result, means: dict[str, float]) -> Finding:
    hypothesis, metric = result.hypothesis, result.hypothesis.metric
    return Finding(
        id=hypothesis.id,
        suite=hypothesis.level,
        title=hypothesis.title,
        outcome=result.outcome,
        sentence=sentence_of(result, judgement),
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
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
        **means,
    )


def sentence(judgement: Judgement) -> str:
    """What the comparison found, in one line: the surest of what is shown, or the widest gap in what is known."""
    outcome, tests = judgement.outcome, len(judgement.results)
    if outcome == EMPTY:
        return wording.sentence("nothing compared")
    results = judgement.of(outcome)
    if not results:
        lost = [finding.sentence for _, finding in judgement.lost if finding.outcome == outcome]
        return wording.sentence("some lost", worst=lost[0], count=len(lost)) if len(lost) > 1 else lost[0]
    if outcome == PASS:
        return wording.sentence("all pass", pairs=plural(judgement.pairs, "pair"), tests=tests)
    if outcome == FAIL:
        # Of several with the smallest p there can be, the one that stands out most from its noise: the whole where all
        # cells are slower, the cell where one is.
        chosen = min(results, key=lambda r: (r.p, -r.harm / r.sd if r.sd else -np.inf))
        key, alone = "some fail", len(results) == 1
    else:
        chosen = max(results, key=lambda r: (r.smallest_detectable is None, r.smallest_detectable or 0.0))
        key, alone = "some undecided", tests == 1
    said = sentence_of(chosen, judgement)
    return said if alone else wording.sentence(key, worst=said, count=len(results), tests=tests)


def sentence_of(result: Result, judgement: Judgement) -> str:
    """One hypothesis in one line: what became of it, where, by how much, how sure; what could have gone unseen."""
    hypothesis, metric, pairs = result.hypothesis, result.hypothesis.metric, plural(judgement.pairs, "pair")
    ends = " to ".join(map(wording.percent, result.interval or ()))
    interval = f" (95 % interval {ends})" if ends else ""
    key, advice = result.outcome, ""
    if result.outcome == INCONCLUSIVE:
        key = "too few pairs" if result.smallest_detectable is None else "undecided"
        key = "one pair" if judgement.pairs == 1 else key
        if result.pairs_needed is None or result.pairs_needed > judgement.most_pairs:
            advice = wording.sentence("advice", most=judgement.most_pairs)
    return wording.sentence(
        key,
        title=hypothesis.title,
        measured=f"{hypothesis.title}: {wording.percent(result.change)}{interval} after {pairs}",
        size=wording.percent(abs(result.change), signed=False),
        worse="lower" if metric.higher_is_better else "higher",
        interval=interval,
        pairs=pairs,
        tests=len(judgement.results),
        p=_p(result.p),
        p_noninferior=_p(result.p_noninferior),
        least_p=wording.probability(2.0**-judgement.pairs),
        floor=wording.share(metric.floor),
        margin=wording.share(hypothesis.margin_share),
        detectable=wording.share(result.smallest_detectable),
        needed=f"more than {MOST_USEFUL}" if result.pairs_needed is None else f"about {result.pairs_needed}",
        advice=advice,
    )


def _p(p: float) -> str:
    words = wording.probability(p)
    return f"p {words}" if words.startswith("<") else f"p = {words}"
