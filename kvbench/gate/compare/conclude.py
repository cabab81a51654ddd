"""The verdict on the folder of a comparison; a stored one can be judged again, also by another policy."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import shlex
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy import stats

from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.common.text import csv_cell, plural
from kvbench.gate.compare.folder import LOCKSTEP, TWINS, CompareFolder, CompareState, FailedAttempt
from kvbench.gate.compare.served_check import served_findings, served_notes
from kvbench.gate.policy import Policy
from kvbench.gate.sentences import say
from kvbench.gate.timing.explain import moved_between, where_it_went
from kvbench.gate.timing.judge import Judgement, judge, sentence
from kvbench.gate.timing.modes import two_speeds
from kvbench.gate.timing.pairs import PairTable, hypotheses
from kvbench.gate.timing.plan import BASE, CANDIDATE, SIDES, PairedCell
from kvbench.gate.timing.rules import CELL, OVERALL, MetricRule, TimingRules
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict, worst
from kvbench.metrics.definitions import THROUGHPUT, figure
from kvbench.runs.folder import DONE
from kvbench.runs.metric_names import window_of

_CLOCK_NAMES = {LOCKSTEP: " in engine time", TWINS: " in running time"}  # other pairs are in served time
ATTEMPTS_ALPHA = 0.004  # of the test on servers that fail, beside the looks' alphas: 8 attempts to none


def read_values(
    folder: CompareFolder, cells: Sequence[PairedCell], metrics: Sequence[MetricRule], pairs: Sequence[int]
) -> dict[str, np.ndarray]:
    """Reads the values of both sides [pairs, cells, metrics] in the metrics' units; NaN where a load has none."""
    values = {side: np.full((len(pairs), len(cells), len(metrics)), np.nan) for side in SIDES}
    for side, (i, pair), (j, cell) in itertools.product(SIDES, enumerate(pairs), enumerate(cells)):
        measured = [folder.done(cell, side, pair).metrics.value(figure(metric.name).path) for metric in metrics]
        values[side][i, j] = [np.nan if value is None else value for value in measured]
    return values


def read_table(
    folder: CompareFolder, cells: Sequence[PairedCell], rules: TimingRules, pairs: Sequence[int]
) -> PairTable:
    values, names = read_values(folder, cells, rules.metrics, pairs), [cell.name for cell in cells]
    classes = [rules.class_of(name) for name in names]
    return PairTable.from_values(values[BASE], values[CANDIDATE], names, classes, rules.metrics)


def write_pairs(folder: CompareFolder, state: CompareState, metrics: Sequence[MetricRule]) -> Path:
    """Writes pairs.csv: one row for each metric of each cell in each whole pair, with the side that went first."""
    cells = state.cells
    values = read_values(folder, cells, metrics, range(1, folder.whole_pairs(cells) + 1))
    first_sides = {(pair, turn): side for pair, turns in state.order.items() for turn, side in turns.items()}
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["pair", "cell", "first", "metric", "unit", *SIDES, "log_ratio"])
    for i, j, k in np.ndindex(values[BASE].shape):
        first = first_sides.get((str(i + 1), cells[j].turn), "")  # stored runs were not measured in turn
        base, candidate = (values[side][i, j, k] for side in SIDES)
        ratio = np.log(candidate / base) if base > 0 and candidate > 0 else np.nan
        row = [i + 1, cells[j].name, first, metrics[k].name, metrics[k].unit]
        writer.writerow([*map(csv_cell, row), *(f"{x:.6g}" for x in (base, candidate, ratio))])
    path = folder.path / "pairs.csv"
    write_text(path, out.getvalue())
    return path


def look_points(rules: TimingRules, early: Sequence[int] = ()) -> list[int]:
    """The numbers of pairs after which looks are taken.

    ``early``: after how many pairs --max-minutes ended the comparison. The look taken there spent the alpha of the next
    planned look, which is left out when the comparison goes on. It spent none if the smallest p of so few pairs,
    2^-pairs, could decide nothing.
    """
    before, points = 0, []
    for look in rules.looks:
        could = [n for n in sorted(early) if 2.0**-n <= max(look.alpha, look.alpha_pass)]
        points.append(next((n for n in could if before < n <= look.pairs), look.pairs))
        before = look.pairs
    return points


def look_at(table: PairTable, rules: TimingRules, early: Sequence[int] = ()) -> Judgement:
    """The first look that decides, else the last that there are pairs for."""
    judgement = None
    for index, pairs in enumerate(look_points(rules, early)):
        if index and table.pairs <= rules.looks[index - 1].pairs:
            break
        judgement = judge(table.first(min(pairs, table.pairs)), rules, index)
        if judgement.outcome != INCONCLUSIVE:
            break
    assert judgement is not None, "rules without a look"
    return judgement


def conclude(folder: CompareFolder, state: CompareState, policy: Policy, *, pairs: int | None = None) -> Verdict:
    """The verdict on the first ``pairs`` pairs (None: all that are whole), and on what could not be measured.

    Raises UsageError where a metric of the policy cannot be compared.
    """
    rules, cells, by_the_clock = _with_full_titles(policy.timing, state), state.cells, state.void is None
    there = folder.whole_pairs(cells)
    measured = min(pairs or there, there)
    common, extra = _without_findings(state, policy, measured), _attempt_findings(state)
    if not measured:
        notes = _end_notes(folder, state, rules.looks[0].pairs, goes_on=by_the_clock)
        if state.stopped and by_the_clock:
            title, text = say("conclude.time_title"), say("conclude.time", stopped=state.stopped)
            extra = (Finding("measured/time", "measured", title, INCONCLUSIVE, text), *extra)
        outcome = worst([f.outcome for f in extra])
        text = next((f.sentence for f in extra if f.outcome == outcome), "") or _why_nothing(folder, cells)
        return replace(common, outcome=outcome, sentence=text, findings=extra, notes=(*common.notes, *notes))
    try:
        table = read_table(folder, cells, rules, range(1, measured + 1))
        judgement = look_at(table, rules, state.early_looks)
    except ValueError as error:
        raise UsageError(f"{folder.path}: {error}") from None
    look = {"pairs": judgement.pairs, "look": judgement.look.pairs, "alpha": judgement.look.alpha}
    tested = judgement.findings
    served = ()
    if pairs is None:  # a look is at pairs alone
        served = served_findings(folder, tested)
    extra, moved = (*extra, *served), ()
    notes = [*common.notes, *two_speed_notes(table.first(judgement.pairs)), *served_notes(served)]
    if judgement.outcome == FAIL:
        judged = range(1, judgement.pairs + 1)
        counters = {c.name: {s: [folder.counters(c, s, pair) for pair in judged] for s in SIDES} for c in cells}
        moved = moved_between(counters, tested)
        if where := where_it_went(moved, tested, counters):
            notes.insert(0, where)
    outcome = worst([judgement.outcome, *(f.outcome for f in extra)])
    text = sentence(judgement)
    if outcome != judgement.outcome:
        text = next(f.sentence for f in extra if f.outcome == outcome)
    more_time_helps = by_the_clock and outcome == INCONCLUSIVE
    if state.stopped and more_time_helps:
        text = say("conclude.stopped", stopped=state.stopped, text=text)
    notes += _end_notes(folder, state, max(0, rules.looks[-1].pairs - measured), goes_on=more_time_helps)
    if state.doubt:  # in the sentence itself: who reads no further must see it
        text = say("conclude.doubt", text=text, doubt=state.doubt)
    return replace(
        common,
        outcome=outcome,
        sentence=text,
        findings=(*extra, *tested),
        moved=moved,
        notes=(*notes, *judgement.notes),
        facts=common.facts | look,
    )


def two_speed_notes(table: PairTable) -> list[str]:
    """Names the cells in which one side's launches have one of two speeds."""
    notes = []
    if table.base is None or table.candidate is None:
        return notes
    sides = {BASE: table.base, CANDIDATE: table.candidate}
    for i, k in np.ndindex(table.log_ratio.shape[1:]):
        if table.metrics[k].name != THROUGHPUT or (split := two_speeds(table.log_ratio[:, i, k])) is None:
            continue
        # the side whose own throughput differs more between the two groups of pairs
        values = {side: [v[group, i, k] for group in (split.slower, ~split.slower)] for side, v in sides.items()}
        side = max(values, key=lambda side: abs(np.log(values[side][0].mean() / values[side][1].mean())))
        low, high = sorted(values[side], key=np.mean)
        notes.append(
            say(
                "conclude.two_speeds", cell=table.cells[i], side=side, low=low.mean(), high=high.mean(),
                unit=table.metrics[k].unit, at_low=len(low), at_high=len(high),
            )
        )  # fmt: skip
    return notes


def _without_findings(state: CompareState, policy: Policy, measured: int) -> Verdict:
    """The verdict before anything is judged: the sides, the facts and the notes."""
    facts = {
        "started": state.started,
        "ended": state.ended,
        "machine": say("conclude.machine", model=state.cpu.model, cores=state.cpu.cores),
        "gpus": [gpu.name for gpu in state.gpus],
        "method": state.method,
        "order_seed": state.order_seed,
        "voids": len(state.voids),
    }
    apart = [
        say("conclude.apart", match=key, side=sides[0]) for key, sides in sorted(state.apart.items()) if len(sides) == 1
    ]
    differences = [say("conclude.differ", difference=difference) for difference in state.differences]
    sides = {side: state.of(side).to_json() for side in SIDES}
    facts |= policy.facts() | {"pairs": measured}
    notes = (*state.notes, *apart, *differences)
    return Verdict("compare", PASS, "", **sides, reproduce=state.reproduce, notes=notes, facts=facts)


def _why_nothing(folder: CompareFolder, cells: Sequence[PairedCell]) -> str:
    for side, cell in itertools.product(folder.stored, cells):
        if not (done := folder.load(cell, side, 1) / DONE).is_file():
            return say("conclude.no_done", side=side, path=done)
    return say("conclude.no_pair")


def _end_notes(folder: CompareFolder, state: CompareState, pairs: int, *, goes_on: bool) -> list[str]:
    """Notes how a comparison that ended early goes on, with the minutes that ``pairs`` more take, or why it ended."""
    if not state.stopped:
        return []
    if not goes_on:
        return [say("conclude.ended", stopped=state.stopped)]
    minutes = math.ceil(pairs * max(state.seconds, default=state.pair_s) / 60)
    more = say("conclude.minutes", minutes > 0, minutes=minutes)
    return [say("conclude.go_on", command=folder.resume_command(state.subcommand), minutes=more)]


def _with_full_titles(rules: TimingRules, state: CompareState) -> TimingRules:
    metrics, clock = [], _CLOCK_NAMES.get(state.method, "")
    for metric in rules.metrics:
        words = window_of(metric.name)
        window = say("conclude.window", bool(words), window=words)
        metrics.append(replace(metric, title=metric.title + window + clock))
    return replace(rules, metrics=tuple(metrics))


def finished_verdict(folder: CompareFolder, state: CompareState, policy: Policy) -> Verdict | None:
    """The verdict of a complete comparison, None where more pairs may still change it."""
    if state.status != "complete":
        return None
    verdict = conclude(folder, state, policy)
    return None if state.stopped is not None and verdict.outcome not in (FAIL, PASS) else verdict


def judge_again(path: Path, policy: Policy, *, force: bool = False) -> tuple[Verdict, Path]:
    """The verdict on a finished comparison, and the folder that its files go to.

    It is judged by ``policy`` if that comes from a file, else by the rules that it was measured with. Raises UsageError
    for a comparison that is not finished or is being measured, and where base and candidate differ in what must be
    equal, unless ``force``.
    """
    folder = CompareFolder.open(path)
    with folder.locked() if os.access(path, os.W_OK) else nullcontext():
        state = folder.state()
        if state.status == "incomplete":
            command = folder.resume_command(state.subcommand)
            raise UsageError(say("conclude.not_finished", folder=path, command=command))
        if state.differences and not force:
            differences = "; ".join(state.differences)
            raise UsageError(say("conclude.must_be_equal", differences=differences))
        own = policy
        if state.policy:  # older ones have none
            own = Policy.of(state.policy)
        if not policy.source:
            policy = own
        verdict = conclude(folder, state, policy)
    if own.digest == policy.digest:
        return verdict, path
    again = shlex.join(["kvbench", "gate", str(path), "--policy", str(policy.source)])
    note = say("conclude.judged_again", policy=policy.source)
    verdict = replace(verdict, reproduce=again, notes=(note, *verdict.notes))
    return verdict, path / f"judged-{policy.source.stem}"


def pair_line(folder: CompareFolder, cells: Sequence[PairedCell], rules: TimingRules, pair: int) -> str:
    """Writes one pair's change of each metric, for the progress of a run."""
    try:
        table = read_table(folder, cells, rules, [pair])
    except ValueError as error:
        return str(error)
    tested, level = hypotheses(table), CELL if len(cells) == 1 else OVERALL
    return ", ".join(
        say("conclude.change", metric=h.metric.title, percent=100 * np.expm1(ratio))
        for h, ratio in zip(tested.each, tested.log_ratio()[0], strict=True)
        if h.level == level
    )


def _attempt_findings(state: CompareState) -> tuple[Finding, ...]:
    """Findings on servers that failed, and on the pair that was given up, if one was.

    Without a change, an attempt in which one server alone failed is as likely the candidate's as the base's, since the
    sides take turns in going first: an exact sign test at ``ATTEMPTS_ALPHA`` makes it a FAIL. If the candidate failed
    more often but the test does not show it, the comparison is inconclusive, since the candidate did not finish all its
    loads. A pair that was given up is otherwise invalid.
    """
    failing, given_up = _failing_servers(state.voids), state.void
    if given_up is None or (failing and failing[0].outcome == FAIL):
        return failing
    attempts = [attempt for attempt in state.voids if (attempt.pair, attempt.turn) == (given_up.pair, given_up.turn)]
    attempts = [attempt for attempt in attempts if attempt.resume == attempts[-1].resume]  # only those of its last try
    turn, details = given_up.turn, tuple(map(_attempt_line, attempts))
    many = plural(len(attempts), "attempt")
    text, title = say("conclude.given_up", turn=turn, attempts=many, last=attempts[-1]), "conclude.given_up_title"
    return Finding(f"measured/{turn}", CELL, say(title, turn=turn), INVALID, text, details=details), *failing


def _failing_servers(attempts: Sequence[FailedAttempt]) -> tuple[Finding, ...]:
    """The finding on servers that failed while the other side's did not; empty if there are none."""
    of_base, of_candidate = ([attempt for attempt in attempts if attempt.blamed == side] for side in SIDES)
    base, candidate = len(of_base), len(of_candidate)
    if not base + candidate:
        return ()
    p = float(stats.binomtest(candidate, base + candidate, 0.5, alternative="greater").pvalue)
    outcome = INCONCLUSIVE if candidate > base else PASS
    if p <= ATTEMPTS_ALPHA:
        outcome = FAIL
    faults = "; ".join(text for attempt in of_candidate[-1:] for text in attempt.faults[CANDIDATE])
    text = say(
        "conclude.failing",
        candidate=plural(candidate, "attempt"),
        base=base,
        p=p,
        few=say("conclude.failing_few", outcome == INCONCLUSIVE),
        last=say("conclude.failing_last", candidate > 0, faults=faults),
    )
    finding = Finding(
        "served",
        CELL,
        "servers that fail",
        outcome,
        text,
        base=float(base),
        candidate=float(candidate),
        higher_is_better=False,
        p=p,
        details=tuple(map(_attempt_line, (*of_candidate, *of_base))),
    )
    return (finding,)


def _attempt_line(attempt: FailedAttempt) -> str:
    return say(
        "conclude.attempt",
        where=say("conclude.attempt_pair", attempt.pair > 0, pair=attempt.pair, turn=attempt.turn),
        attempt=attempt.attempt,
        resume=say("conclude.attempt_resume", attempt.resume > 0, resume=attempt.resume),
        first=attempt.first,
        reasons=attempt,
    )
