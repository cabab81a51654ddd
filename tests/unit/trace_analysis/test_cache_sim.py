"""cache-sim: the engine's pool and cache against a plain LRU, and what it refuses.

The hit rates of public traces: tests/unit/traces/test_trace_stats.py.
"""

from __future__ import annotations

import json
from array import array
from collections import OrderedDict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench.cli.main import main
from kvbench.trace_analysis import cache_sim
from kvbench.trace_analysis.cache_sim import capacities, hit_rates, parse_pages, replay, working_set
from kvbench.traces.model import UNKNOWN, Trace
from kvbench_engine.kv.page_pool import PagePool
from tests.support.trace_samples import page_row


def trace_of(requests: list[list[int]], page_size: int = 4, tokens: list[int] | None = None) -> Trace:
    tokens = tokens or [len(ids) * page_size for ids in requests]
    ids = tuple(array("q", numbers) for numbers in requests)
    return Trace("mooncake", np.array(tokens), np.full(len(ids), UNKNOWN), page_ids=ids, page_size=page_size)


def plain_lru(requests: list[list[int]], capacity: int) -> list[int]:
    """Leading hits of each request in an LRU of ``capacity`` whole prefixes, a request's first page the newest."""
    cache: OrderedDict[tuple[int, ...], None] = OrderedDict()
    hits = []
    for ids in requests:
        prefixes = [tuple(ids[: end + 1]) for end in range(len(ids))]
        hits.append(next((i for i, prefix in enumerate(prefixes) if prefix not in cache), len(ids)))
        for prefix in reversed(prefixes):
            cache[prefix] = None
            cache.move_to_end(prefix)
            if len(cache) > capacity:
                cache.popitem(last=False)
    return hits


# Few ids, so that prefixes are shared, ids come again at other places, and requests are longer than small pools.
REQUESTS = st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1, max_size=40)


@settings(max_examples=100, deadline=None)
@given(requests=REQUESTS, capacity=st.integers(1, 30))
def test_the_engines_pool_and_cache_hit_what_a_plain_lru_hits(requests, capacity):
    done = replay(trace_of(requests), capacity)
    assert done.hits.tolist() == plain_lru(requests, capacity)
    assert done.num_cut == sum(len(ids) > capacity for ids in requests)


@settings(max_examples=50, deadline=None)
@given(requests=REQUESTS)
def test_more_pages_never_hit_less_and_the_working_set_hits_everything(requests):
    trace = trace_of(requests)
    distinct = len({tuple(ids[: end + 1]) for ids in requests for end in range(len(ids))})
    assert working_set(trace) == distinct
    hits = [replay(trace, pages).hits for pages in range(1, distinct + 2)]
    assert all((more >= fewer).all() for fewer, more in pairwise(hits))
    seen: set[tuple[int, ...]] = set()
    for ids, hit in zip(requests, hits[-1], strict=True):
        prefixes = [tuple(ids[: end + 1]) for end in range(len(ids))]
        assert hit == sum(prefix in seen for prefix in prefixes)
        seen.update(prefixes)
    if distinct:
        assert replay(trace, distinct).evictions == 0
        assert (hits[-1] == hits[-2]).all()


def test_a_replay_by_hand_leaves_nothing_owned(monkeypatch):
    pools = []

    class Watched(PagePool):
        def __init__(self, num_pages, on_evict):
            super().__init__(num_pages, on_evict)
            pools.append(self)

    monkeypatch.setattr(cache_sim, "PagePool", Watched)
    done = replay(trace_of([[1, 2, 3], [1, 2, 4], [5, 6, 7, 8, 9], [1, 2, 3]]), 4)
    (pool,) = pools
    pool.check_integrity([])
    assert pool.num_owned == 0 and pool.num_cached == 4
    # 1-2-3, 1-2 hit, 4 takes the free page; 5..8 evict all four and 9 is cut; three of these go for 1-2-3
    assert done.hits.tolist() == [0, 2, 0, 0] and done.evictions == 7 and done.num_cut == 1


def test_rates_count_pages_tokens_full_pages_and_requests():
    # pages of 4 tokens: 10 tokens are 3 pages, the last with 2 of 4
    trace = trace_of([[1, 2, 3], [1, 2, 3], [1, 9], []], page_size=4, tokens=[10, 10, 5, 3])
    rates = hit_rates(trace, replay(trace, 10).hits)
    assert rates.pages == 4 / 8
    assert rates.tokens == (10 + 4) / 28
    assert rates.full_pages == (2 + 1) / 5
    assert rates.requests == 2 / 4
    assert rates.median_request == (0 + 4 / 5) / 2
    warm = hit_rates(trace, replay(trace, 10).hits, warm_up=1)
    assert warm.pages == 4 / 5 and warm.tokens == 14 / 18 and warm.requests == 2 / 3
    with pytest.raises(ValueError, match="after 3 of 4 requests"):
        hit_rates(trace, replay(trace, 10).hits, warm_up=3)


@pytest.mark.parametrize(
    ("texts", "pages"),
    [
        (["1k,5K,20k"], [1000, 5000, 20_000]),
        (["2M", "7", "7, 5_000"], [7, 5000, 2_000_000]),
        *(([text], None) for text in ("0", "-1", "1.5k", "", "1,", "k", "1,000", "1kk", "64GiB", "²", "9" * 50)),
    ],
)
def test_pages_are_a_list_in_one_or_in_several_options(texts, pages):
    if pages is not None:
        assert parse_pages(texts) == pages
        return
    with pytest.raises(ValueError, match="at least 1"):
        parse_pages(texts)


def test_the_ladder_goes_from_the_longest_request_to_the_working_set():
    trace = trace_of([list(range(30)), *([n] for n in range(100, 1300))])
    assert capacities(trace, working_set(trace)) == [30, 50, 100, 200, 500, 1000, 1230]
    assert capacities(trace_of([[1, 2]]), 2) == [2]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["cache-sim", *arguments])
    return ended.value.code, *capsys.readouterr()


@pytest.fixture
def small(tmp_path) -> str:
    """Pages of 16 tokens: 1 to 4, then 5 to 8, then the first four again."""
    rows = (page_row([1, 2, 3, 4]), page_row([5, 6, 7, 8]), page_row([1, 2, 3, 4], 60))
    path = tmp_path / "[b]small.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def test_table_and_page_have_capacities_hit_rates_and_the_ceiling(capsys, small, tmp_path):
    page = tmp_path / "curve.html"
    words = ("--pages", "2,5", "--pages", "1M", "--kv-bytes-per-token", "1024", "--html", str(page))
    code, out, _ = run(capsys, small, *words)
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and lines[0].startswith("[b]small.jsonl:")
    assert "2 32 32 KiB 0.00% 0.00% 0.00% 4 3" in lines
    # The second request takes the free page, then 4, 3 and 2: of the first one its page 1 is left.
    assert "5 80 80 KiB 8.33% 8.51% 25.00% 6 0" in lines
    assert "1,000,000 16,000,000 15.26 GiB 33.33% 31.91% 100.00% 0 0" in lines
    assert "infinite 33.33% 31.91% 100.00% 0 0" in lines
    assert any("8 pages (128 tokens, 128 KiB)" in line for line in lines)
    assert any(line.startswith("* ") for line in lines)
    text = page.read_text(encoding="utf-8")
    assert "33.33% of pages (8 pages)" in text and "5 pages, 80 tokens" in text and 'src="http' not in text


def test_json_says_the_same_in_numbers(capsys, small):
    code, out, _ = run(capsys, small, "--json", "--model", "llama-3.1-8b", "--kv-cache-dtype", "int8_per_token_head")
    assert code == 0 and json.loads(out)["kv_bytes_per_token"] == 32 * 8 * 2 * (128 + 4)  # with its scales
    code, out, _ = run(capsys, small, "--pages", "5", "--json", "--model", "llama-3.1-8b", "--warm-up", "2")
    found = json.loads(out)
    assert code == 0 and found["format"] == "mooncake" and "13 to 20 tokens" in found["page_size_from"]
    assert (found["requests"], found["pages"], found["prompt_tokens"], found["page_size"]) == (3, 12, 188, 16)
    assert (found["working_set_pages"], found["longest_request_pages"], found["warm_up_requests"]) == (8, 4, 2)
    per_token = 32 * 8 * (128 + 128) * 2  # layers, KV heads, K and V of 128, bfloat16
    assert found["kv_bytes_per_token"] == per_token
    (at,) = found["capacities"]
    assert (at["num_pages"], at["num_tokens"], at["kv_bytes"]) == (5, 80, 80 * per_token)
    assert (at["pages_hit_rate"], at["tokens_hit_rate"], at["requests_hit_rate"]) == (1 / 4, 16 / 60, 1.0)
    assert (at["evicted_pages"], at["requests_longer_than_pool"]) == (6, 0)
    assert found["infinite_cache"]["pages_hit_rate"] == 1.0 and found["infinite_cache"]["num_pages"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], ["nowhere.jsonl does not exist"]),
        (["."], ["cannot be read"]),
        (["T", "--pages", "0"], ["'0'", "at least 1"]),
        (["T", "--page-size", "64"], ["line 1", "leave it out"]),
        (["T", "--warm-up", "3"], ["after 3 of 3", "lower --warm-up"]),
        (["T", "--model", "llama-3.1-8b", "--kv-cache-dtype", "fp9"], ["'fp9'", "fp8_e4m3"]),
        (["T", "--kv-cache-dtype", "fp8_e4m3"], ["needs --model"]),
        (["T", "--kv-bytes-per-token", "8", "--model", "llama-3.1-8b"], ["give one of them"]),
        (["T", "--html", "no/such/folder/x.html"], ["--html", "cannot be written"]),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, small, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, *[small if a == "T" else a for a in arguments])
    assert code == 2 and err.startswith("error: ") and "Traceback" not in out + err
    assert all(word in err for word in words), err
