"""The report as one HTML file that needs nothing else: no network, no fonts, no second file."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvbench.report.document import Document
from kvbench.report.style import Drawing, looks
from kvbench.runs.model import Run

# The npm package plotly.js-cartesian-dist-min in the version that the pinned Python plotly has: a third of the whole
# plotly.js, so pages are smaller and open faster. It has all kinds of chart that the figures use.
PLOTLY_JS, PAGE_JS = "plotly-cartesian-4.1.1.min.js", "page.js"


def page(run: Run, report: Document) -> str:
    """The whole page."""
    return render("page.html.j2", report.drawings, title=report.title, report=report, looks=looks(run))


def render(template: str, drawn: Sequence[Drawing], **values: Any) -> str:
    """A template of this package with its style, its script and the figures of ``drawn``. All values are escaped."""
    loader = PackageLoader("kvbench.report")
    made = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return made.get_template(template).render(
        figures_json=Markup(figures_json(drawn)),
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


def figures_json(drawn: Sequence[Drawing]) -> str:
    """The figures as a JSON array that is safe inside a script element."""
    text = "[" + ",".join(drawing.figure.to_json() for drawing in drawn) + "]"
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
