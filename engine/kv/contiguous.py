"""The baseline without paging: one reservation per sequence, from its first token to its end. No torch.

Slots reserved (Kwon et al. 2023, section 6.1, after Orca), ``max_model_len`` at most:
    max      max_model_len: the output's length is unknown.
    pow2     prompt + the next power of two of the output: the output is over-reserved by at most 2x.
    oracle   prompt + output, exactly: the infeasible best case.
The output's length is taken to be ``max_tokens``, which is exact for requests that ignore EOS, as the load
generator's do.

A group of layers with a window has a ring in the reservation (``kv.groups.ring_slots``): its tokens are written in
turns over slots for the window and one step, and it takes no more of them however long the sequence is.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

import numpy as np

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import KVManager, KVStats, Move, MoveKind
from kvbench_engine.sequence import Sequence


class Slab:
    """The free ranges ("holes") of ``size`` slots, in order. ``take`` is first fit: O(holes).

    Invariant: holes are not empty, do not touch one another, and lie within ``size``.
    """

    def __init__(self, size: int):
        self.size = size
        self.free = size
        self._bases: list[int] = [0]
        self._sizes: list[int] = [size]

    def copy(self) -> Slab:
        """A copy, for a trial that leaves this slab as it is."""
        other = Slab(self.size)
        other.free, other._bases, other._sizes = self.free, self._bases.copy(), self._sizes.copy()
        return other

    @property
    def largest_hole(self) -> int:
        return max(self._sizes, default=0)

    def find(self, size: int) -> int | None:
        """Index of the first hole of at least ``size`` slots."""
        return next((i for i, hole in enumerate(self._sizes) if hole >= size), None)

    def take(self, size: int) -> int | None:
        """Take ``size`` consecutive slots; the first one, or None."""
        index = self.find(size)
        if index is None:
            return None
        base = self._bases[index]
        if self._sizes[index] == size:
            del self._bases[index], self._sizes[index]
        else:
            self._bases[index] += size
            self._sizes[index] -= size
        self.free -= size
        return base

    def give(self, base: int, size: int) -> None:
        """Return slots; neighbouring holes are joined."""
        index = bisect_left(self._bases, base)
        self.free += size
        if index < len(self._bases) and base + size == self._bases[index]:
            size += self._sizes[index]
            del self._bases[index], self._sizes[index]
        if index and self._bases[index - 1] + self._sizes[index - 1] == base:
            self._sizes[index - 1] += size
        else:
            self._bases.insert(index, base)
            self._sizes.insert(index, size)

    def check_integrity(self, taken: list[tuple[int, int]]) -> None:
        """Assert that ``taken`` (base, size) and the holes tile the slab."""
        pieces = sorted([*taken, *zip(self._bases, self._sizes, strict=True)])
        end = 0
        for base, size in pieces:
            assert base == end and size > 0, f"the slab is torn or used twice at slot {base}"
            end += size
        assert end == self.size and sum(self._sizes) == self.free
        holes = list(zip(self._bases, self._sizes, strict=True))
        assert all(a + n < b for (a, n), (b, _) in pairwise(holes)), "two holes touch"


class ContiguousKVManager(KVManager):
    """One reservation a sequence, first fit in one slab.

    Free slots count as fragmented while a sequence waits that they would hold if they were one range. Swapping is all
    or nothing: a sequence's KV is on the device, wholly on the host, or dropped. Nothing is shared or pinned: moves are
    done in order, and a slot's next owner writes after them.
    """

    def __init__(self, max_num_seqs: int, capacity: KVCapacity, reservation: str):
        super().__init__(max_num_seqs, capacity)
        self.reservation = reservation
        self.slab = Slab(capacity.num_slots)
        self.host = Slab(capacity.host_slots) if capacity.host_slots else None
        self._sizes: dict[int, int] = {}  # base -> slots reserved there
        self._resident: dict[int, Sequence] = {}  # base -> its owner
        self._swapped: dict[int, Sequence] = {}  # id(seq) -> seq, longest ago first
        self._refused: Sequence | None = None  # the sequence that was refused last and still waits

    def reserve(self, num_prompt: int, num_output: int) -> int:
        """Tokens to reserve for a sequence of these lengths."""
        limit = self.capacity.page_size
        if self.reservation == "max":
            return limit
        if self.reservation == "pow2":
            num_output = 1 << (num_output - 1).bit_length()
        return min(limit, num_prompt + num_output)

    def parts_of(self, tokens: int) -> list[int]:
        """The slots of ``tokens`` in each group of layers: all of them, or as many as its ring has."""
        return [min(tokens, ring) for ring in self.capacity.page_sizes]

    def fits(self, num_prompt: int, num_output: int) -> bool:
        return sum(self.parts_of(self.reserve(num_prompt, num_output))) <= self.slab.size

    def can_admit(self, seq: Sequence, running: int, leaving: list[Sequence]) -> bool:
        slab = self.slab.copy() if leaving else self.slab
        for other in leaving:
            base = other.pages[0]
            slab.give(base, self._sizes[base])
        return bool(self._free_rows or leaving) and slab.find(sum(self._reservation_of(seq))) is not None

    def _reservation_of(self, seq: Sequence) -> list[int]:
        """The slots of a sequence's reservation in each group."""
        return self.parts_of(self.reserve(seq.num_prompt, seq.request.params.max_tokens))

    def admit(self, seq: Sequence, running: int) -> bool:
        if not self._free_rows:
            return False
        if not self._reserve(seq):
            if self._refused is not seq and self.slab.free >= sum(self._reservation_of(seq)):
                self.counters.refused_fragmented += 1  # counted once per wait
            self._refused = seq
            return False
        self._refused = None
        if seq.host_pages:
            held = self.parts_of(seq.host_tokens)
            self._move(MoveKind.SWAP_IN, (seq.host_pages[0], held), (seq.pages[0], self._reservation_of(seq)), held)
            self.counters.swapped_in_slots += sum(held)
            seq.num_computed = seq.host_tokens
            self._drop_host(seq)
        else:
            self.counters.swap_lost_slots += sum(self.parts_of(seq.host_tokens))
        seq.host_tokens = 0
        return True

    def _reserve(self, seq: Sequence) -> bool:
        parts = self._reservation_of(seq)
        base = self.slab.take(sum(parts))
        if base is None:
            return False
        self._take_row(seq)
        self._sizes[base], self._resident[base] = sum(parts), seq
        self.page_table[:, seq.row] = np.array(_starts(base, parts))[:, None]
        seq.pages.append(base)
        self.counters.allocated_pages += 1
        return True

    def _move(
        self, kind: MoveKind, source: tuple[int, list[int]], target: tuple[int, list[int]], held: list[int]
    ) -> None:
        """Plan a move of ``held`` slots in each group. Both places: the first slot, and the slots of each group."""
        for start, end, count in zip(_starts(*source), _starts(*target), held, strict=True):
            self._moves.append(Move(kind, start, end, count))

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        reserved = self.reserve(seq.num_prompt, seq.request.params.max_tokens)
        assert seq.num_computed + num_tokens <= reserved, "a sequence outgrew its reservation"
        return True

    def commit(self, seq: Sequence, num_tokens: int) -> None:
        seq.num_computed += num_tokens

    def commit_decodes(self, num_tokens: int) -> None:
        """Do nothing: used slots are counted when they are asked for."""

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Take a reservation and copy everything: nothing can be shared."""
        if parent.row < 0 or not self._free_rows or not self._reserve(child):
            return False
        held, parts = self.parts_of(parent.num_computed), self._reservation_of(parent)
        self._move(MoveKind.COPY, (parent.pages[0], parts), (child.pages[0], parts), held)
        child.num_computed = parent.num_computed
        self.counters.copied_pages += 1
        self.counters.copied_slots += sum(held)
        return True

    def swap_out(self, seq: Sequence) -> None:
        assert self.host is not None, "there is no swap space"
        seq.host_tokens = seq.num_computed
        held = self.parts_of(seq.num_computed)
        base = self._take_host(sum(held)) if seq.num_computed else None
        if base is not None:
            self._move(MoveKind.SWAP_OUT, (seq.pages[0], self._reservation_of(seq)), (base, held), held)
            self.counters.swapped_out_slots += sum(held)
            seq.host_pages = [base]
            seq.num_swapped_pages += 1
            self._swapped[id(seq)] = seq
        self._leave_device(seq)

    def _take_host(self, size: int) -> int | None:
        """Host slots, or None. Until there is room, the KV that was swapped out longest ago is dropped."""
        if size > self.host.size:
            return None
        while (base := self.host.take(size)) is None:
            self._drop_host(next(iter(self._swapped.values())))
        return base

    def _drop_host(self, seq: Sequence) -> None:
        if self._swapped.pop(id(seq), None) is not None:
            self.host.give(seq.host_pages.pop(), sum(self.parts_of(seq.host_tokens)))

    def free(self, seq: Sequence) -> None:
        if self._refused is seq:
            self._refused = None
        self._drop_host(seq)
        if seq.row >= 0:
            self._leave_device(seq)

    def _leave_device(self, seq: Sequence) -> None:
        base = seq.pages.pop()
        del self._resident[base]
        self.slab.give(base, self._sizes.pop(base))
        self.counters.freed_pages += 1
        self._return_row(seq)

    def reset_prefix_cache(self) -> bool:
        """Do nothing: there is no cache. False while a sequence owns a reservation, as in the paged layout."""
        return not self._sizes

    def stats(self) -> KVStats:
        slab, owned = self.slab, len(self._sizes)
        reserved, rings = slab.size - slab.free, self.capacity.page_sizes
        return KVStats(
            pages_total=self.capacity.num_pages,
            pages_free=slab.free // sum(rings),
            pages_owned=owned,
            pages_logical=owned,
            pages_cached=0,
            pages_pinned=0,
            slots_total=slab.size,
            slots_reserved=reserved,
            slots_used=sum(min(seq.num_computed, ring) for ring in rings for seq in self._resident.values()),
            slots_shared=0,
            slots_cached=0,
            slots_pinned=0,
            slots_fragmented=self._fragmented(),
            page_table_bytes=self.capacity.page_table_bytes,
            host_slots_total=self.capacity.host_slots,
            host_slots_used=self.host.size - self.host.free if self.host is not None else 0,
        )

    def _fragmented(self) -> int:
        """The free slots, while together they would hold the reservation that is waited for and no hole does."""
        wanted = sum(self._reservation_of(self._refused)) if self._refused is not None else 0
        return self.slab.free if self.slab.largest_hole < wanted <= self.slab.free else 0

    def check_integrity(self, sequences: list[Sequence]) -> None:
        self._check_rows(sequences)
        resident = [seq for seq in sequences if seq.row >= 0]
        self.slab.check_integrity(list(self._sizes.items()))
        assert sorted(base for seq in resident for base in seq.pages) == sorted(self._sizes)
        assert {seq.pages[0]: seq for seq in resident} == self._resident
        for seq in resident:
            starts = _starts(seq.pages[0], self._reservation_of(seq))
            assert (self.page_table[:, seq.row] == np.array(starts)[:, None]).all()
        if self.host is not None:
            swapped = self._swapped.values()
            self.host.check_integrity([(seq.host_pages[0], sum(self.parts_of(seq.host_tokens))) for seq in swapped])
            assert {id(seq) for seq in sequences if seq.host_pages} == set(self._swapped)


def _starts(base: int, parts: list[int]) -> list[int]:
    """The first slot of each group in a range that begins at ``base``."""
    return list(accumulate(parts[:-1], initial=base))
