"""junit.xml: valid for the strictest reader, right counts, and never green for what is not a pass."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest

from kvbench.gate.verdict.junit import junit
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict
from tests.support import verdicts

# element -> (attributes it must have, those it may have, elements below it), from junit-10.xsd of Jenkins' xUnit plugin
_TOLD = ({"message", "type"}, set(), set())
GRAMMAR: dict[str, tuple[set[str], set[str], set[str]]] = {
    "testsuites": ({"name"}, {"time", "tests", "failures", "errors"}, {"testsuite"}),
    "testsuite": ({"name", "tests", "failures", "errors"}, {"skipped", "time"}, {"properties", "testcase"}),
    "properties": (set(), set(), {"property"}),
    "property": ({"name", "value"}, set(), set()),
    "testcase": ({"name", "classname"}, {"time"}, {"failure", "error", "skipped", "system-out"}),
    "failure": _TOLD,
    "error": _TOLD,
    "skipped": _TOLD,
    "system-out": (set(), set(), set()),
}
TAGS = {FAIL: "failure", INVALID: "error", INCONCLUSIVE: "skipped"}


def parse(verdict: Verdict) -> ElementTree.Element:
    """The file, checked against the grammar."""
    root = ElementTree.fromstring(junit(verdict).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        must, may, below = GRAMMAR[element.tag]
        assert must <= set(element.attrib) <= must | may
        assert {child.tag for child in element} <= below
    return root


def outcomes(root: ElementTree.Element) -> dict[str, str]:
    """Test case -> its outcome, as dorny/test-reporter and GitLab take it."""
    found = {}
    for case in root.iter("testcase"):
        tags = [tag for tag in ("failure", "error", "skipped") if case.find(tag) is not None]
        assert len(tags) <= 1
        found[case.get("name") or ""] = tags[0] if tags else "success"
    return found


@pytest.mark.parametrize("name", [*verdicts.EVERY, "huge"])
def test_the_file_is_well_formed_and_its_counts_are_right(name: str) -> None:
    verdict = verdicts.huge(200) if name == "huge" else verdicts.EVERY[name]()
    root = parse(verdict)
    assert root.get("tests") == str(len(root.findall(".//testcase")))
    for suite in root:
        for key, tag in (("tests", "testcase"), ("failures", "testcase/failure"), ("errors", "testcase/error")):
            assert suite.get(key) == str(len(suite.findall(tag)))
        assert suite.get("skipped") == str(len(suite.findall("testcase/skipped")))
    assert root.get("failures") == str(sum(int(suite.get("failures") or 0) for suite in root))
    assert root.get("errors") == str(sum(int(suite.get("errors") or 0) for suite in root))
    keys = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(set(keys)) == len(keys)  # GitLab drops the second of one name
    if name not in ("hostile", "empty"):
        assert outcomes(root) == {finding.id: TAGS.get(finding.outcome, "success") for finding in verdict.findings}


@pytest.mark.parametrize(
    ("verdict", "tag"),
    [
        (verdicts.empty(), "error"),
        (Verdict("compare", PASS, "nothing"), "error"),  # a gate with no hypothesis has not passed
        (dataclasses.replace(verdicts.passed(), outcome=INVALID, sentence="the machines differ"), "error"),
        (dataclasses.replace(verdicts.passed(), outcome=FAIL), "failure"),
        (dataclasses.replace(verdicts.passed(), outcome=INCONCLUSIVE), "skipped"),
    ],
)
def test_a_verdict_that_no_finding_shows_has_a_case_of_its_own(verdict: Verdict, tag: str) -> None:
    assert outcomes(parse(verdict))["verdict"] == tag


def test_the_text_says_what_the_message_says_and_how_to_reproduce_it() -> None:
    root = parse(verdicts.counters())
    failure = root.find(".//failure")
    assert failure is not None and failure.get("message") == verdicts.counters().findings[1].sentence
    assert failure.text == "\n".join([failure.get("message") or "", *verdicts.counters().findings[1].details])
    said = root.find(".//testcase[failure]/system-out")
    assert said is not None and said.text is not None
    assert "reproduce:\nkvbench gate counters workloads/ci_counters.yaml" in said.text
    assert said.text.endswith('accept:\nkvbench accept counters --reason "..."')
    passing = root.find(".//testcase[@name='paged-p8/preemptions']/system-out")
    assert passing is not None and "reproduce" not in (passing.text or "")


def test_numbers_are_properties_for_programs() -> None:
    root = parse(verdicts.failed())
    values = {each.get("name"): float(each.get("value") or "nan") for each in root.iter("property")}
    case = "overall/p95_itl_ms"
    finding = next(each for each in verdicts.failed().findings if each.id == case)
    assert values[f"{case} effect"] == finding.change == 0.101
    assert (values[f"{case} interval_low"], values[f"{case} interval_high"]) == finding.interval
    assert (values[f"{case} p"], values[f"{case} floor"], values[f"{case} margin"]) == (0.0039, 0.02, 0.03)


def test_a_long_log_is_cut_and_names_that_differ_only_in_what_xml_cannot_hold_stay_apart() -> None:
    long = {"details": ("x" * 30_000,)}
    findings = [Finding(f"a{mark}", "cell", "t", FAIL, "one\n  two", **long) for mark in ("", "\x00", "\x1b[0m")]
    root = parse(Verdict("compare", FAIL, "s", tuple(findings)))
    assert list(outcomes(root)) == ["a", "a (2)", "a (3)"]
    failure = root.find(".//failure")
    assert failure is not None and failure.text is not None and failure.get("message") == "one two"
    assert failure.text.startswith("one\n  two\n") and len(failure.text) < 21_000 and "10,010 more" in failure.text
