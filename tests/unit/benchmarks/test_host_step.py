"""The benchmark of the host's step: real steps of the sizes that its table names."""

from __future__ import annotations

import pytest

from kvbench_engine.counters import PHASES
from tests.benchmarks import host_step


@pytest.fixture(autouse=True)
def few_steps(monkeypatch):
    monkeypatch.setattr(host_step, "STEPS", 6)
    monkeypatch.setattr(host_step, "WARM_STEPS", 2)


@pytest.mark.parametrize(("page_size", "caching"), [(1, True), (16, False)])
def test_steady_steps_are_all_of_decodes(page_size, caching):
    rows = host_step.steady(5, page_size, 40, caching)
    assert len(rows) == 6
    assert all(sum(row[phase] for phase in PHASES) > 0 for row in rows)
    assert len(host_step.figures(rows)) == len(PHASES) + 3


def test_in_churn_sequences_come_and_go(monkeypatch):
    added = []
    make = host_step.requests
    monkeypatch.setattr(host_step, "requests", lambda *args: (added.extend(made := make(*args)), made)[1])
    rows = host_step.churn(6, 16, False)
    assert len(rows) == 6 and len(added) > 12
    assert len({request.request_id for request in added}) == len(added)
