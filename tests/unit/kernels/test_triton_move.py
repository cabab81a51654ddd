"""The move kernel: compiled ahead of time, and how its work is cut. test_kernels_triton.py runs it."""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels.compile_ahead import compile_for
from kernels.triton_move import WIDEST, free_of_clashes, move_constants, move_kernel, record_layout, runs_of

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TYPES = dict.fromkeys(("source_table_ptr", "target_table_ptr", "sources_ptr", "targets_ptr"), "i64")


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")
@pytest.mark.parametrize(
    ("unit_bytes", "align", "widest"),
    [(32768, 16, "v2.b64"), (1024, 16, "v2.b64"), (240, 16, "v2.b64"), (24, 8, "b64"), (36, 4, "b32"), (3, 1, "b8")],
)
def test_accesses_are_as_wide_as_the_alignment(unit_bytes, align, widest):
    """16 bytes a thread where a page allows: half as wide a word would halve what is in flight."""
    ptx = compile_for(move_kernel, move_constants(unit_bytes, align), 90, TYPES).asm["ptx"]
    stores = set(re.findall(r"st\.global\.(\S+)", ptx))
    assert stores == {widest}
    assert f"ld.global.{widest}" in ptx


@pytest.mark.skipif(INTERPRETED, reason="TRITON_INTERPRET=1 replaces the compiler")
def test_addresses_are_computed_in_64_bits():
    """Every product and sum on the way to an address: unit x step passes 2**31 in a large cache."""
    ttir = compile_for(move_kernel, move_constants(32768, 16), 90, TYPES).asm["ttir"]
    operations = dict(re.findall(r"(%\S+) = (.*)", ttir))
    wanted = re.findall(r"(%\S+) = tt\.int_to_ptr", ttir)
    assert len(wanted) == 2
    products, left = 0, [name for at in wanted for name in re.findall(r"%[\w.]+", operations[at])]
    while left:
        operation = operations.get(left.pop(), "")
        if not operation.startswith(("arith.", "tt.splat", "tt.broadcast")):
            continue  # a load: its own addresses are the index arrays'
        assert re.search(r"(?:<\d+x)?i64\b", operation.rsplit(" : ", 1)[-1]), operation
        products += operation.startswith("arith.muli")
        left += re.findall(r"%[\w.]+", operation)
    assert products == 2


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
