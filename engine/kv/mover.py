"""Moves KV between slots, and between device and host: copy-on-write and swaps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import Move, MoveKind


class KVMover:
    """Moves KV in ``caches``: every slot-major tensor of the KV cache, ``[slots, ...]``.

    ``paged``: each move is of one page, and whole pages are copied. Ranges of a slab are copied exactly, because the
    slots behind them belong to another sequence.

    On a CPU the moves are done when ``move`` returns. On a GPU they are queued (triton_move): model and moves
    must use one stream, whose order guarantees that a page is read here before it is written again. The time of the
    moves is ``take_seconds``, not the time of the call. ``use_triton``: None: if the caches are on a GPU.
    """

    def __init__(
        self, caches: Sequence[torch.Tensor], capacity: KVCapacity, paged: bool, use_triton: bool | None = None
    ):
        on_gpu = bool(caches) and caches[0].is_cuda
        self._paged = paged
        self._timer = _DeviceTimer() if on_gpu else _HostTimer()
        mover = _TritonMoves if (on_gpu if use_triton is None else use_triton) else _TorchMoves
        self._moves = mover(caches, capacity, paged)

    def move(self, moves: Sequence[Move]) -> None:
        """Do ``moves`` in order."""
        self._timer.start()
        for batch in batches(moves) if self._paged else ([move] for move in moves):
            self._moves.do(batch)
        self._timer.stop()

    def take_seconds(self) -> float:
        """Seconds that moves took since the last call: device time on a GPU, else wall time.

        Does not wait: moves that the GPU has not finished are counted by a later call.
        """
        return self._timer.take()


class _TorchMoves:
    """Indexing in torch. The host has a tensor like each of the caches, with ``capacity.host_slots`` rows."""

    def __init__(self, caches: Sequence[torch.Tensor], capacity: KVCapacity, paged: bool):
        self._page_size = capacity.page_size
        self._caches = list(caches)
        self._host = [
            torch.zeros((capacity.host_slots, *cache.shape[1:]), dtype=cache.dtype)
            for cache in (caches if capacity.host_slots else ())
        ]

    def do(self, batch: list[Move]) -> None:
        kind = batch[0].kind
        sources = self._host if kind is MoveKind.SWAP_IN else self._caches
        targets = self._host if kind is MoveKind.SWAP_OUT else self._caches
        if len(batch) == 1:
            _, source, target, count = batch[0]
            for a, b in zip(sources, targets, strict=True):
                b[target : target + count].copy_(a[source : source + count])
        else:
            self._move_pages(batch, sources, targets)

    def _move_pages(self, batch: list[Move], sources: list[torch.Tensor], targets: list[torch.Tensor]) -> None:
        """Move whole pages, even partly filled ones: slots behind the last token are never read."""
        size = self._page_size
        source = torch.tensor([move.source // size for move in batch])
        target = torch.tensor([move.target // size for move in batch])
        for a, b in zip(sources, targets, strict=True):
            _pages(b, size).index_copy_(0, target, _pages(a, size).index_select(0, source))


class _TritonMoves:
    """The kernel, on whole pages or on single slots of a slab."""

    def __init__(self, caches: Sequence[torch.Tensor], capacity: KVCapacity, paged: bool):
        from kvbench_kernels.triton_move import TritonMover  # Triton is not everywhere where there is a CPU

        self._paged, self._unit = paged, capacity.page_size if paged else 1
        self._mover = TritonMover(caches, self._unit, capacity.host_slots // self._unit)

    def do(self, batch: list[Move]) -> None:
        kind = batch[0].kind
        sources = self._units([move.source for move in batch], batch)
        targets = self._units([move.target for move in batch], batch)
        if kind is MoveKind.COPY:
            self._mover.copy(sources, targets)
        elif kind is MoveKind.SWAP_OUT:
            self._mover.swap_out(sources, targets)
        else:
            self._mover.swap_in(sources, targets)

    def _units(self, slots: list[int], batch: list[Move]) -> np.ndarray:
        """Numbers of the units that begin at ``slots``: a page each, or the slots of a range."""
        if self._paged:
            return np.array(slots, dtype=np.int64) // self._unit
        return np.arange(slots[0], slots[0] + batch[0].num_slots, dtype=np.int64)


class _HostTimer:
    """Wall time between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._seconds = self._started = 0.0

    def start(self) -> None:
        self._started = time.perf_counter()

    def stop(self) -> None:
        self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class _DeviceTimer:
    """Device time between ``start`` and ``stop``, by events on the current stream."""

    def __init__(self) -> None:
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        pair = self._spare.pop() if self._spare else tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._pending.append(pair)
        pair[0].record()

    def stop(self) -> None:
        self._pending[-1][1].record()

    def take(self) -> float:
        milliseconds = 0.0
        while self._pending and self._pending[0][1].query():
            pair = self._pending.popleft()
            milliseconds += pair[0].elapsed_time(pair[1])
            self._spare.append(pair)
        return milliseconds / 1e3


def _pages(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """View ``[slots, ...]`` as ``[pages, page_size x row bytes]``: bytes, because not every dtype can be indexed."""
    return cache[: cache.shape[0] // page_size * page_size].view(torch.uint8).reshape(-1, page_size * _row_bytes(cache))


def _row_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()


def batches(moves: Sequence[Move]) -> Iterator[list[Move]]:
    """Cut ``moves``, each of one page, into runs of one kind that can be done all at once.

    The managers plan as if each move were done immediately, so a move that reads or writes a page that an earlier one
    wrote begins a new batch.
    """
    batch: list[Move] = []
    targets: set[int] = set()
    for move in moves:
        clash = move.target in targets or (move.kind is MoveKind.COPY and move.source in targets)
        if batch and (clash or move.kind is not batch[0].kind):
            yield batch
            batch, targets = [], set()
        batch.append(move)
        targets.add(move.target)
    if batch:
        yield batch
