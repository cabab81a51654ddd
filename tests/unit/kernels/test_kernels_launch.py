"""Launch arithmetic of the Triton kernels: attention's tiles, and how moves are cut."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench_kernels.kv_formats import KV_FORMATS
from kvbench_kernels.launch import (
    MAX_SPLITS,
    MIN_SPLIT_TOKENS,
    ONE_PAGE,
    SHARED_BYTES,
    SHORT_QUERIES,
    cdiv,
    decode_tiles,
    fp8_hardware,
    kernel_page_size,
    num_kv_splits,
    padded_dim,
    prefill_blocks,
    prefill_tiles,
    programs_at_a_time,
    short_tiles,
)
from kvbench_kernels.triton_move import WIDEST, free_of_clashes, move_constants, record_layout, runs_of


@given(
    group=st.integers(1, 64),
    dim=st.integers(1, 256),
    v_dim=st.integers(1, 256),
    size=st.sampled_from([2, 4]),
    kind=st.sampled_from(["auto", *KV_FORMATS]),
    arch=st.sampled_from([80, 89, 90, 100]),
)
def test_tiles_hold_the_work_and_fit_the_chip(group, dim, v_dim, size, kind, arch):
    bits = KV_FORMATS[kind].code_bits if kind in KV_FORMATS else 8 * size
    decode, prefill = decode_tiles(group, dim, v_dim, size, kind), prefill_tiles(group, dim, v_dim, size, kind, arch)
    for tiles in (decode, prefill, short_tiles(group, dim, v_dim, size, kind)):
        assert tiles.block_m >= max(16, group) and tiles.block_n >= 16
        least = 8 * (16 // bits if kind in KV_FORMATS else 1) + 1  # half of what as many dots take, and one more
        assert dim <= tiles.d_pad < 2 * max(dim, least) and v_dim <= tiles.v_pad < 2 * max(v_dim, least)
        for n in (tiles.block_m, tiles.block_n, tiles.d_pad, tiles.v_pad):
            assert n & (n - 1) == 0
        in_flight = tiles.block_n * (tiles.d_pad + tiles.v_pad) * bits // 8 * (tiles.num_stages - 1)
        assert 1 <= tiles.num_stages <= 4 and in_flight <= SHARED_BYTES


def test_short_chunks_of_usual_groups_are_one_block():
    for group in (1, 2, 4, 5, 8):
        tiles = short_tiles(group, 128, 128, 2)
        assert tiles.block_m // group >= SHORT_QUERIES and tiles.block_m <= 64


@pytest.mark.parametrize(
    ("programs", "tokens", "sms", "splits"),
    [
        (64 * 8, 8192, 132, 1),  # the batch fills the GPU
        (8, 32768, 132, 29),  # 232 programs: two for most of the 132 SMs
        (8, 300, 132, 2),  # never under 256 tokens a split, but for the last
        (1, 1 << 20, 132, 55),
        (1, 1 << 20, 2000, 55),
        (8, 100, 132, 1),
        (8, 0, 132, 1),
        (0, 100, 132, 1),
    ],
)
def test_number_of_splits(programs, tokens, sms, splits):
    assert num_kv_splits(programs, tokens, sms) == splits


@pytest.mark.parametrize(("warps", "programs"), [(1, 8), (2, 4), (4, 2), (8, 2), (16, 2)])
def test_small_programs_are_planned_more_at_a_time(warps, programs):
    """Eight warps a multiprocessor, as an H200 was fastest with, and two programs at least."""
    assert programs_at_a_time(warps, 132) == programs * 132


@given(programs=st.integers(1, 5000), tokens=st.integers(0, 1 << 20), sms=st.integers(1, 200))
def test_splits_fill_the_gpu_if_anything_can(programs, tokens, sms):
    splits = num_kv_splits(programs, tokens, sms)
    most = min(max(1, cdiv(tokens, MIN_SPLIT_TOKENS)), MAX_SPLITS)
    assert 1 <= splits <= most
    assert splits >= 0.85 * most or programs * splits >= 0.8 * sms


@given(counts=st.lists(st.integers(0, 300), min_size=1, max_size=9), block_q=st.integers(1, 64))
def test_blocks_are_enough_for_every_sequence(counts, block_q):
    needed = sum(cdiv(n, block_q) for n in counts)
    blocks = prefill_blocks(sum(counts), len(counts), max(counts), block_q)
    assert needed <= blocks <= sum(counts) // block_q + len(counts)
    if len(set(counts)) == 1:
        assert blocks <= len(counts) * cdiv(counts[0], block_q)


def test_what_the_kernels_are_compiled_for():
    assert kernel_page_size(16, 1) == 16 and kernel_page_size(256, 1) == 256 and kernel_page_size(2000, 2) == 2000
    assert kernel_page_size(2000, 1) == kernel_page_size(8192, 1) == ONE_PAGE
    converts = {(kind, arch): fp8_hardware(kind, arch) for kind in ("fp8_e4m3", "fp8_e5m2") for arch in (86, 89, 120)}
    assert [key for key, itself in converts.items() if itself] == [("fp8_e4m3", 89), ("fp8_e4m3", 120)]
    assert [padded_dim(d) for d in (1, 16, 20, 64, 80, 128, 192)] == [16, 16, 32, 64, 128, 128, 256]
    assert [padded_dim(d, "fp8_e4m3") for d in (16, 80)] == [32, 128], "two dots share it"
    assert [padded_dim(d, "int4_per_token_head") for d in (16, 80)] == [64, 128], "four do"


@given(st.integers(1, 1 << 20), st.sampled_from([1, 2, 4, 8, 16]))
def test_tiles_hold_a_unit_exactly(words, align):
    constants = move_constants(words * align, align)
    word_bytes = min(align, 8)
    assert constants["WORDS"] * word_bytes == words * align and constants["ALIGN"] <= WIDEST
    assert constants["UNITS"] * constants["BLOCK"] == 1024
    assert constants["BLOCK"] >= min(constants["WORDS"], 1024) > constants["BLOCK"] // 2


@given(st.lists(st.integers(0, 12), unique=True), st.integers(1, 5))
def test_runs_of_records(records, segment):
    runs = runs_of(np.array(records, dtype=np.int64), segment)
    pieces = [records[begin:end] for begin, end in runs]
    assert [r for piece in pieces for r in piece] == records and all(pieces)
    for piece in pieces:
        assert piece == list(range(piece[0], piece[-1] + 1)) and piece[0] // segment == piece[-1] // segment
    for one, other in itertools.pairwise(pieces):  # none could be longer
        assert other[0] != one[-1] + 1 or other[0] // segment != one[-1] // segment


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6))))
def test_moves_at_once_touch_nothing_of_each_other(moves):
    parts = free_of_clashes([s for s, _ in moves], [t for _, t in moves])
    assert [m for begin, end in parts for m in moves[begin:end]] == moves
    for begin, end in parts:
        targets = [t for _, t in moves[begin:end]]
        assert len(set(targets)) == len(targets)
        assert not any(t == s for i, t in enumerate(targets) for j, (s, _) in enumerate(moves[begin:end]) if i != j)


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=8))
def test_parts_of_a_record_are_aligned_and_apart(parts):
    """A part that began at less than its alignment would be read as what it is not."""
    keys = [(words * align, align) for words, align in parts]
    offsets, size = record_layout(keys)
    taken = sorted((offset, offset + bytes_) for offset, (bytes_, _) in zip(offsets, keys, strict=True))
    assert all(offset % align == 0 for offset, (_, align) in zip(offsets, keys, strict=True))
    assert taken[0][0] == 0 and all(one[1] == other[0] for one, other in itertools.pairwise(taken))
    widest = max(align for _, align in keys)
    assert size % widest == 0 and taken[-1][1] <= size < taken[-1][1] + widest
