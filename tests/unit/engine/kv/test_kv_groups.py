"""Groups of layers: which ones, how many pages they hold, and what a prefix or a host copy must have."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.kv import groups
from kvbench_engine.kv.budget import KVShape, LayerKV, capacity_of
from kvbench_engine.kv.groups import first_page, group_layers, most_pages, ring_slots
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.sequence import Request, Sequence
from tests.support.engine_parts import drain, least_slots, request, small_config, small_engine, windowed


def every(number: int, layers: int, window: int) -> list[int | None]:
    """Windows of layers of which each ``number``-th sees everything."""
    return [None if (layer + 1) % number == 0 else window for layer in range(layers)]


@pytest.mark.parametrize(("windows", "expected"), [
    (every(6, 62, 1024), {None: 1, 1024: 6}),  # Gemma 3 27B: 10 layers that see everything, 52 others
    (every(2, 24, 128), {None: 1, 128: 1}),  # gpt-oss-20b
    (every(4, 32, 4096), {None: 1, 4096: 3}),  # Command R7B
    ([4096] * 32, {4096: 1}),  # Mistral 7B v0.1
    ([None] * 32, {None: 1}),
    ([8] * 2 + [None] * 5, {None: 3, 8: 1}),
    ([8] * 9 + [None] * 8, {None: 1, 8: 1}),  # almost as many: one group each
    ([8] * 10 + [None] * 8, {None: 1, 8: 2}),
    ([8, 4, None], {None: 1, 4: 1, 8: 1}),
])  # fmt: skip
def test_layers_are_grouped_as_in_vllm(windows, expected):
    """By vllm/v1/core/kv_cache_utils.py, _get_kv_cache_groups_uniform_page_size."""
    made = group_layers(windows)
    assert {kind: sum(group.window == kind for group in made) for kind in expected} == expected
    assert sorted(layer for group in made for layer in group.layers) == list(range(len(windows)))
    assert all(windows[layer] == group.window for group in made for layer in group.layers)
    assert made[0].window is None or None not in windows


def test_windows_that_hide_nothing_and_layers_of_several_sizes_are_no_groups():
    shape = windowed(None, 8)
    assert [group.window for group in shape.groups(9)] == [None, 8]
    assert [group.window for group in shape.groups(8)] == [None]
    assert [group.window for group in shape.groups(None)] == [None, 8]
    other = replace(shape, layers=(*shape.layers, LayerKV(2, 4, 8)))
    assert other.groups(None) == (groups.KVGroup(None, (0, 1, 2, 3, 4)),), "all tokens of all layers are kept"
    assert [group.window for group in KVShape((LayerKV(2, 4, 4, 8), LayerKV(1, 4, 4, 8)), 4).groups(None)] == [8]


def seen(window: int | None, query: int) -> set[int]:
    """The tokens that the token at ``query`` attends to, by the definition of AttentionOptions.sliding_window."""
    return {token for token in range(query + 1) if window is None or token > query - window}


@given(st.sampled_from([None, 1, 2, 5, 8, 13]), st.integers(1, 60), st.integers(1, 9), st.sampled_from([1, 3, 4, 8]))
def test_pages_are_counted_to_the_page(window, tokens, step, size):
    """What is needed at once is what the tokens of some step see or write, wherever the step begins."""
    needed = []
    for start in range(tokens):
        queries = range(start, min(start + step, tokens))
        pages = {token // size for query in queries for token in seen(window, query)}
        needed.append(len(pages))
        assert min(pages) == first_page(window, start, size)
    assert max(needed) <= most_pages(window, tokens, step, size)
    if tokens >= (window or 0) + step + size:  # long enough for the worst place in a page
        assert max(needed) == most_pages(window, tokens, step, size)


@given(st.integers(1, 300), st.integers(1, 400), st.integers(1, 90))
def test_a_ring_holds_a_window_and_a_step(window, tokens, step):
    slots = ring_slots(window, tokens, step)
    for start in range(tokens):
        needed = {token for query in range(start, min(start + step, tokens)) for token in seen(window, query)}
        assert len({token % slots for token in needed}) == len(needed), (
            "a token of the step overwrites one that is seen"
        )
    assert slots == tokens or slots - groups.RING_UNIT < window + step - 1


SHAPES = {"hybrid": (None, 5), "hybrid of three": (None, 3, 3), "windows only": (6,), "two windows": (2, 9)}


@pytest.mark.parametrize("reuses_batches", [True, False])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("windows", SHAPES.values(), ids=SHAPES)
def test_as_many_decode_at_once_as_the_arithmetic_says(windows, size, reuses_batches):
    """With exactly the pages of four sequences there is no preemption, with one page less there is."""
    tokens, params = 40, {"max_tokens": 36, "ignore_eos": True}
    settings = {"max_model_len": 48, "page_size": size, "watermark": 0.0, "max_num_batched_tokens": 16}
    shape = windowed(*windows)
    roomy = capacity_of(small_config(**settings), shape, 1 << 30)
    pages = 4 * roomy.pages_of(tokens - 1)  # the last token's KV is not kept
    for missing in (0, 1):
        engine = small_engine((pages - missing) * size, shape=shape, **settings)
        engine.scheduler.reuses_batches = reuses_batches
        assert (engine.capacity.max_concurrency(tokens - 1) == 4) == (not missing)
        running = []
        engine.on_step = lambda record, running=running: running.append(record.running)
        for name in "abcd":
            engine.add_request(request(name, range(ord(name) - 90, ord(name) - 86), **params))
        drain(engine)
        assert (engine.stats().num_preemptions > 0) == bool(missing), "at the limit it must fit, beyond it must not"
        assert max(running) == 4


@pytest.mark.parametrize("windows", SHAPES.values(), ids=SHAPES)
def test_a_long_prompt_fits_the_smallest_pool(windows):
    """Alone, with chunks as long as a step: one page less is refused when the pool is sized."""
    config = small_config(max_model_len=48, page_size=4, max_num_batched_tokens=7)
    shape = windowed(*windows)
    slots = least_slots(config, shape)
    engine = small_engine(slots, shape=shape, max_model_len=48, page_size=4, max_num_batched_tokens=7)
    engine.add_request(request("a", 40, max_tokens=7))
    drain(engine)
    assert engine.stats().num_preemptions == 0
    with pytest.raises(ValueError, match="smaller than one sequence of max_model_len 48"):
        small_engine(slots - 4, shape=shape, max_model_len=48, page_size=4, max_num_batched_tokens=7)


@st.composite
def caches(draw):
    """(page size, windows, sequences of shared stems, numbers of pages to evict in between)."""
    size, windows = draw(st.sampled_from([1, 3, 4])), draw(st.sampled_from(list(SHAPES.values())))
    stems = [[draw(st.integers(0, 2)) for _ in range(24)] for _ in range(2)]
    lengths = st.tuples(st.integers(0, 1), st.integers(1, 24), st.lists(st.integers(0, 2), max_size=6))
    prompts = [(*stems[stem][:cut], *tail) for stem, cut, tail in draw(st.lists(lengths, min_size=2, max_size=7))]
    return size, windows, prompts, draw(st.lists(st.integers(0, 9), min_size=7, max_size=7))


@settings(deadline=None, max_examples=150)
@given(caches())
def test_a_prefix_hit_needs_what_its_next_token_sees_and_no_more(case):
    """The longest prefix of whole pages of which every group still has all that the token after it sees."""
    size, windows, prompts, evictions = case
    cache = PrefixCache(size, 400, windows)
    pool = PagePool(400, cache.evict)
    places: dict[tuple[int, ...], list[list[int]]] = {}  # prefix of whole pages -> for each group, pages that held it
    for prompt, evicted in zip(prompts, evictions, strict=False):
        seq = Sequence.of(Request("x", (*prompt, 7)))
        hit = cache.match(seq)
        assert len(hit) // len(windows) == longest(prompt, size, windows, places, pool)
        seq.pages = hit
        for page in hit:
            if page >= 0:
                pool.share(page)
        full = len(prompt) // size
        for _ in range(len(hit) // len(windows), full):
            seq.pages += [pool.allocate() for _ in windows]
        cache.insert(seq, full, pool)
        cache.check_integrity(pool)
        for at, page in enumerate(seq.pages):
            if page >= 0 and pool.is_cached(page):
                held = places.setdefault(prompt[: (at // len(windows) + 1) * size], [[] for _ in windows])
                held[at % len(windows)].append(page)
        for page in reversed([page for page in seq.pages if page >= 0]):
            pool.release(page)
        forget(places, [pool.allocate() for _ in range(evicted)], pool)
        cache.check_integrity(pool)


def longest(prompt, size, windows, places, pool) -> int:
    for pages in range(len(prompt) // size, 0, -1):
        needed = [{token // size for token in seen(w, pages * size) if token < pages * size} for w in windows]
        if all(
            any(pool.is_cached(page) for page in places.get(prompt[: (index + 1) * size], [[]] * len(windows))[group])
            for group in range(len(windows))
            for index in needed[group]
        ):
            return pages
    return 0


def forget(places, allocated, pool) -> None:
    """What was allocated is no longer what was cached; give it back empty."""
    for held, group in itertools.product(places.values(), range(4)):
        if group < len(held):
            held[group] = [page for page in held[group] if page not in allocated and pool.is_cached(page)]
    for page in allocated:
        pool.release(page)


@pytest.mark.parametrize("evicted", [0, 1])
def test_a_hit_ends_where_the_first_page_of_its_window_is_gone(evicted):
    """The token after 28 sees the 5 before it, which begin in the sixth page: the five before may be evicted."""
    cache = PrefixCache(4, 14, (None, 6))
    pool = PagePool(14, cache.evict)
    seq = Sequence.of(Request("x", tuple(range(29))))
    seq.pages = [pool.allocate() for _ in range(14)]
    cache.insert(seq, 7, pool)
    first = first_page(6, 28, 4)
    assert first == 5
    for index in range(first + evicted):
        pool.release(seq.pages[2 * index + 1])
        assert pool.allocate() == seq.pages[2 * index + 1], "the only one that is free"
    hit = cache.match(Sequence.of(Request("y", tuple(range(29)))))
    assert len(hit) == (0 if evicted else 14)
    assert evicted or [page >= 0 for page in hit[1::2]] == [False] * first + [True] * (7 - first)


@pytest.mark.parametrize("windows", [*SHAPES.values(), (None,)], ids=[*SHAPES, "none"])
def test_the_same_prompt_again_hits_all_its_whole_pages(windows):
    engine = small_engine(4 * 64, shape=windowed(*windows), page_size=4, enable_prefix_caching=True, max_model_len=40)
    prompt = tuple(random.Random(1).randrange(90) for _ in range(29))
    for name in "ab":
        engine.add_request(request(name, prompt, max_tokens=2))
        drain(engine)
    assert engine.stats().prefix_cache_hits == 28


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize("windows", SHAPES.values(), ids=SHAPES)
def test_a_host_without_room_for_all_pages_of_a_window_gets_none(windows, missing):
    """Part of them is of no use: what a shorter prefix needs has left the window."""
    shape, tokens = windowed(*windows), 30
    config = {"max_model_len": 40, "page_size": 2, "max_num_seqs": 2, "max_num_batched_tokens": 40}
    pages = sum(len({token // 2 for token in seen(window, tokens) - {tokens}}) for window in windows)
    engine = small_engine(
        8 * least_slots(small_config(**config), shape), shape=shape, preemption_mode="swap",
        host_slots=2 * (pages - missing), **config,
    )  # fmt: skip
    seq = engine.add_request(request("a", 25, max_tokens=12))
    while seq.num_computed < tokens:
        engine.step()
    engine.scheduler.running.remove(seq)
    engine.kv.swap_out(seq)
    assert sum(page >= 0 for page in seq.host_pages) == (0 if missing else pages)
    assert (engine.kv.swap.pool.num_owned == 0) == bool(missing)
    engine.kv.check_integrity([seq])


@pytest.mark.parametrize("reservation", ["max", "oracle"])
def test_a_contiguous_reservation_has_rings_for_windows(reservation, monkeypatch):
    monkeypatch.setattr(groups, "RING_UNIT", 4)
    shape = windowed(None, 5)
    settings = {"layout": "contiguous", "max_model_len": 40, "max_num_batched_tokens": 6, "reservation": reservation}
    ring = 12  # 5 + 6 - 1, in units of 4
    length = 40 if reservation == "max" else 24
    for slots, at_once in ((2 * (length + ring), 2), (2 * (length + ring) - 1, 1)):
        engine = small_engine(slots, shape=shape, **settings)
        running = []
        engine.on_step = lambda record, running=running: running.append(record.running)
        for name in "ab":
            engine.add_request(request(name, range(ord(name) - 90, ord(name) - 74), max_tokens=8, ignore_eos=True))
        drain(engine)
        assert max(running) == at_once


@pytest.mark.parametrize("window", [None, 10])
def test_an_idle_pool_is_free_in_every_layout(window):
    """Reservations with rings too: the full pool's check of leaks counts on it."""
    for layout in ("paged", "contiguous"):
        shape, settings = windowed(None, window), {"layout": layout, "max_model_len": 96, "page_size": 4}
        engine = small_engine(3 * least_slots(small_config(**settings), shape), shape=shape, **settings)
        stats = engine.stats().kv
        assert stats.pages_free == stats.pages_total > 0


def test_what_others_share_of_a_window_is_promised_to_a_prompt_again():
    """Pages of a prefix that another sequence still has do not become free when they leave the window."""
    shape, settings = windowed(None, 48, 48, 48), {"max_model_len": 200, "page_size": 4}
    settings |= {"enable_prefix_caching": True, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    prefix = tuple(i % 90 for i in range(64))
    least = least_slots(small_config(**settings), shape)
    admitted = 0
    for slots in range(least, 2 * least, 8):
        engine = small_engine(slots, shape=shape, **settings)
        first = engine.add_request(request("a", prefix, max_tokens=60, ignore_eos=True))
        while not first.num_output:
            engine.step()
        second = engine.add_request(request("b", (*prefix, *(91 + i % 5 for i in range(96))), max_tokens=2))
        while second.status.value == "waiting" and engine.has_work():
            engine.step()
        beside = first.status.value == "running"
        while second.num_computed < second.num_prompt and second.status.value == "running":
            engine.step()
        admitted += beside
        assert not beside or not second.num_preemptions, f"{slots} slots: admitted, and preempted amid its prompt"
        drain(engine)
    assert admitted > 0


def test_a_sequence_that_the_host_cannot_hold_drives_nobody_out():
    shape, config = windowed(None, 8), {"max_model_len": 60, "page_size": 2, "max_num_seqs": 3}
    engine = small_engine(
        4 * least_slots(small_config(**config), shape), shape=shape, preemption_mode="swap", host_slots=2 * 22, **config
    )
    short, long = (engine.add_request(request(name, length, max_tokens=8)) for name, length in (("a", 10), ("b", 40)))
    while not (short.num_output and long.num_output):
        engine.step()
    for seq in (short, long):
        engine.scheduler.running.remove(seq)
        engine.kv.swap_out(seq)
    assert short.host_pages and not long.host_pages
    engine.kv.check_integrity([short, long])
