"""Reading /metrics in our names and units, and turning two readings into the counters of a load.

The texts of other servers follow their documentation (see the presets).
"""

from __future__ import annotations

import itertools
import math
import re
import threading
import time

import numpy as np
import pytest

from kvbench.common.stats import time_mean
from kvbench.targets.presets import METRIC_KINDS
from kvbench.targets.prometheus import MetricsPoller, MetricsSample, counter_changes, gauge_summary, parse_metrics


def exposition(text: str) -> str:
    """Prometheus text of lines ``TYPE name{labels} value``, each family with its ``# TYPE``."""
    out: list[str] = []
    for line in text.strip().splitlines():
        kind, _, sample = line.partition(" ")
        family = re.match(r"[\w:]+", sample)[0]
        if kind == "histogram":
            family = re.sub(r"_(bucket|count|sum|created)$", "", family)
        if (head := f"# TYPE {family} {kind}") not in out:
            out += [f"# HELP {family} Text.", head]
        out.append(sample)
    return "\n".join(out) + "\n"


OURS = """
gauge kvbench:num_requests_running 3.0
gauge kvbench:kv_pages_owned 7.0
counter kvbench:request_success_total{finished_reason="stop"} 1.0
counter kvbench:request_success_total{finished_reason="length"} 4.0
histogram kvbench:e2e_request_latency_seconds_bucket{le="1.0"} 2.0
histogram kvbench:e2e_request_latency_seconds_bucket{le="+Inf"} 5.0
histogram kvbench:e2e_request_latency_seconds_count 5.0
histogram kvbench:e2e_request_latency_seconds_sum 9.5
histogram kvbench:e2e_request_latency_seconds_created 1.7e9
gauge kvbench:cache_config_info{layout="paged"} 1.0
"""
VLLM = """
gauge vllm:num_requests_running{engine="0",model_name="m"} 3.0
gauge vllm:num_requests_running{engine="1",model_name="m"} 2.0
gauge vllm:num_requests_waiting{engine="0",model_name="m"} 4.0
gauge vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
gauge vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.7
counter vllm:prefix_cache_queries_total{engine="0",model_name="m"} 4000.0
counter vllm:prefix_cache_hits_total{engine="0",model_name="m"} 1024.0
counter vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
histogram vllm:request_queue_time_seconds_bucket{engine="0",le="0.3",model_name="m"} 5.0
histogram vllm:request_queue_time_seconds_count{engine="0",model_name="m"} 9.0
histogram vllm:request_queue_time_seconds_sum{engine="0",model_name="m"} 1.25
gauge vllm:cache_config_info{block_size="32",engine="0",kv_cache_size_tokens="6208",num_gpu_blocks="194",x="None"} 1.0
"""
SGLANG = """
gauge sglang:num_running_reqs{engine_type="unified",model_name="m",priority="",tp_rank="0",pp_rank="0"} 3.0
gauge sglang:num_running_reqs{engine_type="unified",model_name="m",priority="0",tp_rank="0",pp_rank="0"} 1.0
gauge sglang:num_running_reqs{engine_type="unified",model_name="m",priority="10",tp_rank="0",pp_rank="0"} 2.0
gauge sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="0",tp_rank="0",pp_rank="0"} 4.0
gauge sglang:num_queue_reqs{engine_type="unified",model_name="m",priority="",tp_rank="0",pp_rank="0"} 4.0
gauge sglang:token_usage{model_name="m"} 0.28
counter sglang:prompt_tokens_total{model_name="m"} 4000.0
counter sglang:cached_tokens_total{cache_source="device",model_name="m"} 1000.0
counter sglang:cached_tokens_total{cache_source="host",model_name="m"} 24.0
counter sglang:generation_tokens_total{model_name="m"} 900.0
gauge sglang:num_retracted_reqs{model_name="m"} 1.0
counter sglang:num_retracted_requests_total{model_name="m"} 7.0
histogram sglang:queue_time_seconds_bucket{le="0.3",model_name="m"} 5.0
histogram sglang:queue_time_seconds_count{model_name="m"} 9.0
histogram sglang:queue_time_seconds_sum{model_name="m"} 1.25
histogram sglang:time_to_first_token_seconds_sum{model_name="m"} 2.5
histogram sglang:time_to_first_token_seconds_count{model_name="m"} 9.0
gauge sglang:max_total_num_tokens{model_name="m"} 6208.0
"""
TGI = """
gauge tgi_batch_current_size 3
gauge tgi_queue_size 4
counter tgi_request_success{method="generate_stream"} 9
histogram tgi_request_generated_tokens_bucket{le="100"} 9
histogram tgi_request_generated_tokens_sum 900
histogram tgi_request_generated_tokens_count 9
histogram tgi_request_input_length_sum 4000
histogram tgi_request_input_length_count 9
histogram tgi_request_queue_duration_sum 1.25
histogram tgi_request_queue_duration_count 9
histogram tgi_request_mean_time_per_token_duration_sum 0.27
histogram tgi_request_mean_time_per_token_duration_count 9
"""
LLAMACPP = """
counter llamacpp:prompt_tokens_total 2976
counter llamacpp:prompt_tokens_cached_total 1024
counter llamacpp:tokens_predicted_total 900
counter llamacpp:prompt_seconds_total 1.5
counter llamacpp:tokens_predicted_seconds_total 7.5
gauge llamacpp:requests_processing 3
gauge llamacpp:requests_deferred 4
"""
TEXTS = {"ours": OURS, "vllm": VLLM, "sglang": SGLANG, "tgi": TGI, "llamacpp": LLAMACPP}
QUEUE_TIME = {"request_queue_time_seconds_sum": 1.25, "request_queue_time_seconds_count": 9.0}
CACHE = {"prefix_cache_hits_total": 1024.0, "prefix_cache_queries_total": 4000.0}
GAUGES = {
    "ours": {"num_requests_running": 3.0, "kv_pages_owned": 7.0},
    # The sum over vLLM's engines, of a share the mean.
    "vllm": {"num_requests_running": 5.0, "num_requests_waiting": 4.0, "kv_cache_usage_perc": 0.6},
    "sglang": {
        "num_requests_running": 3.0, "num_requests_waiting": 4.0, "kv_cache_usage_perc": 0.28,
        "num_retracted_reqs": 1.0, "max_total_num_tokens": 6208.0,
    },
    "tgi": {"num_requests_running": 3.0, "num_requests_waiting": 4.0},
    "llamacpp": {"num_requests_running": 3.0, "num_requests_waiting": 4.0},
}  # fmt: skip
COUNTERS = {
    "ours": {
        "request_success_total_stop": 1.0, "request_success_total_length": 4.0,
        "e2e_request_latency_seconds_count": 5.0, "e2e_request_latency_seconds_sum": 9.5,
    },
    "vllm": CACHE | QUEUE_TIME | {"num_preemptions_total": 7.0},
    "sglang": CACHE | QUEUE_TIME | {
        "prompt_tokens_total": 4000.0, "generation_tokens_total": 900.0, "num_preemptions_total": 7.0,
        "time_to_first_token_seconds_sum": 2.5, "time_to_first_token_seconds_count": 9.0,
    },
    "tgi": QUEUE_TIME | {
        "generation_tokens_total": 900.0, "prompt_tokens_total": 4000.0, "request_success_total": 9.0,
        "request_time_per_output_token_seconds_sum": 0.27, "request_time_per_output_token_seconds_count": 9.0,
        "request_generated_tokens_count": 9.0, "request_input_length_count": 9.0,
    },
    # It counts computed and cached prompt tokens apart: 2,976 and 1,024. The engine's seconds are not the requests'.
    "llamacpp": CACHE | {
        "prompt_tokens_total": 4000.0, "generation_tokens_total": 900.0, "prompt_seconds_total": 1.5,
        "request_decode_time_seconds_sum": 7.5,
    },
}  # fmt: skip
FACTS = {
    "vllm": {"page_size": 32.0, "num_pages": 194.0, "capacity_tokens": 6208.0},
    "sglang": {"capacity_tokens": 6208.0},
}


def read(text: str) -> MetricsSample:
    noise = "counter process_cpu_seconds_total 3.0\n"
    return parse_metrics(exposition(text + noise), 0.0, METRIC_KINDS)


@pytest.mark.parametrize("server", TEXTS)
def test_each_servers_metrics_in_our_names_and_units(server):
    """And nothing else: what a server does not tell is absent, not 0."""
    sample = read(TEXTS[server])
    assert sample.gauges == pytest.approx(GAUGES[server])
    assert sample.counters == pytest.approx(COUNTERS[server])
    assert sample.facts == FACTS.get(server, {})
    assert sample.active_requests == sum(v for k, v in GAUGES[server].items() if k.startswith("num_requests"))
    assert sample.owned_pages == GAUGES[server].get("kv_pages_owned")


@pytest.mark.parametrize("text", ["", "# just a comment\n"])
def test_an_empty_exposition_is_an_empty_sample(text):
    sample = parse_metrics(text, 0.0)
    assert sample.owned_pages is None and sample.active_requests == 0


def test_changes_count_a_new_label_from_zero():
    before = MetricsSample(0, {}, {"a_total": 5.0})
    after = MetricsSample(1, {}, {"a_total": 8.0, "b_total_new": 2.0})
    assert counter_changes(before, after) == {"a_total": 3.0, "b_total_new": 2.0}
    assert counter_changes(None, after) == counter_changes(None, None) == {}


def test_a_mean_is_over_time_and_not_over_readings():
    # 8 requests ran from 1 s to 9 s, while the server took its time to say so; idle before and after.
    at = [0.0, 0.25, 0.5, 0.75, 1.0, 3.0, 5.0, 7.0, 9.0, 9.25, 9.5, 9.75]
    values = [8.0 if 1 <= t <= 9 else 0.0 for t in at]
    assert np.mean(values) < 3.4  # it was busy for 82 % of the time
    mean = pytest.approx(8 * 8.25 / 10, rel=1e-12)  # each edge is somewhere in 0.25 s
    samples = [MetricsSample(t, {"g": v}, {}) for t, v in zip(at, values, strict=True)]
    assert time_mean(at, values) == mean and gauge_summary(samples) == {"g": {"peak": 8.0, "mean": mean}}
    assert time_mean(at, [*values[:-1], math.nan]) == pytest.approx(8 * 8.25 / 9.75)  # unknown is not nothing
    assert time_mean([1.0, 1.0], [2.0, 4.0]) == 3.0 and time_mean([1.0], [5.0]) == 5.0
    assert math.isnan(time_mean([], [])) and gauge_summary([]) == {}


def test_the_poller_survives_a_server_that_does_not_answer_and_stops_with_its_block():
    enough = threading.Event()
    calls = []

    def read():
        calls.append(1)
        if len(calls) >= 6:
            enough.set()
        if len(calls) % 2:
            raise OSError("refused")
        return MetricsSample(float(len(calls)), {}, {})

    told = []
    with MetricsPoller(read, interval_s=0.001, on_reading=told.append) as poller:
        assert enough.wait(60)
    made = len(calls)
    assert poller.failures >= 3 and len(poller.samples) >= 3 and told == poller.samples
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
        assert enough.wait(60)
    assert min(b - a for a, b in itertools.pairwise(begun)) >= 0.19
