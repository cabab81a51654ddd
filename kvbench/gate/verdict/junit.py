"""junit.xml: one test case a finding, as GitLab, Jenkins and GitHub's test reporters read it.

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

# outcome -> (element, its type)
_ELEMENTS = {FAIL: ("failure", "regression"), INVALID: ("error", "invalid"), INCONCLUSIVE: ("skipped", "inconclusive")}
_COUNTS = {"failures": "failure", "errors": "error", "skipped": "skipped"}
TEXT = 20_000  # characters of one text; GitLab takes 30 MB a file
MESSAGE = 1_000


def junit(verdict: Verdict) -> str:
    """The whole file. It never looks green where the verdict is not a pass."""
    suites: dict[str, list[Finding]] = {}
    for finding in (*verdict.findings, *_whole(verdict)):
        suites.setdefault(wording.line(finding.suite) or "findings", []).append(finding)
    root = ElementTree.Element("testsuites", name=f"kvbench {verdict.kind}", time="0")
    for name, findings in suites.items():
        _suite(root, f"kvbench.{verdict.kind}.{name}", findings, verdict)
    for key, tag in (("tests", "testcase"), *list(_COUNTS.items())[:2]):  # junit-10 has no sum of the skipped
        root.set(key, str(len(root.findall(f".//{tag}"))))
    ElementTree.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _whole(verdict: Verdict) -> list[Finding]:
    """A case for a verdict that none of its findings shows: an empty comparison, a run that broke off."""
    outcome = EMPTY if verdict.outcome == PASS and not verdict.findings else verdict.outcome
    if outcome == PASS or verdict.of(outcome):
        return []
    shown = INVALID if outcome == EMPTY else outcome
    sentence = verdict.sentence or "nothing was compared"
    return [Finding("verdict", "verdict", "The verdict", shown, sentence, details=verdict.notes)]


def _suite(root: ElementTree.Element, name: str, findings: list[Finding], verdict: Verdict) -> None:
    """The test suite with its counts, properties and cases."""
    suite = ElementTree.SubElement(root, "testsuite", name=name, tests=str(len(findings)))
    properties = ElementTree.SubElement(suite, "properties")
    taken: Counter[str] = Counter()
    for finding in findings:
        case_name = wording.line(finding.id, MESSAGE) or "unnamed"
        taken[case_name] += 1
        if taken[case_name] > 1:  # ids that differ only in what XML cannot hold
            case_name += f" ({taken[case_name]})"
        for key, value in _values(finding).items():
            ElementTree.SubElement(properties, "property", name=f"{case_name} {key}", value=value)
        _case(suite, name, case_name, finding, verdict)
    for key, tag in _COUNTS.items():
        suite.set(key, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("time", "0")


def _case(suite: ElementTree.Element, class_name: str, name: str, finding: Finding, verdict: Verdict) -> None:
    case = ElementTree.SubElement(suite, "testcase", classname=class_name, name=name, time="0")
    if finding.outcome in _ELEMENTS:
        tag, kind = _ELEMENTS[finding.outcome]
        message = wording.line(finding.sentence, MESSAGE) or wording.LABELS[finding.outcome]
        element = ElementTree.SubElement(case, tag, message=message, type=kind)
        element.text = _text([wording.clean(finding.sentence) or message, *map(wording.clean, finding.details)])
    said = [wording.line(finding.title), *(f"{key}: {value}" for key, value in _numbers(finding).items())]
    if finding.outcome == PASS:
        said.insert(1, wording.line(finding.sentence))
    elif verdict.reproduce:
        said += ["reproduce:", wording.clean(verdict.reproduce)]
        said += ["accept:", wording.clean(verdict.accept)] if verdict.accept and finding.outcome == FAIL else []
    ElementTree.SubElement(case, "system-out").text = _text(said)


def _values(finding: Finding) -> dict[str, str]:
    """Its numbers for programs: changes are parts of the base, values in the unit."""
    low, high = finding.interval or (None, None)
    values = {
        "base": finding.base,
        "candidate": finding.candidate,
        "effect": finding.change,
        "interval_low": low,
        "interval_high": high,
        "p": finding.p,
        **{wording.line(key): value for key, value in finding.figures.items()},
    }
    return {key: repr(float(value)) for key, value in values.items() if wording.is_number(value)}


def _numbers(finding: Finding) -> dict[str, str]:
    """Its numbers for people, by name."""
    numbers = {
        "metric": wording.line(finding.metric or ""),
        "base": wording.quantity(finding.base, finding.unit),
        "candidate": wording.quantity(finding.candidate, finding.unit),
        "effect": wording.percent(finding.change),
        "95 % interval": wording.interval(finding.interval) and f"{wording.interval(finding.interval)} %",
        "p": wording.probability(finding.p),
        **{wording.figure_name(k): wording.figure(k, v, finding) for k, v in finding.figures.items()},
    }
    return {key: value for key, value in numbers.items() if value and value != wording.NONE}


def _text(lines: list[str]) -> str:
    text = "\n".join(each for each in lines if each)
    return text if len(text) <= TEXT else text[:TEXT] + f"\n… cut: {len(text) - TEXT:,} more characters in verdict.json"
