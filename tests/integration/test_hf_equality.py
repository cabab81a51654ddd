"""Greedy tokens of our engine against Hugging Face ``generate``, token for token, in float32.

Every case runs on a pool that forces preemption, and asserts that it really happened, in the way it was meant to.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.execution.graphs import GraphSizes
from kvbench_engine.kv.budget import capacity_of
from kvbench_engine.model.loader import load_model
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_kernels.kv_formats import KV_FORMATS
from tests.support.fake_capture import FakeCapture
from tests.support.hf_parts import (
    FAMILIES,
    PREEMPTION,
    VOCAB,
    Run,
    greedy_outputs,
    loaded,
    make_engine,
    model_folder,
    one_thread,
    preempting,
)

full = partial(pytest.param, marks=pytest.mark.full)
MAX_LEN = 112
OUTPUT_TOKENS = 28  # more than the room that an admission leaves to the running ones, so that they collide
PAGE_SIZES = (1, 7, 16, 64)
PARAMS = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)


def _prompts() -> dict[str, tuple[int, ...]]:
    """By name. Of each page size there are prompts of 0, 1 and page size - 1 tokens beyond whole pages."""
    rng = random.Random(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.randrange(2, VOCAB) for _ in range(count))

    alone = {str(n): tokens(n) for n in (1, 6, 7, 8, 15, 17)}
    base, other = tokens(65), tokens(40)
    sharing = {"a63": base[:63], "a64": base[:64], "a65": base, "b40": other, "b41": other[:33] + tokens(8)}
    # long ones first: they meet the end of a page of 64 together
    order = ("b40", "a63", "17", "a64", "a65", "b41", "1", "6", "7", "8", "15")
    return {name: (alone | sharing)[name] for name in order}


PROMPTS = _prompts()


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield str(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def expected(root):
    """family -> prompt name -> tokens, each computed once."""
    known: dict[str, dict[str, list[int]]] = {}

    def of(family: str) -> dict[str, list[int]]:
        if family not in known:
            known[family] = greedy_outputs(model_folder(root, family), PROMPTS, OUTPUT_TOKENS)
        return known[family]

    return of


def engine_for(root: str, family: str = "llama", backend: str = "auto", chunked: bool = True, **settings) -> Engine:
    folder, latent_kv = model_folder(root, family), settings.get("latent_kv", True)
    batch = {"max_num_batched_tokens": 24 if chunked else MAX_LEN, "enable_chunked_prefill": chunked}
    sizes = {"max_model_len": MAX_LEN, "max_num_seqs": len(PROMPTS)}
    return make_engine(loaded(folder, backend, latent_kv), folder, **sizes, **batch, **settings)


def requests(priority: int = 0, names=tuple(PROMPTS)) -> list[Request]:
    return [Request(name, PROMPTS[name], PARAMS, priority=priority) for name in names]


def assert_preempted(engine: Engine, preemption: str) -> None:
    stats = engine.stats()
    moved = stats.counters
    assert stats.num_preemptions > 0, "the pool was meant to be too small"
    assert (moved.swapped_out_slots > 0) == (preemption != "recompute")
    assert (moved.swap_lost_slots > 0) == (preemption == "swap-small")
    if preemption != "swap-small" or not engine.config.enable_prefix_caching:  # else the cache may still have all of it
        assert (moved.swapped_in_slots > 0) == (preemption != "recompute")
    if preemption == "swap":
        assert stats.recomputed_tokens == 0
    elif not engine.config.enable_prefix_caching:  # else the cache may have kept all of it
        assert stats.recomputed_tokens > 0


# Page size, chunked, caching, preemption: every pair of them in the main ring, all of them in the full one.
PAIRS = [
    (1, True, False, "recompute"), (1, False, True, "swap"), (1, True, True, "swap-small"),
    (7, True, True, "recompute"), (7, False, False, "swap"), (7, True, False, "swap-small"),
    (16, False, True, "recompute"), (16, True, False, "swap"), (16, True, True, "swap-small"),
    (64, False, False, "recompute"), (64, True, True, "swap"), (64, True, False, "swap-small"),
]  # fmt: skip
EVERY = [one for one in itertools.product(PAGE_SIZES, (True, False), (False, True), PREEMPTION)
         if one[1] or one[3] != "swap-small"]  # fmt: skip
OVERLAPPING = [
    full(1, True, True, "swap", True), (7, False, True, "recompute", True), (16, True, False, "swap-small", True),
    full(64, True, True, "swap", True),
]  # fmt: skip


@pytest.mark.parametrize(
    ("page_size", "chunked", "caching", "preemption", "overlap"),
    [*((*one, False) if one in PAIRS else full(*one, False) for one in EVERY), *OVERLAPPING],
)
def test_paged(root, expected, page_size, chunked, caching, preemption, overlap):
    """The pool holds little more than one longest sequence, so the newest is preempted again and again.

    With prefix caching the same prompts come twice, the second time backwards, because LRU still holds the last ones:
    parts come from the cache, some of it evicted meanwhile. A wrong count at the end of a page shows in the prompts
    whose length is 0, 1 or page size - 1 beyond whole pages (vllm#50749). Overlapping: each step is planned and
    launched before the tokens of the one before are known.
    """
    engine = engine_for(
        root,
        chunked=chunked,
        slots=max(128, 3 * page_size),
        page_size=page_size,
        enable_prefix_caching=caching,
        async_scheduling=overlap,
        **preempting(preemption, max(32, page_size)),
    )
    assert Run(engine, requests()).tokens() == expected("llama")
    assert_preempted(engine, preemption)
    if caching:
        assert Run(engine, requests()[::-1]).tokens() == expected("llama")
        stats = engine.stats()
        assert 0 < stats.prefix_cache_hits < stats.prefix_cache_queries
        assert stats.counters.prefix_evictions > 0
        assert engine.reset_prefix_cache()
        assert engine.stats().kv.pages_cached == 0


@pytest.mark.parametrize(
    ("chunked", "overlap", "reservation", "preemption"),
    [(True, False, "pow2", "swap"), (False, False, "max", "recompute"), (True, True, "oracle", "swap-small"),
     full(True, False, "pow2", "recompute"), full(False, False, "max", "swap-small"),
     full(True, True, "oracle", "swap")],
)  # fmt: skip
def test_contiguous(root, expected, chunked, overlap, reservation, preemption):
    """A reservation never has to grow, so only somebody more urgent can drive a sequence out of the slab."""
    engine = engine_for(
        root,
        chunked=chunked,
        slots=2 * MAX_LEN,
        layout="contiguous",
        reservation=reservation,
        scheduling_policy="priority",
        async_scheduling=overlap,
        **preempting(preemption, 64),
    )
    names = list(PROMPTS)
    urgent = [requests(priority=1, names=names[5:8]), requests(priority=0, names=names[8:])]
    run = Run(engine, requests(priority=2, names=names[:5]), later={9: urgent[0], 20: urgent[1]})
    assert run.tokens() == expected("llama")
    assert_preempted(engine, preemption)


@pytest.mark.parametrize(
    ("overlap", "shares", "preemption"),
    [(False, 1, "swap-small"), full(False, 3, "recompute"), full(True, 1, "recompute"), (True, 3, "swap")],
)
def test_paged_by_priority(root, expected, overlap, shares, preemption):
    """Urgent requests drive running ones out in the middle of their prompts; several prompts advance side by side."""
    engine = engine_for(
        root,
        slots=128,
        page_size=7,
        scheduling_policy="priority",
        max_num_partial_prefills=shares,
        async_scheduling=overlap,
        **preempting(preemption, 32),
    )
    names = list(PROMPTS)
    later = {2: requests(priority=1, names=names[4:7]), 4: requests(priority=0, names=names[7:])}
    assert Run(engine, requests(priority=2, names=names[:4]), later).tokens() == expected("llama")
    assert_preempted(engine, preemption)


@pytest.mark.parametrize(
    ("page_size", "overlap", "preemption"),
    [full(1, False, "swap"), (16, False, "recompute"), (16, True, "swap-small")],
)
@pytest.mark.parametrize("family", ["gemma2", full("llama-wide"), "qwen3"])
def test_other_families(root, expected, family, page_size, overlap, preemption):
    """Sliding windows, softcaps and query norms under the same pressure."""
    sizes = {"slots": 128, "page_size": page_size, "async_scheduling": overlap}
    engine = engine_for(root, family, **sizes, **preempting(preemption, 32))
    assert Run(engine, requests()).tokens() == expected(family)
    assert_preempted(engine, preemption)


@pytest.mark.parametrize(
    ("family", "page_size", "chunked", "caching", "preemption", "overlap"),
    [
        ("gemma3", 1, True, True, "recompute", False), ("gemma3", 7, True, True, "swap", True),
        ("gemma3", 16, True, False, "swap", True), ("gemma2", 16, False, True, "swap", False),
        ("mistral", 1, True, True, "swap", False), ("mistral", 7, False, True, "recompute", True),
        ("mistral", 16, True, False, "swap", False),
        *(full(*one) for one in itertools.product(
            ("gemma3", "mistral"), (1, 7, 16), (True, False), (True,), ("recompute", "swap"), (True, False))),
    ],
)  # fmt: skip
def test_windows(root, expected, family, page_size, chunked, caching, preemption, overlap):
    """Windows of 24 tokens, which free pages of prompts of up to 65; twice, so that parts come from the cache."""
    model = loaded(model_folder(root, family))
    groups = len(model.kv_shape.groups(MAX_LEN))
    settings = {
        "page_size": page_size, "max_model_len": MAX_LEN, "max_num_seqs": len(PROMPTS),
        "max_num_batched_tokens": 24 if chunked else MAX_LEN, "enable_chunked_prefill": chunked,
    }  # fmt: skip
    pages = capacity_of(EngineConfig(**settings), model.kv_shape, 1 << 40).pages_of(MAX_LEN, 24 if chunked else MAX_LEN)
    slots = -(-pages * page_size // groups)
    engine = make_engine(
        model, model_folder(root, family), slots=slots, enable_prefix_caching=caching, async_scheduling=overlap,
        **settings, **preempting(preemption, slots),
    )  # fmt: skip
    assert 24 in engine.capacity.windows
    for order in (requests(), requests()[::-1])[: 1 + caching]:
        assert Run(engine, order).tokens() == expected(family)
    assert_preempted(engine, preemption)
    assert (engine.stats().prefix_cache_hits > 0) == caching


@pytest.mark.parametrize("kv_cache_dtype", ["auto", *KV_FORMATS])
def test_what_is_freed_outside_windows_is_not_missed(root, kv_cache_dtype):
    """Layers that share memory have scales of their own in fp8. The tokens are those of a cache that keeps all."""
    answers, groups = [], []
    for free_outside_window in (False, True):
        engine = engine_for(
            root, "gemma3", slots=256, page_size=7, kv_cache_dtype=kv_cache_dtype, enable_prefix_caching=True,
            free_outside_window=free_outside_window, **preempting("swap", 64),
        )  # fmt: skip
        answers.append([Run(engine, order).tokens() for order in (requests(), requests()[::-1])])
        groups.append(engine.capacity.windows)
    assert answers[0] == answers[1] and groups == [(None,), (None, 24, 24, 24, 24, 24)]


@pytest.mark.parametrize("reservation", ["max", "oracle"])
@pytest.mark.parametrize("family", ["gemma3", full("mistral")])
def test_rings_of_contiguous_windows(root, expected, family, reservation):
    """Reservations of up to 93 tokens, whose windows have rings of 64."""
    slots = 3 * MAX_LEN
    engine = engine_for(
        root, family, slots=slots, layout="contiguous", reservation=reservation, **preempting("swap", 64)
    )
    assert 64 in engine.capacity.page_sizes
    assert Run(engine, requests()).tokens() == expected(family)


CONTIGUOUS = {"layout": "contiguous", "reservation": "oracle", "scheduling_policy": "priority"}


@pytest.mark.parametrize(
    ("family", "latent_kv", "layout", "chunked", "caching", "preemption", "overlap"),
    [
        ("deepseek_v3", True, 1, True, True, "recompute", False), ("deepseek_v3", True, 7, True, False, "swap", True),
        ("deepseek_v3", True, 16, True, True, "swap-small", False), ("deepseek_v2", True, 7, False, True, "swap", True),
        ("deepseek_v3", True, "slab", False, True, "swap", False), ("deepseek_v3", False, 7, True, True, "swap", False),
        *(full(*one) for one in itertools.product(
            ("deepseek_v2", "deepseek_v3"), (True, False), (1, 7, 16, "slab"), (True, False), (True,),
            ("recompute", "swap"), (True, False))),
    ],
)  # fmt: skip
def test_latent_rows(root, expected, family, latent_kv, layout, chunked, caching, preemption, overlap):
    """A row for all heads or K and V of every head, twice, so that parts come from the cache."""
    paged = layout != "slab"
    where = {"page_size": layout, "enable_prefix_caching": caching} if paged else CONTIGUOUS
    settings = {"latent_kv": latent_kv, "async_scheduling": overlap, **where, **preempting(preemption, 32)}
    engine = engine_for(root, family, chunked=chunked, slots=128 if paged else 2 * MAX_LEN, **settings)
    assert engine.capacity.bytes_per_slot == 2 * 4 * ((32 + 16) if latent_kv else 4 * (12 + 16 + 20))
    later = {} if paged else {9: requests(priority=0, names=tuple(PROMPTS)[5:])}
    first = requests(priority=1, names=tuple(PROMPTS)[: None if paged else 5])
    for order in (first, first[::-1]):
        assert Run(engine, order, later).tokens() == expected(family)
    assert_preempted(engine, preemption)
    assert (engine.stats().prefix_cache_hits > 0) == (caching and paged)


@pytest.mark.parametrize("family", ["gemma2", *map(full, sorted(set(FAMILIES) - {"gemma2"}))])
def test_torch_reference_backend(root, expected, family):
    engine = engine_for(root, family, "torch", slots=128, page_size=7, enable_prefix_caching=True)
    assert Run(engine, requests()).tokens() == expected(family)
    assert_preempted(engine, "recompute")


@pytest.mark.parametrize(("overlap", "preemption"), [(False, "recompute"), (True, "swap")])
def test_eos_ends_a_sequence(root, expected, overlap, preemption):
    """With ids that come up in the middle of some outputs, at the token where generate ends; the id is kept.

    Overlapping, one more token is being computed by then, and nobody sees it.
    """
    folder = model_folder(root)
    eos = tuple({tokens[i] for tokens, i in zip(expected("llama").values(), (21, 22, 25), strict=False)})
    known = greedy_outputs(folder, PROMPTS, OUTPUT_TOKENS, eos)
    plain = loaded(folder)
    model = replace(plain, info=replace(plain.info, eos_token_ids=eos))
    sizes = {"slots": 128, "max_model_len": MAX_LEN, "max_num_seqs": len(PROMPTS), "max_num_batched_tokens": 24}
    engine = make_engine(model, folder, page_size=7, async_scheduling=overlap, **sizes, **preempting(preemption, 32))
    run = Run(engine, [Request(name, prompt, replace(PARAMS, ignore_eos=False)) for name, prompt in PROMPTS.items()])
    assert run.tokens() == known
    reasons = {name: answer.reason for (name, _), answer in run.answers.items()}
    assert reasons == {name: "stop" if tokens[-1] in eos else "length" for name, tokens in known.items()}
    assert set(reasons.values()) == {"stop", "length"}
    assert engine.stats().num_preemptions > 0


def test_dummy_weights_equal_hf_with_the_same_seed(root):
    """Seeded random weights of a bare config are transformers' own initialisation under that seed."""
    path = f"{model_folder(root)}/config.json"
    ours, again, other = (load_model(EngineConfig(model=path, seed=seed, device="cpu")) for seed in (11, 11, 12))
    assert ours.info.weights_fingerprint == again.info.weights_fingerprint != other.info.weights_fingerprint
    torch.manual_seed(11)
    theirs = AutoModelForCausalLM.from_config(ours.model.config, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, ours.model.lm_head.weight)


# Steps replayed from static buffers, as CUDA graphs are: the fake capture records operations and runs them again. The
# torch backend, because our own kernels for a CPU's layers are not among them.


def graphed(engine: Engine) -> FakeCapture:
    executor, config = engine.executor, engine.config
    sizes = GraphSizes.of(config.max_num_seqs, config.max_num_batched_tokens)
    capture = FakeCapture(executor.host)
    assert executor.forward.capture_graphs(sizes, executor.page_starts, MAX_LEN, capture)
    return capture


@pytest.mark.parametrize(
    ("layout", "preemption", "overlap"),
    [
        ({"page_size": 1}, "swap", False),
        ({"page_size": 7, "enable_prefix_caching": True}, "swap", True),
        ({"page_size": 16}, "recompute", True),
        ({"layout": "contiguous", "reservation": "oracle"}, "recompute", False),
    ],
    ids=["1", "7-cached", "16", "contiguous"],
)
def test_replayed_steps(root, expected, layout, preemption, overlap):
    slots = 128 if "page_size" in layout else 2 * MAX_LEN
    settings = {"backend": "torch", "async_scheduling": overlap, **layout, **preempting(preemption, 32)}
    engine = engine_for(root, "gemma2", slots=slots, **settings)
    capture = graphed(engine)
    assert Run(engine, requests()).tokens() == expected("gemma2")
    stats = engine.stats()
    assert capture.replayed == stats.replayed_steps == stats.steps, "steps with prompts too"
    if "page_size" in layout:  # an oracle's reservation is never outgrown
        assert_preempted(engine, preemption)


@pytest.mark.parametrize("params", [{"n": 3, "top_p": 0.9}, full({"best_of": 4}), {"beam_width": 3}])
def test_sampled_tokens_do_not_depend_on_graphs(root, params):
    """Forks, candidates and beams read the logits buffer that the next replay writes over."""
    sampling = replace(PARAMS, **{"temperature": 0.8, "seed": 5, **params})
    answers = []
    for with_graphs in (False, True):
        engine = engine_for(root, "gemma2", "torch", slots=1024, page_size=7)
        capture = graphed(engine) if with_graphs else None
        run = Run(engine, [Request(name, PROMPTS[name], sampling) for name in list(PROMPTS)[5:]])
        answers.append({name: answer.tokens for name, answer in run.answers.items()})
        assert capture is None or capture.replayed > 0
    assert answers[0] == answers[1]


def test_engines_that_share_a_model_step_in_turns(root, expected):
    """Each has its own KV cache, and each call routes the model's attention to the engine that steps."""
    layouts = [{"page_size": 16}, {"layout": "contiguous"}, {"page_size": 7}]
    engines = [engine_for(root, backend="torch", slots=2048, **layout) for layout in layouts]
    graphed(engines[2])
    answers: list[dict[str, list[int]]] = [{} for _ in engines]
    for engine in engines:
        for request in requests():
            engine.add_request(request)
    while any(engine.has_work() for engine in engines):
        for engine, tokens in zip(engines, answers, strict=True):
            for output in engine.step() if engine.has_work() else ():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert answers == [expected("llama")] * 3
