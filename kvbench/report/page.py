"""The report as files: one HTML page that needs nothing else, Markdown for a CI summary, and summary.csv."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.common import text as words
from kvbench.common.errors import UsageError
from kvbench.common.files import write_text
from kvbench.report.cells import flat_rows
from kvbench.report.document import Document
from kvbench.report.samples import OutputSamples
from kvbench.report.style import Drawing
from kvbench.report.tables import Section

# The npm package plotly.js-cartesian-dist-min in the version that the pinned Python plotly has: a third of the whole
# plotly.js, so pages are smaller and open faster. It has all kinds of chart that the figures use.
PLOTLY_JS, PAGE_JS = "plotly-cartesian-4.1.1.min.js", "page.js"


def write_report(report: Document, folder: Path) -> list[Path]:
    """Writes the three files of a report, after all of them are made.

    Raises UsageError where files of a finished run are gone and a report is there: it may have been made with them.
    """
    run = report.decision.run
    paths = [folder / name for name in ("report.html", "report.md", "summary.csv")]
    there = [path for path in paths if path.is_file()]
    samples = [cell.folder / "requests.parquet" for cell in run.cells]
    lost = [] if run.manifest.model_fields_set else ["manifest.json is missing"]
    lost += [*run.damaged, *(f"{path} is missing" for path in samples if not path.is_file())]
    if run.status == "complete":
        lost += [f"cell {cell} is missing" for cell in run.missing]
    if lost and there:
        raise UsageError(
            f"{there[0]} is kept, since a new report would say less ({words.and_more(lost, 1)}); to write one all the "
            "same give another folder with --output-dir"
        )
    csv = pd.DataFrame(flat_rows(report.cells, report.decision.comparisons)).map(words.csv_cell).to_csv(index=False)
    for path, text in zip(paths, (page(report), markdown(report), csv), strict=True):
        write_text(path, text)
    return paths


# --- HTML ---


def page(report: Document) -> str:
    """The whole page."""
    return render("page.html.j2", report.drawings, title=report.title, report=report)


def render(template: str, drawn: Sequence[Drawing], **values: Any) -> str:
    """A template of this package with its style, its script and the figures of ``drawn``. All values are escaped."""
    loader = PackageLoader("kvbench.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    figures_json = "[" + ",".join(drawing.figure.to_json() for drawing in drawn) + "]"
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # safe inside a script element
        figures_json = figures_json.replace(character, code)
    return made.get_template(template).render(
        figures_json=Markup(figures_json),
        figure_numbers={drawing.key: i for i, drawing in enumerate(drawn)},
        css=Markup(template_file("page.css")),
        js=Markup(template_file(PAGE_JS)),
        plotly_js=Markup(template_file(PLOTLY_JS)) if drawn else "",
        **values,
    )


@cache
def template_file(name: str) -> str:
    """The text of a file in templates/: a script or a style."""
    return (files("kvbench.report") / "templates" / name).read_text(encoding="utf-8")


# --- Markdown ---


def markdown(report: Document) -> str:
    """The whole report as text and tables."""
    lines = [f"# {escape(report.title)}", "", f"**{escape(report.verdict)}**", ""]
    lines += [f"{report.banner}{f': {escape(report.counted)}' if report.counted else ''}.", ""]
    if report.details:
        lines += _folded("Why, and what limits the numbers", [f"- {escape(text)}" for text in report.details])
    if report.answers:
        rows = [[escape(text) for text in (a.subject, a.verdict, a.evidence)] for a in report.answers]
        lines += ["## Answers", "", f"Against {escape(report.baseline)}.", ""]
        lines += [*words.markdown_table(["what", "answer", "numbers"], rows, 3), ""]
    if report.limits:
        rows = [[escape(text) for text in (line.load, line.limit, line.names, line.evidence)] for line in report.limits]
        lines += ["## What limited it", "", *words.markdown_table(["load", "limit", "where", "seen"], rows, 4), ""]
    for chapter in report.chapters:
        lines += [f"## {escape(chapter.title)}", "", *_paragraphs(chapter.sentences)]
        for section in chapter.sections:
            lines += _section(section, chapter.title)
        if report.samples and any(section.key == "outputs" for section in chapter.sections):
            lines += _samples(report.samples)
    if report.skipped:
        lines += ["## Not run", "", *(f"- {escape(note)}" for note in report.skipped), ""]
    lines += ["## Next, and where it came from", ""]
    for why, command in (*((step.why, step.command) for step in report.next_steps), ("run this again", report.command)):
        lines += [f"- {escape(words.upper_first(why))}{':' if command else ''}", ""]
        fence = "```" + "`" * command.count("`")  # longer than any in the command
        lines += [f"{fence}sh", command, fence, ""] if command else []
    facts = [[escape(name), escape(text)] for name, text in report.environment]
    lines += _folded("Environment", words.markdown_table(["what", "value"], facts, 2))
    return "\n".join([*lines, *_folded("Manifest", ["```json", report.manifest.replace("```", "'''"), "```"])])


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""]


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [line for text in sentences if text for line in (escape(text), "")]


def _section(section: Section, chapter: str) -> list[str]:
    heads = [escape(column.title) for column in section.table.columns]
    body = []
    for row in section.table.rows:
        notes = [value.note.replace("\n", ", ") for value in row.values]
        entries = zip(row.values, notes, strict=True)
        body.append([escape(f"{value.text} ({note})" if note else value.text) for value, note in entries])
    title = [] if section.title == chapter else [f"### {escape(section.title)}", ""]
    table = [*words.markdown_table(heads, body, section.table.numbers_from), ""]
    return [*title, *_paragraphs(section.sentences), *table, *_paragraphs([section.note])]


def _samples(samples: OutputSamples) -> list[str]:
    """The sampled requests, folded: the baseline's text and those that differ, as blocks that nothing interprets."""
    lines = []
    for one in samples.requests:
        texts = [f"{samples.baseline}: {one.text}"]
        texts += [f"{v.configuration}, from {v.differs_at} on: {v.text}" for v in one.variants if v.differs_at]
        flat = [" ".join(text.split()).replace("```", "'''") for text in texts]
        lines += [f"Request {one.index} of repeat {one.repeat}, {escape(one.group)}:", "", "```text", *flat, "```", ""]
    return _folded("Some of them", lines[:-1])


def escape(text: Any) -> str:
    """Text from outside as plain text: no HTML, no table breaks, no links, no emphasis, no soft hyphens."""
    flat = re.sub(r"\s+", " ", str(text)).strip().replace("\u00ad", "")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
