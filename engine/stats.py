"""What the engine counts. Gauges describe this moment; counters only grow."""

from __future__ import annotations

from dataclasses import dataclass, field

PHASES = ("schedule", "prepare", "execute", "sample", "output")
"""Where the time of the engine's thread goes. schedule: planning the step. prepare: moving KV, and making the step's
inputs. execute: the forward pass. sample: drawing the tokens. output: the sequences grow and end, and the accounts.

On CUDA the device computes while the thread does other things. There execute is the time to queue the forward pass
plus what the thread then waits for the step's tokens, and sample the time to queue the sampler; with asynchronous
scheduling the next step is planned, prepared and queued before the wait, so a short wait means that the host, and not
the device, is what the engine waits for."""

LEDGER = ("tokens", "waste", "cached", "pinned", "free", "fragmented")
"""Where the KV slots are, all of them, each once: holding a token of a sequence; reserved and empty (internal waste);
kept for the prefix cache; owned by nobody and read by a copy of this step; free; and free, enough for the reservation
that is waited for, but not in one piece (external fragmentation, contiguous only)."""


@dataclass(frozen=True)
class KVStats:
    """Where the KV memory is. For the contiguous layout one "page" is one reservation."""

    pages_total: int  # contiguous: reservations of max_model_len that the slab would hold
    pages_free: int  # never written or no longer wanted, cached pages not among them
    pages_owned: int  # named by at least one sequence
    pages_cached: int  # owned by nobody, kept for the prefix cache, evictable
    pages_pinned: int  # owned by nobody, kept until a copy from them is done: none between two steps
    slots_total: int
    slots_reserved: int  # slots of owned pages
    slots_used: int  # of those, slots that hold a token's KV (a shared page counts once)
    slots_shared: int  # slots that sharing saves: tokens of all sequences, less slots_used
    slots_cached: int
    slots_pinned: int
    slots_fragmented: int  # free, but too scattered for whom is waiting; paged: none, any page will do
    page_table_bytes: int
    host_slots_total: int = 0  # swap space, in slots
    host_slots_used: int = 0  # of those, slots that swapped-out sequences hold

    @property
    def slots_free(self) -> int:
        """Free slots, scattered ones among them."""
        return self.slots_total - self.slots_reserved - self.slots_cached - self.slots_pinned

    def ledger(self) -> dict[str, int]:
        """Slots by place; the keys are ``LEDGER`` and the values add up to ``slots_total``."""
        return {
            "tokens": self.slots_used,
            "waste": self.slots_reserved - self.slots_used,
            "cached": self.slots_cached,
            "pinned": self.slots_pinned,
            "free": self.slots_free - self.slots_fragmented,
            "fragmented": self.slots_fragmented,
        }


@dataclass
class KVCounters:
    """What a KV manager has done so far."""

    prefix_hits: int = 0  # tokens
    prefix_queries: int = 0  # tokens
    prefix_evictions: int = 0  # pages
    hash_seconds: float = 0.0
    allocated_pages: int = 0  # that came to be owned, new ones and ones found in the prefix cache
    freed_pages: int = 0  # that nobody owns any more; allocated less freed are the owned ones
    copied_pages: int = 0  # copy-on-write; contiguous: forks copied whole
    copied_slots: int = 0  # filled ones; with them the rest of their pages is moved too, as it is in swaps
    swapped_out_slots: int = 0
    swapped_in_slots: int = 0
    swap_lost_slots: int = 0  # had no place on the host, or lost it: computed again
    refused_fragmented: int = 0  # contiguous: sequences that had to wait although enough slots were free


@dataclass(frozen=True)
class StepRecord:
    """One step: what it did and what it left."""

    step: int
    prefill_tokens: int
    decode_tokens: int
    running: int
    waiting: int
    preempted: int
    recomputed_tokens: int
    copied_slots: int
    swapped_out_slots: int
    swapped_in_slots: int
    prefix_hits: int
    kv: KVStats


@dataclass(frozen=True)
class EngineStats:
    """One reading. Times in seconds, sizes in bytes, prefix-cache hits and queries in tokens."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int  # of the waiting ones, those with KV on the host
    kv: KVStats
    kv_budget_bytes: int
    swap_space_bytes: int
    bytes_per_slot: int
    scale_bytes_per_slot: int  # of bytes_per_slot, scales of a quantised KV
    num_preemptions: int  # sequences put back to waiting, for want of memory or for a more urgent one
    recomputed_tokens: int  # computed before: preempted sequences, and forks that found no room beside their parent
    counters: KVCounters
    prompt_tokens: int
    generation_tokens: int
    steps: int
    prefill_tokens_scheduled: int
    decode_tokens_scheduled: int
    forks: int = 0
    swap_seconds: float = 0.0  # moving pages: copies on write and swaps
    slot_steps: dict[str, int] = field(default_factory=dict)  # LEDGER -> slots, summed over the steps
    finished: dict[str, int] = field(default_factory=dict)  # finish_reason -> sequences
    phase_seconds: dict[str, float] = field(default_factory=dict)  # phase -> seconds, keys PHASES

    @property
    def kv_cache_usage_perc(self) -> float:
        """Owned share of the slots, 0..1 (vLLM's name)."""
        return self.kv.slots_reserved / self.kv.slots_total if self.kv.slots_total else 0.0

    @property
    def kv_waste_slots(self) -> int:
        return self.kv.slots_reserved - self.kv.slots_used

    @property
    def prefix_cache_hits(self) -> int:
        return self.counters.prefix_hits

    @property
    def prefix_cache_queries(self) -> int:
        return self.counters.prefix_queries
