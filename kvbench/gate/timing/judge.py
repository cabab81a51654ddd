"""The verdict on paired launches: FAIL, PASS or INCONCLUSIVE, per cell, class and overall. Pure functions of a table.

FAIL: in some hypothesis the adjusted p of "harm" is at most the look's alpha *and* the mean harm is at least the
practical floor. The p are adjusted for all hypotheses (sign-flip max-T) and the looks' alphas add up to 0.01, so a
candidate that is the base fails in at most 1 % of comparisons, whatever the noise; the floor makes it rarer still.

PASS: every hypothesis is shown to be worse by less than its margin, each at the look's ``alpha_pass`` without
correction. That is an intersection-union test (Berger 1982): if some true harm reaches its margin, that hypothesis
alone passes with at most ``alpha_pass``, so all do. Over three looks (0.02 + 0.015 + 0.015) at most 5 % of such
candidates pass. 2^-8 = 0.0039, so 8 pairs can show it.

INCONCLUSIVE: neither. Each hypothesis then has the smallest effect that the pairs at hand would have caught with 80 %
power, and the pairs that would settle it in 80 % if its true change is the one measured (power.py). A FAIL goes before
a PASS: a cell can be slower beyond doubt by more than the floor and still within its margin.

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
class Judgement:
    """The outcome of one look at ``pairs`` pairs.

    ``findings``: one a hypothesis, in order: overall, classes, cells; then the metrics that only one side has. They do
    not have the sides' values yet. ``indices``: the cells and the metric of each, in the table. ``notes``:
    metrics that cells do not have on either side.
    """

    outcome: str
    pairs: int
    look: Look
    findings: tuple[Finding, ...]
    indices: tuple[tuple[tuple[int, ...], int], ...]
    notes: tuple[str, ...] = ()

    @property
    def compared(self) -> list[Finding]:
        """The hypotheses: findings on metrics that both sides have."""
        return [finding for finding in self.findings if finding.change is not None]


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
    tested = hypotheses(table)
    findings = _findings(tested, look, rules) if tested.each else []
    findings += [_lost(each, table, look) for each in table.one_sided]
    indices = [(h.cells, h.metric_index) for h in tested.each] + [((e.cell,), e.metric) for e in table.one_sided]
    outcome = worst([finding.outcome for finding in findings])
    return Judgement(outcome, table.pairs, look, tuple(findings), tuple(indices), tested.notes)


def _lost(one_sided: OneSided, table: PairTable, look: Look) -> Finding:
    where, metric = table.cells[one_sided.cell], table.metrics[one_sided.metric]
    by_candidate = FAIL if 2.0**-table.pairs <= look.alpha else INCONCLUSIVE
    outcome = by_candidate if one_sided.lacking == CANDIDATE else INVALID
    pairs = "the one pair" if table.pairs == 1 else f"all {table.pairs} pairs"
    said = wording.sentence("lost", lost=table.words(one_sided), pairs=pairs)
    hypothesis = Hypothesis(CELL, where, metric, one_sided.metric, (one_sided.cell,), (CELL,))
    return _finding(hypothesis, outcome, said)


def _finding(hypothesis: Hypothesis, outcome: str, sentence: str = "") -> Finding:
    metric = hypothesis.metric
    return Finding(
        id=hypothesis.id,
        suite=hypothesis.level,
        title=hypothesis.title,
        outcome=outcome,
        sentence=sentence,
        metric=metric.name,
        unit=metric.unit,
        higher_is_better=metric.higher_is_better,
    )


def _findings(tested: Hypotheses, look: Look, rules: TimingRules) -> list[Finding]:
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
    found = []
    for i, (hypothesis, y) in enumerate(zip(tested.each, tested.log_ratio().T, strict=True)):
        seen = float(detectable[i])
        finding = replace(
            _finding(hypothesis, str(outcomes[i])),
            change=float(np.expm1(y.mean())),
            interval=tuple(float(np.expm1(end)) for end in t_interval(y)) if pairs > 1 else None,  # decides nothing
            p=float(p[i]),
            figures={
                "floor": hypothesis.metric.floor,
                "margin": hypothesis.margin_share,
                "smallest_detectable": hypothesis.metric.relative_of(seen) if np.isfinite(seen) else None,
                "p_noninferior": float(p_noninferior[i]),
                "pairs": pairs,
                "pairs_needed": pairs_needed.get(i),
            },
            series=tuple(float(x) for x in np.expm1(y)),
        )
        said = _sentence_of(finding, len(tested.each), rules.looks[-1].pairs)
        found.append(replace(finding, sentence=said))
    return found


def _sentence_of(finding: Finding, tests: int, most_pairs: int) -> str:
    """What became of a hypothesis, where, by how much, how sure; what could have gone unseen."""
    figures = finding.figures
    needed, detectable = figures["pairs_needed"], figures["smallest_detectable"]
    pairs = plural(figures["pairs"], "pair")
    ends = " to ".join(map(wording.percent, finding.interval or ()))
    interval = f" (95 % interval {ends})" if ends else ""
    key, advice = finding.outcome, ""
    if key == INCONCLUSIVE:
        key = "one pair" if figures["pairs"] == 1 else "too few pairs" if detectable is None else "undecided"
        if needed is None or needed > most_pairs:
            advice = wording.sentence("advice", most=most_pairs)
    return wording.sentence(
        key,
        title=finding.title,
        measured=f"{finding.title}: {wording.percent(finding.change)}{interval} after {pairs}",
        size=wording.percent(abs(finding.change), signed=False),
        worse="lower" if finding.higher_is_better else "higher",
        interval=interval,
        pairs=pairs,
        tests=tests,
        p=_p(finding.p),
        p_noninferior=_p(figures["p_noninferior"]),
        least_p=wording.probability(2.0 ** -figures["pairs"]),
        floor=wording.share(figures["floor"]),
        margin=wording.share(figures["margin"]),
        detectable=wording.share(detectable),
        needed=f"more than {MOST_USEFUL}" if needed is None else f"about {needed}",
        advice=advice,
    )


def _p(p: float) -> str:
    words = wording.probability(p)
    return f"p {words}" if words.startswith("<") else f"p = {words}"


def findings_of(judgement: Judgement, base: np.ndarray, candidate: np.ndarray) -> tuple[Finding, ...]:
    """The findings with the sides' values: geometric means over the pairs and cells, whose ratio is 1 + the change.

    ``base`` and ``candidate`` [pairs, cells, metrics]: the values that the table was made of.
    """
    found = []
    for finding, (cells, metric) in zip(judgement.findings, judgement.indices, strict=True):
        means = {
            side: float(np.exp(np.log(values[:, cells, metric]).mean()))
            for side, values in ((BASE, base), (CANDIDATE, candidate))
        }
        known = {side: value for side, value in means.items() if not np.isnan(value)}
        found.append(replace(finding, **known))
    return tuple(found)


def sentence(judgement: Judgement) -> str:
    """What the comparison found, in one line: the surest of what is shown, or the widest gap in what is known."""
    compared, outcome = judgement.compared, judgement.outcome
    if outcome == EMPTY:
        return wording.sentence("nothing compared")
    chosen = [finding for finding in compared if finding.outcome == outcome]
    if not chosen:
        lost = [finding.sentence for finding in judgement.findings if finding.outcome == outcome]
        return wording.sentence("some lost", worst=lost[0], count=len(lost)) if len(lost) > 1 else lost[0]
    if outcome == PASS:
        return wording.sentence("all pass", pairs=plural(judgement.pairs, "pair"), tests=len(compared))
    if outcome == FAIL:
        key, alone, first = "some fail", len(chosen) == 1, min(chosen, key=_surest)
    else:
        key, alone = "some undecided", len(compared) == 1
        first = max(chosen, key=_least_known)
    if alone:
        return first.sentence
    return wording.sentence(key, worst=first.sentence, count=len(chosen), tests=len(compared))


def _surest(finding: Finding) -> tuple[float, float]:
    """Of several with the smallest p there can be, the one that stands out most from its noise comes first: the whole
    where all cells are slower, the cell where one is."""
    y = np.log1p(finding.series)
    sd = y.std(ddof=1)
    return finding.p, -abs(y.mean()) / sd if sd else -np.inf


def _least_known(finding: Finding) -> float:
    detectable = finding.figures["smallest_detectable"]
    return np.inf if detectable is None else detectable
