"""Moves KV between slots and between device and host: copies on write, swaps."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.kv_budget import KVCapacity
from engine.kv_moves import Move, MoveKind, batches


class KVMover:
    """``caches``: every slot-major tensor of the KV cache, ``[slots, ...]``, whose rows belong together.

    The host has a tensor like each of them, with ``capacity.host_slots`` rows, page-locked where the caches are on a
    GPU. ``paged``: every move is of one page, and nobody else has anything on the page that it is moved to. The ranges
    of a slab go alone and slot by slot: what follows them is a neighbour's.
    """

    def __init__(self, caches: Sequence[torch.Tensor], capacity: KVCapacity, paged: bool):
        self._page_size = capacity.page_size
        self._paged = paged
        self._caches = list(caches)
        pinned = bool(caches) and caches[0].is_cuda
        self._host = [
            torch.zeros((capacity.host_slots, *cache.shape[1:]), dtype=cache.dtype, pin_memory=pinned)
            for cache in (caches if capacity.host_slots else ())
        ]

    def move(self, moves: Sequence[Move]) -> None:
        """Do ``moves`` in order."""
        for batch in batches(moves) if self._paged else ([move] for move in moves):
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
        """Whole pages, also where they are partly filled: what lies behind the last token is never read."""
        size = self._page_size
        source = torch.tensor([move.source // size for move in batch])
        target = torch.tensor([move.target // size for move in batch])
        for a, b in zip(sources, targets, strict=True):
            rows = _pages(a, size).index_select(0, source.to(a.device))
            _pages(b, size).index_copy_(0, target.to(b.device), rows.to(b.device))


def _pages(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """``[slots, ...]`` as ``[pages, page_size x row bytes]``: bytes, because not every dtype can be indexed."""
    return cache[: cache.shape[0] // page_size * page_size].view(torch.uint8).reshape(-1, page_size * _row_bytes(cache))


def _row_bytes(cache: torch.Tensor) -> int:
    return cache[0].numel() * cache.element_size()
