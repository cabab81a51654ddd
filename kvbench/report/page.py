"""The report as one HTML file that needs nothing else: no network, no fonts, no second file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvbench.report.document import Document
from kvbench.report.style import Drawing, looks
from kvbench.runs.model import Run


def page(run: Run, report: Document) -> str:
    """The whole page."""
    return render("page.html.j2", report.drawings, title=report.title, report=report, looks=looks(run))


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
