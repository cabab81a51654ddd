import pytest

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.sequence import Sequence
from tests.support.engine_parts import CountingExecutor, drain, request, small_engine


def filled(cache: PrefixCache, pool: PagePool, tokens, salt: str | None = None) -> Sequence:
    """A sequence whose full pages have been computed and offered."""
    seq = Sequence.of(request("x", tokens, cache_salt=salt))
    num_full = len(tokens) // cache.page_size
    seq.pages = [pool.allocate() for _ in range(num_full)]
    cache.match(seq)
    cache.insert(seq, num_full, pool)
    cache.check_integrity(pool)
    return seq


def hits(cache: PrefixCache, tokens, salt: str | None = None) -> list[int]:
    return cache.match(Sequence.of(request("y", tokens, cache_salt=salt)))


def small_cache(pages: int = 16, page_size: int = 2) -> tuple[PrefixCache, PagePool]:
    cache = PrefixCache(page_size, pages)
    return cache, PagePool(pages, cache.evict)


def test_the_longest_common_prefix_in_whole_pages_is_found():
    cache, pool = small_cache()
    seq = filled(cache, pool, [1, 2, 3, 4, 5, 6])
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7]) == seq.pages
    assert hits(cache, [1, 2, 3, 4, 9, 9, 9]) == seq.pages[:2]
    assert hits(cache, [3, 4, 5, 6, 7]) == [], "the same pages elsewhere are other prefixes"
    assert hits(cache, [1]) == []


NUMBER = "\1" + 7 * "\0"  # its bytes are those of token 1


@pytest.mark.parametrize(("one", "other"), [(None, "a"), ("a", "b"), ("a", "aa"), ("\ud83d", None), (NUMBER, None)])
def test_salts_share_nothing(one, other):
    """Nor does one that is no proper text: JSON can hold half of a surrogate pair."""
    cache, pool = small_cache()
    seq = filled(cache, pool, [1, 2, 3, 4], one)
    assert hits(cache, [1, 2, 3, 4, 5], other) == []
    assert hits(cache, [1, 2, 3, 4, 5], one) == seq.pages


def test_of_two_that_computed_the_same_side_by_side_the_first_is_cached():
    cache, pool = small_cache()
    one, other = (Sequence.of(request(name, [1, 2, 3, 4])) for name in "ab")
    for seq in (one, other):
        seq.pages = [pool.allocate(), pool.allocate()]
    cache.insert(one, 1, pool)
    cache.insert(other, 2, pool)
    cache.insert(one, 2, pool)
    assert hits(cache, [1, 2, 3, 4, 5]) == [one.pages[0], other.pages[1]]
    assert not pool.is_cached(other.pages[0]) and not pool.is_cached(one.pages[1])
    cache.check_integrity(pool)


def test_what_hangs_on_an_evicted_page_goes_with_it():
    """Phantom hits after eviction: nothing may be found beyond a page that is gone, not even when it is back."""
    cache, pool = small_cache(pages=5)
    seq = filled(cache, pool, [1, 2, 3, 4, 5, 6])
    other = filled(cache, pool, [1, 2, 7, 8])  # its first page is a duplicate and not cached
    first, second, third = seq.pages
    assert not pool.is_cached(other.pages[0]) and pool.is_cached(other.pages[1])
    for page in seq.pages:  # the wrong way round, so that the beginning goes first
        pool.release(page)
    assert pool.allocate() == first
    cache.check_integrity(pool)
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7]) == hits(cache, [1, 2, 7, 8, 9]) == []
    assert pool.num_cached == 0 and cache.evictions == 4
    cache.insert(other, 2, pool)  # it knows its own pages: what they hold is still true
    assert hits(cache, [1, 2, 7, 8, 9]) == other.pages
    assert hits(cache, [1, 2, 3, 4, 5, 6, 7]) == other.pages[:1]
    assert pool.num_available == 2 and not pool.is_cached(second) and not pool.is_cached(third)
    cache.check_integrity(pool)


def test_a_prompt_that_waits_is_compared_once(monkeypatch):
    """It is asked about at each step, and goes on where it was found to end."""
    engine = small_engine(64, page_size=4, enable_prefix_caching=True)
    engine.add_request(request("first", 30, max_tokens=1))
    drain(engine)
    engine.add_request(request("long", range(50, 72), max_tokens=10))
    engine.step()
    packed, pack = [], PrefixCache._packed
    counted = lambda self, seq, index: (packed.append(seq.request_id), pack(self, seq, index))[1]  # noqa: E731
    monkeypatch.setattr(PrefixCache, "_packed", counted)
    waiting = engine.add_request(request("waits", 26, max_tokens=5))
    steps = 0
    while waiting.row < 0 and steps < 20:
        engine.step()
        steps += 1
    assert 5 < steps < 20 and waiting.num_cached == 24
    assert packed.count("waits") <= 6 + steps


def test_hits_and_queries_are_counted_in_tokens_and_once_a_request():
    engine = small_engine(36, page_size=4, enable_prefix_caching=True)
    engine.add_request(request("a", 13, max_tokens=3))
    drain(engine)
    for name in "bc":
        engine.add_request(request(name, 13, max_tokens=19))  # b and c do not fit together to the end
    drain(engine)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (2 * 12, 3 * 13)


def test_a_full_hit_still_computes_one_token():
    executor = CountingExecutor()
    engine = small_engine(64, executor, page_size=4, enable_prefix_caching=True)
    for name in "ab":
        engine.add_request(request(name, 16, max_tokens=1))
        drain(engine)
    assert executor.plans[-1] == [("b", 4)]
    assert (engine.stats().prefix_cache_hits, engine.stats().prefix_cache_queries) == (12, 32)


def test_pages_are_freed_from_the_end_so_that_the_beginning_stays_cached_longest():
    engine = small_engine(32, page_size=4, enable_prefix_caching=True)  # 8 pages
    prompt = list(range(10, 26))
    for name, tokens in (("a", prompt), ("b", range(50, 70)), ("again", [*prompt, 1])):
        engine.add_request(request(name, tokens, max_tokens=1))  # a leaves 4 cached pages, b evicts the last of them
        drain(engine)
    assert engine.stats().prefix_cache_hits == 12


@pytest.mark.parametrize("beside", [{}, {"beam_width": 2}, {"n": 2}], ids=["alone", "beams", "forks"])
@pytest.mark.parametrize("length", [41, 42, 43, 44])
@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapping"])
def test_an_answer_is_cached_to_its_last_full_page_whoever_is_beside_it(beside, length, overlap):
    """Steps that decide who goes on are read at once, so that no token is pending when the next one is planned."""
    engine = small_engine(
        640, CountingExecutor(50), page_size=4, enable_prefix_caching=True, max_model_len=128, async_scheduling=overlap,
        max_num_seqs=8, max_num_batched_tokens=64,
    )  # fmt: skip
    first = engine.add_request(request("first", 8, max_tokens=length))
    engine.step()
    engine.step()
    if beside:
        engine.add_request(request("beside", range(40, 43), max_tokens=100, **beside))
    while "first" in engine._groups:
        engine.step()
    engine.abort("beside")
    drain(engine)
    again = engine.add_request(request("again", [*first.token_ids, 1], max_tokens=1))
    drain(engine)
    assert again.num_cached == (len(first.token_ids) - 1) // 4 * 4
