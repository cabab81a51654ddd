"""What to run with after a sweep: settings with their evidence, the fallback, what is open, when not to page. Pure.

The rules are the report's. A configuration is recommended where ``decision.py`` says that it pays, or has a better p95,
at no risk at any load, and its answers were measured and lie within the limits; else the baseline is kept.
"""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import yaml

from kvbench.common import text as words
from kvbench.report.changes import BEHIND, ENGINE_TIME, ITL, METRICS, THROUGHPUT, TTFT, decided_load, served
from kvbench.report.comparisons import baseline, compare, differing, median, not_varied, paging_pair, scatters
from kvbench.report.decision import (
    COSTS,
    FASTER_P95,
    NO_CHANGE,
    PAYS,
    RISK,
    SLOWER_P95,
    TRADES_P95,
    UNDECIDED,
    Choice,
    answer,
    answers_clock,
    best_of,
    best_p95,
    choice,
    choices,
    gain,
    headline,
    numbers,
    open_ones,
    paged_against,
    safe_ones,
    wins,
)
from kvbench.report.kv import reservation
from kvbench.report.next_step import NextStep, again, combine, decide, quality_step, sweep_command
from kvbench.report.provenance import random_weights, validity
from kvbench.report.quality import is_quantised, quality_of
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, all_steady_latency
from kvbench.runs.quality import figure
from kvbench.runs.ratios import FEWEST
from kvbench.targets.preset import Context
from kvbench.targets.presets import PRESETS
from kvbench.workload.file import MODEL_SECTION
from kvbench.workload.settings import effective

_UNBROKEN = "\0"  # in place of a space where a line must not end
_UNIFORM = "uniform"  # workloads/uniform.yaml: all lengths equal and near the limit
_PAGING = {
    PAYS: "page",
    FASTER_P95: "page",
    NO_CHANGE: "contiguous is as good",
    COSTS: "do not page",
    SLOWER_P95: "do not page",
    UNDECIDED: "not decided whether paging pays",
}


@dataclass(frozen=True)
class Recommendation:
    """Sentences for a terminal, and beside them what a program reads.

    ``doubts``: what is wrong with the run, to be said first
    ``verdict``: the report's first sentence
    ``configuration``: its name; empty where there is none, since no load or no baseline was measured
    ``in_doubt``: why its own measurement does not count; empty where it does
    ``settings``: its ``engine:`` section, empty if its answers lie outside the limits
    ``changed``: those that differ from the baseline -> the baseline's value
    ``flags``: of the command of another engine; empty for the built-in one
    ``baseline``: what the evidence is against, and in which clock
    ``effects``: of the configuration, a row a metric and load
    ``evidence``: of the configuration, a sentence a load, then what holds at one load only
    ``answers``: what is known of the configuration's answers; ``quality``: the same in numbers
    ``held_back``: what would be set, had its answers been measured
    ``alone``: what pays too, and was not measured together with it; ``together``: how to measure that
    ``rejected``: the other configurations that are decided, with their verdicts and which limits they break
    ``fallback``: the settings to go back to, and when; empty where these are the baseline's
    ``unmeasured``: what would change the answer, with a command where there is one
    ``paging``: paged against contiguous, a sentence a load; ``pair``: the names of both
    """

    run: str
    doubts: tuple[NextStep, ...]
    verdict: str
    configuration: str = ""
    in_doubt: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    changed: Mapping[str, Any] = field(default_factory=dict)
    flags: str = ""
    baseline: str = ""
    effects: tuple[Mapping[str, Any], ...] = ()
    evidence: tuple[str, ...] = ()
    answers: str = ""
    quality: Mapping[str, Any] = field(default_factory=dict)
    held_back: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()
    together: NextStep | None = None
    rejected: tuple[str, ...] = ()
    fallback: tuple[str, ...] = ()
    unmeasured: tuple[NextStep, ...] = ()
    paging: tuple[str, ...] = ()
    pair: tuple[str, ...] = ()


def recommend(run: Run) -> Recommendation:
    """What the run supports; with its doubts alone where nothing of it can be compared."""
    load = decided_load(run)
    base = baseline(run, load) if load else None
    said = Recommendation(str(run.folder), tuple(_doubts(run)), headline(run))
    if load is None or base is None:
        return said
    found = choices(run, load)
    best = next(iter(safe_ones(run, wins(found))), None)
    chosen = best.cell if best else base
    alone = _alone(run, found, best)
    outside = bool(quality_of(run, chosen).outside)  # of a baseline: nothing to paste then
    return replace(
        said,
        configuration=chosen.marked_name,
        in_doubt=chosen.doubt or "",
        settings={} if outside else _engine_section(chosen),
        changed={name: effective(base.settings, name) for name in sorted(differing(chosen, base))},
        flags="" if outside else _flags(run, chosen),
        baseline=f"{base.name}, {answers_clock(run)} unless it says another",
        effects=tuple(_effects(run, chosen)),
        evidence=(*_evidence(run, found, best), *_by_load(run, best)),
        answers=_answers(run, chosen),
        quality=_quality(run, chosen),
        held_back=() if best else tuple(_briefly(run, each) for each in open_ones(run, wins(found))),
        alone=tuple(_briefly(run, each) for each in alone),
        together=next(combine(run, base, found), None) if alone else None,
        rejected=tuple(_rejected(run, found, best, alone)),
        fallback=tuple(_fallback(run, base, found, best)),
        unmeasured=tuple(_unmeasured(run, base, found, best)),
        paging=tuple(_paging(run, base)),
        pair=paging_pair(run) or (),
    )


# --- What is wrong with the run ---


def _doubts(run: Run) -> Iterator[NextStep]:
    """Invalid and missing cells with the command that measures them, failed requests, then signs of other work.

    Last whether the baseline, which is kept where nothing is better, gives answers outside the limits itself.
    """
    state = validity(run)
    if state.reasons or state.status != "valid":
        resume = next(again(run), None)
        status = "" if state.status == "valid" else f"{words.upper_first(state.status)}: "
        why = words.and_more(state.reasons, 2, "; ") or "no load was measured"
        yield NextStep(f"{status}{why}", resume.command if resume else "")
    if left := sum(len(cell.invalid_repeats) for cell in run.cells):
        yield NextStep(f"Disturbed: {words.plural(left, 'invalid repeat')} left out", "")
    if scattered := [f"{cell.name} {cell.load.where}" for cell in run.cells if scatters(cell)]:
        yield NextStep(f"The repeats of {words.and_more(scattered)} scatter: other work on the machine?", "")
    if run.engine_time and not run.engine_time.finished:
        yield NextStep("Engine time was interrupted: its intervals are wider than they had to be", "")
    base = next((cell for cell in run.cells if cell.is_baseline), None)
    if base and (outside := quality_of(run, base).outside):
        why = words.and_more([each.rstrip(".") for each in outside], 2, "; ")
        yield NextStep(f"The answers of the baseline itself are outside the limits: {why}", "")


# --- Settings and evidence ---


def _engine_section(cell: MeasuredCell) -> dict[str, Any]:
    """Empty for a server that ran already: nobody told its settings."""
    return {name: value for name, value in cell.settings.items() if name not in MODEL_SECTION and name != "target"}


def _flags(run: Run, cell: MeasuredCell) -> str:
    """The words that the settings become on the command line of another engine."""
    preset = PRESETS.get(str(run.manifest.get("backend")))
    if preset is None:
        return ""
    known = Context(cell.settings, cell.capacity).only(cell.settings.keys() - (MODEL_SECTION - {"dtype"}))
    return shlex.join(replace(preset, command="").launch_command(known, model="", port=""))


def _effects(run: Run, cell: MeasuredCell) -> Iterator[dict[str, Any]]:
    """Empty for the baseline."""
    for load in reversed(run.loads):
        here, base = run.cell(cell.name, load), baseline(run, load)
        if here is None or base is None or here is base:
            continue
        known = choice(run, here, base)
        for each in (known.throughput, *known.p95.values()):
            if each:
                facts = {name: getattr(each, name) for name in ("metric", "clock", "ratio", "low", "high", "call")}
                yield {"load": load.short, **facts}


def _evidence(run: Run, found: Sequence[Choice], best: Choice | None) -> Iterator[str]:
    """What the best does at each load, the reported one first; where the baseline stays, why not the others."""
    if best is None:
        pair, open_ = paging_pair(run) or (), open_ones(run, wins(found))
        known = [each for each in found if each.verdict != UNDECIDED and each not in open_]
        known = [each for each in known if not quality_of(run, each.cell).outside]
        yield from (_line(run, each) for each in known if each.cell.name not in pair)
        return
    for load in sorted(run.loads, key=lambda each: (each != best.cell.load, each)):
        here, base = run.cell(best.cell.name, load), baseline(run, load)
        if here is None or base is None:
            yield f"not measured {load.where}"
        else:
            yield f"{load.where}: {_line(run, choice(run, here, base).here, name=False)}"


def _line(run: Run, each: Choice, name: bool = True) -> str:
    """prefix caching pays, +17 % tokens/s (16 to 17), p95 TTFT −25 % (−28 to −21)"""
    told = answer(run, each, each.name)
    return f"{each.name + ' ' if name else ''}{told.verdict.lower()}, {told.evidence}"


def _answers(run: Run, cell: MeasuredCell) -> str:
    """its answers: KLD 0.0009, perplexity +0.2 %, passkeys 98 %, within the limits; measured with kvbench-tiny"""
    known = quality_of(run, cell)
    if not known.figures:
        return f"its answers: {known.brief}"
    of = f"; measured with {known.model}" if known.model else ""
    return f"its answers: {known}, {known.verdict or 'within the limits'}{of}"


def _quality(run: Run, cell: MeasuredCell) -> dict[str, Any]:
    """For a program; ``model``: which answered; figures that were not measured are None."""
    known = quality_of(run, cell)
    names = {"kld": "mean", "perplexity_change": "perplexity_change", "passkeys": "passkey.share"}
    numbers_ = {name: figure(known.figures, of) for name, of in names.items()}
    model = run.quality.model if known.figures and run.quality else ""
    return {"model": model, "safe": known.safe, **numbers_, "canaries_right": known.canaries, "outside": known.outside}


def _briefly(run: Run, each: Choice) -> str:
    """INT8 KV: +13 % tokens/s (13 to 14), quality not measured"""
    known = quality_of(run, each.cell)
    size = f"{each.name}: {gain(best_of(each), each.cell.load)}"
    return f"{size}, {known.brief}" if is_quantised(each.cell) or not known.safe else size


def _by_load(run: Run, best: Choice | None) -> Iterator[str]:
    """What pays at one load and not at another: in doubt nowhere, but not the best everywhere; or worse elsewhere."""
    reported = decided_load(run)
    for load in reversed(run.loads):
        found = choices(run, load)
        here = next((each for each in found if best and each.cell.name == best.cell.name), None)
        top = next(iter(safe_ones(run, wins(found))), None)
        if load != reported and top and top.verdict == PAYS and (here is None or here.verdict != PAYS):
            yield f"{load.where} rather {_line(run, top)}"
        for each in safe_ones(run, [one for one in found if one.here.verdict == PAYS and one.verdict == RISK]):
            yield f"only {load.where} {_line(run, each)}"


def _alone(run: Run, found: Sequence[Choice], best: Choice | None) -> list[Choice]:
    """What pays beside the best, changes other settings, and was not measured together with it."""
    if best is None:
        return []
    changed = differing(best.cell, best.base)
    ahead = wins(found)
    rest = safe_ones(run, ahead) + open_ones(run, ahead)
    return [
        each
        for each in rest
        if each is not best and not differing(each.cell, each.base) & changed and not _measured(found, best, each)
    ]


def _measured(found: Sequence[Choice], *parts: Choice) -> bool:
    """Whether one configuration has the changes of all ``parts``."""
    wanted = {name: effective(part.cell.settings, name) for part in parts for name in differing(part.cell, part.base)}
    return any(all(effective(each.cell.settings, name) == value for name, value in wanted.items()) for each in found)


def _rejected(run: Run, found: Sequence[Choice], best: Choice | None, alone: Sequence[Choice]) -> Iterator[str]:
    """page 64 (worse p95), INT4 KV (pays; not safe: its KLD ...); the open ones are among what was not measured.

    Without a best, only what breaks a limit: the others are the evidence for the baseline.
    """
    pair = paging_pair(run) or ()
    for each in found:
        outside = words.and_more([why.rstrip(".") for why in quality_of(run, each.cell).outside], 2, "; ")
        known = best and each not in (best, *alone) and each.verdict != UNDECIDED and each.cell.name not in pair
        if outside or known:
            why = f": {outside}" if outside else ""
            yield f"{each.name} ({answer(run, each, each.name).verdict.lower()}{why})"


# --- The fallback ---


def _fallback(run: Run, base: MeasuredCell, found: Sequence[Choice], best: Choice | None) -> Iterator[str]:
    """The baseline, or of a quantised KV the best safe one in the model's own dtype; then the numbers that say when."""
    contiguous = _back_to_contiguous(run, base.load, (best.cell if best else base).is_paged)
    if best is None:
        yield from [contiguous] if contiguous else ()
        return
    plain = [each for each in safe_ones(run, wins(found)) if not is_quantised(each.cell)]
    back = plain[0].cell if plain and is_quantised(best.cell) else base
    changes = [f"{name}: {_yaml(effective(back.settings, name))}" for name in sorted(differing(best.cell, back))]
    yield f"{back.name} ({', '.join(changes)})"
    if told := _as_served(back):
        yield f"{told} {back.load.where}, what {back.name} served here{_how(run, back)}"
    if best.cell.hit_rate and effective(best.cell.settings, "enable_prefix_caching"):
        yield (
            f"prefix_cache_hits_total / prefix_cache_queries_total in /metrics is far under "
            f"{words.percent(best.cell.hit_rate)}, the hit rate that this gain comes from"
        )
    if is_quantised(best.cell):
        yield "`kvbench quality` with your own model and prompts finds its answers outside the limits"
    if contiguous:
        yield f"or to {contiguous}"


def _back_to_contiguous(run: Run, load: MeasuredLoad, is_paged: bool) -> str:
    """contiguous where p95 ITL has to stay under 119 ms: it served 7.4 ms; empty unless paging costs such a p95."""
    pair = paging_pair(run) or ("", "")
    paged, contiguous = (run.cell(name, load) for name in pair)
    worse = _latency(paged_against(run, paged, contiguous)) if is_paged and paged and contiguous else None
    return (
        f"{pair[1]} where {worse[0]} has to stay under {worse[1]}: it served {worse[2]} {load.where}" if worse else ""
    )


def _as_served(cell: MeasuredCell) -> str:
    """tokens/s fall under 236, p95 TTFT exceeds 2.1 s or p95 ITL exceeds 90 ms; empty without a valid load."""
    rate = median(cell.throughput())
    if cell.doubt or rate is None:
        return ""
    found = [f"tokens/s fall under {words.tokens_per_s(rate)}"]
    for metric, title in (("ttft_ms", "p95 TTFT"), ("itl_ms", "p95 ITL")):
        value, few = cell.percentile(metric, "p95")
        found += [f"{title} exceeds {words.ms(value)}{' (few requests)' * few}"] if value else []
    return " or ".join(filter(None, [", ".join(found[:-1]), found[-1]]))


def _how(run: Run, cell: MeasuredCell) -> str:
    """: kvbench load workloads/mixed.yaml --at c32 --url URL; empty where the run has no workload file."""
    file, command = run.manifest.get("workload_file"), [str(part) for part in run.manifest.get("command") or ()]
    if not file or str(file) not in command:
        return ""
    changed = [b for a, b in pairwise(command) if a in ("-o", "--override") and b.startswith("load.")]
    profile = run.manifest.get("profile")
    options = [*(("--profile", str(profile)) if profile else ()), *(part for each in changed for part in ("-o", each))]
    load_id = cell.cell_id.removeprefix(f"{cell.config_id}-")
    return f" (`{shlex.join(['kvbench', 'load', str(file), *options, '--at', load_id, '--url', 'URL'])}`)"


# --- What was not measured ---


def _unmeasured(run: Run, base: MeasuredCell, found: Sequence[Choice], best: Choice | None) -> Iterator[NextStep]:
    """The most decisive first."""
    if unknown := open_ones(run, wins(found)):
        names = [each.name if best else _line(run, each) for each in unknown]
        step = next(quality_step(run, found), None)
        yield NextStep(f"the quality of {words.listing(names)}", step.command if step else "")
    if open_ := [each for each in found if each.verdict == UNDECIDED]:
        names = [f"{each.name} ({numbers(run, each)})" for each in open_]
        step = next(decide(run, found), None)
        yield NextStep(f"not decided: {words.and_more(names)}", step.command if step else "")
    if best and best.throughput and best.throughput.clock == ENGINE_TIME:
        as_served = served(best.cell, base, THROUGHPUT)
        if not (as_served and as_served.decided):
            yield NextStep("the gain as served over HTTP: it is decided in engine time only", "")
    notes = (run.engine_time.facts if run.engine_time else {}).get("notes") or ()
    yield from (NextStep(str(note), "") for note in notes)
    fewest = min(len(each.repeats) for each in run.at(base.load))
    if fewest < FEWEST:
        yield NextStep(f"served figures have {words.plural(fewest, 'repeat')}; a verdict takes {FEWEST}", "")
    if names := not_varied(run, base):
        yield NextStep(f"{words.listing(names)}: not varied", "")
    if len(run.loads) == 1:
        yield NextStep(f"any load but {run.loads[0].short}", "")
    gpus = run.manifest.get("gpus")
    if not run.simulated and (base.settings.get("device") == "cpu" or (gpus is not None and not gpus)):
        yield NextStep("a GPU: this was measured on a CPU", "")
    if random_weights(run):
        yield NextStep("trained weights: random ones have the speed, not the text", "")


# --- Paging ---


def _paging(run: Run, base: MeasuredCell) -> Iterator[str]:
    """At each load, the lowest first; then what contiguous reserves, which is what paging saves."""
    pair = paging_pair(run)
    if pair is None:
        yield _no_pair(run, base)
        return
    last = None
    for load in run.loads:
        paged, contiguous = (run.cell(name, load) for name in pair)
        if paged is None or contiguous is None:
            yield f"{load.where}: not measured"
            continue
        last = compare(paged, contiguous)
        each = paged_against(run, paged, contiguous).here
        ran = [words.decimal(median(cell.observed("running_mean"))) for cell in (paged, contiguous)]
        at_once = f"; {ran[0]} sequences ran at once, against {ran[1]}" if "–" not in ran else ""
        worse = _latency(each)
        values = f", {worse[0]} {worse[1]} against {worse[2]} as served" if worse else ""
        yield f"{load.where}: {_paging_advice(each)}: {numbers(run, each)}{values}{at_once}"
    if last and (reserved := reservation(last)):
        yield f"{reserved.rstrip('.')}: where requests fill what is reserved, paging has nothing to save"
    if run.is_built_in and run.workload != _UNIFORM:
        yield f"uniform lengths near the limit: not measured here: `kvbench sweep workloads/{_UNIFORM}.yaml`"


def _paging_advice(each: Choice) -> str:
    """page; do not page; page, unless p95 ITL counts more than output tokens/s"""
    if each.worst is None or each.verdict not in (RISK, TRADES_P95):
        return _PAGING[each.verdict]
    gains = METRICS[best_of(each).metric if each.verdict == RISK else best_p95(each).metric]
    return f"page, unless {METRICS[each.worst.metric]} counts more than {gains}"


def _latency(each: Choice) -> tuple[str, str, str] | None:
    """Of the p95 that is most behind, its name and both sides as served: p95 ITL, 119 ms, 7.4 ms; None without one."""
    worse = [one for one in each.p95.values() if one.call == BEHIND]
    if not worse:
        return None
    worst = max(worse, key=lambda one: one.ratio)
    name = {TTFT: "ttft_ms", ITL: "itl_ms"}[worst.metric]
    cells = (each.cell, each.base)
    paged, contiguous = (cell.percentile(name, "p95", all_steady_latency(cells))[0] for cell in cells)
    return (METRICS[worst.metric], words.ms(paged), words.ms(contiguous)) if paged and contiguous else None


def _no_pair(run: Run, base: MeasuredCell) -> str:
    preset = PRESETS.get(str(run.manifest.get("backend")))
    if preset and preset.has_only("layout", "paged"):
        return (
            f"{preset.title} always pages; `kvbench sweep` without --target measures the layouts on the built-in engine"
        )
    command = sweep_command(run, ["-o", "sweep.layout=[contiguous, paged]"])
    other = "paged" if base.is_contiguous else "contiguous"
    return f"not measured: the run has no {other} configuration{f': `{command}`' if command else ''}"


# --- For a terminal ---


def lines(said: Recommendation, width: int = 100) -> list[str]:
    """The recommendation as lines of text: what to set, why, when to go back, what is open; all settings last.

    Wrapped at ``width`` columns, but for commands, which stay whole so that they can be copied.
    """
    found = [line for each in said.doubts for line in _step(each, width)] + _wrapped(said.verdict, width)
    if not said.configuration:
        return found
    found += ["", *_what_to_set(said, width)]
    evidence = [*said.evidence, said.answers, *([f"not taken: {', '.join(said.rejected)}"] if said.rejected else [])]
    if evidence:
        found += ["", f"Why (against {said.baseline}):", *_items(evidence, width)]
    if said.fallback:
        back, *when = said.fallback
        found += [
            "",
            *_wrapped(f"Go back to {back} when" if when else f"Fallback: {back}", width),
            *_items(when, width),
        ]
    pair = f" ({' against '.join(said.pair)})" if said.pair else ""
    found += ["", f"When not to page{pair}:", *_items(said.paging, width)]
    if said.alone or said.unmeasured:
        found += ["", "Open, and may change this:", *_open(said, width)]
    settings = yaml.safe_dump(
        {"engine": dict(said.settings)}, default_flow_style=None, sort_keys=False, width=width - 20
    )
    found += ["", f"All settings of {said.configuration}:", *settings.splitlines()] if said.settings else []
    return [*found, *([f"as flags: {said.flags}"] if said.flags else [])]


def _what_to_set(said: Recommendation, width: int) -> list[str]:
    if said.in_doubt:
        return _wrapped(f"Set nothing by this run: {said.configuration} is the baseline, in doubt itself", width)
    if not said.changed and said.held_back:
        why = "for now: the answers of what would be better are not known"
        return _wrapped(f"Keep {said.configuration}, the baseline, {why}", width)
    if not said.changed:
        return _wrapped(f"Keep {said.configuration}, the baseline: nothing else is decided to be better", width)
    changes = [f"{name}: {_yaml(said.settings[name])} (baseline: {_yaml(was)})" for name, was in said.changed.items()]
    return ["Set, and leave all else as the baseline has it:", *_items(changes, width)]


def _open(said: Recommendation, width: int) -> Iterator[str]:
    """What pays alone with the command that measures it together, then what was not measured."""
    if said.alone:
        yield from _items([f"pays alone, not measured together with it: {'; '.join(said.alone)}"], width)
    if said.together and said.together.command:
        yield from _step(NextStep("measure them together", said.together.command), width, "  - ")
    for each in said.unmeasured:
        yield from _step(each, width, "  - ")


def _yaml(value: Any) -> str:
    """A plain value as YAML writes it: true, 16, 97MiB, null."""
    return yaml.safe_dump({"": value}, width=10_000).partition(": ")[2].rstrip()


def _step(each: NextStep, width: int, first: str = "") -> list[str]:
    """Its reason, and the command on a line of its own."""
    command = [f"{' ' * len(first)}  {each.command}"] if each.command else []
    return _wrapped(f"{each.why}{':' if command else ''}", width, first) + command


def _items(sentences: Sequence[str], width: int) -> list[str]:
    return [line for each in sentences for line in _wrapped(each, width, "  - ")]


def _wrapped(sentence: str, width: int, first: str = "") -> list[str]:
    """Lines of at most ``width`` columns after ``first``; what is in backticks is never broken."""
    whole = re.sub("`[^`]*`", lambda command: command[0].replace(" ", _UNBROKEN), sentence)
    found = textwrap.wrap(
        whole, width, initial_indent=first, subsequent_indent=" " * len(first),
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    return [line.replace(_UNBROKEN, " ") for line in found]
