"""Figures as PNG files: as large as on the page, white, with their title; and what is missing is said."""

from __future__ import annotations

import os
import shutil
import struct
import sys
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest

from kvbench.cli.main import main
from kvbench.common.errors import UsageError
from kvbench.report.document import document
from kvbench.report.png import SCALE, WIDTH, write_pngs
from kvbench.report.style import Drawing, finish
from kvbench.runs.model import Run
from tests.support.report_cells import cell
from tests.support.report_cells import run as run_of_cells

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
needs_browser = pytest.mark.skipif(
    not (os.environ.get("BROWSER_PATH") or any(map(shutil.which, BROWSERS))), reason="no Chrome or Chromium"
)


def size_and_corner(path: Path) -> tuple[int, int, bytes]:
    """Width and height [px] of a PNG file, and the colours of its first pixel."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    packed, at = b"", 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        packed += data[at + 8 : at + 8 + length] if data[at + 4 : at + 8] == b"IDAT" else b""
        at += 12 + length
    return *struct.unpack(">II", data[16:24]), zlib.decompress(packed)[1:4]  # behind the row's filter


def drawn(key: str, title: str = "Paged is ahead", min_width: int = 0, **legend: Any) -> Drawing:
    figure = finish(go.Figure(go.Scatter(x=[1, 2], y=[3, 4], name="a")), 400)
    return Drawing(key, title, "", figure.update_layout(legend=legend), min_width)


@pytest.mark.full
@needs_browser
def test_files_are_named_by_key_as_large_as_on_the_page_twice_and_white(tmp_path: Path) -> None:
    shown = [*document(run_of_cells(cell(), cell("contiguous"))).drawings[:1], drawn("wide", min_width=1500)]
    paths = write_pngs(shown, tmp_path)
    assert [path.name for path in paths] == [f"{drawing.key}.png" for drawing in shown]
    for path, drawing in zip(paths, shown, strict=True):
        width, height, corner = size_and_corner(path)
        assert width == SCALE * max(WIDTH, drawing.min_width) and corner == b"\xff\xff\xff"
        assert SCALE * drawing.figure.layout.height < height < SCALE * (drawing.figure.layout.height + 100)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is given to kaleido, which draws nothing here."""
    given: list[dict[str, Any]] = []
    errors = types.SimpleNamespace(BrowserFailedError=OSError, ChromeNotFoundError=OSError)
    kaleido = types.SimpleNamespace(
        errors=errors, write_fig_from_object_sync=lambda jobs, **how: given.extend({**job, **how} for job in jobs)
    )
    monkeypatch.setitem(sys.modules, "kaleido", kaleido)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "kaleido.errors", errors)  # type: ignore[arg-type]
    return given


def test_report_writes_the_main_figures_beside_the_report(
    jobs: list[dict[str, Any]], make: Callable[..., Run], tmp_path: Path
) -> None:
    run, out = make(repeats=1, concurrencies=(3,), num_requests=10), tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run.folder), "--png", "--output-dir", str(out)])
    assert ended.value.code == 0 and (out / "report.html").is_file()
    assert [job["path"] for job in jobs] == [
        out / f"{name}.png" for name in ("effects", "frontier", "ledger", "kv-timeline-closed-3")
    ]


def test_a_title_stands_above_the_figure_and_is_never_read_as_markup(jobs: list[dict[str, Any]]) -> None:
    one = drawn("one", "<script>alert(1)</script> is ahead " + "of all the others " * 10)
    within = drawn("two", yref="paper", y=0.5)
    before = one.figure.to_json()
    write_pngs([one, within], Path("out"))
    long, short = (job["fig"].layout for job in jobs)
    assert jobs[0]["kopts"]["mathjax"] is False  # kaleido's page would load it from a CDN
    assert "<script" not in long.title.text and "&lt;script&gt;" in long.title.text
    rows = long.title.text.split("<br>")
    assert len(rows) == 2 and long.height > short.height > 400
    room = long.height - one.figure.layout.height
    assert long.margin.t - one.figure.layout.margin.t == room  # the axes are as high as before
    assert 1 - long.title.y < room / long.height and long.legend.y == pytest.approx(1 - room / long.height)
    assert short.legend.y == 0.5  # within the axes
    assert one.figure.to_json() == before


def test_without_kaleido_or_a_browser_the_report_is_written_and_the_exit_code_is_2(make, monkeypatch, capsys) -> None:
    run = make(repeats=1, concurrencies=(3,), num_requests=10)
    monkeypatch.setenv("BROWSER_PATH", "/nonexistent/chrome")
    pytest.importorskip("kaleido")
    with pytest.raises(UsageError, match="install one"):
        write_pngs([drawn("one")], run.folder)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(SystemExit) as ended:
        main(["report", str(run.folder), "--png"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "pip install 'kaleido>=1'" in said and len(said.strip().splitlines()) == 1
    assert (run.folder / "report.html").is_file() and not list(run.folder.glob("*.png"))
