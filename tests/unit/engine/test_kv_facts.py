"""Where a request's KV was, told at its end to those who ask: steps, pages, hits, preemptions."""

from __future__ import annotations

import pytest

from kvbench_engine.sequence import Request, SamplingParams
from tests.support.fake_engine import fake_engine

PAGE = 4


def ends(engine, *requests, check=lambda: None):
    """The last outputs by (request id, index)."""
    for request in requests:
        engine.add_request(request)
    found = {}
    while engine.has_work():
        check()
        found |= {(o.request_id, o.index): o for o in engine.step() if o.finish_reason is not None}
    return found


def request(name, prompt, max_tokens=6, facts=True, **params):
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **params)
    return Request(name, tuple(prompt), sampling, kv_facts=facts)


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_steps_and_pages_of_a_sequence_alone(async_scheduling):
    engine = fake_engine(page_size=PAGE, max_num_seqs=4, max_num_batched_tokens=4, async_scheduling=async_scheduling)
    ends(engine, request("before", range(1, 5), max_tokens=2))
    pages = []
    seq = engine.add_request(request("a", range(10, 19)))
    (found,) = ends(engine, check=lambda: pages.append(tuple(seq.pages))).values()
    facts = found.kv_facts
    assert (facts.first_step, facts.last_step) == (3, 10)  # 4 + 4 + 1 tokens of the prompt, then 5 more
    assert facts.pages == pages[-1] and len(facts.pages) == -(-(9 + 6 - 1) // PAGE) and facts.page_size == PAGE
    assert not (facts.cached_tokens or facts.preemptions or facts.recomputed_tokens or facts.swapped_pages)
    assert not facts.forked


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_the_last_step_is_that_of_the_last_token_also_beside_a_longer_sequence(async_scheduling):
    engine = fake_engine(page_size=PAGE, async_scheduling=async_scheduling)
    found = ends(engine, request("short", range(1, 5)), request("long", range(20, 24), max_tokens=12))
    assert [found[name, 0].kv_facts.last_step for name in ("short", "long")] == [6, 12]


def test_only_who_asks_is_told_and_of_forks_each():
    engine = fake_engine(page_size=PAGE)
    found = ends(engine, request("asks", range(1, 9), n=2), request("not", range(20, 29), facts=False))
    assert found["not", 0].kv_facts is None
    first, second = (found["asks", index].kv_facts for index in (0, 1))
    assert first.forked and second.forked and first.first_step == second.first_step == 1
    assert first.pages[:2] == second.pages[:2] and first.pages[2] != second.pages[2]


def test_prefix_hits_are_told():
    engine = fake_engine(page_size=PAGE, enable_prefix_caching=True)
    ends(engine, request("first", range(1, 11)))
    (found,) = ends(engine, request("again", range(1, 11))).values()
    assert found.kv_facts.cached_tokens == 8


@pytest.mark.parametrize(
    ("settings", "swaps"),
    [({}, False), ({"preemption_mode": "swap", "swap_space": 1 << 16}, True)],
)
@pytest.mark.parametrize("layout", ["paged", "contiguous"])
def test_preemptions_are_told_and_add_up_to_the_counters(settings, swaps, layout):
    layout_settings = {"page_size": PAGE} if layout == "paged" else {"layout": layout}
    engine = fake_engine(
        kv_slots=48 if layout == "paged" else 64, max_model_len=32, max_num_seqs=4, scheduling_policy="priority",
        **layout_settings, **settings,
    )  # fmt: skip
    late = [Request(f"late{i}", tuple(range(40 + i, 52 + i)), SamplingParams(8, 0.0, ignore_eos=True)) for i in (0, 9)]
    early = [
        Request(f"early{i}", tuple(range(i, i + 12)), SamplingParams(14, 0.0, ignore_eos=True), 0.0, 5, kv_facts=True)
        for i in (1, 20)
    ]
    steps = []

    def arrive():
        steps.append(1)
        if len(steps) == 4:
            for each in late:
                engine.add_request(each)

    facts = [each.kv_facts for each in ends(engine, *early, check=arrive).values() if each.kv_facts is not None]
    stats = engine.stats()
    assert len(facts) == 2 and sum(each.preemptions for each in facts) == stats.num_preemptions > 0
    assert sum(each.recomputed_tokens for each in facts) == stats.recomputed_tokens
    assert (stats.recomputed_tokens > 0) == (not swaps)
    assert any(each.swapped_pages for each in facts) == swaps
    if layout == "paged":
        kept = stats.counters.swap_kept_slots // PAGE  # the host had them still
        assert sum(each.swapped_pages for each in facts) == stats.counters.swapped_out_pages + kept
