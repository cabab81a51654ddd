"""How long the server takes from its launch to being ready, with nothing compiled yet and then again.

    python -m pytest tests/benchmarks/test_server_start.py

Compiled kernels go into a folder of their own (NUMBA_CACHE_DIR, TRITON_CACHE_DIR), which is empty at the first start.
In ``extra_info``: first_start_s and second_start_s. The second has a bar, with the small model on a CPU. Smoke starts
it once, with whatever is compiled already.
"""

from __future__ import annotations

import time

import pytest
from bench_engine import server
from bench_timing import choose, note

FIGURES = choose(
    full=("first_start_s", "second_start_s"), quick=("first_start_s", "second_start_s"), smoke=("start_s",)
)


@pytest.mark.timeout(600)
def test_server_start(benchmark, tmp_path):
    caches = {"NUMBA_CACHE_DIR": str(tmp_path / "numba"), "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    environment = choose(full=caches, quick=caches, smoke={})
    seconds = {}

    def start() -> None:
        for figure in FIGURES:
            began = time.perf_counter()
            with server(environment=environment):
                seconds[figure] = time.perf_counter() - began

    benchmark.group = "server, from launch to ready"
    benchmark.pedantic(start, rounds=1)
    note(benchmark, **seconds)
