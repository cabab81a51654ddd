"""Which tokens are computed in the next step. Policy only: no tensor, no clock of its own.

Prefill and decode are the same thing: a sequence catches up with its tokens. A step spends at most
``max_num_batched_tokens``, first on the running sequences in order of arrival, then on admitting waiting ones.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from engine.config import EngineConfig
from engine.kv_manager import KVManager
from engine.sequence import Sequence, Status


@dataclass(frozen=True)
class Scheduled:
    """``num_tokens`` of ``seq`` to compute, from ``seq.num_computed`` on. ``samples``: it then needs a new token."""

    seq: Sequence
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.seq.num_computed + self.num_tokens == self.seq.num_tokens


@dataclass
class StepPlan:
    """One step's work. A sequence stands in it at most once."""

    scheduled: list[Scheduled] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)


class Scheduler:
    """First come, first served, with chunked prefill mixed into decodes and preemption of the newest."""

    def __init__(self, config: EngineConfig, kv: KVManager):
        self.config = config
        self.kv = kv
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission: the last one is the newest
        self.num_preemptions = 0

    def add(self, seq: Sequence) -> None:
        """Queue a request.

        Raises:
            ValueError: it could never run, even alone, so that admitting it would stall everybody behind it.
        """
        limit = self.config.max_model_len
        if not seq.num_prompt:
            raise ValueError("the prompt is empty: send at least one token")
        if seq.num_prompt >= limit:
            raise ValueError(
                f"the prompt has {seq.num_prompt} tokens and max_model_len is {limit}, which leaves no room for an "
                "output token: shorten the prompt or raise max_model_len"
            )
        longest = min(limit, seq.num_prompt + seq.request.params.max_tokens)
        if not self.kv.fits(longest):
            raise ValueError(
                f"prompt and max_tokens come to {longest} tokens and the KV budget holds "
                f"{self.kv.capacity.num_slots}: lower max_tokens, shorten the prompt or raise kv_budget"
            )
        self.waiting.append(seq)

    def schedule(self) -> StepPlan:
        plan = StepPlan()
        budget = self._schedule_running(plan, self.config.max_num_batched_tokens)
        if not plan.preempted:  # memory just ran out: whoever is admitted now would be the next to go
            self._admit_waiting(plan, budget)
        return plan

    def _schedule_running(self, plan: StepPlan, budget: int) -> int:
        index = 0
        while index < len(self.running) and budget > 0:
            seq = self.running[index]
            num_tokens = min(seq.num_uncomputed, budget)
            if not self._make_room(seq, num_tokens, plan):
                break  # seq was the newest and had to go itself
            plan.scheduled.append(Scheduled(seq, num_tokens))
            budget -= num_tokens
            index += 1
        return budget

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        while not self.kv.grow(seq, num_tokens):
            victim = self.running.pop()  # never one that is in this plan: those come before seq
            self._preempt(victim)
            plan.preempted.append(victim)
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan, budget: int) -> None:
        while self.waiting and budget > 0 and len(self.running) < self.config.max_num_seqs:
            seq = self.waiting[0]
            if not self._prompt_may_start(seq, budget) or not self.kv.admit(seq, len(self.running)):
                break
            num_tokens = min(seq.num_uncomputed, budget)
            grown = self.kv.grow(seq, num_tokens)
            assert grown, "admit() promised room for the whole sequence"
            self.waiting.popleft()
            self.running.append(seq)
            seq.status = Status.RUNNING
            plan.scheduled.append(Scheduled(seq, num_tokens))
            budget -= num_tokens

    def _prompt_may_start(self, seq: Sequence, budget: int) -> bool:
        return self.config.enable_chunked_prefill or seq.num_tokens <= budget

    def _preempt(self, seq: Sequence) -> None:
        """Recompute: all KV is given up, the tokens stay, and the sequence is first in line again."""
        self.kv.free(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def finish(self, seq: Sequence) -> None:
        """Take a waiting or running sequence out and give its pages back."""
        if seq.status is Status.RUNNING:
            self.running.remove(seq)
            self.kv.free(seq)
        elif seq.status is not Status.FINISHED:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)
