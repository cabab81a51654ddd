"""The report as one HTML file that needs nothing else: no network, no fonts, no second file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvbench.common import text as words
from kvbench.report.comparisons import SCATTER, paging
from kvbench.report.figures.cells import drawings
from kvbench.report.kv import kv_bottleneck
from kvbench.report.provenance import (
    brief,
    code_paths,
    environment,
    made_from,
    repeats_are,
    reproduce,
    skipped_notes,
    validity,
    warnings,
)
from kvbench.report.sections import sections
from kvbench.report.style import Drawing, looks
from kvbench.report.wording import NOT_TOLD, conclusions, headline, reservation, tiles
from kvbench.runs.model import MeasuredCell, Run
from kvbench.runs.ratios import LEVEL

_BANNERS = {
    "valid": "Valid measurement, complete run",
    "invalid": "Invalid measurement, in part or whole: do not rely on it",
    "incomplete": "Incomplete run",
    "empty": "No load was measured",
}
_SAMPLES_PER_CELL = 2
_SAMPLE_CHARACTERS = 600


def page(run: Run) -> str:
    """The whole page."""
    drawn, state = drawings(run), validity(run)
    return render(
        "page.html.j2",
        drawn,
        title=run.workload,
        run=run,
        verdict=headline(run),
        brief=brief(run),
        context=context(run),
        state=state,
        banner=_BANNERS[state.status],
        warnings=warnings(run),
        tiles=tiles(run),
        conclusions=conclusions(run),
        drawings={drawing.key: drawing for drawing in drawn},
        sections=sections(run),
        looks=looks(run),
        skipped=skipped_notes(run),
        level_percent=f"{LEVEL * 100:g} %",
        scatter=f"{SCATTER:g}",
        not_told=NOT_TOLD,
        repeats_are=repeats_are(run),
        code_paths=code_paths(run),
        samples=_samples(run),
        command=reproduce(run),
        environment=environment(run),
        manifest=json.dumps(dict(run.manifest), indent=2, default=str),
    )


def render(template: str, drawn: Sequence[Drawing], **values: Any) -> str:
    """A template of this package with its style, its script and the figures of ``drawn``. All values are escaped."""
    loader, templates = PackageLoader("kvbench.report"), files("kvbench.report") / "templates"
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(template).render(
        figures_json=Markup(figures_json(drawn)),
        figure_numbers={drawing.key: i for i, drawing in enumerate(drawn)},
        css=Markup((templates / "page.css").read_text(encoding="utf-8")),
        js=Markup((templates / "page.js").read_text(encoding="utf-8")),
        plotly_js=Markup(get_plotlyjs()) if drawn else "",
        **values,
    )


def figures_json(drawn: Sequence[Drawing]) -> str:
    """The figures as a JSON array that is safe inside a script element."""
    text = "[" + ",".join(drawing.figure.to_json() for drawing in drawn) + "]"
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def context(run: Run) -> list[str]:
    """Whether KV memory was what limited, how the requests came about, and what contiguous reserves for each."""
    found = (kv_bottleneck(run), made_from(run), *(reservation(pair) for pair in paging(run)[-1:]))
    return [words.upper_first(text) for text in found if text]


def _samples(run: Run) -> list[tuple[str, list[tuple[str, str]]]]:
    """A few stored outputs a configuration, from its highest load: (configuration, [(what, text)])."""
    last = {cell.name: cell for cell in run.cells}
    return [(name, found) for name, cell in last.items() if (found := _cell_samples(cell))]


def _cell_samples(cell: MeasuredCell) -> list[tuple[str, str]]:
    path = cell.folder / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    found = []
    for row in [row for row in rows if row.get("text")][:_SAMPLES_PER_CELL]:
        keys = ("repeat", "index", "class", "prompt_tokens", "output_tokens", "finish_reason")
        text = str(row["text"])
        short = text if len(text) <= _SAMPLE_CHARACTERS else text[:_SAMPLE_CHARACTERS] + " …"
        found.append((", ".join(f"{key} {row[key]}" for key in keys if key in row), short))
    return found
