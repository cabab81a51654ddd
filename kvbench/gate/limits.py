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
from kvbench.gate.sentences import say
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
        raise UsageError(say("limits.no_policy", folder=results))
    quality = read_quality(results)
    if not policy.limits and not has_canaries:
        return _verdict(run, policy, EMPTY, say("limits.no_limits", source=policy.source))
    if not run.cells:
        return _verdict(run, policy, EMPTY, say("limits.no_cell", folder=run.folder, resume=run.resume_command))
    doubt = None
    if quality is not None and not force and (different := quality.differs_from(run.manifest)):
        doubt = say("limits.other_quality", differences="; ".join(different), folder=run.folder)
    findings = (
        *_judge_completeness(run),
        *(judge_canaries(run, cell, quality, doubt) for cell in run.cells if cell.canaries.sent),
        *judge_limits(run, policy.limits, quality, doubt),
    )
    outcome = worst([finding.outcome for finding in findings])
    first, *others = [finding for finding in findings if finding.outcome == outcome]
    sentence = say(
        {PASS: "limits.all_hold", FAIL: "limits.broken"}.get(outcome, "limits.not_judged"),
        count=1 + len(others),
        limits=plural(len(findings), "limit"),
        cells=plural(len(run.cells), "cell"),
        workload=run.workload,
        first=first.sentence,
    )
    judged = " ".join(finding.id for finding in findings)
    notes = [*run.unread, *repeat_notes(run.manifest, run.cells)]
    if quality is not None and quality.note:
        notes.insert(0, quality.note)
    if unjudged := [cell.cell_id for cell in run.cells if not cell.valid and f"/{cell.cell_id}" not in judged]:
        notes.append(say("limits.without_limit", cells=and_more(unjudged, _MOST_NAMED)))
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
            where = say("limits.where_globs", workload=run.workload, globs=globs)
            made = [_invalid(limit, where, say("limits.no_such_cell", globs=globs, ids=ids))]
        for finding in made:
            seen[finding.id] += 1
            if (n := seen[finding.id]) > 1:
                finding = replace(finding, id=say("limits.again", id=finding.id, n=n))
            findings.append(finding)
    return tuple(findings)


def judge_canaries(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> Finding:
    """Judges a cell that had canaries. ``quality``: of this run; ``doubt``: why it does not belong to it."""
    counts, where = cell.canaries, _name(run, cell)
    figures, details = {}, []
    if cell.wrong_answers:
        outcome, sentence, figures = FAIL, and_more(cell.wrong_answers, _MOST_REASONS, "; "), {"max": 0.0}
    elif not counts.answered:
        outcome, sentence = INVALID, say("limits.canaries_unanswered", n=counts.sent)
    elif not counts.wrong:
        outcome, sentence = PASS, say("limits.canaries_right", n=counts.answered)
    else:
        outcome, sentence = _beside_offline(run, cell, quality, doubt)
    if counts.wrong:
        details.append(say("limits.canaries_details", path=cell.folder / WRONG_ANSWERS))
        if cell.wrong_answers:
            sentence = say("limits.canaries_wrong", words=wrong_words(counts))
    title = say("limits.canaries", where=where)
    return Finding(
        id=say("limits.id", where=where, label="canaries"),
        suite=SUITE,
        title=title,
        outcome=outcome,
        sentence=say("limits.sentence", about=title, text=sentence),
        metric="canaries",
        unit="count",
        higher_is_better=False,
        candidate=float(counts.wrong),
        figures=figures,
        details=tuple(details),
    )


def _beside_offline(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> tuple[str, str]:
    """The outcome of a quantised cell with wrong answers, and its sentence."""
    figures = quality.configurations.get(cell.config_id) if quality and not quality.beside else None
    offline, counts = figures.canaries if figures else None, cell.canaries
    words = wrong_words(counts)
    if offline and not doubt:
        wrong = offline.asked - offline.right
        chance = chance_of_so_many(counts.wrong, counts.answered, counts.distinct, wrong, offline.asked)
        words = say("limits.canaries_offline", words=words, wrong=wrong, asked=offline.asked, p=chance, alpha=ALPHA)
        return (FAIL, say("limits.canaries_more", words=words)) if chance < ALPHA else (PASS, words)
    unknown = say("limits.offline_unmeasured", folder=run.folder)
    if offline and doubt:
        unknown = doubt
    elif not run.is_built_in:
        unknown = say("limits.offline_other")
    return INVALID, say("limits.canaries_unknown", words=words, unknown=unknown)


def _judge_completeness(run: Run) -> list[Finding]:
    """A finding where the run is incomplete or could not be read whole."""
    wrong = []
    if run.missing:
        cells = plural(len(run.missing), "cell")
        wrong.append(say("limits.missing", cells=cells, names=and_more(run.missing, _MOST_NAMED)))
    if run.short:
        wrong.append(say("limits.short", names=and_more(run.short, _MOST_NAMED)))
    if not wrong and run.status != "complete":
        wrong.append(say("limits.status", status=run.status))
    problems = [text for text in run.problems if text not in run.unread]
    if not wrong and not problems:
        return []
    what = "readable run"
    if wrong:
        what, reasons = "complete run", " and ".join(wrong)
        sentence = say("limits.incomplete", reasons=reasons, resume=run.resume_command)
    else:
        sentence = say("limits.problems", first=and_more(problems, 1))
    title = say("limits.of_workload", what=what, workload=run.workload)
    name = say("limits.id", where=run.workload, label=what)
    return [Finding(name, SUITE, title, INVALID, sentence, details=tuple(problems))]


def _judge_cell(run: Run, cell: MeasuredCell, limit: GateLimit) -> Finding:
    measured = metric_names.measured(cell, limit.what)
    where = _name(run, cell)
    if not measured.values:
        return _invalid(limit, where, _unmeasured(cell, limit.what))
    if None not in measured.values and (lost := len(cell.repeats) - len(measured.values)):
        return _invalid(limit, where, say("limits.lost_repeats", lost=lost, repeats=len(cell.repeats)))
    values, unit = list(measured.values.values()), metric_names.unit_of(limit.what)
    details = []
    if len(values) > 1:
        details.append(say("limits.each_repeat", values=", ".join(quantity(value, unit) for value in values)))
    if measured.uncertain:
        details.append(say("limits.few_samples"))
    finding = _hold(limit, where, values, unit, details, window=metric_names.window_of(limit.what, cell))
    if limit.what in _FAILURES and (why := failure_words(cell.failure_messages, cell.sent)):
        finding = replace(finding, sentence=f"{finding.sentence}; {why}")
    if cell.valid or (limit.what in _CAUSE_INVALIDITY and (finding.outcome == FAIL or cell.doubt == "refused")):
        return finding
    return _invalid(limit, where, _reasons(cell))


def _judge_ratio(run: Run, limit: GateLimit) -> list[Finding]:
    """Judges ``limit.of`` over ``limit.to``, or paged over contiguous, at each load that has both."""
    if limit.of:
        what = say("limits.ratio_of", of=", ".join(limit.of), to=", ".join(limit.to))
        tops = [cell for cell in run.cells if matches(cell.config_id, limit.of)]
        pairs = [(a, b) for a in tops for b in run.at(a.load) if matches(b.config_id, limit.to) and b is not a]
    else:
        what, names = say("limits.ratio_default"), paging_pair(run) or ()
        pairs = [tuple(run.cell(name, load) for name in names) for load in run.loads if names]
    pairs = [(a, b) for a, b in pairs if a and b and matches(_name(run, a), limit.cells)]
    if not pairs:
        ids = ", ".join(sorted({cell.config_id for cell in run.cells}))
        return [_invalid(limit, run.workload, say("limits.ratio_missing", what=what, ids=ids))]
    return [_judge_pair(run, limit, *pair) for pair in pairs]


def _judge_pair(run: Run, limit: GateLimit, a: MeasuredCell, b: MeasuredCell) -> Finding:
    where = say("limits.ratio_where", a=_name(run, a), b=b.config_id)
    left, right = values = [metric_names.measured(cell, limit.what, a, b).values for cell in (a, b)]
    for cell, measured in zip((a, b), values, strict=True):
        if not cell.valid or not measured:
            why = _unmeasured(cell, limit.what) if cell.valid else _reasons(cell)
            return _invalid(limit, where, say("limits.ratio_invalid", cell=cell.cell_id, why=why))
    both = sorted(left.keys() & right.keys(), key=lambda repeat: repeat or 0)
    if len(both) < max(len(a.repeats), len(b.repeats)) and None not in both:
        return _invalid(limit, where, say("limits.ratio_unpaired", what=limit.what))
    if any(right[repeat] <= 0 for repeat in both):
        return _invalid(limit, where, say("limits.ratio_zero", what=limit.what, cell=b.cell_id))
    ratios = [left[repeat] / right[repeat] for repeat in both]
    unit = metric_names.unit_of(limit.what)
    medians = [quantity(statistics.median(side[repeat] for repeat in both), unit) for side in values]
    names = {"a": a.config_id, "a_median": medians[0], "b": b.config_id, "b_median": medians[1]}
    details = [
        say("limits.ratio_values", values=", ".join(map(number, ratios))),
        say("limits.ratio_medians", **names),
    ]
    held = _hold(limit, where, ratios, "", details, metric_names.window_of(limit.what, a, b))
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
        code = say("limits.quality_code", bool(code), code=code)
        return _invalid(limit, where, say("limits.no_quality", folder=run.folder, code=code))
    if doubt or (limit.what == WITHIN and quality.random_weights):
        return _invalid(limit, where, doubt or quality.note)
    details = [say("limits.positions", positions=figures.positions or 0, weights=quality.weights)]
    if limit.what == WITHIN:
        return _within(limit, where, figures.outside, details)
    unit = {"kld": "nats"}.get(limit.kind, "")
    return _hold(limit, where, [value], "share" if limit.what in _SHARES else unit, details)


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
    text = broken or say("limits.within")
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
    judged, sample = statistics.median(values), limit.kind
    if limit.every:
        judged, sample = max(values, key=limit.excess), "every"
    broken = limit.excess(judged) > 0
    ends = {name: end for name, end in (("min", limit.low), ("max", limit.high)) if end is not None}
    bounds = " and ".join(say(f"limits.{name}", value=quantity(end, unit)) for name, end in ends.items())
    which, but = say("limits.which", sample) if len(values) > 1 else "", say("limits.but", broken)
    text = say("limits.value", which=which, value=quantity(judged, unit), but=but, bounds=bounds)
    window = say("limits.window", bool(window), window=window)
    return replace(
        _finding(limit, where, FAIL if broken else PASS, text, window, bounds),
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
    names = {"name": limit.name, "label": limit.label, "where": where, "window": window}
    about = say("limits.about", bool(limit.name), **names)
    title = say("limits.title", bool(bounds), about=about, bounds=bounds)
    sentence = say("limits.sentence", about=about, text=text)
    return Finding(say("limits.id", **names), SUITE, title, outcome, sentence, metric=limit.what)


def _unmeasured(cell: MeasuredCell, what: str) -> str:
    if what in _NEED_SLO:
        return say("limits.need_slo")
    near = metric_names.nearest(cell, what)
    return say("limits.not_measured", hint=say("limits.near", bool(near), near=near))


def _reasons(cell: MeasuredCell) -> str:
    if cell.doubt == WRONG:
        return say("limits.wrong", reasons=and_more(cell.wrong_answers, between="; "))
    if cell.doubt == "refused":
        return say("limits.refused", reasons=and_more(cell.refused, between="; "))
    reasons = and_more([reason.rstrip(".") for reason in cell.invalid_reasons], between="; ")
    return say("limits.invalid", reasons=reasons or "no reason was stored")


def _name(run: Run, cell: MeasuredCell) -> str:
    return f"{run.workload}/{cell.cell_id}"


def _verdict(
    run: Run, policy: Policy, outcome: str, sentence: str, findings: Sequence[Finding] = (), notes: Sequence[str] = ()
) -> Verdict:
    manifest = run.manifest
    command, words = shlex.join(manifest.command) or None, ["kvbench", "gate", str(run.folder)]
    facts = {
        "workload": run.workload,
        "cells": len(run.cells),
        "repeats": max((len(cell.repeats) for cell in run.cells), default=0),
        "device": manifest.device,
        "machine": manifest.cpu.model,
        "started": manifest.started,
        "ended": manifest.ended,
        "measured_by": command,
    }
    if policy.source:
        facts["policy"] = str(policy.source)
        words += ["--policy", str(policy.source)]
    if run.simulated:  # a reader of the verdict alone must not take it for one on a measurement
        sentence = say("limits.simulated", sentence=sentence)
        facts |= {"workload": title(run), "simulated": on_what(run)}
    return Verdict(
        "limits",
        outcome,
        sentence,
        tuple(findings),
        candidate={"name": f"{run.workload}/{run.folder.name}", "sha": manifest.git.sha, "command": command},
        reproduce=shlex.join(words),
        notes=tuple(notes),
        facts={key: value for key, value in facts.items() if value is not None},
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
        raise UsageError(say("limits.no_summary", path=summary_csv, error=error, folder=summary_csv.parent)) from None


def _cell_benchmarks(row: Mapping[str, str], workload: str) -> Iterator[Benchmark]:
    """The values of a row of summary.csv. Raises ValueError."""
    if not row["cell_id"]:
        raise ValueError("a row has no cell_id")
    for column, name in _CHARTED.items():
        value, low, high = (float(row[column + end] or "nan") for end in ("", "_min", "_max"))
        if not math.isnan(value):
            window, repeats = row[f"{column}_window"], plural(float(row["repeats"] or "nan"), "repeat")
            about = {"configuration": row["configuration"], "repeats": repeats, "window": window}
            extra = say("limits.benchmark", bool(window), **about)
            shown, where = figure(name), f"{workload}/{row['cell_id']}/{column}"
            yield Benchmark(where, shown.unit, value, (high - low) / 2, extra, shown.higher_is_better)
