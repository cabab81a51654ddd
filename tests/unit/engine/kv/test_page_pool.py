from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from engine.kv.page_pool import FreeQueue, PagePool


def test_free_queue_keeps_order_through_removal_from_the_middle():
    queue = FreeQueue(5)
    queue.remove(2)
    assert list(queue) == [0, 1, 3, 4]
    queue.push_tail(2)
    queue.remove(0)
    queue.push_head(0)
    assert list(queue) == [0, 1, 3, 4, 2]
    assert [queue.pop_head() for _ in range(5)] == [0, 1, 3, 4, 2]
    assert len(queue) == 0


def test_free_queue_refuses_double_free():
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match="already"):
        queue.push_tail(1)


def test_pool_gives_uncached_pages_before_cached_and_cached_by_least_recent_use():
    evicted: list[int] = []
    pool = PagePool(4, lambda page: evicted.append(page) or ())
    pages = [pool.allocate() for _ in range(4)]
    for page in pages[:3]:
        pool.mark_cached(page)
    for page in (pages[1], pages[0], pages[2], pages[3]):
        pool.release(page)
    assert pool.num_available == 4
    assert pool.num_cached == 3
    pool.share(pages[1])  # a hit makes it the most recently used
    pool.release(pages[1])
    assert [pool.allocate() for _ in range(4)] == [pages[3], pages[0], pages[2], pages[1]]
    assert evicted == [pages[0], pages[2], pages[1]]


def test_shared_page_is_free_only_after_the_last_release():
    pool = PagePool(2)
    page = pool.allocate()
    pool.share(page)
    pool.release(page)
    assert pool.num_owned == 1
    pool.check_integrity([[page]])
    pool.release(page)
    assert pool.num_owned == 0
    with pytest.raises(AssertionError, match="more often"):
        pool.release(page)


def test_integrity_check_sees_a_leak_and_a_page_in_no_table():
    pool = PagePool(3)
    page = pool.allocate()
    with pytest.raises(AssertionError, match="ref_count"):
        pool.check_integrity([])
    with pytest.raises(AssertionError, match="twice"):
        pool.check_integrity([[page, page]])


def test_sharing_a_page_that_holds_nothing_is_a_bug():
    pool = PagePool(2)
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.share(0)


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="raise kv_budget"):
        PagePool(0)


def test_a_pinned_page_is_not_given_away_before_it_has_been_read():
    pool = PagePool(2)
    source, other = pool.allocate(), pool.allocate()
    pool.pin(source)
    pool.pin(source)  # two copies read from it
    pool.release(source)
    pool.release(other)
    assert (pool.num_available, pool.num_owned, pool.num_pinned) == (1, 0, 1)
    assert pool.allocate() == other
    pool.unpin(source)
    assert pool.num_available == 0
    pool.unpin(source)
    assert (pool.num_available, pool.num_pinned) == (1, 0)
    pool.check_integrity([[other]])


def test_a_pinned_page_that_the_cache_offers_can_be_shared_again():
    pool = PagePool(2)
    page = pool.allocate()
    pool.mark_cached(page)
    pool.pin(page)
    pool.release(page)
    assert (pool.num_cached, pool.num_pinned) == (0, 1), "not evictable yet"
    pool.share(page)
    assert (pool.num_owned, pool.num_pinned) == (1, 0)
    pool.release(page)
    pool.drop_cached(page)
    pool.unpin(page)
    assert (pool.num_cached, pool.num_available) == (0, 2)
    pool.check_integrity([])


def test_a_page_that_nobody_owns_is_pinned_too_late():
    with pytest.raises(AssertionError, match="too late"):
        PagePool(1).pin(0)


def test_what_the_cache_lets_go_is_given_away_first():
    pool = PagePool(3)
    pages = [pool.allocate() for _ in range(3)]
    for page in pages:
        pool.mark_cached(page)
        pool.release(page)
    pool.drop_cached(pages[2])
    assert pool.num_cached == 2
    assert [pool.allocate() for _ in range(3)] == [pages[2], pages[0], pages[1]]


def test_what_cannot_be_found_without_an_evicted_page_is_let_go_with_it():
    """Owned or free: an owned page stays its owners', a free one is given away next."""
    orphans = {}
    pool = PagePool(4, lambda page: orphans.pop(page, ()))
    top, owned, free, plain = (pool.allocate() for _ in range(4))
    for page in (top, owned, free):
        pool.mark_cached(page)
    for page in (top, free):
        pool.release(page)
    orphans[top] = (owned, free)
    assert pool.num_cached == 2
    assert pool.allocate() == top
    assert pool.num_cached == 0 and not any(map(pool.is_cached, range(4)))
    pool.check_integrity([[top, owned, plain]])
    assert pool.allocate() == free


class PoolModel(RuleBasedStateMachine):
    """The pool against a model of counts and a list: what is owned how often, pinned, cached; the order of the rest."""

    @initialize(num_pages=st.integers(1, 6))
    def start(self, num_pages):
        self.evicted: list[int] = []
        self.pool = PagePool(num_pages, lambda page: self.evicted.append(page) or ())
        self.free = list(range(num_pages))  # the next one to be given away first
        self.owned, self.pins, self.cached = Counter(), Counter(), set()

    def _let_go(self, page):
        if not self.owned[page] and not self.pins[page]:
            self.free.insert(len(self.free) if page in self.cached else 0, page)

    @rule()
    def allocate(self):
        assert self.pool.num_available == len(self.free)
        if self.free:
            page = self.free.pop(0)
            known = len(self.evicted)
            assert self.pool.allocate() == page
            assert self.evicted[known:] == ([page] if page in self.cached else [])
            self.cached.discard(page)
            self.owned[page] = 1

    @rule(page=st.integers(0, 5), what=st.sampled_from(["share", "release", "pin", "unpin", "mark", "drop"]))
    def touch(self, page, what):
        pool, owned = self.pool, self.owned[page] > 0
        if page >= pool.num_pages:
            return
        if what == "share" and (owned or page in self.cached):
            pool.share(page)
            self.owned[page] += 1
            if page in self.free:
                self.free.remove(page)
        elif what == "release" and owned:
            pool.release(page)
            self.owned[page] -= 1
            self._let_go(page)
        elif what == "pin" and owned:
            pool.pin(page)
            self.pins[page] += 1
        elif what == "unpin" and self.pins[page]:
            pool.unpin(page)
            self.pins[page] -= 1
            self._let_go(page)
        elif what == "mark" and owned and page not in self.cached:
            pool.mark_cached(page)
            self.cached.add(page)
        elif what == "drop" and page in self.cached:
            pool.drop_cached(page)
            self.cached.discard(page)
            if page in self.free:
                self.free.remove(page)
                self.free.insert(0, page)

    def teardown(self):
        if hasattr(self, "pool"):
            self._compare()

    @rule()
    def _compare(self):
        pool, pages = self.pool, range(self.pool.num_pages)
        assert list(pool._free) == self.free
        assert pool.ref_count == [self.owned[page] for page in pages]
        assert pool.num_owned == sum(self.owned[page] > 0 for page in pages)
        assert pool.num_pinned == sum(not self.owned[page] and self.pins[page] > 0 for page in pages)
        assert pool.num_cached == sum(page in self.cached for page in self.free)
        assert pool.num_available + pool.num_owned + pool.num_pinned == pool.num_pages
        assert [pool.is_cached(page) for page in pages] == [page in self.cached for page in pages]


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
