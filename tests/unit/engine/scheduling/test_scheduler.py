import pytest

from tests.support.engine_parts import CountingExecutor, drain, request, small_engine, undisturbed


def test_decodes_come_first_and_prefills_are_chunked_into_the_rest():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4)
    engine.add_request(request("a", 6))
    engine.step()
    engine.add_request(request("b", 28, max_tokens=2))
    engine.step()
    engine.step()
    assert executor.plans == [[("a", 6)], [("a", 1), ("b", 15)], [("a", 1), ("b", 13)]]


def test_step_never_exceeds_the_token_budget():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, max_num_seqs=4)
    for name in "abcdef":
        engine.add_request(request(name, 20, max_tokens=5))
    drain(engine)
    assert max(sum(n for _, n in plan) for plan in executor.plans) == 16
    assert max(len(plan) for plan in executor.plans) <= 4


def test_without_chunking_a_prompt_waits_until_it_fits_whole():
    executor = CountingExecutor()
    engine = small_engine(256, executor, page_size=4, enable_chunked_prefill=False, max_num_batched_tokens=32)
    engine.add_request(request("a", 20, max_tokens=3))
    engine.add_request(request("b", 20, max_tokens=3))
    drain(engine)
    assert executor.plans[:2] == [[("a", 20)], [("a", 1), ("b", 20)]]


def test_preemption_takes_the_newest_and_changes_no_token():
    requests = [request(n, p, max_tokens=14) for n, p in (("a", 9), ("b", 7), ("c", 5))]
    engine = small_engine(32, page_size=4)
    for one in requests:
        engine.add_request(one)
    order: list[str] = []
    got: dict[str, list[int]] = {}
    while engine.has_work():
        plan_before = [seq.request_id for seq in engine.scheduler.running]
        for output in engine.step():
            got.setdefault(output.request_id, []).extend(output.token_ids)
        order += [s.request_id for s in engine.scheduler.waiting if s.request_id in plan_before]
        engine.check_integrity()
    assert got == undisturbed(requests)
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.recomputed_tokens > 0
    assert "a" not in order, "the oldest must never be preempted"


def test_recomputed_tokens_are_what_was_computed_twice():
    executor = CountingExecutor()
    engine = small_engine(32, executor, page_size=4)
    for name, prompt in (("a", 9), ("b", 7), ("c", 5)):
        engine.add_request(request(name, prompt, max_tokens=14))
    drain(engine)
    computed = sum(n for plan in executor.plans for _, n in plan)
    needed = sum(prompt + 14 - 1 for prompt in (9, 7, 5))  # the last token's KV is never needed
    assert engine.stats().recomputed_tokens == computed - needed
    assert engine.stats().prefill_tokens_scheduled + engine.stats().decode_tokens_scheduled == computed


def test_full_prefix_hit_still_computes_one_token():
    executor = CountingExecutor()
    engine = small_engine(64, executor, page_size=4, enable_prefix_caching=True)
    prompt = list(range(1, 17))
    engine.add_request(request("a", prompt, max_tokens=1))
    drain(engine)
    engine.add_request(request("b", prompt, max_tokens=1))
    drain(engine)
    assert executor.plans[-1] == [("b", 4)]
    stats = engine.stats()
    assert (stats.prefix_cache_hits, stats.prefix_cache_queries) == (12, 32)


def test_requests_running_side_by_side_share_pages():
    engine = small_engine(64, page_size=4, enable_prefix_caching=True, max_num_batched_tokens=32)
    shared = list(range(1, 13))
    engine.add_request(request("a", [*shared, 50], max_tokens=8))
    engine.step()
    engine.add_request(request("b", [*shared, 60], max_tokens=8))
    engine.step()
    first, second = engine.scheduler.running
    assert first.pages[:3] == second.pages[:3]
    assert first.pages[3] != second.pages[3]
    assert engine.stats().kv.slots_used == 12 + (13 + 1 - 12) + (13 - 12)
    engine.check_integrity()


@pytest.mark.parametrize(
    ("one", "says"),
    [
        (request("x", []), "the prompt is empty"),
        (request("x", 32), "has 32 tokens and max_model_len is 32"),
        (request("x", [1, 97]), "token id 97 is not in the vocabulary: ids run from 0 to 96"),
        (request("x", [-1, 4]), "token id -1"),
    ],
)
def test_requests_that_can_never_run_are_refused_alone(one, says):
    engine = small_engine(64, page_size=4)
    with pytest.raises(ValueError, match=says):
        engine.add_request(one)
    engine.add_request(request("fine", 3))
    assert len(drain(engine)["fine"]) == 8


def test_output_stops_at_max_model_len_stop_token_and_eos():
    engine = small_engine(64, page_size=4)
    engine.add_request(request("long", 30, max_tokens=50))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    assert outputs[-1].finish_reason == "length"
    assert len(outputs) == 2

    history = list(range(1, 6))
    first = CountingExecutor().next_token(history)
    engine = small_engine(64, page_size=4)
    engine.add_request(request("stop", 5, stop_token_ids=(first,)))
    assert [o.finish_reason for o in engine.step()] == ["stop"]
    engine = small_engine(64, CountingExecutor(eos=(first,)), page_size=4)
    engine.add_request(request("eos", 5))
    engine.add_request(request("ignore", 5, ignore_eos=True))
    assert [o.finish_reason for o in engine.step()] == ["stop", None]


def test_abort_gives_pages_back_in_every_state():
    engine = small_engine(40, page_size=4)
    for name in "abcdef":
        engine.add_request(request(name, 4, max_tokens=26))
    engine.step()
    assert engine.abort("a")  # running
    assert engine.abort("f")  # waiting
    engine.check_integrity()
    while engine.has_work() and not engine.scheduler.num_preemptions:
        engine.step()
    preempted = [s.request_id for s in engine.scheduler.waiting if s.num_preemptions]
    assert preempted
    assert engine.abort(preempted[0])
    assert not engine.abort("a")
    drain(engine)
    stats = engine.stats()
    assert stats.kv.pages_owned == 0
    assert stats.finished["abort"] == 3


def test_contiguous_holds_as_many_as_it_has_reservations():
    engine = small_engine(3 * 32, layout="contiguous")
    for name in "abcd":
        engine.add_request(request(name, 3, max_tokens=4))
    engine.step()
    stats = engine.stats()
    assert (stats.num_requests_running, stats.num_requests_waiting) == (3, 1)
    assert stats.kv.slots_reserved == 96
    assert stats.kv.slots_used == 9
    assert stats.kv_waste_slots == 87
    assert not engine.reset_prefix_cache()
    drain(engine)
    assert engine.stats().kv.slots_used == 0
    assert engine.reset_prefix_cache()


def test_request_id_in_use_is_refused():
    engine = small_engine(64, page_size=4)
    engine.add_request(request("a", 3))
    with pytest.raises(ValueError, match="in use"):
        engine.add_request(request("a", 3))


def test_a_preempted_sequence_is_first_in_line_again():
    engine = small_engine(32, page_size=4, max_num_seqs=3)
    for name in "abcd":
        engine.add_request(request(name, 8, max_tokens=14))
    while not engine.scheduler.num_preemptions:
        engine.step()
    waiting = [seq.request_id for seq in engine.scheduler.waiting]
    assert waiting[-1] == "d", "d has never run and comes last"
    assert len(waiting) > 1
    assert waiting == sorted(waiting), "arrival order is kept"


def test_nothing_is_admitted_in_the_step_that_preempted():
    """The admitted one would be the next to go: its prompt would be computed for nothing."""
    executor = CountingExecutor()
    engine = small_engine(32, executor, page_size=4)
    for name, prompt in (("a", 9), ("b", 12), ("c", 3)):
        engine.add_request(request(name, prompt, max_tokens=14))
    while engine.has_work():
        before = engine.scheduler.num_preemptions
        running = {seq.request_id for seq in engine.scheduler.running}
        engine.step()
        if engine.scheduler.num_preemptions > before:
            assert {name for name, _ in executor.plans[-1]} <= running
    assert engine.scheduler.num_preemptions


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


def test_pages_are_freed_from_the_end_so_that_the_beginning_stays_cached_longest():
    engine = small_engine(32, page_size=4, enable_prefix_caching=True)  # 8 pages
    prompt = list(range(10, 26))
    engine.add_request(request("a", prompt, max_tokens=1))
    drain(engine)  # 4 cached pages
    engine.add_request(request("b", list(range(50, 70)), max_tokens=1))  # 5 pages: evicts one
    drain(engine)
    engine.add_request(request("again", [*prompt, 1], max_tokens=1))
    hits = engine.stats().prefix_cache_hits
    drain(engine)
    assert engine.stats().prefix_cache_hits - hits == 12, "the last page of the prompt was to go first"


def test_a_page_hashed_later_continues_the_chain():
    """A second prompt that equals the first one's second page must not be served that page."""
    executor = CountingExecutor()
    engine = small_engine(64, executor, page_size=4, enable_prefix_caching=True, max_num_batched_tokens=4)
    first = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    engine.add_request(request("a", first, max_tokens=1))  # chunks of one page: pages are hashed one by one
    drain(engine)
    engine.add_request(request("b", [5, 6, 7, 8, 9], max_tokens=1))
    drain(engine)
    assert engine.stats().prefix_cache_hits == 0


def test_invariants_are_checked_after_each_step_when_asked_for(monkeypatch):
    monkeypatch.setenv("KVBENCH_CHECK", "1")
    engine = small_engine(64, page_size=4)
    engine.add_request(request("a", 6, max_tokens=4))
    engine.step()
    engine.kv.pool.ref_count[engine.scheduler.running[0].pages[0]] += 1
    with pytest.raises(AssertionError, match="ref_count"):
        engine.step()
