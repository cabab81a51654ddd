"""Finds full pages that already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array
from hashlib import blake2b

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import Sequence

_KEY_BYTES = 16


class PrefixCache:
    """Chained hash of full pages -> page.

    A page's key is blake2b-128 over its parent's key and its own tokens; the first page's has the request's
    salt instead. Each page of a sequence is hashed once (``Sequence.page_hashes``).

    A hit is verified: the page's tokens are compared, and its parent must be the node verified before it. By induction
    the whole prefix is the same. A collision of keys costs a hit and never serves another prompt's KV.

    A page whose key is taken (two sequences computed the same prefix side by side) is not cached; its later pages
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
        self.hash_seconds = 0.0  # of hashing pages and storing them
        self._num_pages = num_pages
        self._num_inserted = 0
        self._page_of: dict[bytes, int] = {}  # key -> page
        self._key_of: list[bytes] = [b""] * num_pages
        self._tokens: list[bytes] = [b""] * num_pages
        self._node: list[int] = [0] * num_pages  # insertion * num_pages + page, unique for ever; 0: not cached
        self._parent: list[int] = [0] * num_pages  # the node of the page before it; 0: it is the first page
        self._child: list[int] = [-1] * num_pages  # a page whose parent it is; the others follow that one
        self._next: list[int] = [-1] * num_pages  # siblings: a list linked both ways
        self._prev: list[int] = [-1] * num_pages

    def match(self, seq: Sequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        At least one token is always computed, for its logits. Neither counts nor shares the pages.
        """
        limit = (len(seq.token_ids) - 1) // self.page_size
        if not self._page_of or not limit:
            seq.prefix_node = seq.prefix_depth = 0
            return []
        self._hash_pages(seq, limit)
        parent, depth = self._known(seq, limit)
        for index in range(depth, limit):
            page = self._page_of.get(seq.page_hashes[index])
            if page is None or not self._verified(page, parent, self._packed(seq, index)):
                break
            parent, depth = self._node[page], index + 1
        seq.prefix_node, seq.prefix_depth = parent, depth
        return self._pages_to(parent)

    def _known(self, seq: Sequence, limit: int) -> tuple[int, int]:
        """The last verified page of ``seq``, if it is still cached, so that a waiting prompt is not compared again."""
        node = seq.prefix_node
        if seq.prefix_depth > limit or self._node[node % self._num_pages] != node:
            return 0, 0
        return node, seq.prefix_depth

    def insert(self, seq: Sequence, num_full: int, pool: PagePool) -> None:
        """Cache the first ``num_full`` pages of ``seq``, all fully computed; continues where the last call ended."""
        keys, page_of = seq.page_hashes, self._page_of
        if not keys:
            self._hash_pages(seq, num_full)
        started = time.perf_counter()
        parent, depth = self._known(seq, num_full)
        for index in range(depth, num_full):
            tokens = self._packed(seq, index)
            if index == len(keys):
                keys.append(_key(keys[-1], tokens))
            page = page_of.get(keys[index])
            if page is None:
                page = seq.pages[index]
                self._add(page, keys[index], tokens, parent)
                pool.mark_cached(page)
            elif not self._verified(page, parent, tokens):
                break  # a collision: the first one keeps the key
            parent = self._node[page]
            seq.prefix_node, seq.prefix_depth = parent, index + 1
        self.hash_seconds += time.perf_counter() - started

    def _verified(self, page: int, parent: int, tokens: bytes) -> bool:
        return self._parent[page] == parent and self._tokens[page] == tokens

    def _add(self, page: int, key: bytes, tokens: bytes, parent: int) -> None:
        assert not self._node[page], f"page {page} is cached under another prefix"
        self._num_inserted += 1
        self._node[page] = self._num_inserted * self._num_pages + page
        self._page_of[key] = page
        self._key_of[page], self._tokens[page], self._parent[page] = key, tokens, parent
        if parent:
            before = parent % self._num_pages
            sibling = self._next[page] = self._child[before]
            if sibling >= 0:
                self._prev[sibling] = page
            self._child[before] = page

    def evict(self, page: int) -> list[int]:
        """Drop a page that the pool allocates again, and its descendants; returns the descendants' pages."""
        before, after = self._prev[page], self._next[page]
        if after >= 0:
            self._prev[after] = before
        if before >= 0:
            self._next[before] = after
        elif self._parent[page]:
            self._child[self._parent[page] % self._num_pages] = after
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
            self._key_of[page] = self._tokens[page] = b""
            self._node[page] = self._parent[page] = 0
            self._child[page] = self._next[page] = self._prev[page] = -1

    def forget(self, seq: Sequence) -> list[int]:
        """Drop the first page of ``seq`` and its descendants, by any sequence; returns their pages."""
        first = self._page_of.get(seq.page_hashes[0]) if seq.page_hashes else None
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

    def _hash_pages(self, seq: Sequence, count: int) -> None:
        """Make the missing keys of the first ``count`` pages."""
        keys, size = seq.page_hashes, self.page_size
        first = len(keys)
        if first >= count:
            return
        assert count * size <= seq.num_known, "a page whose tokens are not known has no key"
        started = time.perf_counter()
        parent = keys[-1] if keys else _salt(seq)
        packed = memoryview(array("q", seq.token_ids[first * size : count * size]).tobytes())
        stride = 8 * size
        for at in range(0, len(packed), stride):
            parent = _key(parent, packed[at : at + stride])
            keys.append(parent)
        self.hash_seconds += time.perf_counter() - started

    def _pages_to(self, node: int) -> list[int]:
        """The pages of a prefix that ends at ``node``, from the first."""
        pages = []
        while node:
            pages.append(node % self._num_pages)
            node = self._parent[pages[-1]]
        pages.reverse()
        return pages

    def check_integrity(self, pool: PagePool) -> None:
        """Assert that keys, pages, links and the pool's marks agree both ways. O(pages)."""
        cached = {page for page in range(self._num_pages) if self._node[page]}
        assert cached == set(self._page_of.values()) == {p for p in range(pool.num_pages) if pool.is_cached(p)}
        assert len(cached) == len(self._page_of)
        children: dict[int, set[int]] = {}
        for page in cached:
            assert self._page_of[self._key_of[page]] == page and self._node[page] % self._num_pages == page
            if self._parent[page]:
                before = self._parent[page] % self._num_pages
                assert self._node[before] == self._parent[page], "a cached page cannot be reached"
                children.setdefault(before, set()).add(page)
        for page in cached:
            child, previous, linked = self._child[page], -1, set()
            while child >= 0:
                assert self._prev[child] == previous and child not in linked
                linked.add(child)
                previous, child = child, self._next[child]
            assert linked == children.get(page, set())


def _key(parent: bytes, tokens: bytes | memoryview) -> bytes:
    digest = blake2b(parent, digest_size=_KEY_BYTES)
    digest.update(tokens)
    return digest.digest()


def _salt(seq: Sequence) -> bytes:
    salt = seq.request.cache_salt
    return b"" if salt is None else salt.encode(errors="surrogatepass")  # any string, even half of a surrogate pair
