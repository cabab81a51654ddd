"""The interface of both KV managers and their common parts: page-table rows, planned moves, counters. No torch.

    paged        page table row   [ 7 | 3 | 9 ]      pages taken one by one, as the sequence grows
                 pool             .. 3 .. 7 .. 9 ..  in any order; a page may be shared
    contiguous   page table row   [ base ]           one reservation from the first token, in one slab
                 slab             |seq A......|seq B...|  hole  |seq C..|

Both write ``page_table[group, row, i]`` = first slot of the sequence's i-th page in that group of layers. A contiguous
reservation is one long page; a group with a window has a part of it as a ring, whose entries are all the same.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.sequence import Sequence

LEDGER = ("tokens", "waste", "cached", "pinned", "free", "fragmented")
"""The states of a KV slot; each slot is in exactly one.

tokens: holds a token of a sequence. waste: reserved and empty (internal waste). cached: kept for the prefix cache only.
pinned: owned by no sequence, but a copy of this step still reads it. free: can be allocated. fragmented: free, but in
pieces smaller than the waiting reservation (external fragmentation, contiguous only).
"""


class MoveKind(enum.Enum):
    """The way of a move: within the device, from device to host, or back."""

    COPY = "copy"
    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"


class Move(NamedTuple):
    """Copies ``num_slots`` slots from slot ``source`` to slot ``target``. Host slots are numbered on their own."""

    kind: MoveKind
    source: int
    target: int
    num_slots: int


@dataclass(frozen=True)
class KVStats:
    """The use of the KV memory. In the contiguous layout a "page" is one reservation."""

    pages_total: int  # contiguous: reservations of max_model_len that the slab would hold
    pages_free: int  # hold nothing; without the cached pages
    pages_owned: int  # in at least one page table
    pages_logical: int  # entries of all page tables: a page counts once for each sequence that shares it
    pages_cached: int  # owned by no sequence, kept for the prefix cache, evictable
    pages_pinned: int  # owned by no sequence, kept until they are copied: none between two steps
    slots_total: int
    slots_reserved: int  # slots of owned pages
    slots_used: int  # of those, slots that hold a token's KV (a shared page counts once)
    slots_shared: int  # saved by sharing: slots of all sequences, less slots_used
    slots_cached: int
    slots_pinned: int
    slots_fragmented: int  # free, but too scattered for the waiting reservation; paged: 0
    page_table_bytes: int
    host_slots_total: int = 0  # swap space, in slots
    host_slots_used: int = 0  # of those, slots that swapped-out sequences hold

    @property
    def slots_free(self) -> int:
        """Free slots, with the fragmented ones."""
        return self.slots_total - self.slots_reserved - self.slots_cached - self.slots_pinned

    def ledger(self) -> dict[str, int]:
        """Slots by state; the keys are ``LEDGER`` and the values add up to ``slots_total``."""
        return {
            "tokens": self.slots_used,
            "waste": self.slots_reserved - self.slots_used,
            "cached": self.slots_cached,
            "pinned": self.slots_pinned,
            "free": self.slots_free - self.slots_fragmented,
            "fragmented": self.slots_fragmented,
        }


@dataclass
class KVCounters:
    """Counters of a KV manager."""

    prefix_hits: int = 0  # tokens
    prefix_queries: int = 0  # tokens
    prefix_evictions: int = 0  # pages
    hash_seconds: float = 0.0  # of finding and storing pages in the prefix cache; the name is of when they were hashed
    allocated_pages: int = 0  # pages that became owned: new ones, and hits of the prefix cache
    freed_pages: int = 0  # pages no longer owned; allocated - freed = owned
    copied_pages: int = 0  # copy-on-write; contiguous: forks copied whole
    copied_slots: int = 0  # slots with a token; the kernels move whole pages, here as in swaps
    swapped_out_slots: int = 0
    swapped_out_pages: int = 0  # of them, in whole pages, as they are moved; contiguous: none
    swapped_in_slots: int = 0
    swap_kept_slots: int = 0  # swapped out without a move: the host still had them
    swap_lost_slots: int = 0  # slots without room on the host, or that lost it: computed again
    refused_fragmented: int = 0  # contiguous: sequences that waited although enough slots were free


class KVManager(ABC):
    """Owns the KV slots. The scheduler calls these methods; the executor reads ``page_table`` and does the moves.

    ``page_table``: int64 ``[groups, max_num_seqs, max_pages_per_seq]``. A sequence is *resident* while it has a row
    (``seq.row >= 0``), *swapped* while it has KV on the host, and may be neither.
    """

    def __init__(self, max_num_seqs: int, capacity: KVCapacity):
        self.capacity = capacity
        self.counters = KVCounters()
        self.num_groups = len(capacity.windows)
        self.page_table = np.zeros((self.num_groups, max_num_seqs, capacity.max_pages_per_seq), dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._moves: list[Move] = []

    @abstractmethod
    def fits(self, num_prompt: int, num_output: int) -> bool:
        """Tests whether a sequence of these lengths could run alone."""

    @abstractmethod
    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        """Tests whether ``admit`` would succeed if the resident sequences ``leaving`` were preempted first."""

    @abstractmethod
    def admit(self, seq: Sequence, running: int) -> bool:
        """Make a waiting sequence resident beside ``running`` others, with the KV of it that still exists."""

    @abstractmethod
    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Allocate writable slots for ``num_tokens`` more tokens; False, with nothing done, without room."""

    def has_room(self, beginning: list[Sequence], others: Collection[tuple[Sequence, int]]) -> bool:
        """Tests whether ``begin_pages`` of the first and ``grow`` of all others by so many tokens would succeed."""
        return True  # contiguous: they have their room

    def begin_pages(self, sequences: list[Sequence]) -> None:  # noqa: B027 (only pages need it)
        """Give each sequence the page of its next token: their pages are full, and no admission promised them more."""

    @abstractmethod
    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """Count ``num_tokens`` more tokens of ``seq`` as computed: their KV is written before any later launch."""

    @abstractmethod
    def commit_decodes(self, num_tokens: int) -> None:
        """Count ``num_tokens`` tokens that the caller added to ``num_computed``, one a sequence, none of them known."""

    def publish(self, seq: Sequence) -> None:  # noqa: B027 (only pages need it)
        """Offer a page to the prefix cache if the newly known token of ``seq`` completes it."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child`` the parent's KV. False: there is no room; ``child`` has to wait."""

    @abstractmethod
    def swap_out(self, seq: Sequence) -> None:
        """Free ``seq`` on the device; as much of its KV as fits goes to the host."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Free all KV of ``seq``, on the device and on the host."""

    def take_moves(self) -> list[Move]:
        """The moves planned since the last call; to be done in order, before the step's writes."""
        moves, self._moves = self._moves, []
        return moves

    def moves_done(self) -> None:  # noqa: B027 (only pages need it)
        """Unpin the pages that the taken moves read: the moves are done, or queued before everything later."""

    def forget_unfinished(self, clear_cache: bool) -> None:  # noqa: B027 (only pages need it)
        """Forget which host pages are copies of device pages, after a failed step, whose moves may not be done.

        ``clear_cache``: the step may not have computed pages that are in the prefix cache, so clear it.
        """

    def forget_prefix(self, seq: Sequence) -> None:  # noqa: B027 (only pages are cached)
        """Drop what the prefix cache holds of ``seq``, whose KV may be wrong, and all that begins with it."""

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Drop every cached page; False, with nothing done, while a sequence owns pages."""

    @abstractmethod
    def stats(self) -> KVStats:
        """The present use of the memory. O(1); contiguous: O(holes and sequences)."""

    def read_counters(self) -> KVCounters:
        """A copy of the counters."""
        return replace(self.counters)

    @abstractmethod
    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert every invariant over all live sequences, resident or not. O(pages): for tests and KVBENCH_CHECK."""

    def _take_row(self, seq: Sequence) -> None:
        assert seq.row < 0 and not seq.pages, f"{seq.request_id} is admitted already"
        seq.row = self._free_rows.pop()

    def _return_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.num_computed = 0

    def _check_rows(self, sequences: list[Sequence]) -> None:
        rows = [seq.row for seq in sequences if seq.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(self.page_table.shape[1])), "rows are lost or shared"
        for seq in sequences:
            assert (seq.row >= 0) == bool(seq.pages) or not seq.num_computed, "KV without a row"
