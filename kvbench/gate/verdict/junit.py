"""The file junit.xml: one test case a finding, as GitLab, Jenkins and GitHub's test reporters read it.

A failure is a regression, an error an invalid measurement, skipped is inconclusive. The elements are those of Jenkins'
strictest reader (junit-10.xsd of its xUnit plugin), which has properties of a suite but none of a test case: so each
suite has the numbers of its cases, named ``<test case> <figure>``. GitLab and dorny/test-reporter show the text of a
failure and not its ``message``, so both have the sentence; GitLab drops a second case of one name.
"""

from __future__ import annotations

from collections import Counter
from xml.etree import ElementTree

from kvbench.gate.verdict import wording
from kvbench.gate.verdict.verdict import EMPTY, FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict

# outcome -> (element, its type, the count of it in a suite)
_ELEMENTS = {
    FAIL: ("failure", "regression", "failures"),
    INVALID: ("error", "invalid", "errors"),
    INCONCLUSIVE: ("skipped", "inconclusive", "skipped"),
}
TEXT = 20_000  # characters of one text; GitLab takes 30 MB a file
MESSAGE = 1_000


def junit(verdict: Verdict) -> str:
    """The whole file. A verdict that is not a pass always has a failure, an error or a skipped case."""
    suites: dict[str, list[Finding]] = {}
    outcome, findings = verdict.outcome, list(verdict.findings)
    if outcome == PASS and not findings:
        outcome = EMPTY
    if outcome != PASS and not verdict.of(outcome):  # of none of its findings, such as an empty comparison
        shown, text = INVALID if outcome == EMPTY else outcome, verdict.sentence or "nothing was compared"
        findings.append(Finding("verdict", "verdict", "The verdict", shown, text, details=verdict.notes))
    for finding in findings:
        suites.setdefault(wording.line(finding.suite) or "findings", []).append(finding)
    root = ElementTree.Element("testsuites", name=f"kvbench {verdict.kind}", time="0")
    for name, of_suite in suites.items():
        _suite(root, f"kvbench.{verdict.kind}.{name}", of_suite, verdict)
    for key, tag in (("tests", "testcase"), ("failures", "failure"), ("errors", "error")):  # junit-10 has no skipped
        root.set(key, str(len(root.findall(f".//{tag}"))))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: ElementTree.Element, name: str, findings: list[Finding], verdict: Verdict) -> None:
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(findings)), time="0")
    for outcome, (_, _, count) in _ELEMENTS.items():
        suite.set(count, str(sum(finding.outcome == outcome for finding in findings)))
    properties = ElementTree.SubElement(suite, "properties")
    taken: Counter[str] = Counter()
    for finding in findings:
        case_name = wording.line(finding.id, MESSAGE) or "unnamed"
        taken[case_name] += 1
        if taken[case_name] > 1:  # ids that differ only in what XML cannot hold
            case_name += f" ({taken[case_name]})"
        numbers = []
        for key, value, words in _numbers(finding):
            if wording.is_number(value):
                key = wording.line(key)
                ElementTree.SubElement(properties, "property", name=f"{case_name} {key}", value=repr(float(value)))
                numbers.append(f"{wording.spaced(key)}: {words}")
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=case_name, time="0")
        _fill(case, finding, numbers, verdict)


def _fill(case: ElementTree.Element, finding: Finding, numbers: list[str], verdict: Verdict) -> None:
    lines = [wording.line(finding.title), *numbers]
    if finding.outcome == PASS:
        lines.insert(1, wording.line(finding.sentence))
    else:
        tag, kind, _ = _ELEMENTS[finding.outcome]
        message = wording.line(finding.sentence, MESSAGE) or wording.LABELS[finding.outcome]
        element = ElementTree.SubElement(case, tag, message=message, type=kind)
        element.text = _text([wording.clean(finding.sentence) or message, *map(wording.clean, finding.details)])
        lines += ["reproduce:", wording.clean(verdict.reproduce)] if verdict.reproduce else []
        lines += ["accept:", wording.clean(verdict.accept)] if verdict.accept and finding.outcome == FAIL else []
    ElementTree.SubElement(case, "system-out").text = _text(lines)


def _numbers(finding: Finding) -> list[tuple[str, float | None, str]]:
    """The name, the value and the words of each number; changes are shares of the base."""
    low, high = finding.interval or (None, None)
    return [
        ("base", finding.base, wording.quantity(finding.base, finding.unit)),
        ("candidate", finding.candidate, wording.quantity(finding.candidate, finding.unit)),
        ("effect", finding.change, wording.percent(finding.change)),
        ("interval_low", low, wording.percent(low)),
        ("interval_high", high, wording.percent(high)),
        ("p", finding.p, wording.probability(finding.p)),
        *((name, value, wording.figure(name, finding)) for name, value in finding.figures.items()),
    ]


def _text(lines: list[str]) -> str:
    text = "\n".join(line for line in lines if line)
    return text if len(text) <= TEXT else text[:TEXT] + f"\n… cut: {len(text) - TEXT:,} more characters in verdict.json"
