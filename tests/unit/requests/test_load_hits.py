"""What a prefix cache can have served, from the prompts: hand-worked cases, and an endless cache as the judge."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.measure.server_state import cache_use, hit_bounds
from kvbench.requests.prefix_hits import HitBounds, outside, predict_hits, shared_beginnings, unverified
from kvbench.requests.request import RequestSpec, distinct_prefixes
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.load_section import LoadConfig

COLD = {"cache_state": "cold", "page_size": 4}


def config(**fields: object) -> LoadConfig:
    prompts = {"kind": "synthetic", "classes": [{"name": "a", "share": 1.0, "prompt_tokens": 8, "output_tokens": 4}]}
    return LoadConfig.model_validate({"concurrency": 1, "num_requests": 2, "prompts": prompts} | fields)


def request(tokens: list[int], prefix: int = 0, max_tokens: int = 4) -> RequestSpec:
    return RequestSpec(0, "a", tuple(tokens), None, max_tokens, prefix_tokens=prefix)


def served(requests: list[RequestSpec], page: int, cache: set[tuple[int, ...]]) -> int:
    """Hits [tokens] of a cache that forgets nothing, one request after another."""
    hits = 0
    for one in requests:
        ids = one.prompt_token_ids
        found = 0
        while found < (len(ids) - 1) // page and ids[: (found + 1) * page] in cache:
            found += 1
        cache |= {ids[: (i + 1) * page] for i in range(len(ids) // page)}
        hits += found * page
    return hits


def test_a_shared_beginning_is_found_by_all_but_the_first() -> None:
    shared = list(range(10))  # two full pages and a half
    requests = [request([*shared, 100 + i, 200 + i]) for i in range(5)]
    assert predict_hits(requests, **COLD) == HitBounds(0, 4 * 8)
    assert predict_hits(requests, cache_state="cold", page_size=16) == HitBounds(0, 0)
    assert predict_hits(requests, cache_state="steady", page_size=4) == HitBounds(0, 5 * 8)
    assert predict_hits(requests, caching=False, **COLD) == HitBounds(0, 0)


def test_the_last_token_is_always_computed_but_its_page_is_there_for_others() -> None:
    short, long = request(list(range(8))), request([*range(8), 9])
    assert predict_hits([short, short], **COLD) == HitBounds(0, 4)
    assert predict_hits([short, long], **COLD) == HitBounds(0, 8)  # the short one first: both its pages are found
    assert served([short, long], 4, set()) == 8


def test_a_primed_cache_owes_every_prefix_as_long_as_nothing_is_evicted() -> None:
    shared = list(range(8))
    requests = [request([*shared, 100 + i], prefix=8) for i in range(3)] + [request([50 + i for i in range(9)])]
    primed = {"cache_state": "primed", "page_size": 4}
    assert predict_hits(requests, total_pages=100, **primed) == HitBounds(24, 24)
    assert predict_hits(requests, total_pages=5, **primed) == HitBounds(0, 24)  # too small: it may be evicted
    assert predict_hits(requests, **primed) == HitBounds(0, 24)


def test_text_is_not_predicted() -> None:
    text = RequestSpec(0, "a", (1, 2, 3), "one two three", 4)
    assert predict_hits([text, request([1, 2, 3])], **COLD) is None


def test_conversations_are_predicted_also_where_the_server_writes_their_history() -> None:
    first, second = list(range(10)), list(range(17))
    recorded = [RequestSpec(i, "a", tuple(ids), None, 4, session=0, turn=i) for i, ids in enumerate((first, second))]
    assert predict_hits(recorded, **COLD) == HitBounds(0, 8)
    actual = [recorded[0], dataclasses.replace(recorded[1], new_tokens=3)]
    assert predict_hits(actual, **COLD) == HitBounds(0, 12)
    assert predict_hits(actual, caching=False, **COLD) == HitBounds(0, 0)


def by_trie(requests: list[RequestSpec], prefixes: list[tuple[int, ...]], page: int) -> int:
    """The definition, a node at a time."""
    holders: Counter[tuple[int, ...]] = Counter()
    lookups: Counter[tuple[int, ...]] = Counter()
    for ids, asked in [(r.prompt_token_ids, True) for r in requests] + [(p, False) for p in prefixes]:
        for end in range(page, len(ids) + 1, page):
            holders[ids[:end]] += 1
            lookups[ids[:end]] += asked and end < len(ids)
    return sum(min(lookups[node], holders[node] - 1) for node in holders) * page


@settings(max_examples=400, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 2), max_size=14), min_size=1, max_size=25),
    prefix=st.integers(0, 9),
    page=st.sampled_from([1, 2, 3, 5]),
)
def test_the_upper_end_is_that_of_the_trie(prompts, prefix, page):
    requests = [request(tokens, prefix=min(prefix, len(tokens))) for tokens in prompts]
    assert predict_hits(requests, cache_state="cold", page_size=page).high == by_trie(requests, [], page)
    primed = predict_hits(requests, cache_state="primed", page_size=page).high
    assert primed == by_trie(requests, distinct_prefixes(requests), page)


def test_long_prompts_are_predicted_token_by_token():
    base = tuple(range(100_000))
    requests = [request([*base[: 1000 * i], -1 - i, *base[:50_000]]) for i in range(60)]
    high = predict_hits(requests, cache_state="cold").high
    # Each but the longest finds its beginning in the longest one; what follows is nobody else's.
    assert high == sum(1000 * i for i in range(59))


@pytest.mark.parametrize("shared", [1, 255, 256, 257, 511, 512, 513, 700])
def test_two_prompts_share_what_they_begin_with(shared):
    base = list(range(1000))
    two = [request([*base[:shared], 2000 + i, *base[shared:]]) for i in range(2)]
    assert predict_hits(two, cache_state="cold").high == shared
    assert predict_hits([request(base[:shared]), request(base)], cache_state="cold").high == shared


@pytest.mark.parametrize("seed", range(40))
def test_no_order_and_no_page_size_serves_more_than_the_upper_end(seed: int) -> None:
    draw = random.Random(seed)
    page = draw.choice([1, 2, 4, 7])
    requests = [request([draw.randrange(2) for _ in range(draw.randrange(1, 30))]) for _ in range(12)]
    bounds = predict_hits(requests, cache_state="cold", page_size=page)
    anyhow = predict_hits(requests, cache_state="cold", page_size=1)
    most = 0
    for _ in range(60):
        draw.shuffle(requests)
        most = max(most, served(requests, page, set()))
    requests.sort(key=lambda r: len(r.prompt_token_ids))  # the order that serves most
    most = max(most, served(requests, page, set()))
    assert most <= bounds.high <= anyhow.high
    warm: set[tuple[int, ...]] = set()
    served(requests, page, warm)
    if any(len(r.prompt_token_ids) > page for r in requests):
        assert outside(served(requests, page, warm), bounds, "cold", complete=True)  # the second run is seen


@pytest.mark.parametrize("seed", range(10))
def test_the_lower_end_holds_in_every_order(seed: int) -> None:
    draw = random.Random(seed)
    families = [tuple(draw.randrange(3) for _ in range(draw.randrange(4, 20))) for _ in range(2)]
    requests = [
        request([*family, *(draw.randrange(3) for _ in range(draw.randrange(0, 9)))], prefix=len(family))
        for family in draw.choices(families, k=10)
    ]
    bounds = predict_hits(requests, cache_state="primed", page_size=4, total_pages=1e6)
    assert bounds.low > 0
    for _ in range(30):
        draw.shuffle(requests)
        primed = {family[: (i + 1) * 4] for family in families for i in range(len(family) // 4)}
        assert bounds.low <= served(requests, 4, primed) <= bounds.high


def test_the_sentences_carry_both_numbers() -> None:
    bounds = HitBounds(16, 32)
    assert outside(32, bounds, "primed", complete=True) is outside(16, bounds, "primed", complete=True) is None
    assert "served 48 tokens, at most 32" in outside(48, bounds, "cold", complete=False)
    assert "served 8 tokens, at least 16" in outside(8, bounds, "primed", complete=True)
    assert outside(8, bounds, "primed", complete=False) is None  # failed requests need not have looked


def test_an_engine_that_does_not_tell_its_page_size_is_bounded_by_tokens_unless_it_preempted() -> None:
    load = config()
    requests = [request([*range(6), 100 + i, 200]) for i in range(2)]

    def sample(preemptions: float) -> MetricsSample:
        return MetricsSample(0.0, {"kv_pages_total": 100.0}, {"num_preemptions_total": preemptions})

    told = {"engine": {"page_size": 4, "enable_prefix_caching": True}}
    assert hit_bounds(load, requests, told, sample(0), sample(3)) == HitBounds(0, 4)
    assert hit_bounds(load, requests, None, sample(0), sample(0)) == HitBounds(0, 6)
    assert hit_bounds(load, requests, None, sample(0), sample(3)) is None
    off = {"engine": {"page_size": 4, "enable_prefix_caching": False}}
    assert hit_bounds(load, requests, off, sample(0), sample(0)) == HitBounds(0, 0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_servers_own_answers_are_met_again_in_the_next_turn(page_size: int) -> None:
    """Turn 2 looks up 16 tokens' pages, of which turn 1 computed 12, its answer's 4 among them; turn 3 looks up 24."""
    ids = tuple(range(100, 124))
    turns = [
        RequestSpec(0, "a", ids[:8], None, 4, session=7),
        RequestSpec(1, "a", ids[:16], None, 4, session=7, turn=1, new_tokens=4),
        RequestSpec(2, "a", ids[:24], None, 4, session=7, turn=2, new_tokens=4),
    ]
    assert predict_hits(turns, cache_state="cold", page_size=page_size) == HitBounds(0, 12 + 20)
    recorded = [dataclasses.replace(r, new_tokens=0) for r in turns]
    assert predict_hits(recorded, cache_state="cold", page_size=page_size) == HitBounds(0, 8 + 16)


@given(st.lists(st.tuples(st.lists(st.integers(0, 1), max_size=8), st.integers(0, 3)), max_size=14))
def test_shared_beginnings_against_every_pair(prompts):
    def common(a: tuple, b: tuple) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    ids, owners = [tuple(tokens) for tokens, _ in prompts], [owner for _, owner in prompts]
    wanted = [
        max((common(mine, other) for other, who in zip(ids, owners, strict=True) if who != owner), default=0)
        for mine, owner in zip(ids, owners, strict=True)
    ]
    assert shared_beginnings(ids, owners) == wanted


def test_a_state_that_nothing_shows_is_not_verified():
    some = HitBounds(0, 20)
    assert unverified(10.0, some, "cold") is None
    assert unverified(10.0, HitBounds(8, 20), "primed") is None
    assert "how many hits are due is not known" in unverified(10.0, some, "primed")
    assert unverified(0.0, HitBounds(0, 0), "primed") is None  # no prefix cache: nothing may hit, and nothing did
    assert "does not tell" in unverified(None, some, "cold")
    assert "possible is not known" in unverified(10.0, None, "cold")
    assert unverified(None, None, "steady") is None  # declares nothing


def test_a_load_tells_its_hits_what_was_possible_and_what_is_not_verified():
    def hits(count: float) -> MetricsSample:
        return MetricsSample(0.0, {}, {"prefix_cache_hits_total": count})

    around = {"before": hits(5), "after": hits(13), "complete": True}
    primed = cache_use(config(cache_state="primed"), [request(list(range(9)), prefix=8)], None, **around)
    assert primed.reasons == [] and primed.bounds == HitBounds(0, 8)
    assert "due is not known" in primed.counts["unverified"]
    cold = cache_use(config(), [request([1, 2, 3])], {"engine": {"page_size": 1}}, **around)
    assert cold.counts == {"hits": 8.0, "queries": None} and cold.bounds == HitBounds(0, 0)
    assert "at most 0 are possible" in cold.reasons[0]
    silent = cache_use(config(), [request([1, 2, 3])], None, None, None, complete=True)
    assert silent.counts["unverified"] == "the server does not tell its hits" and silent.reasons == []
