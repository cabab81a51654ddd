"""Priority, shares for short prompts, the queue's limit, reservations, failed steps, and the accounts of a step."""

import pytest

from engine.kv.manager import LEDGER
from engine.scheduling.scheduler import QueueFull
from tests.support.engine_parts import (
    CountingExecutor,
    StepFailed,
    drain,
    expected_outputs,
    request,
    small_engine,
    undisturbed,
)


def order_of_first_tokens(engine) -> list[str]:
    seen: list[str] = []
    while engine.has_work():
        seen += [o.request_id for o in engine.step() if o.request_id not in seen]
        engine.check_integrity()
    return seen


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_who_goes_first(policy, order):
    engine = small_engine(256, page_size=4, max_num_seqs=1, scheduling_policy=policy)
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        engine.add_request(request(name, 4, max_tokens=2, priority=priority))
    assert order_of_first_tokens(engine) == list(order)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_an_urgent_request_takes_the_place_of_the_least_urgent_one(layout):
    engine = small_engine(2 * 32, layout=layout, page_size=4, max_num_seqs=2, scheduling_policy="priority")
    requests = [request(n, 6, max_tokens=10, priority=p) for n, p in (("low", 5), ("mid", 3), ("urgent", 0))]
    got = {}
    for one in requests[:2]:
        engine.add_request(one)
    for _ in range(3):
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
    engine.add_request(requests[2])
    engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == ["urgent", "mid"]
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["low"]
    rest = drain(engine)
    alone = undisturbed(requests)
    assert got["low"] + rest["low"] == alone["low"]
    assert engine.stats().num_preemptions == 1


def test_nobody_has_to_go_when_even_that_would_not_be_enough():
    """What the urgent one shares with the one that would go is no page gained: it would need it itself."""
    engine = small_engine(36, page_size=4, enable_prefix_caching=True, scheduling_policy="priority")  # 9 pages
    requests = [request("first", 3, max_tokens=10), request("low", 13, max_tokens=6, priority=2)]
    requests += [request("urgent", range(1, 18), max_tokens=2, priority=1)]  # begins as low does
    for one in requests[:2]:
        engine.add_request(one)
    engine.step()
    engine.add_request(requests[2])
    engine.step()
    assert [seq.request_id for seq in engine.scheduler.running] == ["first", "low"]
    assert engine.stats().num_preemptions == 0
    drain(engine)


def test_equal_priorities_and_fcfs_take_nobodys_place():
    for policy, priority in (("priority", 3), ("fcfs", 0)):
        engine = small_engine(256, page_size=4, max_num_seqs=1, scheduling_policy=policy)
        engine.add_request(request("a", 6, max_tokens=10, priority=3))
        engine.step()
        engine.add_request(request("b", 6, max_tokens=10, priority=priority))
        drain(engine)
        assert engine.stats().num_preemptions == 0


def test_a_long_prompt_does_not_starve_short_ones():
    """With two shares, one is kept for prompts that fit in it; what nobody wants goes to the long one all the same."""

    def steps_until_short_answers(partial_prefills: int) -> int:
        engine = small_engine(256, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=partial_prefills)
        engine.add_request(request("long", 30, max_tokens=2))
        engine.add_request(request("also long", 30, max_tokens=2))
        engine.add_request(request("short", 3, max_tokens=2))
        for step in range(1, 100):
            if any(output.request_id == "short" for output in engine.step()):
                drain(engine)
                return step
        raise AssertionError("the short prompt is starved")

    assert steps_until_short_answers(1) == 8, "behind 60 tokens, 8 a step"
    assert steps_until_short_answers(2) == 1


def test_shares_that_nobody_wants_are_not_left_unused():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=2)
    engine.add_request(request("long", 30, max_tokens=2))
    engine.add_request(request("also long", 30, max_tokens=2))
    drain(engine)
    assert executor.plans[:5] == [[("long", 8)]] * 3 + [[("long", 6)]] + [[("long", 1), ("also long", 7)]]


def test_a_passed_over_prompt_keeps_its_rank_and_its_turn_comes():
    requests = [request(f"long {i}", 25, max_tokens=4) for i in range(3)]
    requests += [request(f"short {i}", 3, max_tokens=4) for i in range(9)]
    engine = small_engine(256, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=2)
    for one in requests:
        engine.add_request(one)
    order = order_of_first_tokens(engine)
    assert len(order) == 12
    assert [name for name in order if name.startswith("long")] == ["long 0", "long 1", "long 2"]
    assert order.index("long 1") < order.index("short 8"), "short ones that came later do not go first for ever"


def test_a_full_queue_refuses_one_more_and_forgets_it():
    """Whoever finds a free place in the batch does not wait, although nobody is in it before the next step."""
    engine = small_engine(256, page_size=4, max_num_seqs=1, max_num_waiting=2)
    for name in "abc":
        engine.add_request(request(name, 4))
    for _ in range(2):
        with pytest.raises(QueueFull, match=r"max_num_waiting is 2: send .* again later"):
            engine.add_request(request("d", 4))
        engine.step()  # a runs, b and c wait
    while engine.stats().num_requests_waiting == 2:
        engine.step()
    engine.add_request(request("d", 4))
    assert isinstance(QueueFull(), ValueError)
    assert sorted(drain(engine)) == ["b", "c", "d"]
    assert engine.stats().finished == {"length": 4}


def test_what_could_never_run_is_refused_as_such_even_when_the_queue_is_full():
    engine = small_engine(256, page_size=4, max_num_waiting=1)
    engine.add_request(request("a", 4))
    with pytest.raises(ValueError, match="max_model_len is 32") as refused:
        engine.add_request(request("b", 40))
    assert not isinstance(refused.value, QueueFull)
    with pytest.raises(ValueError, match=r"5 sequences side by side .* more than max_num_seqs 4"):
        engine.add_request(request("b", 4, n=5))


@pytest.mark.parametrize(
    ("reservation", "reserved"),
    [("max", 32), ("pow2", 5 + 16), ("oracle", 5 + 9)],
)
def test_what_a_sequence_reserves(reservation, reserved):
    engine = small_engine(64, layout="contiguous", reservation=reservation)
    engine.add_request(request("a", 5, max_tokens=9))
    engine.step()
    kv = engine.stats().kv
    assert (kv.slots_reserved, kv.slots_used) == (reserved, 5)
    assert kv.slots_fragmented == 0


@pytest.mark.parametrize("reservation", ["pow2", "oracle"])
def test_no_reservation_is_longer_than_max_model_len(reservation):
    engine = small_engine(32, layout="contiguous", reservation=reservation)
    engine.add_request(request("a", 20, max_tokens=1000))
    assert len(drain(engine)["a"]) == 12


def test_fragmentation_is_seen_and_counted():
    """Three reservations side by side, the middle one goes on: 24 slots are free, and 14 are not there in a row."""
    engine = small_engine(36, layout="contiguous", reservation="oracle", max_num_batched_tokens=32)
    for name, output in (("a", 2), ("b", 9), ("c", 2)):
        engine.add_request(request(name, 10 if output == 2 else 3, max_tokens=output))
    drained = [engine.step() for _ in range(2)]
    assert sum(map(len, drained)) == 6
    kv = engine.stats().kv
    assert (kv.slots_reserved, kv.slots_free, kv.slots_fragmented) == (12, 24, 0), "nobody wants a place"
    engine.add_request(request("d", 10, max_tokens=4))
    for _ in range(3):
        engine.step()
        assert engine.stats().num_requests_waiting == 1
        assert engine.stats().kv.slots_fragmented == 24
        assert engine.stats().counters.refused_fragmented == 1, "once, however long it waits"
    assert len(drain(engine)["d"]) == 4


@pytest.mark.parametrize("where", ["start", "moves", "writes"])
@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_a_failed_step_harms_only_those_that_were_in_it(where, mode, layout):
    """A waiting request survives it, swapped out or not, and no page that the step was to fill is believed in."""
    settings = {"preemption_mode": "swap", "host_slots": 64} if mode == "swap" else {}
    caching = {"enable_prefix_caching": True} if layout == "paged" else {}
    executor = CountingExecutor()
    engine = small_engine(32, executor, layout=layout, page_size=4, **caching, **settings)
    requests = [request(n, 9, max_tokens=14) for n in "abc"]
    for one in requests:
        engine.add_request(one)
    for _ in range(10):
        engine.step()
    waiting = {seq.request_id for seq in engine.scheduler.waiting}
    assert waiting
    executor.fail_at = where
    with pytest.raises(StepFailed):
        engine.step()
    victims = engine.fail_step()
    assert victims and not waiting & set(victims)
    for name in victims:
        assert engine.abort(name, "error")
    engine.check_integrity()
    again = [request(f"{name} again", 9, max_tokens=14) for name in victims]
    for one in again:
        engine.add_request(one)
    rest = drain(engine)
    alone = undisturbed(requests + again)
    assert {name: rest[name] for name in rest if "again" in name} == {
        one.request_id: alone[one.request_id] for one in again
    }
    for name in waiting:
        assert rest[name] == alone[name][-len(rest[name]) :]
    assert engine.stats().finished == {"error": len(victims), "length": 3}
    assert engine.stats().kv.pages_owned == 0


@pytest.mark.parametrize("where", [None, "start", "moves"])
def test_a_host_page_that_was_never_filled_is_not_taken_for_a_copy(where):
    """Its device page outlives the failed step in the prefix cache; who meets it there and is swapped out later would
    take the host page for its copy, and read from it when the device page is gone."""
    executor = CountingExecutor()
    settings = {"scheduling_policy": "priority", "preemption_mode": "swap", "host_slots": 64}
    engine = small_engine(36, executor, page_size=4, enable_prefix_caching=True, **settings)

    def swap_out(low: str, urgent: str, prompt: range, where: str | None) -> None:
        engine.add_request(request(low, 13, max_tokens=6, priority=1))
        engine.step()
        engine.step()
        engine.add_request(request(urgent, prompt, max_tokens=2))
        executor.fail_at = where
        engine.step()

    if where is None:
        swap_out("first", "first urgent", range(40, 60), None)
        drain(engine)
    else:
        with pytest.raises(StepFailed):
            swap_out("first", "first urgent", range(40, 60), where)
        for name in engine.fail_step():
            engine.abort(name, "error")
    assert engine.stats().num_preemptions == 1
    hits = engine.stats().prefix_cache_hits
    swap_out("again", "again urgent", range(60, 90), None)
    assert engine.stats().prefix_cache_hits == hits + 12, "the pages were to be found on the device"
    assert engine.stats().num_preemptions == 2
    swapped_in = engine.stats().counters.swapped_in_slots
    again = request("again", 13, max_tokens=6)
    assert drain(engine)["again"] == undisturbed([again])["again"][2:]
    assert engine.stats().counters.swapped_in_slots > swapped_in, "the device pages were to be gone"


def test_every_step_is_recorded_and_the_places_add_up():
    records = []
    engine = small_engine(36, page_size=4, preemption_mode="swap", host_slots=24, enable_prefix_caching=True)
    engine.on_step = records.append
    for i, (name, prompt) in enumerate((("a", 9), ("b", 7), ("c", 5))):
        engine.add_request(request(name, range(i, i + prompt), max_tokens=14))
    engine.add_request(request("d", range(9), max_tokens=14, n=2))
    engine.add_request(request("e", range(9), max_tokens=14))
    drain(engine)
    stats = engine.stats()
    assert len(records) == stats.steps
    for field in ("copied_slots", "swapped_out_slots", "swapped_in_slots", "prefix_hits"):
        assert sum(getattr(record, field) for record in records) == getattr(stats.counters, field) > 0, field
    assert sum(record.preempted for record in records) == stats.num_preemptions
    assert sum(record.recomputed_tokens for record in records) == stats.recomputed_tokens
    assert sum(record.prefill_tokens for record in records) == stats.prefill_tokens_scheduled
    assert sum(record.decode_tokens for record in records) == stats.decode_tokens_scheduled
    for place in LEDGER:
        assert sum(record.kv.ledger()[place] for record in records) == stats.slot_steps[place]
    assert all(sum(record.kv.ledger().values()) == 36 for record in records)
    assert (records[-1].running, records[-1].waiting) == (0, 0)


def test_a_stop_token_of_one_sibling_stops_only_that_one():
    executor = CountingExecutor()
    plain = expected_outputs(request("a", 5, max_tokens=8, n=3), 32, executor)
    stop = plain[1][0][2]
    assert stop not in plain[0][0] + plain[2][0]
    one = request("a", 5, max_tokens=8, n=3, stop_token_ids=(stop,))
    engine = small_engine(256, executor, page_size=4)
    engine.add_request(one)
    reasons = {}
    while engine.has_work():
        reasons.update({o.index: o.finish_reason for o in engine.step() if o.finish_reason})
    assert reasons == {0: "length", 1: "stop", 2: "length"}
