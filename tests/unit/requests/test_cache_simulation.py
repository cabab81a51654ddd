"""The simulated cache: the built-in engine, exhaustive search and hand-worked loads are the judges."""

from __future__ import annotations

import itertools
from array import array

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from kvbench.requests.cache_simulation import CacheReplay, ServedRequest, endless_hits, shared_tokens
from kvbench_engine.sequence import Request, SamplingParams
from tests.support.engine_parts import small_engine

# Few token ids: prompts share beginnings, end with full pages, and repeat one another.
PROMPTS = st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=11), min_size=1, max_size=14)


def in_turn(prompts, outputs=None) -> list[ServedRequest]:
    """Requests of which each ends before the next begins."""
    outputs = outputs or [()] * len(prompts)
    return [
        ServedRequest(tuple(prompt), 3.0 * i, 3.0 * i + 1, 3.0 * i + 2, tuple(output), max(1, len(output)))
        for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True))
    ]


@st.composite
def overlapping(draw) -> list[ServedRequest]:
    found = []
    for prompt in draw(PROMPTS):
        admitted, output = draw(st.integers(0, 12)), draw(st.lists(st.integers(1, 2), max_size=5))
        computed = admitted + draw(st.integers(1, 4))
        ended = computed + (draw(st.integers(1, 6)) if len(output) > 1 else 0)
        found.append(ServedRequest(tuple(prompt), admitted, computed, ended, tuple(output), max(1, len(output))))
    return found


@settings(max_examples=80, deadline=None)
@given(
    prompts=PROMPTS,
    lengths=st.lists(st.integers(1, 6), min_size=14, max_size=14),
    page=st.sampled_from([1, 2, 4]),
    spare=st.integers(0, 12),
)
def test_requests_in_turn_hit_what_they_hit_in_the_engine(prompts, lengths, page, spare):
    """Outputs are cached too, and with two token ids prompts that hold earlier ones' outputs are not rare.

    Left out: a request that drives away a page of which it has a copy. When the engine caches that copy depends on
    where its output is then.
    """
    pages = 20 // page + spare  # room for one request of max_model_len
    engine = small_engine(
        pages * page, page_size=page, enable_prefix_caching=True, max_model_len=20, max_num_batched_tokens=4
    )
    hits, outputs = [], []
    evicted = watch_evictions(engine)
    for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=False)):
        seq = engine.add_request(Request(str(i), tuple(prompt), SamplingParams(max_tokens=length, ignore_eos=True)))
        tokens = []
        while engine.has_work():
            tokens += [token for output in engine.step() for token in output.token_ids]
        assume(not evicted & prefixes_of(seq, page))
        evicted.clear()
        hits.append(seq.num_cached)
        outputs.append(tokens)
    assert CacheReplay(in_turn(prompts, outputs), page).hits(pages) == hits


def prefixes_of(seq, page: int) -> set[bytes]:
    """The prefixes of whole pages."""
    return {array("q", seq.token_ids[:end]).tobytes() for end in range(page, len(seq.token_ids) + 1, page)}


def watch_evictions(engine) -> set[bytes]:
    """Will hold the prefixes whose last pages the engine's cache gave up."""
    cache, evicted = engine.kv.prefix_cache, set()

    def watched(page):
        prefix, node = b"", cache._name[cache._node_of[page]]
        while node:
            node, tokens = cache._key_of[node & 0xFFFFFFFF]
            prefix = tokens + prefix
        evicted.add(prefix)
        return cache.evict(page)

    engine.kv.pool._on_evict = watched
    return evicted


def best_by_search(prompts, page, pages) -> int:
    """The most hits [tokens] of requests in turn, over everything that a cache can keep."""
    chains = [[tuple(p[:end]) for end in range(page, len(p) + 1, page)] for p in prompts]

    def whole(kept) -> bool:
        return all(len(node) == page or node[:-page] in kept for node in kept)

    states = {frozenset(): 0}
    for prompt, chain in zip(prompts, chains, strict=True):
        after: dict[frozenset, int] = {}
        for cached, so_far in states.items():
            limit = (len(prompt) - 1) // page
            found = next((i for i, node in enumerate(chain[:limit]) if node not in cached), limit)
            others = cached - set(chain[:found])
            room = min(len(others), pages - -(-len(prompt) // page))
            for kept in itertools.combinations(sorted(others), room):
                state = frozenset(kept) | frozenset(chain)
                if whole(state):
                    after[state] = max(after.get(state, 0), so_far + found * page)
        states = after
    return max(states.values())


@settings(max_examples=100, deadline=None)
@example(prompts=[[1, 1], [2], [1, 2, 1], [2], [2, 1], [1, 1, 1]], page=1, spare=1)  # [2] is computed twice anyway
@example(prompts=[[2, 1], [1], [2], [2, 1, 1]], page=1, spare=0)  # but [2, 1] is of no use without it
@example(prompts=[[1, 1], [1, 1], [1, 2], [2, 1, 1], [1, 1, 1]], page=1, spare=2)  # [1, 1] is looked up only later
@given(prompts=st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=5), min_size=1, max_size=7),
       page=st.sampled_from([1, 2]), spare=st.integers(0, 3))  # fmt: skip
def test_the_best_order_is_the_best_there_is(prompts, page, spare):
    pages = max(-(-len(p) // page) for p in prompts) + spare
    simulation = CacheReplay(in_turn(prompts), page)
    best = sum(simulation.hits(pages, best=True))
    assert best == best_by_search(prompts, page, pages)
    assert best >= sum(simulation.hits(pages))


@settings(max_examples=100, deadline=None)
@given(requests=overlapping(), page=st.sampled_from([1, 2, 3]), pages=st.integers(1, 20), best=st.booleans())
def test_each_step_of_the_ledger_hits_no_more_than_the_one_before(requests, page, pages, best):
    primed = [requests[0].prompt[:4]]
    for before in ([], primed):
        simulation = CacheReplay(requests, page, before)
        endless, by_token = simulation.hits(), endless_hits(requests, before)
        assert all(map(int.__le__, simulation.hits(pages, best=best), endless))
        assert endless == [hit // page * page for hit in by_token]
        assert all(map(int.__le__, by_token, shared_tokens(requests, before)))


def steps(requests, page, pages, primed=()) -> list[int]:
    """Shared, endless, whole pages, best, least recently used."""
    simulation = CacheReplay(requests, page, primed)
    found = (shared_tokens(requests, primed), endless_hits(requests, primed), simulation.hits(),
             simulation.hits(pages, best=True), simulation.hits(pages))  # fmt: skip
    return [sum(each) for each in found]


A, B, C = (tuple(range(start, start + 9)) for start in (100, 200, 300))  # two full pages of 4, and a token


@pytest.mark.parametrize(
    ("requests", "pages", "expected"),
    [
        (in_turn([A, A, A]), 100, [24, 16, 16, 16, 16]),  # cold start alone: the first copy; the last token is computed
        (in_turn([(*A[:6], 1), (*A[:6], 2)]), 100, [12, 6, 4, 4, 4]),  # and page rounding
        (in_turn([A, B, A]), 3, [16, 8, 8, 0, 0]),  # and capacity
        (in_turn([A, B, A]), 5, [16, 8, 8, 8, 8]),
        (in_turn([A, B, A, B, A, B]), 4, [48, 32, 32, 16, 16]),  # beside a running request there is room for one page
        # In 5 pages: C is never seen again, but least recently used go A's pages.
        (in_turn([A, C, B, A]), 5, [16, 8, 8, 8, 0]),
        ([ServedRequest(A, 0, 5, 9), ServedRequest(A, 4, 6, 9), ServedRequest(A, 5, 6, 9)], 100, [24, 8, 8, 8, 8]),
    ],
)
def test_by_hand(requests, pages, expected):
    assert steps(requests, 4, pages) == expected


def test_a_primed_cache_hits_from_the_first_request_on():
    assert steps(in_turn([A, A]), 4, 100, [A[:8]]) == [16, 16, 16, 16, 16]
    assert steps(in_turn([A, A]), 4, 3, [A[:8], B[:8]]) == [16, 16, 16, 12, 12]  # B drove one of A's pages away


def test_an_answer_is_found_by_the_next_turn_where_its_ids_are_known():
    prompt, answer = A[:5], (7, 8, 9, 10)  # the KV of 10 is never computed
    later = ServedRequest((*prompt, *answer, 11), 3, 4, 5)
    assert steps([ServedRequest(prompt, 0, 1, 2, answer, 4), later], 4, 100) == [8 + 5 - 1, 8, 8, 8, 8]
    assert steps([ServedRequest(prompt, 0, 1, 2, (), 4), later], 4, 100) == [5 + 5 - 1, 5, 4, 4, 4]


def test_what_runs_leaves_no_room_for_the_cache():
    """6 pages: while B runs with 5, only one of A's is left. Who runs grows before others are admitted."""
    long = ServedRequest(B, 2, 3, 14, (), 12)
    for admitted, hits in ((9, 8), (10, 4), (14, 4)):
        again = ServedRequest(A, admitted, 15, 15)
        assert steps([ServedRequest(A, 0, 1, 1), long, again], 4, 6)[2:] == [8, hits, hits]


def test_pages_of_a_prompt_are_found_as_soon_as_they_are_computed():
    slow = ServedRequest(A, 0, 5, 5, chunks=((2, 3), (3, 6)))
    for admitted, token, page in ((1, 0, 0), (2, 3, 0), (3, 6, 4), (5, 8, 8)):
        later = ServedRequest((*A, 1), admitted, 6, 6)
        assert steps([slow, later], 4, 100)[1:] == [token + (admitted == 5), page, page, page]
