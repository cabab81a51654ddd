import random
from hashlib import blake2b
from itertools import count

import pytest

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.sequence import Sequence
from tests.support.engine_parts import CountingExecutor, drain, request, small_engine, undisturbed


class WeakHash:
    """blake2b cut to ``size`` bytes, padded with zeros in front to the requested length."""

    size = 1
    calls = 0

    def __init__(self, data: bytes, digest_size: int):
        WeakHash.calls += 1
        self._hash, self._length = blake2b(data, digest_size=self.size), digest_size

    def update(self, data: bytes) -> None:
        self._hash.update(data)

    def digest(self) -> bytes:
        return bytes(self._length - self.size) + self._hash.digest()


class NoHash(WeakHash):
    """Every page has the same key."""

    def digest(self) -> bytes:
        return bytes(self._length)


class OwnHash(WeakHash):
    """A page's key is that of its own tokens, whatever came before it."""

    size = 16

    def update(self, data: bytes) -> None:
        self._hash = blake2b(data, digest_size=self.size)


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


@pytest.mark.parametrize(("one", "other"), [(None, "a"), ("a", "b"), ("a", "aa"), ("\ud83d", None)])
def test_salts_share_nothing(one, other):
    """Nor does one that is no proper text: JSON can hold half of a surrogate pair."""
    cache, pool = small_cache()
    seq = filled(cache, pool, [1, 2, 3, 4], one)
    assert hits(cache, [1, 2, 3, 4, 5], other) == []
    assert hits(cache, [1, 2, 3, 4, 5], one) == seq.pages


def test_a_salt_that_is_another_prompts_key_finds_nothing():
    """A page's key is made of its parent's key or, the first one's, of the salt: a salt may be such a key."""
    cache, pool = small_cache()

    def key(first: int) -> bytes:
        return blake2b(first.to_bytes(8, "little") + (2).to_bytes(8, "little"), digest_size=16).digest()

    first = next(token for token in count() if not key(token).strip(bytes(range(1, 128))))  # text, as a salt is
    seq = filled(cache, pool, [first, 2, 3, 4])
    thief = Sequence.of(request("thief", [3, 4, 5], cache_salt=key(first).decode()))
    assert cache.match(thief) == []
    assert thief.page_hashes == seq.page_hashes[1:], "the keys are the same, and only verification tells them apart"


def test_what_comes_behind_a_page_of_the_same_tokens_and_key_is_not_cached_behind_that(monkeypatch):
    monkeypatch.setattr("kvbench_engine.kv.prefix_cache.blake2b", OwnHash)
    cache, pool = small_cache()
    first = filled(cache, pool, [7, 7])
    seq = Sequence.of(request("x", [7, 7, 7, 7, 8, 8]))
    assert cache.match(seq) == first.pages
    seq.pages = [*first.pages, pool.allocate(), pool.allocate()]
    cache.insert(seq, 3, pool)
    assert hits(cache, [7, 7, 8, 8, 1]) == first.pages


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


def mixed_requests(number: int):
    rng = random.Random(5)
    stems = [[rng.randrange(90) for _ in range(16)] for _ in range(4)]
    prompts = [rng.choice(stems)[: rng.randrange(1, 17)] + [rng.randrange(90) for _ in range(6)] for _ in range(number)]
    return [request(str(i), p, max_tokens=5, cache_salt=(None, "a", "b")[i % 3]) for i, p in enumerate(prompts)]


@pytest.mark.parametrize(("weak", "mode"), [(WeakHash, "swap"), (NoHash, "recompute")])
def test_colliding_keys_cost_hits_and_serve_no_foreign_page(monkeypatch, weak, mode):
    """A key of one byte, or none: only verification stands between two prompts. The shadow KV would see a mistake."""
    monkeypatch.setattr("kvbench_engine.kv.prefix_cache.blake2b", weak)
    requests = mixed_requests(100)
    swap = {"preemption_mode": "swap", "host_slots": 12} if mode == "swap" else {}
    engine = small_engine(40, page_size=2, enable_prefix_caching=True, **swap)
    for one in requests:
        engine.add_request(one)
    assert drain(engine, 5000) == undisturbed(requests)
    if weak is WeakHash:
        assert engine.stats().prefix_cache_hits > 0, "the cache was of no use: the test shows nothing"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_each_page_is_hashed_once(monkeypatch, mode):
    """Also through preemption, waiting at the head of the queue, and forks."""
    monkeypatch.setattr("kvbench_engine.kv.prefix_cache.blake2b", WeakHash)
    monkeypatch.setattr(WeakHash, "size", 16)
    monkeypatch.setattr(WeakHash, "calls", 0)
    swap = {"preemption_mode": "swap", "host_slots": 8} if mode == "swap" else {}
    engine = small_engine(32, page_size=4, enable_prefix_caching=True, **swap)
    lengths = {"a": 9, "b": 7, "c": 5}
    for i, (name, prompt) in enumerate(lengths.items()):
        engine.add_request(request(name, range(i, i + prompt), max_tokens=14))
    got = drain(engine)
    assert engine.stats().num_preemptions > 0
    full_pages = sum((lengths[name] + len(tokens)) // 4 for name, tokens in got.items())
    assert 0 < WeakHash.calls <= full_pages
    before = WeakHash.calls
    engine.add_request(request("n", range(50, 66), max_tokens=3, n=3))
    drain(engine)
    assert WeakHash.calls - before == 4, "the forks know their prompt's keys"


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
