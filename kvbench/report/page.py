"""The report as files: one HTML page that needs nothing else, Markdown for a CI summary, and summary.csv."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
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
from kvbench.report.next_steps import NextStep
from kvbench.report.samples import OutputSamples
from kvbench.report.style import Drawing
from kvbench.report.tables import Section, Value
from kvbench.report.wording import say

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
    lost = [] if run.manifest.model_fields_set else [say("page.missing", name="manifest.json")]
    lost += [*run.damaged, *(say("page.missing", name=path) for path in samples if not path.is_file())]
    if run.status == "complete":
        lost += [say("page.cell_missing", name=cell) for cell in run.missing]
    if lost and there:
        raise UsageError(say("page.would_say_less", report=there[0], lost=words.and_more(lost, 1)))
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
    state = ": ".join(filter(None, (report.banner, escape(report.counted))))
    lines = [f"# {escape(report.title)}", "", f"**{escape(report.verdict)}**", "", f"{state}.", ""]
    lines += _folded(say("page.why_valid"), [f"- {escape(text)}" for text in report.details])
    if report.answers:
        lines += ["## Answers", "", escape(say("page.against", baseline=report.baseline)), ""]
        lines += [*_table(("what", "answer"), [(answer.subject, answer.text) for answer in report.answers]), ""]
        numbers = [(answer.subject, answer.numbers) for answer in report.answers]
        lines += _folded(say("page.numbers"), _table(("what", "numbers"), numbers))
    if report.limits:
        lines += [f"## {say('page.limits')}", ""]
        rows = [(line.load, line.limit, line.names) for line in report.limits]
        lines += [*_table(("load", "limit", "where"), rows), ""]
        seen = [(line.load, line.limit, line.evidence) for line in report.limits if line.evidence]
        lines += _folded(say("page.evidence"), _table(("load", "limit", "seen"), seen)) if seen else []
    for chapter in report.chapters:
        lines += [f"## {escape(chapter.title)}", "", *_paragraphs(chapter.sentences)]
        for section in chapter.sections:
            lines += _section(section, chapter.title)
        if report.samples and any(section.key == "outputs" for section in chapter.sections):
            lines += _samples(report.samples)
    if report.skipped:
        lines += [f"## {say('page.not_run')}", "", *(f"- {escape(note)}" for note in report.skipped), ""]
    lines += [f"## {say('page.next')}", ""]
    for step in (*report.next_steps, NextStep(say("page.again"), report.command)):
        lines += _step(step)
    lines += _folded("Environment", _table(("what", "value"), report.environment))
    return "\n".join([*lines, *_folded("Manifest", ["```json", report.manifest.replace("```", "'''"), "```"])])


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A table of texts from outside."""
    return words.markdown_table(heads, [[escape(text) for text in row] for row in rows], len(heads))


def _step(step: NextStep) -> list[str]:
    """Writes what a step would decide, and its command as a block."""
    why = escape(words.upper_first(step.why))
    if not step.command:
        return [f"- {why}", ""]
    fence = "```" + "`" * step.command.count("`")  # longer than any in the command
    return [f"- {why}:", "", f"{fence}sh", step.command, fence, ""]


def _folded(title: str, lines: Sequence[str]) -> list[str]:
    """A block that its reader opens; nothing without lines."""
    return [f"<details><summary>{title}</summary>", "", *lines, "", "</details>", ""] if lines else []


def _paragraphs(sentences: Sequence[str]) -> list[str]:
    return [line for text in sentences if text for line in (escape(text), "")]


def _section(section: Section, chapter: str) -> list[str]:
    """A table with its title, where that is not the chapter's, and what is said above and below it."""
    heads = [escape(column.title) for column in section.table.columns]
    body = [[_entry(value) for value in row.values] for row in section.table.rows]
    title = [] if section.title == chapter else [f"### {escape(section.title)}", ""]
    table = [*words.markdown_table(heads, body, section.table.numbers_from), ""]
    return [*title, *_paragraphs(section.sentences), *table, *_paragraphs([section.note])]


def _entry(value: Value) -> str:
    """The entry of a table with its small lines in brackets."""
    note = value.note.replace("\n", ", ")
    return escape(f"{value.text} ({note})" if note else value.text)


def _samples(samples: OutputSamples) -> list[str]:
    """The sampled requests, folded: the baseline's text and those that differ, as blocks that nothing interprets."""
    lines = []
    for one in samples.requests:
        others = [other for other in one.variants if other.differs_at]
        texts = [say("page.sample", name=samples.baseline, text=one.text)]
        texts += [say("page.variant", name=v.configuration, at=v.differs_at, text=v.text) for v in others]
        flat = [" ".join(text.split()).replace("```", "'''") for text in texts]
        title = say("page.request", index=one.index, repeat=one.repeat, group=escape(one.group))
        lines += [title, "", "```text", *flat, "```", ""]
    return _folded(say("page.some"), lines[:-1])


def escape(text: Any) -> str:
    """Makes text from outside plain: no HTML, no table breaks, no links, no emphasis, no soft hyphens."""
    flat = re.sub(r"\s+", " ", str(text)).strip().replace("\u00ad", "")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
