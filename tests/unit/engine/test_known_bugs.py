"""Bugs of allocation and scheduling that other engines shipped: one test each, named after it."""

import numpy as np
import pytest

from engine.kv.budget import KVCapacity
from engine.kv.paged import PagedKVManager
from engine.sequence import Sequence
from tests.support.engine_parts import (
    CountingExecutor,
    collect,
    drain,
    request,
    small_engine,
    undisturbed,
)


def serve(engine, requests, limit=2000):
    for one in requests:
        engine.add_request(one)
    return drain(engine, limit)


def test_a_request_that_outgrows_the_pool_harms_nobody():
    """nano-vllm: a running request that outgrew the pool preempted itself, was admitted again, and killed the engine.

    Here each fits alone and no two fit together: who came later gives way, and all end.
    """
    requests = [request(name, range(i, i + 4), max_tokens=28) for i, name in enumerate("abc")]
    engine = small_engine(32, page_size=4)
    assert serve(engine, requests) == undisturbed(requests)
    assert engine.stats().num_preemptions > 0
    assert engine.stats().finished == {"length": 3}


def test_a_request_that_no_pool_of_this_size_can_hold_is_refused_alone():
    """nano-vllm: the same, from the start: prompt and output together are more than the whole pool."""
    config = small_engine(64, page_size=4).config
    capacity = KVCapacity(0, 128, 0, 4, 5, 20, 8, 0)  # 5 pages of 4: less than max_model_len
    manager = PagedKVManager(config.max_num_seqs, capacity, False)
    assert manager.fits(10, 10)
    assert not manager.fits(11, 10)
    engine = small_engine(64, page_size=4)
    engine.kv = engine.scheduler.kv = manager
    engine.executor.watch(manager)
    with pytest.raises(ValueError, match="prompt and max_tokens come to 21 tokens and the KV budget holds 20"):
        engine.add_request(request("large", 11, max_tokens=10))
    one = request("fits", 10, max_tokens=10)
    assert serve(engine, [one]) == undisturbed([one])


def test_duplicates_computed_side_by_side_do_not_orphan_cached_pages():
    """nano-vllm: two sequences that computed the same prefix at once left a cached page that nobody could reach."""
    engine = small_engine(64, page_size=4, enable_prefix_caching=True, max_num_batched_tokens=32)
    prompt = list(range(1, 10))
    serve(engine, [request(name, prompt, max_tokens=3) for name in "ab"])
    kv = engine.stats().kv
    assert kv.pages_owned == 0
    assert kv.pages_cached == 2, "one copy of each full prompt page"
    assert engine.reset_prefix_cache()
    assert engine.stats().kv.pages_free == kv.pages_total


@pytest.mark.parametrize("caching", [False, True])
def test_no_page_table_names_a_page_that_was_given_away(caching):
    """mini-sglang#142: a freed page still stood in a page table, and two requests wrote to it.

    At every step of a crowd with aborts: the pages of the sequences in the engine, as the executor sees them in the
    page table, are pages of theirs that are not in the free queue.
    """
    engine = small_engine(40, page_size=4, enable_prefix_caching=caching)
    for i in range(12):
        engine.add_request(request(str(i), range(i % 3, i % 3 + 5 + i), max_tokens=15, n=1 + i % 2))
    steps = 0
    while engine.has_work():
        engine.step()
        steps += 1
        if steps % 9 == 0:
            engine.abort(engine.scheduler.running[-1].request_id if engine.scheduler.running else "")
        pool, table = engine.kv.pool, engine.kv.page_table
        for seq in engine.scheduler.running:
            named = (table[seq.row, : -(-seq.num_computed // 4)] // 4).tolist()
            assert named == seq.pages[: len(named)]
            assert all(page not in pool._free and pool.ref_count[page] > 0 for page in named)
    assert steps > 20
    assert engine.stats().num_preemptions > 0


def test_an_overlong_prompt_gets_a_reply():
    """mini-sglang: a prompt beyond the limit was dropped from the queue without any reply."""
    engine = small_engine(64, page_size=4)
    with pytest.raises(ValueError, match="the prompt has 40 tokens and max_model_len is 32"):
        engine.add_request(request("long", 40))
    assert not engine.has_work()
    longest = request("longest", 31)
    engine.add_request(longest)
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert [output.finish_reason for output in outputs] == ["length"]


@pytest.mark.parametrize("host_slots", [4, 8, 16])
def test_a_full_swap_space_neither_aborts_nor_stalls(host_slots):
    """vLLM 0.2.7: with no room in the swap space the engine aborted ("not enough CPU RAM"), or, with a group that could
    come back but not go on, swapped it in and out for ever. Here one page of swap space is enough."""
    requests = [request(str(i), range(i, i + 5), max_tokens=20, n=1 + i % 3) for i in range(6)]
    engine = small_engine(40, page_size=4, preemption_mode="swap", host_slots=host_slots)
    assert serve(engine, requests) == undisturbed(requests)
    stats = engine.stats()
    assert stats.counters.swap_lost_slots > 0 and stats.counters.swapped_in_slots > 0
    assert stats.finished == {"length": 12}
    assert (stats.kv.host_slots_used, stats.kv.pages_owned) == (0, 0)


def test_finished_siblings_own_nothing():
    """vLLM 0.2.7: `ref_count` went on counting siblings that had finished, so that their shared pages leaked."""
    executor = CountingExecutor()
    one = request("a", 13, max_tokens=12, n=3)
    ends = undisturbed([one])["a/1"][2]
    one = request("a", 13, max_tokens=12, n=3, stop_token_ids=(ends,))  # the second sibling ends with its third token
    engine = small_engine(64, executor, page_size=4)
    engine.add_request(one)
    got: dict[str, list[int]] = {}
    while "a/1" not in got or got["a/1"][-1] != ends:
        collect(engine.step(), got)
    alive = engine.scheduler.running
    assert [seq.index for seq in alive] == [0, 2]
    pool = engine.kv.pool
    assert [pool.ref_count[page] for page in alive[0].pages[:3]] == [2, 2, 2]
    assert pool.num_owned == len({page for seq in alive for page in seq.pages})
    drain(engine)
    assert pool.num_owned == 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("page_size", [2, 3, 4, 5])
@pytest.mark.parametrize("beyond", [0, 1, -1])
def test_nothing_depends_on_the_prompt_length_mod_page_size(page_size, beyond, mode):
    """vllm#50749: KV was damaged for prompts of certain lengths modulo the page size."""
    lengths = [page_size * 1, page_size * 2, page_size * 1, page_size * 2]
    prompts = [
        range(i // 2, i // 2 + length + beyond) for i, length in enumerate(lengths)
    ]  # each two share a beginning
    requests = [request(str(i), prompt, max_tokens=32 - len(prompt)) for i, prompt in enumerate(prompts)]
    requests += [request("wide", page_size * 2 + beyond, max_tokens=5, n=3)]
    swap = {"preemption_mode": "swap", "host_slots": 24} if mode == "swap" else {}
    engine = small_engine(40, page_size=page_size, enable_prefix_caching=True, max_num_batched_tokens=5, **swap)
    assert serve(engine, requests) == undisturbed(requests)
    assert engine.stats().num_preemptions > 0


def test_an_evicted_page_is_never_hit():
    """Phantom hits: the map from hashes went on naming pages that had been given away and overwritten."""
    engine = small_engine(32, page_size=4, enable_prefix_caching=True)  # 8 pages
    first, second = request("first", range(17), max_tokens=1), request("second", range(40, 69), max_tokens=2)
    assert serve(engine, [first]) == undisturbed([first])
    assert engine.stats().kv.pages_cached == 4
    assert serve(engine, [second]) == undisturbed([second])  # all 8 pages: everything of the first one is overwritten
    again = request("again", range(17), max_tokens=1)
    assert serve(engine, [again]) == undisturbed([again])
    assert engine.stats().prefix_cache_hits == 0
    assert engine.stats().counters.prefix_evictions >= 4


def test_slot_numbers_do_not_wrap_at_two_to_the_31():
    """vllm#47671, sglang#20389: page x page size in int32 wrapped, and KV was written somewhere else."""
    page_size = 2**20
    pages = 4096  # 2**32 slots
    capacity = KVCapacity(0, 1, 0, page_size, pages, pages * page_size, 2, 0)
    manager = PagedKVManager(1, capacity, False)
    assert manager.page_table.dtype == np.int64
    for page in range(pages - 2):
        assert manager.pool.allocate() == page
    seq = Sequence.of(request("a", 3))
    seq.token_ids = [0] * (page_size + 1)
    assert manager.admit(seq, 0)
    assert manager.grow(seq, page_size + 1)
    assert manager.page_table[seq.row].tolist() == [(2**12 - 2) * 2**20, (2**12 - 1) * 2**20]
    assert manager.stats().slots_total == 2**32
