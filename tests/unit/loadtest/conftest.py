"""A rate search in a folder of its own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.loadtest.folder import LoadFolder
from kvbench.loadtest.max_rate.plan import RunLength
from kvbench.loadtest.max_rate.run import RateSearch
from kvbench.loadtest.max_rate.search import Bounds, parse_conditions
from tests.support.rate_queue import N


@pytest.fixture
def new(tmp_path):
    """A search in a folder; ``.printed``: what it printed."""

    def make(queue, slo="p95_ttft<=500ms", bounds=None, length=None, width=200, **fields):
        folder = LoadFolder(tmp_path / "out", {})
        folder.path.mkdir(exist_ok=True)
        console = Console(file=io.StringIO(), width=width)
        bounds, length = bounds or Bounds(1.0, 0.1, 100.0, 0.02), length or RunLength(N, 0.0)
        search = RateSearch(parse_conditions(slo), bounds, length, folder, queue.measure, console, **fields)
        search.printed = console.file
        return search

    return make
