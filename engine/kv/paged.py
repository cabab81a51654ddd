"""Pages on demand: shared through the prefix cache and by forks, copied when written, swapped page by page."""

from __future__ import annotations

import math
from collections.abc import Collection

import numpy as np

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.groups import first_page, most_pages
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

    A sequence has one page of each group for every ``page_size`` tokens, and of a group with a window only those that
    its next token sees: the others are freed after each chunk of a prompt, and before a page is taken. A step in flight
    may still read them, but the device does the steps in order, so a new owner writes later.

    ``watermark``: see ``EngineConfig``.
    """

    def __init__(
        self, max_num_seqs: int, capacity: KVCapacity, enable_prefix_caching: bool, watermark: float | None = None
    ):
        super().__init__(max_num_seqs, capacity)
        self.page_size = capacity.page_size
        self._windows = [(g, window) for g, window in enumerate(capacity.windows) if window is not None]
        self.prefix_cache = (
            PrefixCache(self.page_size, capacity.num_pages, capacity.windows) if enable_prefix_caching else None
        )
        host_pages = capacity.host_slots // self.page_size
        self.swap = SwapSpace(host_pages) if host_pages else None
        self.pool = PagePool(capacity.num_pages, self.prefix_cache.evict if self.prefix_cache is not None else None)
        self._watermark = watermark
        self._used_slots = 0  # slots that hold a token of a resident sequence, shared ones counted once
        self._held_slots = 0  # slots of all resident sequences, shared ones counted for each
        self._promised = 0  # pages that running sequences were admitted for and have not taken
        self._pinned: list[int] = []  # sources of planned copies
        self._pinned_host: list[int] = []

    def fits(self, num_prompt: int, num_output: int) -> bool:
        return self.capacity.pages_of(num_prompt + num_output, self.capacity.step_tokens) <= self.pool.num_pages

    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        prefix, ref_count = self._prefix_pages(seq), self.pool.ref_count
        taken = set(prefix)  # shared with ``leaving``: seq would keep them, so nothing is gained
        pages = (page for other in leaving for page in other.pages if page >= 0)
        coming = sum(ref_count[page] == 1 and page not in taken for page in pages)  # shared ones count as kept
        coming += sum(other.promised_pages for other in leaving)
        return bool(self._free_rows or leaving) and self._has_pages(seq, running, prefix, coming)

    def admit(self, seq: Sequence, running: int) -> bool:
        """Take a row, share the pages on the device, swap in those on the host; the rest is computed."""
        prefix = self._prefix_pages(seq)
        if not self._free_rows or not self._has_pages(seq, running, prefix):
            return False
        self._take_row(seq)
        size, groups = self.page_size, self.num_groups
        for page in prefix:  # all of them before any allocation, which might evict one
            if page is not None and page >= 0:
                if self.pool.ref_count[page] == 0:
                    self._used_slots += size
                    self.counters.allocated_pages += 1
                self.pool.share(page)
        resident = self._resident(seq, prefix)
        for at, page in enumerate(prefix):
            if page is None:
                page = self._swap_in_page(seq.host_pages[at], min(size, resident - at // groups * size))
            if page >= 0:
                self.page_table[at % groups, seq.row, at // groups] = page * size
            seq.pages.append(page)
        self.counters.swap_lost_slots += max(0, self._slots_of(seq.host_tokens) - self._slots_of(resident))
        if self.swap is not None:
            self.swap.remove(seq)
        seq.host_tokens = 0
        seq.num_computed = seq.trimmed_at = resident
        seq.promised_pages = self._missing(seq, seq.pages, resident)
        self._promised += seq.promised_pages
        self._held_slots += self._slots_of(resident)
        self._count_hit(seq)
        return True

    def _resident(self, seq: Sequence, prefix: list[int | None]) -> int:
        """The tokens whose KV ``prefix`` holds; a page on the host may be filled in part."""
        tokens = len(prefix) // self.num_groups * self.page_size
        return min(tokens, seq.host_tokens) if None in prefix else tokens

    def _first(self, group: int, computed: int) -> int:
        """The first page of ``group`` that tokens after the first ``computed`` still see."""
        return first_page(self.capacity.windows[group], computed, self.page_size)

    def _missing(self, seq: Sequence, pages: list[int | None], computed: int, owners: float = 1) -> int:
        """The most pages that ``seq`` will still take for its present tokens.

        ``pages``: those that it has, or will have; None: it will be swapped in. ``computed``: tokens that are computed,
        or will be with them. What leaves a window makes room, unless more than ``owners`` sequences have it: 0 before
        the pages are shared with ``seq``.
        """
        size, groups, ref_count = self.page_size, self.num_groups, self.pool.ref_count
        columns = len(pages) // groups
        missing = -(-seq.num_tokens // size) - columns
        if computed >= seq.num_tokens or missing <= 0:
            return 0
        total = (groups - len(self._windows)) * missing
        for group, window in self._windows:
            most = most_pages(window, seq.num_tokens, self.capacity.step_tokens, size)
            held = pages[self._first(group, computed) * groups + group :: groups]
            coming_back = sum(page is None or ref_count[page] <= owners for page in held)
            total += max(0, min(missing, most - coming_back))
        return total

    def _slots_of(self, computed: int, trimmed_at: int | None = None) -> int:
        """The slots that hold one of ``computed`` tokens, once pages were freed at ``trimmed_at``; None: just now."""
        trimmed_at = computed if trimmed_at is None else trimmed_at
        freed = sum(self._first(group, trimmed_at) for group, _ in self._windows)
        return computed * self.num_groups - freed * self.page_size

    def _trim(self, seq: Sequence) -> None:
        """Free the pages that no later token of ``seq`` sees."""
        before, now, groups = seq.trimmed_at, seq.num_computed, self.num_groups
        if before == now or not self._windows:
            return
        seq.trimmed_at = now
        for group, _ in self._windows:
            for index in range(self._first(group, before), self._first(group, now)):
                at = index * groups + group
                self._release(seq.pages[at])
                if self.pool.ref_count[seq.pages[at]] == 0:
                    self._used_slots -= self.page_size
                self._held_slots -= self.page_size
                seq.pages[at] = -1

    def _has_pages(self, seq: Sequence, running: int, prefix: list[int | None], coming: int = 0) -> bool:
        """Tests whether all of ``seq`` fits once ``coming`` more pages are free.

        ``SPARE_TOKENS`` stay free for each running sequence, or the watermark's share of all pages if any runs. Pages
        promised to prompts that are computed in part are not free. Without the spare room, an admission could cause a
        preemption within a few steps, and its prompt would have been computed for nothing. The room is counted in
        tokens so that it is the same for every page size.
        """
        if self._watermark is None:
            spare = -(-running * SPARE_TOKENS // self.page_size) * self.num_groups
        else:
            spare = int(self._watermark * self.pool.num_pages) if running else 0
        ref_count = self.pool.ref_count
        needed = sum(page is None or (page >= 0 and ref_count[page] == 0) for page in prefix)  # others are shared
        needed += self._missing(seq, prefix, self._resident(seq, prefix), owners=0)
        return needed + spare + self._promised <= self.pool.num_available + coming

    def _prefix_pages(self, seq: Sequence) -> list[int | None]:
        """The longest prefix of ``seq`` that exists: device pages to share, None for pages that are on the host."""
        cached = self.prefix_cache.match(seq) if self.prefix_cache is not None else []
        if len(cached) >= len(seq.host_pages):
            return cached
        pool, swap = self.pool, self.swap
        prefix: list[int | None] = []
        for at, host_page in enumerate(seq.host_pages):
            page = cached[at] if at < len(cached) else -1
            if host_page < 0:
                page = -1
            elif page < 0:
                page = swap.twin_on_device(host_page)
                if page is not None and not (pool.ref_count[page] > 0 or pool.is_cached(page)):
                    page = None
            prefix.append(page)
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
        size, pages, groups = self.page_size, seq.pages, self.num_groups
        columns, copies = self._needed(seq, num_tokens)
        if columns:
            self._trim(seq)
        after = seq.num_computed + num_tokens
        promises = seq.promised_pages > 0 or after < seq.num_tokens
        if not columns and not copies and not promises:
            return True
        if (columns + copies) * groups > self.pool.num_available:
            return False
        if copies:
            index, filled = divmod(seq.num_computed, size)
            for group in range(groups):
                self._copy_on_write(seq, group, index, filled)
        for _ in range(columns):
            for group in range(groups):
                page = self._allocate()
                self.page_table[group, seq.row, len(pages) // groups] = page * size
                pages.append(page)
        if promises:
            self._take_promised(seq, seq.promised_pages - self._missing(seq, pages, after))
        return True

    def _needed(self, seq: Sequence, num_tokens: int) -> tuple[int, bool]:
        """Count the pages a group that ``num_tokens`` more need, and test whether shared ones are copied first."""
        size, computed, groups = self.page_size, seq.num_computed, self.num_groups
        columns = max(0, -(-(computed + num_tokens) // size) - len(seq.pages) // groups)
        return columns, computed % size > 0 and self.pool.ref_count[seq.pages[computed // size * groups]] > 1

    def has_room(self, beginning: list[Sequence], others: Collection[tuple[Sequence, int]]) -> bool:
        if self._windows:  # the steady ones were not committed one by one
            for seq in beginning:
                self._trim(seq)
        columns = len(beginning) + sum(sum(self._needed(seq, num_tokens)) for seq, num_tokens in others)
        return columns * self.num_groups <= self.pool.num_available

    def begin_pages(self, sequences: list[Sequence]) -> None:
        groups = self.num_groups
        new_pages = self.pool.allocate_many(len(sequences) * groups)
        self.counters.allocated_pages += len(new_pages)
        if self.swap is not None:
            for page in new_pages:
                self.swap.forget_device_page(page)
        for at, seq in zip(range(0, len(new_pages), groups), sequences, strict=True):
            seq.pages += new_pages[at : at + groups]
        rows, columns = [seq.row for seq in sequences], [len(seq.pages) // groups - 1 for seq in sequences]
        self.page_table[:, rows, columns] = np.array(new_pages).reshape(-1, groups).T * self.page_size

    def _take_promised(self, seq: Sequence, count: int) -> None:
        seq.promised_pages -= count
        self._promised -= count

    def _copy_on_write(self, seq: Sequence, group: int, index: int, filled: int) -> None:
        at = index * self.num_groups + group
        shared, own = seq.pages[at], self._allocate()
        self._moves.append(Move(MoveKind.COPY, shared * self.page_size, own * self.page_size, filled))
        self.pool.pin(shared)  # until copied, even if its other owners release it in this step
        self._pinned.append(shared)
        self._release(shared)
        seq.pages[at] = own
        self.page_table[group, seq.row, index] = own * self.page_size
        self._used_slots += filled
        self.counters.copied_pages += 1
        self.counters.copied_slots += filled

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Count the tokens, and offer full pages of known tokens to the prefix cache."""
        before = seq.num_computed
        seq.num_computed = now = before + num_tokens
        self.commit_decodes(num_tokens)
        size = self.page_size
        if self.prefix_cache is not None and now // size > before // size:
            full = min(now, seq.num_known) // size
            if full > before // size:
                self.prefix_cache.insert(seq, full, self.pool)
        if num_tokens > 1 or now < seq.num_tokens:
            self._trim(seq)

    def commit_decodes(self, num_tokens: int) -> None:
        self._used_slots += num_tokens * self.num_groups
        self._held_slots += num_tokens * self.num_groups

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
            if page >= 0:
                self.pool.share(page)
        child.pages, child.trimmed_at = list(parent.pages), parent.trimmed_at
        columns = len(child.pages) // self.num_groups
        self.page_table[:, child.row, :columns] = self.page_table[:, parent.row, :columns]
        child.num_computed = parent.num_computed
        self._held_slots += self._slots_of(child.num_computed, child.trimmed_at)
        return True

    def _fork_on_host(self, parent: Sequence, child: Sequence) -> None:
        if not parent.host_pages:
            return
        for page in parent.host_pages:
            if page >= 0:
                self.swap.pool.share(page)
        child.host_pages, child.host_tokens = list(parent.host_pages), parent.host_tokens
        self.swap.enter(child)

    def swap_out(self, seq: Sequence) -> None:
        """Swap out page by page from the first, so that the pages on the host are a usable prefix.

        Where pages left a window, only all pages together are of use: a shorter prefix would need those that are gone.
        """
        assert self.swap is not None, "there is no swap space"
        self._trim(seq)
        size, groups = self.page_size, self.num_groups
        seq.host_tokens = seq.num_computed
        pages = seq.pages[: -(-seq.num_computed // size) * groups]
        if self._windows and not self.swap.make_room([page for page in pages if page >= 0]):
            pages = []
        for at, page in enumerate(pages):
            if page >= 0:
                page = self._swap_out_page(page, min(size, seq.num_computed - at // groups * size))
            if page is None:
                break
            seq.host_pages.append(page)
        seq.num_swapped_pages += sum(page >= 0 for page in seq.host_pages)
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
        self._held_slots -= self._slots_of(seq.num_computed, seq.trimmed_at)
        groups = self.num_groups
        for at in range(len(seq.pages) - 1, -1, -1):
            page = seq.pages[at]
            if page < 0:
                continue
            self._release(page)
            if self.pool.ref_count[page] == 0:
                self._used_slots -= min(self.page_size, max(0, seq.num_computed - at // groups * self.page_size))
        seq.pages.clear()
        seq.trimmed_at = 0
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
            slots_shared=self._held_slots - self._used_slots,
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
        self.pool.check_integrity([[page for page in seq.pages if page >= 0] for seq in resident])
        if self.prefix_cache is not None:
            self.prefix_cache.check_integrity(self.pool)
        if self.swap is not None:
            self.swap.check_integrity()
        used: dict[int, int] = {}
        size, groups = self.page_size, self.num_groups
        for seq in resident:
            assert len(seq.pages) % groups == 0, "a group has fewer pages than another"
            for at, page in enumerate(seq.pages):
                index, group = divmod(at, groups)
                gone = index < self._first(group, seq.trimmed_at)
                assert (page < 0) == gone, "a page is kept too long, or too short"
                if page >= 0:
                    assert self.page_table[group, seq.row, index] == page * size
                    used[page] = max(used.get(page, 0), min(size, max(0, seq.num_computed - index * size)))
            own = min(seq.num_computed, seq.num_known) // size
            cached = any(page >= 0 and self.pool.is_cached(page) for page in seq.pages[own * groups :])
            assert not cached, "a page is cached that is not full of known tokens"
            least = self._missing(seq, seq.pages, seq.num_computed, owners=math.inf)
            most = groups * max(0, -(-seq.num_tokens // size) - len(seq.pages) // groups)
            kept = least <= seq.promised_pages <= most or (seq.num_uncomputed <= 1 and not seq.promised_pages)
            assert kept, "a prompt computed in part lost the promise of its pages, or gained one"
        assert sum(used.values()) == self._used_slots, "used slots do not add up"
        held = sum(self._slots_of(seq.num_computed, seq.trimmed_at) for seq in resident)
        assert held == self._held_slots, "slots of sequences do not add up"
        assert sum(seq.promised_pages for seq in sequences) == self._promised, "promises do not add up"
        assert self.counters.allocated_pages - self.counters.freed_pages == self.pool.num_owned
