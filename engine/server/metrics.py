"""/metrics: what the engine counts (a reading taken between two steps) and what the server sees of its requests.

A request with several choices counts once per choice, as in the engine. Times are seconds of the monotonic clock;
a request's time begins when its HTTP body has arrived.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.config import EngineConfig
from engine.kv_budget import KVCapacity
from engine.stats import PHASES, EngineStats

PREFIX = "kvbench:"
FINISHED_REASONS = ("stop", "length")
FAILURE_KINDS = ("disconnect", "engine_error", "unavailable", "shutdown", "refused")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (*_SECONDS[2:], 20.0, 40.0, 80.0, 160.0)

_GAUGES = (
    ("num_requests_running", "Requests in the current batch.", lambda s: s.num_requests_running),
    (
        "num_requests_waiting",
        "Requests that wait for room, preempted ones among them.",
        lambda s: s.num_requests_waiting,
    ),
    ("kv_cache_usage_perc", "Owned share of the KV pages, 0 to 1.", lambda s: s.kv_cache_usage_perc),
    ("kv_pages_total", "KV pages; contiguous layout: reservations.", lambda s: s.kv.pages_total),
    ("kv_pages_free", "Pages that hold nothing.", lambda s: s.kv.pages_free),
    ("kv_pages_owned", "Pages that at least one request uses.", lambda s: s.kv.pages_owned),
    ("kv_pages_cached", "Pages that nobody uses, kept for the prefix cache.", lambda s: s.kv.pages_cached),
    ("kv_slots_total", "Token slots of all pages.", lambda s: s.kv.slots_total),
    ("kv_slots_reserved", "Token slots of the owned pages.", lambda s: s.kv.slots_reserved),
    ("kv_slots_used", "Token slots that hold a token's KV, shared ones counted once.", lambda s: s.kv.slots_used),
    ("kv_waste_slots", "Slots reserved and not used.", lambda s: s.kv_waste_slots),
    ("kv_waste_bytes", "Bytes of the slots reserved and not used.", lambda s: s.kv_waste_slots * s.bytes_per_slot),
    ("page_table_bytes", "Bytes of the page table.", lambda s: s.kv.page_table_bytes),
    ("kv_budget_bytes", "Bytes given to K, V and the page table.", lambda s: s.kv_budget_bytes),
)
_COUNTERS = (
    ("num_preemptions", "Requests put back to waiting because memory ran out.", lambda s: s.num_preemptions),
    ("recomputed_tokens", "Tokens computed again after a preemption.", lambda s: s.recomputed_tokens),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache served.", lambda s: s.prefix_cache_hits),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.prefix_cache_queries),
    ("prompt_tokens", "Prompt tokens of the requests that began.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("steps", "Engine steps that computed something.", lambda s: s.steps),
    ("copied_pages", "Pages copied on write.", lambda s: s.copied_pages),
    ("hash_seconds", "Seconds spent on hashing pages for the prefix cache.", lambda s: s.hash_seconds),
)


class EngineCollector(Collector):
    """Turns one ``EngineStats`` into metric families. ``stats`` is set right before each scrape."""

    def __init__(self, stats: EngineStats, info: dict[str, str]):
        self.stats = stats
        self._info = info

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value=value(stats))
        yield GaugeMetricFamily(
            PREFIX + "process_resident_bytes", "Resident memory of the server process.", value=resident_bytes()
        )
        for name, text, value in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=value(stats))
        phases = CounterMetricFamily(PREFIX + "step_time_seconds", "Seconds of the steps by phase.", labels=["phase"])
        for phase in PHASES:
            phases.add_metric([phase], stats.phase_seconds.get(phase, 0.0))
        yield phases
        tokens = CounterMetricFamily(PREFIX + "scheduled_tokens", "Tokens computed, by kind.", labels=["kind"])
        tokens.add_metric(["prefill"], stats.prefill_tokens_scheduled)
        tokens.add_metric(["decode"], stats.decode_tokens_scheduled)
        yield tokens
        yield InfoMetricFamily(PREFIX + "cache_config", "How the KV memory is set up.", value=self._info)


class _WithoutCreated(Collector):
    """Another registry's families less their ``_created`` samples, which would look like gauges of ours."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class ServerMetrics:
    """One server's registry: the engine's numbers and the request histograms."""

    def __init__(self, config: EngineConfig, capacity: KVCapacity, stats: EngineStats):
        self.registry = CollectorRegistry()
        self._collector = EngineCollector(stats, cache_config_info(config, capacity))
        self.registry.register(self._collector)
        self._observed = CollectorRegistry()
        self._success = self._counter("request_success", "Requests that ended as they should.", "finished_reason")
        self._failure = self._counter("request_failure", "Requests that did not.", "kind")
        for reason in FINISHED_REASONS:
            self._success.labels(reason)
        for kind in FAILURE_KINDS:
            self._failure.labels(kind)
        self._make_histograms()
        self.registry.register(_WithoutCreated(self._observed))

    def _make_histograms(self) -> None:
        self.ttft = self._histogram("time_to_first_token", "Arrival to first token.", _SECONDS)
        self.itl = self._histogram("inter_token_latency", "Between the tokens of a request.", _SECONDS)
        self.e2e = self._histogram("e2e_request_latency", "Arrival to last token.", _LONG_SECONDS)
        self.queue = self._histogram("request_queue_time", "Arrival to first being scheduled.", _LONG_SECONDS)
        self.prefill = self._histogram("request_prefill_time", "First scheduled to first token.", _LONG_SECONDS)
        self.decode = self._histogram("request_decode_time", "First token to last token.", _LONG_SECONDS)

    def _counter(self, name: str, text: str, label: str) -> Counter:
        return Counter(PREFIX + name, text, [label], registry=self._observed)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{PREFIX}{name}_seconds", text, registry=self._observed, buckets=buckets)

    def finished(self, reason: str) -> None:
        self._success.labels(reason).inc()

    def failed(self, kind: str, count: int = 1) -> None:
        """``kind`` is one of FAILURE_KINDS."""
        if count:
            self._failure.labels(kind).inc(count)

    def refused(self, status: int) -> None:
        """A request that got an error status before it reached the engine, or from it."""
        if 400 <= status < 500:
            self.failed("refused")
        elif status == 503:
            self.failed("unavailable")

    def exposition(self, stats: EngineStats) -> bytes:
        """Prometheus text with ``stats`` as the engine's part."""
        self._collector.stats = stats
        return generate_latest(self.registry)


def cache_config_info(config: EngineConfig, capacity: KVCapacity) -> dict[str, str]:
    values: dict[str, Any] = {
        "layout": config.layout,
        "reservation": config.reservation,
        "page_size": capacity.page_size,
        "kv_cache_dtype": config.kv_cache_dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching).lower(),
        "kv_budget": capacity.budget_bytes,
        "bytes_per_slot": capacity.bytes_per_slot,
        "num_pages": capacity.num_pages,
        "capacity_tokens": capacity.num_slots,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_concurrency": capacity.max_concurrency(config.max_model_len or 1),
    }
    return {name: str(value) for name, value in values.items()}


def resident_bytes() -> int:
    """Resident set of this process; 0 where /proc does not tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
