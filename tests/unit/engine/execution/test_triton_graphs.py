"""Runs triton_graph_checks.py, in a process with TRITON_INTERPRET set before any import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.timeout(300)
def test_graphs_of_interpreted_kernels():
    here = Path(__file__).parent
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:timeout", "-o", "addopts="]
    command.append(str(here / "triton_graph_checks.py"))
    run = subprocess.run(command, env=env, capture_output=True, text=True, cwd=here.parents[3])
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
