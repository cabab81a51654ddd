"""Runs of kvbench-tiny's canaries at a full pool: which answers are wrong, where, and which check notices.

For the tests and the benchmark of what canaries catch; `kvbench quality` steps the same engine in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from kvbench.metrics.canaries import ALPHA, chance_of_so_many
from kvbench.quality.full_pool import FullPool, engine_with_small_pool, tokens_of
from kvbench.requests.canaries import CLASS, Canary, as_request, first_difference, read_canaries
from kvbench.requests.request import RequestSpec
from kvbench_engine.config import EngineConfig
from kvbench_engine.counters import StepRecord
from kvbench_engine.engine import Engine, Executor
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.scheduling.step_plan import StepHandle, StepPlan
from kvbench_engine.sequence import Drawn, TokenOutput
from tests.support.loads import ROOT

NAME = "kvbench-tiny"
_SIZES = {"model": NAME, "device": "cpu", "num_threads": 1, "max_num_seqs": 16, "max_num_batched_tokens": 128}
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


@dataclass(frozen=True)
class Place:
    """A sequence in the step that drew one of its tokens.

    ``page_table``: its physical pages in order; contiguous: the first slot of its reservation. ``cached_tokens``: of
    its prompt, served by the prefix cache. ``preemptions``: of this sequence until then.
    """

    step: int
    page_table: tuple[int, ...] = ()
    cached_tokens: int = 0
    preemptions: int = 0


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


@dataclass(frozen=True)
class CanaryRun:
    """All answers of a run in the order in which they began, and what the checks found, by step.

    ``wrong``: of how many answers the tokens are not the expected ones; ``asked``: how many have expected ones;
    ``canaries``: whose they are. ``counters``: those of ``FullPool`` and more, ``waiting_steps`` are those after which
    a request waited, ``peak_usage`` is a share of the slots.
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


def engine_for(config: EngineConfig, loaded: LoadedModel, requests: Sequence[RequestSpec]) -> Engine:
    """An engine whose pool is full most of the time: whole pages of the longest request and two mean ones."""
    page_size = 1 if config.layout == "contiguous" else config.page_size
    pages = [-(-length // page_size) for length in tokens_of(requests)]
    slots = (max(pages) + round(2 * sum(pages) / len(pages))) * page_size
    return engine_with_small_pool(config, loaded, requests, slots)


def run_alone(config: EngineConfig, loaded: LoadedModel, requests: Sequence[RequestSpec]) -> CanaryRun:
    """Each request alone, with one answer, on an idle engine of ``config`` that has room: what this KV dtype answers.

    The rate of wrong answers is the offline rate. Raises ValueError if no engine can be built.
    """
    single = [dataclasses.replace(each, n=1, best_of=None, beam_width=None) for each in requests]
    pool = _WatchedPool(engine_for(config, loaded, single), single)
    for index in range(len(single)):
        pool.engine.reset_prefix_cache()
        pool.send(index, 0)
        pool.finish()
    return pool.result(0)


class _WatchedPool(FullPool):
    """Notes each token of each answer with its place."""

    def __init__(self, engine: Engine, requests: Sequence[RequestSpec]):
        super().__init__(engine, requests)
        self._recorder = engine.executor = _Recorder(engine.executor)
        self._answers: dict[tuple[int, int], Answer] = {}
        self._waiting_steps, self._peak = 0, 0.0

    def take(self, output: TokenOutput) -> None:
        super().take(output)
        key = int(output.request_id), output.index
        answer = self._answers.setdefault(key, Answer(*key))
        answer.token_ids += output.token_ids
        place = self._recorder.place(output.request_id, output.index)
        answer.places += [dataclasses.replace(place, step=self.step)] * len(output.token_ids)

    def note_step(self, record: StepRecord) -> None:
        super().note_step(record)
        self._waiting_steps += record.waiting > 0
        self._peak = max(self._peak, record.kv.slots_reserved / record.kv.slots_total)

    def result(self, seed: int) -> CanaryRun:
        answers = tuple(self._answers.values())
        wrong = list(wrong_answers(self.requests, answers, seed))
        found = [*wrong, *unequal_answers(self.requests, answers, seed)]
        for index, number, came in self.lost():
            canary = self.requests[index].canary or str(index)
            found.append(Finding(LOST, seed, Place(self.step), canary, index, number, came))
        found += [Finding(PAGES, seed, Place(step), got=problem) for step, problem in self._problems]
        stats, counted = self.engine.stats(), self.engine.stats().counters
        return CanaryRun(
            seed,
            answers,
            tuple(sorted(found, key=lambda each: (each.place.step, CHECKS.index(each.check)))),
            asked=sum(self.requests[each.request].expected_token_ids is not None for each in answers),
            wrong=len(wrong),
            canaries=frozenset(each.canary for each in self.requests if each.canary is not None),
            counters=self.counters
            | {
                "recomputed_tokens": stats.recomputed_tokens,
                "copied_pages": counted.copied_pages,
                "prefix_hit_tokens": counted.prefix_hits,
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
        return self._read.get((request_id, index)) or self._read.get((request_id, 0)) or Place(0)


@dataclass(frozen=True)
class _Handle:
    recorder: _Recorder
    places: dict[tuple[str, int], Place]
    handle: StepHandle

    def tokens(self) -> list[Drawn | None]:
        self.recorder._read = self.places
        return self.handle.tokens()


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


@functools.cache
def canaries(longest: int) -> tuple[Canary, ...]:
    """Those of at most ``longest`` prompt tokens."""
    made = read_canaries(ROOT / "workloads" / "canaries" / f"{NAME}.jsonl")
    return tuple(each for each in made.canaries if len(each.prompt_token_ids) <= longest)


@functools.cache
def loaded(kv_cache_dtype: str) -> LoadedModel:
    torch.set_num_threads(1)
    return load_model(configured(kv_cache_dtype=kv_cache_dtype))


def configured(**settings: Any) -> EngineConfig:
    return EngineConfig.from_mapping({**_SIZES, **settings})


def pressed(seed: int, count: int = 40, longest: int = 700, **settings: Any) -> CanaryRun:
    """``count`` canaries at a full pool."""
    config = configured(**settings)
    requests = pressed_requests(canaries(longest), count, seed)
    pool = _WatchedPool(engine_for(config, loaded(config.kv_cache_dtype), requests), requests)
    pool.run(seed)
    return pool.result(seed)


_wrong_alone: dict[tuple[str, str], bool] = {}  # KV dtype, canary -> whether its answer is wrong on an idle engine


def offline(kv_cache_dtype: str, names: Collection[str]) -> tuple[int, int]:
    """How many of the canaries ``names`` this KV dtype answers wrongly on an idle engine, of how many."""
    asked = [each for each in canaries(2048) if each.canary_id in names]
    if missing := [each for each in asked if (kv_cache_dtype, each.canary_id) not in _wrong_alone]:
        requests = [as_request(each, index) for index, each in enumerate(missing)]
        run = run_alone(configured(kv_cache_dtype=kv_cache_dtype), loaded(kv_cache_dtype), requests)
        wrong = {each.canary for each in run.findings}
        _wrong_alone.update({(kv_cache_dtype, each.canary_id): each.canary_id in wrong for each in missing})
    return sum(_wrong_alone[kv_cache_dtype, each.canary_id] for each in asked), len(asked)


def alarms(run: CanaryRun, kv_cache_dtype: str) -> bool:
    """Whether a gate would fail: any finding in full precision; else more wrong answers than the dtype explains.

    Its own canaries are asked alone as well, so that both sides had the same questions.
    """
    if kv_cache_dtype == "auto" or set(ACCOUNTS) & set(run.caught_by):
        return bool(run.findings)
    wrong, asked = offline(kv_cache_dtype, run.canaries)
    return chance_of_so_many(run.wrong, run.asked, len(run.canaries), wrong, asked) < ALPHA
