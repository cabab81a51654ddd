"""The parts of a report in their order: the first screen, chapters of figures and tables, where it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import pandas as pd

from kvbench.common import text as words
from kvbench.common.files import read_json
from kvbench.effects.comparison import FEWEST
from kvbench.metrics.definitions import ENGINE
from kvbench.report import (
    cells,
    client_quality,
    engine_time,
    hits,
    kv,
    limits,
    predictions,
    provenance,
    quality,
    samples,
)
from kvbench.report.answers import ReportAnswer, report_answers
from kvbench.report.decision import Decision, wins
from kvbench.report.figures import effects, frontier, registry, slowest, step_time
from kvbench.report.headline import headline
from kvbench.report.meaning import meaning
from kvbench.report.next_steps import NextStep, next_steps
from kvbench.report.style import Drawing, LineStyle, looks
from kvbench.report.tables import Chapter, ReportTable
from kvbench.report.wording import say
from kvbench.runs.folder import MANIFEST
from kvbench.runs.model import Run

_MOST_COLOURED = 5  # configurations; of more the best few and the baseline keep their colours


@dataclass(frozen=True)
class Document:
    """The report's parts, from the first sentence to the manifest.

    ``decision``: on the run, which the parts are made of; ``cells``, ``engine_time``: the tables of both clocks
    ``counted``: how much is valid, on the line that names the ``status``; ``details``: why, and what limits the
    numbers; ``baseline``: what the answers are against, where and in which clock; ``first``: the figures of the first
    screen; ``looks``: configuration -> how it is drawn.
    """

    decision: Decision
    cells: ReportTable
    engine_time: ReportTable
    title: str
    verdict: str
    brief: tuple[str, ...]
    status: str
    banner: str
    counted: str
    details: tuple[str, ...]
    baseline: str
    answers: tuple[ReportAnswer, ...]
    limits: tuple[limits.LimitLine, ...]
    first: tuple[Drawing, ...]
    chapters: tuple[Chapter, ...]
    samples: samples.OutputSamples | None
    skipped: tuple[str, ...]
    next_steps: tuple[NextStep, ...]
    command: str
    glossary: tuple[tuple[str, str], ...]
    environment: tuple[tuple[str, str], ...]
    manifest: str
    looks: Mapping[str, LineStyle]

    @property
    def drawings(self) -> list[Drawing]:
        """The figures, in the order of the page."""
        return [*self.first, *(drawing for chapter in self.chapters for drawing in chapter.drawings)]


def document(run: Run, price_per_hour: float | None = None) -> Document:
    """The report of a run. ``price_per_hour``: of the machine, for the cost of a million tokens."""
    decision = Decision.of(run)
    comparisons = decision.comparisons
    state = decision.validity
    device = provenance.on_what(run)
    banner = say("document.banner", state.status)
    outputs = None if run.simulated else samples.output_samples(comparisons, provenance.random_weights(run))
    slo = words.slo_words(run.load_section.get("slo"))
    table = cells.main_table(comparisons, slo, run.cache_state if run.load_section else "")
    points, look = frontier.frontier_frame(comparisons, price_per_hour), looks(run.cells)
    coloured = {name: look[name] for name in best_few(decision)}
    first = (effects.drawing(comparisons, run.engine_time), frontier.drawing(points, comparisons, coloured))
    in_turns = engine_time.engine_time_table(comparisons, run.engine_time)
    chapters = _chapters(decision, table, in_turns, outputs, points, slo)
    limit_lines = limits.limit_lines(decision.limits, comparisons.names)
    stored = run.folder / MANIFEST
    return Document(
        decision,
        table,
        in_turns,
        counted=_counted(run),
        baseline=_baseline(decision),
        title=provenance.title(run),
        verdict=headline(decision),
        brief=tuple(filter(None, (run.folder.name, *provenance.brief(run), provenance.made_from(run)))),
        status=state.status,
        banner=say("document.simulated", bool(run.simulated), banner=banner, lower=banner.lower()),
        details=(*provenance.simulated_details(run), *state.reasons, *provenance.warnings(run)),
        answers=tuple(filter(None, (*report_answers(decision), meaning(decision, price_per_hour)))),
        limits=tuple(line for line in limit_lines if line.limit != limits.UNKNOWN),
        first=tuple(_marked(drawing, device) for drawing in first if drawing),
        chapters=tuple(
            replace(chapter, drawings=tuple(_marked(drawing, device) for drawing in chapter.drawings))
            for chapter in chapters
            if chapter.sections or chapter.drawings
        ),
        samples=outputs,
        skipped=tuple(note for note in run.manifest.notes if note.startswith(provenance.SKIPPED)),
        next_steps=tuple(next_steps(decision)),
        command=provenance.reproduce(run),
        glossary=tuple(provenance.glossary(run)),
        environment=tuple(provenance.environment(run)),
        manifest=json.dumps(read_json(stored) if stored.is_file() else {}, indent=2),  # as its file holds it
        looks=look,
    )


def _chapters(
    decision: Decision,
    table: ReportTable,
    in_turns: ReportTable,
    outputs: samples.OutputSamples | None,
    points: pd.DataFrame,
    slo: str,
) -> list[Chapter]:
    """Makes every chapter. ``points``: the rows of ``frontier_frame``."""
    run, comparisons = decision.run, decision.comparisons
    by_load, missing = comparisons.by_load, () if run.not_kept else run.missing
    every = {
        "As the load grows": limits.growth_parts(decision.breaks, limits.sized_loads(comparisons)),
        "Quality of the answers": quality.quality_parts(run, comparisons, decision.qualities),
        "Where the KV bytes went": kv.kv_parts(comparisons, run.manifest),
        "Latencies": (slowest.section(comparisons), *cells.group_parts(by_load)),
        "Prefix cache: hits": hits.hit_parts(run, by_load),
        "Inside the engine": step_time.engine_parts(by_load),
        "Predicted by simulation": predictions.prediction_parts(run.predictions, by_load),
        "Outputs side by side": (samples.section(outputs),),
        "All cells": (
            *cells.cell_parts(table, comparisons, slo, missing, run.problems),
            limits.limit_section(decision.limits),
            frontier.section(points),
            engine_time.section(in_turns, run.engine_time),
            *cells.setting_parts(comparisons),
            client_quality.section(run, by_load),
        ),
    }
    added = dict.fromkeys(figure.chapter for figure in registry.FIGURES.values() if figure.chapter not in every)
    chapters = dict.fromkeys(added, ()) | every
    return [Chapter.of(title, (*registry.drawings(decision, title), *parts)) for title, parts in chapters.items()]


def best_few(decision: Decision) -> list[str]:
    """The configurations that figures of many name: all of a few, else baseline, advice, pair and the fastest."""
    names = list(dict.fromkeys(cell.name for cell in decision.comparisons.cells))
    if len(names) <= _MOST_COLOURED:
        return names
    candidates = filter(None, (decision.conclusion.candidate, *wins(decision.candidates), *decision.candidates))
    bases = [cell.name for cell in decision.comparisons.cells if cell.is_baseline]
    first = dict.fromkeys((*bases, *(decision.pair or ()), *(one.cell.name for one in candidates), *names))
    return list(first)[:_MOST_COLOURED]


def _baseline(decision: Decision) -> str:
    """The baseline at the reported load, the clock, and the questions of every reader that the run does not answer."""
    base, clock, in_turns = decision.base, decision.clock, decision.run.engine_time
    if base is None:
        return ""
    if clock == ENGINE and in_turns:
        clock = in_turns.label
    names = words.listing(decision.comparisons.not_varied)
    place = {"name": base.name, "where": base.load.where, "clock": clock}
    return say("document.baseline", **place) + say("document.not_varied", bool(names), names=names)


def _counted(run: Run) -> str:
    """Writes ``16 of 16 cells valid, 1 to 3 repeats each; 9 requests failed; client and engine shared 2 cores``.

    Says where no cell has the repeats that a verdict on served figures needs.
    """
    if not run.cells:
        return ""
    repeats = [len(cell.repeats) for cell in run.cells]
    low, high = min(repeats), max(repeats)
    repeats_words = say("document.repeats", low == high, low=low, high=words.plural(high, "repeat"))
    valid, cells = sum(cell.valid for cell in run.cells), len(run.cells) + len(run.missing)
    counted, cores = say("document.counted", valid=valid, cells=cells, repeats=repeats_words), run.manifest.cpu.cores
    parts = [
        counted + say("document.too_few", high < FEWEST, clock=run.clock, fewest=FEWEST),
        say("document.failed", n=sum(cell.count("failed") for cell in run.cells)),
        say("document.shared", bool(cores), cores=cores) * run.manifest.shared_machine,
    ]
    return "; ".join(filter(None, parts))


def _marked(drawing: Drawing, device: str) -> Drawing:
    """The figure; of a run that is simulated on a ``device`` its caption says so."""
    if not device:
        return drawing
    caption = words.upper_first(re.sub(r"^Simulated[.;] ", "", drawing.caption))
    return replace(drawing, caption=say("document.simulated_on", device=device, caption=caption))
