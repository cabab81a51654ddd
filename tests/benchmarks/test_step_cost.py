"""What the bookkeeping of a step costs: scheduler, managers and pool around an executor that does nothing.

    taskset -c 0 python -m pytest tests/benchmarks/test_step_cost.py

The target: 256 sequences at page size 16 decode in at most 1 ms a step on one core. Figures are in ``extra_info``
(``--benchmark-json``), from the median round: us_per_step and ns_per_sequence; ns_per_token of prefixes; ns_per_page of
allocation. They include everything that ``Engine.step`` does but the forward pass: schedule, count, commit, append,
and the accounts.
"""

from __future__ import annotations

import pytest
from bench_timing import choose, note

from kvbench_engine.config import EngineConfig
from kvbench_engine.engine import Engine
from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.layouts import make_kv_manager
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.scheduling.step_plan import Computed, StepPlan
from kvbench_engine.sequence import Request, SamplingParams, Sequence

SLOT_BYTES = 4096
STEPS = choose(full=64, quick=64, smoke=4)  # a round: each sequence takes a new page four times at page size 16


class NullExecutor:
    """Draws the same token for everybody, in no time."""

    def __init__(self):
        self.model_info = ModelInfo("null", 32_000, None, (), None)
        self.phase_seconds: dict[str, float] = {}

    def launch(self, plan: StepPlan) -> Computed:
        return Computed([7 if item.samples else None for item in plan.scheduled])


def make_engine(sequences: int, pages: int, page_size: int, length: int, **settings) -> Engine:
    """An engine whose ``sequences`` have just begun to decode; each may grow to ``length`` tokens."""
    config = EngineConfig(
        max_model_len=length,
        max_num_seqs=sequences,
        max_num_batched_tokens=max(8192, sequences),
        page_size=page_size,
        **settings,
    )
    per_seq = -(-length // page_size)
    slots = pages * page_size
    capacity = KVCapacity(
        slots * SLOT_BYTES, SLOT_BYTES, 0, page_size, pages, slots, per_seq, 8 * per_seq * sequences, 0, 0
    )
    engine = Engine(config, NullExecutor(), make_kv_manager(config, capacity))
    for i in range(sequences):
        params = SamplingParams(max_tokens=length, ignore_eos=True)
        engine.add_request(Request(str(i), tuple((i + j) % 1000 for j in range(17)), params))
    while engine.scheduler.num_waiting or any(seq.num_output < 2 for seq in engine.scheduler.running):
        engine.step()
    return engine


def measure(benchmark, sequences: int, engine: Engine) -> None:
    def steps() -> None:
        for _ in range(STEPS):
            engine.step()

    benchmark.pedantic(steps, rounds=choose(full=8, quick=4, smoke=1), warmup_rounds=1)
    per_step = benchmark.stats.stats.median / STEPS
    assert len(engine.scheduler.running) == sequences, "a sequence ended or was preempted: not what was to be measured"
    note(benchmark, us_per_step=per_step * 1e6, ns_per_sequence=per_step / sequences * 1e9)


LENGTH = 17 + STEPS * 10
MANY = choose(full=256, quick=256, smoke=8)  # sequences


@pytest.mark.parametrize("sequences", choose(full=[1, 4, 16, 64, 256, 1024], quick=[16, 256], smoke=[4]))
def test_decode_step_by_running_sequences(benchmark, sequences):
    benchmark.group = "decode step, page size 16, by running sequences"
    measure(benchmark, sequences, make_engine(sequences, sequences * 64, 16, LENGTH))


@pytest.mark.parametrize(
    "pages", choose(full=[1_000, 10_000, 100_000, 1_000_000], quick=[1_000, 1_000_000], smoke=[1_000])
)
def test_decode_step_by_pages(benchmark, pages):
    """Nothing may depend on the size of the pool."""
    benchmark.group = "decode step of 16 sequences, by pages in the pool"
    measure(benchmark, 16, make_engine(16, pages, 16, LENGTH))


PAGE_SIZES = [{"page_size": page_size} for page_size in choose(full=[1, 8, 16, 64, 256], quick=[1, 256], smoke=[8])]
SETTINGS = (
    {"enable_prefix_caching": True},
    {"preemption_mode": "swap"},
    {"scheduling_policy": "priority"},
    {"max_num_partial_prefills": 2},
    {"layout": "contiguous"},
)


@pytest.mark.parametrize("settings", [*PAGE_SIZES, *SETTINGS], ids=str)
def test_decode_step_by_setting(benchmark, settings):
    benchmark.group = f"decode step of {MANY} sequences, page size 16, by setting"
    page_size = LENGTH if "layout" in settings else settings.get("page_size", 16)
    pages = MANY if "layout" in settings else MANY * (-(-LENGTH // page_size) + 16)
    measure(benchmark, MANY, make_engine(MANY, pages, length=LENGTH, **{**settings, "page_size": page_size}))


@pytest.mark.parametrize("page_size", choose(full=[1, 8, 16, 32, 64, 128, 256], quick=[8, 16, 256], smoke=[16]))
@pytest.mark.parametrize("cached", [False, True], ids=["stored", "found"])
def test_prefixes(benchmark, page_size, cached):
    """The pages of a prompt of 32,768 tokens, stored in the prefix cache, or found there by another request."""
    benchmark.group = "a prompt of 32,768 tokens in the prefix cache, by page size"
    tokens = tuple((i * 7919) % 32_000 for i in range(32_768))
    count = len(tokens) // page_size

    def filled() -> tuple[PrefixCache, PagePool, Sequence]:
        cache, seq = PrefixCache(page_size, count), Sequence.of(Request("x", tokens))
        pool = PagePool(count, cache.evict)
        seq.pages = [pool.allocate() for _ in range(count)]
        if cached:
            cache.insert(seq, count, pool)
            seq = Sequence.of(Request("y", tokens))
        return (cache, pool, seq), {}

    def run(cache: PrefixCache, pool: PagePool, seq: Sequence) -> None:
        cache.match(seq) if cached else cache.insert(seq, count, pool)

    benchmark.pedantic(run, setup=filled, rounds=choose(full=40, quick=20, smoke=1))
    note(benchmark, ns_per_token=benchmark.stats.stats.median / len(tokens) * 1e9)


@pytest.mark.parametrize("pages", choose(full=[1_000, 1_000_000], quick=[1_000, 1_000_000], smoke=[1_000]))
@pytest.mark.parametrize("cached", [False, True], ids=["plain", "cached"])
def test_allocate_and_release(benchmark, pages, cached):
    """1,000 pages taken and given back; ``cached``: each is marked, so that every allocation evicts."""
    benchmark.group = "allocate and release a page, by pages in the pool"
    pool = PagePool(pages, (lambda page: ()) if cached else None)

    def cycle() -> None:
        taken = [pool.allocate() for _ in range(1_000)]
        if cached:
            for page in taken:
                pool.mark_cached(page)
        for page in reversed(taken):
            pool.release(page)

    benchmark.pedantic(cycle, rounds=choose(full=100, quick=50, smoke=1), warmup_rounds=5)
    note(benchmark, ns_per_page=benchmark.stats.stats.median / 1_000 * 1e9)
