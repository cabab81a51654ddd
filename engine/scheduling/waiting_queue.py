"""The waiting sequences in order of rank."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator

from kvbench_engine.sequence import Sequence

Rank = tuple[int, int, int]


class WaitingQueue:
    """A heap with lazy removal: push O(log n), peek and remove O(1) amortised.

    A heap even for first come, first served: a preempted sequence returns to its place by arrival, before all that
    came later.
    """

    def __init__(self, rank_of: Callable[[Sequence], Rank]):
        self._rank_of = rank_of
        self._heap: list[tuple[Rank, int, Sequence]] = []
        self._live: dict[int, Sequence] = {}  # entry number -> sequence
        self._entry_of: dict[int, int] = {}  # id(sequence) -> entry number
        self._entries = 0

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, seq: Sequence) -> bool:
        return id(seq) in self._entry_of

    def __iter__(self) -> Iterator[Sequence]:
        return iter(sorted(self._live.values(), key=self._rank_of))

    def unordered(self) -> Iterable[Sequence]:
        return self._live.values()

    def push(self, seq: Sequence) -> None:
        assert id(seq) not in self._entry_of, f"{seq.request_id} waits already"
        self._entries += 1
        self._live[self._entries] = seq
        self._entry_of[id(seq)] = self._entries
        heapq.heappush(self._heap, (self._rank_of(seq), self._entries, seq))

    def peek(self) -> Sequence | None:
        """The first in rank; None if the queue is empty."""
        while self._heap and self._heap[0][1] not in self._live:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def remove(self, seq: Sequence) -> None:
        """Remove ``seq`` from any position."""
        del self._live[self._entry_of.pop(id(seq))]
        if len(self._heap) > 2 * len(self._live) + 64:  # else entries of aborted requests would pile up
            self._heap = [entry for entry in self._heap if entry[1] in self._live]
            heapq.heapify(self._heap)
