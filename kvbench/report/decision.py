"""The report's first sentence and its answers: what a run lets one decide, and what it does not.

A configuration pays where its throughput is ahead and neither p95 TTFT nor p95 ITL is behind. It is a risk where a p95
is behind, or anything at another load or in the other clock. Where throughput is level, or set by the arrivals of an
open loop, a p95 ahead is better. Nothing is advised before the quality of its answers was measured (``quality.py``)
and found within the limits; the baseline may be kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvbench.common import text as words
from kvbench.report.changes import (
    AHEAD,
    BEHIND,
    ENGINE_TIME,
    IS_LEVEL,
    MARGINS,
    METRICS,
    OPEN,
    THROUGHPUT,
    TTFT,
    Change,
    amount,
    change,
    change_in,
    changes,
    decided_load,
    served,
    short_name,
)
from kvbench.report.comparisons import baseline, differing, median, paging_pair, spread, tokens_held
from kvbench.report.limits import growth_brief
from kvbench.report.provenance import server_facts
from kvbench.report.quality import is_quantised, outlier_words, quality_of, saturation_words
from kvbench.report.tables import UNCERTAIN
from kvbench.runs.model import SERVED, SIMULATED, WRONG, MeasuredCell, MeasuredLoad, Run
from kvbench.runs.ratios import FEWEST
from kvbench.workload.settings import effective, setting_title, value_words

MOST_WORDS = 25  # of the first sentence
PAYS, RISK, COSTS, NO_CHANGE, UNDECIDED = "Pays", "Pays, at a risk", "Costs", "No change", "Not decided"
PAYS_LITTLE = "Pays little"
FASTER_P95, SLOWER_P95, TRADES_P95 = "Better p95", "Worse p95", "One p95 better, one worse"
_CLOCKS = {ENGINE_TIME: f"in {ENGINE_TIME}", SERVED: SERVED, SIMULATED: SIMULATED}
_MARKS = {PAYS: "better", FASTER_P95: "better", RISK: "risk", TRADES_P95: "risk", COSTS: "worse", SLOWER_P95: "worse"}
_LONGEST_NAME = 7  # words
_MOST_COMBINED = 4  # answers on combinations of settings


@dataclass(frozen=True)
class Choice:
    """What the run says of one configuration against the baseline, at one load.

    ``p95``: metric -> its change. ``elsewhere``: what is decided at other loads, and here in the other clock.
    """

    cell: MeasuredCell
    base: MeasuredCell
    throughput: Change | None
    p95: Mapping[str, Change]
    elsewhere: tuple[Change, ...] = ()

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
    def worst(self) -> Change | None:
        """What is decided to worsen, and most: a p95, or something at another load or in the other clock."""
        losses = [each for each in (*self.p95.values(), *self.elsewhere) if each.call == BEHIND]
        return max(losses, key=lambda each: 1 / each.ratio if each.metric == THROUGHPUT else each.ratio, default=None)

    @property
    def verdict(self) -> str:
        """By the rule in this module's docstring."""
        better, worse = any(each.call == AHEAD for each in self.p95.values()), self.worst is not None
        call = self.throughput.call if self.throughput else OPEN
        if call in (AHEAD, BEHIND):
            return COSTS if call == BEHIND else RISK if worse else PAYS
        if better and worse:
            return TRADES_P95
        if worse or (better and (call == IS_LEVEL or self.cell.load.mode == "open")):
            return SLOWER_P95 if worse else FASTER_P95  # in closed loop an open throughput may yet be lower
        return NO_CHANGE if call == IS_LEVEL else UNDECIDED

    @property
    def verdict_words(self) -> str:
        """The verdict; of a gain that may be as small as a change that is called level, that it pays little."""
        gain = self.throughput
        little = self.verdict == PAYS and gain and gain.low is not None and gain.low < 1 + MARGINS[gain.clock]
        return PAYS_LITTLE if little else self.verdict

    @property
    def here(self) -> Choice:
        """The same without what is decided at other loads."""
        return replace(self, elsewhere=tuple(one for one in self.elsewhere if one.cell.load == self.cell.load))

    def inverse(self) -> Choice:
        """The baseline against this configuration."""
        throughput = self.throughput.inverse() if self.throughput else None
        p95 = {metric: each.inverse() for metric, each in self.p95.items()}
        return Choice(self.base, self.cell, throughput, p95, tuple(each.inverse() for each in self.elsewhere))


def choice(run: Run, cell: MeasuredCell, base: MeasuredCell) -> Choice:
    """What is known of one configuration against the baseline at its load."""
    known = {metric: found for metric in METRICS if (found := change(run, cell, metric))}
    here = [change_in(run, cell, metric, clock) for metric in known for clock in (ENGINE_TIME, SERVED)]
    contradicts = [each for each in here if each and each.call != known[each.metric].call]
    others = [other for other in run.cells if other.name == cell.name and other.load != cell.load]
    there = [change(run, other, metric) for other in others for metric in METRICS]
    elsewhere = tuple(each for each in (*contradicts, *there) if each and each.decided)
    return Choice(cell, base, known.pop(THROUGHPUT, None), known, elsewhere)


def choices(run: Run, load: MeasuredLoad) -> list[Choice]:
    """Every configuration beside the baseline at a load, the largest throughput first."""
    base = baseline(run, load)
    found = [choice(run, cell, base) for cell in run.at(load) if base and cell is not base]
    return sorted(found, key=lambda each: -(each.throughput.ratio if each.throughput else 0.0))


# --- The sentence ---


def headline(run: Run) -> str:
    """The decision in one sentence of at most 25 words; clauses that do not fit are among the answers."""
    prefix = "Simulated: " if run.simulated else ""
    prefix += "Incomplete: " if run.cells and (run.missing or run.status != "complete") else ""
    clauses = [clause for clause in _clauses(run) if clause]
    while len(clauses) > 1 and count_words(prefix + ", ".join(clauses)) > MOST_WORDS:
        clauses.pop()
    text = f"{prefix}{', '.join(clauses)}."
    if count_words(text) > MOST_WORDS:
        text = re.sub(r" \([^()]* to [^()]*\)", "", text).replace(f" in {ENGINE_TIME} ", f" ({ENGINE_TIME}) ")
    return text if count_words(text) <= MOST_WORDS else " ".join(text.split()[:MOST_WORDS]) + " …"


def count_words(text: str) -> int:
    """Words as a reader counts them: whatever holds a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def _clauses(run: Run) -> list[str]:
    """The sentence in pieces, the most important first."""
    load = decided_load(run)
    if load is None:
        return _without_loads(run)
    base = baseline(run, load)
    if len(run.at(load)) == 1:
        return _alone(run, run.at(load)[0])
    if base is None:
        return [f"Cannot tell: the baseline was not measured {load.where}"]
    found = choices(run, load)
    if all(each.verdict == UNDECIDED for each in found):
        return _cannot_tell(run, load, base, found)
    if ahead := wins(found):
        return _ship(run, load, ahead)
    risks = [each for each in found if each.verdict == RISK]
    return _risk(load, risks[0]) if risks else _keep(run, load, base, found)


def wins(found: Sequence[Choice]) -> list[Choice]:
    """Those that pay, the fastest first; without any, those with a better p95, the best p95 first.

    In open loop the best p95 comes first in any case: the arrivals set the throughput.
    """
    pays = [each for each in found if each.verdict == PAYS]
    faster = [each for each in found if each.verdict == FASTER_P95]
    if not pays or pays[0].cell.load.mode == "open":
        ahead = {each.name: [one.ratio for one in each.p95.values() if one.call == AHEAD] for each in pays + faster}
        return sorted(pays or faster, key=lambda each: min(ahead[each.name], default=1.0))
    return pays


def safe_ones(run: Run, found: Sequence[Choice]) -> list[Choice]:
    """Those whose answers were measured and found within the limits."""
    return [each for each in found if quality_of(run, each.cell).safe]


def open_ones(run: Run, found: Sequence[Choice]) -> list[Choice]:
    """Those that a measurement of their answers may yet find safe."""
    return [each for each in found if quality_of(run, each.cell).open]


def _without_loads(run: Run) -> list[str]:
    """No load was finished over HTTP: what engine time knows is among cells that were not served."""
    effects = run.engine_time.effects if run.engine_time else ()
    ahead = [each for each in effects if each.metric == THROUGHPUT and each.call == AHEAD]
    if not ahead:
        return ["Cannot tell: no load over HTTP was finished"]
    best = max(ahead, key=lambda each: each.ratio)
    what = "is kept" if run.not_kept else "was measured"
    return [f"Only {ENGINE_TIME} {what}: {best.cell} {amount(best.ratio)} tokens/s ({best.interval})"]


def gain(each: Change, load: MeasuredLoad) -> str:
    """+16 % tokens/s (13 to 20) in engine time at 32 at once"""
    clock = "" if each.cell.simulated else f" {_CLOCKS[each.clock]}"  # the sentence begins with it
    return f"{_amount(each)}{clock} {load.where}"


def _loss(each: Change, beside: Change) -> str:
    """p95 TTFT +61 %; −20 % tokens/s served at 3 at once: with clock and load where ``beside`` has others."""
    size = amount(each.ratio)
    what = f"{size} tokens/s" if each.metric == THROUGHPUT else f"{METRICS[each.metric]} {size}"
    clock = "" if each.clock == beside.clock else f" {_CLOCKS[each.clock]}"
    return f"{what}{clock}{'' if each.cell.load == beside.cell.load else f' {each.cell.load.where}'}"


def _amount(each: Change) -> str:
    """+16 % tokens/s (13 to 20); p95 TTFT −24 % (−36 to −8.8)"""
    if each.metric != THROUGHPUT:
        return f"{METRICS[each.metric]} {each}"
    return f"{amount(each.ratio)} tokens/s {each.interval}".rstrip()


def _call(each: Change | None) -> str:
    return {OPEN: "not decided", IS_LEVEL: "level"}.get(each.call if each else OPEN, "")


def _ttft(each: Choice) -> str:
    """p95 TTFT level; p95 TTFT −24 %; with its clock where that is not the throughput's; empty without any."""
    found = each.p95.get(TTFT)
    if found is None:
        return ""
    other = f" {found.clock}" if each.throughput and each.throughput.clock != found.clock else ""
    return f"p95 TTFT {_call(found) or amount(found.ratio)}{other}"


def _holds(each: Choice) -> str:
    """4.0x the tokens: how many times as many tokens fit into the same bytes, from a tenth more on."""
    more = tokens_held(each.cell, each.base) or 1.0
    return f"{words.significant(more, 2)}x the tokens" if more >= 1.1 else ""


def _ship(run: Run, load: MeasuredLoad, ahead: Sequence[Choice]) -> list[str]:
    """The best configuration whose answers are safe; else what its quality leaves open, or why it is not advised."""
    safe = safe_ones(run, ahead)
    best = (safe or open_ones(run, ahead) or ahead)[0]
    quality, size = quality_of(run, best.cell), gain(best_of(best), load)
    beside = _ttft(best) if best.verdict == PAYS else f"tokens/s {_call(best.throughput)}"
    if run.simulated:  # no answers to judge
        return [f"{words.upper_first(best.brief)} would bring {size}", beside, growth_brief(run), _holds(best)]
    if safe:
        return [f"Ship {best.brief}: {size}", beside, quality.brief if is_quantised(best.cell) else "", _holds(best)]
    if quality.outside:
        if quality.wrong:
            return [f"Do not ship {best.brief}: {size}, but it gave wrong answers under load"]
        return [f"Do not ship {best.brief}: {size}, but its answers are outside the limits", quality.brief]
    if not quality.figures:
        return [f"Measure quality before you ship {best.brief}: {size}", beside]
    return [f"Do not ship {best.brief} yet: {size}, but its quality is known of {quality.doubt} only"]


def _risk(load: MeasuredLoad, best: Choice) -> list[str]:
    assert best.throughput is not None
    assert best.worst is not None
    return [f"Risk: {best.brief} brings {gain(best.throughput, load)}, but {_loss(best.worst, best.throughput)}"]


def _keep(run: Run, load: MeasuredLoad, base: MeasuredCell, found: Sequence[Choice]) -> list[str]:
    """Nothing is ahead. Where the baseline is paged and contiguous is behind, that is what paging brings."""
    pair = paging_pair(run)
    for each in found:
        kept = each.inverse()
        if pair and {each.cell.name, base.name} == set(pair) and kept.verdict in (PAYS, RISK, FASTER_P95):
            shown = best_of(kept)
            worse = f"but {_loss(kept.worst, shown)}" if kept.worst else ""
            others = _not_ahead([other for other in found if other is not each])
            return [f"Keep {base.name}: {gain(shown, load)} over {each.cell.name}", worse or others]
        if pair and {each.cell.name, base.name} == set(pair) and kept.verdict == TRADES_P95 and kept.worst:
            better = best_p95(kept)
            over = f"{gain(better, load)} over {each.cell.name}"
            return [f"Risk: {base.name} has {over}, but {_loss(kept.worst, better)}"]
    if len(found) == 1:
        return _only(load, found[0])
    return [f"Keep {base.name} {load.where}: {_not_ahead(found)}"]


def _not_ahead(found: Sequence[Choice]) -> str:
    """3 changes are not ahead; 2 changes are not ahead, 5 not decided"""
    undecided = sum(each.verdict == UNDECIDED for each in found)
    rest = len(found) - undecided
    known = f"{words.plural(rest, 'change')} {'is' if rest == 1 else 'are'} not ahead" if rest else ""
    return ", ".join(filter(None, [known, f"{undecided} not decided" if undecided else ""]))


def best_of(each: Choice) -> Change:
    """What a configuration wins by: its throughput, or the p95 that is furthest ahead."""
    if each.verdict == FASTER_P95:
        return best_p95(each)
    assert each.throughput is not None
    return each.throughput


def best_p95(each: Choice) -> Change:
    """The p95 that is furthest ahead, of a configuration that has one ahead."""
    return min((one for one in each.p95.values() if one.call == AHEAD), key=lambda one: one.ratio)


def _only(load: MeasuredLoad, each: Choice) -> list[str]:
    """The run has one candidate, and it is not ahead."""
    if each.verdict == COSTS:
        assert each.throughput is not None
        return [f"Do not ship {each.brief}: {gain(each.throughput, load)}", _ttft(each)]
    clock = f" {_CLOCKS[each.throughput.clock]}" if each.throughput and not each.cell.simulated else ""
    call = f"tokens/s {_call(each.throughput)}{clock}"
    if each.verdict == TRADES_P95 and each.worst:
        better = best_p95(each)
        return [f"Risk: {each.brief} brings {gain(better, load)}, but {_loss(each.worst, better)}", call]
    if each.worst:
        return [f"Do not ship {each.brief}: {gain(each.worst, each.worst.cell.load)}", call]
    if all(one.decided for one in each.p95.values()):
        return [f"{words.upper_first(each.brief)} makes no difference: {call} {load.where}", _ttft(each)]
    return [f"Cannot tell if {each.brief} pays: {call} {load.where}", _ttft(each)]


def _alone(run: Run, cell: MeasuredCell) -> list[str]:
    """One configuration: what it delivered."""
    rates = spread(cell.throughput())
    if cell.doubt or rates is None:
        return [f"Cannot tell: {_doubt(run, cell)}"]
    bounds = f" ({words.tokens_per_s(rates.low)}–{words.tokens_per_s(rates.high)})" if rates.n > 1 else ""
    (ttft, few), whole = cell.percentile("ttft_ms", "p95"), "" if cell.has_steady_latency else " (whole run)"
    rate = f"{words.tokens_per_s(rates.median)} output tokens/s{bounds} {cell.clock} {cell.load.where}"
    return [
        f"{words.upper_first(cell.name)}: {rate}",
        f"p95 TTFT {words.ms(ttft)}{UNCERTAIN * few}{whole}" if ttft else "",
        "nothing to compare it with",
    ]


def _cannot_tell(run: Run, load: MeasuredLoad, base: MeasuredCell, found: Sequence[Choice]) -> list[str]:
    doubtful = [cell for cell in (base, *(each.cell for each in found)) if cell.doubt]
    if base.doubt or len(doubtful) > len(found) / 2:
        return [f"Cannot tell: {_doubt(run, doubtful[0])}"]
    name = found[0].brief if len(found) == 1 else f"{len(found)} changes"
    told = f"Cannot tell {name} from {base.name} {load.where}"
    seen = [each.throughput.would_show for each in found if each.throughput and each.throughput.would_show]
    if not seen:
        return [told, f"since nothing has an interval: it takes {FEWEST} repeats"]
    return [told, f"a change of {words.percent(max(seen))} would most likely have shown"]


def _doubt(run: Run, cell: MeasuredCell) -> str:
    """Why a cell cannot be compared, in a few words."""
    if cell.doubt == "refused":
        return f"{cell.name} refused {cell.count('failed')} of {cell.sent} requests {cell.load.where}"
    if cell.doubt == WRONG:
        return f"{cell.name} answered {cell.canaries['wrong']} of {cell.canaries['answered']} canaries wrongly"
    if not cell.doubt:
        return f"{cell.name} has no throughput {cell.load.where}"
    why = re.sub(r"^repeat \d+: ", "", (cell.invalid_reasons or ("no reason recorded",))[0])
    short = " ".join(re.split(r"[;:,(]| while ", why)[0].split()[:9]).rstrip(".")
    invalid = sum(each.doubt == "invalid" for each in run.cells)
    return f"{invalid} of {len(run.cells)} cells {'is' if invalid == 1 else 'are'} invalid ({short})"


# --- The answers ---


@dataclass(frozen=True)
class Answer:
    """One question: its subject, the verdict, the numbers. ``mark``: better | worse | risk | ""."""

    subject: str
    verdict: str
    evidence: str
    mark: str = ""


def answers(run: Run) -> list[Answer]:
    """Paging first, then page size, KV dtypes and each other setting changed alone; combinations last."""
    load = decided_load(run)
    base = baseline(run, load) if load else None
    if load is None or base is None:
        return []
    pair, alone, combined = paging_pair(run), {}, []
    for each in choices(run, load):
        changed = differing(each.cell, base)
        if len(changed) > 1:
            combined.append(each)
        elif changed and not (pair and changed == {"layout"}):
            alone.setdefault(*changed, []).append(each)
    rows = [_paging_answer(run, pair)] if pair else []
    for name in sorted(alone, key=lambda name: (name != "page_size", name != "kv_cache_dtype")):
        if name == "page_size":
            rows.append(_page_size_answer(run, alone[name], base))
        else:
            rows += [answer(run, each, _subject(name, each.cell)) for each in alone[name]]
    return rows + [answer(run, each, each.name) for each in combined[:_MOST_COMBINED]]


def _paging_answer(run: Run, pair: tuple[str, str]) -> Answer:
    """Paged against contiguous: the verdict of the highest load that has one, and the numbers of each load."""
    said, decided, reported = [], None, decided_load(run)
    for load in reversed(run.loads):
        paged, contiguous = (run.cell(name, load) for name in pair)
        if paged is None or contiguous is None:
            continue
        everywhere = paged_against(run, paged, contiguous)
        each = everywhere.here  # the other loads have words of their own
        where = f" {load.where}" if load != reported else ""
        if each.verdict == UNDECIDED and where:
            said.append(f"{paged.doubt or contiguous.doubt or UNDECIDED.lower()}{where}")
            continue
        if decided is None or decided.verdict == UNDECIDED:
            decided = everywhere
        ran, against = (words.decimal(median(cell.observed("running_mean"))) for cell in (paged, contiguous))
        beside = f", {ran} sequences at once as {paged.clock}, against {against}" if "–" not in (ran, against) else ""
        slo = [words.percent(cell.share_within_slo) for cell in (paged, contiguous)]
        met = f", {slo[0]} within the SLO as {paged.clock}, against {slo[1]}" if "–" not in slo else ""
        said.append(f"{numbers(run, each)}{where}{beside}{met}")
    verdict, mark = _with_quality(run, decided, decided.verdict) if decided else (UNDECIDED, "")
    return Answer("Paging", verdict, "; ".join(said), mark)


def paged_against(run: Run, paged: MeasuredCell, contiguous: MeasuredCell) -> Choice:
    """A paged cell against a contiguous one; as served only where neither is the baseline."""
    if paged.is_baseline:
        return choice(run, contiguous, paged).inverse()
    if contiguous.is_baseline:
        return choice(run, paged, contiguous)
    found = {metric: one for metric in METRICS if (one := served(paged, contiguous, metric))}
    return Choice(paged, contiguous, found.pop(THROUGHPUT, None), found)  # of neither side is engine time known


def _page_size_answer(run: Run, found: Sequence[Choice], base: MeasuredCell) -> Answer:
    """The page size that pays most among those whose answers are safe, else the baseline's."""
    ahead = wins(found)
    best = next(iter(safe_ones(run, ahead) or open_ones(run, ahead)), None)
    said = [
        f"{each.cell.settings.get('page_size')}: {_with_quality(run, each, each.verdict_words)[0].lower()}, "
        f"{numbers(run, each)}"
        for each in found
    ]
    unknown = ", others not decided" if all(each.verdict == UNDECIDED for each in found) else ""
    verdict, mark = f"Keep {base.settings.get('page_size')}{unknown}", ""
    if best is not None:
        size, (said_of_it, mark) = best.cell.settings.get("page_size"), _with_quality(run, best, best.verdict_words)
        verdict = f"Use {size}" if quality_of(run, best.cell).safe else f"{size} {said_of_it.lower()}"
    return Answer("Page size", verdict, "; ".join(said), mark)


def _subject(name: str, cell: MeasuredCell) -> str:
    value, title = value_words(name, effective(cell.settings, name)), setting_title(name)
    return value if name == "kv_cache_dtype" else title if value == "on" else f"{title}: {value}"


def answer(run: Run, each: Choice, subject: str) -> Answer:
    """One configuration, with its quality in the verdict: speed alone does not make it safe."""
    quality, quantised = quality_of(run, each.cell), is_quantised(each.cell)
    verdict, mark = _with_quality(run, each, each.verdict_words)
    hits = each.cell.hit_rate if effective(each.cell.settings, "enable_prefix_caching") else None
    extra = [
        _holds(each),
        str(quality) if not run.simulated and (quantised or quality.outside) else "",
        f"hit rate {words.percent(hits)} as {each.cell.clock}" if hits is not None else "",
        outlier_words(each.cell, server_facts(run, each.cell).get("kv_outliers") or {}) if quantised else "",
        saturation_words(each.cell),
    ]
    return Answer(words.upper_first(subject), verdict, ", ".join(filter(None, [numbers(run, each), *extra])), mark)


def _with_quality(run: Run, each: Choice, verdict: str) -> tuple[str, str]:
    """A verdict with what is wrong with the answers behind it, and its mark.

    That they were not measured is said of what one would set, and of a quantised KV.
    """
    quality, mark = quality_of(run, each.cell), _MARKS.get(verdict, "")
    if run.simulated:
        return verdict, mark
    said = each in wins([each]) or each.verdict == RISK or (is_quantised(each.cell) and each.verdict != COSTS)
    if quality.safe or not (quality.outside or (said and not each.cell.is_baseline)):
        return verdict, mark
    return f"{verdict}; {quality.verdict}", "worse" if quality.outside else ""


def numbers(run: Run, each: Choice) -> str:
    """The change of throughput, and the p95s that are decided."""
    if each.throughput is None:
        return f"no ratio{f' ({doubt})' if (doubt := each.cell.doubt or each.base.doubt) else ''}"
    shown = [each.throughput, *(one for one in each.p95.values() if one.call in (AHEAD, BEHIND))]
    said = [f"{'worse ' * (one.call == BEHIND)}{_amount(one)}{_other_clock(run, one)}" for one in shown]
    as_served = served(each.cell, each.base, THROUGHPUT) if each.throughput.clock == ENGINE_TIME else None
    if as_served and as_served.low is not None:  # of fewer repeats the ratio says nothing
        said.insert(1, f"served {amount(as_served.ratio)}{'' if as_served.decided else ' (not decided)'}")
    unknown = [METRICS[metric] for metric, one in each.p95.items() if one.call == OPEN]
    if unknown and each.verdict in (PAYS, NO_CHANGE):
        said.append(f"{words.listing(unknown)} not decided")
    if each.worst in each.elsewhere:
        said.append(f"but {_loss(each.worst, each.throughput)}")
    return ", ".join(said)


def _other_clock(run: Run, each: Change) -> str:
    """The clock of a change, where it is not the one of the answers."""
    return "" if each.clock == answers_clock(run) else f" {each.clock}"


def answers_clock(run: Run) -> str:
    """The clock that the answers are in where they do not say another: that of the reported load's figure."""
    load = decided_load(run)
    found = changes(run, load) if load else []
    return found[0].clock if found else run.clock
