"""Busy share, nvidia-smi's lines, timings, pytest's lines: the small pure pieces of the parts."""

from __future__ import annotations

import json
import time

import pytest
import torch

from ci.gpu import busy, facts
from ci.gpu.check_suite import ROOT, device_test_files, read_results
from ci.gpu.part import PartReport, attempt, plain
from ci.gpu.timing import measure


@pytest.mark.parametrize(
    ("intervals", "share"),
    [
        ([], None),
        ([(3.0, 3.0)], None),
        ([(1.0, 4.0)], 1.0),
        ([(0.0, 1.0), (3.0, 4.0)], 0.5),
        ([(3.0, 4.0), (0.0, 1.0)], 0.5),  # in any order
        ([(0.0, 4.0), (1.0, 2.0), (6.0, 8.0)], 0.75),  # one inside another counts once
        ([(0.0, 2.0), (1.0, 3.0), (3.0, 4.0)], 1.0),
    ],
)
def test_covered_share(intervals, share):
    assert busy.covered_share(intervals) == share


def test_summarise_takes_means_and_leaves_broken_lines_out():
    text = "50, 100.0, 1200, 40\n70, 200.0, 1400, 42\n[N/A], 1, 1, 1\n99, 2\n"
    assert busy.summarise(text) == {
        "utilization.gpu": 60.0, "power.draw": 150.0, "clocks.sm": 1300.0, "temperature.gpu": 41.0, "samples": 2
    }  # fmt: skip
    assert busy.summarise("") == {}


FAKE_SMI = """#!/usr/bin/env bash
for argument in "$@"; do
  case "$argument" in
    --query-gpu=*clocks_throttle*) exit 6 ;;
    --query-gpu=*) fields="${argument#--query-gpu=}" ;;
    -lms) while true; do echo "80, 300.0, 1500, 50"; sleep 0.05; done ;;
    -*) ;;
  esac
done
echo "$fields" | tr -cd ',\\n' | sed 's/^/x/; s/,/, x/g'
"""


@pytest.fixture
def fake_smi(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text(FAKE_SMI)
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


def test_a_field_that_the_driver_does_not_know_costs_only_itself(fake_smi):
    found = facts.smi_query()
    assert set(facts.SMI_FIELDS) - set(found) == {"clocks_throttle_reasons.active"}
    assert set(found.values()) == {"x"}


def test_the_sampler_reads_beside_a_run_and_ends_with_it(fake_smi):
    with busy.SmiSampler(True) as sampler:
        time.sleep(0.3)
    assert sampler.summary["utilization.gpu"] == 80.0 and sampler.summary["samples"] >= 2
    assert sampler._process.poll() is not None


def test_the_sampler_does_without_the_tool(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with busy.SmiSampler(True) as sampler:
        pass
    assert sampler.summary == {} and facts.smi_query() == {}


def test_measure_calls_the_step_and_orders_the_percentiles():
    calls = []
    timing = measure(lambda: calls.append(torch.ones(1000).sum()), "cpu", seconds=0.01)
    assert len(calls) == timing.rounds + 1
    assert 0 < timing.p10 <= timing.median <= timing.p90 and not timing.captured


def test_read_results_of_plain_and_distributed_pytest():
    text = """
tests/unit/a.py::test_one[x y] PASSED      [ 10%]
[gw3] [ 20%] FAILED tests/unit/a.py::test_two[1-2]
[gw0] [ 30%] PASSED tests/unit/b.py::test_three
tests/unit/b.py::test_four SKIPPED (needs a CUDA device) [ 40%]
FAILED tests/unit/a.py::test_two[1-2] - AssertionError
"""
    assert read_results(text) == {
        "tests/unit/a.py::test_one[x y]": "PASSED",
        "tests/unit/a.py::test_two[1-2]": "FAILED",
        "tests/unit/b.py::test_three": "PASSED",
        "tests/unit/b.py::test_four": "SKIPPED",
    }


def test_a_part_keeps_on_disk_what_it_had_when_it_is_stopped(tmp_path):
    path = tmp_path / "part.json"
    report = PartReport(path, seconds=60)
    report.row(case="a", value=float("nan"))
    report.skip("b", "no reason")

    def broken() -> None:
        raise ValueError("first line\nsecond line")

    attempt(report, "c", broken)
    told = json.loads(path.read_text())
    assert told["rows"] == [{"case": "a", "value": None}]
    assert told["skipped"] == [{"what": "b", "reason": "no reason"}]
    assert told["failures"] == [{"what": "c", "reason": "ValueError: first line"}]


def test_without_time_nothing_is_begun(tmp_path):
    report, begun = PartReport(tmp_path / "part.json", seconds=0), []
    attempt(report, "late", lambda: begun.append(1))
    assert not begun and report.data["skipped"] == [{"what": "late", "reason": "no time left"}]


def test_plain_has_no_number_that_json_lacks():
    assert json.dumps(plain({"a": [float("inf"), 1.5, (2, float("nan"))]}), allow_nan=False)


def test_the_device_tests_of_the_repository_are_found():
    found = device_test_files()
    assert "tests/unit/kernels/triton_checks.py" in found and "tests/unit/engine/kv/test_kv_mover.py" in found
    assert all((ROOT / path).is_file() for path in found)
