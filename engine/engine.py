"""The engine: schedule, launch, read, grow, finish. Single-threaded; ``async_engine`` gives it a thread.

With ``async_scheduling`` the steps overlap:

    host      plan N+1 | launch N+1 | read N .......... | plan N+2 | launch N+2 | read N+1 ...
    device    ... step N ........................... | step N+1 ............................ | step N+2

When step N+1 is planned, the tokens of step N are not known yet: each is ``PENDING`` in its sequence, which is
scheduled like any other, and the executor fills in the id on the device. A sequence that turns out to have ended when
step N is read is dropped from step N+1. Its pages may be given to another sequence at once: the device does the steps
in order, so the new owner writes later. Forks and beams depend on the tokens themselves, so a step that draws such
tokens is read before the next one is planned.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import EngineCounters, EngineStats, StepRecord, StepTokens
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import KVManager
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.scheduling.groups import BeamGroup, Group
from kvbench_engine.scheduling.scheduler import Scheduler
from kvbench_engine.scheduling.step_plan import Draw, StepHandle, StepPlan
from kvbench_engine.sequence import PENDING, Drawn, Request, Sequence, Status, TokenOutput


class Executor(Protocol):
    """Computes steps; decides nothing."""

    model_info: ModelInfo
    phase_seconds: dict[str, float]  # PHASES, and "move": what moving KV took, which "prepare" counts as well

    def launch(self, plan: StepPlan) -> StepHandle:
        """Do ``plan.moves`` in order, compute the scheduled tokens, and draw for each item that samples.

        May return before any of it is done; all of it is done before the next launch. A ``PENDING`` token was drawn by
        the previous launch, for the same sequence.
        """
        ...


@dataclass(slots=True)
class StepOutputs:
    """The tokens that a step brought.

    ``tokens[i]``: the next token of ``sequences[i]``, which goes on. ``others``: the last outputs of sequences, and all
    of a request that returns only the best ones.
    """

    sequences: list[Sequence] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    others: list[TokenOutput] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.tokens or self.others)

    def all(self) -> list[TokenOutput]:
        """Make every output, those of sequences that go on first."""
        going_on = [
            TokenOutput(seq.request.request_id, (token,), None, seq.num_cached, None, seq.index)
            for seq, token in zip(self.sequences, self.tokens, strict=True)
        ]
        return going_on + self.others


@dataclass(slots=True)
class _Step:
    """A step from its planning until its tokens are read."""

    plan: StepPlan
    work: StepTokens
    handle: StepHandle | None = None  # None: not launched, or nothing to do
    decides: bool = False  # forks or beams depend on its tokens: read them before planning the next step


class Engine:
    """One model, one KV pool, one queue.

    ``KVBENCH_CHECK=1`` asserts every invariant of scheduler and pool after each step. ``on_step``, when set, is given
    a record of every step, once its tokens are read.
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
        self.pipelined = bool(config.async_scheduling)
        self._caches_prefixes = config.enable_prefix_caching
        self.on_step: Callable[[StepRecord], None] | None = None
        self._clock = clock
        self._groups: dict[str, Group] = {}
        self._in_flight: deque[_Step] = deque()  # at most one between two steps, none if not pipelined
        self._step_read = 0  # number of the step whose tokens were read last
        self._eos = frozenset(self.model_info.eos_token_ids)
        self._check = os.environ.get("KVBENCH_CHECK") == "1"
        self._counters = EngineCounters(clock)

    @property
    def capacity(self) -> KVCapacity:
        return self.kv.capacity

    def add_request(self, request: Request) -> Sequence:
        """Queue ``request`` and return its (first) sequence, to read and not to write.

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
        """End a request and free its pages; False if it is not in the engine (it may just have finished).

        ``index``: end only this sequence, if each sequence's tokens are returned as they come.
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
        self._counters.finished[reason] += ended
        if not group.live:
            del self._groups[request_id]
        return True

    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> list[TokenOutput]:
        """Advance by one step; its outputs, at most one a sequence."""
        return self.advance().all()

    def advance(self) -> StepOutputs:
        """One iteration: the tokens of one step, at most one output a sequence.

        If pipelined, it launches a step and returns the tokens of the previous one; it only reads if there is nothing
        to launch or the step in flight must be read first.
        """
        in_flight = self._in_flight
        launched = not (in_flight and in_flight[-1].decides) and self._launch()
        unread = 1 if launched and self.pipelined else 0
        outputs = self._read(in_flight[0]) if len(in_flight) > unread else StepOutputs()
        self.kv.moves_done()  # after the counters, which include the pinned pages
        if self._check:
            self.check_integrity()
        return outputs

    def fail_step(self) -> list[str]:
        """Return the ids of requests whose KV a step that raised may have damaged. The caller aborts them.

        All steps in flight count as failed.
        """
        self.scheduler.dissolve()  # its calendar counts steps that were not committed
        self.kv.moves_done()
        self.kv.forget_unfinished(clear_cache=any(step.handle is not None for step in self._in_flight))
        touched = list(self.scheduler.running)
        for step in self._in_flight:
            touched += [item.seq for item in step.plan.scheduled] + step.plan.preempted
        self._in_flight.clear()
        ids = dict.fromkeys(seq.request_id for seq in touched if seq.status is not Status.FINISHED)
        return [i for i in ids if i in self._groups]

    def _launch(self) -> bool:
        """Plan and launch a step; False if there is nothing to do."""
        started = self._clock()
        plan = self.scheduler.schedule()
        planned = bool(plan.scheduled or plan.moves or plan.preempted)
        if planned:
            self._in_flight.append(_Step(plan, self._counters.count(plan)))
        self._counters.phases["schedule"] += self._clock() - started
        if plan.scheduled or plan.moves:
            self._in_flight[-1].handle = self.executor.launch(plan)
            started = self._clock()
            self._commit(self._in_flight[-1])
            self._counters.phases["output"] += self._clock() - started
        return planned

    def _commit(self, step: _Step) -> None:
        """Count the step's tokens as computed: their KV exists for everything that is launched later."""
        commit, scheduled, steady = self.kv.commit, step.plan.scheduled, step.plan.num_steady
        if not self.pipelined:
            for seq, num_tokens in scheduled:
                commit(seq, num_tokens)
            return
        if len(self._in_flight) == 1:  # all tokens are known: a page that is full now can be found
            steady = 0
        for seq, _ in islice(scheduled, steady):
            seq.num_computed += 1
            seq.token_ids.append(PENDING)
            seq.num_pending += 1
        self.kv.commit_decodes(steady)
        for seq, num_tokens in islice(scheduled, steady, None):
            commit(seq, num_tokens)
            if seq.num_computed == len(seq.token_ids):  # a token is being drawn
                if seq.num_candidates or seq.pending_forks:
                    step.decides = True
                else:
                    seq.expect_token()

    def _read(self, step: _Step) -> StepOutputs:
        """Wait for the tokens of the oldest step, append them to their sequences, and count them."""
        drawn = step.handle.tokens() if step.handle is not None else []
        started = self._clock()
        outputs = StepOutputs()
        self._step_read = step.work.step
        generated = self._take_decodes(step, drawn, outputs) + self._take(step, drawn, outputs)
        self._counters.counts["generation_tokens"] += generated
        self._in_flight.popleft()
        kv = self.kv.stats()
        self._counters.add_memory(kv)
        if self.on_step is not None:
            self.on_step(self._counters.record(step.plan, step.work, self.kv, kv, self.scheduler))
        self._counters.phases["output"] += self._clock() - started
        return outputs

    def _take(self, step: _Step, draws: list[Draw], outputs: StepOutputs) -> int:
        """Append what was drawn for the items that are not steady; returns the number of tokens."""
        steady, scheduled = step.plan.num_steady, step.plan.scheduled
        items = zip(islice(scheduled, steady, None), islice(draws, steady, None), strict=True)
        return sum(self._take_one(seq, drawn, outputs) for (seq, _), drawn in items if drawn is not None)

    def _take_one(self, seq: Sequence, drawn: int | Drawn, outputs: StepOutputs) -> int:
        """Append what was drawn for ``seq``, unless it has ended meanwhile; returns the number of tokens."""
        if seq.status is Status.FINISHED:
            return 0
        drawn = Drawn((drawn,)) if type(drawn) is int else drawn
        if drawn.token_ids:
            return self._advance(seq, drawn, outputs)
        self._fail(seq, outputs)
        return 0

    def _take_decodes(self, step: _Step, draws: list[Draw], outputs: StepOutputs) -> int:
        """Append the tokens of the steady items, of which none is a sequence's first or ends it by length."""
        generated, finished, publishes = 0, Status.FINISHED, self._caches_prefixes and self.pipelined
        page_size, eos = self.capacity.page_size, self._eos
        for (seq, _), drawn in zip(islice(step.plan.scheduled, step.plan.num_steady), draws, strict=False):
            if seq.status is finished:
                continue
            if type(drawn) is not int or drawn in eos or drawn in seq.request.params.stop_token_ids:
                generated += self._take_one(seq, drawn, outputs)
                continue
            generated += 1
            if pending := seq.num_pending:
                seq.token_ids[-pending] = drawn
                seq.num_pending = pending - 1
            else:
                seq.token_ids.append(drawn)
            if publishes and (len(seq.token_ids) - seq.num_pending) % page_size == 0:
                self.kv.publish(seq)
            outputs.sequences.append(seq)
            outputs.tokens.append(drawn)
        return generated

    def _advance(self, seq: Sequence, drawn: Drawn, outputs: StepOutputs) -> int:
        """Append what was drawn for ``seq``; returns the number of tokens."""
        if seq.first_token is None:
            seq.first_token = self._clock()
        if seq.num_candidates:
            return self._advance_beam(seq, drawn, outputs)
        if not seq.pending_forks:
            if drawn.logprobs:
                seq.logprob += drawn.logprobs[0]
            self._append(seq, drawn.token_ids[0], outputs)
            return 1
        family = self._fork(seq)
        for i, member in enumerate(family):
            if drawn.logprobs:
                member.logprob += drawn.logprobs[i]
            self._append(member, drawn.token_ids[i], outputs)
        return len(family)

    def _fail(self, seq: Sequence, outputs: StepOutputs) -> None:
        """End the whole request of ``seq``, for which nothing could be drawn, with an error; all others go on."""
        error = (
            f"no token can be drawn after {seq.num_known} tokens: the model's logits hold NaN or infinity, or none of "
            "them is finite; the weights, the dtype or kv_cache_dtype do not fit this prompt"
        )
        group = self._groups[seq.request_id]
        left = group.unfinished
        for member in group.live.values():
            self.kv.forget_prefix(member)
        self.abort(seq.request_id, "error")
        outputs.others.extend(TokenOutput(seq.request_id, (), "error", error=error, index=index) for index in left)

    def _fork(self, seq: Sequence) -> list[Sequence]:
        family = self._groups[seq.request_id].fork(seq, self.scheduler)
        self._counters.counts["forks"] += len(family) - 1
        return family

    def _append(self, seq: Sequence, token: int, outputs: StepOutputs) -> None:
        pending = seq.num_pending
        if pending:
            seq.take_token(token)
        else:
            seq.token_ids.append(token)
        reason = seq.finish_reason(self._eos)
        if reason is None:
            if pending and self._caches_prefixes:
                self.kv.publish(seq)
            if not seq.silent:
                outputs.sequences.append(seq)
                outputs.tokens.append(token)
            return
        seq.drop_pending()
        facts = seq.kv_facts(self._step_read, self.capacity.page_size, self.kv.num_groups)
        self.scheduler.finish(seq)
        group = self._groups[seq.request_id]
        output = TokenOutput(seq.request_id, (token,), reason, seq.num_cached, index=seq.index, kv_facts=facts)
        self._return(group, group.ended(seq, output), outputs)

    def _advance_beam(self, seq: Sequence, drawn: Drawn, outputs: StepOutputs) -> int:
        group = self._groups[seq.request_id]
        assert isinstance(group, BeamGroup)
        forks_before = group.num_forks
        self._return(group, group.take(seq, drawn, self.scheduler), outputs)
        self._counters.counts["forks"] += group.num_forks - forks_before
        return 1

    def _return(self, group: Group, ended: list[TokenOutput], outputs: StepOutputs) -> None:
        for output in ended:
            self._counters.finished[output.finish_reason] += 1
        outputs.others.extend(ended)
        if not group.live:
            del self._groups[group.request.request_id]

    def reset_prefix_cache(self) -> bool:
        """Drop all cached pages; False, with nothing done, while a sequence owns pages."""
        return self.kv.reset_prefix_cache()

    def check_integrity(self) -> None:
        """Assert every invariant of scheduler, groups, tokens and KV memory, between two steps."""
        live = [seq for group in self._groups.values() for seq in group.live.values()]
        self.scheduler.check_integrity(live)
        self.kv.check_integrity(live)
        assert all(group.live and group.remaining > 0 for group in self._groups.values())
        assert len(self._in_flight) <= self.pipelined
        for seq in live:
            pending = [i for i, token in enumerate(seq.token_ids) if token == PENDING]
            assert pending == list(range(seq.num_known, seq.num_tokens)), "a token before the last is pending"
            assert seq.num_pending + seq.ending <= len(self._in_flight), "no step in flight draws the pending token"

    def count_seconds(self, phase: str, seconds: float) -> None:
        """Add time that the engine's loop took around a step to a phase of it."""
        self._counters.phases[phase] += seconds

    def stats(self) -> EngineStats:
        """A snapshot of all counters and gauges."""
        names = ("replayed_steps", "kv_sampled_values", "kv_saturated_values")
        counts = {name: getattr(self.executor, name, 0) for name in names}  # of an executor with tensors
        return self._counters.stats(self.kv, self.scheduler, self.executor.phase_seconds, **counts)
