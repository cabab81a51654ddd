"""Absolute limits on one run: from its cells and a policy's limits to a verdict.

A limit applies to the median over the repeats, or with ``every: true`` to each repeat. A ratio is taken within each
repeat, where both configurations had the same requests, so the median of the ratios is not the ratio of the medians.
The quality of answers belongs to a configuration and has no repeats (kvbench/quality/measure.py).

Limits on an invalid cell, or on one whose server refused requests, are ``invalid``, except on failed requests and
leaked pages, which are why it is so: beyond their limit they fail, and what was refused may be within its limit.

Canaries are judged without a policy too. With a KV in full precision one wrong answer fails the cell. A quantised KV
answers some wrongly also on an idle engine (quality.json has how many): its cell fails only if it answered more of them
wrongly than chance explains.
"""

from __future__ import annotations

import csv
import math
import shlex
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvbench.common.errors import UsageError, as_usage_error
from kvbench.common.text import and_more, plural
from kvbench.gate.policy import WITHIN, GateLimit, Policy, matches
from kvbench.gate.verdict.outputs import Benchmark
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INVALID, PASS, Finding, Verdict, worst
from kvbench.gate.verdict.wording import number, quantity
from kvbench.measure.words import repeat_notes
from kvbench.metrics.canaries import ALPHA, WRONG_ANSWERS, chance_of_so_many, wrong_words
from kvbench.metrics.definitions import TOKENS_PER_S, figure
from kvbench.metrics.model import failure_words
from kvbench.report.comparisons import paging_pair
from kvbench.report.provenance import on_what, title
from kvbench.runs import metric_names
from kvbench.runs.model import WRONG, MeasuredCell, Run
from kvbench.runs.quality import ConfigurationFigures, QualityResult, read_quality
from kvbench.runs.read import read_run

SUITE = "limit"
_CAUSE_INVALIDITY = ("failure_rate", "failed", "pages_owned_after")
_FAILURES = ("failure_rate", "failed")
_NEED_SLO = ("goodput_share", "goodput", "steady_goodput")
_MOST_NAMED = 5  # cells in one sentence
_MOST_REASONS = 3  # limits of quality.json in one sentence
_SHARES = ("same_argmax", "rms_dp", "greedy", "passkey", "perplexity_change")
_CHARTED = {  # columns of summary.csv -> their figures
    TOKENS_PER_S: TOKENS_PER_S, "ttft_ms_p95": "p95_ttft_ms", "itl_ms_p95": "p95_itl_ms",
}  # fmt: skip
_PATHS = {"greedy": "greedy.share", "passkey": "passkey.share"}  # name in a policy -> in quality.json


def judge_sweep(results: Path, policy: Policy, *, force: bool = False) -> Verdict:
    """The verdict of the policy's limits, and of canaries, on a sweep's folder; ``empty`` without any, or a cell.

    ``force``: accept a quality that was measured with other code, versions or weights than the run. Raises UsageError
    where ``results`` is not the folder of a sweep, or there is neither a policy nor a canary.
    """
    with as_usage_error():
        run = read_run(results)
    has_canaries = any(cell.canaries.sent for cell in run.cells)
    if policy.source is None and not has_canaries:
        raise UsageError(f"{results} is the run of a sweep, which only limits can judge: give --policy ci/gates.yaml")
    quality, notes = read_quality(results), []
    if not policy.limits and not has_canaries:
        return _verdict(run, policy, EMPTY, f"nothing was compared: {policy.source} has no limits", ())
    if not run.cells:
        why = f"nothing was compared: {run.folder} has no finished cell; go on with `{_resume(run)}`"
        return _verdict(run, policy, EMPTY, why, ())
    doubt = None
    if quality is not None and not force and (different := quality.differs_from(run.manifest)):
        doubt = (
            f"measured with other code, versions or weights than the run ({'; '.join(different)}): run "
            f"`kvbench quality {run.folder}` with what the run has, measure the run again with what is here, or add "
            "--force to take it"
        )
    findings = (
        *_judge_completeness(run),
        *(judge_canaries(run, cell, quality, doubt) for cell in run.cells if cell.canaries.sent),
        *judge_limits(run, policy.limits, quality, doubt),
    )
    outcome = worst([finding.outcome for finding in findings])
    limits, wrong = plural(len(findings), "limit"), [f for f in findings if f.outcome == outcome]
    if outcome == PASS:
        sentence = f"all {limits} hold on {plural(len(run.cells), 'cell')} of {run.workload}"
    else:
        how = "broken" if outcome == FAIL else "could not be judged"
        sentence = f"{len(wrong)} of {limits} of {run.workload} {how}: {wrong[0].sentence}"
    if quality is not None and quality.note:
        notes.append(quality.note)
    notes += repeat_notes(run.manifest, run.cells)
    judged = " ".join(finding.id for finding in findings)
    if unjudged := [cell.cell_id for cell in run.cells if not cell.valid and f"/{cell.cell_id}" not in judged]:
        notes.append(
            "these cells are invalid, were refused or answered wrongly, and no limit is about them: "
            f"{and_more(unjudged, _MOST_NAMED)}"
        )
    return _verdict(run, policy, outcome, sentence, findings, notes)


def judge_limits(
    run: Run, limits: Sequence[GateLimit], quality: QualityResult | None = None, doubt: str | None = None
) -> tuple[Finding, ...]:
    """A finding for each cell, pair of cells or configuration that a limit names.

    ``quality``: of this run; ``doubt``: why it does not belong to it.
    """
    findings, seen = [], Counter[str]()
    for limit in limits:
        cells = [cell for cell in run.cells if matches(_name(run, cell), limit.cells)]
        if limit.kind == "ratio":
            made = _judge_ratio(run, limit)
        elif limit.kind == "metric":
            made = [_judge_cell(run, cell, limit) for cell in cells]
        else:
            configurations = dict.fromkeys(cell.config_id for cell in cells)
            made = [_judge_quality(run, limit, config_id, quality, doubt) for config_id in configurations]
        if not made:
            globs, ids = ", ".join(limit.cells), ", ".join(cell.cell_id for cell in run.cells)
            why = f"no cell of this run fits {globs}; correct the globs or remove the limit: it has {ids}"
            made = [_invalid(limit, f"{run.workload} ({globs})", why)]
        for finding in made:
            seen[finding.id] += 1
            same = seen[finding.id]
            findings.append(finding if same == 1 else replace(finding, id=f"{finding.id} ({same})"))
    return tuple(findings)


def judge_canaries(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> Finding:
    """Judges a cell that had canaries. ``quality``: of this run; ``doubt``: why it does not belong to it."""
    counts, where = cell.canaries, _name(run, cell)
    if cell.wrong_answers:
        outcome, sentence = FAIL, and_more(cell.wrong_answers, _MOST_REASONS, "; ")
        if counts.wrong:
            sentence = f"WRONG ANSWERS: {wrong_words(counts)}"
    elif not counts.answered:
        outcome, sentence = INVALID, f"none of {counts.sent} canaries was answered: see the failed requests first"
    elif not counts.wrong:
        outcome, sentence = PASS, f"all {counts.answered} canaries that were answered are right"
    else:
        outcome, sentence = _beside_offline(run, cell, quality, doubt)
    return Finding(
        id=f"{SUITE}/{where}/canaries",
        suite=SUITE,
        title=f"canaries of {where}",
        outcome=outcome,
        sentence=f"canaries of {where}: {sentence}",
        metric="canaries",
        unit="count",
        higher_is_better=False,
        candidate=float(counts.wrong),
        figures={} if outcome == INVALID or not cell.wrong_answers else {"max": 0.0},
        details=(f"what is needed to find out why: {cell.folder / WRONG_ANSWERS}",) if counts.wrong else (),
    )


def _beside_offline(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> tuple[str, str]:
    """The outcome of a quantised cell with wrong answers, and its sentence."""
    figures = quality.configurations.get(cell.config_id) if quality and not quality.beside else None
    offline, counts = figures.canaries if figures else None, cell.canaries
    words = wrong_words(counts)
    if offline and not doubt:
        off = offline.asked - offline.right
        chance = chance_of_so_many(counts.wrong, counts.answered, counts.distinct, off, offline.asked)
        words += f"; on an idle engine {off} of {offline.asked} are (p = {chance:.2g}, the limit is {ALPHA:g})"
        return (FAIL, f"WRONG ANSWERS, more than offline: {words}") if chance < ALPHA else (PASS, words)
    unknown = f"not measured: run `kvbench quality {run.folder}`"
    if offline and doubt:
        unknown = doubt
    elif not run.is_built_in:
        unknown = "not known of another engine: `kvbench quality --url` asks its server while it is idle"
    return INVALID, f"{words}; how many are on an idle engine is {unknown}"


def _judge_completeness(run: Run) -> list[Finding]:
    """A finding where the run is incomplete or could not be read whole."""
    wrong = []
    if run.missing:
        cells = plural(len(run.missing), "cell")
        wrong.append(f"{cells} without a finished load ({and_more(run.missing, _MOST_NAMED)})")
    if run.short:
        wrong.append(f"too few repeats ({and_more(run.short, _MOST_NAMED)})")
    if not wrong and run.status != "complete":
        wrong.append(f"its status is {run.status}")
    if not wrong and not run.problems:
        return []
    what, sentence = "readable run", f"the run has problems: {and_more(run.problems, 1)}"
    if wrong:
        what, sentence = "complete run", f"the run is incomplete: {' and '.join(wrong)}; go on with `{_resume(run)}`"
    name, title = f"{SUITE}/{run.workload}/{what}", f"{what} of {run.workload}"
    return [Finding(name, SUITE, title, INVALID, sentence, details=tuple(run.problems))]


def _judge_cell(run: Run, cell: MeasuredCell, limit: GateLimit) -> Finding:
    measured = metric_names.measured(cell, limit.what)
    where = _name(run, cell)
    if not measured.values:
        return _invalid(limit, where, _unmeasured(cell, limit.what))
    if None not in measured.values and (lost := len(cell.repeats) - len(measured.values)):
        return _invalid(limit, where, f"missing in {lost} of {len(cell.repeats)} repeats; measure this cell again")
    values, unit = list(measured.values.values()), metric_names.unit_of(limit.what)
    details = [f"in each repeat: {', '.join(quantity(value, unit) for value in values)}"] if len(values) > 1 else []
    if measured.uncertain:
        details.append("it rests on fewer samples than such a percentile needs: send more requests for a firm one")
    finding = _hold(limit, where, values, unit, details, window=metric_names.window_of(limit.what, cell))
    if limit.what in _FAILURES and (why := failure_words(cell.failure_messages, cell.sent)):
        finding = replace(finding, sentence=f"{finding.sentence}; {why}")
    if cell.valid or (limit.what in _CAUSE_INVALIDITY and (finding.outcome == FAIL or cell.doubt == "refused")):
        return finding
    return _invalid(limit, where, _reasons(cell))


def _judge_ratio(run: Run, limit: GateLimit) -> list[Finding]:
    """Judges ``limit.of`` over ``limit.to``, or paged over contiguous, at each load that has both."""
    what = "a paged and a contiguous cell at one load"
    names = None if limit.of else paging_pair(run)
    pairs = [tuple(run.cell(name, load) for name in names) for load in run.loads] if names else []
    if limit.of:
        what = f"a cell of {', '.join(limit.of)} and one of {', '.join(limit.to)} at one load"
        tops = [cell for cell in run.cells if matches(cell.config_id, limit.of)]
        pairs = [(a, b) for a in tops for b in run.at(a.load) if matches(b.config_id, limit.to) and b is not a]
    pairs = [(a, b) for a, b in pairs if a and b and matches(_name(run, a), limit.cells)]
    if not pairs:
        ids = ", ".join(sorted({cell.config_id for cell in run.cells}))
        why = f"the cells that the limit names do not have {what}; the run's configurations are {ids}"
        return [_invalid(limit, run.workload, why)]
    return [_judge_pair(run, limit, *pair) for pair in pairs]


def _judge_pair(run: Run, limit: GateLimit, a: MeasuredCell, b: MeasuredCell) -> Finding:
    where = f"{_name(run, a)} over {b.config_id}"
    left, right = values = [metric_names.measured(cell, limit.what, a, b).values for cell in (a, b)]
    for cell, measured in zip((a, b), values, strict=True):
        if not cell.valid or not measured:
            why = _unmeasured(cell, limit.what) if cell.valid else _reasons(cell)
            return _invalid(limit, where, f"{cell.cell_id}: {why}")
    both = sorted(left.keys() & right.keys(), key=lambda repeat: repeat or 0)
    if len(both) < max(len(a.repeats), len(b.repeats)) and None not in both:
        return _invalid(limit, where, f"{limit.what} is not known in every repeat of both, so they cannot be paired")
    if any(right[repeat] <= 0 for repeat in both):
        return _invalid(limit, where, f"{limit.what} of {b.cell_id} is 0, so there is no ratio to it")
    ratios = [left[repeat] / right[repeat] for repeat in both]
    unit = metric_names.unit_of(limit.what)
    medians = [quantity(statistics.median(each[repeat] for repeat in both), unit) for each in values]
    details = [
        f"ratio in each repeat: {', '.join(number(value) for value in ratios)}",
        f"medians: {a.config_id} {medians[0]}, {b.config_id} {medians[1]}; the limit holds the ratio within each "
        "repeat, not that of these two",
    ]
    window = metric_names.window_of(limit.what, a, b)
    held = _hold(limit, where, ratios, "", details, window)
    bounds = {f"{name}_ratio": bound for name, bound in held.figures.items()}
    series = tuple(value - 1 for value in ratios)
    return replace(held, change=held.candidate - 1, figures=bounds, series=series)


def _judge_quality(
    run: Run, limit: GateLimit, config_id: str, quality: QualityResult | None, doubt: str | None
) -> Finding:
    where = f"{run.workload}/{config_id}"
    figures = quality.configurations.get(config_id) if quality is not None else None
    value = _quality_figure(figures, limit.what) if figures else None
    if quality is None or figures is None or value is None:
        code = run.manifest.git.short_sha or run.manifest.git.sha
        which = f" with the code of the run (commit {code}; other code needs --force here)" if code else ""
        why = f"not measured: run `kvbench quality {run.folder}`{which}; it takes minutes on a CPU"
        return _invalid(limit, where, why)
    if doubt or (limit.what == WITHIN and quality.random_weights):
        return _invalid(limit, where, doubt or quality.note)
    details = [f"over {figures.positions or 0:,} positions; weights: {quality.weights}"]
    if limit.what == WITHIN:
        return _within(limit, where, figures.outside, details)
    unit = "share" if limit.what in _SHARES else "nats" if limit.kind == "kld" else ""
    return _hold(limit, where, [value], unit, details)


def _quality_figure(figures: ConfigurationFigures, what: str) -> float | None:
    """The figure that a limit names; of WITHIN how many limits are broken."""
    if what == WITHIN:
        return float(len(figures.outside))
    if what == "full_pool_wrong":
        pool = figures.full_pool
        return float(pool.passkey_asked - pool.passkey_right) if pool else None
    return figures.value(_PATHS.get(what, what))


def _within(limit: GateLimit, where: str, outside: Sequence[str], details: Sequence[str]) -> Finding:
    """Judges whether a configuration breaks any of the limits in quality.json."""
    broken = and_more([reason.rstrip(".") for reason in outside], _MOST_REASONS, "; ")
    text = broken or "all figures are within the limits of quality.json"
    return replace(
        _finding(limit, where, FAIL if outside else PASS, text),
        unit="count",
        higher_is_better=False,
        candidate=float(len(outside)),
        figures={"max": 0.0},
        details=(*outside, *details),
    )


def _hold(
    limit: GateLimit, where: str, values: Sequence[float], unit: str, details: Sequence[str], window: str = ""
) -> Finding:
    """The finding on the median of ``values``, or on the worst if each is limited.

    ``window``: which part of the loads they are of, where that is not the usual one.
    """
    sample = " of the paired ratios" if limit.kind == "ratio" else ""
    judged = max(values, key=limit.excess) if limit.every else statistics.median(values)
    broken = limit.excess(judged) > 0
    which = ("the worst repeat has " if limit.every else f"the median{sample} is ") if len(values) > 1 else ""
    ends = {name: end for name, end in (("min", limit.low), ("max", limit.high)) if end is not None}
    words = {"min": "at least", "max": "at most"}
    bounds = " and ".join(f"{words[name]} {quantity(end, unit)}" for name, end in ends.items())
    text = f"{which}{quantity(judged, unit)}, {'but the' if broken else 'the'} limit is {bounds}"
    shown = f" ({window})" if window else ""
    return replace(
        _finding(limit, where, FAIL if broken else PASS, text, shown, f", {bounds}"),
        unit=unit or None,
        higher_is_better=None if len(ends) == 2 else "min" in ends,
        candidate=judged,
        figures=ends,
        details=tuple(details),
    )


def _invalid(limit: GateLimit, where: str, why: str) -> Finding:
    return _finding(limit, where, INVALID, why)


def _finding(limit: GateLimit, where: str, outcome: str, text: str, window: str = "", bounds: str = "") -> Finding:
    """The finding on a limit; ``window`` and ``bounds`` are added to its title."""
    about = (f"{limit.name}: {where}" if limit.name else f"{limit.label} of {where}") + window
    name, sentence = f"{SUITE}/{where}/{limit.label}", f"{about}: {text}"
    return Finding(name, SUITE, f"{about}{bounds}", outcome, sentence, metric=limit.what)


def _unmeasured(cell: MeasuredCell, what: str) -> str:
    if what in _NEED_SLO:
        return "not measured, because the workload has no SLO: give it load.slo and run the sweep again"
    near = metric_names.nearest(cell, what)
    hint = f"did you mean {near}?" if near else "the server may not report it; remove the limit or hold another metric"
    return f"not measured in this run; {hint}"


def _reasons(cell: MeasuredCell) -> str:
    if cell.doubt == WRONG:
        return f"this cell answered canaries wrongly ({and_more(cell.wrong_answers, between='; ')})"
    if cell.doubt == "refused":
        return f"the server refused requests of this cell, so it did less work ({and_more(cell.refused, between='; ')})"
    why = and_more([each.rstrip(".") for each in cell.invalid_reasons], between="; ") or "no reason was stored"
    return f"the measurement of this cell is invalid ({why}): measure again"


def _name(run: Run, cell: MeasuredCell) -> str:
    return f"{run.workload}/{cell.cell_id}"


def _resume(run: Run) -> str:
    return shlex.join(["kvbench", "sweep", "--resume", str(run.folder)])


def _verdict(
    run: Run, policy: Policy, outcome: str, sentence: str, findings: Sequence[Finding], notes: Sequence[str] = ()
) -> Verdict:
    manifest = run.manifest
    command = shlex.join(manifest.command) or None
    facts = {
        "workload": run.workload,
        "cells": len(run.cells),
        "repeats": max((len(cell.repeats) for cell in run.cells), default=0),
        "device": manifest.device,
        "machine": manifest.cpu.model,
        "started": manifest.started,
        "ended": manifest.ended,
        "measured_by": command,
        "policy": str(policy.source) if policy.source else None,
    }
    if run.simulated:  # a reader of the verdict alone must not take it for one on a measurement
        sentence = f"simulated: {sentence}"
        facts |= {"workload": title(run), "simulated": on_what(run)}
    words = ["kvbench", "gate", str(run.folder), *(["--policy", str(policy.source)] if policy.source else [])]
    facts = {key: value for key, value in facts.items() if value is not None}
    judged = {"name": f"{run.workload}/{run.folder.name}", "sha": manifest.git.sha, "command": command}
    return Verdict(
        "limits",
        outcome,
        sentence,
        tuple(findings),
        candidate=judged,
        reproduce=shlex.join(words),
        notes=tuple(notes),
        facts=facts,
    )


def sweep_benchmarks(summary_csv: Path, workload: str) -> list[Benchmark]:
    """The valid cells of a sweep from its summary.csv, named ``<workload>/<cell>/<column>``; none without the file.

    Raises UsageError for a file that cannot be read.
    """
    if not summary_csv.is_file():
        return []
    try:
        with summary_csv.open(encoding="utf-8", newline="") as file:
            rows = [defaultdict(str, row) for row in csv.DictReader(file)]  # older versions wrote fewer columns
        return [made for row in rows if row["valid"] == "True" for made in _cell_benchmarks(row, workload)]
    except (OSError, ValueError, csv.Error) as error:
        raise UsageError(
            f"{summary_csv} cannot be read ({error}): `kvbench report {summary_csv.parent}` writes it again"
        ) from None


def _cell_benchmarks(row: Mapping[str, str], workload: str) -> Iterator[Benchmark]:
    """The values of a row of summary.csv. Raises ValueError."""
    if not row["cell_id"]:
        raise ValueError("a row has no cell_id")
    for column, name in _CHARTED.items():
        value, low, high = (float(row[column + end] or "nan") for end in ("", "_min", "_max"))
        if not math.isnan(value):
            window, repeats = row[f"{column}_window"], plural(float(row["repeats"] or "nan"), "repeat")
            extra = f"{row['configuration']}\n{repeats}{f'; {window}' if window else ''}"
            shown, where = figure(name), f"{workload}/{row['cell_id']}/{column}"
            yield Benchmark(where, shown.unit, value, (high - low) / 2, extra, shown.higher_is_better)
