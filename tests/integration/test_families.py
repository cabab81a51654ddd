"""Every family of ``tests.support.families``: greedy tokens equal to its own ``generate``, or refused by a named check.

The oracle is the Hugging Face model with its own cache, eager attention and layers, each prompt alone, in float32.
Ours packs all prompts, in chunks, with pages of seven tokens in a pool too small for all, caches prefixes, and is run
twice, the second time over used pages. transformers 5.23 has all of them; a family that the installed version does not
know is skipped.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvbench_engine.build import assemble_engine
from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.model.loader import load_model
from kvbench_engine.model.spec import find_model
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.families import (
    ACCEPTED,
    LATENT,
    REFUSED,
    VOCABULARY,
    one_thread,  # noqa: F401
    write_config,
)

pytestmark = pytest.mark.usefixtures("one_thread")

OUTPUT_TOKENS = 6
PROMPT_LENGTHS = (1, 7, 20, 27)
PAGE_SIZE = 7
MAX_LEN = 35
NUM_PAGES = 9  # the prompts and their answers need twelve


def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(2, VOCABULARY) for _ in range(length)) for length in PROMPT_LENGTHS]


def answer(oracle: PreTrainedModel, prompt: tuple[int, ...]) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    output = oracle.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=OUTPUT_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tuple(output[0, len(prompt) :].tolist())


def run(engine: Engine, order: list[int]) -> list[tuple[int, ...]]:
    """Answers to all prompts, submitted at once in the given order."""
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True)
    tokens: dict[str, list[int]] = {}
    for index in order:
        tokens[str(index)] = []
        engine.add_request(Request(str(index), prompts()[index], params))
    for _ in range(500):
        if not engine.has_work():
            break
        for output in engine.step():
            tokens[output.request_id].extend(output.token_ids)
    assert not engine.has_work(), "the engine did not finish"
    return [tuple(tokens[str(index)]) for index in sorted(order)]


def ring(families: Iterable[str]) -> list[Any]:
    """A few in the main ring: GQA, layer norms, windows, latent attention, experts; refusals by each check."""
    main = {"llama llama3-rope", "gpt2", "gemma2", "deepseek_v3", "qwen3_moe", "bert", "doge", "diffllama", "mamba",
            "bloom", "phi3 long-rope", "phimoe windowed"}  # fmt: skip
    return [name if name in main else pytest.param(name, marks=pytest.mark.full) for name in families]


@pytest.mark.parametrize("family", ring(ACCEPTED))
def test_greedy_tokens_equal_generate(tmp_path, family):
    path = write_config(tmp_path, family, ACCEPTED[family])
    loaded = load_model(EngineConfig(model=path, device="cpu"))
    planned = find_model(path).kv_shape("float32")
    if LATENT.items() <= ACCEPTED[family].items():
        assert planned == loaded.kv_shape, "planned is not what the model sends"
    assert [kv.window for kv in planned.layers] == [kv.window for kv in loaded.kv_shape.layers]
    loaded.model.set_attn_implementation("eager")  # the engine below replaces attention and layers
    expected = [answer(loaded.model, prompt) for prompt in prompts()]
    longest = prompts()[-1]
    other_past = (*longest[:-4], *(token - 1 for token in longest[-4:-1]), longest[-1])
    assert answer(loaded.model, other_past) != expected[-1], "a model that ignores the past proves nothing"

    config = EngineConfig(
        model=path,
        device="cpu",
        page_size=PAGE_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=len(PROMPT_LENGTHS),
        max_num_batched_tokens=11,
        enable_prefix_caching=True,
        kv_budget=NUM_PAGES * PAGE_SIZE * loaded.kv_shape.bytes_per_slot + len(PROMPT_LENGTHS) * MAX_LEN * 8,
    )
    engine = assemble_engine(config, loaded)
    order = list(range(len(PROMPT_LENGTHS)))
    assert run(engine, order) == expected
    assert run(engine, order[::-1]) == expected
    engine.check_integrity()
    assert engine.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("family", ring(REFUSED))
def test_family_is_refused_by_the_name_of_the_check(tmp_path, family):
    settings, check = REFUSED[family]
    path = write_config(tmp_path, family, settings)
    with pytest.raises(ValueError, match=f"'{family.split()[0]}' is refused by the load gate, check '{check}'"):
        load_model(EngineConfig(model=path, device="cpu"))


def test_the_number_of_families():
    assert len({family.split()[0] for family in ACCEPTED}) >= 60
