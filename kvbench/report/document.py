"""What the report says, in its order: the first screen, chapters of figures and tables, where it came from."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvbench.common import text as words
from kvbench.common.files import read_json
from kvbench.effects.comparison import FEWEST
from kvbench.metrics.definitions import ENGINE
from kvbench.report.client_quality import QUALITY_NOTE, quality_sentences, quality_table
from kvbench.report.comparisons import not_varied, paging
from kvbench.report.decision import Answer, Decision, NextStep
from kvbench.report.engine_time import engine_time_note, engine_time_table
from kvbench.report.figures import distributions, effects, frontier, heat_map, slowest, step_time
from kvbench.report.hits import HITS_NOTE, hit_drawing, hit_sentences, hit_table
from kvbench.report.kv import (
    ledger_figure,
    ledger_note,
    ledger_sentence,
    ledger_table,
    memory_table,
    reservation,
    timeline_drawing,
)
from kvbench.report.limits import GROWTH_NOTE, LimitLine, growth_sentence, growth_table, limit_lines, limit_table
from kvbench.report.predictions import PREDICTIONS_NOTE, prediction_sentences, prediction_table
from kvbench.report.provenance import (
    Validity,
    brief,
    environment,
    glossary,
    made_from,
    on_what,
    reproduce,
    simulated_details,
    skipped_notes,
    title,
    validity,
    warnings,
)
from kvbench.report.quality import (
    ANSWERS_NOTE,
    answer_quality_table,
    answer_sentences,
    passkey_table,
    price_drawing,
)
from kvbench.report.samples import OutputSamples, agreement_table, output_samples, outputs_note
from kvbench.report.style import Drawing, LineStyle, looks
from kvbench.report.tables import (
    NO_TABLE,
    PLATEAU_NOTE,
    UNCERTAIN_NOTE,
    Table,
    cells_note,
    class_table,
    effect_table,
    effects_note,
    failure_table,
    main_table,
    plateau_table,
    turn_table,
    with_missing,
)
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
class Section:
    """A table with its title, sentences above and a note below; ``folded``: opened by the reader of the page."""

    key: str
    title: str
    table: Table
    note: str = ""
    sentences: tuple[str, ...] = ()
    folded: bool = True


@dataclass(frozen=True)
class Chapter:
    """A heading with its figures and tables; ``sentences`` stand above both."""

    title: str
    sections: tuple[Section, ...]
    drawings: tuple[Drawing, ...]
    sentences: tuple[str, ...]


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
    limits: tuple[LimitLine, ...]
    first: tuple[Drawing, ...]
    chapters: tuple[Chapter, ...]
    samples: OutputSamples | None
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
    state, decision = validity(run), Decision.of(run)
    banner = _BANNERS[state.status]
    samples = None if run.simulated else output_samples(run)
    first = (effects.drawing(run), frontier.drawing(run, price_per_hour))
    return Document(
        title=title(run),
        verdict=decision.headline,
        brief=tuple(filter(None, (run.folder.name, *brief(run), made_from(run)))),
        status=state.status,
        banner=f"Simulated: {banner.lower()}" if run.simulated else banner,
        counted=_counted(run, state),
        details=(*simulated_details(run), *state.reasons, *warnings(run)),
        baseline=_baseline(decision),
        answers=tuple(decision.answers()),
        limits=tuple(limit_lines(run)),
        first=tuple(_marked(run, drawing) for drawing in first if drawing),
        chapters=tuple(
            replace(chapter, drawings=tuple(_marked(run, drawing) for drawing in chapter.drawings))
            for chapter in chapters(run, samples, price_per_hour)
        ),
        samples=samples,
        skipped=tuple(skipped_notes(run)),
        next_steps=tuple(decision.next_steps()),
        command=reproduce(run),
        glossary=tuple(glossary(run)),
        environment=tuple(environment(run)),
        manifest=_stored_manifest(run),
        looks=looks(run),
    )


def _baseline(decision: Decision) -> str:
    """The baseline at the reported load, the clock, and the questions of every reader that the run does not answer."""
    base, clock, engine_time = decision.base, decision.clock, decision.run.engine_time
    if base is None:
        return ""
    if clock == ENGINE and engine_time:
        clock = engine_time.label
    names = not_varied(decision.run, base)
    return f"{base.name} {base.load.where}, {clock}" + (f"; not varied: {words.listing(names)}" if names else "")


def _counted(run: Run, state: Validity) -> str:
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
    if run.manifest.get("shared_machine"):
        cores = (run.manifest.get("cpu") or {}).get("cores")
        parts.append(f"client and engine shared {f'{cores} cores' if cores else 'the machine'}")
    return "; ".join(parts)


def _marked(run: Run, drawing: Drawing) -> Drawing:
    """The figure; of a simulated run its caption says so."""
    if not run.simulated:
        return drawing
    caption = re.sub(r"^Simulated[.;] ", "", drawing.caption)
    return replace(drawing, caption=f"Simulated on {on_what(run)}. {words.upper_first(caption)}")


# --- The chapters ---


def _chapter(heading: str, *parts: str | Drawing | Section | None) -> Chapter:
    """A chapter of those parts that have something to show."""
    return Chapter(
        heading,
        tuple(part for part in parts if isinstance(part, Section) and part.table.rows),
        tuple(part for part in parts if isinstance(part, Drawing)),
        tuple(part for part in parts if isinstance(part, str) and part),
    )


def chapters(run: Run, samples: OutputSamples | None, price_per_hour: float | None = None) -> list[Chapter]:
    """Every chapter that has a table or a figure; ``samples``: of the run's outputs."""
    ledger, cells = ledger_table(run), main_table(run)
    measurement = NO_TABLE if run.simulated else quality_table(run)
    every = [
        _chapter(
            "As the load grows",
            growth_sentence(run),
            Section("growth", "p95 TTFT by load", growth_table(run), GROWTH_NOTE, folded=False),
        ),
        _chapter(
            "Quality of the answers",
            *answer_sentences(run),
            price_drawing(run),
            Section("answer-quality", "By configuration", answer_quality_table(run), ANSWERS_NOTE, folded=False),
            Section("passkeys", "Where passkeys go wrong", passkey_table(run)),
        ),
        _chapter(
            "Where the KV bytes went",
            ledger_sentence(run),
            *(reservation(contiguous) for _, contiguous in paging(run)[-1:]),
            ledger_figure(run),
            *(timeline_drawing(run, load) for load in reversed(run.loads)),
            Section("ledger", "Use by use", ledger, ledger_note(ledger)),
            Section("memory", "Bytes a token, scales and page table", memory_table(run)),
        ),
        _chapter(
            "Latencies",
            distributions.drawing(run),
            slowest.drawing(run),
            Section("slowest", "The slowest requests", slowest.slowest_table(run)),
            Section("classes", "By class of request", class_table(run), f"Raw samples. {UNCERTAIN_NOTE}"),
            Section("turns", "By turn of the conversation", turn_table(run), "Raw samples of all repeats."),
        ),
        _chapter(
            "Prefix cache: hits",
            *hit_sentences(run),
            hit_drawing(run),
            Section("hits", "From what is shared to what was hit", hit_table(run), HITS_NOTE),
        ),
        _chapter(
            "Inside the engine",
            step_time.drawing(run),
            heat_map.drawing(run),
            Section(
                "simulated_time",
                "Where the simulated time goes",
                step_time.simulated_time_table(run),
                step_time.SIMULATED_TIME_NOTE,
                folded=False,
            ),
            Section("steps", "Step time", step_time.step_time_table(run)),
        ),
        _chapter(
            "Predicted by simulation",
            *prediction_sentences(run),
            Section("predictions", "Cell by cell", prediction_table(run), PREDICTIONS_NOTE, folded=False),
        ),
        _chapter(
            "Outputs side by side",
            Section("outputs", "Equal to the baseline", agreement_table(samples), outputs_note(samples)),
        ),
        _chapter(
            "All cells",
            Section("cells", "All cells", with_missing(run, cells), cells_note(run, cells), folded=False),
            Section("failures", "Failures", failure_table(run)),
            Section("limits", "What limited each cell", limit_table(run)),
            Section("frontier", "Throughput against latency", frontier.frontier_table(run, price_per_hour)),
            Section("engine_time", "Engine time", engine_time_table(run), engine_time_note(run)),
            Section("effects", f"Each setting alone, as {run.clock}", effect_table(run), effects_note(run)),
            Section("plateaus", "Step by step of the rate", plateau_table(run), PLATEAU_NOTE),
            Section(
                "quality", "How good the measurement was", measurement, QUALITY_NOTE, tuple(quality_sentences(run))
            ),
        ),
    ]
    return [chapter for chapter in every if chapter.sections or chapter.drawings]


def _stored_manifest(run: Run) -> str:
    """The manifest as its file holds it, for a reader who wants all of it."""
    path = run.folder / MANIFEST
    return json.dumps(read_json(path) if path.is_file() else {}, indent=2)
