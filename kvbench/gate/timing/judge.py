"""The verdict on paired launches: FAIL, PASS or INCONCLUSIVE, per cell, class and overall. Pure functions of a table.

FAIL: some hypothesis has an adjusted p of "harm" of at most the look's alpha *and* a mean harm of at least its floor.
The p are adjusted for all hypotheses (sign-flip max-T), and the looks' alphas and that of the served check add up to
0.01, so a candidate that equals the base fails in at most 1 % of comparisons, whatever the noise; the floor makes it
rarer still.

PASS: every hypothesis is shown to be worse by less than its margin, each at the look's ``alpha_pass`` without
correction. That is an intersection-union test (Berger 1982): if some true harm reaches its margin, that hypothesis
alone passes with a probability of at most ``alpha_pass``, and so do all together. Over three looks (0.02 + 0.015 +
0.015) at most 5 % of such candidates pass. 8 pairs can show it, since 2^-8 = 0.0039.

INCONCLUSIVE: neither. Each undecided hypothesis then has the smallest effect that its pairs would have detected with
80 % power, and the number of pairs that would settle it with 80 % power if its true change is the measured one
(power.py). FAIL is tested before PASS: a slowdown can be certain, above the floor, and still within its margin.

A metric that only one side has cannot be compared, and never passes. If the candidate lacks it, that is a FAIL once
there are enough pairs for one (lacking it in K pairs by chance has p = 2^-K at most), and INCONCLUSIVE before. If the
base lacks it, the comparison is INVALID.

If --max-minutes ends a comparison between two looks, the next look is taken early with the pairs there are. That is
valid because how long a pair took does not depend on which side was launched first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from kvbench.common.stats import bounded_log, t_interval
from kvbench.common.text import plural
from kvbench.gate.sentences import say
from kvbench.gate.timing.pairs import HarmHypothesis, Hypotheses, OneSided, PairTable, hypotheses
from kvbench.gate.timing.plan import BASE, CANDIDATE
from kvbench.gate.timing.power import MOST_USEFUL, pairs_to_settle, seen_by
from kvbench.gate.timing.rules import CELL, Look, TimingRules
from kvbench.gate.timing.signflip import adjusted_p, noninferior_p
from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, worst


@dataclass(frozen=True)
class Judgement:
    """The outcome of one look at ``pairs`` pairs.

    findings: of the hypotheses (overall, classes, cells), then of the metrics that only one side has
    notes: cells that lack a metric on both sides
    """

    outcome: str
    pairs: int
    look: Look
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> list[Finding]:
        """The hypotheses: findings on metrics that both sides have."""
        return [finding for finding in self.findings if finding.change is not None]


def judge(table: PairTable, rules: TimingRules, look_index: int) -> Judgement:
    """The verdict at look ``look_index`` (from 0). Raises ValueError for the pairs of another look."""
    look = rules.looks[look_index]
    before = rules.looks[look_index - 1].pairs if look_index else 0
    if not before < table.pairs <= look.pairs:
        raise ValueError(f"{table.pairs} pairs for the look at {look.pairs}: it takes {before + 1} to {look.pairs}")
    tested = hypotheses(table)
    findings = _findings(tested, table, look, rules) if tested.each else []
    findings += [_lost(one_sided, table, look) for one_sided in table.one_sided]
    outcome = worst([finding.outcome for finding in findings])
    return Judgement(outcome, table.pairs, look, tuple(findings), tested.notes)


def _lost(one_sided: OneSided, table: PairTable, look: Look) -> Finding:
    where, metric, lacking = table.cells[one_sided.cell], table.metrics[one_sided.metric], one_sided.lacking
    outcome, having = INVALID, CANDIDATE
    if lacking == CANDIDATE:
        outcome, having = FAIL if 2.0**-table.pairs <= look.alpha else INCONCLUSIVE, BASE
    names = {"lacking": lacking, "having": having, "metric": metric.title, "where": where}
    text = say("timing.lost", n=table.pairs, **names)
    hypothesis = HarmHypothesis(CELL, where, metric, one_sided.metric, (one_sided.cell,), (CELL,))
    return replace(_finding(hypothesis, outcome, table), sentence=text)


def _finding(hypothesis: HarmHypothesis, outcome: str, table: PairTable) -> Finding:
    metric = hypothesis.metric
    return Finding(
        id=hypothesis.id,
        suite=hypothesis.level,
        title=hypothesis.title,
        outcome=outcome,
        sentence="",
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
        **table.means(hypothesis.cells, hypothesis.metric_index),
    )


def _findings(tested: Hypotheses, table: PairTable, look: Look, rules: TimingRules) -> list[Finding]:
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
    findings = []
    for i, (hypothesis, y) in enumerate(zip(tested.each, tested.log_ratio().T, strict=True)):
        low, high = (float(np.expm1(bounded_log(end))) for end in t_interval(y))
        finding = replace(
            _finding(hypothesis, str(outcomes[i]), table),
            change=float(np.expm1(bounded_log(y.mean()))),
            interval=(low, high) if pairs > 1 else None,  # decides nothing
            p=float(p[i]),
            figures={
                "floor": hypothesis.metric.floor,
                "margin": hypothesis.margin_share,
                "smallest_detectable": hypothesis.metric.relative_of(detectable[i]),
                "p_noninferior": float(p_noninferior[i]),
                "pairs": pairs,
                "pairs_needed": pairs_needed.get(i),
            },
            series=tuple(float(x) for x in np.expm1(bounded_log(y))),
        )
        findings.append(replace(finding, sentence=_sentence_of(finding, len(tested.each), rules.looks[-1].pairs)))
    return findings


def _sentence_of(finding: Finding, tests: int, most_pairs: int) -> str:
    """The sentence of a finding: what changed, where, by how much, and how certain that is."""
    figures = finding.figures
    needed, detectable = figures["pairs_needed"], figures["smallest_detectable"]
    pairs = plural(figures["pairs"], "pair")
    change = wording.percent(finding.change)
    ends = " to ".join(map(wording.percent, finding.interval or ()))
    interval = say("timing.interval", bool(ends), ends=ends)
    key, advice = finding.outcome, ""
    if key == INCONCLUSIVE:
        key = "undecided" if detectable is not None else "too_few_pairs"
        key = "one_pair" if figures["pairs"] == 1 else key
        advice = say("timing.advice", needed is None or needed > most_pairs, most=most_pairs)
    return say(
        f"timing.{key}",
        title=finding.title,
        measured=say("timing.measured", title=finding.title, change=change, interval=interval, pairs=pairs),
        size=wording.percent(abs(finding.change), signed=False),
        worse=say("timing.worse", bool(finding.higher_is_better)),
        interval=interval,
        pairs=pairs,
        tests=tests,
        p=wording.p_value(finding.p),
        p_noninferior=wording.p_value(figures["p_noninferior"]),
        least_p=wording.probability(2.0 ** -figures["pairs"]),
        floor=wording.share(figures["floor"]),
        margin=wording.share(figures["margin"]),
        detectable=wording.share(detectable),
        needed=say("timing.needed", needed is None, most=MOST_USEFUL, pairs=needed),
        advice=advice,
    )


def sentence(judgement: Judgement) -> str:
    """The comparison in one line: its most certain finding or, if undecided, the one that is known least."""
    compared, outcome = judgement.compared, judgement.outcome
    if outcome == EMPTY:
        return say("timing.nothing_compared")
    chosen = [finding for finding in compared if finding.outcome == outcome]
    if not chosen:
        lost = [finding.sentence for finding in judgement.findings if finding.outcome == outcome]
        return say("timing.some_lost", n=len(lost), worst=lost[0])
    if outcome == PASS:
        return say("timing.all_pass", pairs=plural(judgement.pairs, "pair"), tests=len(compared))
    if outcome == FAIL:
        key, alone, first = "timing.some_fail", len(chosen) == 1, min(chosen, key=_surest)
    else:
        key, alone = "timing.some_undecided", len(compared) == 1
        first = max(chosen, key=_least_known)
    if alone:
        return first.sentence
    return say(key, worst=first.sentence, count=len(chosen), tests=len(compared))


def _least_known(finding: Finding) -> float:
    detectable = finding.figures["smallest_detectable"]
    return np.inf if detectable is None else detectable


def _surest(finding: Finding) -> tuple[float, float]:
    """Sorts by p, then by the mean over its scatter: the whole before its cells if all are slower."""
    y = np.log1p(finding.series)
    sd = y.std(ddof=1)
    return finding.p, -abs(y.mean()) / sd if sd else -np.inf
