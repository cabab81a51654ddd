"""The whole engine in process, without server or load client: the counterpart of the load sweep, and its phases.

In ``extra_info``: output_tokens_per_s (median of the turns), ttft_p50_ms and ttft_p95_ms (from adding a request to the
end of the step that brought its first token, over all requests of all turns), steps and step_ms, hit_rate of the
prompts' tokens, and the share of the time that each phase of a step took (X_pct; what is missing to 100 is the load's
own Python).
"""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
from bench_engine import make_engine, prompts, run_load, summary
from bench_kv import CONTIGUOUS
from bench_timing import CUDA, choose, note

PROMPT, SHARED = choose(full=(128, 64), quick=(128, 64), smoke=(24, 16))  # tokens; half is a system prompt
OUTPUT = choose(full=16, quick=16, smoke=2)
CONCURRENCY = choose(full=[32, 256] if CUDA else [4, 32], quick=[256] if CUDA else [32], smoke=[2])
PAGE_SIZES = choose(full=[8, 16, 64, CONTIGUOUS], quick=[16, CONTIGUOUS], smoke=[8])
LAYOUTS = [(p, caching) for p in PAGE_SIZES for caching in (False, True) if not caching or p != CONTIGUOUS]
KV_DTYPES = choose(
    full=["auto", "fp8_e4m3", "int8_per_token_head"], quick=["auto", "int8_per_token_head"], smoke=["auto"]
)
KV_BUDGET = choose(full=128 * 2**20, quick=128 * 2**20, smoke=2**20) * (64 if CUDA else 1)


def settings(page_size: int, concurrency: int, kv: str, caching: bool) -> dict:
    """Of one cell. Every layout, page size and format has the same bytes."""
    layout = {"layout": "contiguous"} if page_size == CONTIGUOUS else {"page_size": page_size}
    return layout | {
        "kv_cache_dtype": kv, "enable_prefix_caching": caching, "max_num_seqs": concurrency, "kv_budget": KV_BUDGET,
        "max_model_len": PROMPT + OUTPUT, "max_num_batched_tokens": 8192 if CUDA else 512,
    }  # fmt: skip


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("page_size", "caching"), LAYOUTS)
@pytest.mark.parametrize("kv", KV_DTYPES)
@pytest.mark.parametrize("concurrency", CONCURRENCY)
def test_engine(benchmark, concurrency, kv, page_size, caching):
    """A closed loop; every turn has new prompts, and the prefix cache emptied before it."""
    engine = make_engine(**settings(page_size, concurrency, kv, caching))
    rng, turns = np.random.default_rng(0), []
    requests = choose(full=max(16, concurrency * 3 // 2), quick=max(16, concurrency * 3 // 2), smoke=4)

    def turn() -> None:
        assert engine.reset_prefix_cache()
        texts = prompts(rng, requests, PROMPT, SHARED, engine.model_info.vocab_size)
        turns.append(run_load(engine, texts, concurrency, OUTPUT))

    run_load(engine, prompts(rng, concurrency, PROMPT, 0, engine.model_info.vocab_size), concurrency, 2)  # unmeasured
    benchmark.group = f"engine in process, concurrency {concurrency}"
    benchmark.pedantic(turn, rounds=choose(full=2, quick=2, smoke=1), iterations=1)
    note(benchmark, requests=requests, **summary(turns))


@pytest.mark.parametrize("concurrency", CONCURRENCY)
def test_phases(benchmark, monkeypatch, concurrency):
    """Decode steps only: where a step's time goes, and what reading the clock for it costs.

    clock_pct: the time of a step's clock readings, with the addition that follows each, over the step's time.
    """
    engine = make_engine(**settings(16, concurrency, "auto", False))
    rng = np.random.default_rng(0)
    texts = prompts(rng, concurrency, PROMPT // 2, 0, engine.model_info.vocab_size)
    length = PROMPT // 2 + OUTPUT
    turns = []

    def turn() -> None:
        turns.append(run_load(engine, texts, concurrency, length))

    turn()
    turns.clear()
    benchmark.group = "phases of a step, mostly decodes"
    benchmark.pedantic(turn, rounds=choose(full=3, quick=2, smoke=1), iterations=1)
    figures = summary(turns)
    readings = clock_readings(monkeypatch, engine, texts, concurrency) * seconds_a_reading()
    note(benchmark, **figures, clock_pct=100 * readings / (figures["step_ms"] / 1e3))


def clock_readings(monkeypatch, engine, texts, concurrency: int) -> float:
    """How often a step reads the clock, counted."""
    real, calls = time.perf_counter, itertools.count()

    def counting() -> float:
        next(calls)
        return real()

    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", counting)
        turn = run_load(engine, texts, concurrency, 4)
    of_the_load = 2 + len(texts) + turn.steps  # run_load's own: begin and end, one a request, one a step
    return (next(calls) - of_the_load) / turn.steps


def seconds_a_reading(number: int = 100_000) -> float:
    """Reading the clock, and adding the difference to a dictionary's value."""
    phases, last = {"phase": 0.0}, 0.0
    started = time.perf_counter()
    for _ in range(number):
        now = time.perf_counter()
        phases["phase"] += now - last
        last = now
    return (time.perf_counter() - started) / number
