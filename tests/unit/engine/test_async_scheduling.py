"""Steps that overlap: what is decided while the tokens of the step before are still on their way."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from engine.sequence import PENDING, Status
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
    return small_engine(slots, executor, async_scheduling=True, **settings)


def serve(engine, requests) -> dict[str, list[int]]:
    for one in requests:
        engine.add_request(one)
    return drain(engine)


def without_ends(one):
    """The tokens of ``one``, and the same request with the third of them as a stop token."""
    tokens = undisturbed([one])[one.request_id]
    assert tokens[2] not in tokens[:2]
    return tokens, replace(one, params=replace(one.params, stop_token_ids=(tokens[2],)))


class ToldExecutor(CountingExecutor):
    """Writes down when it launched and when it was read."""

    def __init__(self):
        super().__init__()
        self.told: list[str] = []

    def launch(self, plan):
        handle = super().launch(plan)
        number = len(self.plans)
        self.told.append(f"launch {number}")
        tokens = handle.tokens
        handle.tokens = lambda: (self.told.append(f"read {number}"), tokens())[1]
        return handle


def test_a_step_is_launched_before_the_one_before_is_read():
    executor = ToldExecutor()
    engine = overlapping(64, executor, page_size=4)
    engine.add_request(request("a", 5, max_tokens=3))
    outputs = []
    while engine.has_work():
        outputs.append([output.token_ids for output in engine.step()])
    assert executor.told == ["launch 1", "launch 2", "read 1", "launch 3", "read 2", "read 3"]
    tokens = undisturbed([request("a", 5, max_tokens=3)])["a"]
    assert outputs == [[], [(tokens[0],)], [(tokens[1],)], [(tokens[2],)]]


def test_without_it_a_step_is_read_before_the_next_is_planned():
    executor = ToldExecutor()
    serve(small_engine(64, executor, page_size=4), [request("a", 5, max_tokens=3)])
    assert executor.told == ["launch 1", "read 1", "launch 2", "read 2", "launch 3", "read 3"]


@pytest.mark.parametrize("params", [{"n": 3}, {"best_of": 3}, {"n": 2, "beam_width": 3}], ids=str)
def test_what_decides_who_goes_on_is_read_before_the_next_plan(params):
    """A fork needs its tokens: siblings are there only when they are known. A beam needs those of every step."""
    executor = ToldExecutor()
    engine = overlapping(256, executor, page_size=4)
    one = request("a", 5, max_tokens=4, **params)
    tokens = serve(engine, [one])
    expected = expected_outputs(one, 32, executor)
    assert tokens == {f"a/{i}" if i else "a": list(own) for i, (own, _) in expected.items()}
    if "beam_width" in params:
        assert executor.told == [f"{what} {i + 1}" for i in range(4) for what in ("launch", "read")]
    else:
        assert executor.told == ["launch 1", "read 1", "launch 2", "launch 3", "read 2", "launch 4", "read 3", "read 4"]


def test_an_end_that_was_not_foreseen_is_dropped_from_the_step_in_flight():
    """The stop token is read when the step after it is under way: its draw is nothing, its pages go at once."""
    tokens, one = without_ends(request("a", 5, max_tokens=9))
    executor = CountingExecutor()
    engine = overlapping(32, executor, page_size=4)
    engine.add_request(one)
    brought = {}
    while "a" not in brought or len(brought["a"]) < 3:
        collect(engine.step(), brought)
    assert engine.has_work() and engine.stats().kv.pages_owned == 0
    engine.add_request(request("b", 13, max_tokens=3))  # takes the same pages
    collect_rest = drain(engine)
    assert brought["a"] == tokens[:3]
    assert collect_rest == undisturbed([request("b", 13, max_tokens=3)])
    stats = engine.stats()
    assert (stats.finished, stats.generation_tokens) == ({"stop": 1, "length": 1}, 6)
    assert executor.num_drawn == 7, "one was drawn in vain"
    assert stats.decode_tokens_scheduled + stats.prefill_tokens_scheduled == sum(
        n for p in executor.plans for _, n in p
    )


def test_a_length_that_was_foreseen_costs_nothing():
    executor = CountingExecutor()
    serve(overlapping(64, executor, page_size=4), [request("a", 5, max_tokens=4), request("b", 7, max_tokens=6)])
    assert executor.num_drawn == 10


@pytest.mark.parametrize("index", [None, 1])
def test_an_abort_drops_the_step_in_flight(index):
    engine = overlapping(64, page_size=4)
    engine.add_request(request("a", 5, max_tokens=9, n=2))
    engine.add_request(request("b", 6, max_tokens=9))
    brought: dict[str, list[int]] = {}
    for _ in range(5):
        collect(engine.step(), brought)
    before = {name: list(tokens) for name, tokens in brought.items()}
    assert engine.abort("a", index=index)
    engine.check_integrity()
    while engine.has_work():
        collect(engine.step(), brought)
        engine.check_integrity()
    assert brought["a/1"] == before["a/1"]
    assert (brought["a"] == before["a"]) == (index is None)
    assert brought["b"] == undisturbed([request("b", 6, max_tokens=9)])["b"]
    assert engine.stats().kv.pages_owned == 0


def test_all_aborted_the_last_step_is_still_read():
    executor = ToldExecutor()
    engine = overlapping(64, executor, page_size=4, enable_prefix_caching=True)
    engine.add_request(request("a", 9, max_tokens=9))
    engine.step()
    assert engine.abort("a")
    assert engine.has_work()
    assert engine.reset_prefix_cache() and engine.stats().kv.pages_cached == 0
    assert engine.step() == []
    assert not engine.has_work()
    assert executor.told == ["launch 1", "read 1"]
    kv = engine.stats().kv
    assert (kv.pages_free, kv.pages_cached) == (kv.pages_total, 0), "nothing of it may come back"


@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "host_slots": 64}], ids=["recompute", "swap"])
def test_a_sequence_is_preempted_while_its_token_is_on_its_way(settings):
    """Its KV goes, or goes to the host, with the token's place; the token is given to it where it waits."""
    executor = CountingExecutor()
    engine = overlapping(36, executor, page_size=4, **settings)
    requests = [request("a", 5, max_tokens=24), request("b", range(2, 7), max_tokens=24)]
    assert serve(engine, requests) == undisturbed(requests)
    assert executor.pending["preempted"] > 0
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert (stats.counters.swapped_in_slots > 0) == bool(settings)
    assert (stats.recomputed_tokens > 0) != bool(settings)


def test_a_sequence_that_is_ending_is_not_swapped_out():
    """Its last token is drawn: nothing will ever read its KV again."""
    executor = CountingExecutor()
    engine = overlapping(
        16, executor, page_size=4, max_model_len=16, scheduling_policy="priority", preemption_mode="swap", host_slots=64
    )
    engine.add_request(request("last", 5, max_tokens=1, priority=1))
    engine.step()
    engine.add_request(request("urgent", range(3, 15), max_tokens=3, priority=0))
    brought: dict[str, list[int]] = {}
    collect(engine.step(), brought)
    assert executor.pending["ending preempted"] == 1
    assert brought["last"] == undisturbed([request("last", 5, max_tokens=1)])["last"]
    brought.update(drain(engine))
    assert brought["urgent"] == undisturbed([request("urgent", range(3, 15), max_tokens=3)])["urgent"]
    assert engine.stats().counters.swapped_out_slots == 0
    assert engine.stats().finished == {"length": 2}


def test_who_is_ending_makes_room_by_itself():
    """Nothing can be planned beside it: it is waited for, not preempted."""
    engine = overlapping(16, page_size=4, max_model_len=16)
    requests = [request("a", 9, max_tokens=2), request("b", range(2, 14), max_tokens=3)]
    assert serve(engine, requests) == undisturbed(requests)
    assert engine.stats().num_preemptions == 0


def cached_tokens(engine) -> list[list[int]]:
    size = 8 * engine.kv.page_size
    return [array("q", node.tokens[-size:]).tolist() for node in engine.kv.prefix_cache._nodes.values()]


def test_a_page_is_offered_when_its_last_token_is_known_and_computed():
    engine = overlapping(64, page_size=4, enable_prefix_caching=True)
    seq = engine.add_request(request("a", 6, max_tokens=8))
    tokens = undisturbed([request("a", 6, max_tokens=8)])["a"]
    history = [*range(1, 7), *tokens]
    engine.step()
    assert cached_tokens(engine) == [history[:4]]
    assert (seq.num_computed, seq.num_known) == (6, 6)
    engine.step()  # token 7 is known, its KV is in flight
    assert (seq.num_computed, seq.num_known) == (7, 7)
    engine.step()
    assert (seq.num_computed, seq.num_known) == (8, 8)
    assert cached_tokens(engine) == [history[:4], history[4:8]]
    while engine.has_work():
        assert seq.status is Status.FINISHED or seq.num_known == len(seq.token_ids) - seq.num_pending
        engine.step()
        assert PENDING not in [token for page in cached_tokens(engine) for token in page]
    assert cached_tokens(engine) == [history[:4], history[4:8], history[8:12]]


def test_the_prefix_cache_finds_as_much_as_without_overlap():
    """The second round of a conversation: prompt, answer, and more."""
    hits = {}
    for overlap in (False, True):
        engine = small_engine(128, page_size=4, enable_prefix_caching=True, async_scheduling=overlap)
        first = request("a", 6, max_tokens=12)
        answer = serve(engine, [first])["a"]
        again = request("b", [*first.prompt_token_ids, *answer, 5, 6], max_tokens=4)
        assert serve(engine, [again]) == undisturbed([again])
        hits[overlap] = engine.stats().prefix_cache_hits
    assert hits[True] == hits[False] == 16


def test_a_prompt_is_found_by_the_step_behind_it():
    """Its pages are offered when they are launched: the device computes them before anybody reads them."""
    engine = overlapping(128, page_size=4, enable_prefix_caching=True, max_num_batched_tokens=12)
    requests = [request(name, 12, max_tokens=2) for name in "ab"]
    assert serve(engine, requests) == undisturbed(requests)
    assert engine.stats().prefix_cache_hits == 8


@pytest.mark.parametrize("where", ["start", "moves", "writes", "read"])
@pytest.mark.parametrize("settings", [{}, {"preemption_mode": "swap", "host_slots": 64}], ids=["recompute", "swap"])
def test_a_step_fails_with_another_in_flight(settings, where):
    """Whoever ran is named; what they had offered is forgotten; who waited goes on as if nothing had been."""
    failures = 0
    for failing in range(2, 24, 2):
        executor = CountingExecutor()
        engine = overlapping(40, executor, page_size=4, enable_prefix_caching=True, **settings)
        requests = [request(name, range(i % 2, i % 2 + 9), max_tokens=12) for i, name in enumerate("abcdef")]
        for one in requests:
            engine.add_request(one)
        brought: dict[str, list[int]] = {}
        for _ in range(failing):
            collect(engine.step(), brought)
        running = {seq.request_id for seq in engine.scheduler.running}
        executor.fail_at = where
        try:
            collect(engine.step(), brought)
        except StepFailed:
            failures += 1
            failed = engine.fail_step()
            assert running <= set(failed)
            for name in failed:
                engine.abort(name, "error")
            assert not engine.has_work() or engine.scheduler.num_waiting
        else:
            failed = []  # nothing was launched, moved or read in this step
        executor.fail_at = None
        brought.update({name: brought.get(name, []) + tokens for name, tokens in drain(engine).items()})
        expected = undisturbed(requests)
        for name, tokens in expected.items():
            assert brought.get(name, []) == tokens or name in failed
        again = request("again", range(9), max_tokens=12)
        assert serve(engine, [again]) == undisturbed([again])
        assert engine.stats().kv.pages_owned == engine.stats().kv.host_slots_used == 0
    assert failures >= 7 if where != "moves" else failures > 0 or not settings


def test_a_failed_read_names_whom_that_step_had_swapped_out():
    """Its copy on the host is part of the step, though the sequence itself is not."""
    executor = CountingExecutor()
    engine = overlapping(36, executor, page_size=4, preemption_mode="swap", host_slots=64)
    for name in "ab":
        engine.add_request(request(name, 5, max_tokens=24))
    while not engine.stats().num_preemptions:
        engine.step()
    executor.fail_at = "read"
    with pytest.raises(StepFailed):
        engine.step()
    assert sorted(engine.fail_step()) == ["a", "b"]


SETTINGS = {
    "small": {"slots": 40},
    "swap": {"slots": 40, "preemption_mode": "swap", "host_slots": 64},
    "swap-small": {"slots": 40, "preemption_mode": "swap", "host_slots": 8},
    "cached": {"slots": 40, "enable_prefix_caching": True},
    "priority": {"slots": 48, "scheduling_policy": "priority", "max_num_partial_prefills": 2},
    "contiguous": {"slots": 64, "layout": "contiguous", "reservation": "oracle"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_everything_comes_out_the_same_and_adds_up(name):
    settings = dict(SETTINGS[name])
    contiguous = settings.get("layout") == "contiguous"
    executor = CountingExecutor()
    page_size = 16 if contiguous else 4
    engine = overlapping(settings.pop("slots"), executor, page_size=page_size, **settings)
    records = []
    engine.on_step = records.append
    shapes = [{}, {"n": 2}, {}, {"n": 2, "beam_width": 2}, {}, {"best_of": 2}, {}]
    requests = [
        request(str(i), range(i % 3, i % 3 + 5 + i), max_tokens=6 + i, priority=i % 2, **shape)
        for i, shape in enumerate(shapes)
    ]
    assert serve(engine, requests) == undisturbed(requests)
    stats = engine.stats()
    assert len(records) == stats.steps == sum(bool(plan) for plan in executor.plans)
    assert sum(stats.slot_steps.values()) == stats.steps * stats.kv.slots_total
    computed = sum(n for plan in executor.plans for _, n in plan)
    assert stats.prefill_tokens_scheduled + stats.decode_tokens_scheduled == computed
    assert sum(record.prefill_tokens + record.decode_tokens for record in records) == computed
    assert sum(record.preempted for record in records) == stats.num_preemptions
    assert [record.step for record in records] == list(range(1, stats.steps + 1))
    assert (records[-1].running, records[-1].waiting, records[-1].kv.pages_owned) == (0, 0, 0)
    assert stats.generation_tokens == executor.num_drawn, "nobody here ends before the length that was foreseen"
    assert executor.pending["fed"] > 0
