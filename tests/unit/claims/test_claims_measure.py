"""What is asked of a measured workload: intervals that are wider while launches are few, and counts of its loads."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from kvbench.claims import kernel_cost, measure
from kvbench.claims.kernel_cost import IN_ORDER, RESERVED, SCATTERED, KernelCost, time_kernels
from kvbench.claims.measure import WorkloadFacts
from kvbench.lockstep.intervals import LaunchRatio
from kvbench.workload.design import LoadPoint, make_design

LOAD = LoadPoint("c4", "closed", 4, None, 8)


def measured(sweep, monkeypatch, log_ratios=(), loads=()):
    design = make_design({"layout": "contiguous", "reservation": "oracle"}, sweep, [LOAD], "full")
    monkeypatch.setattr(WorkloadFacts, "loads", lambda self, configuration: list(loads))
    found = [LaunchRatio(y, 1e-4, 32) for y in log_ratios]
    monkeypatch.setattr(measure, "throughput_ratios", lambda base, other: found)
    return WorkloadFacts(design, {}, SimpleNamespace(at_once=1), launches=len(log_ratios))


@pytest.mark.parametrize(("y", "confidence"), [([0.1, 0.12, 0.11], 0.99), ([0.1, 0.12, 0.11, 0.1, 0.12, 0.11], 0.95)])
def test_a_measurement_ends_early_only_on_stricter_intervals(y, confidence, monkeypatch):
    found = measured({"layout": ["paged"]}, monkeypatch, y)
    for found.early, expected in ((True, confidence), (False, 0.95)):
        interval = tuple(np.exp(stats.ttest_1samp(y, 0).confidence_interval(expected)))
        one = found.ratio({"layout": "paged"})
        assert (one.low, one.high) == pytest.approx(interval)


def test_a_configuration_is_found_by_what_differs_and_means_something(monkeypatch):
    found = measured({"layout": ["contiguous", "paged"], "page_size": [4, 16]}, monkeypatch)
    assert found.find().settings == {"layout": "contiguous", "reservation": "oracle"}
    assert found.find(layout="paged", page_size=4).settings == {"layout": "paged", "page_size": 4}


def test_a_batch_is_counted_while_requests_wait(tmp_path, monkeypatch):
    pd.DataFrame({"seconds": [1.0] * 5, "decode_tokens": [0, 2, 4, 9, 9]}).to_parquet(tmp_path / "steps.parquet")
    pd.DataFrame({"first": [1.0, 2.0, 3.0]}).to_parquet(tmp_path / "requests.parquet")
    assert measured({}, monkeypatch, loads=[tmp_path]).batched() == pytest.approx(2.0)


def test_the_kernel_is_timed_on_reservations_and_on_pages_in_order_and_scattered(monkeypatch):
    monkeypatch.setattr(kernel_cost, "LAYOUTS", 2)
    found = time_kernels("cpu", dtype="float32", batch=3, context=32, heads=4, kv_heads=2, head_dim=16).seconds
    assert {place: len(times) for place, times in found.items()} == {RESERVED: 2, IN_ORDER: 2, SCATTERED: 2}
    assert all(seconds > 0 for times in found.values() for seconds in times)


def test_a_further_timing_of_the_kernel_is_stored_beside_the_earlier_ones(tmp_path, monkeypatch):
    file = tmp_path / "kernel_cost.json"
    before = {"device": "cpu", "backend": "numba", "batch": 1, "context": 16, "page_size": 16}
    file.write_text(json.dumps({**before, "seconds": {RESERVED: [1.0], IN_ORDER: [2.0]}}))  # of an earlier version
    further = KernelCost(**before, seconds={RESERVED: [3.0], IN_ORDER: [4.0]})
    monkeypatch.setattr(kernel_cost, "time_kernels", lambda device, **shape: further)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    monkeypatch.setattr("sys.argv", ["kernel_cost", "cpu", str(file)])
    kernel_cost.main()
    stored = KernelCost(**json.loads(file.read_text()))
    assert stored.seconds == {RESERVED: [1.0, 3.0], IN_ORDER: [2.0, 4.0]} and stored.timings == 2
