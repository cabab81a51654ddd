"""Part ``tests``: the repository's own device tests, a file at a time, each in a pytest of its own.

An illegal access spoils the tests that follow it in its file, and no other file. Imports no torch.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from typing import Any

from ci.gpu.part import Planned, Report
from kvbench.common.packages import REPOSITORY

TESTS = ("tests/unit/kernels/triton_*.py", "tests/unit/engine/kv/test_kv_mover.py")  # the tests that use the device
MAX_WORKERS = 4
FILE_SECONDS = 3600.0  # a file stops itself when the part's time is over
_RESULT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b")
_REASON = re.compile(r"^(?:FAILED|ERROR) (tests/\S+::.+?) - (.+)$")


class DeviceTests:
    """One case a file."""

    def __init__(self, args: Any):
        self.device = args.device
        self.workers = max(1, min(MAX_WORKERS, (os.cpu_count() or 2) // 2))

    def plan(self) -> list[Planned]:
        """Lists the test files."""
        return [Planned(path, seconds=FILE_SECONDS) for path in device_test_files()]

    def run(self, name: str, report: Report) -> None:
        """Runs a file: one row a test. Tests that are not finished in time are skipped, not failed."""
        if self.device == "cpu":
            report.skip(name, "tests of GPUs only")
            return
        if importlib.util.find_spec("pytest") is None:
            report.skip(name, "not installed: pytest (see ci/gpu_wheels.sh and --wheels)")
            return
        code, text = run_pytest(name, report.time_left)
        print(text[-20_000:], flush=True)
        put_down(report, name, code, text)


CASES = DeviceTests


def run_pytest(path: str, seconds: float) -> tuple[int | None, str]:
    """Runs pytest: exit code, None when it took more than ``seconds``, and output."""
    # The ini file's options ask for plugins that need not be there.
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=short",
               path]  # fmt: skip
    try:
        done = subprocess.run(
            command,
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=max(1.0, seconds),
        )
    except subprocess.TimeoutExpired as stopped:
        return None, (stopped.stdout or b"").decode(errors="replace")
    return done.returncode, done.stdout


def put_down(report: Report, path: str, code: int | None, text: str) -> None:
    """Stores what pytest's output says of the tests of a file."""
    lines = text.splitlines()
    statuses = {match[1]: match[2] for line in lines if (match := _RESULT.match(line))}  # of pytest's -v output
    reasons = {match[1]: match[2] for line in lines if (match := _REASON.match(line))}  # of its summary
    for test, status in statuses.items():
        wrong = status in ("FAILED", "ERROR")
        report.row(case=test, status="failed" if wrong else status.lower(), reason=reasons.get(test, ""))
        if wrong:
            report.fail(test, reasons.get(test, "see the log"))
    if code is None:
        report.skip(path, f"out of time after {len(statuses)} tests")
    elif code not in (0, 1, 5) or (code == 1 and not any(s in ("FAILED", "ERROR") for s in statuses.values())):
        report.fail(path, f"pytest ended with code {code}: {' / '.join(text.strip().splitlines()[-3:])[:600]}")


def device_test_files() -> list[str]:
    """Lists the device tests, relative to the repository."""
    return [str(path.relative_to(REPOSITORY)) for pattern in TESTS for path in sorted(REPOSITORY.glob(pattern))]
