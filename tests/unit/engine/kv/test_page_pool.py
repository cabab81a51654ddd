from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kvbench_engine.kv.page_pool import FreeQueue, PagePool


def test_misuse_is_an_assertion():
    pool = PagePool(3)
    page = pool.allocate()
    for act, says in (
        (lambda: FreeQueue(2).push_tail(1), "already"),
        (lambda: pool.share(2), "holds nothing"),
        (lambda: pool.pin(2), "too late"),
        (lambda: pool.release(2), "more often"),
        (lambda: pool.check_integrity([]), "ref_count"),
        (lambda: pool.check_integrity([[page, page]]), "twice"),
    ):
        with pytest.raises(AssertionError, match=says):
            act()


def test_empty_pool_is_refused():
    with pytest.raises(ValueError, match="raise kv_budget"):
        PagePool(0)


@pytest.mark.parametrize("count", range(7))
def test_many_pages_at_once_are_those_of_one_after_another(count):
    """An evicted page's child, 4, is free of content then, and comes next."""
    taken, evicted, pools = [], [], []
    for _ in range(2):
        evicted.append([])
        pool = PagePool(6, lambda page, gone=evicted[-1]: gone.append(page) or ([4] if page == 3 else []))
        for _ in range(6):
            pool.allocate()
        for page in (3, 5, 4):
            pool.mark_cached(page)
        for page in (3, 5, 4, 0, 1, 2):
            pool.release(page)
        pools.append(pool)
    taken = [pools[0].allocate_many(count), [pools[1].allocate() for _ in range(count)]]
    assert taken[0] == taken[1] and evicted[0] == evicted[1]
    assert (taken[0], evicted[0]) == ([2, 1, 0, 3, 4, 5][:count], [3, 5][: max(0, (count - 2) // 2)])
    assert list(pools[0]._free) == list(pools[1]._free)
    for pool in pools:
        pool.check_integrity([[page] for page in taken[0]])


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

    @rule(count=st.sampled_from([0, 1, 1, 2, 3]))
    def allocate(self, count):
        assert self.pool.num_available == len(self.free)
        if count <= len(self.free):
            pages, self.free = self.free[:count], self.free[count:]
            before = len(self.evicted)
            assert ([self.pool.allocate()] if count == 1 else self.pool.allocate_many(count)) == pages
            assert self.evicted[before:] == [page for page in pages if page in self.cached]
            self.cached.difference_update(pages)
            self.owned.update(dict.fromkeys(pages, 1))

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
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True, database=None
)
