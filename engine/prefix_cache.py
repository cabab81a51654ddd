"""Which full pages already hold the KV of a prompt's beginning."""

from __future__ import annotations

import time
from array import array
from hashlib import blake2b

from engine.page_pool import PagePool
from engine.sequence import Sequence

_ROOT = b""


class PrefixCache:
    """Chained hash of full pages -> page.

    A page's key is blake2b-128 over its parent's key and its own tokens: that two different prefixes get one key would
    take a collision of a cryptographic hash. The page's tokens are kept and compared on every hit all the same, so
    that a mistake in handling keys costs a hit and does not serve another prompt's KV. Each page of a sequence is
    hashed once (``Sequence.page_hashes``).
    A page whose key is already taken (two sequences computed the same prefix side by side) stays out of the cache:
    two owners of one key would orphan the first.
    Invariant: ``_page_of[_key_of[p]] == p`` for every cached page, and the pool marks exactly these pages.
    """

    def __init__(self, page_size: int):
        self.page_size = page_size
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._tokens_of: dict[int, bytes] = {}
        self.hits = 0  # tokens
        self.queries = 0  # tokens
        self.hash_seconds = 0.0

    def match(self, seq: Sequence) -> list[int]:
        """Pages that hold the longest cached prefix of ``seq``, at most ``num_tokens - 1`` tokens of it.

        One token at least is always computed: its logits are what the step is for. Counts nothing and takes nothing.
        """
        matched: list[int] = []
        limit = (seq.num_tokens - 1) // self.page_size
        self._hash_pages(seq, limit)
        for index in range(limit):
            page = self._page_of.get(seq.page_hashes[index])
            if page is None or self._tokens_of[page] != self._page_tokens(seq, index):
                break
            matched.append(page)
        return matched

    def insert(self, seq: Sequence, first_page: int, num_full: int, pool: PagePool) -> None:
        """Offer pages ``first_page .. num_full`` of ``seq``, all fully computed."""
        self._hash_pages(seq, num_full)
        for index in range(first_page, num_full):
            page, key = seq.pages[index], seq.page_hashes[index]
            if key in self._page_of or page in self._key_of:
                continue
            self._page_of[key] = page
            self._key_of[page] = key
            self._tokens_of[page] = self._page_tokens(seq, index)
            pool.mark_cached(page)

    def evict(self, page: int) -> None:
        """Forget a page that the pool gives away."""
        key = self._key_of.pop(page)
        del self._page_of[key], self._tokens_of[page]

    def clear(self, pool: PagePool) -> None:
        for page in list(self._key_of):
            self.evict(page)
            pool.drop_cached(page)

    def _page_tokens(self, seq: Sequence, index: int) -> bytes:
        start = index * self.page_size
        return array("q", seq.token_ids[start : start + self.page_size]).tobytes()

    def _hash_pages(self, seq: Sequence, count: int) -> None:
        hashes = seq.page_hashes
        if len(hashes) >= count:
            return
        started = time.perf_counter()
        parent = hashes[-1] if hashes else _ROOT
        for index in range(len(hashes), count):
            parent = blake2b(parent + self._page_tokens(seq, index), digest_size=16).digest()
            hashes.append(parent)
        self.hash_seconds += time.perf_counter() - started

    def check_integrity(self, pool: PagePool) -> None:
        assert {p: k for k, p in self._page_of.items()} == self._key_of, "hash map and page hashes disagree"
        assert self._tokens_of.keys() == self._key_of.keys()
        marked = {p for p in range(pool.num_pages) if pool.is_cached(p)}
        assert marked == set(self._key_of), "the pool and the prefix cache disagree about what is cached"
