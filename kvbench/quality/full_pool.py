"""Requests in this process while the KV pool is too small for them.

The engine is the real one, stepped to its end. The pool holds the longest request and little more, requests arrive in a
seeded order, each more urgent than those before it, and some ask for two answers: sequences are preempted in their
prompts and in their answers, pages are swapped or computed again, evicted, shared and copied. Nothing depends on the
clock, so the same seed gives the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from kvbench.requests.request import RequestSpec
from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import EngineStats, StepRecord
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import capacity_of
from kvbench_engine.model.loader import LoadedModel
from kvbench_engine.sequence import Request, SamplingParams, TokenOutput

_MOST_GAP = 3  # steps between two arrivals
_HOST_TIMES_POOL = 4  # room on the host for what is swapped out, so that little has to be computed again


def tokens_of(requests: Sequence[RequestSpec]) -> list[int]:
    """Prompt and answer tokens of each request."""
    return [len(request.prompt_token_ids or ()) + request.max_tokens for request in requests]


def engine_with_small_pool(
    config: EngineConfig, loaded: LoadedModel, requests: Sequence[RequestSpec], slots: int
) -> Engine:
    """An engine with a pool of ``slots``, its limits and policy replaced. Raises ValueError if none can be built."""
    longest = max(tokens_of(requests))
    sized = dataclasses.replace(config, max_model_len=longest, preemption_mode="recompute", swap_space=None)
    roomy = capacity_of(sized, loaded.kv_shape, 1 << 62)
    if config.layout == "paged":  # of windows only what the longest sequence and others as long on average hold
        least, shorter = roomy.pages_of(longest, roomy.step_tokens), max(0, slots - longest) // roomy.page_size
        pages = least + shorter * roomy.pages_of(longest) // -(-longest // roomy.page_size)
        budget = pages * roomy.page_size * roomy.bytes_per_slot + roomy.page_table_bytes
    else:
        budget = int(slots * roomy.slots_per_token) * roomy.bytes_per_slot + roomy.page_table_bytes
    changed: dict[str, Any] = {
        "max_model_len": longest,
        "kv_budget": budget,
        "max_num_waiting": None,
        "scheduling_policy": "priority",  # so that arrivals preempt, in a contiguous slab too
    }
    if config.preemption_mode == "swap":
        changed["swap_space"] = _HOST_TIMES_POOL * budget
    return assemble_engine(dataclasses.replace(config, **changed), loaded)


class FullPool:
    """Steps an engine through ``requests``, all with token ids, and checks that its pool adds up after every step.

    ``answers``: (request, number of the answer) -> its tokens, in the order in which they began.
    """

    def __init__(self, engine: Engine, requests: Sequence[RequestSpec]):
        self.engine, self.requests = engine, requests
        self.step = 0
        self.answers: dict[tuple[int, int], list[int]] = {}
        self._problems: list[tuple[int, str]] = []  # (step, what does not add up)
        self._steps_left = 0
        engine.on_step = self.note_step

    def run(self, seed: int) -> None:
        """Sends all requests in an order of ``seed``, and steps until nothing is left to do."""
        rng = np.random.default_rng(seed)
        count = len(self.requests)
        order = rng.permutation(count).tolist()
        arrivals = np.cumsum(rng.integers(0, _MOST_GAP + 1, count)).tolist()
        for position, (arrival, index) in enumerate(zip(arrivals, order, strict=True)):
            while self.step < arrival and self.engine.has_work():
                self._turn()
            # The lowest number is the most urgent: a request that grows, then the one that came last.
            self.send(index, 0 if self.requests[index].canary is None else count - position)
        self.finish()

    def send(self, index: int, priority: int) -> None:
        request, limits = self.requests[index], self.engine.config
        assert request.prompt_token_ids is not None
        params = SamplingParams(max_tokens=request.max_tokens, temperature=0.0, ignore_eos=True, **request.answers)
        self.engine.add_request(Request(str(index), request.prompt_token_ids, params, priority=priority))
        # Steps that suffice even if every sequence runs alone and computes everything again for each token.
        steps = request.width * (request.max_tokens + 1) * -(-limits.max_model_len // limits.max_num_batched_tokens)
        self._steps_left += 2 * steps + 1

    def finish(self) -> None:
        """Steps until nothing is left to do; then an engine must own nothing."""
        while self.engine.has_work() and self._steps_left > 0:
            self._turn()
        if self.engine.has_work():
            self._add_problem("the engine did not finish", "that all requests end")
        elif owned := _owned(self.engine.stats()):
            self._add_problem(owned, "that an idle engine owns nothing")

    def _turn(self) -> None:
        self.step += 1
        self._steps_left -= 1
        for output in self.engine.step():
            self.take(output)

    def take(self, output: TokenOutput) -> None:
        """Keeps the tokens of a step."""
        self.answers.setdefault((int(output.request_id), output.index), []).extend(output.token_ids)

    def note_step(self, record: StepRecord) -> None:
        """Checks the pool's figures."""
        kv, ledger = record.kv, record.kv.ledger()
        if min(ledger.values()) < 0 or sum(ledger.values()) != kv.slots_total:
            counts = ", ".join(f"{name} {count}" for name, count in ledger.items())
            self._add_problem(counts, f"{kv.slots_total} slots")

    def _add_problem(self, got: str, expected: str) -> None:
        self._problems.append((self.step, f"{got}, expected {expected}"))

    def lost(self) -> Iterator[tuple[int, int, int]]:
        """Lists (request, number of the answer, tokens that came) of each answer that has too few tokens."""
        for index, request in enumerate(self.requests):
            for number in range(request.n):
                came = len(self.answers.get((index, number), ()))
                if came < request.max_tokens:
                    yield index, number, came

    @property
    def problems(self) -> list[str]:
        """A phrase for each answer that did not come, and for all that does not add up in the pool."""
        lost = [
            (
                self.step,
                f"{came} of answer {number} to request {index}, expected {self.requests[index].max_tokens} tokens",
            )
            for index, number, came in self.lost()
        ]
        return [phrase for _, phrase in sorted([*lost, *self._problems], key=itemgetter(0))]

    @property
    def counters(self) -> dict[str, int]:
        """The events of sequences and pages. ``swapped_pages``: 0 of a contiguous slab."""
        stats = self.engine.stats()
        return {
            "preemptions": stats.num_preemptions,
            "swapped_pages": stats.counters.swapped_out_pages,
            "evicted_pages": stats.counters.prefix_evictions,
            "forks": stats.forks,
        }


def _owned(stats: EngineStats) -> str:
    """The pages and slots that an idle engine still owns, in words; empty if none."""
    kv = stats.kv
    left = {
        "pages owned": kv.pages_owned,
        "pages pinned": kv.pages_pinned,
        "slots used": kv.slots_used,
        "slots shared": kv.slots_shared,
        "host slots": kv.host_slots_used,
        "pages not freed": stats.counters.allocated_pages - stats.counters.freed_pages,
        "pages missing": kv.pages_total - kv.pages_free - kv.pages_cached,
    }
    return ", ".join(f"{name} {count}" for name, count in left.items() if count)
