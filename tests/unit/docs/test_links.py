"""The pages of docs/: links lead somewhere, and the files that architecture.md names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvbench.common.packages import REPOSITORY

ROOT = Path(REPOSITORY)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not link.startswith("http") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert broken == []


def test_every_file_where_something_is_changed_exists() -> None:
    missing = []
    text = (ROOT / "docs" / "architecture.md").read_text()
    for line in text.partition("## Where to change what")[2].partition("## What holds everywhere")[0].splitlines():
        folder = ROOT
        for name in re.findall(r"`([\w./]+\.(?:py|json|toml|yaml|md)|(?:[\w.]+/)+)`", line):
            path = ROOT / name if (ROOT / name).exists() else folder / name
            folder = path if path.is_dir() else path.parent
            if not path.exists():
                missing.append(name)
    assert missing == []
