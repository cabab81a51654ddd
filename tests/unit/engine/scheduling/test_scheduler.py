"""What is scheduled, admitted, preempted and refused. That no output changes by it: tests/property."""

import pytest

from kvbench_engine.scheduling.scheduler import QueueFull
from tests.support.engine_parts import CountingExecutor, collect, drain, request, small_engine, undisturbed


def add_all(engine, *requests):
    for one in requests:
        engine.add_request(one)


def running(engine) -> list[str]:
    return [seq.request_id for seq in engine.scheduler.running]


def order_of_first_tokens(engine) -> list[str]:
    seen: list[str] = []
    while engine.has_work():
        seen += [o.request_id for o in engine.step() if o.request_id not in seen]
        engine.check_integrity()
    return seen


def test_decodes_come_first_and_prefills_are_chunked_into_the_rest():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4)
    engine.add_request(request("a", 6))
    engine.step()
    engine.add_request(request("b", 28, max_tokens=2))
    engine.step()
    engine.step()
    assert executor.plans == [[("a", 6)], [("a", 1), ("b", 15)], [("a", 1), ("b", 13)]]


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, enable_chunked_prefill=False, max_num_batched_tokens=32)
    add_all(engine, request("a", 20, max_tokens=3), request("b", 13, max_tokens=3), request("c", 18, max_tokens=3))
    drain(engine)
    assert executor.plans[:2] == [[("a", 20)], [("a", 1), ("b", 13), ("c", 18)]], "the last one fills the step exactly"


def test_preemption_takes_the_last_in_rank_which_returns_to_its_place():
    engine = small_engine(32, page_size=4, max_num_seqs=3)
    add_all(engine, *(request(name, 8, max_tokens=14) for name in "abcd"))
    while engine.has_work():
        before = running(engine)
        engine.step()
        preempted = [seq.request_id for seq in engine.scheduler.waiting if seq.request_id in before]
        assert preempted == before[len(before) - len(preempted) :]
        assert "a" not in preempted, "the first in rank is never preempted"
        waiting = [seq.request_id for seq in engine.scheduler.waiting]
        assert waiting == sorted(waiting), "arrival order is kept"
    assert engine.scheduler.num_preemptions


def test_nothing_is_admitted_in_the_step_that_preempted():
    """Not even where the one that was preempted leaves room, since it only awaits the last token that is drawn."""
    executor = CountingExecutor()
    engine = small_engine(44, executor, page_size=4, async_scheduling=True, max_num_batched_tokens=64)
    for name, prompt, output in (("a", 4, 14), ("b", 22, 9), ("c", 3, 5)):
        engine.add_request(request(name, prompt, max_tokens=output))
    while not engine.scheduler.num_preemptions:
        engine.step()
    assert executor.plans[-1] == [("a", 1)]
    engine.step()
    assert executor.plans[-1] == [("a", 1), ("c", 3)]
    drain(engine)


@pytest.mark.parametrize("page_size", [4, 16])
def test_admission_leaves_sixteen_tokens_for_each_running_sequence_whatever_the_page_size(page_size):
    def admitted(prompt: int) -> bool:
        engine = small_engine(48, page_size=page_size, max_num_batched_tokens=64)
        engine.add_request(request("a", 15, max_tokens=9))
        engine.step()  # a holds 16 slots, 32 are left, 16 of them are spare
        engine.add_request(request("b", prompt, max_tokens=1))
        engine.step()
        return engine.stats().prefill_tokens_scheduled == 15 + prompt

    assert admitted(16)
    assert not admitted(17)


@pytest.mark.parametrize(("slots", "at_once"), [(64, 1), (96, 2)])
def test_of_a_page_that_is_larger_than_the_spare_room_all_is_kept(slots, at_once):
    engine = small_engine(slots, page_size=32)
    add_all(engine, request("a", 8, max_tokens=3), request("b", 8, max_tokens=3))
    engine.step()
    assert len(running(engine)) == at_once
    drain(engine)


@pytest.mark.parametrize("overlaps", [False, True], ids=["in turn", "overlapping"])
@pytest.mark.parametrize("swap", [{}, {"preemption_mode": "swap", "host_slots": 32}], ids=["recompute", "swap"])
@pytest.mark.parametrize(("slots", "at_once"), [(64, 2), (60, 1)])  # 24 + 24, and 16 spare ones
def test_room_promised_to_a_prompt_in_part_is_not_promised_again(slots, at_once, swap, overlaps):
    settings = {"max_num_batched_tokens": 8, "max_num_partial_prefills": 4, "async_scheduling": overlaps, **swap}
    engine = small_engine(slots, page_size=4, **settings)
    requests = [request(name, range(i, i + 24), max_tokens=4) for i, name in enumerate("abcde")]
    add_all(engine, *requests)
    got: dict[str, list[int]] = {}
    collect(engine.step(), got)
    assert running(engine) == list("abcde"[:at_once])
    assert {name: got.get(name, []) + tokens for name, tokens in drain(engine).items()} == undisturbed(requests)
    assert (engine.stats().num_preemptions, engine.stats().recomputed_tokens) == (0, 0)


def test_a_prompt_in_part_that_leaves_takes_its_promise_along():
    """The whole pool is free for the one that preempts it, or that comes after its client has gone."""
    for gone in (False, True):
        engine = small_engine(64, page_size=4, max_model_len=64, scheduling_policy="priority")
        engine.add_request(request("low", 40, max_tokens=4, priority=1))
        engine.step()
        if gone:
            engine.abort("low")
        engine.add_request(request("urgent", 63, max_tokens=1))
        engine.step()
        assert running(engine) == ["urgent"]
        drain(engine)


def test_what_could_never_run_is_refused_alone():
    """As such, even when the queue is full: QueueFull would mean that it may be sent again."""
    engine = small_engine(64, page_size=4, max_num_waiting=1)
    fine = request("fine", 3)
    engine.add_request(fine)
    for one, says in (
        (request("x", []), "empty"),
        (request("x", 32), "32 tokens and max_model_len is 32"),
        (request("x", [1, 97]), "97 .* 0 to 96"),
        (request("x", [-1, 4]), "-1"),
        (request("x", 4, n=5), "5 sequences .* max_num_seqs 4"),
        (fine, "'fine' is in use"),
    ):
        with pytest.raises(ValueError, match=says) as refused:
            engine.add_request(one)
        assert not isinstance(refused.value, QueueFull)
    assert len(drain(engine)["fine"]) == 8


def test_a_full_queue_refuses_one_more_and_forgets_it():
    """A request for which a row is free does not count as waiting, although it is admitted only by the next step."""
    engine = small_engine(256, page_size=4, max_num_seqs=1, max_num_waiting=2)
    add_all(engine, *(request(name, 4) for name in "abc"))
    for _ in range(2):
        with pytest.raises(QueueFull, match="max_num_waiting is 2"):
            engine.add_request(request("d", 4))
        engine.step()  # a runs, b and c wait
    while engine.stats().num_requests_waiting == 2:
        engine.step()
    engine.add_request(request("d", 4))
    assert sorted(drain(engine)) == ["b", "c", "d"]
    assert engine.stats().finished == {"length": 4}


def test_rows_that_are_free_for_want_of_pages_are_no_places_in_the_queue():
    engine = small_engine(32, page_size=4, max_num_waiting=1)
    add_all(engine, request("a", 15, max_tokens=9))
    engine.step()
    engine.add_request(request("b", 15, max_tokens=9))
    engine.step()  # three rows are free, and b waits
    with pytest.raises(QueueFull):
        engine.add_request(request("c", 3))
    drain(engine)


def test_invariants_are_checked_after_each_step_with_kvbench_check(monkeypatch):
    monkeypatch.setenv("KVBENCH_CHECK", "1")
    engine = small_engine(64, page_size=4)
    engine.add_request(request("a", 6, max_tokens=4))
    engine.step()
    engine.kv.pool.ref_count[engine.scheduler.running[0].pages[0]] += 1
    with pytest.raises(AssertionError, match="ref_count"):
        engine.step()


# Priority.


@pytest.mark.parametrize(("policy", "order"), [("fcfs", "abcd"), ("priority", "cadb")])
def test_which_request_goes_first(policy, order):
    engine = small_engine(256, page_size=4, max_num_seqs=1, scheduling_policy=policy)
    for name, priority in (("a", 1), ("b", 2), ("c", 0), ("d", 1)):
        engine.add_request(request(name, 4, max_tokens=2, priority=priority))
    assert order_of_first_tokens(engine) == list(order)


@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_an_urgent_request_preempts_the_least_urgent_one(layout):
    engine = small_engine(2 * 32, layout=layout, page_size=4, max_num_seqs=2, scheduling_policy="priority")
    requests = [request(n, 6, max_tokens=10, priority=p) for n, p in (("low", 5), ("mid", 3), ("urgent", 0))]
    add_all(engine, *requests[:2])
    got: dict[str, list[int]] = {}
    for _ in range(3):
        collect(engine.step(), got)
    engine.add_request(requests[2])
    collect(engine.step(), got)
    assert running(engine) == ["urgent", "mid"]
    assert [seq.request_id for seq in engine.scheduler.waiting] == ["low"]
    for name, tokens in drain(engine).items():
        got[name] += tokens
    assert got == undisturbed(requests)
    assert engine.stats().num_preemptions == 1


@pytest.mark.parametrize(("policy", "priority"), [("priority", 3), ("fcfs", 0)])
def test_a_request_of_equal_priority_preempts_nobody(policy, priority):
    """Neither for a row of the batch nor, where only one that is less urgent and it together would do, for pages."""
    engine = small_engine(256, page_size=4, max_num_seqs=1, scheduling_policy=policy)
    engine.add_request(request("a", 6, max_tokens=10, priority=3))
    engine.step()
    engine.add_request(request("b", 6, max_tokens=10, priority=priority))
    engine.step()
    assert running(engine) == ["a"]
    drain(engine)
    assert engine.stats().num_preemptions == 0

    engine = small_engine(32, page_size=4, scheduling_policy=policy)
    add_all(engine, request("a", 5, max_tokens=3, priority=3), request("less urgent", 5, max_tokens=3, priority=4))
    engine.step()
    engine.add_request(request("b", 28, max_tokens=2, priority=priority))
    engine.step()
    assert running(engine) == ["a", "less urgent"]
    drain(engine)
    assert engine.stats().num_preemptions == 0


def test_nobody_is_preempted_when_even_that_would_not_be_enough():
    """Pages that the urgent one shares with the one that would be preempted are not gained: it needs them itself."""
    engine = small_engine(36, page_size=4, enable_prefix_caching=True, scheduling_policy="priority")  # 9 pages
    add_all(engine, request("first", 3, max_tokens=10), request("low", 13, max_tokens=6, priority=2))
    engine.step()
    engine.add_request(request("urgent", range(1, 18), max_tokens=2, priority=1))  # begins as low does
    engine.step()
    assert running(engine) == ["first", "low"]
    assert engine.stats().num_preemptions == 0
    drain(engine)


@pytest.mark.parametrize(("prompt", "now"), [(4, ["first", "urgent"]), (5, ["first", "low"])])
def test_pages_that_a_third_one_shares_are_not_gained_by_preempting(prompt, now):
    """Of the four pages of "low" three are those of "first" too, which stays: one page, and not two, would be free."""
    engine = small_engine(36, page_size=4, enable_prefix_caching=True, scheduling_policy="priority")
    engine.add_request(request("first", 13, max_tokens=4))
    engine.step()
    engine.add_request(request("low", 13, max_tokens=4, priority=2))
    engine.step()
    engine.add_request(request("urgent", range(50, 50 + prompt), max_tokens=2, priority=1))
    engine.step()
    assert running(engine) == now
    drain(engine)


@pytest.mark.parametrize(("low", "urgent", "fits"), [(1, 2, True), (1, 3, False), (2, 3, True)])
def test_rows_of_the_batch_decide_who_is_preempted_as_pages_do(low, urgent, fits):
    """Three rows, one of them taken by a sequence of equal priority; what forks to come would take is free as well."""
    engine = small_engine(256, page_size=4, max_num_seqs=2 + low, scheduling_policy="priority")
    add_all(engine, request("first", 3, max_tokens=9), request("low", 28, max_tokens=2, n=low, priority=2))
    engine.step()
    engine.add_request(request("urgent", 3, max_tokens=2, n=urgent, priority=0 if low > 1 else 1))
    engine.step()
    assert ("low" in running(engine)) != fits
    drain(engine)


# Shares of a step for short prompts.


@pytest.mark.parametrize(("partial_prefills", "step"), [(1, 9), (2, 1)])
def test_a_long_prompt_does_not_starve_short_ones(partial_prefills, step):
    """With one share the short prompt comes behind 61 tokens, 8 a step; with two, one is kept for it."""
    engine = small_engine(256, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=partial_prefills)
    add_all(engine, request("long", 30, max_tokens=2), request("also long", 30, max_tokens=2))
    engine.add_request(request("short", 4, max_tokens=2))  # all of a share
    for number in range(1, step + 1):
        assert any(output.request_id == "short" for output in engine.step()) == (number == step)
    drain(engine)


def test_shares_that_nobody_wants_are_not_left_unused():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=2)
    add_all(engine, request("long", 30, max_tokens=2), request("also long", 30, max_tokens=2))
    drain(engine)
    assert executor.plans[:5] == [[("long", 8)]] * 3 + [[("long", 6)]] + [[("long", 1), ("also long", 7)]]


def test_a_passed_over_prompt_keeps_its_rank_and_its_turn_comes():
    engine = small_engine(256, page_size=4, max_num_batched_tokens=8, max_num_partial_prefills=2)
    add_all(engine, *(request(f"long {i}", 25, max_tokens=4) for i in range(3)))
    add_all(engine, *(request(f"short {i}", 3, max_tokens=4) for i in range(9)))
    order = order_of_first_tokens(engine)
    assert len(order) == 12
    assert [name for name in order if name.startswith("long")] == ["long 0", "long 1", "long 2"]
    assert order.index("long 1") < order.index("short 8"), "short ones that came later do not go first for ever"
