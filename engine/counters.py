"""The engine's gauges (the present state) and counters (which only grow)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from kvbench_engine.kv.manager import LEDGER, KVCounters, KVManager, KVStats, MoveKind
from kvbench_engine.scheduling.scheduler import Scheduler
from kvbench_engine.scheduling.step_plan import StepPlan

PHASES = ("schedule", "prepare", "execute", "sample", "output")
"""The parts of a step's time on the engine's thread.

schedule: the clients' commands, and planning the step. prepare: moving KV, and making the step's inputs. execute: the
forward pass. sample: drawing the tokens. output: appending tokens, ending sequences, counting, telling the clients.

On CUDA the device computes while the thread does other things. There, execute is the time to queue the forward pass
plus the wait for the step's tokens, and sample the time to queue the sampler. With asynchronous scheduling the next
step is planned, prepared and queued before the wait, so a short wait means that the host is the bottleneck.
"""

PAGES = ("physical", "logical")
"""physical: pages that sequences own. logical: those that they would own if nothing were shared.

Summed over the steps, 1 - physical / logical is the KV memory that forks and the prefix cache save by sharing (Kwon et
al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP 2023, section 6.3).
"""


@dataclass(frozen=True)
class StepRecord:
    """One step's work, and the state after it."""

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
    """A snapshot. Times in seconds, sizes in bytes, prefix-cache hits and queries in tokens."""

    num_requests_running: int
    num_requests_waiting: int
    num_requests_swapped: int  # waiting requests with KV on the host
    kv: KVStats
    kv_budget_bytes: int
    swap_space_bytes: int
    bytes_per_slot: int
    scale_bytes_per_slot: int  # the part of bytes_per_slot that a quantised KV's scales take
    num_preemptions: int  # sequences put back to waiting: memory ran out, or a more urgent one came
    recomputed_tokens: int  # computed again: preempted sequences, and forks without room beside their parent
    counters: KVCounters
    prompt_tokens: int
    generation_tokens: int
    steps: int
    prefill_tokens_scheduled: int
    decode_tokens_scheduled: int
    replayed_steps: int = 0  # steps that were one launch of a CUDA graph
    forks: int = 0
    kv_sampled_values: int = 0  # fp8 values of K and V that were checked for saturation
    kv_saturated_values: int = 0
    swap_seconds: float = 0.0  # moving pages: copies on write and swaps
    slot_steps: dict[str, int] = field(default_factory=dict)  # LEDGER -> slots, summed over the steps
    page_steps: dict[str, int] = field(default_factory=dict)  # PAGES -> pages, summed over the steps
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


class StepTokens(NamedTuple):
    """Tokens that one step computes; ``recomputed`` ones count in ``prefill`` or ``decode`` as well."""

    step: int  # its number, from 1; a step that only moves KV has the number of the one before
    prefill: int
    decode: int
    recomputed: int


class EngineCounters:
    """Counts a step's work when it is planned, and its slots when its tokens are read."""

    def __init__(self, clock: Callable[[], float]):
        self.counts: Counter[str] = Counter()
        self.finished: Counter[str] = Counter()  # finish reason -> sequences
        self.phases = dict.fromkeys(PHASES, 0.0)
        self._clock = clock
        self._slot_steps = dict.fromkeys(LEDGER, 0)
        self._page_steps = dict.fromkeys(PAGES, 0)
        self._known_hits = 0

    def count(self, plan: StepPlan) -> StepTokens:
        """Count the work of ``plan``; call before it is committed."""
        prefill, decode, recomputed = 0, plan.num_steady, 0
        for seq, num_tokens in plan.scheduled[plan.num_steady :]:
            computed, ever = seq.num_computed, seq.num_ever_computed
            if seq.first_scheduled is None:
                seq.first_scheduled, seq.first_step = self._clock(), self.counts["steps"] + 1
                self.counts["prompt_tokens"] += seq.num_prompt
            length = len(seq.token_ids)
            if length - computed == 1 and length > seq.num_prompt:
                decode += 1
            else:
                prefill += num_tokens
            if ever > computed:
                again = min(computed + num_tokens, ever) - computed
                recomputed += again
                seq.num_recomputed += again
        counts = self.counts
        counts["steps"] += bool(plan.scheduled)
        counts["decode_tokens"] += decode
        counts["prefill_tokens"] += prefill
        counts["recomputed_tokens"] += recomputed
        return StepTokens(counts["steps"], prefill, decode, recomputed)

    def add_memory(self, kv: KVStats) -> None:
        """Add slots and pages at the end of a step, after finished sequences have freed theirs."""
        for state, slots in kv.ledger().items():
            self._slot_steps[state] += slots
        self._page_steps["physical"] += kv.pages_owned
        self._page_steps["logical"] += kv.pages_logical

    def record(
        self, plan: StepPlan, work: StepTokens, kv: KVManager, at_end: KVStats, scheduler: Scheduler
    ) -> StepRecord:
        """The record of one step; ``prefix_hits`` are those since the last record."""
        moved = dict.fromkeys(MoveKind, 0)
        for move in plan.moves:
            moved[move.kind] += move.num_slots
        hits = kv.read_counters().prefix_hits
        new_hits, self._known_hits = hits - self._known_hits, hits
        return StepRecord(
            step=work.step,
            prefill_tokens=work.prefill,
            decode_tokens=work.decode,
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            preempted=len(plan.preempted),
            recomputed_tokens=work.recomputed,
            copied_slots=moved[MoveKind.COPY],
            swapped_out_slots=moved[MoveKind.SWAP_OUT],
            swapped_in_slots=moved[MoveKind.SWAP_IN],
            prefix_hits=new_hits,
            kv=at_end,
        )

    def stats(
        self, kv: KVManager, scheduler: Scheduler, executor_seconds: dict[str, float], **executor_counts: int
    ) -> EngineStats:
        """A snapshot of all counters and gauges; ``executor_counts``: fields of it that the executor counts."""
        phases = {name: self.phases[name] + executor_seconds.get(name, 0.0) for name in PHASES}
        counts, capacity = self.counts, kv.capacity
        return EngineStats(
            num_requests_running=len(scheduler.running),
            num_requests_waiting=scheduler.num_waiting + scheduler.num_parked,
            num_requests_swapped=scheduler.num_swapped,
            kv=kv.stats(),
            kv_budget_bytes=capacity.budget_bytes,
            swap_space_bytes=capacity.swap_space_bytes,
            bytes_per_slot=capacity.bytes_per_slot,
            scale_bytes_per_slot=capacity.scale_bytes_per_slot,
            num_preemptions=scheduler.num_preemptions,
            recomputed_tokens=counts["recomputed_tokens"],
            counters=kv.read_counters(),
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            steps=counts["steps"],
            prefill_tokens_scheduled=counts["prefill_tokens"],
            decode_tokens_scheduled=counts["decode_tokens"],
            **executor_counts,
            forks=counts["forks"],
            swap_seconds=executor_seconds.get("move", 0.0),
            slot_steps=dict(self._slot_steps),
            page_steps=dict(self._page_steps),
            finished=dict(self.finished),
            phase_seconds=phases,
        )
