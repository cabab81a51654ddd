"""The checks of pages find what they are for, and nothing on a page that is well."""

from __future__ import annotations

from pathlib import Path

import plotly.graph_objects as go
import pytest

from kvbench.report.page import render
from kvbench.report.style import Drawing, finish
from tests.support.browser import PHONE, Browser

SCRIPTS = {
    "<script>console.error('it broke')</script>": "it broke",
    "<script>throw new Error('thrown')</script>": "thrown",
    "<script>alert(1)</script>": "dialog",
    "<img src='missing.png'>": "missing.png",
    "<div class='plot'></div>": "drawn",
}
LAYOUTS = {
    "<h2>One heading</h2><h2 style='margin-top:-24px'>another heading</h2>": "overlap",
    "<table><tr><td style='position:relative;left:40px'>first cell</td><td>second cell</td></tr></table>": "overlap",
    "<p style='width:60px;overflow:hidden;white-space:nowrap'>a sentence that is cut</p>": "is cut",
    "<table style='table-layout:fixed;width:90px'><td style='white-space:nowrap'>wider than its cell</table>": "is cut",
    "<div style='width:2000px'>wide</div>": "px wide in a window",
}  # fmt: skip
WELL = """<h1>A heading</h1><p>Text over <b>several</b> lines, <code>which</code> is long enough to wrap in the window
of a phone.</p><div style='overflow-x:auto'><table><tr><td style='white-space:nowrap'>a row that is wider than the
window of a phone, and scrolls within its frame</td><td>next</td></tr></table></div>
<details><summary>closed</summary><div style='width:9000px'>not seen</div></details><button>press</button>"""


def written(folder: Path, body: str) -> Path:
    path = folder / "page.html"
    path.write_text(f"<!doctype html><link rel=icon href='data:,'><body><main>{body}</main>")
    return path


@pytest.mark.parametrize("faults", [SCRIPTS, LAYOUTS])
def test_faults_are_found(browser: Browser, tmp_path: Path, faults: dict[str, str]) -> None:
    with browser.open(written(tmp_path, WELL + "".join(faults)), width=PHONE, draw_within_s=0.3) as page:
        found = page.problems()
    assert [said for said in faults.values() if not any(said in each for each in found)] == []


def test_a_page_that_is_well_has_no_problem_and_hidden_controls_are_named(browser: Browser, tmp_path: Path) -> None:
    with browser.open(written(tmp_path, WELL), width=PHONE) as page:
        assert page.problems() == [] and page.unreached_by_tab() == []
    with browser.open(written(tmp_path, WELL + "<button tabindex=-1 id=skipped>never</button>")) as page:
        assert [each.split(">")[0] for each in page.unreached_by_tab()] == ['<button tabindex="-1" id="skipped"']


@pytest.mark.parametrize(
    ("change", "found"),
    [({}, ""), ({"title_text": "an axis " * 60}, "leaves the figure"), ({"tickvals": [1, 1.001]}, "overlap"),
     ({"traces": False}, "nothing is drawn")],
)  # fmt: skip
def test_a_figure_is_drawn_whole_or_what_is_wrong_is_said(
    browser: Browser, tmp_path: Path, change: dict[str, object], found: str
) -> None:
    traces = change.pop("traces", True)
    figure = finish(go.Figure([go.Scatter(x=[1, 2], y=[1, 3], name="line")] if traces else []), 300)
    figure.update_xaxes(range=[0, 3], **change)
    drawing = Drawing("one", "A title", "A caption.", figure)
    path = tmp_path / "page.html"
    path.write_text(render("trace.html.j2", [drawing], title="t", about=["A heading"], facts=[], length_heads=[],
                           length_rows=[], cache_heads=[], cache_rows=[], drawings=[drawing]))  # fmt: skip
    with browser.open(path) as page:
        problems = page.problems()
    assert problems if found else not problems
    assert all(found in each and "figure one" in each for each in problems)
