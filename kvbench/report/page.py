"""The report as files: one HTML page that needs nothing else, Markdown for a CI summary, and summary.csv."""

from __future__ import annotations

import gzip
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
from kvbench.report.style import Drawing
from kvbench.report.tables import ReportTable, Value
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
    figures_json = "[" + ",".join(drawing.figure.to_json() for drawing in drawn) + "]"
    for character, code in (("<", "\\u003c"), (">", "\\u003e"), ("&", "\\u0026")):  # safe inside a script element
        figures_json = figures_json.replace(character, code)
    made = _environment(autoescape=True).get_template(template)
    return made.render(
        figures_json=Markup(figures_json),
        figure_numbers={drawing.key: i for i, drawing in enumerate(drawn)},
        css=Markup(template_file("page.css")),
        js=Markup(template_file(PAGE_JS)),
        plotly_js=Markup(template_file(PLOTLY_JS)) if drawn else "",
        **values,
    )


@cache
def _environment(autoescape: bool) -> Environment:
    """The templates of this package, with what those of Markdown call."""
    loader = PackageLoader("kvbench.report")
    made = Environment(
        loader=loader, autoescape=autoescape, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=not autoescape,
    )  # fmt: skip
    made.filters |= {"md": escape, "capital": words.upper_first, "one_line": _one_line}
    made.globals |= {"table": _table, "section_table": _section_table}
    return made


@cache
def template_file(name: str) -> str:
    """The text of a file in templates/: a script or a style. Plotly's lies there compressed, at a third of its size."""
    folder = files("kvbench.report") / "templates"
    if name == PLOTLY_JS:
        return gzip.decompress((folder / f"{name}.gz").read_bytes()).decode()
    return (folder / name).read_text(encoding="utf-8")


# --- Markdown ---


def markdown(report: Document) -> str:
    """The whole report as text and tables."""
    return render_markdown("report.md.j2", report=report)


def render_markdown(template: str, **values: Any) -> str:
    """A template of this package for Markdown, whose filter ``md`` escapes."""
    return _environment(autoescape=False).get_template(template).render(**values)


def _table(heads: Sequence[str], items: Iterable[Any], *names: str) -> str:
    """A table of texts from outside: the attributes ``names`` of ``items``; without names the items are the rows."""
    rows = [[getattr(item, name) for name in names] or item for item in items]
    return "\n".join(words.markdown_table(heads, [list(map(escape, row)) for row in rows], len(heads)))


def _section_table(table: ReportTable) -> str:
    """The table of a section, each entry with its small lines in brackets."""
    rows = [[_entry(value) for value in row.values] for row in table.rows]
    return "\n".join(words.markdown_table([escape(column.title) for column in table.columns], rows, table.numbers_from))


def _entry(value: Value) -> str:
    note = value.note.replace("\n", ", ")
    return escape(value.text + f" ({note})" * bool(note))


def _one_line(text: str) -> str:
    """An output in one line of a block that nothing interprets."""
    return " ".join(text.split()).replace("```", "'''")


def escape(text: Any) -> str:
    """Makes text from outside plain: no HTML, no table breaks, no links, no emphasis, no soft hyphens."""
    flat = re.sub(r"\s+", " ", str(text)).strip().replace("\u00ad", "")
    flat = flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|])", r"\\\1", flat)
