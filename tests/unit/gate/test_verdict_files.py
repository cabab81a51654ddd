"""The files of a verdict: verdict.json by its schema, junit.xml for the strictest reader, github-action-benchmark's."""

from __future__ import annotations

import csv
import dataclasses
import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import kvbench.gate.verdict
from kvbench.cli.gate import results
from kvbench.gate.limits import sweep_benchmarks
from kvbench.gate.verdict.junit import junit
from kvbench.gate.verdict.outputs import BIGGER, SMALLER, verdict_benchmarks, write_benchmarks, write_outputs
from kvbench.gate.verdict.verdict import FAIL, INCONCLUSIVE, INVALID, PASS, Finding, Verdict
from tests.support import verdicts

SCHEMA = json.loads((Path(kvbench.gate.verdict.__file__).parent / "verdict.schema.json").read_bytes())
TYPES = {"object": dict, "array": list, "string": str, "number": (int, float), "boolean": bool, "null": type(None)}
RULES = {  # keyword -> whether a value keeps to it
    "type": lambda v, names: isinstance(v, tuple(TYPES[name] for name in names)),
    "const": lambda v, rule: v == rule,
    "enum": lambda v, rule: v in rule,
    "required": lambda v, rule: set(rule) <= set(v),
    "minimum": lambda v, rule: v is None or v >= rule,
    "maximum": lambda v, rule: v is None or v <= rule,
    "minItems": lambda v, rule: v is None or len(v) >= rule,
    "maxItems": lambda v, rule: v is None or len(v) <= rule,
    "minLength": lambda v, rule: len(v) >= rule,
}


def errors(value: Any, schema: dict[str, Any], where: str = "$") -> list[str]:
    """The places where ``value`` breaks a rule of JSON Schema, of the keywords that ours has."""
    schema = schema | (SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {})
    if isinstance(schema.get("type"), str):
        schema["type"] = [schema["type"]]
    found = [f"{where}: {key}" for key in RULES if key in schema and not RULES[key](value, schema[key])]
    known, others = schema.get("properties", {}), schema.get("additionalProperties", {})
    for key, below in value.items() if isinstance(value, dict) else ():
        rule = known.get(key, others)
        found += [f"{where}.{key} is unknown"] if rule is False else errors(below, rule, f"{where}.{key}")
    for i, item in enumerate(value) if isinstance(value, list) else ():
        found += errors(item, schema.get("items", {}), f"{where}[{i}]")
    return found


@pytest.mark.parametrize("name", verdicts.EVERY)
def test_every_verdict_is_written_whole_and_conforms(name, tmp_path):
    verdict = verdicts.EVERY[name]()
    written = write_outputs(verdict, tmp_path)
    assert sorted(written) == sorted(tmp_path.iterdir())
    assert [path.name for path in written[:3]] == ["verdict.json", "junit.xml", "summary.md"]
    document = json.loads((tmp_path / "verdict.json").read_bytes())
    assert errors(document, SCHEMA) == [] and document["exit_code"] == verdict.exit_code
    for path in written:
        assert path.read_bytes().decode("utf-8")
    if name == "invalid":  # a number that could not be had is null
        assert verdicts.read(tmp_path).findings[1].figures["kld"] is None
    elif name != "hostile":
        assert verdicts.read(tmp_path) == verdict


def test_the_schema_refuses_what_is_no_verdict():
    document = json.loads(json.dumps(verdicts.failed().to_json()))
    wrong = {"outcome": "green", "exit_code": 2, "more": 1, "findings": [{"id": "a"}], "moved": [{"interval": [1.0]}]}
    for key, value in wrong.items():
        found = errors(document | {key: value}, SCHEMA)
        assert found and all(each.startswith(f"$.{key}") for each in found)


def test_files_of_an_earlier_verdict_do_not_stay(tmp_path):
    write_outputs(verdicts.failed(), tmp_path)
    assert (tmp_path / "pairs.html").exists() and (tmp_path / "benchmark-bigger-is-better.json").exists()
    write_outputs(verdicts.empty(), tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"verdict.json", "junit.xml", "summary.md"}
    with pytest.raises(FileExistsError, match="verdict"):
        write_outputs(verdicts.failed(), tmp_path / "verdict.json")


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


def parse(verdict: Verdict) -> tuple[ElementTree.Element, dict[str, str]]:
    """junit.xml, checked against the grammar, and the outcome of each test case as GitLab takes it."""
    root = ElementTree.fromstring(junit(verdict).encode())
    assert root.tag == "testsuites"
    for element in root.iter():
        must, may, below = GRAMMAR[element.tag]
        assert must <= set(element.attrib) <= must | may
        assert {child.tag for child in element} <= below
    found = {}
    for case in root.iter("testcase"):
        tags = [tag for tag in TAGS.values() if case.find(tag) is not None]
        assert len(tags) <= 1
        found[case.get("name")] = tags[0] if tags else "success"
    return root, found


@pytest.mark.parametrize("name", [*verdicts.EVERY, "huge"])
def test_junit_is_well_formed_and_its_counts_are_right(name):
    verdict = verdicts.huge(200) if name == "huge" else verdicts.EVERY[name]()
    root, outcomes = parse(verdict)
    assert root.get("tests") == str(len(root.findall(".//testcase")))
    for suite in root:
        for key, tag in (("tests", ""), ("failures", "/failure"), ("errors", "/error"), ("skipped", "/skipped")):
            assert suite.get(key) == str(len(suite.findall(f"testcase{tag}")))
    assert root.get("failures") == str(sum(int(suite.get("failures")) for suite in root))
    assert root.get("errors") == str(sum(int(suite.get("errors")) for suite in root))
    keys = [(case.get("classname"), case.get("name")) for case in root.iter("testcase")]
    assert len(set(keys)) == len(keys)  # GitLab drops the second of one name
    if name not in ("hostile", "empty"):
        assert outcomes == {finding.id: TAGS.get(finding.outcome, "success") for finding in verdict.findings}


@pytest.mark.parametrize(
    ("verdict", "tag"),
    [
        (verdicts.empty(), "error"),
        (Verdict("compare", PASS, "nothing"), "error"),  # a gate with no hypothesis has not passed
        *((dataclasses.replace(verdicts.passed(), outcome=outcome), tag) for outcome, tag in TAGS.items()),
    ],
)
def test_a_verdict_that_no_finding_shows_has_a_case_of_its_own(verdict, tag):
    assert parse(verdict)[1]["verdict"] == tag


def test_junit_has_the_message_how_to_reproduce_it_and_the_numbers():
    root, _ = parse(verdicts.counters())
    finding, failure = verdicts.counters().findings[1], root.find(".//failure")
    assert failure.get("message") == finding.sentence
    assert failure.text == "\n".join([finding.sentence, *finding.details])
    said = root.find(".//testcase[failure]/system-out").text
    assert "reproduce:\nkvbench gate counters workloads/ci_counters.yaml" in said
    assert said.endswith('accept:\nkvbench accept counters --reason "..."')
    assert "reproduce" not in root.find(".//testcase[@name='paged-p8/preemptions']/system-out").text
    root, _ = parse(verdicts.failed())
    values = {each.get("name"): float(each.get("value")) for each in root.iter("property")}
    case = "overall/p95_itl_ms"
    finding = next(each for each in verdicts.failed().findings if each.id == case)
    assert values[f"{case} effect"] == finding.change == 0.101
    assert (values[f"{case} interval_low"], values[f"{case} interval_high"]) == finding.interval
    assert (values[f"{case} p"], values[f"{case} floor"], values[f"{case} margin"]) == (0.0039, 0.02, 0.03)


def test_a_long_log_is_cut_and_names_that_differ_only_in_what_xml_cannot_hold_stay_apart():
    long = {"details": ("x" * 30_000,)}
    findings = [Finding(f"a{mark}", "cell", "t", FAIL, "one\n  two", **long) for mark in ("", "\x00", "\x1b[0m")]
    root, outcomes = parse(Verdict("compare", FAIL, "s", tuple(findings)))
    assert list(outcomes) == ["a", "a (2)", "a (3)"]
    failure = root.find(".//failure")
    assert failure.get("message") == "one two" and failure.text.startswith("one\n  two\n")
    assert len(failure.text) < 21_000 and "10,010 more" in failure.text


_RANGE = re.compile(r"(?P<prefix>(\+-|±)\s*)(?P<value>\d.*)")  # extractRangeInfo.js; the value must be a number


def check(path: Path) -> list[dict[str, Any]]:
    """The entries, each of the form that the action's extract.js takes; it refuses an empty list."""
    entries = json.loads(path.read_bytes())
    assert entries
    for entry in entries:
        assert {"name", "unit", "value"} <= set(entry) <= {"name", "unit", "value", "range", "extra"}
        assert isinstance(entry["value"], float) and isinstance(entry["name"], str) and entry["name"]
        assert "range" not in entry or float(_RANGE.search(entry["range"])["value"]) > 0
    assert len({entry["name"] for entry in entries}) == len(entries)
    return entries


def test_candidate_values_go_to_the_file_of_their_direction(tmp_path):
    written = write_benchmarks(verdict_benchmarks(verdicts.failed()), tmp_path)
    assert written == [tmp_path / BIGGER, tmp_path / SMALLER]
    bigger, smaller = (check(path) for path in written)
    assert [each["unit"] for each in (*bigger, *smaller)] == ["tokens/s"] * 3 + ["ms"] * 5
    overall = next(entry for entry in smaller if entry["name"] == "overall/p95_itl_ms")
    assert overall["value"] == pytest.approx(22.02) and overall["extra"].startswith("FAIL\n")
    assert overall["range"] == "± 0.18"  # 20 ms by (11.0 - 9.2) / 2 %
    assert write_benchmarks(verdict_benchmarks(verdicts.passed()), tmp_path) == [tmp_path / SMALLER]
    assert not (tmp_path / BIGGER).exists()  # a direction without values has no file
    for name in ("counters", "invalid", "empty"):  # no timing of a comparison
        assert verdict_benchmarks(verdicts.EVERY[name]()) == []
    good, bad = verdicts.timing("a", PASS), verdicts.timing("b", FAIL, float("nan"))
    assert verdict_benchmarks(Verdict("limits", PASS, "s", (good,))) == []
    assert [each.name for each in verdict_benchmarks(Verdict("compare", FAIL, "s", (bad, good)))] == ["a/p95_itl_ms"]


def test_a_sweep_gives_its_valid_cells(tmp_path):
    assert sweep_benchmarks(tmp_path / "summary.csv", "mixed") == []  # no table, nothing to chart
    rows = [
        {"cell_id": "p8-c8", "configuration": "paged", "valid": "True", "repeats": 3, "output_tokens_per_s": 221.5,
         "ttft_ms_p95": 4867.25, "itl_ms_p95": "", "output_tokens_per_s_min": 219.5, "output_tokens_per_s_max": 224.5,
         "output_tokens_per_s_window": "whole run"},
        {"cell_id": "p16-c8", "configuration": "paged", "valid": "False", "repeats": 3, "output_tokens_per_s": 1.0},
    ]  # fmt: skip
    with (tmp_path / "summary.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    write_benchmarks(sweep_benchmarks(tmp_path / "summary.csv", "mixed"), tmp_path)
    (throughput,), (ttft,) = check(tmp_path / BIGGER), check(tmp_path / SMALLER)
    assert throughput == {
        "name": "mixed/p8-c8/output_tokens_per_s", "unit": "tokens/s", "value": 221.5, "range": "± 2.5",
        "extra": "paged\n3 repeats; whole run",
    }  # fmt: skip
    assert list(ttft.values()) == ["mixed/p8-c8/ttft_ms_p95", "ms", 4867.25, "paged\n3 repeats"]


def test_the_gate_of_a_stored_sweep_writes_its_charts(tmp_path):
    policy, sweep = tmp_path / "policy.yaml", Path("results/reference/vllm-cpu/sweep")
    policy.write_text('limits: [{metric: output_throughput, min: 1, cells: "*"}]')
    words = [str(sweep), "--policy", str(policy), "--output-dir", str(tmp_path / "out")]
    assert results.main(words, standalone_mode=False) == 0
    with (sweep / "summary.csv").open(newline="") as file:
        valid = [row for row in csv.DictReader(file) if row["valid"] == "True"]
    for name, metrics in ((BIGGER, {"output_tokens_per_s"}), (SMALLER, {"ttft_ms_p95", "itl_ms_p95"})):
        entries = check(tmp_path / "out" / name)
        assert {entry["name"].split("/")[-1] for entry in entries} == metrics
        assert len(entries) == len(metrics) * len(valid) > 0
