"""Runs kvbench commands for parts: from the repository, for a limited time, interrupted as by Ctrl-C.

Part ``quality``: what the configurations of workloads/mixed.yaml change in the answers of kvbench-tiny. Part
``claims``: the verdict on what paging costs the decode kernel. Rows are what their JSON files say.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
END_GRACE_S = 10.0  # to stop servers and close the run


def run_kvbench(words: list[str], seconds: float) -> tuple[int, bool]:
    """Exit code, and whether it had to be interrupted."""
    process = subprocess.Popen([sys.executable, "-m", "kvbench", *words], cwd=ROOT)
    try:
        return process.wait(timeout=seconds), False
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)
    try:
        return process.wait(timeout=END_GRACE_S), True
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(), True


def newest_run(folder: Path) -> Path | None:
    """The latest run's folder, if there is one."""
    runs = sorted(folder.glob("*/*/manifest.json"), key=os.path.getmtime)
    return runs[-1].parent if runs else None
