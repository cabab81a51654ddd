"""What the report says, in its order; the HTML page and the Markdown are two ways to write it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvbench.common import text as words
from kvbench.report import simulated
from kvbench.report.changes import ENGINE_TIME, decided_load
from kvbench.report.comparisons import baseline, not_varied
from kvbench.report.decision import Answer, answers, answers_clock, headline
from kvbench.report.figures import effects, frontier
from kvbench.report.glossary import glossary
from kvbench.report.limits import LimitLine, limit_lines
from kvbench.report.next_step import NextStep, next_steps
from kvbench.report.provenance import (
    Validity,
    brief,
    environment,
    made_from,
    reproduce,
    skipped_notes,
    validity,
    warnings,
)
from kvbench.report.samples import OutputSamples, output_samples
from kvbench.report.sections import Chapter, chapters
from kvbench.report.style import Drawing
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.ratios import FEWEST

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
    screen.
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

    @property
    def drawings(self) -> list[Drawing]:
        """Every figure, in the order of the page."""
        return [*self.first, *(drawing for chapter in self.chapters for drawing in chapter.drawings)]


def document(run: Run, price_per_hour: float | None = None) -> Document:
    """The report of a run. ``price_per_hour``: of the machine, for the cost of a million tokens."""
    state, load = validity(run), decided_load(run)
    base = baseline(run, load) if load else None
    samples = None if run.simulated else output_samples(run)
    first = (effects.drawing(run), frontier.drawing(run, price_per_hour))
    found = chapters(run, samples, price_per_hour)
    return Document(
        title=simulated.title(run),
        verdict=headline(run),
        brief=tuple(filter(None, (run.folder.name, *brief(run), made_from(run)))),
        status=state.status,
        banner=f"Simulated: {_BANNERS[state.status].lower()}" if run.simulated else _BANNERS[state.status],
        counted=_counted(run, state),
        details=(*simulated.details(run), *state.reasons, *warnings(run)),
        baseline=f"{base.name} {base.load.where}, {_clock(run)}{_not_varied(run, base)}" if base else "",
        answers=tuple(answers(run)),
        limits=tuple(limit_lines(run)),
        first=tuple(simulated.marked(run, drawing) for drawing in first if drawing),
        chapters=tuple(
            replace(each, drawings=tuple(simulated.marked(run, drawing) for drawing in each.drawings)) for each in found
        ),
        samples=samples,
        skipped=tuple(skipped_notes(run)),
        next_steps=tuple(next_steps(run)),
        command=reproduce(run),
        glossary=tuple(glossary(run)),
        environment=tuple(environment(run)),
        manifest=json.dumps(dict(run.manifest), indent=2, default=str),
    )


def _clock(run: Run) -> str:
    """The clock of the answers; of engine time with what it is of."""
    clock = answers_clock(run)
    return run.engine_time.label if clock == ENGINE_TIME and run.engine_time else clock


def _not_varied(run: Run, base: MeasuredCell) -> str:
    """; not varied: page size and KV dtype. The questions that every reader has and this run does not answer."""
    names = not_varied(run, base)
    return f"; not varied: {words.listing(names)}" if names else ""


def _counted(run: Run, state: Validity) -> str:
    """16 of 16 cells valid, 1 to 3 repeats each; 9 requests failed; client and engine shared 2 cores.

    Says where no cell has the repeats that a verdict on served figures needs.
    """
    if not run.cells:
        return ""
    valid = sum(cell.valid for cell in run.cells)
    repeats = sorted({len(cell.repeats) for cell in run.cells})
    failed = sum(cell.count("failed") for cell in run.cells)
    cores = (run.manifest.get("cpu") or {}).get("cores")
    shared = f"client and engine shared {f'{cores} cores' if cores else 'the machine'}"
    parts = [
        f"{valid} of {len(run.cells) + len(run.missing)} cells valid, {_range(repeats)} each"
        + (f", too few for a verdict on {run.clock} figures ({FEWEST})" if repeats[-1] < FEWEST else ""),
        f"{words.plural(failed, 'request')} failed" if failed else "",
        shared if run.manifest.get("shared_machine") else "",
    ]
    return "; ".join(filter(None, parts))


def _range(repeats: Sequence[int]) -> str:
    """1 repeat; 1 to 3 repeats."""
    low, high = repeats[0], repeats[-1]
    return words.plural(high, "repeat") if low == high else f"{low} to {words.plural(high, 'repeat')}"
