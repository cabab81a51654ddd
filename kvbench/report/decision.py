"""What a run lets one decide: the report's first sentence, its answers, and the next experiments worth running.

A configuration pays where its throughput is ahead and neither p95 TTFT nor p95 ITL is behind. It is a risk where a p95
is behind, or anything at another load or in the other clock. Where throughput is level, or set by the arrivals of an
open loop, a p95 ahead is better. Nothing is advised before the quality of its answers was measured (``quality.py``)
and found within the limits; the baseline may be kept.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, MARGINS, Call, Comparison
from kvbench.metrics.definitions import ENGINE, SERVED, SIMULATED, figure
from kvbench.report.comparisons import (
    JUDGED,
    THROUGHPUT,
    TTFT,
    Comparisons,
    amount,
    differing,
    interval,
    median,
    served,
    short_name,
    signed_interval,
    sized,
    spread,
    tokens_held,
)
from kvbench.report.limits import NOTHING, Break, CellLimit, breaks, growth_brief, limits
from kvbench.report.provenance import Validity, server_facts, validity
from kvbench.report.quality import Quality, is_quantised, outlier_words, qualities, saturation_words
from kvbench.report.tables import UNCERTAIN
from kvbench.runs.model import WRONG, MeasuredCell, MeasuredLoad, Run
from kvbench.workload.settings import effective, setting_title, value_words

MOST_WORDS = 25  # of the first sentence
PAYS, RISK, COSTS, NO_CHANGE, UNDECIDED = "Pays", "Pays, at a risk", "Costs", "No change", "Not decided"
PAYS_LITTLE = "Pays little"
FASTER_P95, SLOWER_P95, TRADES_P95 = "Better p95", "Worse p95", "One p95 better, one worse"
_IN_CLOCK = {ENGINE: f" in {ENGINE}", SERVED: f" {SERVED}", SIMULATED: ""}  # the sentence begins with "Simulated"
_MARKS = {PAYS: "better", FASTER_P95: "better", RISK: "risk", TRADES_P95: "risk", COSTS: "worse", SLOWER_P95: "worse"}
_CALLS = {Call.UNDECIDED: "not decided", Call.LEVEL: "level"}
_LONGEST_NAME = 7  # words
_MOST_COMBINED = 4  # answers on combinations of settings

_MOST_STEPS = 3
_MOST_MINUTES = 30.0  # of engine time that are still proposed
_MOST_REPEATS = 20
_FINEST = 0.02  # a change below this is not worth deciding


@dataclass(frozen=True)
class Candidate:
    """A configuration against the baseline, at one load.

    ``p95``: metric -> its comparison. ``elsewhere``: what is decided at other loads, and here in the other clock.
    """

    cell: MeasuredCell
    base: MeasuredCell
    throughput: Comparison | None
    p95: Mapping[str, Comparison]
    quality: Quality
    elsewhere: tuple[tuple[MeasuredLoad, Comparison], ...] = ()

    @property
    def name(self) -> str:
        return short_name(self.cell, self.base)

    @property
    def brief(self) -> str:
        """The name for the first sentence: of a long one, its first change and how many more there are."""
        if count_words(self.name) <= _LONGEST_NAME:
            return self.name
        more = len(differing(self.cell, self.base)) - 1
        return f"{re.split(' with |, | and ', self.name)[0]} with {words.plural(more, 'more change')}"

    @property
    def worst(self) -> tuple[MeasuredLoad, Comparison] | None:
        """The largest decided loss: a p95, or something at another load or in the other clock."""
        every = [*((self.cell.load, one) for one in self.p95.values()), *self.elsewhere]
        losses = [(load, one) for load, one in every if one.call == Call.WORSE]

        def factor(loss: tuple[MeasuredLoad, Comparison]) -> float:
            return 1 / loss[1].ratio if loss[1].metric == THROUGHPUT else loss[1].ratio

        return max(losses, key=factor, default=None)

    @property
    def verdict(self) -> str:
        """One of the verdicts above, by the rule in this module's docstring."""
        call = self.throughput.call if self.throughput else Call.UNDECIDED
        better, worse = any(one.call == Call.BETTER for one in self.p95.values()), self.worst is not None
        if call == Call.WORSE:
            return COSTS
        if call == Call.BETTER:
            return RISK if worse else PAYS
        if worse:
            return TRADES_P95 if better else SLOWER_P95
        if better and (call == Call.LEVEL or self.cell.load.mode == "open"):
            return FASTER_P95  # in closed loop an undecided throughput may yet be lower
        return NO_CHANGE if call == Call.LEVEL else UNDECIDED

    @property
    def verdict_words(self) -> str:
        """The verdict; of a gain that may be as small as a change that is called level, that it pays little."""
        gain = self.throughput
        little = self.verdict == PAYS and gain and gain.low is not None and gain.low < 1 + MARGINS[gain.clock]
        return PAYS_LITTLE if little else self.verdict

    @property
    def here(self) -> Candidate:
        """The same without what is decided at other loads."""
        return replace(self, elsewhere=tuple((load, one) for load, one in self.elsewhere if load == self.cell.load))

    @property
    def best_p95(self) -> Comparison | None:
        """The p95 that is furthest ahead; None where none is."""
        better = (one for one in self.p95.values() if one.call == Call.BETTER)
        return min(better, key=lambda one: one.ratio, default=None)

    @property
    def best(self) -> Comparison | None:
        """The comparison that the configuration wins by: its throughput, or the p95 that is furthest ahead."""
        return self.best_p95 if self.verdict == FASTER_P95 else self.throughput or self.best_p95

    def gain(self, one: Comparison, load: MeasuredLoad | None = None) -> str:
        """+16 % tokens/s (13 to 20) in engine time at 32 at once"""
        return f"{_amount(one)}{_IN_CLOCK[one.clock]} {(load or self.cell.load).where}"

    def loss(self, beside: Comparison) -> str:
        """p95 TTFT +61 %; −20 % tokens/s served at 3 at once: the worst, with clock and load where they are others."""
        assert self.worst is not None
        load, one = self.worst
        size = amount(one.ratio)
        what = f"{size} tokens/s" if one.metric == THROUGHPUT else f"{figure(one.metric).title} {size}"
        clock = "" if one.clock == beside.clock else _IN_CLOCK[one.clock]
        return f"{what}{clock}{'' if load == self.cell.load else f' {load.where}'}"

    @property
    def ttft(self) -> str:
        """p95 TTFT level; p95 TTFT −24 %; with its clock where that is not the throughput's; empty without any."""
        if TTFT not in self.p95:
            return ""
        known = self.p95[TTFT]
        other = f" {known.clock}" if self.throughput and self.throughput.clock != known.clock else ""
        return f"p95 TTFT {_CALLS.get(known.call) or amount(known.ratio)}{other}"

    @property
    def throughput_call(self) -> str:
        """tokens/s level; tokens/s not decided"""
        return f"tokens/s {_CALLS.get(self.throughput.call if self.throughput else Call.UNDECIDED, '')}"

    @property
    def room(self) -> str:
        """4.0x the tokens: how many times as many tokens fit into the same bytes, from a tenth more on."""
        more = tokens_held(self.cell, self.base) or 1.0
        return f"{words.significant(more, 2)}x the tokens" if more >= 1.1 else ""


def _amount(one: Comparison) -> str:
    """+16 % tokens/s (13 to 20); p95 TTFT −24 % (−36 to −8.8)"""
    if one.metric != THROUGHPUT:
        return f"{figure(one.metric).title} {sized(one)}"
    return f"{amount(one.ratio)} tokens/s {interval(one)}".rstrip()


def count_words(text: str) -> int:
    """Words as a reader counts them: whatever holds a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def _candidate(cell: MeasuredCell, base: MeasuredCell, comparisons: Comparisons, quality: Quality) -> Candidate:
    """A configuration against the baseline at its load."""
    decisive, elsewhere = dict(comparisons.decisive[cell.cell_id]), []
    for metric, decided in decisive.items():
        here = [known[cell.cell_id] for known in (comparisons.engine, comparisons.served)]
        elsewhere += [(cell.load, one[metric]) for one in here if metric in one and one[metric].call != decided.call]
    for other in comparisons.cells:
        if other.name == cell.name and other.load != cell.load:
            elsewhere += [(other.load, one) for one in comparisons.decisive[other.cell_id].values()]
    decided_elsewhere = tuple((load, one) for load, one in elsewhere if one.decided)
    return Candidate(cell, base, decisive.pop(THROUGHPUT, None), decisive, quality, decided_elsewhere)


def wins(every: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that pay, the fastest first; without any, those with a better p95, the best p95 first.

    In open loop the best p95 comes first in any case: the arrivals set the throughput.
    """
    pays = [one for one in every if one.verdict == PAYS]
    if pays and pays[0].cell.load.mode != "open":
        return pays
    faster = [one for one in every if one.verdict == FASTER_P95]
    return sorted(pays or faster, key=lambda one: one.best_p95.ratio if one.best_p95 else 1.0)


def safe_ones(every: Sequence[Candidate]) -> list[Candidate]:
    """The candidates whose answers were measured and found within the limits."""
    return [one for one in every if one.quality.safe]


def open_ones(every: Sequence[Candidate]) -> list[Candidate]:
    """The candidates that a measurement of their answers may yet find safe."""
    return [one for one in every if one.quality.open]


@dataclass(frozen=True)
class ReportAnswer:
    """One question: its subject, the verdict, the numbers. ``mark``: better | worse | risk | ""."""

    subject: str
    verdict: str
    evidence: str
    mark: str = ""


@dataclass(frozen=True)
class NextStep:
    """``why``: what it would decide, for a sentence; ``command``: empty where none can be given."""

    why: str
    command: str


@dataclass(frozen=True)
class Decision:
    """A run's comparisons, quality, limits and candidates, computed once: everything else in a report reads them.

    qualities: of the answers, by configuration id; limits: of every valid cell, the highest load first
    breaks: where each configuration breaks as the load grows
    by_load: every configuration beside the baseline, the largest throughput first
    """

    run: Run
    comparisons: Comparisons
    validity: Validity
    qualities: Mapping[str, Quality]
    limits: tuple[CellLimit, ...]
    breaks: tuple[Break, ...]
    by_load: Mapping[MeasuredLoad, tuple[Candidate, ...]]

    @classmethod
    def of(cls, run: Run) -> Decision:
        """The decision on a run."""
        comparisons, by_id = Comparisons.of(run), qualities(run)
        known = limits(comparisons)
        by_load = {}
        for load, base in comparisons.baselines.items():
            others = [cell for cell in comparisons.at(load) if base and cell is not base]
            candidates = [_candidate(cell, base, comparisons, by_id[cell.config_id]) for cell in others]
            candidates.sort(key=lambda one: -(one.throughput.ratio if one.throughput else 0.0))
            by_load[load] = tuple(candidates)
        return cls(run, comparisons, validity(run), by_id, tuple(known), tuple(breaks(comparisons, known)), by_load)

    @property
    def load(self) -> MeasuredLoad | None:
        """The load that the report speaks of; None of a run without any."""
        return self.comparisons.load

    @property
    def base(self) -> MeasuredCell | None:
        """The baseline at that load."""
        return self.comparisons.base

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every configuration beside the baseline at that load."""
        return self.by_load[self.load] if self.load else ()

    @property
    def pair(self) -> tuple[str, str] | None:
        """Names of the paged and the contiguous configuration that are compared."""
        return self.comparisons.pair

    @property
    def clock(self) -> str:
        """The clock of the answers that name no other."""
        return next((one.clock for _, one in self.comparisons.changes), self.run.clock)

    def paged_against_contiguous(self, load: MeasuredLoad) -> Candidate:
        """The pair at a load that has both, as served only where neither is the baseline."""
        paged, contiguous = self.comparisons.pairs[load]
        base = self.comparisons.baselines[load]
        for one in self.by_load[load]:
            if contiguous is base and one.cell is paged:
                return one
            if paged is base and one.cell is contiguous:
                return self._inverse(one)
        known = {metric: one for metric in JUDGED if (one := served(paged, contiguous, metric))}
        return Candidate(paged, contiguous, known.pop(THROUGHPUT, None), known, self.qualities[paged.config_id])

    def _inverse(self, one: Candidate) -> Candidate:
        """The baseline against the configuration."""
        return Candidate(
            one.base,
            one.cell,
            one.throughput.inverse() if one.throughput else None,
            {metric: p95.inverse() for metric, p95 in one.p95.items()},
            self.qualities[one.base.config_id],
            tuple((load, other.inverse()) for load, other in one.elsewhere),
        )

    # --- The sentence ---

    @property
    def headline(self) -> str:
        """The decision in one sentence of at most 25 words; clauses that do not fit are among the answers."""
        run = self.run
        prefix = "Simulated: " if run.simulated else ""
        prefix += "Incomplete: " if run.cells and (run.missing or run.status != "complete") else ""
        clauses = [clause for clause in self._clauses() if clause]
        while len(clauses) > 1 and count_words(prefix + ", ".join(clauses)) > MOST_WORDS:
            clauses.pop()
        text = f"{prefix}{', '.join(clauses)}."
        if count_words(text) > MOST_WORDS:
            text = re.sub(r" \([^()]* to [^()]*\)", "", text).replace(f" in {ENGINE} ", f" ({ENGINE}) ")
        return text if count_words(text) <= MOST_WORDS else " ".join(text.split()[:MOST_WORDS]) + " …"

    def _clauses(self) -> list[str]:
        """The sentence in pieces, the most important first."""
        if self.load is None:
            return _without_loads(self.run)
        cells = self.comparisons.reported
        if len(cells) == 1:
            return self._alone(cells[0])
        if self.base is None:
            return [f"Cannot tell: the baseline was not measured {self.load.where}"]
        if all(one.verdict == UNDECIDED for one in self.candidates):
            return self._cannot_tell(self.base)
        if ahead := wins(self.candidates):
            return self._ship(ahead)
        for one in self.candidates:
            if one.verdict == RISK and one.throughput:
                gain = one.gain(one.throughput)
                return [f"Risk: {one.brief} brings {gain}, but {one.loss(one.throughput)}"]
        return self._keep(self.base)

    def _ship(self, ahead: Sequence[Candidate]) -> list[str]:
        """The best configuration whose answers are safe; else what its quality leaves open, or why not."""
        safe = safe_ones(ahead)
        best = (safe or open_ones(ahead) or ahead)[0]
        assert best.best is not None  # it won by that
        quality, size, name = best.quality, best.gain(best.best), best.brief
        beside = best.ttft if best.verdict == PAYS else best.throughput_call
        if self.run.simulated:  # no answers to judge
            return [f"{words.upper_first(name)} would bring {size}", beside, growth_brief(self.breaks), best.room]
        if safe:
            return [f"Ship {name}: {size}", beside, quality.brief if is_quantised(best.cell) else "", best.room]
        if quality.wrong:
            return [f"Do not ship {name}: {size}, but it gave wrong answers under load"]
        if quality.outside:
            return [f"Do not ship {name}: {size}, but its answers are outside the limits", quality.brief]
        if not quality.figures:
            return [f"Measure quality before you ship {name}: {size}", beside]
        return [f"Do not ship {name} yet: {size}, but its quality is known of {quality.doubt} only"]

    def _keep(self, base: MeasuredCell) -> list[str]:
        """Nothing is ahead. Where the baseline is paged and contiguous is behind, that is what paging brings."""
        for one in self.candidates:
            if not self.pair or {one.cell.name, base.name} != set(self.pair):
                continue
            kept = self._inverse(one)
            if kept.verdict in (PAYS, RISK, FASTER_P95) and (gain := kept.best):
                others = _not_ahead([other for other in self.candidates if other is not one])
                worse = f"but {kept.loss(gain)}" if kept.worst else others
                return [f"Keep {base.name}: {kept.gain(gain)} over {one.cell.name}", worse]
            if kept.verdict == TRADES_P95 and (gain := kept.best_p95):
                return [f"Risk: {base.name} has {kept.gain(gain)} over {one.cell.name}, but {kept.loss(gain)}"]
        if len(self.candidates) == 1:
            return _only(self.candidates[0])
        return [f"Keep {base.name} {base.load.where}: {_not_ahead(self.candidates)}"]

    def _cannot_tell(self, base: MeasuredCell) -> list[str]:
        doubtful = [cell for cell in (base, *(one.cell for one in self.candidates)) if cell.doubt]
        if base.doubt or len(doubtful) > len(self.candidates) / 2:
            return [f"Cannot tell: {self._doubt(doubtful[0])}"]
        name = self.candidates[0].brief if len(self.candidates) == 1 else f"{len(self.candidates)} changes"
        told = f"Cannot tell {name} from {base.name} {base.load.where}"
        smallest = [one.throughput.smallest for one in self.candidates if one.throughput and one.throughput.smallest]
        if not smallest:
            return [told, f"since nothing has an interval: it takes {FEWEST} repeats"]
        return [told, f"a change of {words.percent(max(smallest))} would most likely have shown"]

    def _alone(self, cell: MeasuredCell) -> list[str]:
        """One configuration: what it delivered."""
        rates = spread(cell.throughput())
        if cell.doubt or rates is None:
            return [f"Cannot tell: {self._doubt(cell)}"]
        bounds = f" ({words.tokens_per_s(rates.low)}–{words.tokens_per_s(rates.high)})" if rates.n > 1 else ""
        (ttft, few), whole = cell.percentile("ttft_ms", "p95"), "" if cell.has_steady_latency else " (whole run)"
        rate = f"{words.tokens_per_s(rates.median)} output tokens/s{bounds} {cell.clock} {cell.load.where}"
        return [
            f"{words.upper_first(cell.name)}: {rate}",
            f"p95 TTFT {words.ms(ttft)}{UNCERTAIN * few}{whole}" if ttft else "",
            "nothing to compare it with",
        ]

    def _doubt(self, cell: MeasuredCell) -> str:
        """Says in a few words why a cell cannot be compared."""
        if cell.doubt == "refused":
            return f"{cell.name} refused {cell.count('failed')} of {cell.sent} requests {cell.load.where}"
        if cell.doubt == WRONG:
            return f"{cell.name} answered {cell.canaries.wrong} of {cell.canaries.answered} canaries wrongly"
        if not cell.doubt:
            return f"{cell.name} has no throughput {cell.load.where}"
        why = re.sub(r"^repeat \d+: ", "", (cell.invalid_reasons or ("no reason recorded",))[0])
        short = " ".join(re.split(r"[;:,(]| while ", why)[0].split()[:9]).rstrip(".")
        cells = self.comparisons.cells
        invalid = sum(other.doubt == "invalid" for other in cells)
        return f"{invalid} of {len(cells)} cells {'is' if invalid == 1 else 'are'} invalid ({short})"

    # --- The answers ---

    def answers(self) -> list[ReportAnswer]:
        """Paging first, then page size, KV dtypes and each other setting changed alone; combinations last."""
        if self.base is None:
            return []
        alone: dict[str, list[Candidate]] = {}
        combined = []
        for one in self.candidates:
            changed = differing(one.cell, self.base)
            if len(changed) > 1:
                combined.append(self.answer(one, one.name))
            elif changed and not (self.pair and changed == {"layout"}):
                alone.setdefault(*changed, []).append(one)
        rows = [self._paging_answer()] if self.pair else []
        for name in sorted(alone, key=lambda name: (name != "page_size", name != "kv_cache_dtype")):
            if name == "page_size":
                rows.append(self._page_size_answer(alone[name], self.base))
            else:
                rows += [self.answer(one, _subject(name, one.cell)) for one in alone[name]]
        return rows + combined[:_MOST_COMBINED]

    def _paging_answer(self) -> ReportAnswer:
        """Paged against contiguous: the verdict of the highest load that has one, and the numbers of each load."""
        said, decided = [], None
        for load in reversed(self.comparisons.pairs):
            everywhere = self.paged_against_contiguous(load)
            here = everywhere.here  # the other loads have words of their own
            where = f" {load.where}" if load != self.load else ""
            if here.verdict == UNDECIDED and where:
                said.append(f"{here.cell.doubt or here.base.doubt or UNDECIDED.lower()}{where}")
                continue
            if decided is None or decided.verdict == UNDECIDED:
                decided = everywhere
            said.append(f"{self.numbers(here)}{where}{_side_by_side(here.cell, here.base)}")
        verdict, mark = self._with_quality(decided, decided.verdict) if decided else (UNDECIDED, "")
        return ReportAnswer("Paging", verdict, "; ".join(said), mark)

    def _page_size_answer(self, every: Sequence[Candidate], base: MeasuredCell) -> ReportAnswer:
        """The page size that pays most among those whose answers are safe, else the baseline's."""
        ahead = wins(every)
        best = next(iter(safe_ones(ahead) or open_ones(ahead)), None)
        said = []
        for one in every:
            verdict, _ = self._with_quality(one, one.verdict_words)
            said.append(f"{one.cell.page_size}: {verdict.lower()}, {self.numbers(one)}")
        if best is None:
            unknown = ", others not decided" if all(one.verdict == UNDECIDED for one in every) else ""
            return ReportAnswer("Page size", f"Keep {base.page_size or 'the default'}{unknown}", "; ".join(said))
        size, (verdict, mark) = best.cell.page_size, self._with_quality(best, best.verdict_words)
        use = f"Use {size}" if best.quality.safe else f"{size} {verdict.lower()}"
        return ReportAnswer("Page size", use, "; ".join(said), mark)

    def answer(self, one: Candidate, subject: str) -> ReportAnswer:
        """One configuration, with its quality in the verdict: speed alone does not make it safe."""
        quality, quantised, cell = one.quality, is_quantised(one.cell), one.cell
        verdict, mark = self._with_quality(one, one.verdict_words)
        hits = cell.hit_rate if effective(cell.settings, "enable_prefix_caching") else None
        parts = [
            self.numbers(one),
            one.room,
            str(quality) if not self.run.simulated and (quantised or quality.outside) else "",
            f"hit rate {words.percent(hits)} as {cell.clock}" if hits is not None else "",
            outlier_words(cell, server_facts(self.run, cell).kv_outliers) if quantised else "",
            saturation_words(cell),
        ]
        return ReportAnswer(words.upper_first(subject), verdict, ", ".join(filter(None, parts)), mark)

    def _with_quality(self, one: Candidate, verdict: str) -> tuple[str, str]:
        """A verdict with what is wrong with the answers behind it, and its mark.

        That they were not measured is said of what one would set, and of a quantised KV.
        """
        quality, mark = one.quality, _MARKS.get(verdict, "")
        if self.run.simulated or quality.safe:
            return verdict, mark
        asked = one.verdict in (PAYS, FASTER_P95, RISK) or (is_quantised(one.cell) and one.verdict != COSTS)
        if not quality.outside and (one.cell.is_baseline or not asked):
            return verdict, mark
        return f"{verdict}; {quality.verdict}", "worse" if quality.outside else ""

    def numbers(self, one: Candidate) -> str:
        """The change of throughput, and the p95s that are decided."""
        if one.throughput is None:
            doubt = one.cell.doubt or one.base.doubt
            return f"no ratio ({doubt})" if doubt else "no ratio"
        said = []
        for each in (one.throughput, *one.p95.values()):
            if each is one.throughput or each.call in (Call.BETTER, Call.WORSE):
                clock = "" if each.clock == self.clock else f" {each.clock}"
                said.append(f"{'worse ' * (each.call == Call.WORSE)}{_amount(each)}{clock}")
        as_served = served(one.cell, one.base, THROUGHPUT) if one.throughput.clock == ENGINE else None
        if as_served and as_served.low is not None:  # of fewer repeats the ratio says nothing
            said.insert(1, f"served {amount(as_served.ratio)}{'' if as_served.decided else ' (not decided)'}")
        unknown = [figure(metric).title for metric, each in one.p95.items() if not each.decided]
        if unknown and one.verdict in (PAYS, NO_CHANGE):
            said.append(f"{words.listing(unknown)} not decided")
        if one.worst in one.elsewhere:
            said.append(f"but {one.loss(one.throughput)}")
        return ", ".join(said)

    # --- What to run next ---

    def next_steps(self) -> list[NextStep]:
        """At most three, the most useful first."""
        steps = [*self.again(), *self.quality_step(), *self.combine(), *self.decide(), *self._larger_load()]
        return steps[:_MOST_STEPS]

    def quality_step(self) -> Iterator[NextStep]:
        """Measures answers of what may be set, and of a quantised KV, whose price is always asked for."""
        ahead = wins(self.candidates)
        unknown = [one for one in open_ones(self.candidates) if one in ahead or is_quantised(one.cell)]
        if not unknown or self.run.simulated:
            return
        names = words.and_more([one.name for one in unknown])
        if self.run.is_built_in and not self.run.manifest.target:
            yield NextStep(f"measure the quality of {names}", f"kvbench quality {shlex.quote(str(self.run.folder))}")
        elif any(not is_quantised(one.cell) for one in unknown):
            command = self.sweep_command(["-o", "load.canaries={share: 0.3}"])
            yield NextStep(f"see with canaries whether the answers of {names} are right", command)

    def combine(self) -> Iterator[NextStep]:
        """Settings that pay alone may not pay together; none whose answers lie outside the limits."""
        paying: dict[str, Candidate] = {}
        for one in self.candidates:
            changed = differing(one.cell, one.base)
            if one.verdict == PAYS and not one.quality.outside and len(changed) == 1 and changed != {"layout"}:
                paying.setdefault(next(iter(changed)), one)
        if len(paying) < 2 or self.measured_together(*paying.values()):
            return
        sweep = {
            name: [effective(cell.settings, name) for cell in (one.base, one.cell)] for name, one in paying.items()
        }
        names = words.listing([one.name for one in self.candidates if one in paying.values()])
        options = ["-o", f"sweep={json.dumps(sweep)}", "-o", "design=full"]
        yield NextStep(f"{names} pay alone: measure them together", self.sweep_command(options))

    def measured_together(self, *parts: Candidate) -> bool:
        """Tests whether one configuration has the changes of all ``parts``."""
        wanted = {name: effective(one.cell.settings, name) for one in parts for name in differing(one.cell, one.base)}
        return any(
            all(effective(one.cell.settings, name) == value for name, value in wanted.items())
            for one in self.candidates
        )

    def decide(self) -> Iterator[NextStep]:
        """More engine time or more repeats, as many as the size of the undecided effects asks for."""
        unknown = [one for one in self.candidates if one.verdict == UNDECIDED and one.throughput]
        known = [one.throughput for one in unknown if one.throughput]
        if not known:
            return
        names = words.and_more([one.name for one in unknown], 2)
        # The smallest change that would have shown over the one to decide: as large as it looks, at least _FINEST.
        coarse = [one.smallest / max(_FINEST, abs(one.ratio - 1)) for one in known if one.smallest]
        if all(one.clock == ENGINE for one in known):
            seconds = (self.run.engine_time.seconds if self.run.engine_time else None) or 180.0
            minutes = math.ceil(1.1 * seconds / 60 * max(coarse, default=1.4) ** 2)
            if minutes <= _MOST_MINUTES:
                yield NextStep(f"decide {names}", self.sweep_command(["--lockstep-minutes", str(minutes)]))
            return
        repeats = min(len(one.cell.repeats) for one in unknown)
        wanted = max(FEWEST, math.ceil(repeats * max(coarse, default=1.0) ** 2))
        if wanted <= _MOST_REPEATS:
            command = self.sweep_command(["--repeats", str(max(wanted, repeats + 1))])
            yield NextStep(f"decide {names}", command)

    def _larger_load(self) -> Iterator[NextStep]:
        """Nothing was full at the highest load: a higher one shows what breaks first."""
        load, loads = self.load, self.comparisons.loads
        if self.base is None or load is None or load != loads[-1] or load.mode != "closed" or load.sessions:
            return
        if {each.limit for each in self.limits if each.cell.load == load} == {NOTHING}:
            users = [f"{one.value:g}" for one in loads] + [f"{2 * load.value:g}"]
            what = f"nothing was full at {load.short}: see what breaks first"
            yield NextStep(what, self.sweep_command(["-o", f"load.concurrency=[{', '.join(users)}]"]))

    def again(self) -> Iterator[NextStep]:
        """Measures what is missing or invalid."""
        if self.validity.status in ("invalid", "incomplete"):
            command = f"kvbench sweep --resume {shlex.quote(str(self.run.folder))}"
            yield NextStep("measure what is missing or invalid", command)

    def sweep_command(self, options: Sequence[str]) -> str:
        """The command of the run with further options; empty where it is not known."""
        command = list(self.run.manifest.command)
        while options[0] != "-o" and options[0] in command[:-1]:  # given before, with another value
            at = command.index(options[0])
            del command[at : at + 2]
        return shlex.join([*command, *options]) if "sweep" in command and "--resume" not in command else ""


def _without_loads(run: Run) -> list[str]:
    """No load was finished over HTTP: what engine time knows is among cells that were not served."""
    effects = run.engine_time.effects if run.engine_time else ()
    ahead = [one for one in effects if one.metric == THROUGHPUT and one.call == Call.BETTER]
    if not ahead:
        return ["Cannot tell: no load over HTTP was finished"]
    best = max(ahead, key=lambda one: one.ratio)
    what = "is kept" if run.not_kept else "was measured"
    return [f"Only {ENGINE} {what}: {best.cell} {amount(best.ratio)} tokens/s ({signed_interval(best.comparison)})"]


def _only(one: Candidate) -> list[str]:
    """The run has one candidate, and it is not ahead."""
    if one.verdict == COSTS and one.throughput:
        return [f"Do not ship {one.brief}: {one.gain(one.throughput)}", one.ttft]
    call = f"{one.throughput_call}{_IN_CLOCK[one.throughput.clock] if one.throughput else ''}"
    if one.verdict == TRADES_P95 and one.best_p95:
        return [f"Risk: {one.brief} brings {one.gain(one.best_p95)}, but {one.loss(one.best_p95)}", call]
    if one.worst:
        load, worst = one.worst
        return [f"Do not ship {one.brief}: {one.gain(worst, load)}", call]
    if all(p95.decided for p95 in one.p95.values()):
        return [f"{words.upper_first(one.brief)} makes no difference: {call} {one.cell.load.where}", one.ttft]
    return [f"Cannot tell if {one.brief} pays: {call} {one.cell.load.where}", one.ttft]


def _not_ahead(every: Sequence[Candidate]) -> str:
    """3 changes are not ahead; 2 changes are not ahead, 5 not decided"""
    undecided = sum(one.verdict == UNDECIDED for one in every)
    rest = len(every) - undecided
    known = f"{words.plural(rest, 'change')} {'is' if rest == 1 else 'are'} not ahead" if rest else ""
    return ", ".join(filter(None, [known, f"{undecided} not decided" if undecided else ""]))


def _subject(name: str, cell: MeasuredCell) -> str:
    value, title = value_words(name, effective(cell.settings, name)), setting_title(name)
    return value if name == "kv_cache_dtype" else title if value == "on" else f"{title}: {value}"


def _side_by_side(paged: MeasuredCell, contiguous: MeasuredCell) -> str:
    """, 24.0 sequences at once as served, against 8.1, 90 % within the SLO as served, against 70 %; what is known."""
    cells, text = (paged, contiguous), ""
    for what, known in (
        ("sequences at once", [words.decimal(median(cell.observed("running_mean"))) for cell in cells]),
        ("within the SLO", [words.percent(cell.share_within_slo) for cell in cells]),
    ):
        if "–" not in known:
            text += f", {known[0]} {what} as {paged.clock}, against {known[1]}"
    return text
