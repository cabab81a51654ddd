"""What prefix caching costs when nothing is shared, and gains when half or three quarters of each prompt is.

The shape is 2048-in/128-out scaled by four to llama-32m: 512 tokens in, 32 out. Turns with and without the cache
alternate in one sitting, and the figure is the median of the paired ratios. Run with ``make bench``.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest

from engine.attention import install
from engine.build import assemble_engine
from engine.config import EngineConfig
from engine.engine import Engine
from engine.model_loader import load_model
from engine.sequence import Request, SamplingParams

PROMPT, OUTPUT, REQUESTS, TURNS = 512, 32, 24, 5


@pytest.fixture(scope="module")
def engines() -> dict[bool, Engine]:
    """One engine without and one with prefix caching, on the same loaded model."""

    def config(caching: bool) -> EngineConfig:
        return EngineConfig(
            model="llama-32m", load_format="dummy", device="cpu", max_model_len=1024, max_num_seqs=REQUESTS,
            max_num_batched_tokens=512, kv_budget=400 * 2**20, enable_prefix_caching=caching,
        )  # fmt: skip

    loaded = load_model(config(False))
    return {caching: assemble_engine(config(caching), loaded) for caching in (False, True)}


def prompts(rng: np.random.Generator, share: float) -> list[tuple[int, ...]]:
    """Prompts whose first ``share`` is the same for all, and new ones in every turn."""
    common = rng.integers(0, 8192, int(PROMPT * share)).tolist()
    return [(*common, *rng.integers(0, 8192, PROMPT - len(common)).tolist()) for _ in range(REQUESTS)]


def run(engine: Engine, turn: int, texts: list[tuple[int, ...]]) -> float:
    """Seconds for all prompts, after the shared part has been computed once (primed), with and without the cache."""
    install(engine.executor.model, engine.executor.host)  # both share the model, which has one host
    assert engine.reset_prefix_cache()
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    engine.add_request(Request(f"{turn}-prime", texts[0], SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work():
        engine.step()
    started = time.perf_counter()
    for index, text in enumerate(texts[1:]):
        engine.add_request(Request(f"{turn}-{index}", text, params))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.75])
def test_prefix_caching(benchmark, engines, share):
    rng = np.random.default_rng(0)
    ratios, seconds, hits = [], {False: [], True: []}, 0.0

    def pair(turn: int) -> None:
        texts = prompts(rng, share)
        before = engines[True].stats()
        for caching in (False, True) if turn % 2 else (True, False):
            seconds[caching].append(run(engines[caching], turn, texts))
        after = engines[True].stats()
        ratios.append(seconds[False][-1] / seconds[True][-1])
        nonlocal hits
        hits = (after.prefix_cache_hits - before.prefix_cache_hits) / (PROMPT * (REQUESTS - 1))

    turns = iter(range(-1, TURNS))
    pair(next(turns))  # warm
    ratios.clear()
    benchmark.pedantic(lambda: pair(next(turns)), rounds=TURNS, iterations=1)
    tokens = (REQUESTS - 1) * OUTPUT
    benchmark.extra_info.update(
        share=share,
        hit_rate=round(hits, 3),
        gain=round(statistics.median(ratios), 3),
        gain_lowest=round(min(ratios), 3),
        gain_highest=round(max(ratios), 3),
        output_tokens_per_s={str(c): round(tokens / statistics.median(s[1:]), 1) for c, s in seconds.items()},
    )
    assert hits == pytest.approx(share, abs=16 / PROMPT)
