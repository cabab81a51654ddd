"""Quantised KV x prefix caching x a full pool x swap or recompute equals the same format undisturbed, token for token.

Undisturbed: each prompt alone, computed in one piece on a roomy pool without a prefix cache. The strict tests run the
model in float64 on the torch backend: matrix products round differently with the shape of the batch, in float32 by
1e-6, which now and then moves a value across the border between two codes, and a code that differs may tip a token. In
float64 what rounding does is 1e-15 and the codes are the same, whatever the machine. The float32 kernels are held to
the tokens that are decided by more than such a code can move (``TIE``).
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, partial

import pytest
import torch

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.latent import fold_latent
from kvbench_engine.model.loader import LoadedModel, load_model
from kvbench_engine.model.support_check import measure_kv
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.quantized import QuantizedKV
from tests.support.hf_parts import (
    PREEMPTION,
    VOCAB,
    Run,
    loaded,
    make_engine,
    model_folder,
    one_thread,
    preempting,
)

MAX_LEN = 63
OUTPUT_TOKENS = 24  # more than the room that an admission leaves to the running ones, so that they collide
TIE = 0.02  # standard deviations of the logits; one code that differs moves them by up to about 0.003
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
SAMPLED = replace(GREEDY, temperature=4.0, seed=70)
TIGHT = 80  # slots: the longest sequence and a little more


def _prompts() -> dict[str, tuple[int, ...]]:
    """By name; 0, 1 and page size - 1 beyond whole pages of 7 and of 16. Most share a beginning: they hit."""
    rng = random.Random(612)  # of a few hundred, one that leaves many tokens clear of ties in every format
    base = tuple(rng.randrange(2, VOCAB) for _ in range(33))
    other = tuple(rng.randrange(2, VOCAB) for _ in range(20))
    order = ("32", "other", "17", "33", "13", "31", "14", "16", "15")
    return {name: other if name == "other" else base[: int(name)] for name in order}


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def latent_folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("latent")), "deepseek_v3")


@cache
def in_float64(folder: str) -> LoadedModel:
    loaded = load_model(EngineConfig(model=folder, kernel_backend="torch", device="cpu", latent_kv=False))
    model = loaded.model.double()
    fold_latent(model)  # now, because it reads the weights where they lie
    shape, _ = measure_kv(model, 8)
    return replace(loaded, model=model, dtype=torch.float64, kv_shape=shape)


def engine_for(model: LoadedModel, folder: str, kv_format: str, **settings) -> Engine:
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": len(PROMPTS), "max_num_batched_tokens": 16}
    return make_engine(model, folder, **{**sizes, "kv_cache_dtype": kv_format, **settings})


def tight_engine(folder: str, kv_format: str, page_size: int, preemption: str) -> Engine:
    """With prefix caching, on a pool that cannot hold them all."""
    settings = {"page_size": page_size, "enable_prefix_caching": True, **preempting(preemption, 32)}
    return engine_for(in_float64(folder), folder, kv_format, slots=TIGHT, **settings)


def undisturbed_engine(model: LoadedModel, folder: str, kv_format: str) -> Engine:
    return engine_for(model, folder, kv_format, slots=1024, max_num_batched_tokens=MAX_LEN)


@cache
def undisturbed(folder: str, kv_format: str, params: SamplingParams = GREEDY) -> dict[str, list[int]]:
    engine = undisturbed_engine(in_float64(folder), folder, kv_format)
    answers = {name: Run(engine, [Request(name, prompt, params)]).tokens() for name, prompt in PROMPTS.items()}
    assert engine.stats().num_preemptions == engine.stats().counters.prefix_hits == 0
    return {name: tokens[name] for name, tokens in answers.items()}


def requests(params: SamplingParams = GREEDY, names=tuple(PROMPTS), priority: int = 0) -> list[Request]:
    return [Request(name, PROMPTS[name], params, priority=priority) for name in names]


def assert_everything_met(engine: Engine, preemption: str) -> None:
    stats = engine.stats()
    moved = stats.counters
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert moved.prefix_hits > 0 and moved.prefix_evictions > 0
    assert (moved.swapped_in_slots > 0) == (preemption != "recompute")
    assert (moved.swap_lost_slots > 0) == (preemption == "swap-small")
    assert (stats.recomputed_tokens > 0) == (preemption != "swap")


full = partial(pytest.param, marks=pytest.mark.full)
STRICT = [*((7, how) for how in PREEMPTION), (16, "recompute"), (5, "swap-small")]
INT8, MAIN = "int8_per_token_head", [
    ("int8_per_token_head", 7, "swap-small"), ("fp8_e4m3", 7, "recompute"), ("int4_per_token_head", 16, "recompute"),
]  # fmt: skip


def ring(settings: Iterable[tuple]) -> list:
    """In the main ring those of INT8, which has all that the other formats have."""
    return [one if one[0] == INT8 else full(*one) for one in settings]


@pytest.mark.parametrize(
    ("kv_format", "page_size", "preemption"),
    [one if one in MAIN else full(*one) for one in ((name, *how) for name in KV_FORMATS for how in STRICT)],
)
def test_quantised_cached_preempted_on_a_full_pool(folder, kv_format, page_size, preemption):
    """Each alone was fine elsewhere and together they corrupted the KV: int8 x prefix caching x full pool
    (vllm#50702); and damage that depended on prompt length mod page size (vllm#50749). The same prompts come twice,
    the second time backwards, so that what the first round left in the cache is used."""
    expected = undisturbed(folder, kv_format)
    engine = tight_engine(folder, kv_format, page_size, preemption)
    assert Run(engine, requests()).tokens() == expected
    assert Run(engine, requests()[::-1]).tokens() == expected
    assert_everything_met(engine, preemption)


@pytest.mark.parametrize(
    ("kv_format", "page_size", "preemption"),
    [("int8_per_token_head", 7, "swap-small"), ("fp8_e4m3", 1, "recompute"), ("int4_per_token_head", 16, "swap"),
     *(full(name, 7, how) for name in KV_FORMATS for how in PREEMPTION)],
)  # fmt: skip
def test_quantised_latent_rows_cached_preempted_on_a_full_pool(latent_folder, kv_format, page_size, preemption):
    """One row a token with at most one scale: as in the tests of K and V, and forks that copy it."""
    expected = undisturbed(latent_folder, kv_format)
    engine = tight_engine(latent_folder, kv_format, page_size, preemption)
    assert engine.executor.host.raw_tensors()[0].shape[1] == 1
    for order in (requests(), requests()[::-1]):
        assert Run(engine, order).tokens() == expected
    assert_everything_met(engine, preemption)
    run = Run(engine, requests(replace(SAMPLED, n=2)))
    for index in range(2):
        params = replace(SAMPLED, seed=SAMPLED.seed + index)
        assert run.tokens(index) == undisturbed(latent_folder, kv_format, params)
    assert sum(undisturbed(latent_folder, "auto")[name] != expected[name] for name in PROMPTS) >= 3


@pytest.mark.parametrize(("kv_format", "preemption"), ring(zip(KV_FORMATS, ["recompute", "swap"] * 2, strict=True)))
def test_quantised_forks_on_a_full_pool(folder, kv_format, preemption):
    """A copy on write copies codes and scales: each sibling is what a request of its own with seed + i is."""
    engine = tight_engine(folder, kv_format, 7, preemption)
    run = Run(engine, requests(replace(SAMPLED, n=2)))
    for index in range(2):
        params = replace(SAMPLED, seed=SAMPLED.seed + index)
        assert run.tokens(index) == undisturbed(folder, kv_format, params)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().counters.copied_slots > 0
    assert (engine.stats().counters.swapped_in_slots > 0) == (preemption == "swap")


@pytest.mark.parametrize(("kv_format", "preemption"), ring(zip(KV_FORMATS, (*PREEMPTION, "swap"), strict=True)))
def test_quantised_in_the_contiguous_layout(folder, kv_format, preemption):
    """Whole reservations go out and come back, driven out by more urgent requests."""
    settings = {"layout": "contiguous", "reservation": "oracle", "scheduling_policy": "priority"}
    settings |= {"slots": 2 * MAX_LEN, **preempting(preemption, 40)}
    engine = engine_for(in_float64(folder), folder, kv_format, **settings)
    names = list(PROMPTS)
    run = Run(engine, requests(names=names[:4], priority=1), later={12: requests(names=names[4:])})
    assert run.tokens() == undisturbed(folder, kv_format)
    moved = engine.stats().counters
    assert engine.stats().num_preemptions > 0
    assert (moved.swapped_in_slots > 0) == (preemption != "recompute")
    assert (moved.swap_lost_slots > 0) == (preemption == "swap-small")


@cache
def undisturbed_float32(folder: str, kv_format: str) -> dict[str, list[int]]:
    """Of each prompt, the tokens before the first one that is nearly a tie, and with them all that may differ."""
    model = loaded(folder)
    engine = undisturbed_engine(model, folder, kv_format)
    gaps: list[float] = []

    def measure(_module, _inputs, logits: torch.Tensor) -> None:
        for row in logits[0]:
            best, second = torch.topk(row, 2).values
            gaps.append(float((best - second) / row.std()))

    hook = model.model.lm_head.register_forward_hook(measure)
    decided = {}
    for name, prompt in PROMPTS.items():
        gaps.clear()
        tokens = Run(engine, [Request(name, prompt, GREEDY)]).tokens()[name]
        assert len(gaps) == len(tokens), "each pass through the model was to bring one token"
        decided[name] = tokens[: next((i for i, gap in enumerate(gaps) if gap < TIE), len(tokens))]
    hook.remove()
    total = sum(map(len, decided.values()))
    assert total > 0.5 * OUTPUT_TOKENS * len(PROMPTS), f"only {total} tokens are clear: take other prompts"
    return decided


@pytest.mark.parametrize(
    ("kv_format", "page_size", "preemption"),
    [*ring((name, 7, "swap-small") for name in KV_FORMATS), *(full(name, 16, "recompute") for name in KV_FORMATS)],
)
def test_the_float32_kernels_under_the_same_pressure(folder, kv_format, page_size, preemption):
    """vllm#50702 and vllm#50749 once more, through the CPU kernels and float32 models that are really served."""
    check_float32_kernels(folder, kv_format, page_size, preemption)


@pytest.mark.parametrize(("kv_format", "preemption"), ring(zip(KV_FORMATS, ["recompute", "swap"] * 2, strict=True)))
def test_the_float32_kernels_on_latent_rows(latent_folder, kv_format, preemption):
    check_float32_kernels(latent_folder, kv_format, 7, preemption)


def check_float32_kernels(folder: str, kv_format: str, page_size: int, preemption: str) -> None:
    decided = undisturbed_float32(folder, kv_format)
    settings = {"slots": TIGHT, "page_size": page_size, "enable_prefix_caching": True, **preempting(preemption, 32)}
    engine = engine_for(loaded(folder), folder, kv_format, **settings)
    assert engine.executor.host.backend.name == "numba"
    for order in (requests(), requests()[::-1]):
        tokens = Run(engine, order).tokens()
        assert {name: tokens[name][: len(known)] for name, known in decided.items()} == decided
    assert_everything_met(engine, preemption)


@pytest.mark.parametrize("kv_format", [INT8, *map(full, sorted(set(KV_FORMATS) - {INT8}))])
def test_the_format_is_really_in_use(folder, kv_format):
    """Else all of the above would hold and prove nothing."""
    plain = undisturbed(folder, "auto")
    quantised = undisturbed(folder, kv_format)
    assert sum(plain[name] != quantised[name] for name in PROMPTS) >= 3
    host = undisturbed_engine(in_float64(folder), folder, kv_format).executor.host
    for cache_of_layer in (*host.k_caches, *host.v_caches):
        assert isinstance(cache_of_layer, QuantizedKV) and cache_of_layer.format == KV_FORMATS[kv_format]
        assert cache_of_layer.codes.any(), "the warm-up wrote nothing"
