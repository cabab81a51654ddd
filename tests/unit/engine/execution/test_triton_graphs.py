"""Runs triton_graph_checks.py, in a process with TRITON_INTERPRET set before any import."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.run_checks import run_checks


@pytest.mark.full
@pytest.mark.timeout(900)
def test_graphs_of_interpreted_kernels():
    run_checks(Path(__file__).with_name("triton_graph_checks.py"))
