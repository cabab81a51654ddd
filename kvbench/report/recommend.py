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
from kvbench.effects.comparison import FEWEST, Call
from kvbench.metrics.definitions import ENGINE, figure
from kvbench.report.comparisons import THROUGHPUT, differing, median, scatters, served
from kvbench.report.decision import (
    COSTS,
    FASTER_P95,
    NO_CHANGE,
    PAYS,
    RISK,
    SLOWER_P95,
    TRADES_P95,
    UNDECIDED,
    Candidate,
    Decision,
    NextStep,
    open_ones,
    safe_ones,
    wins,
)
from kvbench.report.kv import reservation
from kvbench.report.provenance import random_weights
from kvbench.report.quality import Quality, is_quantised
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run, all_steady_latency
from kvbench.runs.quality import figure as quality_figure
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
    said = Recommendation(str(run.folder), tuple(_doubts(decision)), decision.headline)
    return _Advice(decision, decision.base).fill(said) if decision.base else said


# --- What is wrong with the run ---


def _doubts(decision: Decision) -> Iterator[NextStep]:
    """Invalid and missing cells with the command that measures them, failed requests, then signs of other work.

    Last whether the baseline, which is kept where nothing is better, gives answers outside the limits itself.
    """
    run, state = decision.run, decision.validity
    if state.reasons or state.status != "valid":
        resume = next(decision.again(), None)
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
    if base and (outside := decision.qualities[base.config_id].outside):
        yield NextStep(f"The answers of the baseline itself are outside the limits: {_together(outside)}", "")


def _together(reasons: Sequence[str]) -> str:
    return words.and_more([why.rstrip(".") for why in reasons], 2, "; ")


# --- Settings and evidence ---


class _Advice:
    """The parts of a recommendation: ``best`` is the configuration to set, None where the baseline is kept."""

    def __init__(self, decision: Decision, base: MeasuredCell) -> None:
        self.run, self.decision, self.base = decision.run, decision, base
        self.loads, self.candidates, self.ahead = (
            decision.comparisons.loads,
            decision.candidates,
            wins(decision.candidates),
        )
        self.unknown = open_ones(self.ahead)
        self.best = next(iter(safe_ones(self.ahead)), None)
        self.chosen = self.best.cell if self.best else base
        self.alone = self._alone(self.best) if self.best else []

    def fill(self, said: Recommendation) -> Recommendation:
        """The whole recommendation."""
        chosen, quality = self.chosen, self.decision.qualities[self.chosen.config_id]
        settable = not quality.outside  # of a baseline: nothing to paste then
        settings = {name: value for name, value in chosen.settings.items() if name not in {*MODEL_SECTION, "target"}}
        changed = sorted(differing(chosen, self.base))
        return replace(
            said,
            configuration=chosen.marked_name,
            in_doubt=chosen.doubt,
            settings=settings if settable else {},
            changed={name: effective(self.base.settings, name) for name in changed},
            flags=_flags(self.run, chosen) if settable else "",
            baseline=f"{self.base.name}, {self.decision.clock} unless it says another",
            effects=tuple(self._effects()),
            evidence=(*self._evidence(), *self._by_load()),
            answers=_answers(quality),
            quality={  # figures that were not measured are None
                "model": self.run.quality.model if quality.figures and self.run.quality else "",
                "safe": quality.safe,
                "kld": quality_figure(quality.figures, "mean"),
                "perplexity_change": quality_figure(quality.figures, "perplexity_change"),
                "passkeys": quality_figure(quality.figures, "passkey.share"),
                "canaries_right": quality.canaries,
                "outside": quality.outside,
            },
            held_back=() if self.best else tuple(map(_briefly, self.unknown)),
            alone=tuple(map(_briefly, self.alone)),
            together=next(self.decision.combine(), None) if self.alone else None,
            rejected=tuple(self._rejected()),
            fallback=tuple(self._fallback()),
            unmeasured=tuple(self._unmeasured()),
            paging=tuple(self._paging()),
            pair=self.decision.pair or (),
        )

    def _effects(self) -> Iterator[dict[str, Any]]:
        """Empty for the baseline."""
        names = ("metric", "clock", "ratio", "low", "high", "call")
        for load in reversed(self.loads):
            if here := self._at(load, self.chosen):
                for one in filter(None, (here.throughput, *here.p95.values())):
                    yield {"load": load.short, **{name: getattr(one, name) for name in names}}

    def _at(self, load: MeasuredLoad, cell: MeasuredCell) -> Candidate | None:
        """The configuration of ``cell`` at a load; None for the baseline, or where it was not measured there."""
        return next((one for one in self.decision.by_load[load] if one.cell.name == cell.name), None)

    def _evidence(self) -> Iterator[str]:
        """Tells what the best does at each load, the reported one first; of a baseline, why not the others."""
        if self.best is None:
            pair = self.decision.pair or ()
            for one in self.candidates:
                kept = one.verdict == UNDECIDED or one in self.unknown or one.quality.outside
                if not kept and one.cell.name not in pair:
                    yield self._line(one)
            return
        first = self.best.cell.load
        for load in sorted(self.loads, key=lambda load: (load != first, load)):
            here = self._at(load, self.best.cell)
            yield f"{load.where}: {self._told(here.here)}" if here else f"not measured {load.where}"

    def _told(self, one: Candidate) -> str:
        """pays, +17 % tokens/s (16 to 17), p95 TTFT −25 % (−28 to −21)"""
        answer = self.decision.answer(one, one.name)
        return f"{answer.verdict.lower()}, {answer.evidence}"

    def _line(self, one: Candidate) -> str:
        return f"{one.name} {self._told(one)}"

    def _by_load(self) -> Iterator[str]:
        """Tells what pays at one load and not at another: not the best everywhere, or worse elsewhere."""
        for load in reversed(self.loads):
            every = self.decision.by_load[load]
            here = self._at(load, self.best.cell) if self.best else None
            top = next(iter(safe_ones(wins(every))), None)
            if load != self.decision.load and top and top.verdict == PAYS and (here is None or here.verdict != PAYS):
                yield f"{load.where} rather {self._line(top)}"
            for one in safe_ones([one for one in every if one.here.verdict == PAYS and one.verdict == RISK]):
                yield f"only {load.where} {self._line(one)}"

    def _alone(self, best: Candidate) -> list[Candidate]:
        """The candidates that pay beside the best by other settings, and were not measured together with it."""
        changed = differing(best.cell, best.base)
        return [
            one
            for one in safe_ones(self.ahead) + self.unknown
            if one is not best
            and not differing(one.cell, one.base) & changed
            and not self.decision.measured_together(best, one)
        ]

    def _rejected(self) -> Iterator[str]:
        """page 64 (worse p95), INT4 KV (pays; not safe: its KLD ...); the open ones are among what was not measured.

        Without a best, only what breaks a limit: the others are the evidence for the baseline.
        """
        left = [self.best, *self.alone]
        pair = self.decision.pair or ()
        for one in self.candidates:
            outside = _together(one.quality.outside)
            decided = self.best and one not in left and one.verdict != UNDECIDED and one.cell.name not in pair
            if outside or decided:
                verdict = self.decision.answer(one, one.name).verdict.lower()
                yield f"{one.name} ({verdict}{f': {outside}' if outside else ''})"

    # --- The fallback ---

    def _fallback(self) -> Iterator[str]:
        """The baseline, or of a quantised KV the best safe one in the model's own dtype; then when to go back."""
        best, contiguous = self.best, self._back_to_contiguous()
        if best is None:
            yield from [contiguous] if contiguous else ()
            return
        plain = [one.cell for one in safe_ones(self.ahead) if not is_quantised(one.cell)]
        back = plain[0] if plain and is_quantised(best.cell) else self.base
        changes = [f"{name}: {_yaml(effective(back.settings, name))}" for name in sorted(differing(best.cell, back))]
        yield f"{back.name} ({', '.join(changes)})"
        if told := _as_served(back):
            yield f"{told} {back.load.where}, what {back.name} served here{_how(self.run, back)}"
        if best.cell.hit_rate and effective(best.cell.settings, "enable_prefix_caching"):
            yield (
                f"prefix_cache_hits_total / prefix_cache_queries_total in /metrics is far under "
                f"{words.percent(best.cell.hit_rate)}, the hit rate that this gain comes from"
            )
        if is_quantised(best.cell):
            yield "`kvbench quality` with your own model and prompts finds its answers outside the limits"
        if contiguous:
            yield f"or to {contiguous}"

    def _back_to_contiguous(self) -> str:
        """contiguous where p95 ITL has to stay under 119 ms: it served 7.4 ms; empty unless paging costs such a p95."""
        load = self.base.load
        if not self.chosen.is_paged or load not in self.decision.comparisons.pairs:
            return ""
        pair = self.decision.paged_against_contiguous(load)
        if not (worse := _latency(pair)):
            return ""
        title, here, there = worse
        return f"{pair.base.name} where {title} has to stay under {here}: it served {there} {load.where}"

    # --- What was not measured ---

    def _unmeasured(self) -> Iterator[NextStep]:
        """The most decisive first."""
        run, best, engine_time = self.run, self.best, self.run.engine_time
        if self.unknown:
            names = [one.name if best else self._line(one) for one in self.unknown]
            step = next(self.decision.quality_step(), None)
            yield NextStep(f"the quality of {words.listing(names)}", step.command if step else "")
        if undecided := [one for one in self.candidates if one.verdict == UNDECIDED]:
            names = [f"{one.name} ({self.decision.numbers(one)})" for one in undecided]
            step = next(self.decision.decide(), None)
            yield NextStep(f"not decided: {words.and_more(names)}", step.command if step else "")
        if best and best.throughput and best.throughput.clock == ENGINE:
            as_served = served(best.cell, self.base, THROUGHPUT)
            if not (as_served and as_served.decided):
                yield NextStep("the gain as served over HTTP: it is decided in engine time only", "")
        for note in engine_time.notes if engine_time else ():
            yield NextStep(str(note), "")
        fewest = min(len(cell.repeats) for cell in run.at(self.base.load))
        no_gpus = "gpus" in run.manifest.model_fields_set and not run.manifest.gpus
        on_cpu = self.base.settings.get("device") == "cpu" or no_gpus
        names = words.listing(self.decision.comparisons.not_varied)
        for why, holds in (
            (f"served figures have {words.plural(fewest, 'repeat')}; a verdict takes {FEWEST}", fewest < FEWEST),
            (f"{names}: not varied", names),
            (f"any load but {self.loads[0].short}", len(self.loads) == 1),
            ("a GPU: this was measured on a CPU", on_cpu and not run.simulated),
            ("trained weights: random ones have the speed, not the text", random_weights(run)),
        ):
            if holds:
                yield NextStep(why, "")

    # --- Paging ---

    def _paging(self) -> Iterator[str]:
        """At each load, the lowest first; then what contiguous reserves, which is what paging saves."""
        run, last = self.run, None
        if self.decision.pair is None:
            yield self._no_pair()
            return
        for load in self.loads:
            if load not in self.decision.comparisons.pairs:
                yield f"{load.where}: not measured"
                continue
            pair = self.decision.paged_against_contiguous(load)
            last, here = pair.base, pair.here
            ran = [words.decimal(median(cell.observed("running_mean"))) for cell in (pair.cell, pair.base)]
            at_once = f"; {ran[0]} sequences ran at once, against {ran[1]}" if "–" not in ran else ""
            worse = _latency(here)
            latencies = f", {worse[0]} {worse[1]} against {worse[2]} as served" if worse else ""
            yield f"{load.where}: {_paging_advice(here)}: {self.decision.numbers(here)}{latencies}{at_once}"
        if last and (reserved := reservation(last)):
            yield f"{reserved.rstrip('.')}: where requests fill what is reserved, paging has nothing to save"
        if run.is_built_in and run.workload != _UNIFORM:
            yield f"uniform lengths near the limit: not measured here: `kvbench sweep workloads/{_UNIFORM}.yaml`"

    def _no_pair(self) -> str:
        preset = PRESETS.get(str(self.run.manifest.backend))
        if preset and preset.has_only("layout", "paged"):
            return (
                f"{preset.title} always pages; `kvbench sweep` without --target measures the layouts on the built-in "
                "engine"
            )
        command = self.decision.sweep_command(["-o", "sweep.layout=[contiguous, paged]"])
        other = "paged" if self.base.is_contiguous else "contiguous"
        return f"not measured: the run has no {other} configuration{f': `{command}`' if command else ''}"


def _flags(run: Run, cell: MeasuredCell) -> str:
    """The words that the settings become on the command line of another engine."""
    preset = PRESETS.get(str(run.manifest.backend))
    if preset is None:
        return ""
    known = Context(cell.settings, cell.capacity).only(cell.settings.keys() - (MODEL_SECTION - {"dtype"}))
    return shlex.join(replace(preset, command="").launch_command(known, model="", port=""))


def _answers(quality: Quality) -> str:
    """its answers: KLD 0.0009, perplexity +0.2 %, passkeys 98 %, within the limits; measured with kvbench-tiny"""
    if not quality.figures:
        return f"its answers: {quality.brief}"
    measured = f"; measured with {quality.model}" if quality.model else ""
    return f"its answers: {quality}, {quality.verdict or 'within the limits'}{measured}"


def _briefly(one: Candidate) -> str:
    """INT8 KV: +13 % tokens/s (13 to 14), quality not measured"""
    assert one.best is not None  # it won by that
    size = f"{one.name}: {one.gain(one.best)}"
    return f"{size}, {one.quality.brief}" if is_quantised(one.cell) or not one.quality.safe else size


def _as_served(cell: MeasuredCell) -> str:
    """tokens/s fall under 236, p95 TTFT exceeds 2.1 s or p95 ITL exceeds 90 ms; empty without a valid load."""
    rate = median(cell.throughput())
    if cell.doubt or rate is None:
        return ""
    signs = [f"tokens/s fall under {words.tokens_per_s(rate)}"]
    for metric, title in (("ttft_ms", "p95 TTFT"), ("itl_ms", "p95 ITL")):
        value, few = cell.percentile(metric, "p95")
        signs += [f"{title} exceeds {words.ms(value)}{' (few requests)' * few}"] if value else []
    return " or ".join(filter(None, [", ".join(signs[:-1]), signs[-1]]))


def _how(run: Run, cell: MeasuredCell) -> str:
    """: kvbench load workloads/mixed.yaml --at c32 --url URL; empty where the run has no workload file."""
    file, command = run.manifest.workload_file, run.manifest.command
    if not file or file not in command:
        return ""
    options = ["--profile", run.manifest.profile] if run.manifest.profile else []
    for option, value in pairwise(command):
        options += ["-o", value] if option in ("-o", "--override") and value.startswith("load.") else []
    load_id = cell.cell_id.removeprefix(f"{cell.config_id}-")
    return f" (`{shlex.join(['kvbench', 'load', file, *options, '--at', load_id, '--url', 'URL'])}`)"


def _paging_advice(one: Candidate) -> str:
    """page; do not page; page, unless p95 ITL counts more than output tokens/s"""
    if one.worst is None or one.verdict not in (RISK, TRADES_P95):
        return _PAGING[one.verdict]
    gain = one.best if one.verdict == RISK else one.best_p95
    return f"page, unless {figure(one.worst[1].metric).title} counts more than {figure(gain.metric).title}"


def _latency(one: Candidate) -> tuple[str, str, str] | None:
    """The p95 that is most behind and both sides as served: p95 ITL, 119 ms, 7.4 ms; None without one."""
    worse = [p95 for p95 in one.p95.values() if p95.call == Call.WORSE]
    if not worse:
        return None
    shown = figure(max(worse, key=lambda p95: p95.ratio).metric)
    cells = (one.cell, one.base)
    steady = all_steady_latency(cells)
    paged, contiguous = (cell.percentile(shown.metric.path, shown.statistic, steady)[0] for cell in cells)
    return (shown.title, words.ms(paged), words.ms(contiguous)) if paged and contiguous else None


# --- For a terminal ---


def lines(said: Recommendation, width: int = 100) -> list[str]:
    """The recommendation as lines of text: what to set, why, when to go back, what is open; all settings last.

    Wrapped at ``width`` columns, but for commands, which stay whole so that they can be copied.
    """
    found = [line for each in said.doubts for line in _step(each, width)] + _wrapped(said.verdict, width)
    if not said.configuration:
        return found
    found += ["", *_what_to_set(said, width)]
    rejected = [f"not taken: {', '.join(said.rejected)}"] if said.rejected else []
    found += ["", f"Why (against {said.baseline}):", *_items([*said.evidence, said.answers, *rejected], width)]
    if said.fallback:
        back, *when = said.fallback
        first = f"Go back to {back} when" if when else f"Fallback: {back}"
        found += ["", *_wrapped(first, width), *_items(when, width)]
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
    """Lists what pays alone with the command that measures it together, then what was not measured."""
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
