"""Moves of real tensors, in all formats, against doing them one after the other, slot by slot."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from kvbench_engine.kv.budget import KVCapacity
from kvbench_engine.kv.manager import Move, MoveKind
from kvbench_engine.kv.mover import KVMover
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.quantized import FP8_DTYPE, QuantizedKV, raw_tensors

PAGES, HOST_PAGES = 6, 4
COPY, OUT, IN = MoveKind.COPY, MoveKind.SWAP_OUT, MoveKind.SWAP_IN


def capacity_of(page_size: int, slots: int, host_slots: int) -> KVCapacity:
    return KVCapacity(1, 1, 0, page_size, slots // page_size, slots, 1, 0, host_slots=host_slots)


def filled_caches(slots: int, device: str) -> list[torch.Tensor]:
    """Every dtype and row shape that a cache may have, each row with bytes of its own: fp8 NaN codes among them."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.zeros(slots, 2, 3, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    sides += [
        QuantizedKV.zeros(kv_format, slots, 2, dim, "cpu", 0.5 if kv_format in FP8_DTYPE else None)
        for kv_format in KV_FORMATS.values()
        for dim in (4, 5)
    ]
    caches = [tensor.to(device) for side in sides for tensor in raw_tensors(side)]
    for cache in caches:
        flat = cache.view(torch.uint8)
        flat.copy_(torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8))
    return caches


def rows(cache: torch.Tensor) -> list[bytes]:
    return [row.contiguous().view(torch.uint8).numpy().tobytes() for row in cache.cpu()]


class SlotBySlot:
    """The meaning of a list of moves. None: a slot behind the last one of a moved page, which nobody will read."""

    def __init__(self, cache: torch.Tensor, host_slots: int, page_size: int | None):
        self.device: list[bytes | None] = rows(cache)
        self.host: list[bytes | None] = [None] * host_slots
        self.page_size = page_size

    def move(self, moves: list[Move]) -> None:
        for kind, source, target, count in moves:
            sources = self.host if kind is IN else self.device
            targets = self.host if kind is OUT else self.device
            for i in range(count):
                targets[target + i] = sources[source + i]
            if self.page_size is not None:
                rest = self.page_size - count
                targets[target + count : target + self.page_size] = [None] * rest

    def check(self, cache: torch.Tensor) -> None:
        for slot, (held, meant) in enumerate(zip(rows(cache), self.device, strict=True)):
            assert meant is None or held == meant, f"slot {slot} of a {cache.dtype} cache"


def check_moves(
    moves: list[Move],
    slots: int,
    host_slots: int,
    page_size: int,
    paged: bool,
    device: str = "cpu",
    use_triton: bool | None = None,
) -> None:
    """``moves`` through a KVMover and slot by slot, and in the end everything from the host."""
    caches = filled_caches(slots, device)
    mover = KVMover(caches, capacity_of(page_size, slots, host_slots), paged, use_triton)
    oracles = [SlotBySlot(cache, host_slots, page_size if paged else None) for cache in caches]
    everything = [Move(IN, 0, 0, host_slots)] if not paged else []
    for part in (moves, everything):  # in the end the host as well, through swap-ins
        mover.move(part)
        for cache, oracle in zip(caches, oracles, strict=True):
            oracle.move(part)
            oracle.check(cache)


@st.composite
def page_moves(draw) -> tuple[int, list[Move]]:
    """Page size and moves as the paged manager plans them: whole pages or their beginning, on few pages, so that
    they clash; a swap-in only of what was swapped out before."""
    size = draw(st.integers(1, 4))
    page, host_page = st.integers(0, PAGES - 1), st.integers(0, HOST_PAGES - 1)
    moves: list[Move] = []
    for _ in range(draw(st.integers(1, 20))):
        kind = draw(st.sampled_from(MoveKind))
        source = draw(host_page if kind is IN else page)
        target = draw(host_page if kind is OUT else page)
        if kind is not COPY or source != target:
            moves.append(Move(kind, source * size, target * size, draw(st.integers(1, size))))
    return size, moves


@st.composite
def slab_moves(draw) -> list[Move]:
    """Ranges of any length, half of them at multiples of 4; a copy does not overlap itself, since two sequences never
    share slots."""
    moves: list[Move] = []

    def begin(last: int) -> int:
        return draw(st.integers(0, last)) if draw(st.booleans()) else 4 * draw(st.integers(0, last // 4))

    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(MoveKind))
        count = draw(st.integers(1, 8))
        source = begin((12 if kind is IN else 24) - count)
        target = begin((12 if kind is OUT else 24) - count)
        if kind is not COPY or abs(source - target) >= count:
            moves.append(Move(kind, source, target, count))
    return moves
