"""Requests made from traces: lengths, times, texts and sessions as recorded, and the sharing of the page ids."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.prefix_hits import predict_hits
from kvbench.requests.request import RequestList, RequestSpec, distinct_prefixes
from kvbench.workload.load_section import LoadConfig
from tests.support.trace_samples import SLICES, TRACES, lines, needs_slices

ROOT = Path(__file__).resolve().parents[3]
CLOSED = {"mode": "closed", "arrivals": "poisson", "concurrency": 1, "build": {"concurrency": 1}}


def build(file: Path, text: str | None = None, *, load: dict | None = None, **prompts) -> RequestList:
    """The requests of the trace ``file``. ``load``: keys of the load and, in ``build``, arguments of build_requests."""
    if text is not None:
        file.write_text(text, encoding="utf-8")
    keys = {"mode": "open", "arrivals": "trace"} | (load or {})
    given = {"vocab_size": 8192, "max_model_len": 4096, "seed": 0} | keys.pop("build", {})
    prompts = {"kind": "trace", "path": str(file)} | prompts
    return build_requests(LoadDraw(LoadConfig.model_validate(keys | {"prompts": prompts}), **given))


def lengths(requests: list[RequestSpec]) -> list[int]:
    return [len(r.prompt_token_ids) for r in requests]


def shared_tokens(a: RequestSpec, b: RequestSpec) -> int:
    pairs = zip(a.prompt_token_ids, b.prompt_token_ids, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:20:46.0,1000,500\n2023-11-16 18:20:46.5,20,4\n2023-11-16 18:20:48.0,300,8\n2023-11-16 18:20:56,7,1\n"
)


def test_lengths_alone_become_random_tokens_and_the_scale_is_said(tmp_path):
    requests = build(tmp_path / "t", AZURE, load={"build": {"max_model_len": 300, "vocab_size": 500}})
    assert requests.notes["length_scale"] == pytest.approx(0.2) and requests.notes["trace_format"] == "azure"
    assert lengths(requests) == [200, 4, 60, 1] and [r.max_tokens for r in requests] == [100, 1, 1, 1]
    assert [r.arrival_s for r in requests] == [0, 0.5, 2, 10]
    assert lengths(build(tmp_path / "t")) == [1000, 20, 300, 7]
    played = build(tmp_path / "t", start_s=1.0, rate_scale=2.0, max_requests=2)
    assert [r.arrival_s for r in played] == [0, 4] and lengths(played) == [300, 7]
    closed = build(tmp_path / "t", load=CLOSED | {"num_requests": 3})
    assert len(closed) == 3 and "rate_scale" not in closed.notes and played.notes["rate_scale"] == 2.0


def test_a_coarse_clock_is_spread_where_the_workload_says_so(tmp_path):
    rows = [{"timestamp": 3000 * (i // 10), "input_length": 16, "hash_ids": [i], "output_length": 1} for i in range(40)]
    requests = build(tmp_path / "t", lines(*rows), load={"spread_ticks": "even"}, page_size=16, format="mooncake")
    assert [r.arrival_s for r in requests] == pytest.approx([0.3 * i for i in range(40)])


TALKS = [
    {"id": "a", "conversations": [
        {"from": "human", "value": "Shall I compare thee"}, {"from": "gpt", "value": "to a summer's day?"},
        {"from": "human", "value": "Thou art more lovely"}, {"from": "gpt", "value": "and more temperate."}]},
    {"id": "b", "conversations": [{"from": "human", "value": "Rough winds do shake"}, {"from": "gpt", "value": "."}]},
]  # fmt: skip


def test_conversations_are_sessions_whose_turns_begin_with_all_that_was_said(tmp_path):
    requests = build(tmp_path / "t", json.dumps(TALKS), load=CLOSED)
    assert [(r.session, r.turn) for r in requests] == [(0, 0), (0, 1), (1, 0)]
    first, second, _ = requests
    tokenizer = Tokenizer.from_file(str(ROOT / "engine/tokenizer/bpe8k/tokenizer.json"))
    assert tokenizer.decode(list(first.prompt_token_ids)) == "Shall I compare thee\n"
    said = "Shall I compare thee\nto a summer's day?\nThou art more lovely\n"
    assert tokenizer.decode(list(second.prompt_token_ids)) == said
    assert shared_tokens(first, second) == len(first.prompt_token_ids)
    assert second.max_tokens == len(tokenizer.encode("and more temperate.").ids) and first.prompt is None
    sent = build(tmp_path / "t", load=CLOSED, send_text=True)
    assert [r.prompt for r in sent] == ["Shall I compare thee\n", said, "Rough winds do shake\n"]
    assert predict_hits(sent, cache_state="cold") is None
    assert [r.session for r in build(tmp_path / "t", load=CLOSED, turns="first")] == [0, 1]
    poisson = {"arrivals": "poisson", "request_rate": 2.0, "build": {"rate": 2.0}}
    timed = build(tmp_path / "t", load=poisson)
    assert [r.arrival_s is None for r in timed] == [False, True, False]
    with pytest.raises(ValueError, match="the trace has no arrival times"):
        build(tmp_path / "t")


def test_texts_that_do_not_fit_are_left_out_with_what_follows_them(tmp_path):
    talks = [TALKS[0], {"conversations": [{**m, "value": m["value"] * 40} for m in TALKS[0]["conversations"]]}]
    requests = build(
        tmp_path / "t", json.dumps(talks), load=CLOSED | {"build": {"concurrency": 1, "max_model_len": 60}}
    )
    assert [(r.session, r.turn) for r in requests] == [(0, 0), (0, 1)]
    assert requests.notes["trace_requests_too_long"] == 2
    agent = [
        {"timestamp": i, "session_id": "s", "input": "so it goes " * n, "output": "on"}
        for i, n in enumerate((1, 40, 1))
    ]
    cut = build(
        tmp_path / "a", lines(*agent), load=CLOSED | {"build": {"concurrency": 1, "max_model_len": 60}}, sessions=True
    )
    assert [(r.session, r.turn) for r in cut] == [(0, 0)]
    with pytest.raises(ValueError, match="none of the trace's 4 requests fits max_model_len 5"):
        build(tmp_path / "t", load=CLOSED | {"build": {"concurrency": 1, "max_model_len": 5}})
    with pytest.raises(ValueError, match="would cut texts"):
        build(tmp_path / "t", load=CLOSED, length_scale=0.5)


def test_a_trace_may_have_a_text_here_and_a_length_there(tmp_path):
    rows = [{"timestamp": 0, "text_input": "one two"}, {"timestamp": 5, "input_length": 30}]
    rows += [{"timestamp": 6, "payload": {"prompt": [7, 8]}}]
    requests = build(tmp_path / "t", lines(*rows), output_tokens=2, send_text=True)
    assert [r.prompt for r in requests] == ["one two", None, None]
    assert lengths(requests)[1:] == [30, 2] and requests[2].prompt_token_ids == (7, 8)
    assert len(set(requests[1].prompt_token_ids)) > 20


def test_outputs_that_nobody_said_are_the_workloads(tmp_path):
    text = lines({"prompt": "one two three", "output_tokens": 9}, {"prompt": [700, 701], "output_tokens": -1})
    requests = build(tmp_path / "t", text, load=CLOSED, output_tokens=33)
    assert [r.max_tokens for r in requests] == [9, 33] and requests[1].prompt_token_ids == (700, 701)
    assert requests[0].session is None
    with pytest.raises(ValueError, match=r"output length for 1 of 2 requests; .* load\.prompts\.output_tokens"):
        build(tmp_path / "t", load=CLOSED)
    with pytest.raises(ValueError, match="token id 9000, but the model's vocabulary ends before 8192"):
        build(tmp_path / "t", lines({"prompt": [9000]}), load=CLOSED, output_tokens=3)


AGENT = {
    "block_size": 8,
    "requests": [
        {"t": 10.0, "in": 20, "out": 4, "hash_ids": [1, 2], "think_time": 0.0},
        {"t": 11.0, "type": "subagent", "requests": [{"t": 0.5, "in": 9, "out": 2, "hash_ids": [1]}]},
        {"t": 15.0, "in": 30, "out": 3, "hash_ids": [1, 2, 3], "think_time": 2.5},
    ],
}


def test_an_agents_turns_wait_and_think_or_come_when_they_came(tmp_path):
    path = tmp_path / "t"
    requests = build(path, json.dumps(AGENT))
    assert [(r.session, r.turn, r.think_s) for r in requests] == [(0, 0, 0.0), (1, 0, 0.0), (0, 1, 2.5)]
    assert [r.arrival_s for r in requests] == [0, 1.5, None]
    assert [r.prefix_tokens for r in requests] == [8, 8, 8]  # what both agents have
    fast = build(path, rate_scale=2.5)
    assert [r.think_s for r in fast] == [0, 0, 1] and [r.arrival_s for r in fast] == [0, 0.6, None]
    users = build(path, load=CLOSED, rate_scale=2.5)
    assert [r.think_s for r in users] == [0, 0, 1] and users.notes["rate_scale"] == 2.5  # thinks are played at it
    timed = build(path, sessions=False)
    assert [r.arrival_s for r in timed] == [0, 1.5, 5] and {r.session for r in timed} == {None}
    assert [r.prefix_tokens for r in timed] == [16, 8, 16]
    assert [r.prompt_token_ids for r in timed] == [r.prompt_token_ids for r in requests]


def test_several_files_are_one_trace_by_list_or_pattern(tmp_path):
    for name in ("b.json", "a.json"):
        (tmp_path / name).write_text(json.dumps(AGENT))
    by_pattern = build(tmp_path / "*.json", load=CLOSED)
    assert by_pattern.notes["trace"] == "a.json and 1 more" and len(by_pattern) == 6
    assert {r.prefix_tokens for r in by_pattern} == {8}  # page ids mean something else in each file
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    assert build(tmp_path / "x", load=CLOSED, path=paths) == by_pattern
    with pytest.raises(ValueError, match=r"none\*\.json does not exist; .*-o load\.prompts\.path=PATH"):
        build(tmp_path / "none*.json", load=CLOSED)


def test_a_load_that_lasts_so_many_seconds_begins_as_many_sessions(tmp_path):
    talks = [TALKS[0]] * 50
    load = {"arrivals": "constant", "request_rate": 2.0, "duration_s": 5.0, "build": {"rate": 2.0}}
    requests = build(tmp_path / "t", json.dumps(talks), load=load)
    assert len({r.session for r in requests}) == 10 and len(requests) == 20
    assert [r.arrival_s for r in requests if not r.turn] == pytest.approx([0.5 * i for i in range(10)])


@pytest.mark.parametrize(
    ("prompts", "words"),
    [
        ({"sessions": True}, "sessions: true"),
        ({"send_text": True}, "has no texts"),
        ({"format": "mooncake"}, "not of the format mooncake"),
        ({"page_size": 16}, "page_size has no meaning"),
    ],
)
def test_what_the_trace_cannot_do_is_refused(tmp_path, prompts, words):
    with pytest.raises(ValueError, match=words):
        build(tmp_path / "t", AZURE, **prompts)


def test_recorded_times_need_one_for_every_request(tmp_path):
    turns = {"session_id": "s", "turns": [{"text": "a", "timestamp": 5}, {"text": "b", "delay": 10}]}
    requests = build(tmp_path / "t", json.dumps(turns), output_tokens=2)
    assert [(r.arrival_s, r.think_s) for r in requests] == [(0, 0), (None, 0.01)]
    with pytest.raises(ValueError, match="have no time of their own"):
        build(tmp_path / "t", sessions=False, output_tokens=2)
    row = {"text_input": "x", "output_length": 2}
    rows = [row | {"session_id": name, "timestamp": ms} for name, ms in (("a", 0), ("a", 2000), ("b", 5000))]
    talks = build(tmp_path / "u", lines(*rows), sessions=True)
    assert [r.arrival_s for r in talks] == [0, None, 5], "a later turn takes no arrival of the next session"


def test_texts_that_begin_alike_are_primed_and_others_are_refused(tmp_path):
    rows = [
        {"prompt": "You are a poet who answers in verse. " * 5 + end, "output_tokens": 4} for end in ("Why?", "No!")
    ]
    primed = CLOSED | {"cache_state": "primed"}
    requests = build(tmp_path / "t", lines(*rows, {"prompt": "Else", "output_tokens": 4}), load=primed)
    shared = shared_tokens(*requests[:2])
    assert [r.prefix_tokens for r in requests] == [shared, shared, 0] and shared > 30
    assert distinct_prefixes(requests) == [requests[0].prompt_token_ids[:shared]]
    # What only turns of one session have in common is nobody else's: nothing to prime.
    with pytest.raises(ValueError, match="nothing to prime: no two of the 2 prompts begin alike"):
        build(tmp_path / "s", json.dumps(TALKS[:1]), load=primed)
    with pytest.raises(ValueError, match="nothing to prime"):
        build(tmp_path / "a", AZURE, load=primed)


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
    requests = build(tmp_path / "t", lines(*MOONCAKE), **IN_MS)
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
    text = lines(*MOONCAKE)
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
    requests = build(tmp_path / "t", lines(*MOONCAKE), **IN_MS, load={"build": {"max_model_len": max_model_len}})
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
        return build(tmp_path / "t", lines(*rows), **how, **more, load={"build": {"max_model_len": max_model_len}})

    requests = made(13)
    assert requests.notes["page_size_of_prompts"] == 2
    assert lengths(requests) == [11, 11] and [r.prefix_tokens for r in requests] == [10, 10]
    with pytest.raises(ValueError, match=r"even with pages of 2 tokens it would need 13 tokens, more than .* 12"):
        made(12)
    with pytest.raises(ValueError, match=r"length_scale 0.25 shrinks pages of 4 tokens to 1 token.* at least 0.5, or"):
        made(64, length_scale=0.25)
    rows[0]["input_length"], rows[1]["input_length"] = 24, 24
    assert lengths(made(8)) == lengths(made(64, length_scale=0.25)) == [6, 6]  # whole pages may shrink to a token


def test_pages_too_short_to_tell_apart_and_requests_too_long_are_refused(tmp_path):
    many = lines(*({"timestamp": i, "input_length": 64, "hash_ids": [4 * i + j for j in range(4)], "output_length": 1}
                   for i in range(20)))  # fmt: skip
    with pytest.raises(ValueError, match=r"pages of 1 tokens are too short to tell 100 pages apart with 84"):
        build(tmp_path / "t", many, load={"build": {"max_model_len": 7, "vocab_size": 100}}, **IN_MS)
    with pytest.raises(ValueError, match=r"has 4 pages: .* need 5 tokens, more than max_model_len 4"):
        build(tmp_path / "t", many, load={"build": {"max_model_len": 4}}, **IN_MS)
    crowded = build(tmp_path / "t", many, load={"build": {"max_model_len": 9, "vocab_size": 40}}, **IN_MS)
    pages = [r.prompt_token_ids[at : at + 2] for r in crowded for at in range(0, 8, 2)]
    assert len(set(pages)) == 80  # 2 tokens of 24 ids: all 80 pages differ
