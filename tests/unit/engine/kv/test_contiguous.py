"""Reservations in one slab: how large they are, first fit, and fragmentation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.kv.contiguous import Slab
from tests.support.engine_parts import drain, request, small_engine


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_a_slab_against_a_map_of_single_slots(size, orders):
    slab, row, taken = Slab(size), [None] * size, []
    for number, (give, n) in enumerate(orders):
        if give and taken:
            base, length = taken.pop(n % len(taken))
            slab.give(base, length)
            row[base : base + length] = [None] * length
        else:
            fits = (b for b in range(size - n + 1) if all(slot is None for slot in row[b : b + n]))
            first = next(fits, None)
            assert (slab.find(n) is None) == (first is None)
            assert slab.take(n) == first
            if first is not None:
                row[first : first + n] = [number] * n
                taken.append((first, n))
        assert slab.free == row.count(None)
        runs = "".join("." if slot is None else "x" for slot in row).split("x")
        assert slab.largest_hole == max(map(len, runs))
        slab.check_integrity(taken)


@pytest.mark.parametrize(
    ("reservation", "prompt", "output", "reserved"),
    [("max", 5, 9, 32), ("pow2", 5, 9, 21), ("pow2", 5, 8, 13), ("oracle", 5, 9, 14), ("oracle", 20, 999, 32)],
)
def test_what_a_sequence_reserves(reservation, prompt, output, reserved):
    engine = small_engine(64, layout="contiguous", reservation=reservation, max_num_batched_tokens=32)
    engine.add_request(request("a", prompt, max_tokens=output))
    engine.step()
    kv = engine.stats().kv
    assert (kv.slots_reserved, kv.slots_used, kv.slots_fragmented) == (reserved, prompt, 0)


@pytest.mark.parametrize("wanted", [14, 24])
def test_fragmentation_is_seen_and_counted(wanted):
    """Of three reservations side by side only the middle one is left: 24 slots are free, but no 14 in a row."""
    engine = small_engine(36, layout="contiguous", reservation="oracle", max_num_batched_tokens=32)
    for name, output in (("a", 2), ("b", 9), ("c", 2)):
        engine.add_request(request(name, 10 if output == 2 else 3, max_tokens=output))
    assert sum(len(engine.step()) for _ in range(2)) == 6
    kv = engine.stats().kv
    assert (kv.slots_reserved, kv.slots_free, kv.slots_fragmented) == (12, 24, 0), "nobody waits for a reservation"
    engine.add_request(request("d", 10, max_tokens=wanted - 10))
    for _ in range(3):
        engine.step()
        stats = engine.stats()
        assert (stats.num_requests_waiting, stats.kv.slots_fragmented) == (1, 24)
        assert stats.counters.refused_fragmented == 1, "once, however long it waits"
    assert len(drain(engine)["d"]) == wanted - 10
