"""Moves in Triton against torch indexing. Run like triton_checks.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import DEVICE

from kvbench_kernels import triton_move
from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.quantized import FP8_DTYPE, QuantizedKV, raw_tensors
from kvbench_kernels.triton_move import TritonMover
from tests.support.move_oracle import HOST_PAGES, PAGES, check_moves, page_moves, slab_moves

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.uint8)
ALWAYS, NEVER = 0, 1 << 62  # runs from which the copy engine takes over
UNITS = 7


def random_bytes(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    flat = tensor.view(torch.uint8)
    flat.copy_(torch.randint(256, flat.shape, generator=generator, dtype=torch.uint8))
    return tensor


def caches_of(slots: int, row: tuple[int, int], seed: int = 0) -> list[torch.Tensor]:
    """A tensor of every dtype and KV format, rows of ``row`` values, of bytes that are all different."""
    generator = torch.Generator().manual_seed(seed)
    sides = [torch.zeros(slots, *row, dtype=dtype) for dtype in DTYPES]
    sides += [
        QuantizedKV.zeros(kv_format, slots, *row, "cpu", 0.5 if kv_format in FP8_DTYPE else None)
        for kv_format in KV_FORMATS.values()
    ]
    return [random_bytes(t, generator).to(DEVICE) for side in sides for t in raw_tensors(side)]


def as_units(cache: torch.Tensor, unit_slots: int) -> torch.Tensor:
    """``[units, bytes]`` on the CPU: the oracle's own view."""
    units = cache.shape[0] // unit_slots
    return cache[: units * unit_slots].cpu().contiguous().view(torch.uint8).reshape(units, -1).clone()


def numbers(values) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def check_copies(caches, unit_slots: int, moves) -> None:
    """Copies from source to target unit are as if done one after the other, and touch nothing else."""
    expected = [as_units(cache, unit_slots) for cache in caches]
    TritonMover(caches, unit_slots, 0).copy(numbers([s for s, _ in moves]), numbers([t for _, t in moves]))
    for cache, wanted in zip(caches, expected, strict=True):
        for source, target in moves:
            wanted[target] = wanted[source]
        held = as_units(cache, unit_slots)
        assert torch.equal(held, wanted), f"{cache.dtype}, units {(held != wanted).any(1).nonzero()}"


@pytest.mark.parametrize(
    ("unit_slots", "row"), [(1, (1, 1)), (3, (1, 1)), (3, (2, 3)), (1, (1, 5)), (16, (1, 5)), (16, (2, 8))]
)
def test_copies_touch_their_targets_only(unit_slots, row):
    caches = caches_of(UNITS * unit_slots + 1, row)  # a slot too many: no whole unit, never touched
    rest = [cache[UNITS * unit_slots :].clone() for cache in caches]
    check_copies(caches, unit_slots, [(0, 6), (3, 1), (3, 2)])
    for cache, before in zip(caches, rest, strict=True):
        assert torch.equal(cache[UNITS * unit_slots :].view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize(("page_size", "row"), [(256, (2, 8)), (128, (8, 24)), (256, (1, 3))], ids=str)
def test_large_pages_in_several_tiles(page_size, row):
    caches = [c for c in caches_of(4 * page_size, row) if c[0].numel() * c.element_size() * page_size > 512]
    check_copies(caches, page_size, [(3, 0), (1, 2)])


def test_more_units_than_one_program_takes():
    cache = random_bytes(torch.empty(1300, 1, 3, dtype=torch.uint8), torch.Generator().manual_seed(0)).to(DEVICE)
    order = np.random.default_rng(0).permutation(1300).tolist()
    check_copies([cache], 1, list(zip(order[:600], order[700:], strict=True)))


@pytest.mark.full
def test_offsets_beyond_2_to_the_31():
    """Pages of 1 MiB, the last of them at a byte offset past 2**31. Only pages that are written exist."""
    page, pages = 1 << 20, 2100
    cache = torch.empty(pages, page, dtype=torch.uint8, device=DEVICE)
    pattern = random_bytes(torch.empty(3, page, dtype=torch.uint8), torch.Generator().manual_seed(1)).to(DEVICE)
    cache[[0, 1050, 2099]] = pattern
    mover = TritonMover([cache], 1, 0)
    mover.copy(numbers([2099, 0, 1050]), numbers([1, 2098, 1049]))
    assert torch.equal(cache[[2098, 1049, 1]], pattern)
    assert torch.equal(cache[[0, 1050, 2099]], pattern)


def test_a_record_holds_every_part_once():
    caches = caches_of(8, (2, 5))
    mover = TritonMover(caches, 2, 1)
    total = sum(as_units(cache, 2).shape[1] for cache in caches)
    assert total <= mover.record_bytes < total + 16


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    planned=page_moves().map(lambda drawn: (True, *drawn)) | slab_moves().map(lambda moves: (False, 1, moves)),
    copy_engine_bytes=st.sampled_from([ALWAYS, NEVER]),
    segment_bytes=st.sampled_from([1, 1500, 1 << 30]),
    staging_bytes=st.sampled_from([1, 1000, 1 << 30]),
)
def test_pages_and_ranges_of_a_slab_as_the_engine_moves_them(planned, copy_engine_bytes, segment_bytes, staging_bytes):
    """Clashing copies, and swaps in any order: staged or not, over one segment of the host's memory or several."""
    paged, size, moves = planned
    shape = (PAGES * size, HOST_PAGES * size, size) if paged else (24, 12, 8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_move, "COPY_ENGINE_BYTES", copy_engine_bytes)
        patch.setattr(triton_move, "SEGMENT_BYTES", segment_bytes)
        patch.setattr(triton_move, "STAGING_BYTES", staging_bytes)
        check_moves(moves, *shape, paged, DEVICE, use_triton=True)
