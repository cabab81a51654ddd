"""The report as a reader sees it, in headless Chromium: drawn, whole, reachable by keyboard, at 1300 and 400 px."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from kvbench.report.document import document
from kvbench.report.page import write_report
from kvbench.runs.read import read_run
from tests.support.browser import LAPTOP, PHONE
from tests.support.synthetic_run import make_run
from tests.support.toy_engine import Scenario

pytestmark = pytest.mark.full

_MOST_BYTES = 6_000_000
_BOTTOMS = """() => ["effects", "frontier"].map(
  id => document.querySelector(`#${id} .plot`).getBoundingClientRect().bottom)"""

_FRONTIER = """() => [
  [...document.querySelectorAll("#frontier .bglayer .bg")].map(panel => panel.getBoundingClientRect().toJSON()),
  document.querySelector("#frontier .scroll").getBoundingClientRect().right]"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """report.html of a run with every configuration of the toy engine, and the quality of their answers."""
    scenario = Scenario(quality="beside")
    run = read_run(make_run(tmp_path_factory.mktemp("drawn") / "mixed" / "run", scenario))
    return write_report(document(run), run.folder)[0]


other = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.parametrize(
    ("width", "scheme"), [(PHONE, "dark"), other(LAPTOP, "light"), other(LAPTOP, "dark"), other(PHONE, "light")]
)
def test_every_figure_is_drawn_and_no_text_is_cut_or_covered(browser, report: Path, width: int, scheme: str) -> None:
    with browser.open(report, width=width, scheme=scheme) as page:
        assert page.problems() == []
        assert page.page.locator(".plot .main-svg").count() > 0
        page.page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
        page.settle()
        assert page.problems() == []


def test_the_first_screen_of_a_laptop_ends_below_effects_and_frontier(browser, report: Path) -> None:
    """The sentence, validity, answers, limits, effects and frontier are seen without scrolling."""
    assert report.stat().st_size < _MOST_BYTES
    with browser.open(report, width=1440, height=900) as page:
        assert max(page.page.evaluate(_BOTTOMS)) <= 900


def test_a_phone_scrolls_no_page_and_stacks_the_panels_of_throughput_against_latency(browser, report: Path) -> None:
    with browser.open(report, width=PHONE) as page:
        page.page.evaluate("() => document.querySelectorAll('details').forEach(each => { each.open = true; })")
        page.settle()
        assert page.page.evaluate("() => document.documentElement.scrollWidth") <= PHONE
        (first, second), right = page.page.evaluate(_FRONTIER)
        assert first["bottom"] < second["top"] and max(first["right"], second["right"]) <= right <= PHONE
    with browser.open(report, width=LAPTOP) as page:
        (first, second), _ = page.page.evaluate(_FRONTIER)
        assert first["right"] < second["left"]


def test_everything_that_opens_or_sorts_is_reached_by_keyboard(browser, report: Path) -> None:
    with browser.open(report) as page:
        assert page.unreached_by_tab() == []
