import pytest

from engine.page_pool import FreeQueue, PagePool


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
    pool = PagePool(4, evicted.append)
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
