"""The pages of the workspace as HTML, for the server and for the export; every value from outside is escaped."""

from __future__ import annotations

import gzip
import json
import re
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from markupsafe import Markup

from kvbench.common import text as words
from kvbench.history import page as history_page
from kvbench.history.show import SeriesSelection, view
from kvbench.report import page as run_page
from kvbench.report import side_by_side_page
from kvbench.report.document import document
from kvbench.report.page import PAGE_JS, PLOTLY_JS, render, template_file
from kvbench.report.side_by_side import Group
from kvbench.report.wording import say
from kvbench.runs.model import Run
from kvbench.view.capacity import Form
from kvbench.view.workspace import DAMAGED, STATES, Filter, RunRow, Workspace

_STATE_WORDS = {"empty": "without a measurement", "wrong": "with wrong answers"}
_FIGURES = re.compile(r'(<script type="application/json" id="figures">)(.*?)(</script>)', re.DOTALL)
_UNPACK = """(async () => {
  const figures = document.getElementById("figures");
  const bytes = Uint8Array.from(atob(figures.textContent), (c) => c.charCodeAt(0));
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  figures.textContent = await new Response(unpacked).text();
  document.body.append(Object.assign(document.createElement("script"), { src: %s }));
})();"""
_NAV_STYLE = (
    "nav.workspace { display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 0 0 26px; padding: 0 0 10px; "
    "border-bottom: 1px solid var(--line); } nav.workspace a { color: var(--accent); }"
)


@dataclass(frozen=True)
class Links:
    """Addresses of the workspace's pages, as a page writes them.

    ``run``: of a run's slug. ``pair``: of the slugs of two runs side by side; None where there is no such page.
    ``capacity``: None where there is no form.
    """

    runs: str
    history: str
    plotly: str
    capacity: str | None
    run: Callable[[str], str]
    pair: Callable[[str, str], str | None]


def runs(
    workspace: Workspace, links: Links, chosen: Sequence[str] = (), shown: Filter | None = None, error: str = ""
) -> str:
    """The list of runs. ``chosen``: addresses of the ticked cells; ``shown``: None for a page without forms."""
    every = workspace.rows()
    rows = [row for row in every if shown is None or shown.selects(row)]
    titles = {cell.value: f"{row.workload} {row.name}: {cell.title}" for row in every for cell in row.cells}
    visible = {cell.value for row in rows for cell in row.cells}
    states = {row.state for row in every}
    options = {"state": [(state, _STATE_WORDS.get(state, state)) for state in STATES if state in states]}
    for name in ("workload", "machine"):
        options[name] = [(value, value) for value in sorted({getattr(row, name) for row in every} - {""})]
    page = render(
        "view_runs.html.j2",
        [],
        title="Runs",
        headline=_counted(rows, len(every)),
        notes=workspace.notes(),
        error=error,
        rows=rows,
        before=runs_before(every),
        state_words=_STATE_WORDS,
        links=links,
        shown=shown,
        options=options,
        chosen=set(chosen),
        elsewhere=[(value, titles[value]) for value in chosen if value in titles and value not in visible],
        damaged=DAMAGED,
    )
    return framed(page, links)


def _counted(rows: Sequence[RunRow], total: int) -> str:
    """Writes `12 runs: 10 valid, 1 invalid and 1 damaged`."""
    if not total:
        return say("view.no_run")
    states = [f"{count} {_STATE_WORDS.get(s, s)}" for s in STATES if (count := sum(row.state == s for row in rows))]
    part = "" if len(rows) == total else len(rows)
    return say("view.counted", part=part, runs=words.plural(total, "run"), states=words.listing(states))


def runs_before(rows: Sequence[RunRow]) -> dict[str, RunRow]:
    """Slug -> the run of the same workload, model and machine that was measured before it."""
    before, last = {}, {}
    for row in sorted(rows, key=lambda row: (row.started, row.name)):
        if row.cells:
            key = (row.workload, row.model, row.machine, row.target)
            if key in last:
                before[row.slug] = last[key]
            last[key] = row
    return before


def run(measured: Run, links: Links) -> str:
    return framed(run_page.page(document(measured)), links)


def compared(groups: Sequence[Group], links: Links) -> str:
    return framed(side_by_side_page.page(groups), links)


def history(workspace: Workspace, links: Links) -> str:
    readable = [row.folder for row in workspace.rows() if row.state != DAMAGED]  # links that lead out are damaged
    trends = view(readable, SeriesSelection())
    if not trends.groups:
        return message(say("view.no_history"), say("view.no_finished_run"), links)
    return framed(history_page.page(trends), links)


def capacity(form: Form, links: Links) -> str:
    return framed(render("view_capacity.html.j2", [], title="Capacity", form=form, links=links), links)


def message(headline: str, text: str, links: Links) -> str:
    """A page with nothing but a sentence."""
    return framed(render("view_message.html.j2", [], title=headline, headline=headline, text=text), links)


def defect(error: Exception, links: Links) -> str:
    """A page in place of one that could not be made, mostly because a file of a run is damaged."""
    text = say("view.defect", kind=type(error).__name__, error=error)
    return message(say("view.not_made"), text, links)


def framed(page: str, links: Links) -> str:
    """A page of any room as one of the workspace: with links to the others, and plotly.js from the one shared file."""
    entries = {"Runs": links.runs, "History": links.history, "Capacity": links.capacity}
    anchors = Markup("").join(
        Markup('<a href="{}">{}</a>').format(address, name) for name, address in entries.items() if address
    )
    nav = f'<style>{_NAV_STYLE}</style>\n<nav class="workspace" aria-label="workspace">{anchors}</nav>'
    shared = Markup('<script src="{}"></script>').format(links.plotly)
    page = page.replace("<main>", f"<main>\n{nav}", 1)
    return page.replace(f"<script>{template_file(PLOTLY_JS)}</script>", shared, 1)


def packed(page: str, script: str) -> str:
    """The page with its figures compressed, to a third of their size, and ``script`` in place of its own script.

    A few lines unpack the figures and then load ``script``, the address of PAGE_JS as a file. Numbers have
    32 bits, which is more than a screen shows.
    """
    figures = _FIGURES.search(page)
    if figures is None:
        return page
    text = json.dumps(_narrowed(json.loads(figures[2])), separators=(",", ":"))
    data = b64encode(gzip.compress(text.encode(), mtime=0)).decode()
    page = f"{page[: figures.start()]}{figures[1]}{data}{figures[3]}{page[figures.end() :]}"
    return page.replace(
        f"<script>{template_file(PAGE_JS)}</script>", f"<script>{_UNPACK % json.dumps(script)}</script>", 1
    )


def _narrowed(node: Any) -> Any:
    if isinstance(node, list):
        return [_narrowed(part) for part in node]
    if not isinstance(node, dict):
        return node
    if node.get("dtype") == "f8" and "bdata" in node:
        values = np.frombuffer(b64decode(node["bdata"]), "<f8").astype("<f4")
        return {**node, "dtype": "f4", "bdata": b64encode(values.tobytes()).decode()}
    return {key: _narrowed(value) for key, value in node.items()}
