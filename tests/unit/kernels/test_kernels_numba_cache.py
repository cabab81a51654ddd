"""Compiled kernels are found again by the next process."""

from __future__ import annotations

import os
import subprocess
import sys

CODE = """
from kernels.numba_cpu import build_worker, run_decode
print(build_worker(2, 16, 16).cache_hits, run_decode.cache_hits)
"""


def test_second_process_loads_compiled_kernels(tmp_path):
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}
    hits = []
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True
        )
        hits.append(run.stdout.split())
    assert hits == [["0", "0"], ["1", "1"]]
