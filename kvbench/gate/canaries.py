"""Judges whether the canaries of a run's loads were answered rightly: one finding a cell that had any.

With a KV in full precision one wrong answer fails the cell. A quantised KV answers some wrongly also on an idle engine
(quality.json has how many): its cell fails only if it answered more of them wrongly than chance explains.
"""

from __future__ import annotations

from kvbench.common.text import and_more
from kvbench.gate.verdict.verdict import FAIL, INVALID, PASS, Finding
from kvbench.metrics.canaries import ALPHA, WRONG_ANSWERS, chance_of_so_many, wrong_words
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.quality import QualityResult

SUITE = "limit"
_MOST_SHOWN = 3


def judge_canaries(run: Run, quality: QualityResult | None, doubt: str | None) -> tuple[Finding, ...]:
    """Judges each cell that had canaries. ``quality``: of this run; ``doubt``: why it does not belong to it."""
    return tuple(_judge(run, cell, quality, doubt) for cell in run.cells if cell.canaries)


def _judge(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> Finding:
    counts, where = cell.canaries, f"{run.workload}/{cell.cell_id}"
    wrong, answered = counts["wrong"], counts["answered"]
    details: tuple[str, ...] = ()
    if wrong:
        details = (f"what is needed to find out why: {cell.folder / WRONG_ANSWERS}",)
    if cell.wrong_answers:
        outcome = FAIL
        sentence = f"WRONG ANSWERS: {wrong_words(counts)}" if wrong else and_more(cell.wrong_answers, _MOST_SHOWN, "; ")
    elif not answered:
        outcome, sentence = INVALID, f"none of {counts['sent']} canaries was answered: see the failed requests first"
    elif not wrong:
        outcome, sentence = PASS, f"all {answered} canaries that were answered are right"
    else:
        outcome, sentence = _beside_offline(run, cell, quality, doubt)
    return Finding(
        id=f"{SUITE}/{where}/canaries",
        suite=SUITE,
        title=f"canaries of {where}",
        outcome=outcome,
        sentence=f"canaries of {where}: {sentence}",
        metric="canaries",
        unit="count",
        higher_is_better=False,
        candidate=float(wrong),
        figures={} if outcome == INVALID or not cell.wrong_answers else {"max": 0.0},
        details=details,
    )


def _beside_offline(run: Run, cell: MeasuredCell, quality: QualityResult | None, doubt: str | None) -> tuple[str, str]:
    """The outcome of a quantised cell with wrong answers, and its sentence."""
    figures = quality.configurations.get(cell.config_id) if quality and not quality.beside else None
    known = figures.canaries if figures else None
    if known is None or doubt:
        return INVALID, f"{wrong_words(cell.canaries)}; how many are on an idle engine is {_unknown(run, known, doubt)}"
    counts, asked, off = cell.canaries, known.asked, known.asked - known.right
    chance = chance_of_so_many(counts["wrong"], counts["answered"], counts["distinct"], off, asked)
    beside = f"{wrong_words(counts)}; on an idle engine {off} of {asked} are (p = {chance:.2g}, the limit is {ALPHA:g})"
    return (FAIL, f"WRONG ANSWERS, more than offline: {beside}") if chance < ALPHA else (PASS, beside)


def _unknown(run: Run, known: object, doubt: str | None) -> str:
    if known and doubt:
        return doubt
    if not run.is_built_in:
        return "not known of another engine: `kvbench quality --url` asks its server while it is idle"
    return f"not measured: run `kvbench quality {run.folder}`"
