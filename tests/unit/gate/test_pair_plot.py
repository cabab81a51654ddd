"""The page of pairs: every pair at its place, needing nothing from outside, and nothing of others obeyed."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from kvbench.gate.limits import judge_limits
from kvbench.gate.policy import GateLimit
from kvbench.gate.verdict.pairs import pair_page
from kvbench.gate.verdict.verdict import FAIL, PASS, Finding, Verdict
from tests.support import report_cells, verdicts


class Page:
    """The drawings of a page, as XML."""

    def __init__(self, *findings: Finding, verdict: Verdict | None = None) -> None:
        self.text = pair_page(verdict or Verdict("compare", PASS, "s", findings)) or ""
        self.svg = ElementTree.Element("svgs")
        self.svg.extend(ElementTree.fromstring(each) for each in re.findall(r"(?s)<svg.*?</svg>", self.text))

    def all(self, tag: str, of_class: str, *keys: str) -> list:
        """Elements of a class; of ``keys``, if given, the values as numbers."""
        of = [each for each in self.svg.iter() if each.tag.endswith(tag) and of_class in each.get("class", "").split()]
        return [float(each.get(key)) for each in of for key in keys] if keys else of

    def texts(self, tag: str) -> list[str]:
        return ["".join(each.itertext()) for each in self.svg.iter() if each.tag.split("}")[-1] == tag]


@pytest.mark.parametrize("name", ["failed", "hostile"])
def test_each_pair_is_a_dot_with_its_number(name):
    verdict = verdicts.EVERY[name]()
    page = Page(verdict=verdict)
    pairs = [value for finding in verdict.findings for value in finding.series if value == value]
    named = [words for words in page.texts("title") if words.startswith("pair ")]
    assert len(page.all("circle", "pair")) == len(named) == len(pairs)
    assert not re.search(r"(src|href|url)\s*=?\s*[\"(](?!data:,)", page.text)
    assert "<script" not in page.text and "<b>" not in page.text
    assert [pair_page(verdicts.EVERY[name]()) for name in ("counters", "empty", "invalid")] == [None] * 3


@pytest.mark.parametrize("higher", [False, True])
def test_places_are_in_proportion_and_worse_is_to_the_right(higher):
    worse = -1 if higher else 1
    series = (0.0, worse * 0.05, worse * 0.1)
    page = Page(verdicts.timing("a", PASS, worse * 0.05, higher=higher, series=series))
    zero, middle, far = page.all("circle", "pair", "cx")
    assert zero < middle < far and middle - zero == pytest.approx(far - middle, abs=0.2)
    places = {"zero": (0, 0), "floor": (0.02, 0.02), "margin": (0.03, 0.03), "interval": (0.041, 0.059)}
    for of_class, ends in places.items():
        found = sorted((x - zero) / (far - zero) * 0.1 for x in page.all("line", of_class, "x1", "x2"))
        assert found == pytest.approx(ends, abs=1e-3)


@pytest.mark.parametrize("change", [0.0, math.expm1(101), math.expm1(709.7)])
def test_equal_pairs_and_a_change_beyond_any_scale_stay_on_the_page(change):
    page = Page(verdicts.timing("a", FAIL, change, series=(0.0, change, change), floor=0.0, margin=0.0))
    places = page.all("circle", "pair", "cx")
    assert all(300 <= x <= 940 for x in places) and places[1] == places[2] >= places[0]
    if change:
        assert places[2] > places[0] and all(len(words) < 60 for words in page.texts("text")) and "e+" in page.text


def test_ratio_limits_have_full_names_and_their_limit_at_its_place():
    findings = []
    for cell, low, high in (("ab" * 30 + "-3", 0.95, None), ("ab" * 30 + "-32", 0.9, 1.2)):  # ratios 0.9, 1 and 1.1
        cells = [
            report_cells.cell(kind, load=int(cell.rpartition("-")[2]), throughput=throughput)
            for kind, throughput in (("paged", (90.0, 100.0, 110.0)), ("contiguous", (100.0, 100.0, 100.0)))
        ]
        limit = GateLimit("ratio", "steady_output_throughput", low=low, high=high, name=f"of {cell}")
        findings += judge_limits(report_cells.run(*cells, workload={"name": "mixed"}), [limit])
    page = Page(verdict=Verdict("limits", PASS, "s", tuple(findings)))
    written = "".join(page.texts("text")).replace(" ", "")
    assert all(finding.title.replace(" ", "") in written for finding in findings)
    assert len(page.all("line", "limit")) == 3 and not page.all("line", "floor") and not page.all("line", "interval")
    assert "<title>repeat 3: +10.0 %" in page.text and "1 (0.00 %), &gt;= 0.900 and &lt;= 1.20" in page.text
    assert re.findall(r'<span class="([^"]*(?:limit|floor|margin)[^"]*)"', page.text) == ["key limit"]
    low, middle, high = sorted((one := Page(findings[0])).all("circle", "pair", "cx"))
    assert high - middle == pytest.approx(middle - low, abs=0.2)  # less is worse
    assert (one.all("line", "limit", "x1")[0] - middle) / (high - middle) == pytest.approx(0.5, abs=0.01)


def test_hundreds_of_findings_stay_one_small_page_and_no_row_is_written_over_the_next():
    text = Page(verdict=verdicts.huge(600)).text
    assert len(text) < 500_000 and "520 more of this metric" in text
    page = Page(*(verdicts.timing(f"{'word ' * 30}{i}", PASS, 0.01) for i in range(3)))
    rows, (height, _) = sorted(page.all("rect", "row", "y")), page.all("rect", "row", "height")
    names = [float(each.get("y")) for each in page.svg.iter() if each.tag.endswith("text") and each.get("x") == "8"]
    assert rows == pytest.approx([rows[0], rows[0] + 2 * height])
    assert names == sorted(names) and len(names) > 6
