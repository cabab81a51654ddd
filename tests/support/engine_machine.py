"""The state machine of tests/property/test_engine_machine.py: an engine, its clients, and what must always hold."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict
from functools import lru_cache
from typing import ClassVar
from unittest import mock

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvbench_engine.counters import StepRecord
from kvbench_engine.kv import groups
from kvbench_engine.kv.manager import MoveKind
from kvbench_engine.kv.paged import PagedKVManager
from kvbench_engine.scheduling.scheduler import QueueFull
from kvbench_engine.sequence import PENDING, Request, SamplingParams
from tests.support.engine_parts import (
    CountingExecutor,
    StepFailed,
    expected_outputs,
    least_slots,
    small_config,
    small_engine,
    windowed,
)  # fmt: skip

MAX_MODEL_LEN = 32
VOCAB = 7
EOS = 6


@lru_cache(maxsize=100_000)
def alone(prompt: tuple[int, ...], params: SamplingParams) -> dict[int, tuple]:
    return expected_outputs(Request("x", prompt, params), MAX_MODEL_LEN, CountingExecutor(VOCAB, (EOS,)))


def prompt_of(stem: int, length: int, tail: int) -> tuple[int, ...]:
    """One of three stems, then a tail in base 3: few values, so that prefixes meet all the time."""
    tokens = [(i * i + stem * (i // 5)) % 3 for i in range(length)]
    while tail:
        tail, digit = divmod(tail, 3)
        tokens.append(digit)
    return tuple(tokens)


SIBLINGS = ({"n": 2}, {"n": 3}, {"n": 4}, {"n": 2, "best_of": 3}, {"best_of": 4})
BEAMS = ({"beam_width": 2}, {"beam_width": 3}, {"n": 2, "beam_width": 3},
         {"n": 3, "beam_width": 3, "early_stopping": True})  # fmt: skip
THEMES = {"mixed": ({}, {}, {}, {}, *SIBLINGS, *BEAMS), "plain": ({},), "siblings": SIBLINGS, "beams": BEAMS}
SALTS = (None, None, None, "a", "b")
WINDOWS = ((None,), (None,), (None, 5), (None, 3, 3), (None, 1), (4,), (2, 7), (None, None, 9))


class EngineMachine(RuleBasedStateMachine):
    """One engine and all its clients. ``layout`` is the subclass's; every other setting is drawn."""

    layout = "paged"
    executed = 0  # rules, over all examples of all subclasses
    overlapped = 0  # those of engines whose steps overlap
    events: ClassVar[Counter[str]] = Counter()

    @initialize(
        page_size=st.sampled_from([1, 2, 3, 4, 5, 8]),
        spare=st.sampled_from([0, 0, 1, 4, 8, 16, 40, 64, 64]),
        host_slots=st.sampled_from([0, 0, 1, 1, 4, 16, 40, 200]),
        caching=st.booleans(),
        prefills=st.sampled_from([0, 1, 1, 2, 6]),  # 0: not chunked
        policy=st.sampled_from(["fcfs", "priority"]),
        max_num_seqs=st.sampled_from([2, 3, 3, 4, 4, 6]),
        max_num_waiting=st.sampled_from([None, None, 3]),
        reservation=st.sampled_from(["max", "pow2", "oracle", "oracle"]),
        theme=st.sampled_from(["mixed", "mixed", "plain", "plain", "siblings", "beams"]),
        overlap=st.booleans(),
        reuses_batches=st.booleans(),
        windows=st.sampled_from(WINDOWS),
    )
    def start(
        self, page_size, spare, host_slots, caching, prefills, policy, max_num_seqs, max_num_waiting, reservation,
        theme, overlap, reuses_batches, windows,
    ):  # fmt: skip
        contiguous, self.widths = self.layout == "contiguous", THEMES[theme]
        unit = 1 if contiguous else page_size
        self.executor = CountingExecutor(VOCAB, (EOS,))
        self.ring_unit = mock.patch.object(groups, "RING_UNIT", 1)  # a ring of 64 would be longer than any sequence
        self.ring_unit.start()
        shape = windowed(*windows)
        config = small_config(
            layout=self.layout,
            reservation=reservation if contiguous else "max",
            page_size=page_size,
            enable_prefix_caching=caching and not contiguous,
            enable_chunked_prefill=prefills > 0,
            max_num_partial_prefills=max(1, prefills),
            max_num_batched_tokens=6 if prefills else MAX_MODEL_LEN,
            scheduling_policy=policy,
            max_num_seqs=max_num_seqs,
            max_num_waiting=max_num_waiting,
            preemption_mode="swap" if host_slots else "recompute",
            async_scheduling=overlap,
        )
        slots = least_slots(config, shape) + spare // unit * unit
        host_slots = max(host_slots, unit) if host_slots else None
        self.engine = small_engine(slots, self.executor, shape=shape, host_slots=host_slots, **asdict(config))
        self.engine.scheduler.reuses_batches = reuses_batches
        self.engine.on_step = self._take_record
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], tuple[int, ...]] = {}
        self.ended: dict[tuple[str, int], str] = {}
        self.records: list[StepRecord] = []
        self.failures = 0
        self.known: tuple[float, ...] = ()

    # What clients do.

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(0, 24),
        tail=st.integers(0, 26),
        max_tokens=st.integers(1, 20),
        width=st.integers(0, 11),
        other=st.integers(0, 29),
    )
    def add(self, stem, length, tail, max_tokens, width, other):
        salt, ignore_eos, priority = SALTS[other % 5], other % 2 == 0, other % 3
        prompt = prompt_of(stem, length, tail) or (1,)
        wide = self.widths[width % len(self.widths)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=ignore_eos, **wide)
        self._add(Request(str(len(self.requests)), prompt, params, priority=priority, cache_salt=salt))
        self._check()

    @rule(stem=st.integers(0, 2), length=st.integers(20, 30), n=st.integers(1, 3))
    def add_urgent(self, stem, length, n):
        """Long, wide, and before everybody else."""
        params = SamplingParams(max_tokens=3, temperature=0.0, n=n)
        self._add(Request(str(len(self.requests)), prompt_of(stem, length, 0), params))
        self._check()

    def _add(self, one: Request) -> None:
        limit = self.engine.config.max_num_waiting
        waiting = self.engine.scheduler.num_waiting
        try:
            self.engine.add_request(one)
        except QueueFull:
            assert limit is not None and waiting >= limit
        except ValueError as refused:
            too_wide = one.params.width > self.engine.config.max_num_seqs
            if not too_wide or "side by side" not in str(refused):
                raise
        else:
            # some of them may not have to wait: there was room when they came
            assert limit is None or waiting < limit + self.engine.config.max_num_seqs
            self.requests[one.request_id] = one

    @rule(wide=st.booleans())
    def refuse(self, wide):
        """What can never run is refused, and nothing is left of it."""
        before = self.engine.stats()
        params = SamplingParams(n=7) if wide else SamplingParams()
        with pytest.raises(ValueError, match="side by side" if wide else "leaves no room"):
            self.engine.add_request(Request("never", (1,) * (3 if wide else MAX_MODEL_LEN), params))
        assert self.engine.stats() == before
        self._check()

    @rule(which=st.integers(0, 99), how=st.integers(0, 9), index=st.integers(0, 3))
    def leave(self, which, how, index):
        """A client goes away: with one sequence, with a request, or with several. Mostly with one, or nobody does."""
        one = self._pick(which)
        if one is None or how > 5:
            pass
        elif how < 3:
            self._abort_sibling(one, index)
        else:
            for more in range(1 if how < 5 else 3):
                self._abort(self._pick(which + more), "abort")
        self._check()

    def _abort_sibling(self, one: Request, index: int) -> None:
        """One of n goes; the others go on. Of what is not shown to the client yet, all go."""
        open_before = self._open(one)
        group = self.engine._groups.get(one.request_id)
        shown = group is not None and group.shown
        done = self.engine.abort(one.request_id, "abort", index)
        assert done == (index in open_before if shown else bool(open_before))
        if done:
            self.ended.update({(one.request_id, i): "abort" for i in ([index] if shown else open_before)})

    @rule(do=st.booleans())
    def reset(self, do):
        if do:
            owned = self.engine.stats().kv.pages_owned
            assert self.engine.reset_prefix_cache() == (owned == 0)
            assert owned or self.engine.stats().kv.pages_cached == 0
        self._check()

    # What the engine does.

    @rule()
    def step(self):
        self._step()
        self._check()

    @rule(count=st.integers(2, 10))
    def steps(self, count):
        for _ in range(count):
            self._step()
            self.engine.check_integrity()
        self._check()

    @rule(count=st.integers(2, 20))
    def more_steps(self, count):
        self.steps(count)

    @rule(where=st.sampled_from(["start", "moves", "writes", "read", None, None, None, None]))
    @precondition(lambda self: self.engine.has_work())
    def fail(self, where):
        """The executor raises, and the requests that it may have damaged are aborted, as the server does."""
        if where is None:
            return self.step()
        self.executor.fail_at = where
        try:
            self._step()
        except StepFailed:
            self.failures += 1
            for request_id in self.engine.fail_step():
                self._abort(self.requests[request_id], "error")
        finally:
            self.executor.fail_at = None
        self._check()

    # How it is judged.

    def _pick(self, which: int) -> Request | None:
        """Mostly one of the requests in the engine."""
        names = [*self.engine._groups, *list(self.requests)[:1]]
        return self.requests[names[which % len(names)]] if names else None

    def _open(self, one: Request) -> list[int]:
        return [i for i in range(one.params.n) if (one.request_id, i) not in self.ended]

    def _abort(self, one: Request | None, reason: str) -> None:
        if one is not None:
            open_before = self._open(one)
            assert self.engine.abort(one.request_id, reason) == bool(open_before)
            self.ended.update({(one.request_id, i): reason for i in open_before})

    def _step(self) -> None:
        seen: set[tuple[str, int]] = set()
        before = set(self.engine.scheduler.running)
        for output in self.engine.step():
            key = output.request_id, output.index
            assert key not in seen, "two outputs of one sequence in a step"
            assert key not in self.ended, "an output after the end"
            seen.add(key)
            self.tokens[key] = self.tokens.get(key, ()) + output.token_ids
            if output.finish_reason:
                self.ended[key] = output.finish_reason
        plan = self.executor.plans[-1] if self.executor.plans else []
        assert sum(n for _, n in plan) <= self.engine.config.max_num_batched_tokens
        assert len(plan) <= self.engine.config.max_num_seqs
        admitted = any(seq not in before and seq.index == 0 for seq in self.engine.scheduler.running)
        if admitted and isinstance(self.engine.kv, PagedKVManager):
            assert self.engine.kv._promised <= self.engine.kv.pool.num_available, "pages are promised twice"

    def _take_record(self, record: StepRecord) -> None:
        assert sum(record.kv.ledger().values()) == record.kv.slots_total
        self.records.append(record)

    def _check(self) -> None:
        EngineMachine.executed += 1
        EngineMachine.overlapped += self.engine.pipelined
        self.engine.check_integrity()
        stats = self.engine.stats()
        kv, ledger = stats.kv, stats.kv.ledger()
        assert sum(ledger.values()) == kv.slots_total and min(ledger.values()) >= 0, ledger
        assert kv.slots_pinned == 0, "pinned between two steps"
        assert kv.slots_shared >= 0
        assert stats.num_requests_running <= self.engine.config.max_num_seqs
        if isinstance(self.engine.kv, PagedKVManager):
            if self.engine.kv.prefix_cache is not None:
                size = 8 * self.engine.kv.page_size
                cached = self.engine.kv.prefix_cache._node_at
                assert not any(PENDING in array("q", tokens[-size:]) for _, tokens in cached), "cached, and not known"
            assert kv.pages_free + kv.pages_owned + kv.pages_cached + kv.pages_pinned == kv.pages_total
            if self.engine.kv.swap is not None:
                host = self.engine.kv.swap.pool
                assert host.num_available + host.num_owned + host.num_pinned == host.num_pages
                assert not host.num_pinned
        counters = (
            *vars(stats.counters).values(), *stats.slot_steps.values(), stats.steps, stats.prompt_tokens,
            stats.generation_tokens, stats.prefill_tokens_scheduled, stats.decode_tokens_scheduled,
            stats.recomputed_tokens, stats.num_preemptions, stats.forks, sum(stats.finished.values()),
        )  # fmt: skip
        assert all(new >= old for new, old in zip(counters, self.known or counters, strict=True)), "a counter fell"
        self.known = counters

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        try:
            self._finish()
        finally:
            self.ring_unit.stop()

    def _finish(self) -> None:
        for _ in range(self._patience()):
            if not self.engine.has_work():
                break
            self._step()
        assert not self.engine.has_work(), "livelock"
        self._check()
        self._check_outputs()
        self._check_idle()

    def _patience(self) -> int:
        """Steps that suffice even if each sequence runs alone and computes everything again for each token."""
        live = [self.requests[name].params for name in self.engine._groups]
        tokens = sum(params.width * (params.max_tokens + 1) for params in live)
        tokens *= 1 + self.engine.pipelined  # a step that decides who goes on is launched in one turn, read in the next
        return 20 + 2 * tokens * -(-MAX_MODEL_LEN // self.engine.config.max_num_batched_tokens)

    def _check_outputs(self) -> None:
        for name, one in self.requests.items():
            assert not self._open(one), f"{name} has no end"
            for index, (tokens, reason) in alone(one.prompt_token_ids, one.params).items():
                got = self.tokens.get((name, index), ())
                if self.ended[name, index] in ("abort", "error"):
                    assert got == tokens[: len(got)]
                else:
                    assert (got, self.ended[name, index]) == (tokens, reason), f"{name}/{index} differs"

    def _check_idle(self) -> None:
        engine, stats = self.engine, self.engine.stats()
        assert (stats.kv.pages_owned, stats.kv.slots_used, stats.kv.slots_shared) == (0, 0, 0)
        assert (stats.kv.host_slots_used, stats.num_requests_swapped) == (0, 0)
        assert sum(stats.finished.values()) == len(self.ended) == sum(r.params.n for r in self.requests.values())
        assert all(stats.finished[reason] == list(self.ended.values()).count(reason) for reason in stats.finished)
        assert engine.reset_prefix_cache()
        assert engine.stats().kv.slots_free == stats.kv.slots_total
        assert sum(stats.slot_steps.values()) == len(self.records) * stats.kv.slots_total
        assert stats.counters.allocated_pages == stats.counters.freed_pages
        assert not engine._groups and not engine.scheduler._promised_rows
        self._check_work(stats)
        if isinstance(engine.kv, PagedKVManager):
            assert not engine.kv._moves
            assert engine.kv.prefix_cache is None or not engine.kv.prefix_cache._node_at, "the prefix cache leaks nodes"

    def _check_work(self, stats) -> None:
        """What was counted is what the executor was given."""
        counters, done = stats.counters, self.executor
        if not self.failures:
            assert stats.steps == len([plan for plan in done.plans if plan])
            assert stats.steps == sum(record.prefill_tokens + record.decode_tokens > 0 for record in self.records)
            computed = sum(n for plan in done.plans for _, n in plan)
            assert sum(record.prefill_tokens + record.decode_tokens for record in self.records) == computed
            assert stats.prefill_tokens_scheduled + stats.decode_tokens_scheduled == computed
            moved = [counters.swapped_out_slots, counters.swapped_in_slots]
            assert moved == [done.moved[MoveKind.SWAP_OUT], done.moved[MoveKind.SWAP_IN]]
            assert counters.copied_slots == done.moved[MoveKind.COPY] + sum(
                move.num_slots for move in self.engine.kv._moves
            )
            in_vain = done.num_drawn - stats.generation_tokens
            assert in_vain >= 0 if self.engine.pipelined else in_vain == 0
            EngineMachine.events["drawn in vain"] += in_vain
        EngineMachine.events.update({f"pending {what}": count for what, count in done.pending.items()})
        names = ("prefix_hits", "prefix_evictions", "copied_pages", "swapped_in_slots", "swap_lost_slots")
        EngineMachine.events.update({name: getattr(counters, name) for name in (*names, "refused_fragmented")})
        EngineMachine.events.update(stats.finished)
        EngineMachine.events.update(
            preemptions=stats.num_preemptions,
            recomputed=stats.recomputed_tokens,
            forks=stats.forks,
            failures=self.failures,
            repeated=self.executor.num_repeated,
        )


class ContiguousMachine(EngineMachine):
    layout = "contiguous"
