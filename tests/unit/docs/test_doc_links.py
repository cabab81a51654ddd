"""The pages of the documentation name paths that exist, and their links and anchors lead somewhere."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FOLDERS = "kvbench|engine|kernels|ci|workloads|tests|docs"
_PATH = re.compile(rf"(?<![\w./~-])(?:{_FOLDERS})/[\w./*-]*[\w*/]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_WRITTEN = {"ci/noise/"}
"""Paths that a reader's own commands write."""


def anchors(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, as GitHub makes them: a repeated one gets a number."""
    text, seen, result = _FENCED.sub("", page.read_text()), Counter[str](), set[str]()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        anchor = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        result.add(f"{anchor}-{seen[anchor]}" if seen[anchor] else anchor)
        seen[anchor] += 1
    return result


def broken_links(page: Path) -> Iterator[str]:
    """Yields the relative links of a page to a file or an anchor that is not there."""
    for link in _LINK.findall(page.read_text()):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            yield link


def missing_paths(page: Path) -> Iterator[str]:
    """Yields the paths that a page names and that are not there; a ``*`` stands for anything."""
    for path in sorted(set(_PATH.findall(page.read_text())) - _WRITTEN):
        if not any(ROOT.glob(path.rstrip("/"))):
            yield path


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_of_a_page_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_that_a_page_names_exist(page: Path) -> None:
    assert list(missing_paths(page)) == []


def test_a_broken_link_a_lost_anchor_and_a_moved_file_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A page, read once\n[here](#a-page-read-once) [lost](#gone) [no file](gone.md) [web](https://x.org/#a)\n"
        "`kvbench/metrics/`, `kvbench/gone.py` and ../kvbench/gone.py of elsewhere\n"
    )
    assert list(broken_links(page)) == ["#gone", "gone.md"]
    assert list(missing_paths(page)) == ["kvbench/gone.py"]


def test_every_file_where_something_is_changed_exists() -> None:
    """Checks "Where to change what", in which a name without a folder lies beside the one before it."""
    missing = []
    page = (ROOT / "docs" / "architecture.md").read_text()
    for row in page.partition("## Where to change what")[2].partition("## What holds everywhere")[0].splitlines():
        folder = ROOT
        for name in re.findall(r"`([\w./]+\.(?:py|json|toml|yaml|md)|(?:[\w.]+/)+)`", row):
            path = ROOT / name if (ROOT / name).exists() else folder / name
            folder = path if path.is_dir() else path.parent
            if not path.exists():
                missing.append(name)
    assert missing == []
