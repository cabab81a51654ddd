"""Cases in child processes: whatever one does to its process, the others are run and their results kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ci.gpu import worker
from ci.gpu.isolated import CaseRunner
from ci.gpu.part import PartReport, Report
from tests.support.sweep_parts import alive, wait_until

ROOT = Path(__file__).resolve().parents[3]
TROUBLED = "tests.support.troubled_cases"


@pytest.fixture
def run(tmp_path):
    """The report on a module's cases."""

    def of(module: str, *own: str, seconds: float = 600.0, kind: type[PartReport] = PartReport) -> PartReport:
        report = kind(tmp_path / "part.json", seconds)
        command = [sys.executable, "-m", "ci.gpu.worker", module, "--out", str(tmp_path / "part.json")]
        options = ["--device", "cpu", "--seconds", "60", "--scratch", str(tmp_path), "--tiny"]
        CaseRunner([*command, *options, *own], report).run()
        return report

    return of


def test_a_lost_device_costs_the_case_that_lost_it_and_no_other(run):
    """The others pass, in a new process."""
    report = run(TROUBLED, "well", "loses the device", "also well", "last")
    (failure,) = report.data["failures"]
    assert failure["what"] == "loses the device"
    assert failure["reason"].startswith("RuntimeError: CUDA error: an illegal memory access was encountered")
    assert "TORCH_USE_CUDA_DSA" in failure["reason"]
    well, lost, also_well, last = (row["process"] for row in report.data["rows"])
    assert well == lost != also_well == last and not any(map(alive, (well, last)))


def test_a_process_that_dies_or_hangs_costs_its_case(run):
    report = run(TROUBLED)
    assert [row["case"] for row in report.data["rows"]] == [
        "well", "raises", "also well", "segfault", "exits", "hangs", "noisy", "last"
    ]  # fmt: skip
    failures = {failure["what"]: failure for failure in report.data["failures"]}
    reasons = {name: failure["reason"] for name, failure in failures.items()}
    assert reasons.keys() == {"raises", "segfault", "exits", "hangs"}
    assert "at 57:12:" in reasons["raises"] and "first operand is 3-dimensional" in reasons["raises"]
    assert "in innermost" in failures["raises"]["traceback"] and "tl.dot(q, k)" in failures["raises"]["traceback"]
    assert "SIGSEGV: about to fall" in reasons["segfault"] and "code 3" in reasons["exits"]
    assert reasons["hangs"].startswith("stopped after ")
    process = {row["case"]: row["process"] for row in report.data["rows"]}
    assert process["well"] == process["raises"] == process["also well"] == process["segfault"]  # an error is no loss
    assert len({process[name] for name in ("segfault", "exits", "hangs", "noisy")}) == 4
    assert process["noisy"] == process["last"] and not any(map(alive, process.values()))


def test_cases_of_their_own_share_no_process(run):
    rows = run(TROUBLED, "well", "alone 1", "alone 2", "also well").data["rows"]
    assert [row["case"] for row in rows] == ["well", "alone 1", "alone 2", "also well"]
    assert len({row["process"] for row in rows}) == 4


class NoTime(PartReport):
    """There is none once the plan is there."""

    time_left = property(lambda self: 0.0 if "cases" in self.data else 600.0)


class RunsOut(PartReport):
    """Little is left once the plan is there, and nothing once a case has told something."""

    time_left = property(lambda self: 0.0 if self.data["rows"] else 0.5 if "cases" in self.data else 600.0)


def test_what_cannot_begin_fails(run):
    (failure,) = run(TROUBLED, "no start").data["failures"]
    assert "cannot begin here" in failure["reason"]


@pytest.mark.parametrize(("kind", "cases"), [(NoTime, ["well"]), (RunsOut, ["hangs", "well"])])
def test_what_has_no_time_or_is_cut_off_by_its_end_is_skipped(run, monkeypatch, kind, cases):
    monkeypatch.setattr("ci.gpu.isolated.OVERTIME_S", 0.3)
    report = run(TROUBLED, *cases, kind=kind)
    assert [trouble["what"] for trouble in report.data["skipped"]] == cases and not report.data["failures"]


FAKE_TOOL = """#!/bin/sh
while [ "$1" != -- ]; do shift; done; shift
"$@"
code=$?
echo "========= ERROR SUMMARY: $ERRORS errors"
[ "$ERRORS" = 0 ] && exit $code || exit 86
"""


@pytest.mark.parametrize("errors", [None, 0, 2])
def test_the_wrapper_runs_the_processes_where_it_is_there(tmp_path, errors):
    """None: there is no such tool. What it finds wrong is a failure even where every case passes."""
    if errors is not None:
        (tmp_path / "fake-sanitizer").write_text(FAKE_TOOL)
        (tmp_path / "fake-sanitizer").chmod(0o755)
    out = tmp_path / "part.json"
    command = [sys.executable, "-m", "ci.gpu.isolated", TROUBLED, "--wrapper", "fake-sanitizer --tool x --"]
    options = ["--out", str(out), "--device", "cpu", "--seconds", "600", "--scratch", str(tmp_path), "well", "last"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "ERRORS": str(errors)}
    done = subprocess.run([*command, *options], cwd=ROOT, env=env, timeout=200, capture_output=True, text=True)
    told = json.loads(out.read_text())
    assert done.returncode == (1 if errors else 0), done.stdout + done.stderr
    if errors is None:
        assert told["not_run"].startswith("fake-sanitizer is not on this machine")
        return
    assert told["headline"] == "2 of 2 checks passed"
    assert [failure["reason"] for failure in told["failures"]] == ["========= ERROR SUMMARY: 2 errors"] * bool(errors)


WRAPPER = "import subprocess, sys; subprocess.run(sys.argv[1:])"


def test_a_process_does_not_outlive_its_wrapper(tmp_path):
    """It is in a case that takes for ever, so it does not see that there are no more requests."""
    command = [sys.executable, "-c", WRAPPER, sys.executable, "-m", "ci.gpu.worker", TROUBLED, "hangs"]
    options = ["--out", str(tmp_path / "part.json"), "--device", "cpu", "--seconds", "60", "--scratch", str(tmp_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *options], cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as wrapper:
        wrapper.stdin.write(json.dumps({"case": "hangs", "ends": 1e9}) + "\n")
        wrapper.stdin.flush()
        while "add" not in (answer := json.loads(wrapper.stdout.readline().removeprefix(worker.MARK))):
            pass
        wrapper.kill()
    wait_until(lambda: not alive(answer["value"]["process"]), 20)


class FakeCuda:
    """A device that ``error`` shows on when it is waited for; ``used``: whether this process has touched it."""

    def __init__(self, used: bool, error: str | None):
        self.used, self.error = used, error

    def is_initialized(self) -> bool:
        return self.used

    def synchronize(self) -> None:
        if self.error is not None:
            raise RuntimeError(self.error)

    def empty_cache(self) -> None:
        pass


@pytest.mark.parametrize(
    ("cuda", "lost"),
    [
        (FakeCuda(True, None), False),
        (FakeCuda(True, "CUDA error: unspecified launch failure"), True),
        (FakeCuda(False, "waiting for it would begin to use it"), False),
    ],
)
def test_an_error_that_the_case_did_not_see_is_found_afterwards(monkeypatch, cuda, lost):
    """Kernels run later than they are launched, and a case may swallow an error."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    report = Report(60.0)
    told = worker.run_case(SimpleNamespace(run=lambda name, report: report.row(case=name)), "well", report, "cuda")
    assert (told is not None) is lost and [failure["what"] for failure in report.data["failures"]] == ["well"] * lost
