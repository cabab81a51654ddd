"""What prefix caching costs when nothing is shared, and gains when half or three quarters of each prompt is.

The shape is 2048-in/128-out scaled by four to llama-32m: 512 tokens in, 32 out. Turns with and without the cache
alternate, and the figure is the median of the paired ratios. Run with ``make bench``.
"""

from __future__ import annotations

import statistics

import numpy as np
import pytest
from bench_engine import make_engine, prompts, run_load
from bench_timing import choose, note

from kvbench_engine.engine import Engine

PROMPT, OUTPUT = choose(full=(512, 32), quick=(512, 32), smoke=(64, 2))
REQUESTS = choose(full=12, quick=8, smoke=2)
TURNS = choose(full=5, quick=3, smoke=1)
PAGE_SIZE = 16


@pytest.fixture(scope="module")
def engines() -> dict[bool, Engine]:
    """One engine without and one with prefix caching, on the same loaded model."""
    return {
        caching: make_engine(
            max_model_len=PROMPT + OUTPUT, max_num_seqs=REQUESTS, max_num_batched_tokens=512, page_size=PAGE_SIZE,
            kv_budget=choose(full=400, quick=400, smoke=4) * 2**20, enable_prefix_caching=caching,
        )
        for caching in (False, True)
    }  # fmt: skip


def run(engine: Engine, texts: list[tuple[int, ...]]) -> tuple[float, float]:
    """Seconds for all prompts but the first, and the hit rate of their tokens.

    The first has put the shared part into the cache before (primed), with and without the cache.
    """
    assert engine.reset_prefix_cache()
    run_load(engine, texts[:1], 1, 1)
    turn = run_load(engine, texts[1:], REQUESTS, OUTPUT)
    return turn.seconds, turn.hit_rate


@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", choose(full=[0.0, 0.5, 0.75], quick=[0.0, 0.5], smoke=[0.5]))
def test_prefix_caching(benchmark, engines, share):
    rng = np.random.default_rng(0)
    vocab = engines[True].model_info.vocab_size
    ratios, seconds, hits = [], {False: [], True: []}, []

    def pair() -> None:
        texts = prompts(rng, REQUESTS + 1, PROMPT, int(PROMPT * share), vocab)  # new ones in every turn
        for caching in (False, True) if len(ratios) % 2 else (True, False):
            took, hit_rate = run(engines[caching], texts)
            seconds[caching].append(took)
            if caching:
                hits.append(hit_rate)
        ratios.append(seconds[False][-1] / seconds[True][-1])

    pair()  # warm
    for each in (ratios, hits, *seconds.values()):
        each.clear()
    benchmark.group = "prefix caching by the share of each prompt that is shared"
    benchmark.pedantic(pair, rounds=TURNS, iterations=1)
    tokens = REQUESTS * OUTPUT
    note(
        benchmark, hit_rate=hits[-1], gain=statistics.median(ratios), gain_lowest=min(ratios),
        gain_highest=max(ratios), plain_tokens_per_s=tokens / statistics.median(seconds[False]),
        caching_tokens_per_s=tokens / statistics.median(seconds[True]),
    )  # fmt: skip
    assert hits[-1] == pytest.approx(share, abs=PAGE_SIZE / PROMPT)
