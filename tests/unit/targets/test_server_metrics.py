"""Reading /metrics and turning two readings into the counters of a load."""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import pytest

from kvbench.common.stats import time_mean
from kvbench.targets.prometheus import MetricsPoller, MetricsSample, counter_changes, gauge_summary, parse_metrics

TEXT = """
# HELP kvbench:num_requests_running Requests.
# TYPE kvbench:num_requests_running gauge
kvbench:num_requests_running 3.0
# TYPE kvbench:kv_pages_owned gauge
kvbench:kv_pages_owned 7.0
# TYPE kvbench:request_success_total counter
kvbench:request_success_total{finished_reason="stop"} 1.0
kvbench:request_success_total{finished_reason="length"} 4.0
# TYPE kvbench:e2e_request_latency_seconds histogram
kvbench:e2e_request_latency_seconds_bucket{le="1.0"} 2.0
kvbench:e2e_request_latency_seconds_bucket{le="+Inf"} 5.0
kvbench:e2e_request_latency_seconds_count 5.0
kvbench:e2e_request_latency_seconds_sum 9.5
kvbench:e2e_request_latency_seconds_created 1.7e9
# TYPE kvbench:cache_config_info gauge
kvbench:cache_config_info{layout="paged"} 1.0
# TYPE process_cpu_seconds counter
process_cpu_seconds_total 3.0
"""


def test_parsing_flattens_labels_and_leaves_out_what_is_not_ours():
    sample = parse_metrics(TEXT, at=1.0)
    assert sample.gauges == {"num_requests_running": 3.0, "kv_pages_owned": 7.0}
    assert sample.counters == {
        "request_success_total_stop": 1.0,
        "request_success_total_length": 4.0,
        "e2e_request_latency_seconds_count": 5.0,
        "e2e_request_latency_seconds_sum": 9.5,
    }
    assert sample.owned_pages == 7 and sample.active_requests == 3


def test_vllm_names_are_understood():
    text = '# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total{engine="0",model_name="m"} 2.0\n'
    assert parse_metrics(text, 0.0).counters == {"num_preemptions_total": 2.0}


def test_changes_count_a_new_label_from_zero():
    before = MetricsSample(0, {}, {"a_total": 5.0})
    after = MetricsSample(1, {}, {"a_total": 8.0, "b_total_new": 2.0})
    assert counter_changes(before, after) == {"a_total": 3.0, "b_total_new": 2.0}
    assert counter_changes(None, after) == {}


def test_gauge_summary_has_peak_and_mean():
    samples = [MetricsSample(i, {"g": v}, {}) for i, v in enumerate([1.0, 5.0, 3.0])]
    assert gauge_summary(samples) == {"g": {"peak": 5.0, "mean": 3.0}}
    assert gauge_summary([]) == {}


def test_a_mean_is_over_time_and_not_over_readings():
    # 8 requests ran from 1 s to 9 s, while the server took its time to say so; idle before and after.
    at = [0.0, 0.25, 0.5, 0.75, 1.0, 3.0, 5.0, 7.0, 9.0, 9.25, 9.5, 9.75]
    values = [8.0 if 1 <= t <= 9 else 0.0 for t in at]
    assert np.mean(values) < 3.4  # it was busy for 82 % of the time
    assert time_mean(at, values) == pytest.approx(8 * 8.25 / 10, rel=1e-12)  # each edge is somewhere in 0.25 s
    samples = [MetricsSample(t, {"g": v}, {}) for t, v in zip(at, values, strict=True)]
    assert gauge_summary(samples)["g"]["mean"] == pytest.approx(time_mean(at, values))
    assert time_mean(at, [*values[:-1], math.nan]) == pytest.approx(8 * 8.25 / 9.75)  # not told is not nothing
    assert time_mean([1.0, 1.0], [2.0, 4.0]) == 3.0 and time_mean([1.0], [5.0]) == 5.0
    assert math.isnan(time_mean([], []))


def test_the_poller_survives_a_server_that_does_not_answer_and_stops_when_told():
    enough = threading.Event()
    calls = []

    def read():
        calls.append(1)
        if len(calls) >= 6:
            enough.set()
        if len(calls) % 2:
            raise OSError("refused")
        return MetricsSample(float(len(calls)), {}, {})

    with MetricsPoller(read, interval_s=0.001) as poller:
        assert enough.wait(10)
    made = len(calls)
    assert poller.failures >= 3 and len(poller.samples) >= 3
    assert poller.failures + len(poller.samples) == made
    enough.clear()
    assert not enough.wait(0.05) and len(calls) == made


def test_a_page_that_takes_long_to_read_is_read_less_often():
    enough, begun = threading.Event(), []

    def read():
        begun.append(time.monotonic())
        if len(begun) == 3:
            enough.set()
        since = time.thread_time()
        while time.thread_time() - since < 0.001:
            pass
        return MetricsSample(0.0, {}, {})

    with MetricsPoller(read, interval_s=0.001):
        assert enough.wait(30)
    assert min(b - a for a, b in itertools.pairwise(begun)) >= 0.19


@pytest.mark.parametrize("text", ["", "# just a comment\n"])
def test_an_empty_exposition_is_an_empty_sample(text):
    sample = parse_metrics(text, 0.0)
    assert sample.owned_pages is None and sample.active_requests == 0
