"""Pages of swapped-out sequences in host memory."""

from __future__ import annotations

from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.sequence import Sequence


class SwapSpace:
    """Host pages: their owners, and which device page each is a copy of.

    A full page never changes while it is in use, so it and its host copy are *twins* until one of them is allocated
    again. Sequences that share a page share its twin. A twin whose sequences are back on the device stays as a free
    page until it is allocated again: swapping out once more then moves nothing.

    Without room, the sequence that was swapped out longest ago loses its last page, then the one before, and computes
    them again. Sequences are preempted newest first and come back oldest first, so it is the one needed last; and
    what remains of it is still a prefix.
    Invariant: ``_host_of[d] == h`` if and only if ``_device_of[h] == d``; the pool marks exactly the twins.
    """

    def __init__(self, num_pages: int):
        self.pool = PagePool(num_pages, self._forget_twin)
        self._host_of: dict[int, int] = {}
        self._device_of: dict[int, int] = {}
        self._order: dict[int, Sequence] = {}  # id(seq) -> seq, longest ago first

    def twin_on_host(self, device_page: int) -> int | None:
        return self._host_of.get(device_page)

    def twin_on_device(self, host_page: int) -> int | None:
        return self._device_of.get(host_page)

    def make_twins(self, device_page: int, host_page: int) -> None:
        """Record that both hold the same full page. A page has one twin; an older one is forgotten."""
        if (old := self._host_of.get(device_page)) is not None:
            self._unlink(old)
        if host_page in self._device_of:
            self._unlink(host_page)
        self._host_of[device_page], self._device_of[host_page] = host_page, device_page
        self.pool.mark_cached(host_page)

    def forget_device_page(self, device_page: int) -> None:
        """Forget the twin of a device page that is allocated again."""
        host_page = self._host_of.get(device_page)
        if host_page is not None:
            self._unlink(host_page)

    def forget_twins(self) -> None:
        """Forget all twins: after a failed step, a copy may not have been done."""
        for host_page in list(self._device_of):
            self._unlink(host_page)

    def allocate(self) -> int | None:
        """A host page, taken from another sequence if need be; None if there is none."""
        while not self.pool.num_available:
            if not self._order:
                return None
            key, victim = next(iter(self._order.items()))
            self.pool.release(victim.host_pages.pop())
            if not victim.host_pages:
                del self._order[key]
        return self.pool.allocate()

    def make_room(self, device_pages: list[int]) -> bool:
        """Drop sequences, longest swapped out first, until all of ``device_pages`` find a place.

        A host copy that another sequence holds needs none. Returns False, with nothing dropped, where they never will.
        """
        if len(device_pages) > self.pool.num_pages - self.pool.num_pins:
            return False
        while True:
            copies = map(self._host_of.get, device_pages)
            needed = sum(copy is None or self.pool.ref_count[copy] == 0 for copy in copies)
            if needed <= self.pool.num_available:
                return True
            self.remove(next(iter(self._order.values())))

    def enter(self, seq: Sequence) -> None:
        """Record that ``seq`` has been swapped out, as the most recent one."""
        if seq.host_pages:
            self._order[id(seq)] = seq

    def remove(self, seq: Sequence) -> None:
        """Release the pages of ``seq``."""
        self._order.pop(id(seq), None)
        for page in reversed(seq.host_pages):
            if page >= 0:
                self.pool.release(page)
        seq.host_pages.clear()

    def _unlink(self, host_page: int) -> None:
        self._forget_twin(host_page)
        self.pool.drop_cached(host_page)

    def _forget_twin(self, host_page: int) -> tuple[()]:
        """Forget a host page's twin. Returns no pages: none becomes unreachable without it."""
        del self._host_of[self._device_of.pop(host_page)]
        return ()

    def check_integrity(self) -> None:
        """Assert the twins, and the pool against the host pages of the swapped sequences."""
        self.pool.check_integrity([[page for page in seq.host_pages if page >= 0] for seq in self._order.values()])
        assert {h: d for d, h in self._host_of.items()} == self._device_of, "the twins disagree"
        marked = {h for h in range(self.pool.num_pages) if self.pool.is_cached(h)}
        assert marked == set(self._device_of), "the pool and the twins disagree"
        assert all(seq.host_pages for seq in self._order.values())
