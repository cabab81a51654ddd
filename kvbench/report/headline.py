"""The conclusion of a run in one sentence of at most 25 words."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence

from kvbench.common import text as words
from kvbench.effects.comparison import FEWEST, Call
from kvbench.metrics.definitions import ENGINE
from kvbench.report.answers import count_words, gain, in_clock, joined, loss, room_words, throughput_words, ttft_words
from kvbench.report.comparisons import THROUGHPUT, amount, signed_interval, spread
from kvbench.report.decision import Advice, Candidate, Decision, Worth
from kvbench.report.limits import growth_brief
from kvbench.report.quality import is_quantised
from kvbench.report.tables import UNCERTAIN
from kvbench.report.wording import say
from kvbench.runs.model import WRONG, MeasuredCell

MOST_WORDS = 25
_LONGEST_NAME = 7  # words


def headline(decision: Decision) -> str:
    """The decision in one sentence of at most 25 words; clauses that do not fit are among the answers."""
    run = decision.run
    incomplete = run.cells and (run.missing or run.status != "complete")
    prefix = say("headline.simulated", bool(run.simulated)) + say("headline.incomplete", bool(incomplete))
    clauses = [clause for clause in _CLAUSES.get(decision.conclusion.advice, _best)(decision) if clause]
    while len(clauses) > 1 and count_words(prefix + joined(*clauses)) > MOST_WORDS:
        clauses.pop()
    text = f"{prefix}{joined(*clauses)}."
    if count_words(text) > MOST_WORDS:
        text = re.sub(r" \([^()]* to [^()]*\)", "", text).replace(f" in {ENGINE} ", f" ({ENGINE}) ")
    if count_words(text) > MOST_WORDS:
        text = " ".join([*text.split()[:MOST_WORDS], "…"])
    return text


def brief_name(one: Candidate) -> str:
    """The name for the first sentence: of a long one, its first change and how many more there are."""
    if count_words(one.name) <= _LONGEST_NAME:
        return one.name
    first, more = re.split(" with |, | and ", one.name)[0], len(one.changed) - 1
    return say("headline.long_name", first=first, more=words.plural(more, "more change"))


# --- The clauses of each conclusion, the most important first ---


def _not_served(decision: Decision) -> list[str]:
    """Says what engine time knows where no load was finished over HTTP."""
    run = decision.run
    effects = getattr(run.engine_time, "effects", ())
    changes = [one for one in effects if one.metric == THROUGHPUT and one.call in (Call.BETTER, Call.WORSE)]
    if not changes:
        return [say("headline.no_load")]
    most = max(changes, key=lambda one: (one.call == Call.BETTER, abs(math.log(one.ratio))))
    change = {"cell": most.cell, "amount": amount(most.ratio), "interval": signed_interval(most.comparison)}
    return [say("headline.only_engine_time", bool(run.not_kept), clock=ENGINE, **change)]


def _alone(decision: Decision) -> list[str]:
    """Says what the only configuration delivered."""
    (cell,) = decision.comparisons.reported
    rates = spread(cell.throughput())
    if cell.doubt or rates is None:
        return _doubt(decision, cell)
    bounds = say("headline.bounds", rates.n > 1, rates=rates)
    (ttft, few), whole = cell.percentile("ttft_ms", "p95"), say("headline.whole_run", not cell.has_steady_latency)
    return [
        say("headline.alone", cell=cell, rates=rates, bounds=bounds),
        say("headline.alone_ttft", bool(ttft), ttft=ttft, mark=UNCERTAIN * few + whole),
        say("headline.nothing_to_compare"),
    ]


def _not_told(decision: Decision) -> list[str]:
    """Says why nothing is told apart: a doubtful cell, too few repeats, or effects smaller than would show."""
    candidates, base = decision.candidates, decision.base
    assert base is not None
    doubtful = [cell for cell in (base, *(one.cell for one in candidates)) if cell.doubt]
    if base.doubt or len(doubtful) > len(candidates) / 2:
        return _doubt(decision, doubtful[0])
    names = say("headline.changed", n=len(candidates), name=brief_name(candidates[0]))
    first = say("headline.cannot_tell", names=names, base=base)
    smallest = [one.throughput.smallest for one in candidates if one.throughput and one.throughput.smallest]
    if not smallest:
        return [first, say("headline.no_interval", fewest=FEWEST)]
    return [first, say("headline.smallest", change=max(smallest))]


def _doubt(decision: Decision, cell: MeasuredCell) -> list[str]:
    """Says in a few words why a cell cannot be compared."""
    if cell.doubt == "refused":
        return [say("headline.refused", cell=cell, failed=cell.count("failed"))]
    if cell.doubt == WRONG:
        return [say("headline.wrong", cell=cell)]
    if not cell.doubt:
        return [say("headline.no_throughput", cell=cell)]
    why = re.sub(r"^repeat \d+: ", "", (cell.invalid_reasons or ("no reason recorded",))[0])
    short = " ".join(re.split(r"[;:,(]| while ", why)[0].split()[:9]).rstrip(".")
    cells = decision.comparisons.cells
    invalid = sum(other.doubt == "invalid" for other in cells)
    return [say("headline.invalid", n=invalid, cells=len(cells), why=short)]


def _best(decision: Decision) -> list[str]:
    """The best configuration: to ship it, or what is known against it."""
    advice, best = decision.conclusion.advice, decision.conclusion.advised
    quality, change = best.quality, gain(best, best.won_by)
    first = say("headline.best", advice, name=brief_name(best), size=change, doubt=quality.doubt)
    beside = ttft_words(best) if best.verdict == Worth.PAYS else throughput_words(best)
    others = {
        Advice.SHIP: (beside, quality.brief * is_quantised(best.cell), room_words(best)),
        Advice.WOULD_BRING: (beside, growth_brief(decision.breaks), room_words(best)),
        Advice.OUTSIDE: (quality.brief,),
        Advice.UNMEASURED: (beside,),
    }
    return [words.upper_first(first), *others.get(advice, ())]


def _risk(decision: Decision) -> list[str]:
    one = decision.conclusion.advised
    assert one.throughput is not None
    change = gain(one, one.throughput)
    return [say("headline.risk", name=brief_name(one), gain=change, loss=loss(one, one.throughput))]


def _paging(decision: Decision) -> list[str]:
    """The paged baseline is kept for what it brings over contiguous, or has one p95 worse."""
    kept = decision.conclusion.advised
    names = {"name": kept.cell.name, "other": kept.base.name}
    if decision.conclusion.advice == Advice.PAGING_RISK:
        assert kept.best_p95 is not None
        return [say("headline.paging_risk", gain=gain(kept, kept.best_p95), loss=loss(kept, kept.best_p95), **names)]
    first = say("headline.keep_paging", gain=gain(kept, kept.won_by), **names)
    if kept.worst:
        return [first, say("answers.but", loss=loss(kept, kept.won_by))]
    return [first, _not_ahead([one for one in decision.candidates if one.cell is not kept.base])]


def _only(decision: Decision) -> list[str]:
    """The run has one candidate, and it is not ahead."""
    one = decision.conclusion.advised
    name, where = brief_name(one), one.cell.load.where
    if one.verdict == Worth.COSTS and one.throughput:
        return [say("headline.do_not_ship", name=name, loss=gain(one, one.throughput)), ttft_words(one)]
    call = throughput_words(one)
    if one.throughput:
        call += in_clock(one.throughput)
    if one.verdict == Worth.MIXED_P95 and one.best_p95:
        best = one.best_p95
        return [say("headline.risk", name=name, gain=gain(one, best), loss=loss(one, best)), call]
    if one.worst:
        load, worst = one.worst
        return [say("headline.do_not_ship", name=name, loss=gain(one, worst, load)), call]
    is_level = all(p95.decided for p95 in one.p95.values())
    first = say("headline.no_difference", is_level, name=name, call=call, where=where)
    return [words.upper_first(first), ttft_words(one)]


def _keep(decision: Decision) -> list[str]:
    base = decision.base
    assert base is not None
    return [say("headline.keep", base=base, others=_not_ahead(decision.candidates))]


def _not_ahead(candidates: Sequence[Candidate]) -> str:
    """Writes ``2 changes are not ahead, 5 not decided``."""
    undecided = sum(one.verdict == Worth.UNDECIDED for one in candidates)
    rest = len(candidates) - undecided
    return joined(say("headline.not_ahead", n=rest), say("headline.undecided", n=undecided))


_CLAUSES: Mapping[Advice, Callable[[Decision], list[str]]] = {
    Advice.NOT_SERVED: _not_served,
    Advice.ALONE: _alone,
    Advice.NO_BASELINE: lambda decision: [say("headline.no_baseline", load=decision.load)],
    Advice.NOT_TOLD: _not_told,
    Advice.RISK: _risk,
    Advice.PAGING: _paging,
    Advice.PAGING_RISK: _paging,
    Advice.ONLY: _only,
    Advice.KEEP: _keep,
}
"""The clauses of each conclusion; of those that are missing, `_best`."""
