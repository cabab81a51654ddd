"""Pages on demand: shared through the prefix cache and by forks, copied when written, swapped page by page."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import KVCounters, KVManager, KVStats, Move, MoveKind
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.kv.swap_space import SwapSpace
from kvbench_engine.sequence import Sequence

SPARE_TOKENS = 16  # room kept for each running sequence when another one is admitted, without a watermark


class PagedKVManager(KVManager):
    """Allocates pages one by one.

    Only a page that is not full and in one page table alone is ever written. Full pages are shared (prefix cache,
    forks, host copies); a partly filled page that siblings share is copied for the one that writes first.

    ``watermark``: see ``EngineConfig``.
    """

    def __init__(
        self, max_num_seqs: int, capacity: KVCapacity, enable_prefix_caching: bool, watermark: float | None = None
    ):
        super().__init__(max_num_seqs, capacity)
        self.page_size = capacity.page_size
        self.prefix_cache = PrefixCache(self.page_size, capacity.num_pages) if enable_prefix_caching else None
        host_pages = capacity.host_slots // self.page_size
        self.swap = SwapSpace(host_pages) if host_pages else None
        self.pool = PagePool(capacity.num_pages, self.prefix_cache.evict if self.prefix_cache is not None else None)
        self._watermark = watermark
        self._promised = 0  # pages that running sequences were admitted for and have not taken
        self._pinned: list[int] = []  # sources of planned copies
        self._pinned_host: list[int] = []

    def fits(self, num_prompt: int, num_output: int) -> bool:
        return self.capacity.max_concurrency(num_prompt + num_output) >= 1

    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        prefix, ref_count = self._prefix_pages(seq), self.pool.ref_count
        taken = set(prefix)  # shared with ``leaving``: seq would keep them, so nothing is gained
        pages = (page for other in leaving for page in other.pages)
        coming = sum(ref_count[page] == 1 and page not in taken for page in pages)  # shared ones count as kept
        coming += sum(other.promised_pages for other in leaving)
        return bool(self._free_rows or leaving) and self._has_pages(seq, running, prefix, coming)

    def admit(self, seq: Sequence, running: int) -> bool:
        """Take a row, share the pages on the device, swap in those on the host; the rest is computed."""
        prefix = self._prefix_pages(seq)
        if not self._free_rows or not self._has_pages(seq, running, prefix):
            return False
        self._take_row(seq)
        table, size = self.page_table[seq.row], self.page_size
        for page in prefix:  # all of them before any allocation, which might evict one
            if page is not None:
                if self.pool.ref_count[page] == 0:
                    self._used_slots += size
                    self.counters.allocated_pages += 1
                self.pool.share(page)
        kept = min(seq.host_tokens, len(seq.host_pages) * size)
        resident = max(kept, sum(page is not None for page in prefix) * size)  # None: on the host
        for index, page in enumerate(prefix):
            if page is None:
                page = self._swap_in_page(seq.host_pages[index], min(size, kept - index * size))
            table[index] = page * size
            seq.pages.append(page)
        self.counters.swap_lost_slots += max(0, seq.host_tokens - resident)
        if self.swap is not None:
            self.swap.remove(seq)
        seq.host_tokens = 0
        seq.promised_pages = -(-seq.num_tokens // size) - len(seq.pages)
        self._promised += seq.promised_pages
        seq.num_computed = resident
        self._resident_tokens += resident
        self._count_hit(seq)
        return True

    def _has_pages(self, seq: Sequence, running: int, prefix: list[int | None], coming: int = 0) -> bool:
        """Tests whether all of ``seq`` fits once ``coming`` more pages are free.

        ``SPARE_TOKENS`` stay free for each running sequence, or the watermark's share of all pages if any runs. Pages
        promised to prompts that are computed in part are not free. Without the spare room, an admission could cause a
        preemption within a few steps, and its prompt would have been computed for nothing. The room is counted in
        tokens so that it is the same for every page size.
        """
        if self._watermark is None:
            spare = -(-running * SPARE_TOKENS // self.page_size)
        else:
            spare = int(self._watermark * self.pool.num_pages) if running else 0
        ref_count = self.pool.ref_count
        shared = sum(page is not None and ref_count[page] > 0 for page in prefix)  # need no free page
        needed = -(-seq.num_tokens // self.page_size) - shared
        return needed + spare + self._promised <= self.pool.num_available + coming

    def _prefix_pages(self, seq: Sequence) -> list[int | None]:
        """The longest prefix of ``seq`` that exists: device pages to share, None for pages that are on the host."""
        prefix: list[int | None] = list(self.prefix_cache.match(seq)) if self.prefix_cache is not None else []
        pool, swap = self.pool, self.swap
        for host_page in seq.host_pages[len(prefix) :]:
            page = swap.twin_on_device(host_page)
            alive = page is not None and (pool.ref_count[page] > 0 or pool.is_cached(page))
            prefix.append(page if alive else None)
        return prefix

    def _swap_in_page(self, host_page: int, filled: int) -> int:
        page = self._allocate()
        self._moves.append(Move(MoveKind.SWAP_IN, host_page * self.page_size, page * self.page_size, filled))
        self.swap.pool.pin(host_page)
        self._pinned_host.append(host_page)
        if filled == self.page_size:
            self.swap.make_twins(page, host_page)
        self._used_slots += filled
        self.counters.swapped_in_slots += filled
        return page

    def _count_hit(self, seq: Sequence) -> None:
        if self.prefix_cache is not None and seq.num_preemptions == 0 and seq.index == 0:  # else it finds its own pages
            seq.num_cached = seq.num_computed
            self.counters.prefix_queries += seq.num_tokens
            self.counters.prefix_hits += seq.num_cached

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate pages for ``num_tokens`` more and copy a shared page before it is written: all or nothing."""
        size, pages = self.page_size, seq.pages
        needed, copies = self._needed(seq, num_tokens)
        if not needed and not copies:
            return True
        if needed + copies > self.pool.num_available:
            return False
        if copies:
            self._copy_on_write(seq, *divmod(seq.num_computed, size))
        table = self.page_table[seq.row]
        for _ in range(needed):
            page = self._allocate()
            table[len(pages)] = page * size
            pages.append(page)
        self._take_promised(seq, min(needed, seq.promised_pages))
        return True

    def _needed(self, seq: Sequence, num_tokens: int) -> tuple[int, bool]:
        """Count the pages that ``num_tokens`` more need, and test whether a shared page must be copied first."""
        size, computed = self.page_size, seq.num_computed
        needed = max(0, -(-(computed + num_tokens) // size) - len(seq.pages))
        return needed, computed % size > 0 and self.pool.ref_count[seq.pages[computed // size]] > 1

    def has_room(self, beginning: list[Sequence], others: Iterable[tuple[Sequence, int]]) -> bool:
        needed = len(beginning) + sum(sum(self._needed(seq, num_tokens)) for seq, num_tokens in others)
        return needed <= self.pool.num_available

    def begin_pages(self, sequences: list[Sequence]) -> None:
        new_pages = self.pool.allocate_many(len(sequences))
        self.counters.allocated_pages += len(new_pages)
        for seq, page in zip(sequences, new_pages, strict=True):
            seq.pages.append(page)
            if self.swap is not None:
                self.swap.forget_device_page(page)
        rows, columns = [seq.row for seq in sequences], [len(seq.pages) - 1 for seq in sequences]
        self.page_table[rows, columns] = np.array(new_pages) * self.page_size

    def _take_promised(self, seq: Sequence, count: int) -> None:
        seq.promised_pages -= count
        self._promised -= count

    def _copy_on_write(self, seq: Sequence, index: int, filled: int) -> None:
        shared, own = seq.pages[index], self._allocate()
        self._moves.append(Move(MoveKind.COPY, shared * self.page_size, own * self.page_size, filled))
        self.pool.pin(shared)  # until copied, even if its other owners release it in this step
        self._pinned.append(shared)
        self._release(shared)
        seq.pages[index] = own
        self.page_table[seq.row, index] = own * self.page_size
        self._used_slots += filled
        self.counters.copied_pages += 1
        self.counters.copied_slots += filled

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Count the tokens, and offer full pages of known tokens to the prefix cache."""
        before = seq.num_computed
        seq.num_computed = now = before + num_tokens
        self._used_slots += num_tokens
        self._resident_tokens += num_tokens
        size = self.page_size
        if self.prefix_cache is not None and now // size > before // size:
            full = min(now, seq.num_known) // size
            if full > before // size:
                self.prefix_cache.insert(seq, full, self.pool)

    def publish(self, seq: Sequence) -> None:
        """Offer a page that was full before its last token was known."""
        num_known = len(seq.token_ids) - seq.num_pending
        if num_known % self.page_size == 0 and num_known <= seq.num_computed and self.prefix_cache is not None:
            self.prefix_cache.insert(seq, num_known // self.page_size, self.pool)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Share the parent's pages; those on the host if the parent is swapped out."""
        if parent.row < 0:
            self._fork_on_host(parent, child)
            return False
        if not self._free_rows:
            return False
        self._take_row(child)
        for page in parent.pages:
            self.pool.share(page)
        child.pages = list(parent.pages)
        self.page_table[child.row, : len(child.pages)] = self.page_table[parent.row, : len(child.pages)]
        child.num_computed = parent.num_computed
        self._resident_tokens += child.num_computed
        return True

    def _fork_on_host(self, parent: Sequence, child: Sequence) -> None:
        if not parent.host_pages:
            return
        for page in parent.host_pages:
            self.swap.pool.share(page)
        child.host_pages, child.host_tokens = list(parent.host_pages), parent.host_tokens
        self.swap.enter(child)

    def swap_out(self, seq: Sequence) -> None:
        """Swap out page by page from the first, so that the pages on the host are a usable prefix."""
        assert self.swap is not None, "there is no swap space"
        seq.host_tokens = seq.num_computed
        for index, page in enumerate(seq.pages):
            filled = min(self.page_size, seq.num_computed - index * self.page_size)
            if filled <= 0 or (host_page := self._swap_out_page(page, filled)) is None:
                break
            seq.host_pages.append(host_page)
        seq.num_swapped_pages += len(seq.host_pages)
        self.swap.enter(seq)
        self._leave_device(seq)

    def _swap_out_page(self, page: int, filled: int) -> int | None:
        twin = self.swap.twin_on_host(page)
        if twin is not None:
            self.swap.pool.share(twin)
            self.counters.swap_kept_slots += filled
            return twin
        host_page = self.swap.allocate()
        if host_page is not None:
            self._moves.append(Move(MoveKind.SWAP_OUT, page * self.page_size, host_page * self.page_size, filled))
            if filled == self.page_size:
                self.swap.make_twins(page, host_page)
            self.counters.swapped_out_slots += filled
            self.counters.swapped_out_pages += 1
        return host_page

    def free(self, seq: Sequence) -> None:
        if self.swap is not None:
            self.swap.remove(seq)
        if seq.row >= 0:
            self._leave_device(seq)

    def _leave_device(self, seq: Sequence) -> None:
        """Release the pages, the last one first: the end of a prompt is shared less often than its beginning."""
        for index in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[index]
            self._release(page)
            if self.pool.ref_count[page] == 0:
                self._used_slots -= min(self.page_size, max(0, seq.num_computed - index * self.page_size))
        seq.pages.clear()
        self._take_promised(seq, seq.promised_pages)
        self._return_row(seq)

    def _allocate(self) -> int:
        page = self.pool.allocate()
        self.counters.allocated_pages += 1
        if self.swap is not None:
            self.swap.forget_device_page(page)
        return page

    def _release(self, page: int) -> None:
        self.pool.release(page)
        self.counters.freed_pages += self.pool.ref_count[page] == 0

    def moves_done(self) -> None:
        for page in self._pinned:
            self.pool.unpin(page)
        for page in self._pinned_host:
            self.swap.pool.unpin(page)
        self._pinned.clear()
        self._pinned_host.clear()

    def forget_unfinished(self, clear_cache: bool) -> None:
        if self.swap is not None:
            self.swap.forget_twins()
        if clear_cache and self.prefix_cache is not None:
            self.prefix_cache.clear(self.pool)

    def forget_prefix(self, seq: Sequence) -> None:
        for page in self.prefix_cache.forget(seq) if self.prefix_cache is not None else ():
            self.pool.drop_cached(page)

    def reset_prefix_cache(self) -> bool:
        if self.pool.num_owned:
            return False
        if self.prefix_cache is not None:
            self.prefix_cache.clear(self.pool)
        return True

    def read_counters(self) -> KVCounters:
        if self.prefix_cache is not None:
            self.counters.prefix_evictions = self.prefix_cache.evictions
            self.counters.hash_seconds = self.prefix_cache.seconds
        return super().read_counters()

    def stats(self) -> KVStats:
        pool, size = self.pool, self.page_size
        host = self.swap.pool if self.swap is not None else None
        return KVStats(
            pages_total=pool.num_pages,
            pages_free=pool.num_available - pool.num_cached,
            pages_owned=pool.num_owned,
            pages_logical=pool.num_references,
            pages_cached=pool.num_cached,
            pages_pinned=pool.num_pinned,
            slots_total=self.capacity.num_slots,
            slots_reserved=pool.num_owned * size,
            slots_used=self._used_slots,
            slots_shared=self._resident_tokens - self._used_slots,
            slots_cached=pool.num_cached * size,
            slots_pinned=pool.num_pinned * size,
            slots_fragmented=0,
            page_table_bytes=self.capacity.page_table_bytes,
            host_slots_total=self.capacity.host_slots,
            host_slots_used=host.num_owned * size if host is not None else 0,
        )

    def check_integrity(self, sequences: list[Sequence]) -> None:
        self._check_rows(sequences)
        resident = [seq for seq in sequences if seq.row >= 0]
        self.pool.check_integrity([seq.pages for seq in resident])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool)
        if self.swap is not None:
            self.swap.check_integrity()
        used: dict[int, int] = {}
        size = self.page_size
        for seq in resident:
            for index, page in enumerate(seq.pages):
                assert self.page_table[seq.row, index] == page * size
                used[page] = max(used.get(page, 0), min(size, max(0, seq.num_computed - index * size)))
            own = min(seq.num_computed, seq.num_known) // size
            cached = any(self.pool.is_cached(page) for page in seq.pages[own:])
            assert not cached, "a page is cached that is not full of known tokens"
            missing = max(0, -(-seq.num_tokens // size) - len(seq.pages))
            kept = seq.promised_pages == missing or (seq.num_uncomputed <= 1 and not seq.promised_pages)
            assert kept, "a prompt computed in part lost the promise of its pages, or gained one"
        assert sum(used.values()) == self._used_slots, "used slots do not add up"
        assert sum(seq.promised_pages for seq in sequences) == self._promised, "promises do not add up"
        assert self.counters.allocated_pages - self.counters.freed_pages == self.pool.num_owned
