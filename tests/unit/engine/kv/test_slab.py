from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kv.contiguous import Slab


def test_first_fit_takes_the_leftmost_hole_that_is_large_enough():
    slab = Slab(20)
    assert [slab.take(n) for n in (4, 6, 4, 6)] == [0, 4, 10, 14]
    slab.give(0, 4)
    slab.give(10, 4)
    assert slab.take(5) is None, "eight slots are free, no five of them side by side"
    assert (slab.free, slab.largest_hole) == (8, 4)
    assert slab.take(3) == 0
    assert slab.take(4) == 10, "the hole of one slot at 3 is too small"


def test_a_returned_piece_joins_the_holes_on_both_sides():
    slab = Slab(12)
    for n in (4, 4, 4):
        slab.take(n)
    slab.give(0, 4)
    slab.give(8, 4)
    assert slab.largest_hole == 4
    slab.give(4, 4)
    assert slab.largest_hole == slab.free == 12
    assert slab.take(12) == 0
    assert slab.largest_hole == 0


@settings(max_examples=100, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_against_a_map_of_single_slots(size, orders):
    """The oracle is a row of slots, searched one by one."""
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
