"""What a prefix cache can have served, from the prompts: hand-worked cases, and an endless cache as the judge."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.measure.server_state import cache_use, hit_bounds
from kvbench.metrics.model import LoadMetrics
from kvbench.requests.prefix_hits import HitBounds, outside, predict_hits, shared_beginnings, unverified
from kvbench.requests.request import RequestSpec, distinct_prefixes
from kvbench.runs.results import CacheBounds
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.prometheus import MetricsSample
from kvbench.workload.load_section import LoadConfig


def server(engine: dict[str, object] | None = None, **load: object) -> SimpleNamespace:
    return SimpleNamespace(load=config(**load), info=ServerInfo.read({"engine": engine or {}}))


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


SHARED = [request([*range(10), 100 + i, 200 + i]) for i in range(5)]  # two full pages and a half
SHORT, LONG = request(list(range(8))), request([*range(8), 9])
OWED = [request([*range(8), 100 + i], prefix=8) for i in range(3)] + [request([50 + i for i in range(9)])]
PRIMED = {"cache_state": "primed"}
TEXT = RequestSpec(0, "a", (1, 2, 3), "one two three", 4)
# Turn 2 looks up 16 tokens' pages, of which turn 1 computed 12, its answer's 4 among them; turn 3 looks up 24.
TURNS = [
    RequestSpec(i, "a", tuple(range(100, 108 + 8 * i)), None, 4, session=7, turn=i, new_tokens=4 * (i > 0))
    for i in range(3)
]
RECORDED = [dataclasses.replace(r, new_tokens=0) for r in TURNS]


@pytest.mark.parametrize(
    ("requests", "how", "bounds"),
    [
        (SHARED, {}, (0, 4 * 8)),  # by all but the first
        (SHARED, {"page_size": 16}, (0, 0)),
        (SHARED, {"cache_state": "steady"}, (0, 5 * 12)),  # the whole prompt may have been there
        (SHARED, {"caching": False}, (0, 0)),
        ([SHORT, SHORT], {}, (0, 4)),  # the last token is always computed
        ([SHORT, LONG], {}, (0, 8)),  # but its page is there for others: the short one first
        (OWED, PRIMED | {"total_pages": 100}, (24, 24)),
        (OWED, PRIMED | {"total_pages": 5}, (0, 24)),  # too small: it may be evicted
        (OWED, PRIMED, (0, 24)),
        ([TEXT, request([1, 2, 3])], {}, None),  # text is not predicted
        (TURNS, {}, (0, 12 + 20)),
        (TURNS, {"page_size": 1}, (0, 12 + 20)),
        (RECORDED, {}, (0, 8 + 16)),
        (RECORDED, {"page_size": 1}, (0, 8 + 16)),
        (TURNS, {"caching": False}, (0, 0)),
    ],
)
def test_bounds_by_hand(requests: list[RequestSpec], how: dict, bounds: tuple[int, int] | None) -> None:
    assert predict_hits(requests, **COLD | how) == (bounds and HitBounds(*bounds))
    if bounds and requests == [SHORT, LONG]:
        assert served(requests, 4, set()) == bounds[1]


def by_trie(requests: list[RequestSpec], prefixes: list[tuple[int, ...]], page: int) -> int:
    """The definition, a node at a time."""
    holders: Counter[tuple[int, ...]] = Counter()
    lookups: Counter[tuple[int, ...]] = Counter()
    for ids, asked in [(r.prompt_token_ids, True) for r in requests] + [(p, False) for p in prefixes]:
        for end in range(page, len(ids) + 1, page):
            holders[ids[:end]] += 1
            lookups[ids[:end]] += asked and end < len(ids)
    return sum(min(lookups[node], holders[node] - 1) for node in holders) * page


@settings(max_examples=150, deadline=None)
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


@pytest.mark.parametrize("shared", [1, 255, 256, 257, 512, 700])
def test_two_prompts_share_what_they_begin_with(shared):
    base = list(range(1000))
    two = [request([*base[:shared], 2000 + i, *base[shared:]]) for i in range(2)]
    assert predict_hits(two, cache_state="cold").high == shared
    assert predict_hits([request(base[:shared]), request(base)], cache_state="cold").high == shared


@pytest.mark.parametrize("seed", range(12))
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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("state", "template"), [("primed", 0), ("primed", 5), ("cold", 5)])
def test_the_ends_hold_in_every_order_and_wherever_a_chat_template_has_its_tokens(state, template, seed) -> None:
    """Of 5 tokens that a template adds, 0 to 5 are in front of the text; with none, token ids are sent."""
    draw = random.Random(seed)
    families = [tuple(draw.randrange(3) for _ in range(draw.randrange(4, 20))) for _ in range(2)]
    drawn = [
        request([*family, *(draw.randrange(3) for _ in range(draw.randrange(0, 9)))], len(family))
        for family in draw.choices(families, k=10)
    ]
    cache = {"cache_state": state, "page_size": 4, "total_pages": 1e6}
    bounds = predict_hits(drawn, **cache)
    if template:
        texts = [dataclasses.replace(one, prompt="as messages") for one in drawn]
        bounds = predict_hits(texts, **cache, template_tokens=template)
        turn = dataclasses.replace(texts[0], history=("a", "b"))  # between its messages are template tokens too
        assert predict_hits(texts, **cache) is predict_hits([*texts, turn], **cache, template_tokens=template) is None
    assert template or bounds.low > 0
    for front in [*range(template + 1)] if template else [0] * 20:
        head, tail = (-1,) * front, (-2,) * (template - front)
        sent, warm = [request([*head, *one.prompt_token_ids, *tail]) for one in drawn], set()
        if state == "primed":
            served([request([*head, *family, *tail]) for family in families], 4, warm)
        draw.shuffle(sent)
        assert bounds.low <= served(sent, 4, warm) <= bounds.high


@pytest.mark.parametrize(
    ("hits", "complete", "numbers"),
    [
        (32, True, None),
        (16, True, None),
        (48, False, ("48", "32")),
        (8, True, ("8", "16")),
        (8, False, None),  # failed requests need not have looked
    ],
)
def test_hits_outside_the_bounds_are_told_with_both_numbers(hits, complete, numbers) -> None:
    said = outside(hits, HitBounds(16, 32), "primed", complete=complete)
    assert (said is None) == (numbers is None) and all(number in said for number in numbers or ())


def test_an_engine_that_does_not_tell_its_page_size_is_bounded_by_tokens_unless_it_preempted() -> None:
    load = config()
    requests = [request([*range(6), 100 + i, 200]) for i in range(2)]

    def sample(preemptions: float) -> MetricsSample:
        return MetricsSample(0.0, {"kv_pages_total": 100.0}, {"num_preemptions_total": preemptions})

    info = {"engine": {"page_size": 4, "enable_prefix_caching": True}}
    assert hit_bounds(load, requests, ServerInfo.read(info), sample(0), sample(3)) == HitBounds(0, 4)
    assert hit_bounds(load, requests, ServerInfo(), sample(0), sample(0)) == HitBounds(0, 6)
    assert hit_bounds(load, requests, ServerInfo(), sample(0), sample(3)) is None
    off = {"engine": {"page_size": 4, "enable_prefix_caching": False}}
    assert hit_bounds(load, requests, ServerInfo.read(off), sample(0), sample(0)) == HitBounds(0, 0)


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


@pytest.mark.parametrize(
    ("hits", "bounds", "state", "verified"),
    [
        (10.0, HitBounds(0, 20), "cold", True),
        (10.0, HitBounds(8, 20), "primed", True),
        (0.0, HitBounds(0, 0), "primed", True),  # no prefix cache: nothing may hit, and nothing did
        (None, None, "steady", True),  # declares nothing
        (10.0, HitBounds(0, 20), "primed", False),  # how many are due is not known
        (None, HitBounds(0, 20), "cold", False),
        (10.0, None, "cold", False),
    ],
)
def test_a_state_that_nothing_shows_is_not_verified(hits, bounds, state, verified):
    assert (unverified(hits, bounds, state) is None) is verified


def test_a_load_tells_its_hits_what_was_possible_and_what_is_not_verified():
    def hits(count: float) -> MetricsSample:
        return MetricsSample(0.0, {}, {"prefix_cache_hits_total": count})

    around, served = (hits(5), hits(13)), LoadMetrics(completed=1)
    primed = cache_use(server(cache_state="primed"), [request(list(range(9)), prefix=8)], *around, served)
    assert primed.reasons == [] and primed.bounds == CacheBounds(low=0, high=8)
    assert "due is not known" in primed.counts.unverified
    cold = cache_use(server({"page_size": 1}), [request([1, 2, 3])], *around, served)
    assert cold.counts.fields() == {"state": "cold", "hits": 8.0, "queries": None, "counted": 8.0, "told": None}
    assert cold.bounds == CacheBounds(low=0, high=0)
    assert "at most 0 are possible" in cold.reasons[0]
    silent = cache_use(server(), [request([1, 2, 3])], None, None, served)
    assert silent.counts.unverified == "the server does not tell its hits" and silent.reasons == []


def counted(hits: float) -> dict[str, MetricsSample]:
    """/metrics around a load with so many hits of 18 tokens."""
    samples = [{"prefix_cache_hits_total": n, "prefix_cache_queries_total": n and 18.0} for n in (0.0, hits)]
    return {name: MetricsSample(0.0, {}, each) for name, each in zip(("before", "after"), samples, strict=True)}


NO_METRICS = {"before": None, "after": None}
OTHERS = [request([1, 2, 3, 4, 5, 6, 7, 8, 9]), request([2, 2, 3, 4, 5, 6, 7, 8, 9])]  # which share nothing
ALIKE = [request([1, 2, 3, 4, 5, 6, 7, 8, 9], prefix=8)] * 2
PREEMPTED = {"before": MetricsSample(0.0, {}, {}), "after": MetricsSample(0.0, {}, {"num_preemptions_total": 1.0,
             "prefix_cache_hits_total": 8.0, "prefix_cache_queries_total": 27.0})}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "requests", "around", "told", "hits", "of", "valid", "more"),
    [
        ("cold", OTHERS, NO_METRICS, 16, 16, 18, False, {}),  # only the answers tell that it was warm
        ("cold", OTHERS, counted(0), 16, 16, 18, False, {"disagree": True}),  # /metrics are of another replica
        ("cold", OTHERS, counted(1), 0, 1, 18, False, {"disagree": True}),
        ("cold", OTHERS, NO_METRICS, 0, 0, 18, True, {}),
        ("cold", OTHERS, NO_METRICS, None, None, None, True, {"unverified": True}),
        ("cold", ALIKE, counted(8), 8, 8, 18, True, {}),
        ("cold", ALIKE, NO_METRICS, 9, 9, 18, False, {}),  # one more than they share
        ("primed", ALIKE, NO_METRICS, 17, 17, 18, False, {"unverified": True}),
        ("primed", ALIKE, NO_METRICS, 16, 16, 18, True, {"unverified": True}),
        ("steady", OTHERS, NO_METRICS, 18, 18, 18, True, {"from_before": 18}),
        ("steady", OTHERS, counted(16), 16, 16, 18, True, {"from_before": 16}),
        ("steady", ALIKE, NO_METRICS, 16, 16, 18, True, {}),  # the prefix was sent before the first load
        ("steady", OTHERS, NO_METRICS, None, None, None, True, {}),
        ("steady", ALIKE, PREEMPTED, 0, 8, 27, True, {}),  # one that was preempted looks up again
    ],
)
def test_every_source_of_hits_counts(state, requests, around, told, hits, of, valid, more):
    metrics = LoadMetrics(completed=len(requests), total_cached_tokens=told, total_input_tokens=18)
    found = cache_use(server(cache_state=state), requests, **around, metrics=metrics)
    assert (found.counts.hits, found.counts.queries, not found.reasons) == (hits, of, valid)
    told_more = found.counts.fields()
    shown = {key: told_more[key] for key in ("unverified", "disagree", "from_before") if key in told_more}
    assert shown.keys() == more.keys() and shown.get("from_before") == more.get("from_before")
