"""A recommendation after a sweep: settings with their evidence, the fallback, what is open, when not to page. Pure.

The rules are the report's. A configuration is recommended where ``decision.py`` says that it pays, or has a better p95,
at no risk at any load, and its answers were measured and lie within the limits; else the baseline is kept.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import yaml

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, Call
from kvbench.metrics.definitions import ENGINE, figure
from kvbench.report.answers import candidate_answer, gain, joined, numbers
from kvbench.report.comparisons import THROUGHPUT, differing, median, scatters, served
from kvbench.report.decision import Candidate, Decision, Worth, safe_ones, wins
from kvbench.report.headline import headline
from kvbench.report.kv import reservation
from kvbench.report.next_steps import NextStep, again, combine, decide, quality_step, sweep_command
from kvbench.report.provenance import random_weights
from kvbench.report.quality import Quality, is_quantised
from kvbench.report.selection import Selection
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, Run, all_steady_latency
from kvbench.runs.quality import figure as quality_figure
from kvbench.targets.preset import Context
from kvbench.targets.presets import PRESETS
from kvbench.workload.file import MODEL_SECTION
from kvbench.workload.settings import effective

_UNIFORM = "uniform"  # workloads/uniform.yaml: all lengths equal and near the limit
_P95S = (("ttft_ms", "p95 TTFT"), ("itl_ms", "p95 ITL"))


@dataclass(frozen=True)
class Recommendation:
    """Sentences for a terminal, and beside them what a program reads; all but three are empty without a baseline."""

    run: str
    doubts: tuple[NextStep, ...]  # what is wrong with the run, to be said first
    verdict: str  # the report's first sentence
    configuration: str = ""
    in_doubt: str = ""  # why its own measurement does not count
    settings: Mapping[str, Any] = field(default_factory=dict)  # ``engine:``; empty if answers are outside the limits
    changed: Mapping[str, Any] = field(default_factory=dict)  # those that differ -> the baseline's value
    flags: str = ""  # of the command of another engine
    baseline: str = ""  # what the evidence is against, and in which clock
    effects: tuple[Mapping[str, Any], ...] = ()  # of the configuration, a row a metric and load
    evidence: tuple[str, ...] = ()  # of the configuration, a sentence a load, then what holds at one load only
    answers: str = ""  # what is known of the configuration's answers
    quality: Mapping[str, Any] = field(default_factory=dict)  # the same in numbers
    held_back: tuple[str, ...] = ()  # what would be set, had its answers been measured
    alone: tuple[str, ...] = ()  # what pays too, and was not measured together with it
    together: NextStep | None = None  # how to measure that
    rejected: tuple[str, ...] = ()  # others that are decided, with their verdicts and which limits they break
    fallback: tuple[str, ...] = ()  # the settings to go back to, and when; empty where these are the baseline's
    unmeasured: tuple[NextStep, ...] = ()  # what would change the answer, with a command where there is one
    paging: tuple[str, ...] = ()  # paged against contiguous, a sentence a load
    pair: tuple[str, ...] = ()  # the names of both


def recommend(run: Run) -> Recommendation:
    """The settings that a run supports; its doubts alone where nothing of it can be compared."""
    decision = Decision.of(run)
    made = Recommendation(str(run.folder), tuple(_doubts(decision)), headline(decision))
    return _filled(made, Selection.of(decision, decision.base)) if decision.base else made


def _filled(made: Recommendation, selected: Selection) -> Recommendation:
    """The whole recommendation."""
    decision, base, chosen = selected.decision, selected.base, selected.chosen
    run, quality = decision.run, decision.qualities[chosen.config_id]
    settings = {name: value for name, value in chosen.settings.items() if name not in {*MODEL_SECTION, "target"}}
    flags = _flags(run, chosen)
    if quality.outside:  # of a baseline: nothing to paste then
        settings, flags = {}, ""
    measured = run.quality.model if quality.figures and run.quality else ""
    return replace(
        made,
        configuration=chosen.marked_name,
        in_doubt=chosen.doubt,
        settings=settings,
        changed={name: effective(base.settings, name) for name in sorted(differing(chosen, base))},
        flags=flags,
        baseline=say("recommend.baseline", name=base.name, clock=decision.clock),
        effects=tuple(_effects(selected)),
        evidence=(*_evidence(selected), *_by_load(selected)),
        answers=_answers(quality),
        quality={  # figures that were not measured are None
            "model": measured,
            "safe": quality.safe,
            "kld": quality_figure(quality.figures, "mean"),
            "perplexity_change": quality_figure(quality.figures, "perplexity_change"),
            "passkeys": quality_figure(quality.figures, "passkey.share"),
            "canaries_right": quality.canaries,
            "outside": quality.outside,
        },
        held_back=tuple(_briefly(one) for one in selected.unknown if not selected.best),
        alone=tuple(map(_briefly, selected.alone)),
        together=next(combine(decision), None) if selected.alone else None,
        rejected=tuple(_rejected(selected)),
        fallback=tuple(_fallback(selected)),
        unmeasured=tuple(_unmeasured(selected)),
        paging=tuple(_paging(selected)),
        pair=selected.pair,
    )


# --- What is wrong with the run ---


def _doubts(decision: Decision) -> Iterator[NextStep]:
    """Lists invalid and missing cells with the command that measures them, then signs of other work.

    Last whether the baseline, which is kept where nothing is better, gives answers outside the limits itself.
    """
    run, state = decision.run, decision.validity
    if state.reasons or state.status != "valid":
        why = words.and_more(state.reasons, 2, "; ") or say("recommend.no_load")
        status = say("recommend.status", state.status != "valid", status=state.status)
        yield NextStep(status + why, _command(again(decision)))
    if disturbed := say("recommend.disturbed", n=sum(len(cell.invalid_repeats) for cell in run.cells)):
        yield NextStep(disturbed, "")
    if scattered := [f"{cell.name} {cell.load.where}" for cell in run.cells if scatters(cell)]:
        yield NextStep(say("recommend.scatter", cells=words.and_more(scattered)), "")
    if run.engine_time and not run.engine_time.finished:
        yield NextStep(say("recommend.interrupted"), "")
    base = next((cell for cell in run.cells if cell.is_baseline), None)
    if base and (outside := decision.qualities[base.config_id].outside):
        yield NextStep(say("recommend.base_outside", reasons=_together(outside)), "")


def _command(steps: Iterator[NextStep]) -> str:
    """The command of the first step; empty without one."""
    return next((step.command for step in steps), "")


def _together(reasons: Sequence[str]) -> str:
    return words.and_more([why.rstrip(".") for why in reasons], 2, "; ")


# --- Settings and evidence ---


def _effects(selected: Selection) -> Iterator[dict[str, Any]]:
    """A row a metric and load; none for the baseline."""
    names = ("metric", "clock", "ratio", "low", "high", "call")
    for load in reversed(selected.decision.comparisons.loads):
        if here := selected.at(load):
            for one in filter(None, (here.throughput, *here.p95.values())):
                yield {"load": load.short, **{name: getattr(one, name) for name in names}}


def _evidence(selected: Selection) -> Iterator[str]:
    """Tells what the best does at each load, the reported one first; of a baseline, why not the others."""
    decision, best = selected.decision, selected.best
    if best is None:
        for one in decision.candidates:
            kept = one.verdict == Worth.UNDECIDED or one in selected.unknown or one.quality.outside
            if not kept and one.cell.name not in selected.pair:
                yield _line(decision, one)
        return
    first = best.cell.load
    for load in sorted(decision.comparisons.loads, key=lambda load: (load != first, load)):
        if here := selected.at(load):
            yield say("recommend.at_load", where=load.where, evidence=_evidence_words(decision, here.here))
        else:
            yield say("recommend.not_measured_at", where=load.where)


def _evidence_words(decision: Decision, one: Candidate) -> str:
    """Writes ``pays, +17 % tokens/s (16 to 17), p95 TTFT −25 % (−28 to −21)``."""
    answer = candidate_answer(decision, one)
    return say("recommend.evidence", verdict=answer.verdict.lower(), numbers=answer.numbers)


def _line(decision: Decision, one: Candidate) -> str:
    return say("recommend.line", name=one.name, evidence=_evidence_words(decision, one))


def _by_load(selected: Selection) -> Iterator[str]:
    """Tells what pays at one load and not at another: not the best everywhere, or worse elsewhere."""
    decision = selected.decision
    for load in reversed(decision.comparisons.loads):
        candidates, here = decision.by_load[load], selected.at(load)
        pays_here = selected.best and here and here.verdict == Worth.PAYS
        top = next(iter(safe_ones(wins(candidates))), None)
        if load != decision.load and top and top.verdict == Worth.PAYS and not pays_here:
            yield say("recommend.rather", where=load.where, line=_line(decision, top))
        for one in safe_ones(candidates):
            if one.here.verdict == Worth.PAYS and one.verdict == Worth.RISK:
                yield say("recommend.only", where=load.where, line=_line(decision, one))


def _rejected(selected: Selection) -> Iterator[str]:
    """Lists ``page 64 (worse p95)`` and ``INT4 KV (pays; not safe: its KLD ...)``.

    Without a best, only what breaks a limit: the others are the evidence for the baseline.
    """
    taken = [selected.best, *selected.alone]
    for one in selected.decision.candidates:
        outside = _together(one.quality.outside)
        decided = one.verdict != Worth.UNDECIDED and one.cell.name not in selected.pair
        if outside or (selected.best and one not in taken and decided):
            verdict = candidate_answer(selected.decision, one).verdict.lower()
            yield say("recommend.rejected", bool(outside), name=one.name, verdict=verdict, reasons=outside)


def _flags(run: Run, cell: MeasuredCell) -> str:
    """The words that the settings become on the command line of another engine."""
    preset = PRESETS.get(str(run.manifest.backend))
    if preset is None:
        return ""
    settings = Context(cell.settings, cell.capacity).only(cell.settings.keys() - (MODEL_SECTION - {"dtype"}))
    return shlex.join(replace(preset, command="").launch_command(settings, model="", port=""))


def _answers(quality: Quality) -> str:
    """Writes ``its answers: KLD 0.0009, passkeys 98 %, within the limits; measured with kvbench-tiny``."""
    if not quality.figures:
        return say("recommend.answers", quality=quality.brief)
    return say("recommend.measured_answers", quality=quality, verdict=quality.verdict or say("recommend.within"))


def _briefly(one: Candidate) -> str:
    """Writes ``INT8 KV: +13 % tokens/s (13 to 14), quality not measured``."""
    unsafe = is_quantised(one.cell) or not one.quality.safe
    return say("recommend.setting", name=one.name, value=joined(gain(one, one.won_by), one.quality.brief * unsafe))


# --- The fallback ---


def _fallback(selected: Selection) -> Iterator[str]:
    """The configuration to go back to, then when; without a best only where contiguous is the better one."""
    best, back, run = selected.best, selected.back, selected.decision.run
    contiguous = _back_to_contiguous(selected)
    if best is None:
        yield from filter(None, [contiguous])
        return
    was = {name: as_yaml(effective(back.settings, name)) for name in sorted(differing(best.cell, back))}
    changes = [say("recommend.setting", name=name, value=value) for name, value in was.items()]
    yield say("recommend.back", name=back.name, changes=", ".join(changes))
    if signs := _signs(back):
        place = {"name": back.name, "where": back.load.where}
        yield say("recommend.signs", signs=signs, command=_load_command(run, back), **place)
    if best.cell.hit_rate and effective(best.cell.settings, "enable_prefix_caching"):
        yield say("recommend.hits_fall", cell=best.cell)
    if is_quantised(best.cell):
        yield say("recommend.own_quality")
    if contiguous:
        yield say("recommend.or_to", name=contiguous)


def _back_to_contiguous(selected: Selection) -> str:
    """Says where contiguous is better, with the p95 that paging costs; empty where it costs none."""
    load, decision = selected.base.load, selected.decision
    if not selected.chosen.is_paged or load not in decision.comparisons.pairs:
        return ""
    pair = decision.paged_against_contiguous(load)
    if not (latency := _latency(pair)):
        return ""
    return say("recommend.back_to_contiguous", name=pair.base.name, where=load.where, **latency)


def _signs(cell: MeasuredCell) -> str:
    """Writes ``tokens/s fall under 236 or p95 TTFT exceeds 2.1 s``; empty without a valid load."""
    rate = median(cell.throughput())
    if cell.doubt or rate is None:
        return ""
    signs = [say("recommend.rate_falls", rate=rate)]
    for metric, title in _P95S:
        value, few = cell.percentile(metric, "p95")
        if value:
            signs.append(say("recommend.p95_exceeds", few, title=title, value=value))
    return " or ".join(filter(None, [", ".join(signs[:-1]), signs[-1]]))


def _load_command(run: Run, cell: MeasuredCell) -> str:
    """Writes the `kvbench load` that repeats a cell against a URL; empty without a workload file."""
    file, command = run.manifest.workload_file, run.manifest.command
    if not file or file not in command:
        return ""
    options = ["--profile", run.manifest.profile] if run.manifest.profile else []
    for option, value in pairwise(command):
        if option in ("-o", "--override") and value.startswith("load."):
            options += ["-o", value]
    load_id = cell.cell_id.removeprefix(f"{cell.config_id}-")
    load = shlex.join(["kvbench", "load", file, *options, "--at", load_id, "--url", "URL"])
    return say("recommend.load_command", command=load)


# --- What was not measured ---


def _unmeasured(selected: Selection) -> Iterator[NextStep]:
    """The most decisive first."""
    decision, best, run = selected.decision, selected.best, selected.decision.run
    if selected.unknown:
        names = words.listing([one.name if best else _line(decision, one) for one in selected.unknown])
        yield NextStep(say("recommend.open_quality", names=names), _command(quality_step(decision)))
    if undecided := [one for one in decision.candidates if one.verdict == Worth.UNDECIDED]:
        evidence = [say("recommend.with_numbers", name=one.name, numbers=numbers(decision, one)) for one in undecided]
        yield NextStep(say("recommend.undecided", names=words.and_more(evidence)), _command(decide(decision)))
    if best and best.throughput and best.throughput.clock == ENGINE:
        as_served = served(best.cell, selected.base, THROUGHPUT)
        if not (as_served and as_served.decided):
            yield NextStep(say("recommend.as_served"), "")
    for note in getattr(run.engine_time, "notes", ()):
        yield NextStep(str(note), "")
    fewest = min(len(cell.repeats) for cell in run.at(selected.base.load))
    no_gpus = "gpus" in run.manifest.model_fields_set and not run.manifest.gpus
    on_cpu = selected.base.settings.get("device") == "cpu" or no_gpus
    names, loads = words.listing(decision.comparisons.not_varied), decision.comparisons.loads
    for why, holds in (
        (say("recommend.few_repeats", n=fewest, fewest=FEWEST), fewest < FEWEST),
        (say("recommend.not_varied", names=names), names),
        (say("recommend.other_loads", load=loads[0].short), len(loads) == 1),
        (say("recommend.gpu"), on_cpu and not run.simulated),
        (say("recommend.weights"), random_weights(run)),
    ):
        if holds:
            yield NextStep(why, "")


# --- Paging ---


def _paging(selected: Selection) -> Iterator[str]:
    """Compares the pair at each load, the lowest first; then says what contiguous reserves."""
    decision, run, last = selected.decision, selected.decision.run, None
    if decision.pair is None:
        yield _no_pair(selected)
        return
    for load in decision.comparisons.loads:
        if load not in decision.comparisons.pairs:
            yield say("recommend.pair_missing", where=load.where)
            continue
        pair = decision.paged_against_contiguous(load)
        last, here, latency = pair.base, pair.here, _latency(pair.here)
        ran, than = (words.decimal(median(cell.observed("running_mean"))) for cell in (pair.cell, pair.base))
        yield say(
            "recommend.pair",
            where=load.where,
            advice=_paging_advice(here),
            numbers=numbers(decision, here),
            latency=say("recommend.pair_latency", **latency) if latency else "",
            at_once=say("recommend.at_once", "–" not in (ran, than), here=ran, there=than),
        )
    if last and (reserved := reservation(last)):
        yield say("recommend.reserved", reserved=reserved.rstrip("."))
    if run.is_built_in and run.workload != _UNIFORM:
        yield say("recommend.uniform")


def _no_pair(selected: Selection) -> str:
    run = selected.decision.run
    preset = PRESETS.get(str(run.manifest.backend))
    if preset and preset.has_only("layout", "paged"):
        return say("recommend.always_pages", engine=preset.title)
    command = sweep_command(run, ["-o", "sweep.layout=[contiguous, paged]"])
    layout = "paged" if selected.base.is_contiguous else "contiguous"
    return say("recommend.no_pair", bool(command), layout=layout, command=command)


def _paging_advice(one: Candidate) -> str:
    """Writes ``page``, ``do not page`` or ``page, unless p95 ITL counts more than output tokens/s``."""
    if one.worst is None or one.verdict not in (Worth.RISK, Worth.MIXED_P95):
        return say("recommend.paging", one.verdict)
    better = one.best if one.verdict == Worth.RISK else one.best_p95
    assert better is not None
    return say("recommend.unless", loss=figure(one.worst[1].metric).title, gain=figure(better.metric).title)


def _latency(one: Candidate) -> Mapping[str, Any]:
    """The p95 that is most behind and both sides as served: p95 ITL, 119 ms, 7.4 ms; empty without one."""
    worse = [p95 for p95 in one.p95.values() if p95.call == Call.WORSE]
    if not worse:
        return {}
    shown, cells = figure(max(worse, key=lambda p95: p95.ratio).metric), (one.cell, one.base)
    steady = all_steady_latency(cells)
    here, there = (cell.percentile(shown.metric.path, shown.statistic, steady)[0] for cell in cells)
    if not here or not there:
        return {}
    return {"title": shown.title, "here": here, "there": there}


def as_yaml(value: Any) -> str:
    """A plain value as YAML writes it: true, 16, 97MiB, null."""
    return yaml.safe_dump({"": value}, width=10_000).partition(": ")[2].rstrip()
