import pytest

from kvbench_engine.engine import Engine
from kvbench_engine.kv.swap_space import SwapSpace
from kvbench_engine.sequence import Sequence
from tests.support.engine_parts import CountingExecutor, collect, drain, request, small_engine, undisturbed


def swapped(swap: SwapSpace, name: str, pages: int) -> Sequence:
    seq = Sequence.of(request(name, 1))
    for _ in range(pages):
        seq.host_pages.append(swap.allocate())
    swap.enter(seq)
    return seq


def test_without_room_who_was_swapped_out_longest_ago_loses_its_last_pages():
    swap = SwapSpace(4)
    old, new = swapped(swap, "old", 2), swapped(swap, "new", 2)
    kept = old.host_pages[0]
    late = swapped(swap, "late", 1)
    assert old.host_pages == [kept], "the first page stays: what is left is a prefix"
    assert len(new.host_pages) == 2
    late.host_pages.append(swap.allocate())
    assert not old.host_pages
    swap.check_integrity()


def test_twins_are_known_both_ways_until_one_is_given_away():
    swap = SwapSpace(2)
    seq = swapped(swap, "a", 2)
    first, second = seq.host_pages
    swap.make_twins(7, first)
    swap.make_twins(8, second)
    assert (swap.twin_on_host(7), swap.twin_on_device(second)) == (first, 8)
    swap.forget_device_page(7)
    assert swap.twin_on_host(7) is None and swap.twin_on_device(first) is None
    swap.remove(seq)  # the copy of 8 stays, free, as long as its place is not needed
    assert swap.twin_on_host(8) == second
    assert swap.pool.num_available == 2
    swap.check_integrity()
    assert swap.allocate() == first, "what nobody can find goes first"
    assert swap.allocate() == second
    assert swap.twin_on_host(8) is None


def test_room_is_made_for_copies_that_nobody_holds_too():
    """Copies that another sequence holds need no place; those that nobody holds take a free one."""
    swap = SwapSpace(4)
    back = swapped(swap, "back", 2)
    for device_page, host_page in zip((7, 8), back.host_pages, strict=True):
        swap.make_twins(device_page, host_page)
    swap.remove(back)
    other = swapped(swap, "other", 2)
    assert swap.make_room([7, 8]) and len(other.host_pages) == 2
    assert swap.make_room([7, 8, 9]) and not other.host_pages, "three places are needed and two are free"
    holder = swapped(swap, "holder", 2)
    for device_page, host_page in zip((5, 6), holder.host_pages, strict=True):
        swap.make_twins(device_page, host_page)
    assert swap.make_room([5, 6, 9, 10]) and len(holder.host_pages) == 2
    assert not swap.make_room([5, 6, 9, 10, 11]) and len(holder.host_pages) == 2
    swap.check_integrity()


def play(engine, requests, steps_before_the_last: int = 0):
    for one in requests[:-1]:
        engine.add_request(one)
    got: dict[str, list[int]] = {}
    for _ in range(steps_before_the_last):
        collect(engine.step(), got)
    engine.add_request(requests[-1])
    for name, tokens in drain(engine).items():
        got.setdefault(name, []).extend(tokens)
    stats = engine.stats()
    assert stats.num_preemptions, "nobody was swapped out: the test shows nothing"
    assert (stats.kv.host_slots_used, stats.num_requests_swapped) == (0, 0)
    return got, stats


CROWD = [request(n, p, max_tokens=14) for n, p in (("a", 9), ("b", 7), ("c", 5))]


@pytest.mark.parametrize("host_slots", [4, 12, 400])
def test_what_the_host_has_no_room_for_is_computed_again_and_nothing_else(host_slots):
    engine = small_engine(32, page_size=4, preemption_mode="swap", host_slots=host_slots)
    got, stats = play(engine, CROWD)
    assert got == undisturbed(CROWD)
    lost = stats.counters.swap_lost_slots
    assert stats.recomputed_tokens == lost and (lost > 0) == (host_slots < 400)
    if not lost:
        assert stats.counters.swapped_in_slots == stats.counters.swapped_out_slots > 0


def swapping_reservations(host_slots: int) -> Engine:
    settings = {"layout": "contiguous", "reservation": "oracle", "scheduling_policy": "priority"}
    return small_engine(32, preemption_mode="swap", host_slots=host_slots, **settings)


@pytest.mark.parametrize(("host_slots", "fits"), [(400, True), (11, True), (10, False)])
def test_a_reservation_is_swapped_whole_or_not_at_all(host_slots, fits):
    requests = [request("low", 10, max_tokens=8, priority=1), request("urgent", 20, max_tokens=4)]
    engine = swapping_reservations(host_slots)
    got, stats = play(engine, requests, steps_before_the_last=2)  # low has computed 11 tokens by then
    assert got == undisturbed(requests)
    moved = stats.counters.swapped_out_slots, stats.counters.swapped_in_slots, stats.counters.swap_lost_slots
    assert moved == ((11, 11, 0) if fits else (0, 0, 11))
    assert stats.recomputed_tokens == (0 if fits else 11)


def test_contiguous_host_space_goes_to_the_latest_and_the_oldest_loses_all():
    requests = [request(name, 6, max_tokens=8, priority=2) for name in ("x", "y")]
    requests.append(request("urgent", 20, max_tokens=8, priority=1))  # 28 slots: both have to go
    engine = swapping_reservations(host_slots=7)  # room for one of the two
    got, stats = play(engine, requests, steps_before_the_last=2)
    assert got == undisturbed(requests)
    assert stats.num_preemptions == 2
    assert (stats.counters.swapped_out_slots, stats.counters.swapped_in_slots) == (14, 7)
    assert stats.counters.swap_lost_slots == stats.recomputed_tokens == 7


def test_siblings_swapped_out_share_their_host_pages():
    """Full pages that two siblings name are moved once, and brought back once."""
    executor = CountingExecutor()
    requests = [request("low", 12, max_tokens=6, n=2, priority=1), request("urgent", 20, max_tokens=4)]
    engine = small_engine(
        36, executor, page_size=4, scheduling_policy="priority", preemption_mode="swap", host_slots=400
    )
    got, stats = play(engine, requests, steps_before_the_last=2)
    assert got == undisturbed(requests)
    assert stats.num_preemptions == 2
    # 13 tokens each: three full pages, shared, and the last page of each with a single token
    assert stats.counters.swapped_out_slots == 3 * 4 + 2
    assert stats.counters.swapped_in_slots == 3 * 4 + 2
    assert stats.recomputed_tokens == 0
