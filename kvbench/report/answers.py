"""The report's answers in words: at most 12 each, with the numbers behind them; and the words for one effect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from kvbench.common import text as words
from kvbench.effects.comparison import Call, Comparison
from kvbench.metrics.definitions import ENGINE, figure
from kvbench.report.comparisons import THROUGHPUT, TTFT, interval, median, served
from kvbench.report.decision import Candidate, Decision, Question, SettingAnswer, Worth, wins
from kvbench.report.provenance import server_facts
from kvbench.report.quality import is_quantised, outlier_words, saturation_words
from kvbench.report.wording import say
from kvbench.runs.model import MeasuredCell, MeasuredLoad
from kvbench.workload.settings import effective, setting_title, value_words

MOST_WORDS = 12  # of an answer
_MARKS = {
    Worth.PAYS: "better",
    Worth.BETTER_P95: "better",
    Worth.RISK: "risk",
    Worth.MIXED_P95: "risk",
    Worth.COSTS: "worse",
    Worth.WORSE_P95: "worse",
}
_BY_THROUGHPUT = (Worth.PAYS, Worth.PAYS_LITTLE, Worth.RISK, Worth.COSTS)
_BY_P95 = (Worth.BETTER_P95, Worth.MIXED_P95)


@dataclass(frozen=True)
class ReportAnswer:
    """A question and its answer.

    verdict: begins the answer; sizes: the largest effects, as far as 12 words hold them; numbers: all of them, folded
    mark: better | worse | risk | ""
    """

    subject: str
    verdict: str
    sizes: str
    numbers: str
    mark: str = ""

    @property
    def text(self) -> str:
        """Pays, at a risk: 2.1x tokens/s, but p95 ITL 17x"""
        return ": ".join(filter(None, (self.verdict, self.sizes)))


def count_words(text: str) -> int:
    """Words as a reader counts them: whatever holds a letter or a digit."""
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def joined(*clauses: str) -> str:
    """The clauses that say something, with commas between them."""
    return ", ".join(filter(None, clauses))


# --- One effect ---


def effect(comparison: Comparison) -> str:
    """Writes ``+16 % tokens/s (13 to 20)`` or ``p95 TTFT −24 % (−36 to −8.8)``."""
    return _effect(comparison, interval(comparison))


def size(comparison: Comparison) -> str:
    """Writes ``+16 % tokens/s`` or ``p95 TTFT −24 %``."""
    return _effect(comparison, "")


def _effect(comparison: Comparison, bounds: str) -> str:
    title = figure(comparison.metric).title
    return say("answers.effect", comparison.metric, title=title, ratio=comparison.ratio, interval=bounds)


def gain(one: Candidate, comparison: Comparison, load: MeasuredLoad | None = None) -> str:
    """Writes ``+16 % tokens/s (13 to 20) in engine time at 32 at once``."""
    where = (load or one.cell.load).where
    return say("answers.gain", effect=effect(comparison), clock=in_clock(comparison), where=where)


def in_clock(comparison: Comparison) -> str:
    """The clock behind an effect, with the space before it; empty in a simulation, which is named before."""
    return say("answers.in_clock", comparison.clock)


def loss(one: Candidate, beside: Comparison) -> str:
    """Writes the worst loss, with clock and load where they are others: ``−20 % tokens/s served at 3 at once``."""
    assert one.worst is not None
    load, worst = one.worst
    clock, where = in_clock(worst) * (worst.clock != beside.clock), load.where * (load != one.cell.load)
    return say("answers.loss", size=size(worst), clock=clock, where=where).rstrip()


def ttft_words(one: Candidate) -> str:
    """Writes ``p95 TTFT −24 %``, with its clock where the throughput has another; empty without a p95 TTFT."""
    comparison = one.p95.get(TTFT)
    if comparison is None:
        return ""
    other = one.throughput is not None and one.throughput.clock != comparison.clock
    clock = say("answers.clock", other, clock=comparison.clock)
    return say("answers.ttft", comparison.call, ratio=comparison.ratio) + clock


def throughput_words(one: Candidate) -> str:
    """Writes ``tokens/s level`` or ``tokens/s not decided``."""
    return say("answers.throughput", one.throughput_call)


def room_words(one: Candidate) -> str:
    """Writes ``4.0x the tokens``, which fit into the same bytes; empty below a tenth more."""
    return say("answers.room", one.room is not None, times=one.room)


def numbers(decision: Decision, one: Candidate) -> str:
    """The change of throughput, and the p95s that are decided."""
    if one.throughput is None:
        return say("answers.no_ratio", doubt=one.cell.doubt or one.base.doubt)
    decided = [p95 for p95 in one.p95.values() if p95.call in (Call.BETTER, Call.WORSE)]
    texts = [_number(decision, comparison) for comparison in (one.throughput, *decided)]
    as_served = served(one.cell, one.base, THROUGHPUT)
    if one.throughput.clock == ENGINE and as_served and as_served.low is not None:  # else the ratio says nothing
        texts.insert(1, say("answers.as_served", as_served.call, ratio=as_served.ratio))
    undecided = words.listing([figure(metric).title for metric, p95 in one.p95.items() if not p95.decided])
    is_named = bool(undecided) and one.verdict in (Worth.PAYS, Worth.NO_CHANGE)
    texts.append(say("answers.undecided", is_named, names=undecided))
    if one.worst in one.elsewhere:
        texts.append(say("answers.but", loss=loss(one, one.throughput)))
    return joined(*texts)


def _number(decision: Decision, comparison: Comparison) -> str:
    clock = say("answers.clock", comparison.clock != decision.clock, clock=comparison.clock)
    return say("answers.number", comparison.call, effect=effect(comparison)) + clock


# --- The answers ---


def report_answers(decision: Decision) -> tuple[ReportAnswer, ...]:
    """The answers of a run in words, in their order."""
    made = {Question.PAGING: _paging, Question.PAGE_SIZE: _page_size}
    return tuple(made.get(answer.subject, _setting)(decision, answer) for answer in decision.answers)


def _setting(decision: Decision, answer: SettingAnswer) -> ReportAnswer:
    (one,) = answer.candidates
    subject = one.name
    if answer.subject == Question.SETTING:
        value = value_words(answer.setting, effective(one.cell.settings, answer.setting))
        form = {"kv_cache_dtype": "value"}.get(answer.setting, value)
        subject = say("answers.subject", form, title=setting_title(answer.setting), value=value)
    return candidate_answer(decision, one, subject)


def candidate_answer(decision: Decision, one: Candidate, subject: str = "") -> ReportAnswer:
    """Answers on one configuration, with its quality in the verdict: speed alone does not make it safe."""
    verdict, mark = _with_quality(decision, one, one.graded)
    parts = (numbers(decision, one), room_words(one), *_other_facts(decision, one))
    return ReportAnswer(words.upper_first(subject or one.name), verdict, _sizes(one, verdict), joined(*parts), mark)


def _other_facts(decision: Decision, one: Candidate) -> Iterator[str]:
    """The quality of its answers, its hit rate, and what a quantised KV does to K and V."""
    quality, cell, quantised = one.quality, one.cell, is_quantised(one.cell)
    measured = quality.figures or quality.canaries or quality.wrong
    if measured and not decision.run.simulated and (quantised or quality.outside):
        yield str(quality)
    if cell.hit_rate is not None and effective(cell.settings, "enable_prefix_caching"):
        yield say("answers.hit_rate", cell=cell)
    if quantised:
        yield outlier_words(cell, server_facts(decision.run, cell).kv_outliers)
    yield saturation_words(cell)


def _paging(decision: Decision, answer: SettingAnswer) -> ReportAnswer:
    """Answers on paging: the verdict of the highest load that has one, and the numbers of each load."""
    texts = []
    for pair in answer.candidates:
        here = pair.here  # the other loads have words of their own
        where = say("answers.where", pair.cell.load != decision.load, where=pair.cell.load.where)
        if where and here.verdict == Worth.UNDECIDED:
            doubt = pair.cell.doubt or pair.base.doubt
            texts.append((doubt or say("answers.verdict", Worth.UNDECIDED).lower()) + where)
        else:
            texts.append(f"{numbers(decision, here)}{where}{_beside_each_other(pair.cell, pair.base)}")
    subject, one = say("answers.paging"), answer.decided
    if one is None:
        return ReportAnswer(subject, say("answers.verdict", Worth.UNDECIDED), "", "; ".join(texts))
    verdict, mark = _with_quality(decision, one, one.verdict)
    return ReportAnswer(subject, verdict, _sizes(one, verdict), "; ".join(texts), mark)


def _beside_each_other(paged: MeasuredCell, contiguous: MeasuredCell) -> str:
    """Adds what both served, as far as it is known: ``, 24.0 sequences at once as served, against 8.1``."""
    cells, text = (paged, contiguous), ""
    for what, (here, there) in (
        ("sequences", [words.decimal(median(cell.observed("running_mean"))) for cell in cells]),
        ("slo", [words.percent(cell.share_within_slo) for cell in cells]),
    ):
        if "–" not in (here, there):
            text += say("answers.beside", what, here=here, there=there, clock=paged.clock)
    return text


def _page_size(decision: Decision, answer: SettingAnswer) -> ReportAnswer:
    """The page size that pays most among those whose answers are safe, else the baseline's."""
    texts = []
    for one in answer.candidates:
        verdict, _ = _with_quality(decision, one, one.graded)
        texts.append(f"{one.cell.page_size}: {verdict.lower()}, {numbers(decision, one)}")
    subject, best = say("answers.page_size"), answer.decided
    if best is None:
        undecided = all(one.verdict == Worth.UNDECIDED for one in answer.candidates)
        kept = say("answers.keep_size", undecided, size=answer.candidates[0].base.page_size or say("answers.default"))
        reason = say("answers.unsafe_sizes", bool(wins(answer.candidates)))
        reason = reason or say("answers.no_better_size", not undecided)
        return ReportAnswer(subject, kept, reason, "; ".join(texts))
    verdict, mark = _with_quality(decision, best, best.graded)
    verdict = say("answers.use_size", best.quality.safe, size=best.cell.page_size, verdict=verdict.lower())
    return ReportAnswer(subject, verdict, _sizes(best, verdict), "; ".join(texts), mark)


def _with_quality(decision: Decision, one: Candidate, graded: Worth) -> tuple[str, str]:
    """A verdict with what is wrong with the answers behind it, and its mark.

    That they were not measured is said of what one would set, and of a quantised KV.
    """
    verdict, quality = say("answers.verdict", graded), one.quality
    unsaid = not quality.outside and (one.cell.is_baseline or not one.would_be_set)
    if decision.run.simulated or quality.safe or unsaid:
        return verdict, _MARKS.get(graded, "")
    return f"{verdict}; {quality.verdict}", "worse" * bool(quality.outside)


def _sizes(one: Candidate, verdict: str) -> str:
    """The effects that the verdict rests on, as many as 12 words hold beside it."""
    clauses = []
    if one.graded in _BY_THROUGHPUT and one.throughput:
        clauses.append(size(one.throughput))
    elif one.graded in _BY_P95 and one.best_p95:
        clauses.append(size(one.best_p95))
    beside = one.throughput or one.best_p95
    if one.worst and beside and one.verdict != Worth.COSTS:
        shorter = say("answers.short_loss", one.worst[0] != one.cell.load, size=size(one.worst[1]))
        return _first_that_fits(verdict, _after(clauses, loss(one, beside)), _after(clauses, shorter), shorter)
    if one.best_p95 and one.verdict == Worth.PAYS:
        clauses.append(size(one.best_p95))
    with_room = joined(*clauses, room_words(one) * (one.verdict != Worth.NO_CHANGE))
    return _first_that_fits(verdict, with_room, joined(*clauses), joined(*clauses[:1]))


def _after(gains: Sequence[str], loss_text: str) -> str:
    """The loss alone, or after what is gained."""
    return joined(*gains, say("answers.but", loss=loss_text)) if gains else loss_text


def _first_that_fits(verdict: str, *texts: str) -> str:
    """The first text that makes at most 12 words with the verdict; empty where none does."""
    room = MOST_WORDS - count_words(verdict)
    return next((text for text in texts if count_words(text) <= room), "")
