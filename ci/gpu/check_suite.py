"""The repository's own device tests of the kernels, run through pytest where pytest is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from ci.gpu.part import PartReport

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("tests/unit/kernels/triton_*.py", "tests/unit/engine/kv/test_kv_mover.py")  # those that know the device
LEAST_SECONDS = 10.0  # with less left it is not begun
_RESULT = re.compile(r"^(tests/\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR)\b")


def run_kernel_tests(report: PartReport) -> None:
    """One row a test. What is not finished in time is skipped, not failed."""
    what = "kernel tests on the device"
    if importlib.util.find_spec("pytest") is None:
        report.skip(what, "pytest is not installed")
        return
    if report.time_left < LEAST_SECONDS:
        report.skip(what, "no time left")
        return
    # The ini file's options ask for plugins that need not be there.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-v",
        "-o",
        "addopts=",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        *device_test_files(),
    ]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", "4"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=report.time_left
        )
        text, finished = done.stdout, True
    except subprocess.TimeoutExpired as stopped:
        text, finished = (stopped.stdout or b"").decode(errors="replace"), False
    print(text[-20_000:], flush=True)
    found = read_results(text)
    for test, status in found.items():
        report.row(case=test, status="failed" if status in ("FAILED", "ERROR") else status.lower(), reason="")
        if status in ("FAILED", "ERROR"):
            report.fail(test, "see the log")
    if not finished:
        report.skip(what, f"out of time after {len(found)} tests")
    elif not found:
        report.fail(what, f"pytest ended with code {done.returncode} and ran nothing: see the log")


def device_test_files() -> list[str]:
    """Relative to the repository."""
    return [str(path.relative_to(ROOT)) for pattern in TESTS for path in sorted(ROOT.glob(pattern))]


def read_results(text: str) -> dict[str, str]:
    """Status by test out of pytest's ``-v`` output, plain or through xdist."""
    found = {}
    for line in text.splitlines():
        line = re.sub(r"^\[gw\d+\]\s*\[\s*\d+%\]\s*(PASSED|FAILED|SKIPPED|ERROR)\s+(.+?)\s*$", r"\2 \1", line)
        if match := _RESULT.match(line):
            found[match[1]] = match[2]
    return found
