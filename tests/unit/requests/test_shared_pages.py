"""Requests made from page ids: exactly the sharing that they say, at any scale."""

from __future__ import annotations

import itertools
import json

import pytest

from kvbench.requests.prefix_hits import predict_hits
from kvbench.requests.request import RequestSpec, distinct_prefixes
from tests.support.trace_loads import CLOSED, build, jsonl, lengths, shared_tokens
from tests.support.trace_samples import SLICES, TRACES, needs_slices

IN_MS = {"format": "mooncake"}  # in pages of 16, so that it has to be said


def ideal(requests: list[RequestSpec], page: int) -> tuple[float, float]:
    """Hit rate of full pages, and of tokens, of an endless cache: a trie over the tokens, one request after another."""
    nodes: dict[tuple, int] = {}
    pages = hits = tokens = hit_tokens = 0
    for request in requests:
        ids, node, warm = request.prompt_token_ids, 0, True
        parts = [ids[at : at + page] for at in range(0, len(ids), page)]
        for part in parts:
            warm &= (node, part) in nodes
            node = nodes.setdefault((node, part), len(nodes) + 1)
            hits += warm and len(part) == page
            hit_tokens += warm * len(part)
        pages += len(ids) // page
        tokens += len(ids)
    return hits / pages, hit_tokens / tokens


@needs_slices
@pytest.mark.parametrize("name", [n for n in SLICES if "prefix_infinite_cache_cold" in SLICES[n]])
def test_prompts_of_a_public_slice_hit_what_its_page_ids_hit(name):
    cold = SLICES[name]["prefix_infinite_cache_cold"]
    scale = 0.0625 if cold["block"] == 512 else 1.0
    load = CLOSED | {"build": {"concurrency": 1, "max_model_len": 2**20}}
    kind = "mooncake" if name.startswith("sharegpt_derived/") else "auto"  # in pages of 16, so that it has to be said
    requests = build(TRACES / name, load=load, length_scale=scale, sessions=False, format=kind)
    page = int(cold["block"] * scale)
    assert len(requests) == SLICES[name]["n"] and requests.notes["page_size_of_prompts"] == page
    pages, tokens = ideal(requests, page)
    assert round(pages, 4) == cold["fullblock_hit"]
    if scale == 1.0:
        assert sum(lengths(requests)) == SLICES[name]["prompt_tokens_total"]
        assert round(tokens, 4) == cold["token_hit"]
    bounds = predict_hits(requests, cache_state="cold", page_size=page)
    assert bounds.high <= pages * page * sum(n // page for n in lengths(requests)) + 1e-6  # less each prompt's last


MOONCAKE = [
    {"timestamp": 0, "input_length": 40, "output_length": 8, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 40, "output_length": 16, "hash_ids": [1, 2, 3]},
    {"timestamp": 3000, "input_length": 41, "output_length": 4, "hash_ids": [1, 2, 4]},
    {"timestamp": 6000, "input_length": 32, "output_length": 4, "hash_ids": [2, 1]},
    {"timestamp": 6000, "input_length": 16, "output_length": 4, "hash_ids": [1]},
    {"timestamp": 9000, "input_length": 5, "output_length": 4, "hash_ids": [9]},
]


def test_equal_page_ids_are_equal_tokens_and_others_differ_at_once(tmp_path):
    requests = build(tmp_path / "t", jsonl(*MOONCAKE), **IN_MS)
    assert lengths(requests) == [40, 40, 41, 32, 16, 5] and [r.max_tokens for r in requests] == [8, 16, 4, 4, 4, 4]
    assert [r.arrival_s for r in requests] == [0, 3, 3, 6, 6, 9]
    first = requests[0]
    assert [shared_tokens(first, other) for other in requests] == [40, 40, 32, 0, 16, 0]
    assert first.prompt_token_ids[16:32] == requests[3].prompt_token_ids[:16]  # the same page at another place
    pages = [first.prompt_token_ids[:16], first.prompt_token_ids[16:32], requests[2].prompt_token_ids[32:]]
    assert all(sum(x == y for x, y in zip(a, b, strict=False)) < 3 for a, b in itertools.combinations(pages, 2))
    assert [r.prefix_tokens for r in requests] == [32, 32, 32, 0, 16, 0]
    assert distinct_prefixes(requests) == [first.prompt_token_ids[:32], first.prompt_token_ids[:16]]
    assert all(16 <= token < 8192 for r in requests for token in r.prompt_token_ids)


def test_pages_follow_the_seed_and_the_id_alone(tmp_path):
    text = jsonl(*MOONCAKE)
    all_of_them, part = build(tmp_path / "t", text, **IN_MS), build(tmp_path / "t", start_s=6.0, **IN_MS)
    assert part[1].prompt_token_ids == all_of_them[4].prompt_token_ids
    again = build(tmp_path / "t", **IN_MS)
    assert again == all_of_them
    other = build(tmp_path / "t", load={"build": {"seed": 1}}, **IN_MS)
    assert not {r.prompt_token_ids[:2] for r in other} & {r.prompt_token_ids[:2] for r in all_of_them}


def test_a_tail_without_an_id_belongs_to_nobody_else(tmp_path):
    rows = [{"t": float(i), "in": 20 + i % 2, "out": 3, "hash_ids": [1, 2]} for i in range(40)]
    requests = build(tmp_path / "t", json.dumps({"block_size": 8, "requests": rows}), sessions=False)
    assert {shared_tokens(a, b) for a, b in itertools.combinations(requests, 2)} <= {16, 17, 18}
    assert len({r.prompt_token_ids[16:] for r in requests}) == 40


@pytest.mark.parametrize("max_model_len", [20, 24, 47])
def test_auto_shrinks_the_page_until_the_longest_fits(tmp_path, max_model_len):
    requests = build(tmp_path / "t", jsonl(*MOONCAKE), **IN_MS, load={"build": {"max_model_len": max_model_len}})
    page = requests.notes["page_size_of_prompts"]
    assert requests.notes["length_scale"] == page / 16

    def longest(size: int) -> int:
        return max(
            (n // 16) * size + max(1, n % 16 * size // 16) * (n % 16 > 0) + max(1, m * size // 16)
            for n, m in ((row["input_length"], row["output_length"]) for row in MOONCAKE)
        )

    assert longest(page) <= max_model_len < longest(page + 1)
    assert [n // page for n in lengths(requests)] == [2, 2, 2, 2, 1, 0]  # as many full pages as in the trace
    assert [shared_tokens(requests[0], other) // page for other in requests] == [2, 2, 2, 0, 1, 0]


def test_a_partly_filled_page_never_becomes_a_full_one(tmp_path):
    rows = [
        {"timestamp": 0, "input_length": 23, "hash_ids": [1, 2, 3, 4, 5, 6], "output_length": 4},
        {"timestamp": 1, "input_length": 22, "hash_ids": [1, 2, 3, 4, 5, 6], "output_length": 4},
    ]
    how = {"format": "mooncake", "page_size": 4}

    def made(max_model_len: int, **more) -> list[RequestSpec]:
        return build(tmp_path / "t", jsonl(*rows), **how, **more, load={"build": {"max_model_len": max_model_len}})

    requests = made(13)
    assert requests.notes["page_size_of_prompts"] == 2
    assert lengths(requests) == [11, 11] and [r.prefix_tokens for r in requests] == [10, 10]
    with pytest.raises(ValueError, match=r"even with pages of 2 tokens it would need 13 tokens, more than .* 12"):
        made(12)
    with pytest.raises(ValueError, match=r"length_scale 0.25 makes pages of 4 tokens pages of 1.* at least 0.5, or"):
        made(64, length_scale=0.25)
    rows[0]["input_length"], rows[1]["input_length"] = 24, 24
    assert lengths(made(8)) == lengths(made(64, length_scale=0.25)) == [6, 6]  # whole pages may shrink to a token


def test_pages_too_short_to_tell_apart_and_requests_too_long_are_refused(tmp_path):
    many = jsonl(*({"timestamp": i, "input_length": 64, "hash_ids": [4 * i + j for j in range(4)], "output_length": 1}
                   for i in range(20)))  # fmt: skip
    with pytest.raises(ValueError, match=r"pages of 1 tokens are too short to tell 100 pages apart with 84"):
        build(tmp_path / "t", many, load={"build": {"max_model_len": 7, "vocab_size": 100}}, **IN_MS)
    with pytest.raises(ValueError, match=r"has 4 pages: .* need 5 tokens, more than max_model_len 4"):
        build(tmp_path / "t", many, load={"build": {"max_model_len": 4}}, **IN_MS)
    crowded = build(tmp_path / "t", many, load={"build": {"max_model_len": 9, "vocab_size": 40}}, **IN_MS)
    pages = [r.prompt_token_ids[at : at + 2] for r in crowded for at in range(0, 8, 2)]
    assert len(set(pages)) == 80  # 2 tokens of 24 ids: all 80 pages differ
