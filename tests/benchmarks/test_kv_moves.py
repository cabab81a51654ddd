"""Page copies (copy-on-write) and swaps as the engine does them, all layers, against a plain copy of as many bytes.

moved_gb_per_s counts the bytes once, gb_per_s as read and as written (1 GB = 1e9 bytes); ceiling_gb_per_s and ratio
are of gb_per_s and the device's measured read bandwidth, vs_copy is against torch's copy of one piece of memory
between the same two places (a GPU's swaps: page-locked host memory, so the floor is the bus). The time includes what
Python does to put a batch together.
"""

from __future__ import annotations

import pytest
import torch
from bench_kv import CACHES, CONTIGUOUS, DIM, FLOATS, KV_HEADS, bandwidth, compute_dtype, quantise
from bench_timing import CUDA, DEVICE, choose, note, race

from kvbench_engine.config import EngineConfig
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of
from kvbench_engine.kv.manager import Move, MoveKind
from kvbench_engine.kv.mover import KVMover
from kvbench_kernels.quantized import raw_tensors

LAYERS = 8
MOVED_BYTES = choose(full=64 * 2**20, quick=64 * 2**20, smoke=2**20) * (8 if CUDA else 1)


def make_mover(kv: str, page_size: int, num_slots: int) -> tuple[KVMover, int]:
    """A mover over caches of twice ``num_slots`` slots and as many on the host; bytes of a slot."""
    dtype = compute_dtype(kv)
    shape = KVShape((LayerKV(KV_HEADS, DIM, DIM),) * LAYERS, dtype.itemsize)
    kv_cache_dtype = "auto" if kv in FLOATS else kv
    slot_bytes, contiguous = shape.slot_bytes(kv_cache_dtype), page_size == CONTIGUOUS
    config = EngineConfig(
        layout="contiguous" if contiguous else "paged", page_size=page_size or 16, kv_cache_dtype=kv_cache_dtype,
        kv_budget=(2 * num_slots + 1) * slot_bytes, preemption_mode="swap", swap_space=num_slots * slot_bytes,
        max_model_len=num_slots, max_num_seqs=1,
    )  # fmt: skip
    capacity = capacity_of(config, shape, config.kv_budget + 8 * num_slots)
    caches = []
    for _ in range(2 * LAYERS):
        cache = torch.zeros(capacity.num_slots, KV_HEADS, DIM, dtype=dtype, device=DEVICE)
        caches += raw_tensors(cache if kv in FLOATS else quantise(kv, cache))
    return KVMover(caches, capacity, not contiguous), slot_bytes


def make_moves(kind: MoveKind, unit: int, num_slots: int) -> list[Move]:
    """``num_slots`` slots in units of ``unit``, from places in random order to places in random order.

    Copies go from the first half of the cache to the second, swaps between the first half and the host.
    """
    generator = torch.Generator().manual_seed(0)
    sources, targets = (torch.randperm(num_slots // unit, generator=generator) * unit for _ in range(2))
    if kind is MoveKind.COPY:
        targets += num_slots
    pairs = zip(sources.tolist(), targets.tolist(), strict=True)
    return [Move(kind, source, target, unit) for source, target in pairs]


def plain_copies(kind: MoveKind, num_bytes: int) -> dict[str, object]:
    """One copy of ``num_bytes`` between the same two places, and the device reading as many as are read and written."""
    host = {"device": "cpu", "pin_memory": CUDA}
    source = torch.ones(num_bytes // 4, **(host if kind is MoveKind.SWAP_IN else {"device": DEVICE}))
    target = torch.ones(num_bytes // 4, **(host if kind is MoveKind.SWAP_OUT else {"device": DEVICE}))
    read = [torch.ones(num_bytes // 4, device=DEVICE) for _ in range(2)]
    return {
        "copy": lambda: target.copy_(source, non_blocking=True),
        "read_sum": lambda: [torch.sum(x) for x in read],
        "read_dot": lambda: [torch.dot(x, x) for x in read],
    }


@pytest.mark.parametrize(("kv", "page_size"), CACHES)
@pytest.mark.parametrize("kind", [kind.value for kind in MoveKind])
def test_move(benchmark, kind, kv, page_size):
    slot_bytes = 2 * LAYERS * KV_HEADS * DIM * compute_dtype(kv).itemsize
    num_slots = max(256, MOVED_BYTES // slot_bytes // 256 * 256)
    mover, slot_bytes = make_mover(kv, page_size, num_slots)
    moves = make_moves(MoveKind(kind), page_size or 256, num_slots)
    num_bytes = num_slots * slot_bytes
    benchmark.group = f"{kind} of {num_slots} tokens"
    own, fastest = race(benchmark, lambda: mover.move(moves), plain_copies(MoveKind(kind), num_bytes), capture=False)
    figures = bandwidth(2 * num_bytes, own, fastest)
    speeds = {"moved_gb_per_s": num_bytes / own / 1e9, "vs_copy": fastest["copy"] / own}
    note(benchmark, moves=len(moves), **figures, **speeds)
