"""The parts of a report, each of a run alone: a report computes once what they share."""

from __future__ import annotations

from collections.abc import Iterator
from unittest import mock

import pandas as pd

from kvbench.common.text import slo_words
from kvbench.effects.comparison import Comparison
from kvbench.report import (
    cells,
    document,
    engine_time,
    hits,
    limits,
    quality,
    samples,
    style,
    terminal,
)
from kvbench.report import kv as kv_chapter
from kvbench.report.comparisons import Comparisons
from kvbench.report.decision import Candidate, Decision
from kvbench.report.figures import distributions, effects, frontier, heat_map, kv, price, registry
from kvbench.report.provenance import random_weights
from kvbench.report.style import Drawing
from kvbench.report.tables import NO_TABLE, ReportTable, Section
from kvbench.runs.model import MeasuredCell, MeasuredLoad, Run


def change(run: Run, cell: MeasuredCell, metric: str) -> Comparison | None:
    return Comparisons.of(run).decisive[cell.cell_id].get(metric)


def candidate(run: Run, cell: MeasuredCell) -> Candidate:
    return next(one for one in Decision.of(run).by_load[cell.load] if one.cell is cell)


def plain_document(run: Run, price_per_hour: float | None = None) -> document.Document:
    """The report without figures, which take nine tenths of its time."""
    first = (mock.patch.object(module, "drawing", return_value=None) for module in (effects, frontier))
    with next(first), next(first), mock.patch.dict(registry.FIGURES, clear=True):
        return document.document(run, price_per_hour)


def main_table(run: Run) -> ReportTable:
    slo = slo_words(run.load_section.get("slo"))
    return cells.main_table(Comparisons.of(run), slo, run.cache_state if run.load_section else "")


def flat_rows(run: Run) -> list[dict]:
    return cells.flat_rows(main_table(run), Comparisons.of(run))


def class_table(run: Run) -> ReportTable:
    return cells.group_parts(run.by_load)[0].table


def turn_table(run: Run) -> ReportTable:
    return cells.group_parts(run.by_load)[1].table


def engine_time_console(run: Run) -> object:
    return terminal.engine_time_console(plain_document(run))


def engine_time_table(run: Run) -> ReportTable:
    return engine_time.engine_time_table(Comparisons.of(run), run.engine_time)


def engine_time_note(run: Run) -> str:
    return engine_time.engine_time_note(run.engine_time) if run.engine_time else ""


def limit_lines(run: Run) -> list[limits.LimitLine]:
    return limits.limit_lines(Decision.of(run).limits, Comparisons.of(run).names)


def growth(run: Run) -> tuple[str, ReportTable]:
    """The sentence and the table of the chapter on growing loads."""
    parts = list(limits.growth_parts(Decision.of(run).breaks, limits.sized_loads(Comparisons.of(run))))
    sentences = [part for part in parts if isinstance(part, str)]
    (section,) = (part for part in parts if isinstance(part, Section))
    return "".join(sentences), section.table


def hit_ledgers(run: Run) -> list[hits.HitLedger]:
    return hits.hit_ledgers(run, run.by_load)


def answer_sentences(run: Run) -> Iterator[str]:
    if run.quality:
        made = Decision.of(run)
        yield from quality.answer_sentences(run, run.quality, made.comparisons.names)
        yield from prices(run)


def prices(run: Run) -> list[str]:
    made = Decision.of(run)
    return list(quality.prices(made.comparisons, made.qualities)) if run.quality else []


def price_frame(run: Run) -> pd.DataFrame:
    made = Decision.of(run)
    return price.price_frame(made.comparisons, made.qualities)


def price_drawing(run: Run) -> Drawing | None:
    made = Decision.of(run)
    look = style.looks(run.cells)
    return price.price_drawing(run.quality, made.comparisons, made.qualities, look) if run.quality else None


def answer_quality_table(run: Run) -> ReportTable:
    return quality.answer_quality_table(run.quality, Comparisons.of(run)) if run.quality else NO_TABLE


def passkey_table(run: Run) -> ReportTable:
    names = {cell.config_id: cell.name for cell in run.cells}
    return quality.passkey_table(run.quality, names) if run.quality else NO_TABLE


def shown_cells(run: Run, load: MeasuredLoad) -> list[MeasuredCell]:
    return kv.shown_cells(Decision.of(run), load, ledgers(run))[0]


def timeline_drawing(run: Run, load: MeasuredLoad) -> Drawing | None:
    return kv.timeline_drawing(Decision.of(run), load, ledgers(run))


def memory_table(run: Run) -> ReportTable:
    return kv_chapter.memory_table(run.cells, run.manifest)


def output_samples(run: Run) -> samples.OutputSamples | None:
    return samples.output_samples(Comparisons.of(run), random_weights(run))


def heat_map_frame(run: Run, load: MeasuredLoad) -> pd.DataFrame:
    return heat_map.heat_map(run, Comparisons.of(run), load)


def heat_map_drawing(run: Run) -> Drawing | None:
    return heat_map.drawing(run, Comparisons.of(run))


def effects_drawing(run: Run) -> Drawing | None:
    return effects.drawing(Comparisons.of(run), run.engine_time)


def distributions_drawing(run: Run) -> Drawing | None:
    return distributions.drawing(Comparisons.of(run), style.looks(run.cells))


def frontier_frame(run: Run, price_per_hour: float | None = None) -> pd.DataFrame:
    return frontier.frontier_frame(Comparisons.of(run), price_per_hour)


def frontier_drawing(run: Run, frame: pd.DataFrame) -> Drawing | None:
    return frontier.drawing(frame, Comparisons.of(run), style.looks(run.cells))


def frontier_table(frame: pd.DataFrame) -> ReportTable:
    return frontier.section(frame).table


def ledgers(run: Run) -> kv_chapter.Ledgers:
    return kv_chapter.ledgers_of(run.by_load)


def ledger_table(run: Run) -> ReportTable:
    return kv_chapter.ledger_table(run.by_load, ledgers(run))


def ledger_drawing(run: Run) -> Drawing | None:
    return kv.ledger_drawing(run.by_load, ledgers(run))


def ledger_section(run: Run) -> Section:
    return next(
        part
        for part in kv_chapter.kv_parts(Comparisons.of(run), run.manifest)
        if isinstance(part, Section) and part.key == "ledger"
    )
