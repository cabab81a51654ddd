"""Moves of KV in Triton: copies within the device, swaps between it and page-locked host memory.

What is moved at once is a **unit** (a page, or a single slot of a slab) of ALL tensors of the cache together. One
kernel does every move, over bytes, so every dtype is the same to it: byte ``j`` of unit ``u`` of tensor ``t`` lies at
``base[t] + u * step[t] + j``. In the device's tensors ``base`` is the tensor and ``step`` the bytes of a unit. On the
host, and in the staging buffer, a unit is a **record**: its parts in all tensors one after the other, so that a page
that is scattered over a hundred tensors crosses PCIe as one piece. There ``u`` is the record's address, ``base`` the
part's offset and ``step`` 1. All of it is int64: byte offsets pass 2**31.

A swap takes one of two ways. Where the records lie together on the host in runs of ``COPY_ENGINE_BYTES`` and more, the
kernel gathers them in a staging buffer on the device (at its bandwidth, far above that of PCIe) and one
asynchronous copy a run takes them over, or the reverse. Small scattered records would pay for a copy's launch more than
for its bytes: there the kernel reads or writes the page-locked memory itself.

Everything is queued on the current stream, in the order of the calls, and nothing waits for it: a unit or record that
one move reads and a later one (or a kernel of the model) writes is read first. That holds as long as all of them use
one stream, and the CPU never touches a record.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from kvbench_kernels.launch import cdiv, next_power_of_two

WIDEST = 16  # bytes of the widest access of a thread
TILE_WORDS = 1024  # of a program: 4 warps x 32 threads x 4 accesses of 16 bytes in flight
STAGING_BYTES = 64 << 20
COPY_ENGINE_BYTES = 1 << 20  # 20 us of PCIe: what a copy costs to launch is small beside it
SEGMENT_BYTES = 1 << 30  # page-locked allocations are rounded up to powers of two: the swap space is cut into such

_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit(do_not_specialize=["num_units"])
def move_kernel(
    source_table_ptr,  # int64 [tensors, 2]: base and step in bytes
    target_table_ptr,
    sources_ptr,  # int64 [units]
    targets_ptr,
    num_units,
    WORDS: tl.constexpr,  # of one unit in one tensor
    WORD: tl.constexpr,  # integer type of a word
    ALIGN: tl.constexpr,  # bytes that every base, step and record is a multiple of
    UNITS: tl.constexpr,  # units of a program
    BLOCK: tl.constexpr,  # words of a program
):
    CHUNKS: tl.constexpr = (WORDS + BLOCK - 1) // BLOCK
    part = tl.program_id(0)
    tensor = tl.program_id(1) * 2
    unit = part // CHUNKS * UNITS + tl.arange(0, UNITS)
    word = part % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    present = unit < num_units
    source = tl.load(sources_ptr + unit, mask=present, other=0) * tl.load(source_table_ptr + tensor + 1)
    target = tl.load(targets_ptr + unit, mask=present, other=0) * tl.load(target_table_ptr + tensor + 1)
    source = (tl.load(source_table_ptr + tensor) + source).to(tl.pointer_type(WORD))
    target = (tl.load(target_table_ptr + tensor) + target).to(tl.pointer_type(WORD))
    # Addresses that were loaded have no alignment known to the compiler: without the hint every word goes alone.
    source_at = tl.multiple_of(source, ALIGN)[:, None] + word[None, :]
    target_at = tl.multiple_of(target, ALIGN)[:, None] + word[None, :]
    mask = present[:, None] & (word < WORDS)[None, :]
    tl.store(target_at, tl.load(source_at, mask=mask), mask=mask)


def move_constants(unit_bytes: int, align: int) -> dict[str, object]:
    """The compile-time arguments of ``move_kernel`` with num_warps, for units of ``unit_bytes`` in one tensor."""
    word_bytes = min(align, 8)
    words = unit_bytes // word_bytes
    block = min(TILE_WORDS, next_power_of_two(words))
    return {
        "WORDS": words, "WORD": _WORDS[word_bytes], "ALIGN": align,
        "UNITS": TILE_WORDS // block, "BLOCK": block, "num_warps": 4,
    }  # fmt: skip


def runs_of(records: np.ndarray, segment_units: int) -> list[tuple[int, int]]:
    """Find ``(begin, end)`` of the longest stretches of consecutive numbers in ``records [n]``.

    A stretch lies within a segment of ``segment_units`` records.
    """
    breaks = np.flatnonzero((np.diff(records) != 1) | (records[1:] % segment_units == 0)) + 1
    bounds = [0, *breaks.tolist(), len(records)]
    return list(itertools.pairwise(bounds)) if len(records) else []


def free_of_clashes(sources: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int]]:
    """Find ``(begin, end)`` of runs of moves that may be done at once: no move touches what another writes."""
    if len(set(targets)) == len(targets) and set(targets).isdisjoint(sources):
        return [(0, len(sources))]  # as nearly always
    begins, read, written = [0], set(), set()
    for i, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if source in written or target in written or target in read:
            begins.append(i)
            read, written = set(), set()
        read.add(source)
        written.add(target)
    return list(zip(begins, [*begins[1:], len(sources)], strict=True))


class _Group:
    """Tensors whose units have the same bytes and alignment: one launch moves a unit of all of them."""

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int], unit_bytes: int, align: int):
        device = tensors[0].device
        self.constants = move_constants(unit_bytes, align)
        self._num_tensors = len(tensors)
        self._in_place = torch.tensor([[t.data_ptr(), unit_bytes] for t in tensors], device=device)
        self._in_record = torch.tensor([[offset, 1] for offset in offsets], device=device)

    def launch(self, where: torch.Tensor, num_units: int, from_records: bool, to_records: bool) -> None:
        """``where [2, >= num_units]`` int64, sources and targets: numbers of units, or addresses of records."""
        source_table = self._in_record if from_records else self._in_place
        target_table = self._in_record if to_records else self._in_place
        chunks = cdiv(self.constants["WORDS"], self.constants["BLOCK"])
        parts = max(1, cdiv(num_units, self.constants["UNITS"])) * chunks
        grid = (parts, self._num_tensors)
        move_kernel[grid](source_table, target_table, where[0], where[1], num_units, **self.constants)


class TritonMover:
    """Moves units of ``tensors`` (slot-major, ``[slots, ...]``, contiguous, all on one GPU) and keeps the swap space.

    ``unit_slots`` slots make a unit; slots behind the last whole unit are never moved. ``host_units`` records are
    allocated here, page-locked, and with them a staging buffer of ``STAGING_BYTES`` at most (or of one record) on the
    device. Units and records are given as int64 arrays ``[n]``.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], unit_slots: int, host_units: int):
        self._tensors = list(tensors)  # kept alive: their addresses are in the tables
        self._device = tensors[0].device
        sizes = [unit_slots * t[0].numel() * t.element_size() for t in tensors]
        keys = [(size, math.gcd(size, t.data_ptr(), WIDEST)) for t, size in zip(tensors, sizes, strict=True)]
        offsets, self.record_bytes = record_layout(keys)
        self._groups = []
        for key in dict.fromkeys(keys):
            members = [i for i, other in enumerate(keys) if other == key]
            self._groups.append(_Group([tensors[i] for i in members], [offsets[i] for i in members], *key))
        self._allocate(host_units)
        nothing = np.zeros(0, dtype=np.int64)
        self.copy(nothing, nothing)  # compiled now, not in the middle of a measurement

    def _allocate(self, host_units: int) -> None:
        size, pinned = self.record_bytes, self._device.type == "cuda"
        self._segment_units = max(1, SEGMENT_BYTES // size)
        starts = range(0, host_units, self._segment_units)
        self._segments = [
            torch.zeros((min(self._segment_units, host_units - start), size), dtype=torch.uint8, pin_memory=pinned)
            for start in starts
        ]
        self._segment_addresses = np.array([segment.data_ptr() for segment in self._segments], dtype=np.int64)
        staged = min(host_units, max(1, STAGING_BYTES // size))
        self._staging = torch.empty((staged, size), dtype=torch.uint8, device=self._device)

    def copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy unit ``sources[i]`` to unit ``targets[i]``, as if one after the other."""
        for begin, end in free_of_clashes(sources.tolist(), targets.tolist()):
            self._launch(sources[begin:end], targets[begin:end])

    def swap_out(self, units: np.ndarray, records: np.ndarray) -> None:
        """Copy unit ``units[i]`` to host record ``records[i]``; no record twice."""
        order = np.argsort(records)  # neighbours cross together
        units, records = units[order], records[order]
        if not self._by_copy_engine(records):
            self._launch(units, self._addresses(records), to_records=True)
            return
        for part in self._parts(len(records)):
            self._launch(units[part], self._staged_addresses(len(records[part])), to_records=True)
            for staged, pinned in self._pieces(records[part]):
                pinned.copy_(staged, non_blocking=True)

    def swap_in(self, records: np.ndarray, units: np.ndarray) -> None:
        """Copy host record ``records[i]`` to unit ``units[i]``; no unit twice."""
        order = np.argsort(records)
        units, records = units[order], records[order]
        if not self._by_copy_engine(records):
            self._launch(self._addresses(records), units, from_records=True)
            return
        for part in self._parts(len(records)):
            for staged, pinned in self._pieces(records[part]):
                staged.copy_(pinned, non_blocking=True)
            self._launch(self._staged_addresses(len(records[part])), units[part], from_records=True)

    def _launch(
        self, sources: np.ndarray, targets: np.ndarray, from_records: bool = False, to_records: bool = False
    ) -> None:
        # An even number of columns: the second row begins at a multiple of 16 bytes, as the compiled kernel assumes.
        where = np.zeros((2, cdiv(len(sources), 2) * 2), dtype=np.int64)
        where[0, : len(sources)], where[1, : len(targets)] = sources, targets
        moved = torch.from_numpy(where)
        if self._device.type == "cuda":
            # Page-locked: a copy from ordinary memory would wait for the whole stream. The allocator keeps this memory
            # until the copy is done.
            moved = moved.pin_memory().to(self._device, non_blocking=True)
        for group in self._groups:
            group.launch(moved, len(sources), from_records, to_records)

    def _by_copy_engine(self, records: np.ndarray) -> bool:
        runs = runs_of(records, self._segment_units)
        return len(records) * self.record_bytes >= len(runs) * COPY_ENGINE_BYTES

    def _parts(self, count: int) -> list[slice]:
        """Cut ``count`` records into slices that the staging buffer takes."""
        step = self._staging.shape[0]
        return [slice(begin, begin + step) for begin in range(0, count, step)]

    def _pieces(self, records: np.ndarray) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each run of ``records`` in the staging buffer and on the host."""
        for begin, end in runs_of(records, self._segment_units):
            segment, first = divmod(int(records[begin]), self._segment_units)
            yield self._staging[begin:end], self._segments[segment][first : first + end - begin]

    def _addresses(self, records: np.ndarray) -> np.ndarray:
        segments, rows = np.divmod(records, self._segment_units)
        return self._segment_addresses[segments] + rows * self.record_bytes

    def _staged_addresses(self, count: int) -> np.ndarray:
        return self._staging.data_ptr() + np.arange(count, dtype=np.int64) * self.record_bytes


def record_layout(keys: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    """Offset of each ``(bytes, alignment)`` in a record, and the record's bytes.

    Bytes are multiples of the alignment, and the widest alignment comes first: the only gap is behind the last.
    """
    offsets, end = [0] * len(keys), 0
    for i in sorted(range(len(keys)), key=lambda i: -keys[i][1]):
        offsets[i] = end
        end += keys[i][0]
    widest = max(align for _, align in keys)
    return offsets, cdiv(end, widest) * widest
