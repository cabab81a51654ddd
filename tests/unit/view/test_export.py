"""The workspace as static pages: whole, linked, small, and never over somebody's files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kvbench.cli.main import main
from kvbench.common.errors import UsageError
from kvbench.view.export import LISTING, export
from kvbench.view.workspace import Workspace
from tests.unit.view.test_server import FAST, SLOW, listing, write_run


@pytest.fixture
def results(tmp_path: Path) -> Path:
    folder = tmp_path / "results"
    for day, cells in enumerate((SLOW, FAST)):
        write_run(folder, day, cells)
    (write_run(folder, 3, FAST) / "manifest.json").write_text("{")
    return folder


def test_every_page_is_there_and_every_link_leads_to_one(results: Path, tmp_path: Path, capsys) -> None:
    before, public = listing(results), tmp_path / "public"
    with pytest.raises(SystemExit) as ended:
        main(["view", str(results), "--export", str(public)])
    assert ended.value.code == 0 and f"{public / 'index.html'} (3 runs" in capsys.readouterr().out
    assert listing(results) == before
    files = {path for path in public.rglob("*") if path.is_file()}
    assert len(list(public.glob("runs/*.html"))) == 2
    assert len(list(public.glob("compare/*.html"))) == 1 and len(list(public.glob("plotly-*.js"))) == 1
    for page in public.rglob("*.html"):
        text = page.read_text()
        links = re.findall(r'\b(?:href|src)="([^"]*)"', text)
        assert links and "<form" not in text and len(text) < 500_000
        for link in links:
            assert link == "data:," or (page.parent / link).resolve() in files, (page.name, link)
    index = (public / "index.html").read_text()
    assert index.count('href="runs/') == 2 and index.count('href="compare/') == 1 and "damaged" in index
    assert "Capacity" not in index and str(tmp_path) not in index


def test_an_export_replaces_an_earlier_one_and_nothing_else(results: Path, tmp_path: Path) -> None:
    public = tmp_path / "public"
    public.mkdir()
    export(Workspace([results]), public)
    gone = next(public.glob("runs/*.html"))
    (public / "kept.txt").write_text("mine")
    outside = f"../{next(results.glob('*/*/summary.csv')).relative_to(tmp_path)}"
    stale = {"files": [*json.loads((public / LISTING).read_text())["files"], "runs/old.html", outside, "/x"]}
    (public / LISTING).write_text(json.dumps(stale))
    (public / "runs" / "old.html").write_text("old")
    before = listing(results)
    export(Workspace([results]), public)
    assert gone.is_file() and not (public / "runs" / "old.html").exists()
    assert (public / "kept.txt").read_text() == "mine" and listing(results) == before


def test_a_folder_with_other_files_and_a_file_are_refused(results: Path, tmp_path: Path) -> None:
    for wrong in (results, next(results.glob("*/*/summary.csv"))):
        before = listing(results)
        with pytest.raises(UsageError, match="--export"):
            export(Workspace([results]), wrong)
        assert listing(results) == before


@pytest.mark.parametrize(("wrong", "code"), [("no folder", 2), ("unwritable", 2), ("no run", 5)])
def test_the_command_says_why_it_cannot_export(wrong: str, code: int, results: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "empty").mkdir()
    folder = {"no folder": tmp_path / "gone", "no run": tmp_path / "empty"}.get(wrong, results)
    target = Path("/proc/public") if wrong == "unwritable" else tmp_path / "public"
    with pytest.raises(SystemExit) as ended:
        main(["view", str(folder), "--export", str(target)])
    said = capsys.readouterr()
    assert ended.value.code == code and len(said.err.splitlines()) == 1 and not said.out
    assert not (tmp_path / "public").exists()
