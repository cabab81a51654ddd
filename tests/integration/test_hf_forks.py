"""Forks against requests of their own and against Hugging Face: n > 1 and best_of, on roomy and on tiny pools."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch

from engine.sequence import Request, SamplingParams
from tests.support.fork_cases import MAX_LEN, POOLS, PROMPTS, ROOMY, assert_pressed, engine_for, requests
from tests.support.hf_parts import Run, model_folder, one_thread, oracle

OUTPUT_TOKENS = 20
SAMPLED = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=4.0, top_p=0.95, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


# n > 1


@cache
def separate(folder: str, params: SamplingParams, n: int) -> dict[str, list[list[int]]]:
    """Each sibling as a request of its own, seed + i, on a roomy pool without forks."""
    engine = engine_for(folder, ROOMY)
    alone = [
        Request(f"{name}/{i}", prompt, replace(params, seed=None if params.seed is None else params.seed + i))
        for name, prompt in PROMPTS.items()
        for i in range(n)
    ]
    tokens = Run(engine, alone).tokens()
    assert engine.stats().forks == engine.stats().num_preemptions == 0
    return {name: [tokens[f"{name}/{i}"] for i in range(n)] for name in PROMPTS}


@pytest.mark.parametrize(
    ("page_size", "caching", "pool"),
    [(7, False, "roomy"), (1, True, "recompute"), (7, False, "recompute"), (7, True, "swap"), (16, False, "swap-small"),
     (16, True, "swap-overlapping")],
)  # fmt: skip
def test_sampled_siblings_are_requests_with_the_next_seeds(folder, page_size, caching, pool):
    """They differ from each other, so a sibling that read another's page would say something else."""
    slots, settings = POOLS[pool]
    engine = engine_for(folder, slots, page_size=page_size, enable_prefix_caching=caching, **settings)
    params = replace(SAMPLED, seed=40)
    run = Run(engine, requests(replace(params, n=3)))
    expected = separate(folder, params, 3)
    assert {name: run.family(name) for name in PROMPTS} == expected
    assert all(len({tuple(tokens) for tokens in family}) == 3 for family in expected.values())
    assert engine.stats().forks == 2 * len(PROMPTS)
    assert_pressed(engine, pool)


@pytest.mark.parametrize(("reservation", "preemption"), [("max", "swap"), ("oracle", "recompute")])
def test_siblings_in_the_contiguous_layout(folder, reservation, preemption):
    """A fork copies everything or waits for a reservation; a more urgent request drives siblings out."""
    settings = {"layout": "contiguous", "reservation": reservation, "scheduling_policy": "priority"}
    engine = engine_for(folder, 3 * MAX_LEN, **settings, **POOLS[preemption][1])
    params = replace(SAMPLED, seed=40)
    names = list(PROMPTS)
    urgent = requests(replace(params, n=3), names=names[4:])
    run = Run(engine, requests(replace(params, n=3), names=names[:4], priority=1), later={12: urgent})
    assert {name: run.family(name) for name in PROMPTS} == separate(folder, params, 3)
    assert engine.stats().counters.copied_slots > 0
    assert_pressed(engine, preemption)


# best_of


def mean_logprob(folder: str, prompt: tuple[int, ...], output: list[int]) -> float:
    with torch.inference_mode():
        logits = oracle(folder)(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1]
    chosen = torch.log_softmax(logits.double(), -1)[torch.arange(len(output)), torch.tensor(output)]
    return float(chosen.mean())


@pytest.mark.parametrize(
    ("page_size", "pool"), [(1, "recompute"), (16, "swap-small"), (7, "swap-overlapping")]
)
def test_best_of_returns_the_most_probable(folder, page_size, pool):
    """The candidates as requests of their own, ranked by the mean log probability that Hugging Face's model gives."""
    slots, settings = POOLS[pool]
    engine = engine_for(folder, slots, page_size=page_size, **settings)
    params = replace(SAMPLED, seed=40)
    run = Run(engine, requests(replace(params, n=2, best_of=4)))
    for name, candidates in separate(folder, params, 4).items():
        ranked = sorted(candidates, key=lambda tokens: -mean_logprob(folder, PROMPTS[name], tokens))
        assert run.family(name) == ranked[:2]
    assert_pressed(engine, pool)
