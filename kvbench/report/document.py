"""What the report says, in its order: the first screen, chapters of figures and tables, where it came from."""

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
from kvbench.report.decision import Decision, NextStep, ReportAnswer
from kvbench.report.figures import effects, frontier, registry, slowest, step_time
from kvbench.report.style import Drawing, LineStyle, looks
from kvbench.report.tables import Chapter, ReportTable
from kvbench.runs.folder import MANIFEST
from kvbench.runs.model import Run

_BANNERS = {
    "valid": "Valid",
    "wrong": "Wrong answers",
    "invalid": "Invalid, in part or whole",
    "incomplete": "Incomplete",
    "empty": "No load was measured",
}


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
        """Every figure, in the order of the page."""
        return [*self.first, *(drawing for chapter in self.chapters for drawing in chapter.drawings)]


def document(run: Run, price_per_hour: float | None = None) -> Document:
    """The report of a run. ``price_per_hour``: of the machine, for the cost of a million tokens."""
    decision = Decision.of(run)
    comparisons = decision.comparisons
    state = decision.validity
    device = provenance.on_what(run) if run.simulated else None
    banner = _BANNERS[state.status]
    outputs = None if run.simulated else samples.output_samples(comparisons, provenance.random_weights(run))
    slo = words.slo_words(run.load_section.get("slo"))
    table = cells.main_table(comparisons, slo, run.cache_state if run.load_section else "")
    points, look = frontier.frontier_frame(comparisons, price_per_hour), looks(run.cells)
    first = (effects.drawing(comparisons, run.engine_time), frontier.drawing(points, comparisons, look))
    in_turns = engine_time.engine_time_table(comparisons, run.engine_time)
    chapters = _chapters(decision, table, in_turns, outputs, points, slo)
    stored = run.folder / MANIFEST
    return Document(
        decision,
        table,
        in_turns,
        counted=_counted(run),
        baseline=_baseline(decision),
        title=provenance.title(run),
        verdict=decision.headline,
        brief=tuple(filter(None, (run.folder.name, *provenance.brief(run), provenance.made_from(run)))),
        status=state.status,
        banner=f"Simulated: {banner.lower()}" if run.simulated else banner,
        details=(*provenance.simulated_details(run), *state.reasons, *provenance.warnings(run)),
        answers=tuple(decision.answers()),
        limits=tuple(limits.limit_lines(decision.limits, comparisons.names)),
        first=tuple(_marked(drawing, device) for drawing in first if drawing),
        chapters=tuple(
            replace(chapter, drawings=tuple(_marked(drawing, device) for drawing in chapter.drawings))
            for chapter in chapters
            if chapter.sections or chapter.drawings
        ),
        samples=outputs,
        skipped=tuple(note for note in run.manifest.notes if note.startswith(provenance.SKIPPED)),
        next_steps=tuple(decision.next_steps()),
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
    """Every chapter with its figures; ``points``: as of ``frontier_frame``."""
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


def _baseline(decision: Decision) -> str:
    """The baseline at the reported load, the clock, and the questions of every reader that the run does not answer."""
    base, clock, in_turns = decision.base, decision.clock, decision.run.engine_time
    if base is None:
        return ""
    if clock == ENGINE and in_turns:
        clock = in_turns.label
    names = decision.comparisons.not_varied
    return f"{base.name} {base.load.where}, {clock}" + (f"; not varied: {words.listing(names)}" if names else "")


def _counted(run: Run) -> str:
    """16 of 16 cells valid, 1 to 3 repeats each; 9 requests failed; client and engine shared 2 cores.

    Says where no cell has the repeats that a verdict on served figures needs.
    """
    if not run.cells:
        return ""
    repeats = [len(cell.repeats) for cell in run.cells]
    low, high = min(repeats), max(repeats)
    each = words.plural(high, "repeat") if low == high else f"{low} to {words.plural(high, 'repeat')}"
    parts = [f"{sum(cell.valid for cell in run.cells)} of {len(run.cells) + len(run.missing)} cells valid, {each} each"]
    if high < FEWEST:
        parts[0] += f", too few for a verdict on {run.clock} figures ({FEWEST})"
    if failed := sum(cell.count("failed") for cell in run.cells):
        parts.append(f"{words.plural(failed, 'request')} failed")
    if run.manifest.shared_machine:
        cores = run.manifest.cpu.cores
        parts.append(f"client and engine shared {f'{cores} cores' if cores else 'the machine'}")
    return "; ".join(parts)


def _marked(drawing: Drawing, device: str | None) -> Drawing:
    """The figure; of a run that is simulated on a ``device`` its caption says so."""
    if device is None:
        return drawing
    caption = re.sub(r"^Simulated[.;] ", "", drawing.caption)
    return replace(drawing, caption=f"Simulated on {device}. {words.upper_first(caption)}")
