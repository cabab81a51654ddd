"""First-fit allocation in one stretch of slots, as contiguous KV caches have it."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise


class Slab:
    """Holes in order of their place. ``take`` scans them from the left: O(holes), at most one more than takers.

    Invariant: holes are not empty, do not touch one another, and lie within ``size``.
    """

    def __init__(self, size: int):
        self.size = size
        self.free = size
        self._bases: list[int] = [0]
        self._sizes: list[int] = [size]

    def copy(self) -> Slab:
        """The same holes, to try something out on."""
        other = Slab(self.size)
        other.free, other._bases, other._sizes = self.free, self._bases.copy(), self._sizes.copy()
        return other

    @property
    def largest_hole(self) -> int:
        return max(self._sizes, default=0)

    def find(self, size: int) -> int | None:
        """Index of the first hole that holds ``size`` slots."""
        return next((i for i, hole in enumerate(self._sizes) if hole >= size), None)

    def take(self, size: int) -> int | None:
        """The first slot of ``size`` consecutive ones, or None."""
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
        """Return what ``take`` gave; neighbouring holes become one."""
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
