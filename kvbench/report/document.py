"""What the report says, in its order: the first screen, chapters of figures and tables, where it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from kvbench.common import text as words
from kvbench.common.files import read_json
from kvbench.effects.comparison import FEWEST
from kvbench.metrics.definitions import ENGINE
from kvbench.report import (
    client_quality,
    engine_time,
    hits,
    kv,
    limits,
    predictions,
    provenance,
    quality,
    samples,
    tables,
)
from kvbench.report.comparisons import not_varied
from kvbench.report.decision import Answer, Decision, NextStep
from kvbench.report.figures import distributions, effects, frontier, heat_map, slowest, step_time
from kvbench.report.style import Drawing, LineStyle, looks
from kvbench.report.tables import Chapter
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

    ``counted``: how much is valid, on the line that names the ``status``; ``details``: why, and what limits the
    numbers; ``baseline``: what the answers are against, where and in which clock; ``first``: the figures of the first
    screen; ``looks``: configuration -> how it is drawn.
    """

    title: str
    verdict: str
    brief: tuple[str, ...]
    status: str
    banner: str
    counted: str
    details: tuple[str, ...]
    baseline: str
    answers: tuple[Answer, ...]
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
    state, decision = provenance.validity(run), Decision.of(run)
    banner = _BANNERS[state.status]
    outputs = None if run.simulated else samples.output_samples(run)
    known, points = limits.limits(run), frontier.frontier_frame(run, price_per_hour)
    first = (effects.drawing(run), frontier.drawing(run, points))
    return Document(
        title=provenance.title(run),
        verdict=decision.headline,
        brief=tuple(filter(None, (run.folder.name, *provenance.brief(run), provenance.made_from(run)))),
        status=state.status,
        banner=f"Simulated: {banner.lower()}" if run.simulated else banner,
        counted=_counted(run, state),
        details=(*provenance.simulated_details(run), *state.reasons, *provenance.warnings(run)),
        baseline=_baseline(decision),
        answers=tuple(decision.answers()),
        limits=tuple(limits.limit_lines(run, known)),
        first=tuple(_marked(run, drawing) for drawing in first if drawing),
        chapters=tuple(
            replace(chapter, drawings=tuple(_marked(run, drawing) for drawing in chapter.drawings))
            for chapter in chapters(run, known, outputs, points)
        ),
        samples=outputs,
        skipped=tuple(provenance.skipped_notes(run)),
        next_steps=tuple(decision.next_steps()),
        command=provenance.reproduce(run),
        glossary=tuple(provenance.glossary(run)),
        environment=tuple(provenance.environment(run)),
        manifest=_stored_manifest(run),
        looks=looks(run),
    )


def _baseline(decision: Decision) -> str:
    """The baseline at the reported load, the clock, and the questions of every reader that the run does not answer."""
    base, clock, known = decision.base, decision.clock, decision.run.engine_time
    if base is None:
        return ""
    if clock == ENGINE and known:
        clock = known.label
    names = not_varied(decision.run, base)
    return f"{base.name} {base.load.where}, {clock}" + (f"; not varied: {words.listing(names)}" if names else "")


def _counted(run: Run, state: provenance.Validity) -> str:
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


def _stored_manifest(run: Run) -> str:
    """The manifest as its file holds it, for a reader who wants all of it."""
    path = run.folder / MANIFEST
    return json.dumps(read_json(path) if path.is_file() else {}, indent=2)


def _marked(run: Run, drawing: Drawing) -> Drawing:
    """The figure; of a simulated run its caption says so."""
    if not run.simulated:
        return drawing
    caption = re.sub(r"^Simulated[.;] ", "", drawing.caption)
    return replace(drawing, caption=f"Simulated on {provenance.on_what(run)}. {words.upper_first(caption)}")


# --- The chapters ---


def chapters(
    run: Run, known: Sequence[limits.Limit], outputs: samples.OutputSamples | None, points: pd.DataFrame
) -> list[Chapter]:
    """Every chapter that has a table or a figure.

    ``known``: what limited each cell; ``outputs``: samples of them; ``points``: as of ``frontier_frame``.
    """
    every = {
        "As the load grows": limits.growth_parts(run),
        "Quality of the answers": quality.quality_parts(run),
        "Where the KV bytes went": kv.kv_parts(run),
        "Latencies": (distributions.drawing(run), *slowest.slowest_parts(run), *tables.group_parts(run)),
        "Prefix cache: hits": hits.hit_parts(run),
        "Inside the engine": (*step_time.engine_parts(run), heat_map.drawing(run)),
        "Predicted by simulation": predictions.prediction_parts(run),
        "Outputs side by side": (samples.section(outputs),),
        "All cells": (
            *tables.cell_parts(run),
            limits.limit_section(known),
            frontier.section(points),
            engine_time.section(run),
            *tables.setting_parts(run),
            client_quality.section(run),
        ),
    }
    made = [Chapter.of(title, parts) for title, parts in every.items()]
    return [chapter for chapter in made if chapter.sections or chapter.drawings]
