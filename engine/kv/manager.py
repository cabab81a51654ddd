"""Who owns which KV slots: what the scheduler asks of either layout. No torch.

    paged        page table row   [ 7 | 3 | 9 ]      pages taken one by one, as the sequence grows
                 pool             .. 3 .. 7 .. 9 ..  any page will do; a page may be shared
    contiguous   page table row   [ base ]           one reservation from the first token, in one slab
                 slab             |seq A......|seq B...|  hole  |seq C..|

Both write ``page_table[row, i]`` = first slot of the sequence's i-th page, which is all that the kernels see: a
contiguous reservation is one long page.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from engine.config import EngineConfig
from engine.kv.budget import KVCapacity
from engine.kv.contiguous import ContiguousKVManager
from engine.kv.moves import Move
from engine.kv.paged import PagedKVManager
from engine.sequence import Sequence
from engine.stats import KVCounters, KVStats


class KVManager(Protocol):
    """``page_table`` is int64 ``[max_num_seqs, max_pages_per_seq]``, written here, read by the executor.

    A sequence is *resident* while it has a row (``seq.row >= 0``), *swapped* while it has KV on the host, and may be
    neither.
    """

    capacity: KVCapacity
    page_table: np.ndarray

    def fits(self, num_prompt: int, num_output: int) -> bool:
        """Whether a sequence of these lengths could run if it were alone."""
        ...

    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        """Whether ``admit`` would succeed now if the resident sequences ``leaving`` gave up what they have."""
        ...

    def admit(self, seq: Sequence, running: int) -> bool:
        """Make a waiting sequence resident beside ``running`` others, with whatever KV of it is left anywhere."""
        ...

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Make room for ``num_tokens`` more computed tokens, all of it writable; or do nothing and return False."""
        ...

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        """``num_tokens`` more tokens of ``seq`` have their KV, or will before anything that is launched later."""
        ...

    def publish(self, seq: Sequence) -> None:
        """One more token of ``seq`` is known, after its KV: others may now find what it completes."""
        ...

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Give ``child`` the parent's KV. False: there is no room, it has to wait and may have to compute it."""
        ...

    def swap_out(self, seq: Sequence) -> None:
        """Give up residence; as much of the KV as finds a place goes to the host."""
        ...

    def free(self, seq: Sequence) -> None:
        """Give everything back, on the device and on the host."""
        ...

    def take_moves(self) -> list[Move]:
        """What was planned since the last call: to be done, in order, before the next writes."""
        ...

    def settle(self) -> None:
        """The moves taken have been done, or are queued before all that comes: what they read may be given away."""
        ...

    def distrust(self, published: bool) -> None:
        """A step failed, and its moves with it: let nothing that they should have copied be shared from now on.

        ``published``: nor anything that the prefix cache offers, some of which the step should have computed.
        """
        ...

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page; False, and nothing done, while a sequence owns pages."""
        ...

    def stats(self) -> KVStats:
        """Where the slots are now. O(1); contiguous: O(holes)."""
        ...

    def read_counters(self) -> KVCounters:
        """What was done so far, a copy."""
        ...

    def check_integrity(self, sequences: list[Sequence]) -> None:
        """Assert every invariant over all live sequences, resident or not. O(pages): for tests and KVBENCH_CHECK."""
        ...


def make_kv_manager(config: EngineConfig, capacity: KVCapacity) -> KVManager:
    """The manager of ``config.layout``."""
    if config.layout == "contiguous":
        return ContiguousKVManager(config.max_num_seqs, capacity, config.reservation)
    return PagedKVManager(config.max_num_seqs, capacity, config.enable_prefix_caching)
