"""Chooses the tokens that the next step computes. Policy only: no tensors, no clock.

Prefill and decode are the same: a sequence catches up with its tokens. A step spends at most
``max_num_batched_tokens``, first on the running sequences in order of rank, then on admitting waiting ones.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict
from collections.abc import Iterator

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.manager import KVManager
from kvbench_engine.scheduling.step_plan import Scheduled, StepPlan
from kvbench_engine.scheduling.waiting_queue import Rank, WaitingQueue
from kvbench_engine.sequence import Sequence, Status


class QueueFull(ValueError):
    """The waiting queue is at ``max_num_waiting``: the request was refused and may be sent again later."""


class SteadyBatch:
    """The sequences that decode step after step, planned together.

    ``scheduled``: one token of each. The list is replaced when a sequence comes or goes, never changed.

    Of each member the first token is drawn, and the last one will not be drawn by a step of this batch. It is no beam,
    has no forks to come, and shares the page that it writes with no other sequence. Calendars name the steps in which a
    member begins a page, and in which it leaves.
    """

    def __init__(self, page_size: int):
        self.scheduled: list[Scheduled] = []
        self._page_size = page_size
        self._step = 0
        self._beginning: dict[int, list[Sequence]] = defaultdict(list)  # step modulo the page size -> who begins a page
        self._leaving: dict[int, list[Sequence]] = defaultdict(list)  # step -> whose last token is near then

    def advance(self) -> list[Sequence]:
        """Go on to the next step; returns the sequences that leave the batch, as their last tokens are near."""
        leaving = self._leaving.pop(self._step + 1, [])
        for seq in leaving:
            self.discard(seq)
        self._step += 1
        return leaving

    @property
    def beginning(self) -> list[Sequence]:
        """The sequences that begin a page in this step."""
        return self._beginning.get(self._step % self._page_size, [])

    def join(self, plan: StepPlan) -> list[Sequence]:
        """Add the sequences of ``plan`` that will go on for a while as plain decodes; returns them."""
        joined = []
        others = plan.scheduled[plan.num_steady :]
        for seq, num_tokens in others:
            computed = seq.num_computed + num_tokens
            goes_on = computed == len(seq.token_ids) and self._leaves(seq, computed) > self._step + 1
            if goes_on and not seq.num_candidates and not seq.pending_forks:
                joined.append(seq)
                self._leaving[self._leaves(seq, computed)].append(seq)
                self._beginning[self._begins(computed)].append(seq)
        if joined:
            whole = len(joined) == len(others) and all(num_tokens == 1 for _, num_tokens in others)
            self.scheduled = plan.scheduled if whole else self.scheduled + [Scheduled(seq, 1) for seq in joined]
        return joined

    def discard(self, seq: Sequence) -> bool:
        """Take ``seq`` out between two steps; False if it is not in the batch."""
        kept = [item for item in self.scheduled if item[0] is not seq]
        if len(kept) == len(self.scheduled):
            return False
        self.scheduled = kept
        self._beginning[self._begins(seq.num_computed)].remove(seq)
        if (leaving := self._leaving.get(self._leaves(seq, seq.num_computed))) is not None:
            leaving.remove(seq)
        return True

    def _begins(self, computed: int) -> int:
        """The next step, modulo the page size, in which a member begins a page that has ``computed`` tokens now."""
        return (self._step + 1 - computed) % self._page_size

    def _leaves(self, seq: Sequence, computed: int) -> int:
        """The step that would draw the last token of ``seq``, of which ``computed`` tokens are computed now."""
        return self._step + seq.max_length - 1 - computed

    def check_integrity(self) -> None:
        """Assert that each member decodes, and stands once in both calendars, at the right steps."""
        for seq, num_tokens in self.scheduled:
            assert num_tokens == 1 == seq.num_uncomputed and not seq.num_candidates, "more than plain decodes"
            begins, leaves = self._begins(seq.num_computed), self._leaves(seq, seq.num_computed)
            assert self._beginning[begins].count(seq) == 1, "a page will begin in another step"
            assert leaves > self._step and self._leaving[leaves].count(seq) == 1, "it will leave in another step"
        for calendar in (self._beginning, self._leaving):
            assert sum(map(len, calendar.values())) == len(self.scheduled), "a calendar names who has gone"


class Scheduler:
    """First come first served, or by priority; chunked prefill mixed into decodes; preemption of the last in rank.

    Rank is (priority, arrival, index among siblings); without the priority policy, priority counts as 0. ``running``
    is sorted by rank and the last one is preempted first, so the first in rank always makes progress: no livelock.
    A ``blocked`` sequence (a beam waiting for its siblings, or one whose last token is being drawn) stays resident and
    computes nothing; if it is preempted, it is parked: in no queue until it is unblocked or ends.

    While a step is in flight, the id of a sequence's last token may be unknown; it is scheduled like any other token.

    Sequences that decode are planned together (``SteadyBatch``), unless ``reuses_batches`` is False.
    """

    reuses_batches = True

    def __init__(self, config: EngineConfig, kv: KVManager):
        self.config = config
        self.kv = kv
        self._by_priority = config.scheduling_policy == "priority"
        self.waiting = WaitingQueue(self.rank)
        self.passed_over = WaitingQueue(self.rank)  # long prompts waiting for a share, see _next_waiting
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._parked: dict[int, Sequence] = {}  # id(sequence) -> sequence preempted while it was blocked
        self._arrivals = 0
        self._left_waiting = 0  # sequences that were waiting after the last step
        self._promised_rows = 0  # rows kept for forks of running sequences
        self._steady = SteadyBatch(kv.capacity.page_size)
        self._unsteady: list[Sequence] = []  # the running ones beside the steady batch, by rank; unused without one
        self._last_scheduled: list[Scheduled] = []
        self._share = config.max_num_batched_tokens // config.max_num_partial_prefills  # tokens of one prompt a step

    def rank(self, seq: Sequence) -> Rank:
        return (seq.request.priority if self._by_priority else 0, seq.arrival, seq.index)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self.passed_over)

    @property
    def num_parked(self) -> int:
        """Sequences that were preempted while they were blocked."""
        return len(self._parked)

    @property
    def num_swapped(self) -> int:
        """Sequences with KV on the host."""
        groups = (self.waiting.unordered(), self.passed_over.unordered(), self._parked.values())
        return sum(bool(seq.host_pages) for group in groups for seq in group)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or self.num_waiting > 0

    def add(self, seq: Sequence) -> None:
        """Queue a new request.

        Raises:
            ValueError: it could never run, even alone, and would block the queue for ever.
            QueueFull: ``max_num_waiting`` requests are waiting.
        """
        limit, params = self.config.max_model_len, seq.request.params
        if not seq.num_prompt:
            raise ValueError("the prompt is empty: send at least one token")
        if seq.num_prompt >= limit:
            raise ValueError(
                f"the prompt has {seq.num_prompt} tokens and max_model_len is {limit}, which leaves no room for an "
                "output token: shorten the prompt or raise max_model_len"
            )
        longest = min(limit, seq.num_prompt + params.max_tokens)
        if not self.kv.fits(seq.num_prompt, longest - seq.num_prompt):
            raise ValueError(
                f"prompt and max_tokens come to {longest} tokens and the KV budget holds "
                f"{self.kv.capacity.num_tokens}: lower max_tokens, shorten the prompt or raise kv_budget"
            )
        if params.width > self.config.max_num_seqs:
            raise ValueError(
                f"{params.width} sequences side by side (n, best_of or the beam width) are more than max_num_seqs "
                f"{self.config.max_num_seqs}: ask for fewer or raise max_num_seqs"
            )
        if self.config.max_num_waiting is not None:
            self._check_queue(self.config.max_num_waiting)
        self._arrivals += 1
        seq.arrival, seq.max_length = self._arrivals, longest
        self.waiting.push(seq)

    def _check_queue(self, limit: int) -> None:
        """Raise QueueFull beyond ``limit``. After a step that left nobody waiting, free rows count as places too."""
        room = self._free_rows() if self._left_waiting == 0 else 0
        if self.num_waiting >= limit + room:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting and max_num_waiting is {limit}: send the request again later"
            )

    def schedule(self) -> StepPlan:
        """Plan one step. The caller launches it, commits each item, and tells the KV manager when the moves are done.

        1. Under the priority policy, preempt running sequences for a waiting one of higher priority.
        2. Give the running sequences their tokens by rank; when memory runs out, preempt the last in rank.
        3. Admit waiting sequences, unless memory just ran out: they would be the next to be preempted.
        4. If nothing is scheduled, blocked beams hold the memory that their sibling needs: preempt them.
        5. Spend what is left of the budget on prompts that were limited to their share.
        """
        plan = StepPlan()
        if self._by_priority:
            self._preempt_for_urgent(plan)
        budget, memory_left = self._schedule_steady(plan) or self._schedule_running(plan)
        if memory_left:
            budget = self._admit_waiting(plan, budget)
        while not plan.scheduled and self.running and self.num_waiting and not any(s.ending for s in self.running):
            self._preempt(self.running.pop(), plan)
            budget = self._admit_waiting(plan, budget)
        if budget and self.config.max_num_partial_prefills > 1:
            self._spend_rest(plan, budget)
        if self.reuses_batches:
            self._join_steady(plan)
        plan.repeats = plan.scheduled is self._last_scheduled and len(plan.scheduled) == plan.num_steady > 0
        self._last_scheduled = plan.scheduled
        self._left_waiting = self.num_waiting
        plan.moves = self.kv.take_moves()
        return plan

    def _schedule_steady(self, plan: StepPlan) -> tuple[int, bool] | None:
        """Plan the steady batch, then the others by rank; returns what ``_schedule_running`` does.

        None, with an empty plan, where there is no such batch, or no room: then all must be planned by rank.
        """
        steady, kv = self._steady, self.kv
        if not steady.scheduled:
            return None
        for seq in steady.advance():
            insort(self._unsteady, seq, key=self.rank)
        budget = self.config.max_num_batched_tokens - len(steady.scheduled)
        others = list(self._wanted(self._unsteady, budget))
        if not steady.scheduled or not kv.has_room(steady.beginning, others):
            self.dissolve()
            return None
        plan.scheduled, plan.num_steady = steady.scheduled, len(steady.scheduled)
        if steady.beginning:
            kv.begin_pages(steady.beginning)
        for seq, num_tokens in others:
            grown = kv.grow(seq, num_tokens)
            assert grown, "has_room() promised it"
            plan.add(seq, num_tokens)
            budget -= num_tokens
        return budget, True

    def _join_steady(self, plan: StepPlan) -> None:
        """Add the sequences of ``plan`` that go on as plain decodes to the steady batch."""
        others = self._unsteady if plan.num_steady else self.running
        if joined := self._steady.join(plan):
            gone = set(map(id, joined))
            self._unsteady = [seq for seq in others if id(seq) not in gone]

    def dissolve(self) -> None:
        """Plan every sequence by rank in the next step."""
        self._steady, self._unsteady = SteadyBatch(self.kv.capacity.page_size), []

    def _preempt_for_urgent(self, plan: StepPlan) -> None:
        """Preempt running sequences of strictly lower priority (a higher number) until the first waiting one fits.

        Nobody is preempted if it would not fit even then.
        """
        running, head = self.running, self._next_waiting(self._num_long())
        lower = [seq for seq in running if seq.request.priority > head.request.priority] if head is not None else []
        if not lower:
            return
        rows = self._free_rows() + len(lower) + sum(seq.pending_forks for seq in lower)
        if rows <= head.pending_forks or not self.kv.can_admit(head, len(running) - len(lower), lower):
            return
        while lower and not (self._free_rows() > head.pending_forks and self.kv.can_admit(head, len(running), [])):
            self._preempt(running.pop(), plan)
            lower.pop()

    def _wanted(self, sequences: list[Sequence], budget: int) -> Iterator[Scheduled]:
        """The tokens of ``sequences``, which may shrink at its end meanwhile, in a step of ``budget`` tokens."""
        decodes = sum(len(seq.token_ids) - seq.num_computed == 1 for seq in sequences)  # served before prompts
        index = 0
        while index < len(sequences):
            seq = sequences[index]
            num_tokens = len(seq.token_ids) - seq.num_computed
            if num_tokens == 1:
                decodes -= 1
            elif num_tokens:
                num_tokens = self._chunk(num_tokens, budget - decodes)
            if num_tokens > 0:
                yield Scheduled(seq, num_tokens)
                budget -= num_tokens
            index += 1

    def _schedule_running(self, plan: StepPlan) -> tuple[int, bool]:
        """Returns the tokens left of the budget, and whether nobody was preempted for lack of memory."""
        budget, preempted = self.config.max_num_batched_tokens, len(plan.preempted)
        for seq, num_tokens in self._wanted(self.running, budget):
            if not self.kv.grow(seq, num_tokens) and not self._make_room(seq, num_tokens, plan):
                break  # seq was the last in rank and was preempted itself
            plan.add(seq, num_tokens)
            budget -= num_tokens
        return budget, len(plan.preempted) == preempted

    def _chunk(self, num_tokens: int, budget: int) -> int:
        """Tokens of a prompt to compute now: at most a share, so that another prompt fits into the step."""
        return min(num_tokens, budget, self._share)

    def _make_room(self, seq: Sequence, num_tokens: int, plan: StepPlan) -> bool:
        """Preempt from the end of ``running`` until ``seq`` can grow; False if it was preempted itself."""
        while not self.kv.grow(seq, num_tokens):
            victim = self.running.pop()  # never one that is in this plan: those come before seq
            self._preempt(victim, plan)
            if victim is seq:
                return False
        return True

    def _admit_waiting(self, plan: StepPlan, budget: int) -> int:
        longs = self._num_long()
        while budget > 0 and (seq := self._next_waiting(longs)) is not None:
            if not self._prompt_may_start(seq, budget) or self._free_rows() <= seq.pending_forks:
                break
            if not self.kv.admit(seq, len(self.running)):
                break
            longs += self._is_long(seq)
            num_tokens = self._chunk(seq.num_uncomputed, budget)
            grown = self.kv.grow(seq, num_tokens)
            assert grown, "admit() promised room for the whole sequence"
            (self.waiting if seq in self.waiting else self.passed_over).remove(seq)
            self._start_running(seq)
            plan.add(seq, num_tokens)
            budget -= num_tokens
        return budget

    def _next_waiting(self, longs: int) -> Sequence | None:
        """The first in rank. ``longs``: running long prompts.

        The last share is kept for short prompts: while long ones have all the others, waiting long prompts are passed
        over. They keep their rank.
        """
        shares = self.config.max_num_partial_prefills
        long_may_start = shares == 1 or longs < shares - 1
        first = self.waiting.peek()
        while not long_may_start and first is not None and self._is_long(first):
            self.waiting.remove(first)
            self.passed_over.push(first)
            first = self.waiting.peek()
        passed = self.passed_over.peek() if long_may_start else None
        if first is None or passed is None:
            return first or passed
        return min(first, passed, key=self.rank)

    def _num_long(self) -> int:
        if self.config.max_num_partial_prefills == 1:
            return 0
        return sum(self._is_long(seq) for seq in self.running)

    def _is_long(self, seq: Sequence) -> bool:
        return seq.num_uncomputed > self._share

    def _prompt_may_start(self, seq: Sequence, budget: int) -> bool:
        return self.config.enable_chunked_prefill or seq.num_tokens <= budget

    def _free_rows(self) -> int:
        """Rows of the batch that are neither used nor kept for forks."""
        return self.config.max_num_seqs - len(self.running) - self._promised_rows

    def _spend_rest(self, plan: StepPlan, budget: int) -> None:
        """Give what is left of ``budget`` to prompts that were limited to their share, in order of rank."""
        for position in range(plan.num_steady, len(plan.scheduled)):
            seq, num_tokens = plan.scheduled[position]
            more = min(budget, seq.num_uncomputed - num_tokens)
            if more > 0 and self.kv.grow(seq, num_tokens + more):
                plan.scheduled[position] = Scheduled(seq, num_tokens + more)
                budget -= more

    def _start_running(self, seq: Sequence) -> None:
        insort(self.running, seq, key=self.rank)
        if self._steady.scheduled:
            insort(self._unsteady, seq, key=self.rank)
        seq.status = Status.RUNNING
        self._promised_rows += seq.pending_forks

    def _preempt(self, seq: Sequence, plan: StepPlan) -> None:
        """Call after taking ``seq`` out of ``running``. It keeps its tokens; its KV is swapped out or dropped."""
        self.dissolve()
        self._promised_rows -= seq.pending_forks
        seq.num_ever_computed = max(seq.num_ever_computed, seq.num_computed)
        if self.config.preemption_mode == "swap" and not seq.ending:
            self.kv.swap_out(seq)
        else:
            self.kv.free(seq)
        seq.status = Status.PREEMPTED
        seq.num_preemptions += 1
        self.num_preemptions += 1
        plan.preempted.append(seq)
        if seq.blocked:
            self._parked[id(seq)] = seq
        else:
            self.waiting.push(seq)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Schedule ``child``, a copy of ``parent``: it runs if the parent runs and there is room, else it waits."""
        has_row = parent.status is not Status.RUNNING or self._free_rows() > 0
        if has_row and self.kv.fork(parent, child):
            self._start_running(child)
        else:
            child.status = Status.WAITING
            self.waiting.push(child)

    def claim_forks(self, parent: Sequence) -> int:
        """Claim the forks of ``parent`` and return their number. The rows kept for them become free: fork at once."""
        count, parent.pending_forks = parent.pending_forks, 0
        if parent.status is Status.RUNNING:
            self._promised_rows -= count
        return count

    def unblock(self, seq: Sequence) -> None:
        """Let ``seq`` compute again: a beam that has been given its next token."""
        seq.blocked = False
        if self._parked.pop(id(seq), None) is not None:
            self.waiting.push(seq)

    def finish(self, seq: Sequence) -> None:
        """Remove a sequence, whatever its state, and free its KV."""
        if seq.status is Status.RUNNING:
            self._promised_rows -= seq.pending_forks
            self.running.remove(seq)
            if self._steady.scheduled and not self._steady.discard(seq):
                self._unsteady.remove(seq)
            if not self._steady.scheduled:
                self._unsteady.clear()
        elif seq in self.waiting:
            self.waiting.remove(seq)
        elif seq in self.passed_over:
            self.passed_over.remove(seq)
        self._parked.pop(id(seq), None)
        self.kv.free(seq)
        seq.status = Status.FINISHED

    def check_integrity(self, live: list[Sequence]) -> None:
        """Assert that each of the ``live`` sequences is in exactly one state, and what must hold in it."""
        waiting = [*self.waiting.unordered(), *self.passed_over.unordered()]
        parked = list(self._parked.values())
        assert all(seq.blocked and seq.status is Status.PREEMPTED for seq in parked)
        queued = [id(seq) for seq in (*self.running, *waiting, *parked)]
        assert sorted(queued) == sorted(map(id, live)), "a sequence is in two queues, or in none"
        assert self.running == sorted(self.running, key=self.rank), "running is out of order"
        assert all(seq.status is Status.RUNNING and seq.row >= 0 for seq in self.running)
        assert all(seq.row < 0 and not seq.pages for seq in (*waiting, *parked)), "a waiting sequence owns pages"
        assert not any(seq.blocked for seq in waiting)
        assert self._promised_rows == sum(seq.pending_forks for seq in self.running)
        assert len(self.running) + self._promised_rows <= self.config.max_num_seqs
        if steady := [seq for seq, _ in self._steady.scheduled]:
            assert sorted([*steady, *self._unsteady], key=self.rank) == self.running, "who is steady is unclear"
            assert self._unsteady == sorted(self._unsteady, key=self.rank)
        self._steady.check_integrity()
