"""The page of pairs: every pair at its place, needing nothing from outside, and nothing of others obeyed."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from kvbench.gate.limits import judge_limits
from kvbench.gate.policy import Limit
from kvbench.gate.verdict.pairs import pair_page
from kvbench.gate.verdict.verdict import PASS, Finding, Verdict
from tests.support import report_cells, verdicts

_VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Elements and texts; every element that opens must close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts.append((self.open[-1], data))

    def all(self, tag: str, of_class: str) -> list[dict[str, str | None]]:
        return [
            values for name, values in self.found if name == tag and of_class in (values.get("class") or "").split()
        ]


@pytest.mark.parametrize("name", ["failed", "passed", "inconclusive", "hostile"])
def test_each_pair_is_a_dot_with_its_number(name: str) -> None:
    verdict = verdicts.EVERY[name]()
    text = pair_page(verdict)
    assert text is not None
    page = Page(text)
    pairs = [value for finding in verdict.findings for value in finding.series if value == value]
    assert len(page.all("circle", "pair")) == len(pairs)
    named = [words for tag, words in page.texts if tag == "title" and words.startswith("pair ")]
    assert len(named) == len(pairs)
    assert not re.search(r"(src|href|url)\s*=?\s*[\"(]", text) and "<script" not in text and "<b>" not in text


@pytest.mark.parametrize("name", ["counters", "empty", "invalid"])
def test_without_pairs_there_is_no_page(name: str) -> None:
    assert pair_page(verdicts.EVERY[name]()) is None


@pytest.mark.parametrize("higher", [False, True])
def test_places_are_in_proportion_and_worse_is_to_the_right(higher: bool) -> None:
    worse = -1 if higher else 1
    finding = verdicts.timing("a", PASS, worse * 0.05, higher=higher, series=(0.0, worse * 0.05, worse * 0.1))
    page = Page(pair_page(Verdict("compare", PASS, "s", (finding,))) or "")
    zero, middle, far = (float(values["cx"] or "nan") for values in page.all("circle", "pair"))
    assert zero < middle < far and middle - zero == pytest.approx(far - middle, abs=0.2)
    per_unit = (far - zero) / 0.1

    def at(of_class: str) -> float:
        (line,) = page.all("line", of_class)
        assert line["x1"] == line["x2"]
        return (float(line["x1"] or "nan") - zero) / per_unit

    assert at("zero") == pytest.approx(0.0, abs=1e-3)
    assert at("floor") == pytest.approx(0.02, abs=1e-3)
    assert at("margin") == pytest.approx(0.03, abs=1e-3)
    (bar,) = page.all("line", "interval")
    ends = sorted((float(bar[x] or "nan") - zero) / per_unit for x in ("x1", "x2"))
    assert ends == pytest.approx([0.041, 0.059], abs=1e-3)


def test_hundreds_of_findings_stay_one_small_page() -> None:
    text = pair_page(verdicts.huge(600)) or ""
    assert len(text) < 500_000 and "… and 520 more of this metric" in text


def test_pairs_that_are_all_equal_can_be_drawn() -> None:
    finding = verdicts.timing("a", PASS, 0.0, series=(0.0, 0.0), floor=0.0, margin=0.0)
    assert len(Page(pair_page(Verdict("compare", PASS, "s", (finding,))) or "").all("circle", "pair")) == 2


def ratio(cell: str, low: float, high: float | None = None, every: bool = False) -> Finding:
    """As the limits gate makes it, of three repeats: 0.9, 1.0 and 1.1 of another configuration."""
    load = cell.rpartition("-")[2]
    cells = [
        report_cells.cell(kind, load=int(load), throughput=throughput)
        for kind, throughput in (("paged", (90.0, 100.0, 110.0)), ("contiguous", (100.0, 100.0, 100.0)))
    ]
    limit = Limit("ratio", "steady_output_throughput", low=low, high=high, every=every, name=f"of {cell}")
    (finding,) = judge_limits(report_cells.run(*cells, workload={"name": "mixed"}), [limit])
    return finding


def test_ratio_limits_have_full_names_their_limit_and_no_legend_of_what_is_not_there() -> None:
    findings = (ratio("ab" * 30 + "-3", 0.95), ratio("ab" * 30 + "-32", 0.9, 1.2))
    text = pair_page(Verdict("limits", PASS, "s", findings)) or ""
    page = Page(text)
    written = "".join(words for tag, words in page.texts if tag == "text").replace(" ", "")
    for finding in findings:
        assert finding.title.replace(" ", "") in written
    assert len(page.all("line", "limit")) == 3 and not page.all("line", "floor") and not page.all("line", "interval")
    assert "one repeat" in text and "<title>repeat 3: +10.0 %" in text
    body = text.partition("</style>")[2]
    assert 'class="key limit"' in body and 'class="key floor"' not in body and 'class="key margin"' not in body
    assert "1 (0.00 %), &gt;= 0.900 and &lt;= 1.20" in body


def test_the_limit_of_a_ratio_is_drawn_at_its_place() -> None:
    page = Page(pair_page(Verdict("limits", PASS, "s", (ratio("a-3", 0.95),))) or "")
    low, middle, high = sorted(float(values["cx"] or "nan") for values in page.all("circle", "pair"))
    (limit,) = page.all("line", "limit")
    assert high - middle == pytest.approx(middle - low, abs=0.2)  # 1.1, 1.0 and 0.9, less being worse
    assert (float(limit["x1"] or "nan") - middle) / (high - middle) == pytest.approx(0.5, abs=0.01)


def test_no_row_of_a_panel_is_written_over_the_next() -> None:
    findings = tuple(verdicts.timing(f"{'word ' * 30}{i}", PASS, 0.01) for i in range(3))
    page = Page(pair_page(Verdict("compare", PASS, "s", findings)) or "")
    rows = sorted(float(values["y"] or "nan") for values in page.all("rect", "row"))
    height = {float(values["height"] or "nan") for values in page.all("rect", "row")}
    names = [float(values["y"] or "nan") for tag, values in page.found if tag == "text" and values.get("x") == "8"]
    assert rows == pytest.approx([rows[0], rows[0] + 2 * height.pop()])
    assert names == sorted(names) and len(names) > 6
