"""Forks and beams against requests of their own and against Hugging Face, on roomy and on tiny pools."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from kvbench_engine.engine import Engine
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.hf_parts import (
    PREEMPTION,
    VOCAB,
    Run,
    loaded,
    make_engine,
    model_folder,
    one_thread,
    oracle,
    preempting,
)

full = partial(pytest.param, marks=pytest.mark.full)
MAX_LEN = 64
ROOMY, TIGHT = 1024, 96  # slots; the tight pool holds one longest sequence and half of another
# pool and preemption: name -> (slots, settings)
POOLS = {"roomy": (ROOMY, {})} | {how: (TIGHT, preempting(how, 16)) for how in PREEMPTION}
POOLS["swap-overlapping"] = (TIGHT, {**preempting("swap", 16), "async_scheduling": True})


def _prompts() -> dict[str, tuple[int, ...]]:
    """By name; their lengths are 0, 1 and page size - 1 beyond whole pages of 7 and of 16."""
    rng = random.Random(5)
    base = tuple(rng.randrange(2, VOCAB) for _ in range(35))
    return {str(n): base[:n] for n in (13, 14, 15, 16, 17, 32)} | {"other": base[20:]}


PROMPTS = _prompts()


def engine_for(folder: str, slots: int, **settings) -> Engine:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": 16, "max_num_batched_tokens": 24}
    model = loaded(folder, latent_kv=settings.get("latent_kv", True))
    return make_engine(model, folder, slots=slots, **{**sizes, **settings})


def requests(params: SamplingParams, names=tuple(PROMPTS), **rest) -> list[Request]:
    return [Request(name, PROMPTS[name], params, **rest) for name in names]


def assert_pressed(engine: Engine, pool: str) -> None:
    """That the pool did to the run what it was made for."""
    stats = engine.stats()
    assert (stats.num_preemptions > 0) == (pool != "roomy")
    assert (stats.counters.swapped_out_slots > 0) == pool.startswith("swap")
    if pool != "swap-small":  # siblings may drive each other out of the host as well
        assert (stats.counters.swapped_in_slots > 0) == pool.startswith("swap")
    assert (stats.counters.swap_lost_slots > 0) == (pool == "swap-small")
    if pool == "recompute" and not engine.config.enable_prefix_caching:  # else the cache may have kept all of it
        assert stats.recomputed_tokens > 0


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
    [full(7, False, "roomy"), (1, True, "recompute"), full(7, False, "recompute"), full(7, True, "swap"),
     (7, False, "swap-small"), (16, True, "swap-overlapping")],
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
    ("page_size", "pool"), [full(1, "recompute"), (16, "swap-small"), full(7, "swap-overlapping")]
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


# beams


def beams_of_generate(
    folder: str, prompt: tuple[int, ...], params: SamplingParams, eos: tuple[int, ...]
) -> list[list[int]]:
    ids = torch.tensor([prompt])
    settings = {
        "num_beams": params.beam_width, "num_return_sequences": params.n, "do_sample": False,
        "max_new_tokens": params.max_tokens, "eos_token_id": list(eos) or None, "pad_token_id": 0,
        "length_penalty": params.length_penalty, "early_stopping": params.early_stopping,
    }  # fmt: skip
    rows = oracle(folder).generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens = [row[len(prompt) :] for row in rows.tolist()]
    ends = [next((i + 1 for i, token in enumerate(row) if token in eos), len(row)) for row in tokens]
    return [row[:end] for row, end in zip(tokens, ends, strict=True)]


def beam_params(width: int, n: int, stops: tuple[int, ...] = (), **settings) -> SamplingParams:
    return SamplingParams(
        max_tokens=12, temperature=0.0, n=n, beam_width=width, ignore_eos=True, stop_token_ids=stops, **settings
    )


@cache
def common_tokens(folder: str) -> tuple[int, ...]:
    """Tokens that endless beam searches meet, as first ones and later: as EOS they end some beams and not others."""
    endless = beam_params(4, 4)
    beams = [beam for prompt in PROMPTS.values() for beam in beams_of_generate(folder, prompt, endless, ())]
    first = Counter(beam[0] for beam in beams).most_common(2)
    later = Counter(token for beam in beams for token in beam[2:]).most_common(3)
    return tuple({token for token, _ in first + later})


@cache
def expected_beams(folder: str, params: SamplingParams) -> dict[str, list[list[int]]]:
    return {name: beams_of_generate(folder, prompt, params, params.stop_token_ids) for name, prompt in PROMPTS.items()}


def assert_beams(run: Run, folder: str, params: SamplingParams) -> None:
    assert {name: run.family(name) for name in PROMPTS} == expected_beams(folder, params)
    for answer in run.answers.values():
        assert answer.reason == ("stop" if answer.tokens[-1] in params.stop_token_ids else "length")


@pytest.mark.parametrize(
    ("width", "length_penalty", "early_stopping"),
    [(3, 1.0, False), (4, -1.0, "never"), full(8, 0.0, True)],
)
def test_beams_equal_generate(folder, width, length_penalty, early_stopping):
    """All prompts at once against each alone, half of the searches with EOS."""
    stops = common_tokens(folder) if width % 2 == 0 else ()
    params = beam_params(width, max(1, width // 2), stops, length_penalty=length_penalty, early_stopping=early_stopping)
    run = Run(engine_for(folder, ROOMY, page_size=7), requests(params))
    assert_beams(run, folder, params)
    assert any(answer.reason == "stop" for answer in run.answers.values()) == bool(stops)


@pytest.mark.parametrize(
    ("page_size", "caching", "pool"),
    [full(1, True, "recompute"), (7, False, "swap"), full(16, False, "swap-small"), (16, True, "swap-overlapping")],
)
def test_beams_under_pressure(folder, page_size, caching, pool):
    """The pool holds one beam of the longest prompt and little more: its siblings take turns."""
    settings = {"max_model_len": 48, "page_size": page_size, "enable_prefix_caching": caching}
    engine = engine_for(folder, 56, **settings, **POOLS[pool][1])
    params = beam_params(4, 4, common_tokens(folder))
    run = Run(engine, requests(params))
    assert_beams(run, folder, params)
    assert engine.stats().forks > 0
    assert_pressed(engine, pool)


@pytest.mark.parametrize(("slots", "preemption"), [(MAX_LEN, "swap"), (3 * MAX_LEN, "recompute")])
def test_beams_in_the_contiguous_layout(folder, slots, preemption):
    """With room for a single reservation the beams of a request take turns."""
    engine = engine_for(folder, slots, layout="contiguous", **POOLS[preemption][1])
    params = beam_params(3, 3, common_tokens(folder))
    assert_beams(Run(engine, requests(params)), folder, params)
    assert_pressed(engine, preemption)


@pytest.mark.parametrize(
    ("family", "settings"),
    [("gemma3", {"page_size": 7, "enable_prefix_caching": True, "async_scheduling": True}),
     ("mistral", {"page_size": 16, "preemption_mode": "swap", "swap_slots": 64}),
     full("gemma3", {"page_size": 1, "preemption_mode": "swap", "swap_slots": 64}),
     full("gemma3", {"layout": "contiguous"}), full("mistral", {"page_size": 1, "enable_prefix_caching": True})],
)  # fmt: skip
def test_beams_of_layers_with_windows(tmp_path_factory, family, settings):
    """Prompts of up to 32 tokens and windows of 24: siblings share, copy and free pages of each group."""
    folder = model_folder(str(tmp_path_factory.mktemp("windows")), family)
    engine = engine_for(folder, TIGHT, **settings)
    assert 24 in engine.capacity.windows
    params = beam_params(4, 4, ())
    assert_beams(Run(engine, requests(params)), folder, params)
    assert engine.stats().forks > 0 < engine.stats().num_preemptions
    assert (engine.stats().counters.copied_pages > 0) == (settings.get("page_size") in (7, 16))


@pytest.mark.parametrize(
    "settings",
    [{"page_size": 7, "enable_prefix_caching": True, "async_scheduling": True}, {"layout": "contiguous"},
     {"page_size": 16, "preemption_mode": "swap", "swap_slots": 64},
     full({"page_size": 7, "latent_kv": False})],
)  # fmt: skip
def test_forks_and_beams_of_latent_rows(tmp_path_factory, settings):
    """A copy on write moves one row a token, which is K and V of all heads."""
    folder = model_folder(str(tmp_path_factory.mktemp("latent")), "deepseek_v3")
    engine = engine_for(folder, 3 * MAX_LEN if settings.get("layout") else TIGHT, **settings)
    params = beam_params(4, 4, ())
    assert_beams(Run(engine, requests(params)), folder, params)
    assert engine.stats().forks > 0 < engine.stats().num_preemptions
    sampled = replace(SAMPLED, seed=40)
    run = Run(engine, requests(replace(sampled, n=3)))
    assert {name: run.family(name) for name in PROMPTS} == separate(folder, sampled, 3)
    assert engine.stats().counters.copied_slots > 0
