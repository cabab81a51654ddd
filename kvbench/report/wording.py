"""Sentences that several parts of the report share: templates filled in with numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvbench.common import text as words
from kvbench.report.comparisons import PairedComparison, baseline, best, paging, ratio_to_reference
from kvbench.runs.kv_ledger import ledger
from kvbench.runs.model import WRONG, MeasuredCell, Run
from kvbench.runs.ratios import FEWEST, SAME, UNCLEAR, Ratio
from kvbench.workload.settings import effective

Render = Callable[[float | None], str]
NOT_TOLD = "not told apart"
RATIO_MARKS = f"≈ means level, ? {NOT_TOLD} from 1"
_DOUBT = {
    "": "",
    "invalid": " Invalid measurement, not to be relied on.",
    "refused": " The server refused requests, so it did less work: not to be compared.",
    WRONG: " Canaries were answered wrongly: not to be relied on.",
}


def marked_ratio(r: Ratio) -> str:
    """1.65x; ≈1.02x when level; 1.65x? when not told apart from 1."""
    return marked(r.median, r.verdict)


def marked(ratio: float, verdict: str) -> str:
    """A ratio with the mark of its verdict, as ``RATIO_MARKS`` explains."""
    return f"{'≈' if verdict == SAME else ''}{words.ratio(ratio)}{'?' if verdict == UNCLEAR else ''}"


def smallest_effects(ratios: Mapping[str, Sequence[Ratio | None]]) -> str:
    """What these repeats could have shown at least, from the least scattered row to the most; ``ratios``: by metric.

    Empty where there is no ratio.
    """
    if not any(r for each in ratios.values() for r in each):
        return ""
    found = []
    for metric, each in ratios.items():
        if sizes := sorted(r.detectable for r in each if r and r.detectable is not None):
            low, high = (words.percent(size) for size in (sizes[0], sizes[-1]))
            found.append(f"{low if low == high else f'{low} to {high}'} in {metric}")
    if not found:
        return f"Fewer than {FEWEST} repeats have no interval, so no verdict on them."
    return f"Smallest effect that these repeats could show (80 % power at 95 %), by row: {', '.join(found)}."


def sensitivity(run: Run) -> str:
    """``smallest_effects`` of the ratios to the reference in the table of all cells."""
    return smallest_effects({"output tok/s": [ratio_to_reference(run, cell) for cell in run.cells if cell.valid]})


def served_words(cell: MeasuredCell) -> str:
    """served 20 of 48 requests and refused the others (28 of 48: "Context size has been exceeded.")"""
    why = words.failure_words(cell.failure_messages, cell.sent)
    return f"served {cell.count('completed')} of {cell.sent} requests and refused the others ({why})"


def reservation(c: PairedComparison) -> str:
    """What contiguous reserves for a request, and what requests needed; empty where that is not known."""
    slots = c.b.settings.get("max_model_len") or c.b.capacity.get("max_model_len")
    requests = c.b.requests()
    if effective(c.b.settings, "reservation") != "max" or not slots or requests.empty:
        return ""
    tokens = requests["prompt_tokens"] + requests["output_tokens"]
    return (
        f"{words.upper_first(c.b.name)} reserves {words.count(slots)} slots per request; the longest request here had "
        f"{words.plural(int(tokens.max()), 'token')}, the mean {words.count(float(tokens.mean()))}."
    )


def ledger_sentence(run: Run) -> str:
    """Where the bytes of the headline's pair went, else those of the baseline or the best; "" without data."""
    pairs = [p for p in paging(run) if ledger(p.a) and ledger(p.b)]
    if pairs:
        c = pairs[-1]
        text = f"At {c.load.label} {_filled(c.b, ' of the KV budget')}; {_filled(c.a)}."
        return text + _DOUBT[c.doubt]
    for load in reversed(run.loads):
        cell = baseline(run, load) or best(run, load)
        if cell is not None and ledger(cell):
            return f"At {load.label} {_filled(cell, ' of the KV budget')}."
    return ""


def _filled(cell: MeasuredCell, whole: str = "") -> str:
    found = ledger(cell)
    assert found is not None
    tokens, waste = (words.percent(found.share(use)) for use in ("tokens", "waste"))
    more = [
        f"{words.percent(found.share(use))} {what}"
        for use, what in (("fragmented", "free but scattered"), ("cached", "cached"), ("free", "free"))
        if found.share(use) >= 0.01
    ]
    text = f"{cell.name} held tokens in {tokens}{whole} and wasted {waste} on slots reserved and empty"
    return f"{text} ({', '.join(more)})" if more else text
