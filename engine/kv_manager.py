"""Who owns which KV slots: the paged manager and the contiguous baseline behind one interface. No torch.

    paged        page table row   [ 7 | 3 | 9 ]      pages taken one by one, as the sequence grows
                 pool             .. 3 .. 7 .. 9 ..  any page will do; a page may be shared
    contiguous   page table row   [ base ]           one reservation of max_model_len slots from the first token
                 slab             |seq A............|seq B............|

Both write ``page_table[row, i]`` = first slot of the sequence's i-th page, which is all that the kernels see: a
contiguous reservation is one long page.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.kv_budget import KVCapacity
from engine.page_pool import PagePool
from engine.prefix_cache import PrefixCache
from engine.sequence import Sequence
from engine.stats import KVStats

SPARE_TOKENS = 16  # that each running sequence may still grow before an admission would be regretted


class KVManager(Protocol):
    """What the scheduler asks for. ``page_table`` is int64 ``[max_num_seqs, max_pages_per_seq]``."""

    capacity: KVCapacity
    page_table: np.ndarray

    def fits(self, num_tokens: int) -> bool: ...
    def admit(self, seq: Sequence, running: int) -> bool: ...
    def grow(self, seq: Sequence, num_tokens: int) -> bool: ...
    def commit(self, seq: Sequence, num_tokens: int) -> None: ...
    def free(self, seq: Sequence) -> None: ...
    def reset_prefix_cache(self) -> bool: ...
    def stats(self) -> KVStats: ...
    def prefix_counters(self) -> tuple[int, int, float]: ...
    def check_integrity(self, sequences: list[Sequence]) -> None: ...


class _RowTable:
    """Rows of the page table, handed to admitted sequences."""

    def __init__(self, max_num_seqs: int, capacity: KVCapacity):
        self.capacity = capacity
        self.page_table = np.zeros((max_num_seqs, capacity.max_pages_per_seq), dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` could run if it were alone."""
        return self.capacity.max_concurrency(num_tokens) >= 1

    def _take_row(self, seq: Sequence) -> None:
        assert seq.row < 0 and not seq.pages, f"{seq.request_id} is admitted already"
        seq.row = self._free_rows.pop()

    def _return_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = -1

    def _append_page(self, seq: Sequence, page: int) -> None:
        self.page_table[seq.row, len(seq.pages)] = page * self.capacity.page_size
        seq.pages.append(page)


class PagedKVManager(_RowTable):
    """Pages on demand, shared through the prefix cache when that is on."""

    def __init__(self, max_num_seqs: int, capacity: KVCapacity, enable_prefix_caching: bool):
        super().__init__(max_num_seqs, capacity)
        self.prefix_cache = PrefixCache(capacity.page_size) if enable_prefix_caching else None
        self.pool = PagePool(capacity.num_pages, self.prefix_cache.evict if self.prefix_cache else None)
        self._used_slots = 0  # slots of owned pages that hold a token, shared pages counted once

    def admit(self, seq: Sequence, running: int) -> bool:
        """Take a row and the cached pages, if the rest of ``seq`` fits now with room left for the running ones.

        The room keeps an admission from causing a preemption in the very next steps: a sequence that is admitted only
        to be thrown out computes its prompt for nothing. It is counted in tokens, so that page sizes compare alike.
        """
        spare = -(-running * SPARE_TOKENS // self.capacity.page_size)
        matched = self.prefix_cache.match(seq) if self.prefix_cache else []
        matched_free = sum(self.pool.ref_count[page] == 0 for page in matched)
        needed = -(-seq.num_tokens // self.capacity.page_size) - len(matched) + matched_free
        if needed + spare > self.pool.num_available:
            return False
        self._take_row(seq)
        for page in matched:
            if self.pool.ref_count[page] == 0:
                self._used_slots += self.capacity.page_size
            self.pool.share(page)
            self._append_page(seq, page)
        seq.num_computed = len(matched) * self.capacity.page_size
        if self.prefix_cache and seq.num_preemptions == 0:  # a preempted sequence meets its own pages: no merit
            seq.num_cached = seq.num_computed
            self.prefix_cache.queries += seq.num_tokens
            self.prefix_cache.hits += seq.num_cached
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more computed tokens: all of it, or nothing and False."""
        needed = -(-(seq.num_computed + num_tokens) // self.capacity.page_size) - len(seq.pages)
        if needed > self.pool.num_available:
            return False
        for _ in range(needed):
            self._append_page(seq, self.pool.allocate())
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens of ``seq`` have their KV; full pages are offered to the prefix cache."""
        full_before = seq.num_computed // self.capacity.page_size
        seq.num_computed += num_tokens
        self._used_slots += num_tokens
        if self.prefix_cache:
            full_now = seq.num_computed // self.capacity.page_size
            if full_now > full_before:
                self.prefix_cache.insert(seq, full_before, full_now, self.pool)

    def free(self, seq: Sequence) -> None:
        """Give everything back, last page first: the end of a prompt is shared less often than its beginning."""
        page_size = self.capacity.page_size
        for index in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[index]
            self.pool.release(page)
            if self.pool.ref_count[page] == 0:
                self._used_slots -= min(page_size, max(0, seq.num_computed - index * page_size))
        seq.pages.clear()
        seq.num_computed = 0
        self._return_row(seq)

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page; False, and nothing done, while a sequence owns pages."""
        if self.pool.num_owned:
            return False
        if self.prefix_cache:
            self.prefix_cache.clear(self.pool)
        return True

    def prefix_counters(self) -> tuple[int, int, float]:
        """Hits and queries in tokens, seconds spent on hashing."""
        cache = self.prefix_cache
        return (cache.hits, cache.queries, cache.hash_seconds) if cache else (0, 0, 0.0)

    def stats(self) -> KVStats:
        pool = self.pool
        return KVStats(
            pages_total=pool.num_pages,
            pages_free=pool.num_available - pool.num_cached,
            pages_owned=pool.num_owned,
            pages_cached=pool.num_cached,
            slots_total=self.capacity.num_slots,
            slots_reserved=pool.num_owned * self.capacity.page_size,
            slots_used=self._used_slots,
            page_table_bytes=self.capacity.page_table_bytes,
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        self.pool.check_integrity([seq.pages for seq in sequences])
        if self.prefix_cache:
            self.prefix_cache.check_integrity(self.pool)
        used: dict[int, int] = {}
        for seq in sequences:
            for index, page in enumerate(seq.pages):
                assert self.page_table[seq.row, index] == page * self.capacity.page_size
                held = min(self.capacity.page_size, max(0, seq.num_computed - index * self.capacity.page_size))
                used[page] = max(used.get(page, 0), held)
        assert sum(used.values()) == self._used_slots, "used slots do not add up"


class ContiguousKVManager(_RowTable):
    """The baseline everybody had before: ``max_model_len`` slots reserved per sequence from its first token."""

    def __init__(self, max_num_seqs: int, capacity: KVCapacity):
        super().__init__(max_num_seqs, capacity)
        self._free_reservations = list(range(capacity.num_pages - 1, -1, -1))
        self._used_slots = 0

    def admit(self, seq: Sequence, running: int) -> bool:
        if not self._free_reservations:
            return False
        self._take_row(seq)
        self._append_page(seq, self._free_reservations.pop())
        return True

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        assert seq.num_computed + num_tokens <= self.capacity.page_size, "a sequence outgrew max_model_len"
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_computed += num_tokens
        self._used_slots += num_tokens

    def free(self, seq: Sequence) -> None:
        self._used_slots -= seq.num_computed
        self._free_reservations.append(seq.pages.pop())
        seq.num_computed = 0
        self._return_row(seq)

    def reset_prefix_cache(self) -> bool:
        """There is no cache to reset; False while a sequence owns a reservation, as in the paged layout."""
        return len(self._free_reservations) == self.capacity.num_pages

    def prefix_counters(self) -> tuple[int, int, float]:
        return (0, 0, 0.0)

    def stats(self) -> KVStats:
        owned = self.capacity.num_pages - len(self._free_reservations)
        return KVStats(
            pages_total=self.capacity.num_pages,
            pages_free=len(self._free_reservations),
            pages_owned=owned,
            pages_cached=0,
            slots_total=self.capacity.num_slots,
            slots_reserved=owned * self.capacity.page_size,
            slots_used=self._used_slots,
            page_table_bytes=self.capacity.page_table_bytes,
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        owned = [page for seq in sequences for page in seq.pages]
        assert sorted(owned + self._free_reservations) == list(range(self.capacity.num_pages))
        assert sum(seq.num_computed for seq in sequences) == self._used_slots


def make_kv_manager(layout: str, max_num_seqs: int, capacity: KVCapacity, enable_prefix_caching: bool) -> KVManager:
    if layout == "contiguous":
        return ContiguousKVManager(max_num_seqs, capacity)
    return PagedKVManager(max_num_seqs, capacity, enable_prefix_caching)
