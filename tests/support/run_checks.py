"""Runs checks that pytest does not collect by itself, in a process with TRITON_INTERPRET set before any import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

_LIMIT_S = 800  # far beyond what any needs, so that a busy machine passes


def run_checks(*files: Path, interpret: bool = True) -> None:
    """Without the conftests, whose fixtures no check takes: importing what they need costs more than most checks."""
    env = os.environ | {"TRITON_INTERPRET": str(int(interpret)), "OMP_NUM_THREADS": "1"}
    without = ("--noconftest", "-p", "no:cacheprovider", "-p", "no:timeout", "-o", "addopts=")
    plugin = ("-p", "tests.support.triton_interpreter") if interpret else ()
    command = [sys.executable, "-m", "pytest", "-q", *without, *plugin, *map(str, files)]
    root = Path(__file__).resolve().parents[2]
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=root, timeout=_LIMIT_S, check=False)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
