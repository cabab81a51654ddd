"""Canaries in this process while the KV pool is too small for them: which answers are wrong, where, and who noticed.

The engine is the real one, stepped to its end. The pool holds the longest request and little more, requests arrive in a
seeded order, each more urgent than those before it, and some ask for two answers: sequences are preempted in their
prompts and in their answers, pages are swapped or computed again, evicted, shared and copied. Nothing depends on the
clock, so the same seed gives the same steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.requests.canaries import CLASS, Canary, as_request, first_difference
from kvbench.requests.request import RequestSpec

if TYPE_CHECKING:
    from engine.config import EngineConfig
    from engine.counters import EngineStats, StepRecord
    from engine.engine import Engine, Executor
    from engine.kv.budget import KVShape
    from engine.model.loader import LoadedModel
    from engine.scheduling.step_plan import StepHandle, StepPlan
    from engine.sequence import Drawn, TokenOutput

PASSKEY, COPY, ANSWER, FORKS, REPEAT = "passkey", "copy", "answer", "forks", "repeat"
ACCOUNTS = LOST, PAGES = "lost", "pages"  # what an engine owes whatever its KV dtype is
CHECKS = (PASSKEY, COPY, ANSWER, FORKS, REPEAT, *ACCOUNTS)
"""passkey, copy: the answer of such a canary is known, and is another one. answer: the same of other prompts.

forks: the answers of one such request, forks of its prompt, differ. repeat: such a prompt that came before was answered
differently. lost: an answer did not come, or has too few tokens. pages: the pool's figures do not add up, or an idle
engine owns something.
"""
_FORKED_EVERY = 3  # one of so many requests is asked for two answers
_GROUP = 3
_SHORT, _LONG = 24, 96  # tokens of prompt and answer of a request that grows
_MOST_GAP = 3  # steps between two arrivals
_HOST_TIMES_POOL = 4  # room on the host for what is swapped out, so that little has to be computed again


@dataclass(frozen=True)
class Place:
    """A sequence in the step that drew one of its tokens.

    ``page_table``: its physical pages in order; contiguous: the first slot of its reservation. ``cached_tokens``: of
    its prompt, served by the prefix cache. ``preemptions``: of this sequence until then.
    """

    step: int
    page_table: tuple[int, ...]
    cached_tokens: int
    preemptions: int


@dataclass
class Answer:
    """One answer: which of the run's requests and which of that request's answers, and a place for each token."""

    request: int
    index: int
    token_ids: list[int] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """What one check found, and all that is needed to see it again: run the same requests with this seed.

    ``canary``: name of the canary, or the request's number. ``position``: of the first token that differs; ``expected``
    and ``got``: both sides from there, or what does not add up.
    """

    check: str
    seed: int
    place: Place
    canary: str = ""
    request: int = -1
    answer: int = 0
    position: int = 0
    expected: str = ""
    got: str = ""

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class CanaryRun:
    """All answers of a run in the order in which they began, and what the checks found, by step.

    ``wrong``: of how many answers the tokens are not the expected ones; ``asked``: how many have expected ones;
    ``canaries``: whose they are.
    ``counters``: preemptions, recomputed_tokens, swapped_pages (contiguous: 0), swapped_slots, evicted_pages,
    copied_pages, prefix_hit_tokens, forks, steps, waiting_steps (after which a request waited), peak_usage (share of
    the slots that are owned).
    """

    seed: int
    answers: tuple[Answer, ...]
    findings: tuple[Finding, ...]
    asked: int
    wrong: int
    canaries: frozenset[str]
    counters: Mapping[str, float]

    @property
    def caught_by(self) -> tuple[str, ...]:
        """The checks that found something, the first one first."""
        return tuple(dict.fromkeys(each.check for each in self.findings))


def pressed_requests(canaries: Sequence[Canary], count: int, seed: int) -> list[RequestSpec]:
    """``count`` canaries, drawn without replacement, about a third of them twice and every third forked; and growing.

    A quarter as many requests beside them have a short prompt and a long answer that nobody knows: they grow after
    canaries were admitted, and those are preempted for them.
    """
    rng = np.random.default_rng(seed)
    groups = rng.permutation(-(-len(canaries) // _GROUP)) * _GROUP  # those that follow one another share their text
    inside = [at + i for at in groups.tolist() for i in range(_GROUP) if at + i < len(canaries)]
    drawn = inside[: max(1, count - count // 3)]
    drawn += drawn[: count - len(drawn)]
    found = [
        as_request(canaries[at], index, answers=2 if index % _FORKED_EVERY == 0 else 1)
        for index, at in enumerate(rng.permutation(drawn).tolist())
    ]
    growing = [canaries[at].prompt_token_ids[:_SHORT] for at in rng.integers(0, len(canaries), count // 4).tolist()]
    return found + [
        RequestSpec(count + index, "growing", prompt, None, max_tokens=_LONG) for index, prompt in enumerate(growing)
    ]


def pool_slots(lengths: Sequence[int], page_size: int) -> int:
    """Slots of a pool that is full most of the time: whole pages of the longest request and two mean ones.

    ``lengths``: tokens of prompt and answer of each request.
    """
    pages = [-(-length // page_size) for length in lengths]
    return (max(pages) + round(2 * sum(pages) / len(pages))) * page_size


def run_canaries(
    config: EngineConfig, loaded: LoadedModel, requests: Sequence[RequestSpec], *, seed: int, slots: int | None = None
) -> CanaryRun:
    """``requests``, all with token ids, through an engine of ``config`` whose pool is too small for them.

    ``slots``: of the pool; None: ``pool_slots``. Limits and scheduling policy of ``config`` are replaced. Raises
    ValueError if no engine can be built.
    """
    from engine.build import assemble_engine

    rng = np.random.default_rng(seed)
    engine = assemble_engine(_pressed(config, loaded.kv_shape, requests, slots), loaded)
    order = rng.permutation(len(requests)).tolist()
    arrivals = np.cumsum(rng.integers(0, _MOST_GAP + 1, len(requests))).tolist()
    driver = _Driver(engine, requests, seed)
    for position, (at, index) in enumerate(zip(arrivals, order, strict=True)):
        while driver.step < at and engine.has_work():
            driver.turn()
        # The lowest number is the most urgent: a request that grows, then the canary that came last.
        driver.send(index, 0 if requests[index].canary is None else len(order) - position)
    driver.finish()
    return driver.result()


def run_alone(config: EngineConfig, loaded: LoadedModel, requests: Sequence[RequestSpec]) -> CanaryRun:
    """Each request alone, with one answer, on an idle engine of ``config`` that has room: what this KV dtype answers.

    The rate of wrong answers is the offline rate. Raises ValueError if no engine can be built.
    """
    from engine.build import assemble_engine

    single = [dataclasses.replace(each, n=1, best_of=None, beam_width=None) for each in requests]
    engine = assemble_engine(_pressed(config, loaded.kv_shape, single, None), loaded)
    driver = _Driver(engine, single, 0)
    for index in range(len(single)):
        engine.reset_prefix_cache()
        driver.send(index, 0)
        driver.finish()
    return driver.result()


def _pressed(config: EngineConfig, shape: KVShape, requests: Sequence[RequestSpec], slots: int | None) -> EngineConfig:
    """``config`` with a pool of ``slots`` and the limits and the policy that put it under pressure."""
    from engine.kv.budget import PAGE_TABLE_ENTRY_BYTES

    lengths = [len(each.prompt_token_ids or ()) + each.max_tokens for each in requests]
    longest = max(lengths)
    pages = 1 if config.layout == "contiguous" else -(-longest // config.page_size)
    if slots is None:
        slots = pool_slots(lengths, 1 if config.layout == "contiguous" else config.page_size)
    table = config.max_num_seqs * pages * PAGE_TABLE_ENTRY_BYTES
    changed = {
        "max_model_len": longest,
        "kv_budget": slots * shape.slot_bytes(config.kv_cache_dtype) + table,
        "max_num_waiting": None,
        "scheduling_policy": "priority",  # so that arrivals preempt, in a contiguous slab too
    }
    if config.preemption_mode == "swap":
        changed["swap_space"] = _HOST_TIMES_POOL * changed["kv_budget"]
    return dataclasses.replace(config, **changed)


class _Driver:
    """Steps an engine and notes each token of each answer with its place."""

    def __init__(self, engine: Engine, requests: Sequence[RequestSpec], seed: int):
        self.engine, self.seed, self._requests = engine, seed, requests
        self.step = 0
        self._recorder = engine.executor = _Recorder(engine.executor)
        self._answers: dict[tuple[int, int], Answer] = {}
        self._pages: list[Finding] = []
        self._waiting_steps, self._peak, self._left = 0, 0.0, 0
        engine.on_step = self._note_step

    def send(self, index: int, priority: int) -> None:
        from engine.sequence import Request, SamplingParams

        each = self._requests[index]
        assert each.prompt_token_ids is not None
        params = SamplingParams(max_tokens=each.max_tokens, temperature=0.0, ignore_eos=True, **each.answers)
        self.engine.add_request(Request(str(index), each.prompt_token_ids, params, priority=priority))
        # Steps that suffice even if every sequence runs alone and computes everything again for each token.
        limits = self.engine.config
        steps = each.width * (each.max_tokens + 1) * -(-limits.max_model_len // limits.max_num_batched_tokens)
        self._left += 2 * steps + 1

    def turn(self) -> None:
        self.step += 1
        self._left -= 1
        for output in self.engine.step():
            self._take(output)

    def finish(self) -> None:
        """Steps until nothing is left to do; then an engine must own nothing."""
        while self.engine.has_work() and self._left > 0:
            self.turn()
        if self.engine.has_work():
            self._add_pages("that all requests end", "the engine did not finish")
        elif owned := _owned(self.engine.stats()):
            self._add_pages("that an idle engine owns nothing", owned)

    def _take(self, output: TokenOutput) -> None:
        key = int(output.request_id), output.index
        answer = self._answers.setdefault(key, Answer(*key))
        answer.token_ids += output.token_ids
        place = self._recorder.place(output.request_id, output.index)
        answer.places += [dataclasses.replace(place, step=self.step)] * len(output.token_ids)

    def _note_step(self, record: StepRecord) -> None:
        kv, ledger = record.kv, record.kv.ledger()
        self._waiting_steps += record.waiting > 0
        self._peak = max(self._peak, kv.slots_reserved / kv.slots_total)
        if min(ledger.values()) < 0 or sum(ledger.values()) != kv.slots_total:
            self._add_pages(f"{kv.slots_total} slots", ", ".join(f"{name} {count}" for name, count in ledger.items()))

    def _add_pages(self, expected: str, got: str) -> None:
        self._pages.append(Finding(PAGES, self.seed, Place(self.step, (), 0, 0), expected=expected, got=got))

    def _lost(self) -> Iterator[Finding]:
        for index, request in enumerate(self._requests):
            for number in range(request.n):
                answer = self._answers.get((index, number))
                came = len(answer.token_ids) if answer else 0
                if came < request.max_tokens:
                    yield Finding(
                        LOST,
                        self.seed,
                        Place(self.step, (), 0, 0),
                        request.canary or str(index),
                        index,
                        number,
                        came,
                        f"{request.max_tokens} tokens",
                        f"{came} of answer {number} to request {index}",
                    )

    def result(self) -> CanaryRun:
        stats, counted = self.engine.stats(), self.engine.stats().counters
        answers = tuple(self._answers.values())
        wrong = list(wrong_answers(self._requests, answers, self.seed))
        found = [*wrong, *unequal_answers(self._requests, answers, self.seed), *self._lost(), *self._pages]
        return CanaryRun(
            self.seed,
            answers,
            tuple(sorted(found, key=lambda each: (each.place.step, CHECKS.index(each.check)))),
            asked=sum(self._requests[each.request].expected_token_ids is not None for each in answers),
            wrong=len(wrong),
            canaries=frozenset(each.canary for each in self._requests if each.canary is not None),
            counters={
                "preemptions": stats.num_preemptions,
                "recomputed_tokens": stats.recomputed_tokens,
                "swapped_pages": counted.swapped_out_pages,
                "swapped_slots": counted.swapped_out_slots,
                "evicted_pages": counted.prefix_evictions,
                "copied_pages": counted.copied_pages,
                "prefix_hit_tokens": counted.prefix_hits,
                "forks": stats.forks,
                "steps": self.step,
                "waiting_steps": self._waiting_steps,
                "peak_usage": self._peak,
            },
        )


class _Recorder:
    """An executor around another: knows where each sequence stands in the launch whose tokens were read last."""

    def __init__(self, executor: Executor):
        self._executor = executor
        self.model_info = executor.model_info
        self._read: dict[tuple[str, int], Place] = {}

    @property
    def phase_seconds(self) -> dict[str, float]:
        return self._executor.phase_seconds

    def launch(self, plan: StepPlan) -> StepHandle:
        places = {
            (seq.request_id, seq.index): Place(0, tuple(seq.pages), seq.num_cached, seq.num_preemptions)
            for seq, _ in plan.scheduled
        }
        return _Handle(self, places, self._executor.launch(plan))

    def place(self, request_id: str, index: int) -> Place:
        """Of a sequence that drew; a fork's first token was drawn by its parent."""
        return self._read.get((request_id, index)) or self._read.get((request_id, 0)) or Place(0, (), 0, 0)


@dataclass(frozen=True)
class _Handle:
    recorder: _Recorder
    places: dict[tuple[str, int], Place]
    handle: StepHandle

    def tokens(self) -> list[Drawn | None]:
        self.recorder._read = self.places
        return self.handle.tokens()


def _owned(stats: EngineStats) -> str:
    """What an idle engine still owns; empty if nothing."""
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


def wrong_answers(requests: Sequence[RequestSpec], answers: Sequence[Answer], seed: int) -> Iterator[Finding]:
    """Those that are not the expected ones; one finding an answer."""
    for answer in answers:
        request = requests[answer.request]
        if request.expected_token_ids is None:
            continue
        kind = request.cls.removeprefix(CLASS)
        check = kind if kind in (PASSKEY, COPY) else ANSWER
        yield from _difference(check, request, answer, request.expected_token_ids, seed)


def unequal_answers(requests: Sequence[RequestSpec], answers: Sequence[Answer], seed: int) -> Iterator[Finding]:
    """Forks that differ from the first of their request, and answers that differ from those of an earlier request.

    Only where the answer is known: the file has no canary that is decided by rounding, and others may be.
    """
    first: dict[tuple[Any, ...], Answer] = {}
    for answer in answers:
        request = requests[answer.request]
        if request.expected_token_ids is None:
            continue
        earlier = first.setdefault((request.prompt_token_ids, request.max_tokens), answer)
        same = first.setdefault((answer.request,), answer)
        if same is not answer:
            yield from _difference(FORKS, request, answer, same.token_ids, seed, same)
        elif earlier is not answer:
            yield from _difference(REPEAT, request, answer, earlier.token_ids, seed, earlier)


def _difference(
    check: str,
    request: RequestSpec,
    answer: Answer,
    expected: Sequence[int],
    seed: int,
    other: Answer | None = None,
) -> Iterator[Finding]:
    """The finding, if ``answer`` does not begin with ``expected``; of two answers, when the later one was known."""
    found = first_difference(expected, "", answer.token_ids, "")
    if found is None:
        return
    at = found.position
    places = [each.places[min(at, len(each.places) - 1)] for each in (answer, other) if each is not None]
    yield Finding(
        check,
        seed,
        max(places, key=lambda place: place.step),
        request.canary or str(request.index),
        answer.request,
        answer.index,
        at,
        found.expected,
        found.got,
    )
