"""The figures of /metrics: the engine's counters, a snapshot between two steps, and the server's own.

A request with several choices counts once per choice, as in the engine. Times are seconds of the monotonic clock;
a request's time begins when its HTTP body has arrived. A request that is refused counts as one failure, and
``http_requests`` counts each request to a generation endpoint once, whatever became of it.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import PAGES, PHASES, EngineStats
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import LEDGER

PREFIX = "kvbench:"
FINISHED_REASONS = ("stop", "length")
STATUSES = (200, 400, 404, 413, 422, 429, 499, 500, 503)
FAILURE_KINDS = ("disconnect", "engine_error", "unavailable", "shutdown", "refused", "queue_full")

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_LONG_SECONDS = (*_SECONDS[2:], 20.0, 40.0, 80.0, 160.0)

_Row = tuple[str, str, Callable[[EngineStats], float]]
_GAUGES: tuple[_Row, ...] = (
    ("num_requests_running", "Sequences in the current batch.", lambda s: s.num_requests_running),
    ("num_requests_waiting", "Sequences waiting for room, preempted ones too.", lambda s: s.num_requests_waiting),
    ("num_requests_swapped", "Of the waiting ones, those with KV on the host.", lambda s: s.num_requests_swapped),
    ("kv_cache_usage_perc", "Owned share of the KV pages, 0 to 1.", lambda s: s.kv_cache_usage_perc),
    ("kv_pages_total", "KV pages; contiguous layout: reservations.", lambda s: s.kv.pages_total),
    ("kv_pages_free", "Pages that hold nothing.", lambda s: s.kv.pages_free),
    ("kv_pages_owned", "Pages that at least one request uses.", lambda s: s.kv.pages_owned),
    ("kv_pages_logical", "Pages that requests would use without sharing.", lambda s: s.kv.pages_logical),
    ("kv_pages_cached", "Pages that no request uses, kept for the prefix cache.", lambda s: s.kv.pages_cached),
    ("kv_pages_pinned", "Pages that no request uses, kept until copied.", lambda s: s.kv.pages_pinned),
    ("kv_slots_total", "Token slots of all pages.", lambda s: s.kv.slots_total),
    ("kv_slots_reserved", "Token slots of the owned pages.", lambda s: s.kv.slots_reserved),
    ("kv_slots_used", "Token slots that hold a token's KV, shared ones counted once.", lambda s: s.kv.slots_used),
    ("kv_slots_shared", "Token slots that sharing saves.", lambda s: s.kv.slots_shared),
    ("kv_slots_cached", "Token slots of the cached pages.", lambda s: s.kv.slots_cached),
    ("kv_slots_pinned", "Token slots of the pinned pages.", lambda s: s.kv.slots_pinned),
    ("kv_slots_free", "Free token slots, with the scattered ones.", lambda s: s.kv.slots_free),
    ("kv_slots_fragmented", "Free slots, too scattered for the waiting one.", lambda s: s.kv.slots_fragmented),
    ("kv_waste_slots", "Slots reserved and not used.", lambda s: s.kv_waste_slots),
    ("kv_waste_bytes", "Bytes of the slots reserved and not used.", lambda s: s.kv_waste_slots * s.bytes_per_slot),
    ("page_table_bytes", "Bytes of the page table.", lambda s: s.kv.page_table_bytes),
    ("kv_budget_bytes", "Bytes given to K, V and the page table.", lambda s: s.kv_budget_bytes),
    ("kv_bytes_per_slot", "Bytes of a slot: one token's KV in a group of layers.", lambda s: s.bytes_per_slot),
    ("kv_scale_bytes_per_slot", "Of these, scales of a quantised KV.", lambda s: s.scale_bytes_per_slot),
    ("swap_space_bytes", "Host memory for swapped-out KV.", lambda s: s.swap_space_bytes),
    ("swap_slots_total", "Token slots of the swap space.", lambda s: s.kv.host_slots_total),
    ("swap_slots_used", "Token slots that swapped-out requests hold.", lambda s: s.kv.host_slots_used),
)
_COUNTERS: tuple[_Row, ...] = (
    ("num_preemptions", "Running sequences put back to waiting.", lambda s: s.num_preemptions),
    ("recomputed_tokens", "Tokens computed again, after preemptions above all.", lambda s: s.recomputed_tokens),
    ("prefix_cache_hits", "Prompt tokens that the prefix cache served.", lambda s: s.counters.prefix_hits),
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda s: s.counters.prefix_queries),
    ("prefix_cache_evictions", "Pages evicted from the prefix cache.", lambda s: s.counters.prefix_evictions),
    ("prompt_tokens", "Prompt tokens of the requests that began.", lambda s: s.prompt_tokens),
    ("generation_tokens", "Tokens generated.", lambda s: s.generation_tokens),
    ("steps", "Engine steps that computed something.", lambda s: s.steps),
    ("replayed_steps", "Of these, replays of a CUDA graph.", lambda s: s.replayed_steps),
    ("forks", "Sequences forked from another (n > 1, best_of, beams).", lambda s: s.forks),
    ("allocated_pages", "Pages that became owned, cached ones too.", lambda s: s.counters.allocated_pages),
    ("freed_pages", "Pages no longer owned; allocated - freed = owned.", lambda s: s.counters.freed_pages),
    ("copied_pages", "Pages copied on write.", lambda s: s.counters.copied_pages),
    ("copied_slots", "Token slots copied on write.", lambda s: s.counters.copied_slots),
    ("swapped_out_slots", "Token slots swapped out to the host.", lambda s: s.counters.swapped_out_slots),
    ("swapped_out_pages", "Pages swapped out, moved whole.", lambda s: s.counters.swapped_out_pages),
    ("swapped_in_slots", "Token slots swapped in again.", lambda s: s.counters.swapped_in_slots),
    ("swap_kept_slots", "Token slots swapped out that the host still had.", lambda s: s.counters.swap_kept_slots),
    ("swap_lost_slots", "Token slots that did not fit into the swap space.", lambda s: s.counters.swap_lost_slots),
    ("kv_sampled_values", "fp8 values of K and V sampled, in 1 step of 64.", lambda s: s.kv_sampled_values),
    ("kv_saturated_values", "Sampled values with the largest code, cut off or not.", lambda s: s.kv_saturated_values),
    ("swap_seconds", "Seconds of moving KV: copies on write and swaps.", lambda s: s.swap_seconds),
    ("refused_fragmented", "Sequences that waited although enough was free.", lambda s: s.counters.refused_fragmented),
    ("hash_seconds", "Seconds of finding and storing pages in the prefix cache.", lambda s: s.counters.hash_seconds),
)


def readings(stats: EngineStats) -> tuple[dict[str, float], dict[str, float]]:
    """The engine's gauges and counters by their names in /metrics, without what depends on the machine.

    The resident memory and the seconds in the prefix cache are left out: they are this process's, whatever clock the
    engine has.
    """
    counters = {f"{name}_total": float(value(stats)) for name, _, value in _COUNTERS if name != "hash_seconds"}
    for name, _text, _label, values in _labelled_counters(stats):
        counters |= {f"{name}_total_{key}": float(value) for key, value in values.items()}
    return {name: float(value(stats)) for name, _, value in _GAUGES}, counters


def _labelled_counters(stats: EngineStats) -> Iterator[tuple[str, str, str, dict[str, float]]]:
    """Name, text, label, and the value of each of the label's values."""
    phases = {phase: stats.phase_seconds.get(phase, 0.0) for phase in PHASES}
    yield "step_time_seconds", "Seconds of the steps by phase.", "phase", phases
    kinds = {"prefill": stats.prefill_tokens_scheduled, "decode": stats.decode_tokens_scheduled}
    yield "scheduled_tokens", "Tokens computed, by kind.", "kind", kinds
    slots = {state: stats.slot_steps.get(state, 0) for state in LEDGER}
    yield "kv_slot_steps", "KV slots by state, summed over the steps.", "place", slots
    pages = {kind: stats.page_steps.get(kind, 0) for kind in PAGES}
    yield "kv_page_steps", "Pages owned, and without sharing, summed over the steps.", "pages", pages


class EngineCollector(Collector):
    """Turns one ``EngineStats`` into metric families. ``stats`` is set right before each scrape."""

    def __init__(self, stats: EngineStats, info: dict[str, str], process_ids: Sequence[int]):
        self.stats = stats
        self._info = info
        self._process_ids = process_ids

    def collect(self) -> Iterator[Metric]:
        stats = self.stats
        for name, text, value in _GAUGES:
            yield GaugeMetricFamily(PREFIX + name, text, value=value(stats))
        yield GaugeMetricFamily(
            PREFIX + "process_resident_bytes",
            "Resident memory of the server's processes; pages that they share count for each.",
            value=sum(map(resident_bytes, self._process_ids)),
        )
        for name, text, value in _COUNTERS:
            yield CounterMetricFamily(PREFIX + name, text, value=value(stats))
        for name, text, label, values in _labelled_counters(stats):
            yield _labelled(name, text, label, values)
        yield InfoMetricFamily(PREFIX + "cache_config", "How the KV memory is set up.", value=self._info)


def _labelled(name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


class _WithoutCreated(Collector):
    """Another registry's families less their ``_created`` samples, which would look like gauges of ours."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric


class Histogram(Collector):
    """Counts seconds by upper bounds. prometheus_client's takes locks, 2 us for each token."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]):
        self._name, self._text, self._bounds = name, text, bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count a duration in the first bucket whose bound is not below it."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = list(zip(names, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum)


class ServerMetrics:
    """One server's registry: the engine's numbers and the request histograms. ``process_ids``: of the server."""

    def __init__(self, config: EngineConfig, capacity: KVCapacity, stats: EngineStats, process_ids: Sequence[int]):
        self.registry = CollectorRegistry()
        self._collector = EngineCollector(stats, cache_config_info(config, capacity), process_ids)
        self.registry.register(self._collector)
        self._observed = CollectorRegistry()
        self._success = self._counter("request_success", "Requests that ended as they should.", "finished_reason")
        self._failure = self._counter("request_failure", "Requests that did not.", "kind")
        self._answers = self._counter("http_requests", "Requests to the generation endpoints, by status.", "code")
        for reason in FINISHED_REASONS:
            self._success.labels(reason)
        for kind in FAILURE_KINDS:
            self._failure.labels(kind)
        for status in STATUSES:  # there from the start, or the first of a kind would not show as an increase
            self._answers.labels(str(status))
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
        histogram = Histogram(f"{PREFIX}{name}_seconds", text, buckets)
        self._observed.register(histogram)
        return histogram

    def finished(self, reason: str) -> None:
        self._success.labels(reason).inc()

    def failed(self, kind: str, count: int = 1) -> None:
        """Count failures. ``kind`` is one of FAILURE_KINDS."""
        if count:
            self._failure.labels(kind).inc(count)

    def refused(self, status: int) -> None:
        """Count a request that got an error status, from the server or from the engine."""
        if status == 429:
            self.failed("queue_full")
        elif 400 <= status < 500:
            self.failed("refused")
        elif status == 503:
            self.failed("unavailable")

    def answered(self, status: int) -> None:
        """Count a generation request that is over. 499: its client left; a stream that broke off has its error's
        status.
        """
        self._answers.labels(str(status)).inc()

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
        "free_outside_window": str(config.free_outside_window).lower(),
        "latent_kv": str(config.latent_kv).lower(),
        "kv_budget": capacity.budget_bytes,
        "bytes_per_slot": capacity.bytes_per_slot,
        "scale_bytes_per_slot": capacity.scale_bytes_per_slot,
        "num_pages": capacity.num_pages,
        "capacity_tokens": capacity.num_tokens,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_num_partial_prefills": config.max_num_partial_prefills,
        "max_num_waiting": config.max_num_waiting,
        "watermark": config.watermark,
        "scheduling_policy": config.scheduling_policy,
        "preemption_mode": config.preemption_mode,
        "swap_space": capacity.swap_space_bytes,
        "max_concurrency": capacity.max_concurrency(config.max_model_len or 1),
    }
    return {name: str(value) for name, value in values.items()}


def resident_bytes(process_id: int) -> int:
    """Resident set of a process; 0 where /proc does not tell."""
    try:
        with open(f"/proc/{process_id}/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
