"""Steps that overlap: a step is planned before the tokens of the previous one are known.

That no output changes by it, also after aborts and failed steps: tests/property.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.engine_parts import (
    CountingExecutor,
    StepFailed,
    collect,
    drain,
    expected_outputs,
    request,
    small_engine,
    undisturbed,
)


def overlapping(slots: int, executor: CountingExecutor | None = None, **settings):
    return small_engine(slots, executor, async_scheduling=True, page_size=4, **settings)


def serve(engine, requests) -> dict[str, list[int]]:
    for one in requests:
        engine.add_request(one)
    return drain(engine)


class LoggingExecutor(CountingExecutor):
    """Writes down when it launched and when it was read."""

    def __init__(self):
        super().__init__()
        self.log: list[str] = []

    def launch(self, plan):
        handle = super().launch(plan)
        number = len(self.plans)
        self.log.append(f"launch {number}")
        tokens = handle.tokens
        handle.tokens = lambda: (self.log.append(f"read {number}"), tokens())[1]
        return handle


def test_a_step_is_launched_before_the_one_before_is_read():
    executor = LoggingExecutor()
    engine = overlapping(64, executor)
    engine.add_request(request("a", 5, max_tokens=3))
    outputs = []
    while engine.has_work():
        outputs.append([output.token_ids for output in engine.step()])
    assert executor.log == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    tokens = undisturbed([request("a", 5, max_tokens=3)])["a"]
    assert outputs == [[], [(tokens[0],)], [(tokens[1],)], [(tokens[2],)]]

    executor = LoggingExecutor()
    serve(small_engine(64, executor, page_size=4), [request("a", 5, max_tokens=3)])
    assert executor.log == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]


@pytest.mark.parametrize("params", [{"n": 3}, {"best_of": 3}, {"n": 2, "beam_width": 3}], ids=str)
def test_tokens_that_forks_or_beams_depend_on_are_read_before_the_next_plan(params):
    executor = LoggingExecutor()
    one = request("a", 5, max_tokens=4, **params)
    tokens = serve(overlapping(256, executor), [one])
    expected = expected_outputs(one, 32, executor)
    assert tokens == {f"a/{i}" if i else "a": list(own) for i, (own, _) in expected.items()}
    if "beam_width" in params:
        assert executor.log == [f"{what} {i + 1}" for i in range(4) for what in ("launch", "read")]
    else:
        assert executor.log == ["launch 1", "read 1", "launch 2", "launch 3", "read 2", "launch 4", "read 3", "read 4"]


def test_an_unforeseen_end_is_dropped_from_the_step_in_flight():
    """The stop token is read when the next step is under way: its draw is dropped, its pages are freed at once."""
    one = request("a", 5, max_tokens=9)
    tokens = undisturbed([one])["a"]
    assert tokens[2] not in tokens[:2]
    executor = CountingExecutor()
    engine = overlapping(32, executor)
    engine.add_request(replace(one, params=replace(one.params, stop_token_ids=(tokens[2],))))
    got: dict[str, list[int]] = {}
    while len(got.get("a", [])) < 3:
        collect(engine.step(), got)
    assert engine.has_work() and engine.stats().kv.pages_owned == 0
    other = request("b", 13, max_tokens=3)  # takes the same pages
    assert serve(engine, [other]) == undisturbed([other]) and got["a"] == tokens[:3]
    stats = engine.stats()
    assert (stats.finished, stats.generation_tokens) == ({"stop": 1, "length": 1}, 6)
    assert executor.num_drawn == 7, "one was drawn in vain"


def test_a_foreseen_end_costs_nothing():
    executor = CountingExecutor()
    serve(overlapping(64, executor), [request("a", 5, max_tokens=4), request("b", 7, max_tokens=6)])
    assert executor.num_drawn == 10


def test_after_the_last_abort_the_step_in_flight_is_still_read():
    executor = LoggingExecutor()
    engine = overlapping(64, executor, enable_prefix_caching=True)
    engine.add_request(request("a", 9, max_tokens=9))
    engine.step()
    assert engine.abort("a") and engine.has_work()
    assert engine.reset_prefix_cache() and engine.step() == [] and not engine.has_work()
    assert executor.log == ["launch 1", "read 1"]
    kv = engine.stats().kv
    assert (kv.pages_free, kv.pages_cached) == (kv.pages_total, 0)


def test_a_sequence_whose_last_token_is_being_drawn_is_not_swapped_out():
    """Nothing will read its KV again."""
    executor = CountingExecutor()
    settings = {"scheduling_policy": "priority", "preemption_mode": "swap", "host_slots": 64}
    engine = overlapping(16, executor, max_model_len=16, **settings)
    engine.add_request(request("last", 5, max_tokens=1, priority=1))
    engine.step()
    urgent = request("urgent", range(3, 15), max_tokens=3, priority=0)
    serve(engine, [urgent])
    assert executor.pending["ending preempted"] == 1
    assert engine.stats().counters.swapped_out_slots == 0
    assert engine.stats().finished == {"length": 2}


def test_a_sequence_that_is_ending_is_not_preempted_for_another():
    """Nothing can be planned beside it; its memory is free soon."""
    engine = overlapping(16, max_model_len=16)
    requests = [request("a", 9, max_tokens=2), request("b", range(2, 14), max_tokens=3)]
    assert serve(engine, requests) == undisturbed(requests)
    assert engine.stats().num_preemptions == 0


def test_the_prefix_cache_finds_as_much_as_without_overlap():
    """The second round of a conversation: prompt, answer, and more."""
    for overlap in (False, True):
        engine = small_engine(128, page_size=4, enable_prefix_caching=True, async_scheduling=overlap)
        first = request("a", 6, max_tokens=12)
        answer = serve(engine, [first])["a"]
        serve(engine, [request("b", [*first.prompt_token_ids, *answer, 5, 6], max_tokens=4)])
        assert engine.stats().prefix_cache_hits == 16


def test_a_prompt_is_found_by_the_next_step():
    """Its pages are cached when they are launched: the device computes them before anything reads them."""
    engine = overlapping(128, enable_prefix_caching=True, max_num_batched_tokens=12)
    serve(engine, [request(name, 12, max_tokens=2) for name in "ab"])
    assert engine.stats().prefix_cache_hits == 8


# Failed steps.


@pytest.mark.parametrize("where", ["start", "moves", "writes"])
def test_a_failed_step_harms_only_those_that_were_in_it(where):
    executor = CountingExecutor()
    engine = small_engine(32, executor, page_size=4, preemption_mode="swap", host_slots=64)
    for name in "abc":
        engine.add_request(request(name, 9, max_tokens=14))
    for _ in range(10):
        engine.step()
    waiting = {seq.request_id for seq in engine.scheduler.waiting}
    running = {seq.request_id for seq in engine.scheduler.running}
    executor.fail_at = where
    with pytest.raises(StepFailed):
        engine.step()
    assert waiting and set(engine.fail_step()) == running
    for name in running:
        assert engine.abort(name, "error")
    assert set(drain(engine)) == waiting
    assert engine.stats().finished == {"error": len(running), "length": len(waiting)}


def test_a_failed_read_names_the_sequence_that_the_step_swapped_out():
    """Its copy to the host may not have been done."""
    executor = CountingExecutor()
    engine = overlapping(36, executor, preemption_mode="swap", host_slots=64)
    for name in "ab":
        engine.add_request(request(name, 5, max_tokens=24))
    while not engine.stats().num_preemptions:
        engine.step()
    executor.fail_at = "read"
    with pytest.raises(StepFailed):
        engine.step()
    assert sorted(engine.fail_step()) == ["a", "b"]


@pytest.mark.parametrize("where", [None, "start", "moves"])
def test_a_host_page_that_was_never_filled_is_not_taken_for_a_copy(where):
    """After the failed swap the device pages are still cached. A request that shares them and is swapped out later
    must not take the host pages, which were never written, for copies of them."""
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
    hits = engine.stats().prefix_cache_hits
    swap_out("again", "again urgent", range(60, 90), None)
    assert engine.stats().prefix_cache_hits == hits + 12, "the pages were to be found on the device"
    assert engine.stats().num_preemptions == 2
    swapped_in = engine.stats().counters.swapped_in_slots
    again = request("again", 13, max_tokens=6)
    assert drain(engine)["again"] == undisturbed([again])["again"][2:]
    assert engine.stats().counters.swapped_in_slots > swapped_in, "the device pages were to be gone"
