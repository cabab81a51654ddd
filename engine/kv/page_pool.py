"""Reference-counted physical pages and the queue of free ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice


class FreeQueue:
    """Doubly linked list over page ids, in two arrays; every operation is O(1).

    Not a deque: a cached page that is hit leaves from the middle, which is O(n) in a deque. The head is allocated
    first. Pages without cached content enter at the head, cached pages at the tail, so the cached page nearest to the
    head is the least recently used one.
    Invariant: ``_next[_prev[x]] == x`` for each queued page and the sentinel; unqueued pages have ``_next == -1``.
    """

    def __init__(self, num_pages: int):
        sentinel = num_pages
        self._sentinel = sentinel
        self._next = [*range(1, num_pages + 1), 0]
        self._prev = [sentinel, *range(num_pages)]
        self._length = num_pages

    def __len__(self) -> int:
        return self._length

    def __contains__(self, page: int) -> bool:
        return self._next[page] != -1

    def __iter__(self):
        page = self._next[self._sentinel]
        while page != self._sentinel:
            yield page
            page = self._next[page]

    def pop_head(self) -> int:
        page = self._next[self._sentinel]
        assert page != self._sentinel, "pop from an empty free queue"
        self.remove(page)
        return page

    def remove_heads(self, pages: list[int]) -> None:
        """Remove the first pages, which are ``pages`` in their order, at once."""
        after = self._next[pages[-1] if pages else self._sentinel]
        self._next[self._sentinel], self._prev[after] = after, self._sentinel
        for page in pages:
            self._next[page] = self._prev[page] = -1
        self._length -= len(pages)

    def push_head(self, page: int) -> None:
        self._link(page, self._sentinel, self._next[self._sentinel])

    def push_tail(self, page: int) -> None:
        self._link(page, self._prev[self._sentinel], self._sentinel)

    def remove(self, page: int) -> None:
        before, after = self._prev[page], self._next[page]
        assert after != -1, f"page {page} is not in the free queue"
        self._next[before], self._prev[after] = after, before
        self._next[page] = self._prev[page] = -1
        self._length -= 1

    def _link(self, page: int, before: int, after: int) -> None:
        assert self._next[page] == -1, f"page {page} is in the free queue already"
        self._prev[page], self._next[page] = before, after
        self._next[before] = self._prev[after] = page
        self._length += 1


class PagePool:
    """Reference-counted pages. ``ref_count[p]``: the page-table entries that name ``p``.

    A page with ``ref_count == 0`` and no pin is in the free queue. If it is cached, its content is kept until it is
    allocated again; ``on_evict(page)`` is then called and returns the cached pages that cannot be found without it.
    A pinned page is not allocated again until the move that reads it is done.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[int], Iterable[int]] | None = None):
        if num_pages < 1:
            raise ValueError(f"a pool of {num_pages} pages holds nothing: raise kv_budget or lower page_size")
        self.num_pages = num_pages
        self.ref_count = [0] * num_pages
        self.num_references = 0  # the sum of ref_count
        self._cached = bytearray(num_pages)  # 1: the prefix cache names this page
        self._pins: dict[int, int] = {}
        self._num_cached_free = 0
        self._num_pinned_unowned = 0
        self._free = FreeQueue(num_pages)
        self._on_evict = on_evict

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: empty, or cached and evictable."""
        return len(self._free)

    @property
    def num_owned(self) -> int:
        return self.num_pages - len(self._free) - self._num_pinned_unowned

    @property
    def num_pinned(self) -> int:
        """Pinned pages that no sequence owns."""
        return self._num_pinned_unowned

    @property
    def num_pins(self) -> int:
        """Pinned pages, whether a sequence owns them or not."""
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Cached pages that no sequence owns."""
        return self._num_cached_free

    def allocate(self) -> int:
        """The next page, with ``ref_count`` 1 and no content. The caller checks ``num_available`` first."""
        page = self._free.pop_head()
        if self._cached[page]:
            self._cached[page] = 0
            self._num_cached_free -= 1
            if self._on_evict:
                for orphan in self._on_evict(page):
                    self.drop_cached(orphan)
        self.ref_count[page] = 1
        self.num_references += 1
        return page

    def allocate_many(self, count: int) -> list[int]:
        """The next ``count`` pages, as ``allocate`` would give them one after another."""
        pages = list(islice(self._free, count))
        assert len(pages) == count, "pop from an empty free queue"
        if any(self._cached[page] for page in pages):  # an eviction puts pages at the head
            return [self.allocate() for _ in range(count)]
        self._free.remove_heads(pages)
        for page in pages:
            self.ref_count[page] = 1
        self.num_references += count
        return pages

    def share(self, page: int) -> None:
        """Count one more page-table entry of ``page``; a cached page leaves the free queue."""
        if self.ref_count[page] == 0:
            assert self._cached[page], f"page {page} is free and holds nothing to share"
            if page in self._pins:
                self._num_pinned_unowned -= 1
            else:
                self._free.remove(page)
                self._num_cached_free -= 1
        self.ref_count[page] += 1
        self.num_references += 1

    def release(self, page: int) -> None:
        """Count one page-table entry of ``page`` fewer; after the last one it is free."""
        assert self.ref_count[page] > 0, f"page {page} released more often than it was taken"
        self.ref_count[page] -= 1
        self.num_references -= 1
        if self.ref_count[page] == 0:
            if page in self._pins:
                self._num_pinned_unowned += 1
            else:
                self._queue(page)

    def pin(self, page: int) -> None:
        """Keep an owned page from being allocated again until ``unpin``, even when its owners release it."""
        assert self.ref_count[page] > 0, f"page {page} is pinned too late: nobody owns it"
        self._pins[page] = self._pins.get(page, 0) + 1

    def unpin(self, page: int) -> None:
        self._pins[page] -= 1
        if self._pins[page] == 0:
            del self._pins[page]
            if self.ref_count[page] == 0:
                self._num_pinned_unowned -= 1
                self._queue(page)

    def _queue(self, page: int) -> None:
        if self._cached[page]:
            self._free.push_tail(page)
            self._num_cached_free += 1
        else:
            self._free.push_head(page)

    def mark_cached(self, page: int) -> None:
        """Keep the content of an owned page after its release: the prefix cache, or a device page, refers to it."""
        assert self.ref_count[page] > 0 and not self._cached[page]
        self._cached[page] = 1

    def drop_cached(self, page: int) -> None:
        """Forget the content of a page; if no sequence owns the page, it is allocated next."""
        assert self._cached[page], f"page {page} is not cached"
        self._cached[page] = 0
        if self.ref_count[page] == 0 and page not in self._pins:
            self._num_cached_free -= 1
            self._free.remove(page)
            self._free.push_head(page)

    def is_cached(self, page: int) -> bool:
        return bool(self._cached[page])

    def check_integrity(self, page_tables: list[list[int]]) -> None:
        """Assert every invariant against the page tables of all sequences. O(pages): for tests and KVBENCH_CHECK."""
        named = [0] * self.num_pages
        for table in page_tables:
            assert len(set(table)) == len(table), f"a page stands twice in one page table: {table}"
            for page in table:
                named[page] += 1
        assert named == self.ref_count, "ref_count differs from the page-table entries that name the page"
        assert sum(named) == self.num_references
        queued = list(self._free)
        assert len(queued) == len(set(queued)) == len(self._free)
        for page in range(self.num_pages):
            idle = self.ref_count[page] == 0 and page not in self._pins
            assert (page in self._free) == idle, f"page {page} is free and in use, or neither"
        assert all(count > 0 for count in self._pins.values())
        assert sum(self.ref_count[page] == 0 for page in self._pins) == self._num_pinned_unowned
        assert sum(bool(self._cached[p]) for p in queued) == self._num_cached_free
