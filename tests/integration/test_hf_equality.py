"""Greedy tokens of our engine against Hugging Face ``generate``, token for token, in float32.

The oracle runs each prompt alone with HF's own cache and eager attention: it knows nothing of pages, chunks or
batches. Weights are random with a wide spread, so that the winning logit is clear of rounding.
"""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_loader import LoadedModel, load_model
from engine.sequence import Request, SamplingParams

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": {"model_type": "llama"},
    "qwen3": {"model_type": "qwen3"},
    # alternating sliding-window and full layers, softcap on the scores, query scale of its own
    "gemma2": {"model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 24, "num_hidden_layers": 4},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 24, "num_hidden_layers": 6},
}
BACKEND = "auto"
MAX_LEN = 160
OUTPUT_TOKENS = 24
PROMPT_LENGTHS = (1, 7, 8, 9, 16, 17, 63, 64, 65, 100)


@cache
def model_folder(family: str, root: str) -> str:
    """A local folder with safetensors, so that the oracle and the engine load the very same weights."""
    config = AutoConfig.for_model(**{**COMMON, **FAMILIES[family]})
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    folder = f"{root}/{family}"
    model.save_pretrained(folder)
    return folder


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    rng = random.Random(3)
    return tuple(tuple(rng.randrange(2, 211) for _ in range(n)) for n in PROMPT_LENGTHS)


@cache
def expected(folder: str) -> tuple[tuple[int, ...], ...]:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    answers = []
    for prompt in prompts():
        ids = torch.tensor([prompt])
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=OUTPUT_TOKENS,
            eos_token_id=None,
        )
        answers.append(tuple(output[0, len(prompt) :].tolist()))
    return tuple(answers)


@cache
def loaded(folder: str, backend: str) -> LoadedModel:
    return load_model(EngineConfig(model=folder, kernel_backend=backend, device="cpu"))


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> str:
    return str(tmp_path_factory.mktemp("models"))


def run(engine: Engine, backwards: bool = False) -> list[tuple[int, ...]]:
    """All prompts at once, integrity checked after every step; tokens by prompt."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    numbered = list(enumerate(prompts()))
    for index, prompt in reversed(numbered) if backwards else numbered:
        engine.add_request(Request(str(index), prompt, params))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(len(prompts()))}
    for _ in range(3000):
        if not engine.has_work():
            break
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
        engine.check_integrity()
    assert not engine.has_work(), "the engine did not finish"
    assert engine.stats().kv.pages_owned == 0
    return [tuple(tokens[str(i)]) for i in range(len(prompts()))]


def engine_for(folder: str, backend: str, *, slots: int, **settings) -> Engine:
    model = loaded(folder, backend)
    config = EngineConfig(
        model=folder,
        device="cpu",
        max_model_len=MAX_LEN,
        max_num_seqs=len(prompts()),
        kv_budget=slots * model.kv_shape.bytes_per_slot + len(prompts()) * MAX_LEN * 8,
        **settings,
    )
    return assemble_engine(config, model)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "unchunked"])
@pytest.mark.parametrize("page_size", [1, 8, 16, 64])
@pytest.mark.parametrize("family", FAMILIES)
def test_paged_under_preemption(root, family, page_size, chunked):
    """The pool holds one longest sequence and little more, so the newest is preempted again and again."""
    folder = model_folder(family, root)
    engine = engine_for(
        folder,
        BACKEND,
        slots=3 * 64 + 64 if page_size == 64 else 192,
        page_size=page_size,
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=24 if chunked else MAX_LEN,
    )
    assert run(engine) == list(expected(folder))
    if page_size < 64:
        assert engine.stats().num_preemptions > 0, "the pool was meant to be too small"
        assert engine.stats().recomputed_tokens > 0


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "unchunked"])
@pytest.mark.parametrize("family", FAMILIES)
def test_contiguous(root, family, chunked):
    folder = model_folder(family, root)
    engine = engine_for(
        folder,
        BACKEND,
        slots=3 * MAX_LEN,
        layout="contiguous",
        enable_chunked_prefill=chunked,
        max_num_batched_tokens=24 if chunked else MAX_LEN,
    )
    assert engine.capacity.num_pages == 3
    assert run(engine) == list(expected(folder))
    assert engine.stats().num_preemptions == 0


@pytest.mark.parametrize("page_size", [1, 8, 16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_prefix_caching_with_a_small_pool(root, family, page_size):
    """The same prompts twice: the second time parts come from the cache, some of it evicted meanwhile."""
    folder = model_folder(family, root)
    engine = engine_for(
        folder, BACKEND, slots=256, page_size=page_size, enable_prefix_caching=True, max_num_batched_tokens=32
    )
    assert run(engine) == list(expected(folder))
    assert run(engine, backwards=True) == list(expected(folder))  # backwards: LRU still holds the last ones
    stats = engine.stats()
    assert 0 < stats.prefix_cache_hits < stats.prefix_cache_queries
    assert engine.reset_prefix_cache()
    assert engine.stats().kv.pages_cached == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_torch_reference_backend(root, family):
    folder = model_folder(family, root)
    engine = engine_for(folder, "torch", slots=400, page_size=8, max_num_batched_tokens=48)
    assert run(engine) == list(expected(folder))


def test_dummy_weights_equal_hf_with_the_same_seed():
    """Seeded random weights of a bare config are transformers' own initialisation under that seed."""
    config = EngineConfig(model="llama-32m", seed=11, device="cpu")
    ours = load_model(config)
    again = load_model(config)
    other = load_model(EngineConfig(model="llama-32m", seed=12, device="cpu"))
    assert ours.info.weights_fingerprint == again.info.weights_fingerprint != other.info.weights_fingerprint
    torch.manual_seed(11)
    theirs = AutoModelForCausalLM.from_config(ours.model.config, dtype=torch.float32)
    assert torch.equal(theirs.lm_head.weight, ours.model.lm_head.weight)
