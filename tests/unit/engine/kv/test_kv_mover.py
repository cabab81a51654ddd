"""Moves of real tensors on the CPU, and on a GPU where there is one."""

import time

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.kv.manager import Move
from kvbench_engine.kv.mover import KVMover, batches
from tests.support.move_oracle import (
    COPY,
    HOST_PAGES,
    IN,
    OUT,
    PAGES,
    capacity_of,
    check_moves,
    filled_caches,
    page_moves,
    slab_moves,
)

NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NO_CUDA)])


@DEVICES
@settings(max_examples=40, deadline=None)
@given(planned=page_moves())
def test_pages(device, planned):
    size, moves = planned
    check_moves(moves, PAGES * size, HOST_PAGES * size, size, True, device)


@DEVICES
@settings(max_examples=40, deadline=None)
@given(moves=slab_moves(), max_model_len=st.sampled_from([4, 8]))
def test_ranges_of_a_slab(device, moves, max_model_len):
    check_moves(moves, 24, 12, max_model_len, False, device)


def test_a_slab_is_moved_to_the_slot_where_pages_would_do():
    """A reservation may be shorter than max_model_len and begin at a multiple of it: what follows is a neighbour's."""
    check_moves([Move(COPY, 0, 8, 3), Move(COPY, 0, 16, 3)], 24, 12, 8, paged=False)
    check_moves([Move(OUT, 0, 0, 2), Move(OUT, 8, 8, 2)], 24, 12, 8, paged=False)


@pytest.mark.parametrize(
    ("moves", "sizes"),
    [
        pytest.param([Move(COPY, 0, 4, 4), Move(COPY, 0, 8, 4)], [2], id="two copies of one page"),
        pytest.param([Move(COPY, 0, 4, 4), Move(COPY, 4, 8, 4)], [1, 1], id="a copy of a copy"),
        pytest.param([Move(COPY, 0, 4, 4), Move(COPY, 8, 4, 4)], [1, 1], id="written twice"),
        pytest.param([Move(COPY, 0, 4, 4), Move(COPY, 8, 0, 4)], [2], id="read, then written"),
        pytest.param([Move(OUT, 0, 4, 4), Move(OUT, 4, 0, 4)], [2], id="other slots of the same number"),
        pytest.param([Move(OUT, 0, 4, 4), Move(IN, 4, 0, 4), Move(IN, 0, 4, 4)], [1, 2], id="another direction"),
    ],
)
def test_what_may_be_done_at_once(moves, sizes):
    found = list(batches(moves))
    assert [len(batch) for batch in found] == sizes
    assert [move for batch in found for move in batch] == moves


@DEVICES
def test_seconds_are_returned_once(device):
    """Moves on a GPU are queued: their time is known once they are done, and does not include the caller's waits."""
    mover = KVMover(filled_caches(PAGES * 2, device), capacity_of(2, PAGES * 2, HOST_PAGES * 2), True)
    assert mover.take_seconds() == 0
    began = time.perf_counter()
    mover.move([Move(COPY, 0, 4, 2), Move(OUT, 4, 0, 2), Move(IN, 0, 6, 2)])
    if device == "cuda":
        torch.cuda.synchronize()
    passed = time.perf_counter() - began
    assert 0 < mover.take_seconds() <= passed
    assert mover.take_seconds() == 0
