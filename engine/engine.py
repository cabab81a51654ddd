"""The engine: schedule, execute, grow, finish. Single-threaded; ``async_engine`` gives it a thread."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from engine.config import EngineConfig
from engine.groups import BeamGroup, Group
from engine.kv_budget import KVCapacity
from engine.kv_manager import KVManager
from engine.kv_moves import MoveKind
from engine.model_spec import ModelInfo
from engine.scheduler import Scheduled, Scheduler, StepPlan
from engine.sequence import Drawn, Request, Sequence, TokenOutput
from engine.stats import LEDGER, PHASES, EngineStats, KVStats, StepRecord


class Executor(Protocol):
    """Arithmetic without policy."""

    model_info: ModelInfo
    phase_seconds: dict[str, float]  # PHASES, and "move": what moving KV took, which "prepare" counts as well

    def execute(self, plan: StepPlan) -> list[Drawn | None]:
        """Do ``plan.moves`` in order, then compute; for each scheduled item that samples, what its sequence needs."""
        ...


class Engine:
    """One model, one KV pool, one queue.

    ``KVBENCH_CHECK=1`` asserts every invariant of scheduler and pool after each step. ``on_step``, when set, is given
    a record of every step.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: Executor,
        kv: KVManager,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.config = config
        self.executor = executor
        self.model_info = executor.model_info
        self.kv = kv
        self.scheduler = Scheduler(config, kv)
        self.on_step: Callable[[StepRecord], None] | None = None
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._plan = StepPlan()
        self._eos = frozenset(self.model_info.eos_token_ids)
        self._check = os.environ.get("KVBENCH_CHECK") == "1"
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._phases = dict.fromkeys(PHASES, 0.0)
        self._slot_steps = dict.fromkeys(LEDGER, 0)
        self._step_counts = (0, 0, 0)  # of the last step: prefill, decode and recomputed tokens
        self._known_hits = 0

    @property
    def capacity(self) -> KVCapacity:
        return self.kv.capacity

    def add_request(self, request: Request) -> Sequence:
        """Queue ``request``; the (first) sequence it became, to read and not to write.

        Raises:
            ValueError: its id is in use, a token id is not the model's, or it could never fit; the text says why.
            QueueFull: a ValueError too; ``max_num_waiting`` requests wait already.
        """
        if request.request_id in self._groups:
            raise ValueError(f"request id {request.request_id!r} is in use: give each request an id of its own")
        vocab = self.model_info.vocab_size
        if request.prompt_token_ids:
            low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
            if low < 0 or high >= vocab:
                bad = low if low < 0 else high
                raise ValueError(f"token id {bad} is not in the vocabulary: ids run from 0 to {vocab - 1}")
        seq = Sequence.of(request)
        group = self._group_of(request, seq)
        self.scheduler.add(seq)
        self._groups[request.request_id] = group
        return seq

    def _group_of(self, request: Request, seq: Sequence) -> Group:
        params = request.params
        if params.beam_width is None:
            return Group(request, seq)
        longest = max(1, min(params.max_tokens, self.config.max_model_len - seq.num_prompt))
        group = BeamGroup(request, seq, longest, self._eos)
        going_on = self.model_info.vocab_size - len(group.search.eos_token_ids)
        if params.beam_width > going_on:  # the search might end with fewer results than n
            raise ValueError(
                f"beam_width {params.beam_width} is more than the {going_on} tokens of the vocabulary that end no "
                "beam: lower beam_width"
            )
        return group

    def abort(self, request_id: str, reason: str = "abort", index: int | None = None) -> bool:
        """Take a request out and its pages back; False if it is not here (it may just have finished).

        ``index``: only this one of its sequences, once they are shown to the client each by itself.
        """
        group = self._groups.get(request_id)
        if group is None:
            return False
        if index is None or not group.shown:
            gone, ended = list(group.live.values()), group.remaining
        elif index in group.live:
            gone, ended = [group.live[index]], 1
        else:
            return False
        for seq in gone:
            self.scheduler.finish(seq)
            del group.live[seq.index]
        group.remaining -= ended
        self._finished[reason] += ended
        if not group.live:
            del self._groups[request_id]
        return True

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenOutput]:
        """One iteration: the tokens it brought, at most one output a sequence."""
        started = time.perf_counter()
        self._plan = plan = self.scheduler.schedule()
        self._count(plan)
        self._phases["schedule"] += time.perf_counter() - started
        drawn = self.executor.execute(plan) if plan.scheduled or plan.moves else []
        started = time.perf_counter()
        outputs: list[TokenOutput] = []
        for item, brought in zip(plan.scheduled, drawn, strict=True):
            self._advance(item, brought, outputs)
        self._keep_accounts(plan)
        self.kv.settle()  # after the accounts, which show what the step had pinned
        self._phases["output"] += time.perf_counter() - started
        if self._check:
            self.check_integrity()
        return outputs

    def fail_step(self) -> list[str]:
        """After ``step`` raised: ids of the requests whose KV may be damaged. The caller aborts them."""
        self.kv.settle()
        self.kv.distrust_copies()
        touched = [item.seq for item in self._plan.scheduled] + self._plan.preempted + self.scheduler.running
        return [i for i in dict.fromkeys(seq.request_id for seq in touched) if i in self._groups]

    def _count(self, plan: StepPlan) -> None:
        prefill = decode = recomputed = 0
        for seq, num_tokens in plan.scheduled:
            computed, ever = seq.num_computed, seq.num_ever_computed
            end = computed + num_tokens
            if seq.first_scheduled is None:
                seq.first_scheduled = self._clock()
                self._counts["prompt_tokens"] += seq.num_prompt
            length = len(seq.token_ids)
            if length - computed == 1 and length > seq.num_prompt:
                decode += 1
            else:
                prefill += num_tokens
            if ever > computed:
                recomputed += min(end, ever) - computed
            if end > ever:
                seq.num_ever_computed = end
        self._step_counts = prefill, decode, recomputed
        counts = self._counts
        counts["steps"] += bool(plan.scheduled)
        counts["decode_tokens"] += decode
        counts["prefill_tokens"] += prefill
        counts["recomputed_tokens"] += recomputed

    def _advance(self, item: Scheduled, drawn: Drawn | None, outputs: list[TokenOutput]) -> None:
        seq = item.seq
        self.kv.commit(seq, item.num_tokens)
        if drawn is None:
            return
        if seq.first_token is None:
            seq.first_token = self._clock()
        if seq.num_candidates:
            self._advance_beam(seq, drawn, outputs)
            return
        if seq.pending_forks:
            family = self._groups[seq.request_id].fork(seq, self.scheduler)
            self._counts["forks"] += len(family) - 1
        else:
            family = (seq,)
        for i, member in enumerate(family):
            if drawn.logprobs:
                member.logprob += drawn.logprobs[i]
            self._append(member, drawn.token_ids[i], outputs)

    def _append(self, seq: Sequence, token: int, outputs: list[TokenOutput]) -> None:
        seq.token_ids.append(token)
        self._counts["generation_tokens"] += 1
        reason = seq.finish_reason(self._eos, self.config.max_model_len)
        if reason is None:
            if not seq.silent:
                outputs.append(TokenOutput(seq.request_id, (token,), None, seq.num_cached, index=seq.index))
            return
        self.scheduler.finish(seq)
        group = self._groups[seq.request_id]
        output = TokenOutput(seq.request_id, (token,), reason, seq.num_cached, index=seq.index)
        self._return(group, group.ended(seq, output), outputs)

    def _advance_beam(self, seq: Sequence, drawn: Drawn, outputs: list[TokenOutput]) -> None:
        group = self._groups[seq.request_id]
        assert isinstance(group, BeamGroup)
        known = group.num_forks
        self._return(group, group.take(seq, drawn, self.scheduler), outputs)
        self._counts["forks"] += group.num_forks - known
        self._counts["generation_tokens"] += 1

    def _return(self, group: Group, ended: list[TokenOutput], outputs: list[TokenOutput]) -> None:
        for output in ended:
            self._finished[output.finish_reason] += 1
        outputs.extend(ended)
        if not group.live:
            del self._groups[group.request.request_id]

    def _keep_accounts(self, plan: StepPlan) -> None:
        """What the step left: sequences that it ended hold nothing any more."""
        kv = self.kv.stats()
        for place, slots in kv.ledger().items():
            self._slot_steps[place] += slots
        if self.on_step is not None:
            self.on_step(self._record(plan, kv))

    def _record(self, plan: StepPlan, kv: KVStats) -> StepRecord:
        moved = dict.fromkeys(MoveKind, 0)
        for move in plan.moves:
            moved[move.kind] += move.num_slots
        prefill, decode, recomputed = self._step_counts
        hits = self.kv.read_counters().prefix_hits
        new_hits, self._known_hits = hits - self._known_hits, hits
        return StepRecord(
            step=self._counts["steps"],
            prefill_tokens=prefill,
            decode_tokens=decode,
            running=len(self.scheduler.running),
            waiting=self.scheduler.num_waiting,
            preempted=len(plan.preempted),
            recomputed_tokens=recomputed,
            copied_slots=moved[MoveKind.COPY],
            swapped_out_slots=moved[MoveKind.SWAP_OUT],
            swapped_in_slots=moved[MoveKind.SWAP_IN],
            prefix_hits=new_hits,
            kv=kv,
        )

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while a sequence owns pages."""
        return self.kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert every invariant of scheduler, groups and KV memory."""
        live = [seq for group in self._groups.values() for seq in group.live.values()]
        self.scheduler.check_integrity(live)
        self.kv.check_integrity(live)
        assert all(group.live and group.remaining > 0 for group in self._groups.values())

    def stats(self) -> EngineStats:
        """One reading, to keep: nothing in it changes later."""
        phases = {name: self._phases[name] + self.executor.phase_seconds.get(name, 0.0) for name in PHASES}
        counts = self._counts
        return EngineStats(
            num_requests_running=len(self.scheduler.running),
            num_requests_waiting=self.scheduler.num_waiting + self.scheduler.num_parked,
            num_requests_swapped=self.scheduler.num_swapped,
            kv=self.kv.stats(),
            kv_budget_bytes=self.capacity.budget_bytes,
            swap_space_bytes=self.capacity.swap_space_bytes,
            bytes_per_slot=self.capacity.bytes_per_slot,
            scale_bytes_per_slot=self.capacity.scale_bytes_per_slot,
            num_preemptions=self.scheduler.num_preemptions,
            recomputed_tokens=counts["recomputed_tokens"],
            counters=self.kv.read_counters(),
            prompt_tokens=counts["prompt_tokens"],
            generation_tokens=counts["generation_tokens"],
            steps=counts["steps"],
            prefill_tokens_scheduled=counts["prefill_tokens"],
            decode_tokens_scheduled=counts["decode_tokens"],
            forks=counts["forks"],
            swap_seconds=self.executor.phase_seconds.get("move", 0.0),
            slot_steps=dict(self._slot_steps),
            finished=dict(self._finished),
            phase_seconds=phases,
        )
