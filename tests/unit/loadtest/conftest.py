"""A rate search in a folder of its own."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvbench.loadtest.folder import LoadFolder
from kvbench.loadtest.max_rate.plan import Sizes
from kvbench.loadtest.max_rate.run import RateSearch
from kvbench.loadtest.max_rate.search import Bounds, parse_conditions
from tests.support.rate_queue import N


@pytest.fixture
def new(tmp_path):
    """A search in a folder; ``.told``: what it printed."""

    def make(queue, slo="p95_ttft<=500ms", bounds=None, sizes=None, **fields):
        folder = LoadFolder(tmp_path / "out", {})
        folder.path.mkdir(exist_ok=True)
        console = Console(file=io.StringIO(), width=200)
        bounds = bounds or Bounds(1.0, 0.1, 100.0, 0.02)
        sizes = sizes or Sizes(N, 0.0)
        made = RateSearch(parse_conditions(slo), bounds, sizes, folder, queue.measure, console, **fields)
        made.told = console.file
        return made

    return make
