"""The one sentence at the top: what paging bought and what it cost, and nothing the data do not show."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvbench.common import text as words
from kvbench.report.comparisons import (
    FEWEST,
    HIGHER,
    LOWER,
    NOT_TOLD,
    SAME,
    UNCLEAR,
    Best,
    PairedComparison,
    Ratio,
    baseline,
    best,
    compare,
    differing,
    paging,
    scatters,
    spread,
)
from kvbench.report.validity import validity
from kvbench.runs.kv_ledger import swapped_bytes
from kvbench.runs.model import MeasuredCell, Run

WORDS = {SAME: "level", HIGHER: "ahead", LOWER: "behind", UNCLEAR: NOT_TOLD}


def headline(run: Run) -> str:
    """One honest sentence with numbers and their spread; prefixed when the run is incomplete."""
    if not run.cells:
        return "Nothing was measured: this run holds no finished cell."
    prefix = ""
    if run.missing:
        prefix = f"Incomplete run ({len(run.cells)} of {len(run.cells) + len(run.missing)} cells measured): "
    elif validity(run).status == "incomplete":
        prefix = "Incomplete run: "
    pairs = paging(run)
    return prefix + (paging_sentence(pairs) if pairs else no_pair_sentence(run))


def paging_sentence(pairs: list[PairedComparison]) -> str:
    """`pairs`: paged against contiguous, loads ascending, at least one."""
    high = pairs[-1]
    if high.throughput is None:
        return (
            f"No verdict: {high.a.name} and {high.b.name} share no repeat with a measured throughput "
            f"at {high.load.label}."
        )
    clauses = [_throughput_clause(high) + _why(high)]
    if high.load.mode == "open" and high.ttft is not None:
        clauses.append(f"its p95 TTFT was {_instead(high, 'ttft_ms', 'p95')}")
    if len(pairs) > 1:
        clauses.append(_low_clause(pairs[0]))
    clauses += _price_clauses(high) + _scatter_clauses(high) + _failure_clauses(high)
    sentence = "; ".join(clauses) + "."
    if high.valid:
        return f"No verdict: {lower_first(sentence)}" if high.throughput.verdict == UNCLEAR else sentence
    return (
        f"No verdict, the measurement at {high.load.label} is invalid ({_why_invalid(high)}). "
        f"Seen, not to be relied on: {lower_first(sentence)}"
    )


def _why_invalid(c: PairedComparison) -> str:
    """The first reason of the first invalid cell without its advice; the others are in the report."""
    broken = [cell for cell in (c.a, c.b) if not cell.valid]
    reasons = [reason for cell in broken for reason in cell.invalid_reasons] or ["no reason recorded"]
    first = re.sub(r"^repeat \d+: ", "", reasons[0]).split(";")[0].rstrip(".")
    more = f", and {words.plural(len(reasons) - 1, 'more reason')}" if len(reasons) > 1 else ""
    return f"{broken[0].name}: {first}{more}"


def no_pair_sentence(run: Run) -> str:
    """What can be said when paged and contiguous were not measured under a common load."""
    has_paged, has_contiguous = any(c.is_paged for c in run.cells), any(c.is_contiguous for c in run.cells)
    if not _asks_about_layouts(run):
        why = ""
    elif has_paged and has_contiguous:
        why = "Paged and contiguous share no load in this run, so it cannot say what paging bought. "
    elif has_paged:
        why = "Without a contiguous cell this run cannot say what paging bought. "
    elif has_contiguous:
        why = "Without a paged cell this run cannot say what paging bought. "
    else:
        why = ""
    return why + best_sentence(run)


def _asks_about_layouts(run: Run) -> bool:
    """Whether the workload varies the layout; so it is taken where the manifest does not tell."""
    workload = run.manifest.get("workload")
    swept = workload.get("sweep") if isinstance(workload, Mapping) else None
    return not isinstance(swept, Mapping) or "layout" in swept


def best_sentence(run: Run) -> str:
    """The best configuration at the highest load."""
    load = run.loads[-1]
    top = best(run, load)
    if top is None:
        return f"No verdict: no cell at {load.label} is valid."
    s = top.throughput
    amount = f"{words.tokens_per_s(s.median)} output tokens/s ({bounds(s.low, s.high, s.n)})"
    ttft, tpot = top.cell.percentile("ttft_ms", "p95")[0], top.cell.percentile("tpot_ms", "p50")[0]
    latency = f"p95 TTFT {words.ms(ttft)}, median TPOT {words.ms(tpot)}"
    failed = top.cell.count("failed")
    tail = f"; {failed} of its {failed + top.cell.count('completed')} requests failed" if failed else ""
    scatter = "; its repeats scatter" if scatters(top.cell) else ""
    if top.by_default:
        alone = f"Only {top.cell.name} was validly measured at {load.label}, so there is nothing to compare: "
        return f"{alone}{amount}, {latency}{scatter}{tail}."
    if len(run.at(load)) == 1:
        return f"{words.upper_first(top.cell.name)} delivered {amount} at {load.label}, {latency}{scatter}{tail}."
    if top.unclear_with:
        return (
            f"No verdict on which is best at {load.label}: {top.cell.name} has the highest median, "
            f"{amount}{_versus(run, top)}, {latency}{scatter}{tail}."
        )
    return f"At {load.label} {top.cell.name} delivered the most: {amount}{_versus(run, top)}, {latency}{scatter}{tail}."


def _versus(run: Run, top: Best) -> str:
    base = baseline(run, top.load)
    against = ""
    if base is not None and not base.valid:
        against = f" (of the baseline {base.name} there is no valid measurement)"
    elif base is not None and base is not top.cell and (r := compare(top.cell, base).throughput) is not None:
        against = f", {effect(r)} the baseline {base.name}"
    return against + "".join(f", {text}" for text in rivals(top))


def rivals(top: Best) -> list[str]:
    """ "level with a and b", "not told apart from c"; many of a kind are counted."""

    def those(names: tuple[str, ...]) -> str:
        return words.listing(names) if len(names) <= 3 else f"{len(names)} others"

    kinds = (("level with", top.level_with), (f"{NOT_TOLD} from", top.unclear_with))
    return [f"{what} {those(names)}" for what, names in kinds if names]


def effect(r: Ratio, repeats: bool = True) -> str:
    """1.90x (1.85–1.96 over 3 repeats), and what keeps it from a verdict, if anything."""
    text = f"{words.ratio(r.median)} ({words.spread(r.low, r.high, r.n, repeats)}"
    if 1 < r.n < FEWEST:
        text += ", too few for a verdict"
    elif r.verdict == UNCLEAR and r.ci is not None:
        text += f"; 95 % t interval {words.ratio(r.ci[0])[:-1]}–{words.ratio(r.ci[1])[:-1]} includes 1"
    return text + ")"


def bounds(low: float, high: float, n: int, repeats: bool = True) -> str:
    """The spread of an amount: 297–324 over 3 repeats."""
    if n < 2:
        return "one repeat, so no spread"
    return f"{words.tokens_per_s(low)}–{words.tokens_per_s(high)}{f' over {n} repeats' if repeats else ''}"


def lower_first(text: str) -> str:
    """The other way round, to go on after a colon."""
    return text[:1].lower() + text[1:]


def _throughput_clause(c: PairedComparison) -> str:
    assert c.throughput is not None
    where = f"At {c.load.label}{_budget(c)}, {c.a.name}"
    also = sorted(differing(c.a, c.b) - {"layout"})
    caveat = f" (they differ in {words.listing(also)} too)" if also else ""
    amount = effect(c.throughput)
    if c.throughput.verdict == UNCLEAR:
        return f"{where} is {NOT_TOLD} from {c.b.name}{caveat} in output tokens/s: {amount}"
    if c.throughput.verdict == SAME:
        return f"{where} was level with {c.b.name}{caveat} in output tokens/s: {amount}"
    if c.throughput.verdict == LOWER:
        return f"{where} was slower than {c.b.name}{caveat}: {amount} its output tokens/s"
    return f"{where} delivered {amount} the output tokens/s of {c.b.name}{caveat}"


def _budget(c: PairedComparison) -> str:
    mine, theirs = c.a.capacity.get("kv_budget_bytes"), c.b.capacity.get("kv_budget_bytes")
    if not mine or not theirs:
        return ""
    if mine == theirs:
        return f" and the same {words.data_size(mine)} of KV"
    return f" and unequal KV budgets ({words.data_size(mine)} against {words.data_size(theirs)})"


def running(cell: MeasuredCell) -> float | None:
    """Mean sequences running at once in the steady window, median over repeats."""
    found = spread(cell.observed("running_mean"))
    return found.median if found else None


def _why(c: PairedComparison) -> str:
    mine, theirs = running(c.a), running(c.b)
    if mine is None or theirs is None:
        return ""
    numbers = f"{words.decimal(mine)} sequences at once"
    if c.throughput is not None and c.throughput.verdict == HIGHER and mine > 1.1 * theirs:
        return f", while it ran {numbers} instead of {words.decimal(theirs)}"
    return f", running {numbers} against {words.decimal(theirs)}"


def _low_clause(c: PairedComparison) -> str:
    at = f"at {c.load.tick}"
    if c.throughput is None:
        return f"{at} nothing could be compared"
    if not c.valid:
        return f"{at} there is no verdict (invalid measurement)"
    verb = "they are" if c.throughput.verdict == UNCLEAR else "it was"
    return f"{at} {verb} {WORDS[c.throughput.verdict]}, {effect(c.throughput)}"


def _instead(c: PairedComparison, metric: str, which: str) -> str:
    mine, theirs = c.a.percentile(metric, which), c.b.percentile(metric, which)
    doubt = ", from too few samples to be certain" if mine[1] or theirs[1] else ""
    return f"{words.ms(mine[0])} instead of {words.ms(theirs[0])}{doubt}"


def _preempted(cell: MeasuredCell, preemptions: float) -> str:
    recomputed, moved = cell.counter("recomputed_tokens_total"), swapped_bytes(cell)
    details = [f"{words.count(recomputed)} tokens recomputed"] if recomputed else []
    details += [f"{words.data_size(moved)} swapped out"] if moved else []
    repeats = f" in {len(cell.repeats)} repeats" if len(cell.repeats) > 1 else ""
    return words.plural(preemptions, "preemption") + repeats + (f" ({words.listing(details)})" if details else "")


def _price_clauses(c: PairedComparison) -> list[str]:
    """What paged paid at this load. "No price" needs a TPOT that is level by the rule, and counted preemptions."""
    preemptions = c.a.counter("num_preemptions_total")
    ahead = c.throughput is not None and c.throughput.verdict == HIGHER
    price = []
    if c.tpot is not None and c.tpot.verdict == HIGHER:
        price.append(f"median TPOT {_instead(c, 'tpot_ms', 'p50')}")
    if preemptions:
        price.append(_preempted(c.a, preemptions))
    clauses = [f"{'the price' if ahead else 'on top of that'}: {' and '.join(price)}"] if price else []
    if c.tpot is None or c.tpot.verdict == HIGHER:
        return clauses
    if c.tpot.verdict == SAME and preemptions == 0 and ahead:
        return [f"no price shows: median TPOT level, {effect(c.tpot, repeats=False)}, and no preemptions"]
    if c.tpot.verdict == SAME:
        return [*clauses, f"median TPOT level, {effect(c.tpot, repeats=False)}"]
    numbers = f"median TPOT {_instead(c, 'tpot_ms', 'p50')}"
    if c.tpot.verdict == UNCLEAR:
        numbers += f", {NOT_TOLD}: {effect(c.tpot, repeats=False)}"
    return [*clauses, numbers]


def _scatter_clauses(c: PairedComparison) -> list[str]:
    parts = [
        f"{cell.name} {words.tokens_per_s(s.low)}–{words.tokens_per_s(s.high)} output tokens/s"
        for cell in (c.a, c.b)
        if (s := scatters(cell))
    ]
    return [f"the repeats scatter ({', '.join(parts)})"] if parts else []


def _failure_clauses(c: PairedComparison) -> list[str]:
    return [
        f"{cell.count('failed')} of {cell.count('failed') + cell.count('completed')} requests of {cell.name} "
        "failed and are in no number here"
        for cell in (c.a, c.b)
        if cell.count("failed")
    ]
