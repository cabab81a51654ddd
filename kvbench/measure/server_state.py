"""The server's state around a load: idle before it, cache as declared, pages released after it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.common.errors import MeasurementError
from kvbench.measure.server import MeasuredServer
from kvbench.measure.single_request import complete
from kvbench.metrics.model import LoadMetrics
from kvbench.requests.prefix_hits import HitBounds, outside, predict_hits, unverified
from kvbench.requests.request import RequestSpec, distinct_prefixes
from kvbench.runs.results import CacheBounds, CacheCounts
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.base import Target
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.load_section import LoadConfig

IDLE_BOUND_S = 30.0  # aborted requests of an earlier load leave at the next steps
RELEASE_BOUND_S = 5.0  # pages must be back that soon after the last request ended


def read_metrics(target: Target) -> MetricsSample | None:
    """Reads /metrics (None: the server has none). Raises MeasurementError when that fails."""
    try:
        return target.metrics()
    except MeasurementError:
        target.check_alive()  # its error quotes the log of a server that died
        raise
    except Exception as error:
        target.check_alive()
        raise MeasurementError(f"the server's /metrics cannot be read: {error!r}") from None


def wait_idle(target: Target) -> None:
    """Waits until no request runs or waits and none has KV. Raises MeasurementError after ``IDLE_BOUND_S``."""
    deadline = time.monotonic() + IDLE_BOUND_S
    while True:
        sample = read_metrics(target)
        if sample is None or (sample.active_requests == 0 and not sample.holds_kv):
            return
        if time.monotonic() > deadline:
            raise MeasurementError(
                f"the server is not idle after {IDLE_BOUND_S:g} s: {sample.active_requests:g} requests, "
                f"{sample.owned_pages or 0:g} pages owned, {sample.swapped_slots:g} slots of the swap space used"
            )
        target.check_alive()
        time.sleep(0.1)


def wait_release(target: Target) -> MetricsSample | None:
    """The first reading in which no sequence has KV, or the last one within the bound; None without /metrics."""
    deadline = time.monotonic() + RELEASE_BOUND_S
    while True:
        sample = read_metrics(target)
        if sample is None or not sample.holds_kv or time.monotonic() > deadline:
            return sample
        time.sleep(0.05)


def leak_reasons(after: MetricsSample | None) -> list[str]:
    """Tells why a load is invalid whose server kept KV; ``after``: the reading that ``wait_release`` returned."""
    if after is None:
        return []
    kept = (
        (after.owned_pages or 0.0, "KV pages were still owned"),
        (after.swapped_slots, "swap slots were still used"),
    )
    return [f"{count:g} {what} {RELEASE_BOUND_S:g} s after the last request ended" for count, what in kept if count]


def with_default_ends(load: LoadConfig, target: Target) -> LoadConfig:
    """The load, without ignore_eos if it does not declare it and the server ends answers where the model does."""
    if target.ends_answers and "ignore_eos" not in load.model_fields_set:
        return load.model_copy(update={"ignore_eos": False})
    return load


def with_server_defaults(load: LoadConfig, target: Target) -> LoadConfig:
    """Fills in the ends of answers and the cache state that the load leaves open, as the server can."""
    load = with_default_ends(load, target)
    if "cache_state" in load.model_fields_set or target.starts_cold or target.reset_prefix_cache() is not None:
        return load
    way = f" ({target.preset.reset_way})" if target.preset.reset_way else ""
    target.notes += (
        f"the server has no way to empty its prefix cache{way}, and the load declares no state: it is measured as it "
        "is found, as with -o load.cache_state=steady",
    )
    return load.model_copy(update={"cache_state": "steady"})


def prepare_cache(target: Target, load: LoadConfig, requests: Sequence[RequestSpec], *, first: bool) -> list[str]:
    """Waits until the server is idle and puts the cache into the declared state.

    ``steady`` empties nothing: what the server has kept is measured, also that of somebody else's requests. ``first``:
    nothing was measured on this server before. Returns why the state is not known (the load is then invalid); empty
    when it is. Raises MeasurementError when the server refuses or does not answer.
    """
    reasons = []
    wait_idle(target)
    if load.cache_state != "steady" and not (_reset(target) or (first and target.starts_cold)):
        way = f"{target.preset.reset_way}, or " if target.preset.reset_way else ""
        reasons.append(
            f"the state of the prefix cache is not known: the server has no way to empty it, so it cannot be made "
            f"{load.cache_state}; {way}declare -o load.cache_state=steady (the cache is measured as it is found)"
        )
    if load.cache_state == "primed" or (load.cache_state == "steady" and first):
        for prefix in distinct_prefixes(requests):
            answered, failures = complete(target, list(prefix), 1, load.timeout_s)
            if not answered:
                raise failures[-1]
        wait_idle(target)
    return reasons


def _reset(target: Target) -> bool:
    """Empties the cache; returns whether the server has a way to. Raises MeasurementError where it stays as it is."""
    deadline = time.monotonic() + RELEASE_BOUND_S
    while (answer := target.reset_prefix_cache()) is False:
        if time.monotonic() > deadline:
            raise MeasurementError(f"the server refused to reset its prefix cache for {RELEASE_BOUND_S:g} s")
        time.sleep(0.1)
    if answer is None:
        return False
    sample = read_metrics(target)
    if cached := (sample.gauges.get("kv_pages_cached", 0.0) if sample else 0.0):
        raise MeasurementError(f"{cached:g} pages are still cached after the prefix cache was reset")
    return True


@dataclass(frozen=True)
class CacheUse:
    """The use of the prefix cache, the bounds of its hits (None: not known), why it was not in the declared state."""

    counts: CacheCounts
    bounds: CacheBounds | None
    reasons: list[str]


def cache_use(
    server: MeasuredServer,
    requests: Sequence[RequestSpec],
    before: MetricsSample | None,
    after: MetricsSample | None,
    metrics: LoadMetrics,
) -> CacheUse:
    """The hits of a load by every source, held against what is possible. ``before``, ``after``: /metrics around it."""
    load, complete = server.load, metrics.completed == len(requests)
    bounds = hit_bounds(load, requests, server.info, before, after)
    by_metrics, queries = (_change(before, after, f"prefix_cache_{what}_total") for what in ("hits", "queries"))
    by_usage = metrics.total_cached_tokens
    hits = max((count for count in (by_metrics, by_usage) if count is not None), default=None)
    if hits != by_metrics:
        queries = metrics.total_input_tokens
    counts: dict[str, Any] = {"state": load.cache_state, "hits": hits, "queries": queries}
    counts |= {"counted": by_metrics, "told": by_usage}
    if doubt := unverified(hits, bounds, load.cache_state):
        counts["unverified"] = doubt
    # A preempted request looks up again, and so may each sequence of one; a failed one is told nothing.
    equal = complete and not _change(before, after, "num_preemptions_total") and all(r.width == 1 for r in requests)
    if equal and None not in (by_metrics, by_usage) and by_metrics != by_usage:
        counts["disagree"] = True
    stored = CacheBounds(low=bounds.low, high=bounds.high) if bounds else None
    if hits is None or bounds is None:
        return CacheUse(CacheCounts(**counts), stored, [])
    if load.cache_state == "steady":
        own = hit_bounds(load.model_copy(update={"cache_state": "primed"}), requests, server.info, before, after)
        if own is not None and hits > own.high:
            counts["from_before"] = hits - own.high
    reason = outside(hits, bounds, load.cache_state, complete=complete)
    return CacheUse(CacheCounts(**counts), stored, [reason] if reason else [])


def hit_bounds(
    load: LoadConfig,
    requests: Sequence[RequestSpec],
    info: ServerInfo,
    before: MetricsSample | None,
    after: MetricsSample | None,
) -> HitBounds | None:
    """The bounds of what the prefix cache may have served; None when that is not known of this server.

    Another engine does not tell its page size: then pages of one token bound it from above, unless it preempted (its
    own pages may count as hits when a sequence comes back).
    """
    page_size, caching = info.engine.page_size, info.engine.enable_prefix_caching is not False
    if page_size is None and caching and _change(before, after, "num_preemptions_total"):
        return None
    notes = getattr(requests, "notes", {})
    return predict_hits(
        requests,
        cache_state=load.cache_state,
        page_size=int(page_size or 1),
        caching=caching,
        total_pages=_pages_of_tokens(before, info) if before and page_size else None,
        template_tokens=notes.get("template_tokens") if notes.get("exact_texts") else None,
    )


def _pages_of_tokens(sample: MetricsSample, info: ServerInfo) -> float | None:
    """Returns the pages of tokens that a pool holds at least; each takes a page in every group of layers."""
    total = sample.gauges.get("kv_pages_total")
    return None if total is None else total // len(info.capacity.windows or (None,))


def _change(before: MetricsSample | None, after: MetricsSample | None, counter: str) -> float | None:
    if before is None or after is None or counter not in after.counters:
        return None
    return after.counters[counter] - before.counters.get(counter, 0.0)
