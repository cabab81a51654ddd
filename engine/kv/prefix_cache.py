"""Finds full pages that already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import Sequence


class PrefixCache:
    """A tree of full pages: a page is found by its parent, the page before it, and its own tokens.

    A first page is found by the request's salt and its tokens. The whole prefix is compared by that, page by page, so
    no hit can serve another prompt's KV, and a prompt is looked at only as far as it is cached.

    A page whose place is taken (two sequences computed the same prefix side by side) is not cached; its later pages
    become children of the other sequence's page. When a page is evicted, its descendants are evicted with it, because
    they could not be found any more; a sequence that still runs offers its own pages again, from the first.
    Invariant: ``page_of[key_of[p]] == p`` for every cached page, the pool marks exactly these pages, and the parent of
    every cached page is cached.

    All facts about a cached page stand in lists by page, as numbers and bytes: an object a page, of which there may be
    a million, would make each full garbage collection stop the engine for seconds.
    """

    def __init__(self, page_size: int, num_pages: int):
        self.page_size = page_size
        self.evictions = 0  # pages
        self.seconds = 0.0  # of looking pages up and storing them
        self._num_pages = num_pages
        self._num_inserted = 0
        self._page_of: dict[tuple[int, bytes], int] = {}  # (node of the parent, or 0; tokens) -> page
        self._key_of: list[tuple[int, bytes]] = [(0, b"")] * num_pages
        self._node: list[int] = [0] * num_pages  # insertion * num_pages + page, unique for ever; 0: not cached
        self._child: list[int] = [-1] * num_pages  # a page whose parent it is; the others follow that one
        self._next: list[int] = [-1] * num_pages  # siblings: a list linked both ways
        self._prev: list[int] = [-1] * num_pages

    def match(self, seq: Sequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        At least one token is always computed, for its logits. Neither counts nor shares the pages.
        """
        started = time.perf_counter()
        limit = (len(seq.token_ids) - 1) // self.page_size
        node, depth = self._verified(seq, limit)
        while depth < limit:
            page = self._page_of.get((node, self._packed(seq, depth)))
            if page is None:
                break
            node, depth = self._node[page], depth + 1
        seq.prefix_node, seq.prefix_depth = node, depth
        pages = []
        while node:
            pages.append(node % self._num_pages)
            node = self._key_of[pages[-1]][0]
        pages.reverse()
        self.seconds += time.perf_counter() - started
        return pages

    def _verified(self, seq: Sequence, limit: int) -> tuple[int, int]:
        """The last page of ``seq`` that was found before, if it is still cached: its node, and pages up to it."""
        node = seq.prefix_node
        if seq.prefix_depth > limit or self._node[node % self._num_pages] != node:
            return 0, 0
        return node, seq.prefix_depth

    def insert(self, seq: Sequence, num_full: int, pool: PagePool) -> None:
        """Cache the first ``num_full`` pages of ``seq``, all fully computed; continues where the last call ended."""
        started = time.perf_counter()
        assert num_full * self.page_size <= len(seq.token_ids) - seq.num_pending, "a page's tokens are not known"
        node, depth = self._verified(seq, num_full)
        for index in range(depth, num_full):
            key = node, self._packed(seq, index)
            page = self._page_of.get(key)
            if page is None:
                page = seq.pages[index]
                self._add(page, key)
                pool.mark_cached(page)
            node = self._node[page]
        seq.prefix_node, seq.prefix_depth = node, num_full
        self.seconds += time.perf_counter() - started

    def _add(self, page: int, key: tuple[int, bytes]) -> None:
        assert not self._node[page], f"page {page} is cached under another prefix"
        self._num_inserted += 1
        self._node[page] = self._num_inserted * self._num_pages + page
        self._page_of[key] = page
        self._key_of[page] = key
        if key[0]:
            parent = key[0] % self._num_pages
            sibling = self._next[page] = self._child[parent]
            if sibling >= 0:
                self._prev[sibling] = page
            self._child[parent] = page

    def evict(self, page: int) -> list[int]:
        """Drop a page that the pool allocates again, and its descendants; returns the descendants' pages."""
        before, after, parent = self._prev[page], self._next[page], self._key_of[page][0]
        if after >= 0:
            self._prev[after] = before
        if before >= 0:
            self._next[before] = after
        elif parent:
            self._child[parent % self._num_pages] = after
        pages = [page]
        for dropped in pages:  # grows as it goes: the whole subtree
            child = self._child[dropped]
            while child >= 0:
                pages.append(child)
                child = self._next[child]
        self._drop(pages)
        self.evictions += len(pages)
        return pages[1:]

    def _drop(self, pages: list[int]) -> None:
        for page in pages:
            del self._page_of[self._key_of[page]]
            self._key_of[page], self._node[page] = (0, b""), 0
            self._child[page] = self._next[page] = self._prev[page] = -1

    def forget(self, seq: Sequence) -> list[int]:
        """Drop the first page of ``seq`` and its descendants, by any sequence; returns their pages."""
        first = self._page_of.get((0, self._packed(seq, 0)))
        return [first, *self.evict(first)] if first is not None else []

    def clear(self, pool: PagePool) -> None:
        """Drop all pages."""
        pages = list(self._page_of.values())
        for page in pages:
            pool.drop_cached(page)
        self._drop(pages)

    def _packed(self, seq: Sequence, index: int) -> bytes:
        """The tokens of page ``index`` as bytes; the first page's also hold the salt."""
        start = index * self.page_size
        tokens = array("q", seq.token_ids[start : start + self.page_size]).tobytes()
        return tokens if index else _salt(seq) + tokens

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that keys, pages, links and the pool's marks agree both ways. O(pages)."""
        cached = {page for page in range(self._num_pages) if self._node[page]}
        assert cached == {page for page in range(pool.num_pages) if pool.is_cached(page)}, "the pool's marks differ"
        assert {page: self._key_of[page] for page in cached} == {page: key for key, page in self._page_of.items()}
        children: dict[int, set[int]] = {page: set() for page in cached}
        for page in cached:
            assert self._node[page] % self._num_pages == page
            if node := self._key_of[page][0]:
                assert self._node[node % self._num_pages] == node, "a cached page cannot be reached"
                children[node % self._num_pages].add(page)
        for page in cached:
            child, before, linked = self._child[page], -1, set()
            while child >= 0:
                assert self._prev[child] == before and child not in linked
                linked.add(child)
                before, child = child, self._next[child]
            assert linked == children[page], "the links of children differ from their parents"


def _salt(seq: Sequence) -> bytes:
    salt = seq.request.cache_salt
    return b"" if salt is None else salt.encode(errors="surrogatepass")  # any string, even half of a surrogate pair
