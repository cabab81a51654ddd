"""The interface of both KV managers, and what they share: page-table rows, planned moves, counts. No torch.

    paged        page table row   [ 7 | 3 | 9 ]      pages taken one by one, as the sequence grows
                 pool             .. 3 .. 7 .. 9 ..  any page will do; a page may be shared
    contiguous   page table row   [ base ]           one reservation from the first token, in one slab
                 slab             |seq A......|seq B...|  hole  |seq C..|

Both write ``page_table[row, i]`` = first slot of the sequence's i-th page, which is all that the kernels see: a
contiguous reservation is one long page.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from engine.kv.budget import KVCapacity
from engine.sequence import Sequence

LEDGER = ("tokens", "waste", "cached", "pinned", "free", "fragmented")
"""The states of a KV slot; each slot is in exactly one.

tokens: holds a token of a sequence. waste: reserved and empty (internal waste). cached: kept for the prefix cache only.
pinned: owned by nobody, and a copy of this step still reads it. free: can be allocated. fragmented: free, but not in
one piece as large as the reservation that waits (external fragmentation, contiguous only).
"""


class MoveKind(enum.Enum):
    """Where KV is moved: within the device, from device to host, or back."""

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
    """Where the KV memory is. For the contiguous layout one "page" is one reservation."""

    pages_total: int  # contiguous: reservations of max_model_len that the slab would hold
    pages_free: int  # never written or no longer wanted, cached pages not among them
    pages_owned: int  # named by at least one sequence
    pages_cached: int  # owned by nobody, kept for the prefix cache, evictable
    pages_pinned: int  # owned by nobody, kept until a copy from them is done: none between two steps
    slots_total: int
    slots_reserved: int  # slots of owned pages
    slots_used: int  # of those, slots that hold a token's KV (a shared page counts once)
    slots_shared: int  # slots that sharing saves: tokens of all sequences, less slots_used
    slots_cached: int
    slots_pinned: int
    slots_fragmented: int  # free, but too scattered for whom is waiting; paged: none, any page will do
    page_table_bytes: int
    host_slots_total: int = 0  # swap space, in slots
    host_slots_used: int = 0  # of those, slots that swapped-out sequences hold

    @property
    def slots_free(self) -> int:
        """Free slots, scattered ones among them."""
        return self.slots_total - self.slots_reserved - self.slots_cached - self.slots_pinned

    def ledger(self) -> dict[str, int]:
        """Slots by place; the keys are ``LEDGER`` and the values add up to ``slots_total``."""
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
    """What a KV manager has done so far."""

    prefix_hits: int = 0  # tokens
    prefix_queries: int = 0  # tokens
    prefix_evictions: int = 0  # pages
    hash_seconds: float = 0.0
    allocated_pages: int = 0  # that came to be owned, new ones and ones found in the prefix cache
    freed_pages: int = 0  # that nobody owns any more; allocated less freed are the owned ones
    copied_pages: int = 0  # copy-on-write; contiguous: forks copied whole
    copied_slots: int = 0  # filled ones; with them the rest of their pages is moved too, as it is in swaps
    swapped_out_slots: int = 0
    swapped_in_slots: int = 0
    swap_lost_slots: int = 0  # had no place on the host, or lost it: computed again
    refused_fragmented: int = 0  # contiguous: sequences that had to wait although enough slots were free


class KVManager(ABC):
    """Owns the KV slots. The scheduler calls these methods; the executor reads ``page_table`` and does the moves.

    ``page_table``: int64 ``[max_num_seqs, max_pages_per_seq]``. A sequence is *resident* while it has a row
    (``seq.row >= 0``), *swapped* while it has KV on the host, and may be neither.
    """

    def __init__(self, max_num_seqs: int, capacity: KVCapacity):
        self.capacity = capacity
        self.counters = KVCounters()
        self.page_table = np.zeros((max_num_seqs, capacity.max_pages_per_seq), dtype=np.int64)
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._moves: list[Move] = []
        self._used_slots = 0  # slots that hold a token of a resident sequence, shared ones counted once
        self._resident_tokens = 0  # computed tokens of all resident sequences

    @abstractmethod
    def fits(self, num_prompt: int, num_output: int) -> bool:
        """Whether a sequence of these lengths could run if it were alone."""

    @abstractmethod
    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        """Whether ``admit`` would succeed now if the resident sequences ``leaving`` gave up what they have."""

    @abstractmethod
    def admit(self, seq: Sequence, running: int) -> bool:
        """Make a waiting sequence resident beside ``running`` others. It gets back whatever KV of it still exists."""

    @abstractmethod
    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more computed tokens, all of it writable; or do nothing and return False."""

    @abstractmethod
    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens of ``seq`` have their KV, or will before anything that is launched later."""

    def publish(self, seq: Sequence) -> None:  # noqa: B027 (only pages need it)
        """The id of one more token of ``seq`` is known: a page that it completes may enter the prefix cache."""

    @abstractmethod
    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child`` the parent's KV. False: there is no room; it has to wait and may have to compute it."""

    @abstractmethod
    def swap_out(self, seq: Sequence) -> None:
        """Take ``seq`` off the device; as much of its KV as finds room goes to the host."""

    @abstractmethod
    def free(self, seq: Sequence) -> None:
        """Give everything back, on the device and on the host."""

    def take_moves(self) -> list[Move]:
        """The moves planned since the last call. Do them in order, before the next writes."""
        moves, self._moves = self._moves, []
        return moves

    def settle(self) -> None:  # noqa: B027 (only pages need it)
        """The moves taken are done, or queued before all that comes: the pages they read may be reused."""

    def distrust(self, published: bool) -> None:  # noqa: B027 (only pages need it)
        """A step failed, so its moves may not have been done: share nothing that they should have copied.

        ``published``: the step may not have computed what it put into the prefix cache either, so clear that too.
        """

    @abstractmethod
    def reset_prefix_cache(self) -> bool:
        """Forget every cached page; False, and nothing done, while a sequence owns pages."""

    @abstractmethod
    def stats(self) -> KVStats:
        """Where the slots are now. O(1); contiguous: O(holes)."""

    def read_counters(self) -> KVCounters:
        """A copy of what was counted so far."""
        return replace(self.counters)

    @abstractmethod
    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert every invariant over all live sequences, resident or not. O(pages): for tests and KVBENCH_CHECK."""

    def _take_row(self, seq: Sequence) -> None:
        assert seq.row < 0 and not seq.pages, f"{seq.request_id} is admitted already"
        seq.row = self._free_rows.pop()

    def _return_row(self, seq: Sequence) -> None:
        self._free_rows.append(seq.row)
        self._resident_tokens -= seq.num_computed
        seq.row = -1
        seq.num_computed = 0

    def _check_rows(self, sequences: list[Sequence]) -> None:
        rows = [seq.row for seq in sequences if seq.row >= 0]
        assert sorted(rows + self._free_rows) == list(range(len(self.page_table))), "rows are lost or shared"
        assert sum(seq.num_computed for seq in sequences) == self._resident_tokens
        for seq in sequences:
            assert (seq.row >= 0) == bool(seq.pages) or not seq.num_computed, "KV without a row"
