"""The engine: schedule, execute, grow, finish. Single-threaded; ``async_engine`` gives it a thread."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from engine.config import EngineConfig
from engine.kv_budget import KVCapacity
from engine.kv_manager import KVManager
from engine.model_spec import ModelInfo
from engine.scheduler import Scheduled, Scheduler, StepPlan
from engine.sequence import Request, Sequence, TokenOutput
from engine.stats import PHASES, EngineStats


class Executor(Protocol):
    """Arithmetic without policy. ``execute`` returns the new token of each scheduled sequence that samples."""

    model_info: ModelInfo
    phase_seconds: dict[str, float]

    def execute(self, plan: StepPlan) -> list[int | None]: ...


class Engine:
    """One model, one KV pool, one queue.

    ``KVBENCH_CHECK=1`` asserts every invariant of scheduler and pool after each step.
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
        self._clock = clock
        self._sequences: dict[str, Sequence] = {}
        self._eos = frozenset(self.model_info.eos_token_ids)
        self._check = os.environ.get("KVBENCH_CHECK") == "1"
        self._counts: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._phases = dict.fromkeys(PHASES, 0.0)

    @property
    def capacity(self) -> KVCapacity:
        return self.kv.capacity

    def add_request(self, request: Request) -> Sequence:
        """Queue ``request``; the sequence it became, to read and not to write.

        Raises:
            ValueError: its id is in use, a token id is not the model's, or it could never fit; the text says why.
        """
        if request.request_id in self._sequences:
            raise ValueError(f"request id {request.request_id!r} is in use: give each request an id of its own")
        vocab = self.model_info.vocab_size
        if request.prompt_token_ids:
            low, high = min(request.prompt_token_ids), max(request.prompt_token_ids)
            if low < 0 or high >= vocab:
                bad = low if low < 0 else high
                raise ValueError(f"token id {bad} is not in the vocabulary: ids run from 0 to {vocab - 1}")
        seq = Sequence.of(request)
        self.scheduler.add(seq)
        self._sequences[request.request_id] = seq
        return seq

    def abort(self, request_id: str, reason: str = "abort") -> bool:
        """Take a request out and its pages back; False if it is not here (it may just have finished)."""
        seq = self._sequences.pop(request_id, None)
        if seq is None:
            return False
        self.scheduler.finish(seq)
        self._finished[reason] += 1
        return True

    def has_work(self) -> bool:
        return self.scheduler.has_work

    def step(self) -> list[TokenOutput]:
        """One iteration: the tokens it brought, at most one output a request."""
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        self._count(plan)
        self._phases["schedule"] += time.perf_counter() - started
        tokens = self.executor.execute(plan) if plan.scheduled else []
        started = time.perf_counter()
        outputs = [
            output
            for item, token in zip(plan.scheduled, tokens, strict=True)
            if (output := self._advance(item, token)) is not None
        ]
        self._phases["output"] += time.perf_counter() - started
        if self._check:
            self.check_integrity()
        return outputs

    def _count(self, plan: StepPlan) -> None:
        self._counts["steps"] += bool(plan.scheduled)
        for item in plan.scheduled:
            seq, end = item.seq, item.seq.num_computed + item.num_tokens
            if seq.first_scheduled is None:
                seq.first_scheduled = self._clock()
                self._counts["prompt_tokens"] += seq.num_prompt
            decode = seq.num_output > 0 and seq.num_uncomputed == 1
            self._counts["decode_tokens" if decode else "prefill_tokens"] += item.num_tokens
            self._counts["recomputed_tokens"] += max(0, min(end, seq.num_ever_computed) - seq.num_computed)
            seq.num_ever_computed = max(seq.num_ever_computed, end)

    def _advance(self, item: Scheduled, token: int | None) -> TokenOutput | None:
        seq = item.seq
        self.kv.commit(seq, item.num_tokens)
        if token is None:
            return None
        seq.token_ids.append(token)
        if seq.first_token is None:
            seq.first_token = self._clock()
        self._counts["generation_tokens"] += 1
        reason = seq.finish_reason(self._eos, self.config.max_model_len)
        if reason is not None:
            self.scheduler.finish(seq)
            del self._sequences[seq.request_id]
            self._finished[reason] += 1
        return TokenOutput(seq.request_id, (token,), reason, seq.num_cached)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False, and nothing done, while a sequence owns pages."""
        return self.kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        assert len(running) + len(waiting) == len(self._sequences)
        assert all(seq.row < 0 and not seq.pages for seq in waiting), "a waiting sequence owns pages"
        self.kv.check_integrity(running)

    def stats(self) -> EngineStats:
        hits, queries, hash_seconds = self.kv.prefix_counters()
        phases = {name: self._phases[name] + self.executor.phase_seconds.get(name, 0.0) for name in PHASES}
        return EngineStats(
            num_requests_running=len(self.scheduler.running),
            num_requests_waiting=len(self.scheduler.waiting),
            kv=self.kv.stats(),
            kv_budget_bytes=self.capacity.budget_bytes,
            bytes_per_slot=self.capacity.bytes_per_slot,
            num_preemptions=self.scheduler.num_preemptions,
            recomputed_tokens=self._counts["recomputed_tokens"],
            prefix_cache_hits=hits,
            prefix_cache_queries=queries,
            prompt_tokens=self._counts["prompt_tokens"],
            generation_tokens=self._counts["generation_tokens"],
            steps=self._counts["steps"],
            prefill_tokens_scheduled=self._counts["prefill_tokens"],
            decode_tokens_scheduled=self._counts["decode_tokens"],
            copied_pages=0,
            hash_seconds=hash_seconds,
            finished=dict(self._finished),
            phase_seconds=phases,
        )
