"""Compiled kernels are found again by the next process, and not when any of their sources has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from kvbench_kernels.numba_cpu import build_worker, run_decode
print(build_worker(2, 16, 16, 0, 0).cache_hits, run_decode.cache_hits)
"""


def cache_hits(sources: Path) -> list[str]:
    env = os.environ | {"NUMBA_CACHE_DIR": str(sources / "cache"), "PYTHONPATH": str(sources)}
    run = subprocess.run([sys.executable, "-c", CODE], env=env, cwd=sources, capture_output=True, text=True, check=True)
    return run.stdout.split()


@pytest.mark.full
def test_the_next_process_loads_compiled_kernels_until_a_source_that_they_inline_changes(tmp_path):
    """Numba's own stamp covers the file of the kernel, not those it inlines from."""
    copied = tmp_path / "kvbench_kernels"  # the name that the package is imported by
    shutil.copytree("kernels", copied, ignore=shutil.ignore_patterns("__pycache__"))
    assert cache_hits(tmp_path) == ["0", "0"]
    assert cache_hits(tmp_path) == ["1", "1"]
    helper = copied / "numba_vectors.py"
    helper.write_text(helper.read_text() + "\n# edited\n")
    assert cache_hits(tmp_path) == ["0", "0"]


VARIANTS = """
import sys
from kvbench_kernels.numba_memory import compile_c, store_i64

def build(number):
    def worker(address):
        store_i64(address, number)
    return compile_c(worker)

sys.stdin.readline()
print(sum(build(number).cache_hits for number in range(*map(int, sys.argv[1:]))))
"""


def test_variants_that_processes_compile_at_once_are_all_found_by_the_next(tmp_path):
    """Numba rereads its list of variants before it adds one: without a lock some are overwritten."""
    script = tmp_path / "variants.py"
    script.write_text(VARIANTS)
    env = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}

    def start(*numbers: int) -> subprocess.Popen[str]:
        words = [sys.executable, str(script), *map(str, numbers)]
        return subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    together = [start(first, 60, 3) for first in range(3)]
    for process in together:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=120)[0].strip() for process in together] == ["0"] * 3
    assert start(0, 60).communicate("\n", timeout=120)[0].strip() == "60"
