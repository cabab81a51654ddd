"""Compiled kernels are found again by the next process, and not when any of their sources has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

CODE = """
from kernels.numba_cpu import build_worker, run_decode
print(build_worker(2, 16, 16).cache_hits, run_decode.cache_hits)
"""


def cache_hits(tmp_path: Path, sources: str) -> list[str]:
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": sources}
    run = subprocess.run([sys.executable, "-c", CODE], env=env, cwd=sources, capture_output=True, text=True, check=True)
    return run.stdout.split()


def test_second_process_loads_compiled_kernels(tmp_path):
    assert [cache_hits(tmp_path, os.getcwd()) for _ in range(2)] == [["0", "0"], ["1", "1"]]


def test_an_edited_helper_makes_its_callers_compile_anew(tmp_path):
    """Numba's own stamp covers the file of the kernel, not those it inlines from."""
    shutil.copytree("kernels", tmp_path / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    assert cache_hits(tmp_path, str(tmp_path)) == ["0", "0"]
    helper = tmp_path / "kernels" / "numba_vectors.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert cache_hits(tmp_path, str(tmp_path)) == ["0", "0"]
    assert cache_hits(tmp_path, str(tmp_path)) == ["1", "1"]
