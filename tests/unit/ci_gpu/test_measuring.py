"""Busy share, nvidia-smi's lines, timings, pytest's lines: the small pure pieces of the parts."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ci.gpu import busy, facts
from ci.gpu.check_suite import device_test_files, put_down
from ci.gpu.part import PartReport, Report, sentence
from ci.gpu.timing import READING, WRITING, Flush, measure
from kvbench.common.packages import REPOSITORY


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


FAKE_SMI = """#!/usr/bin/env bash
for argument in "$@"; do
  case "$argument" in
    --query-gpu=*clocks_throttle*) exit 6 ;;
    --query-gpu=*) fields="${argument#--query-gpu=}" ;;
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


def test_without_the_tool_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.smi_query() == {}


def test_measure_calls_the_step_and_orders_the_percentiles():
    calls = []
    timing = measure(lambda: calls.append(torch.ones(1000).sum()), "cpu", seconds=0.01)
    assert len(calls) == timing.rounds + 1
    assert 0 < timing.p10 <= timing.median <= timing.p90 and not timing.captured


class Operations(TorchDispatchMode):
    """The names of what is computed, and what of it writes to a tensor of more than one element."""

    def __init__(self):
        super().__init__()
        self.names, self.writes = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__)
        for argument, value in zip(function._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and value.numel() > 1:
                self.writes.append(function.__name__)
        return function(*args, **(kwargs or {}))


def test_the_flush_reads_its_whole_buffer_and_writes_to_nothing():
    """Lines that it wrote would be written back inside the step that is timed."""
    flush = Flush(READING, "cpu", 4000)
    with Operations() as seen:
        flush()
    assert len(seen.names) == 1 and "sum" in seen.names[0] and not seen.writes
    assert float(flush._sum) == 1000.0  # of ones: all of it was read
    with Operations() as seen:
        Flush(WRITING, "cpu", 4000)()
    assert seen.writes


def test_a_profile_keeps_the_largest_kernels_by_name():
    """Two steps: 40 kernels of their own length each, the longest one twice a step."""
    events, now = [], 0.0
    for _ in range(2):
        for length in (*range(1, 41), 40):
            events.append((f"kernel {length}", now, now + length))
            now += length + 1
    found = busy.profiled(events, steps=2)
    assert found.kernels[0] == {"name": "kernel 40", "count": 2.0, "us": 80.0}
    assert [kernel["us"] for kernel in found.kernels[1:]] == [float(us) for us in range(39, 10, -1)]
    assert len(found.kernels) == 30 and found.other_us == sum(range(1, 11)) and found.count == 41
    assert found.busy_share == pytest.approx(2 * 860 / (now - 1))
    assert busy.profiled([], 2).busy_share is None


PYTEST = """
tests/unit/a.py::test_one[x y] PASSED      [ 10%]
tests/unit/a.py::test_two[1-2] FAILED      [ 20%]
tests/unit/a.py::test_three ERROR          [ 30%]
tests/unit/a.py::test_four SKIPPED (needs a CUDA device) [ 40%]
=========================== short test summary info ============================
FAILED tests/unit/a.py::test_two[1-2] - AssertionError: 1 is not 2
ERROR tests/unit/a.py::test_three - RuntimeError: CUDA error: an illegal memory access was encountered
"""


def test_the_tests_of_a_file_are_put_down_with_what_pytest_says_of_them():
    report = Report(600.0)
    put_down(report, "tests/unit/a.py", 1, PYTEST)
    assert [row["status"] for row in report.data["rows"]] == ["passed", "failed", "failed", "skipped"]
    told = {failure["what"].rpartition("::")[2]: failure["reason"] for failure in report.data["failures"]}
    assert told == {
        "test_two[1-2]": "AssertionError: 1 is not 2",
        "test_three": "RuntimeError: CUDA error: an illegal memory access was encountered",
    }


@pytest.mark.parametrize(
    ("code", "text", "wrong", "skipped"),
    [
        (5, "no tests ran", [], []),  # a file of what others share
        (-11, "Fatal Python error", ["tests/a.py"], []),
        (1, "ImportError: no kernels", ["tests/a.py"], []),
        (None, "tests/a.py::test_one PASSED [ 1%]", [], ["out of time after 1 tests"]),
    ],
)
def test_a_file_of_tests_that_does_not_end_well(code, text, wrong, skipped):
    report = Report(600.0)
    put_down(report, "tests/a.py", code, text)
    assert [failure["what"] for failure in report.data["failures"]] == wrong
    assert all(text in failure["reason"] for failure in report.data["failures"])
    assert [one["reason"] for one in report.data["skipped"]] == skipped


def test_a_part_keeps_on_disk_what_it_had_when_it_is_stopped(tmp_path):
    path = tmp_path / "part.json"
    report = PartReport(path, seconds=60)
    report.row(case="a", value=float("nan"), values=(1.5, [float("inf")]))
    report.skip("b", "no reason")

    try:
        raise ValueError("first line\nsecond line")
    except ValueError as error:
        report.error("c", error)
    told = json.loads(path.read_text())
    assert told["rows"] == [{"case": "a", "value": None, "values": [1.5, [None]]}]
    assert told["skipped"] == [{"what": "b", "reason": "no reason"}]
    (failure,) = told["failures"]
    assert failure["reason"] == "ValueError: first line / second line"
    assert 'raise ValueError("first line' in failure["traceback"]


def test_an_error_of_many_lines_is_told_by_its_first_and_last():
    code = "at 57:12:\n" + "    x = 1\n" * 50 + "            ^\nAssertionError: shapes differ"
    assert sentence(RuntimeError(code)) == "RuntimeError: at 57:12: / ... / ^ / AssertionError: shapes differ"
    assert sentence(ValueError()) == "ValueError: no message"
    assert len(sentence(ValueError("x" * 5000))) < 400


def test_the_device_tests_of_the_repository_are_found():
    found = device_test_files()
    assert "tests/unit/kernels/triton_checks.py" in found and "tests/unit/engine/kv/test_kv_mover.py" in found
    assert all((REPOSITORY / path).is_file() for path in found)
