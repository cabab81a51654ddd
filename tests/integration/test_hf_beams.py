"""Beams against Hugging Face ``generate``, all prompts at once against each alone, on roomy and on tiny pools."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache

import pytest
import torch

from engine.sequence import SamplingParams
from tests.support.fork_cases import MAX_LEN, POOLS, PROMPTS, ROOMY, assert_pressed, engine_for, requests
from tests.support.hf_parts import Run, model_folder, one_thread, oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[str]:
    with one_thread():
        yield model_folder(str(tmp_path_factory.mktemp("models")))


def beams_of_generate(
    folder: str, prompt: tuple[int, ...], params: SamplingParams, eos: tuple[int, ...]
) -> list[list[int]]:
    ids = torch.tensor([prompt])
    rows = oracle(folder).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=params.beam_width,
        num_return_sequences=params.n,
        do_sample=False,
        max_new_tokens=params.max_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        length_penalty=params.length_penalty,
        early_stopping=params.early_stopping,
    )
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
    [(3, 1.0, False), (4, -1.0, "never"), (8, 0.0, True)],
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
    [(1, True, "recompute"), (7, False, "swap"), (16, False, "swap-small"), (16, True, "swap-overlapping")],
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
