"""Reading /metrics in our names and units, and turning two readings into the counters of a load.

The texts of other servers follow their documentation (see the presets).
"""

from __future__ import annotations

import itertools
import math
import threading
import time

import numpy as np
import pytest

from kvbench.common.stats import time_mean
from kvbench.targets.presets import METRIC_KINDS
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


VLLM = """
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 4000.0
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
# TYPE vllm:request_queue_time_seconds histogram
vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 5.0
vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 9.0
vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="6208",num_gpu_blocks="194",x="None"} 1.0
"""

SGLANG = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",tp_rank="0",pp_rank="0"} 3.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="m",tp_rank="0",pp_rank="0"} 4.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
# TYPE sglang:prompt_tokens_total counter
sglang:prompt_tokens_total{model_name="m"} 4000.0
# TYPE sglang:cached_tokens_total counter
sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 24.0
# TYPE sglang:generation_tokens_total counter
sglang:generation_tokens_total{model_name="m"} 900.0
# TYPE sglang:num_retracted_reqs gauge
sglang:num_retracted_reqs{model_name="m"} 1.0
# TYPE sglang:num_retracted_requests_total counter
sglang:num_retracted_requests_total{model_name="m"} 7.0
# TYPE sglang:queue_time_seconds histogram
sglang:queue_time_seconds_bucket{le="0.3",model_name="m"} 5.0
sglang:queue_time_seconds_count{model_name="m"} 9.0
sglang:queue_time_seconds_sum{model_name="m"} 1.25
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_sum{model_name="m"} 2.5
sglang:time_to_first_token_seconds_count{model_name="m"} 9.0
# TYPE sglang:max_total_num_tokens gauge
sglang:max_total_num_tokens{model_name="m"} 6208.0
"""

TGI = """
# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 3
# TYPE tgi_queue_size gauge
tgi_queue_size 4
# TYPE tgi_request_success counter
tgi_request_success{method="generate_stream"} 9
# TYPE tgi_request_generated_tokens histogram
tgi_request_generated_tokens_bucket{le="100"} 9
tgi_request_generated_tokens_sum 900
tgi_request_generated_tokens_count 9
# TYPE tgi_request_input_length histogram
tgi_request_input_length_sum 4000
tgi_request_input_length_count 9
# TYPE tgi_request_queue_duration histogram
tgi_request_queue_duration_sum 1.25
tgi_request_queue_duration_count 9
# TYPE tgi_request_mean_time_per_token_duration histogram
tgi_request_mean_time_per_token_duration_sum 0.27
tgi_request_mean_time_per_token_duration_count 9
"""

LLAMACPP = """
# HELP llamacpp:prompt_tokens_total Number of prompt tokens processed.
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 2976
# TYPE llamacpp:prompt_tokens_cached_total counter
llamacpp:prompt_tokens_cached_total 1024
# TYPE llamacpp:tokens_predicted_total counter
llamacpp:tokens_predicted_total 900
# TYPE llamacpp:prompt_seconds_total counter
llamacpp:prompt_seconds_total 1.5
# TYPE llamacpp:tokens_predicted_seconds_total counter
llamacpp:tokens_predicted_seconds_total 7.5
# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 3
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 4
"""


def read(text):
    noise = "# TYPE process_cpu_seconds counter\nprocess_cpu_seconds_total 3.0\n"
    return parse_metrics(text + noise, 0.0, METRIC_KINDS)


@pytest.mark.parametrize("text", [VLLM, SGLANG, TGI, LLAMACPP], ids=["vllm", "sglang", "tgi", "llamacpp"])
def test_running_and_waiting_requests_are_found_whatever_they_are_called(text):
    sample = read(text)
    assert sample.gauges["num_requests_running"] == (5.0 if text is VLLM else 3.0)  # the sum over vLLM's engines
    assert sample.gauges["num_requests_waiting"] == 4.0
    assert sample.active_requests == (9.0 if text is VLLM else 7.0)
    assert not any("cpu_seconds" in name for name in sample.counters)


@pytest.mark.parametrize(("text", "usage"), [(VLLM, 0.6), (SGLANG, 0.28)], ids=["vllm", "sglang"])
def test_kv_usage_is_a_share_from_0_to_1(text, usage):
    assert read(text).gauges["kv_cache_usage_perc"] == pytest.approx(usage)  # the mean over vLLM's engines


@pytest.mark.parametrize("text", [VLLM, SGLANG], ids=["vllm", "sglang"])
def test_prefix_hits_and_queries_are_tokens(text):
    counters = read(text).counters
    assert (counters["prefix_cache_hits_total"], counters["prefix_cache_queries_total"]) == (1024.0, 4000.0)
    assert counters["num_preemptions_total"] == 7.0


@pytest.mark.parametrize("text", [VLLM, SGLANG, TGI], ids=["vllm", "sglang", "tgi"])
def test_time_in_the_queue_is_in_seconds(text):
    counters = read(text).counters
    assert counters["request_queue_time_seconds_sum"] == 1.25
    assert counters["request_queue_time_seconds_count"] == 9.0


@pytest.mark.parametrize("text", [SGLANG, TGI, LLAMACPP], ids=["sglang", "tgi", "llamacpp"])
def test_generated_tokens_have_one_name(text):
    assert read(text).counters["generation_tokens_total"] == 900.0


def test_what_else_the_servers_tell():
    assert read(TGI).counters["request_success_total"] == 9.0
    assert read(TGI).counters["prompt_tokens_total"] == 4000.0
    assert read(TGI).counters["request_time_per_output_token_seconds_sum"] == 0.27
    assert read(SGLANG).counters["time_to_first_token_seconds_sum"] == 2.5
    assert read(SGLANG).gauges["num_retracted_reqs"] == 1.0
    llama = read(LLAMACPP).counters
    assert llama["request_decode_time_seconds_sum"] == 7.5
    assert "request_prefill_time_seconds_sum" not in llama  # the engine's seconds are not those of requests
    # It counts computed and cached prompt tokens apart: 2,976 and 1,024.
    assert llama["prompt_tokens_total"] == llama["prefix_cache_queries_total"] == 4000.0
    assert llama["prefix_cache_hits_total"] == 1024.0


def test_requests_by_priority_are_not_added_to_those_of_all():
    text = """
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m",priority="",tp_rank="0"} 5.0
sglang:num_running_reqs{model_name="m",priority="0",tp_rank="0"} 3.0
sglang:num_running_reqs{model_name="m",priority="10",tp_rank="0"} 2.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m",priority="0",tp_rank="0"} 4.0
sglang:num_queue_reqs{model_name="m",priority="",tp_rank="0"} 4.0
# TYPE sglang:num_grammar_queue_reqs gauge
sglang:num_grammar_queue_reqs{model_name="m",priority="",tp_rank="0"} 1.0
sglang:num_grammar_queue_reqs{model_name="m",priority="0",tp_rank="0"} 1.0
"""
    sample = read(text)
    assert (sample.gauges["num_requests_running"], sample.gauges["num_requests_waiting"]) == (5.0, 4.0)
    assert sample.gauges["num_grammar_queue_reqs"] == 1.0
    assert sample.active_requests == 9.0


def test_capacity_as_the_servers_tell_it():
    assert read(VLLM).facts == {"page_size": 32.0, "num_pages": 194.0, "capacity_tokens": 6208.0}
    assert read(SGLANG).facts == {"capacity_tokens": 6208.0}
    assert read(TGI).facts == {}


def test_what_a_server_does_not_tell_is_absent_and_not_0():
    sample = read(TGI)
    assert "kv_cache_usage_perc" not in read(LLAMACPP).gauges
    assert "kv_cache_usage_perc" not in sample.gauges and "prefix_cache_hits_total" not in sample.counters
    assert counter_changes(sample, sample)["generation_tokens_total"] == 0.0
    assert "num_preemptions_total" not in counter_changes(sample, sample)
    assert counter_changes(None, None) == {}
