"""The workspace as static pages, for artifacts of CI or a branch of pages: no server, and no form that needs one.

index.html  history.html  runs/<slug>.html  compare/<slug>--<slug>.html  kvbench-view.json
plotly-cartesian-<version>.min.js  page.js
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvbench.common.errors import UsageError
from kvbench.common.files import check_output_dir, write_json, write_text
from kvbench.report.page import PAGE_JS, PLOTLY_JS, template_file
from kvbench.report.side_by_side import groups_of
from kvbench.report.wording import say
from kvbench.view import pages
from kvbench.view.workspace import DAMAGED, Workspace

LISTING = "kvbench-view.json"


def check_export_dir(folder: Path) -> None:
    """Raises UsageError unless ``folder`` is new, empty, or holds an earlier export and can be written."""
    if folder.exists() and not folder.is_dir():
        raise UsageError(say("view.export_file", folder=folder))
    check_output_dir(folder, "--export")
    there = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if there and LISTING not in there:
        raise UsageError(say("view.export_other", folder=folder, file=there[0]))


def export(workspace: Workspace, folder: Path, progress: Callable[[str], None] = lambda text: None) -> list[Path]:
    """Writes all pages into ``folder``; an earlier export there is replaced. Returns the files.

    ``progress`` is told what is written. Raises UsageError as ``check_export_dir``.
    """
    check_export_dir(folder)
    _remove_earlier(folder)
    rows = workspace.rows()
    written: list[str] = []
    pairs: dict[tuple[str, str], str] = {}

    def write(name: str, text: str) -> None:
        written.append(name)
        write_json(folder / LISTING, {"files": written})  # first: what is cut short can be replaced, too
        write_text(folder / name, text)

    def write_page(name: str, make: Callable[[pages.Links], str]) -> None:
        progress(f"writing {name}")
        up = "../" * name.count("/")  # the way from the page to index.html
        links = pages.Links(
            runs=f"{up}index.html",
            history=f"{up}history.html",
            plotly=f"{up}{PLOTLY_JS}",
            capacity=None,
            run=lambda slug: f"{up}runs/{slug}.html",
            pair=lambda before, after: pairs.get((before, after)),
        )
        try:
            text = make(links)
        except Exception as error:  # the pages of the other runs must not be lost
            text = pages.defect(error, links)
        write(name, pages.packed(text, up + PAGE_JS))

    for script in (PLOTLY_JS, PAGE_JS):
        write(script, template_file(script))
    for row in (row for row in rows if row.state != DAMAGED):
        write_page(f"runs/{row.slug}.html", lambda links, row=row: pages.run(workspace.run(row), links))
    before_of, followed = pages.runs_before(rows), set()
    newest_pairs = []
    for row in rows:  # newest first
        if earlier := before_of.get(row.slug):
            newest_pairs += [(earlier, row)] if row.slug not in followed else []
            followed.add(earlier.slug)
    for before, after in newest_pairs:
        with suppress(UsageError):  # they share no cell
            groups = groups_of(workspace.run(before), workspace.run(after))
            pairs[before.slug, after.slug] = name = f"compare/{before.slug}--{after.slug}.html"
            write_page(name, lambda links, groups=groups: pages.compared(groups, links))
    write_page("history.html", lambda links: pages.history(workspace, links))
    write_page("index.html", lambda links: pages.runs(workspace, links))
    return [folder / name for name in (*written, LISTING)]


def _remove_earlier(folder: Path) -> None:
    """Removes the files that an earlier export listed, and no others."""
    try:
        names = json.loads((folder / LISTING).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, LookupError, TypeError):
        return
    root = folder.resolve()
    for name in names if isinstance(names, list) else ():
        path = (root / str(name)).resolve()
        if path.is_relative_to(root) and path.is_file():
            path.unlink()
