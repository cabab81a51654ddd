"""What the engine counts. Gauges describe this moment; counters only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("schedule", "prepare", "execute", "sample", "output")


@dataclass(frozen=True)
class KVStats:
    """Where the KV memory is. For the contiguous layout one "page" is one reservation."""

    pages_total: int
    pages_free: int  # never written or no longer wanted, cached pages not among them
    pages_owned: int  # named by at least one sequence
    pages_cached: int  # owned by nobody, kept for the prefix cache, evictable
    slots_total: int
    slots_reserved: int  # slots of owned pages
    slots_used: int  # of those, slots that hold a token's KV (a shared page counts once)
    page_table_bytes: int


@dataclass(frozen=True)
class EngineStats:
    """One reading. Times in seconds, sizes in bytes, prefix-cache hits and queries in tokens."""

    num_requests_running: int
    num_requests_waiting: int
    kv: KVStats
    kv_budget_bytes: int
    bytes_per_slot: int
    num_preemptions: int
    recomputed_tokens: int
    prefix_cache_hits: int
    prefix_cache_queries: int
    prompt_tokens: int
    generation_tokens: int
    steps: int
    prefill_tokens_scheduled: int
    decode_tokens_scheduled: int
    copied_pages: int
    hash_seconds: float
    finished: dict[str, int] = field(default_factory=dict)  # finish_reason -> requests
    phase_seconds: dict[str, float] = field(default_factory=dict)  # phase -> seconds, keys PHASES

    @property
    def kv_cache_usage_perc(self) -> float:
        """Owned share of the pool, 0..1 (vLLM's name)."""
        return self.kv.pages_owned / self.kv.pages_total if self.kv.pages_total else 0.0

    @property
    def kv_waste_slots(self) -> int:
        return self.kv.slots_reserved - self.kv.slots_used
