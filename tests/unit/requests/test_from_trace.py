"""Requests made from traces: their lengths and times, texts as they are, sessions in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from kvbench.requests.prefix_hits import predict_hits
from kvbench.requests.request import distinct_prefixes
from tests.support.trace_loads import CLOSED, build, jsonl, lengths, shared_tokens

ROOT = Path(__file__).resolve().parents[3]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2023-11-16 18:20:46.0,1000,500\n2023-11-16 18:20:46.5,20,4\n2023-11-16 18:20:48.0,300,8\n2023-11-16 18:20:56,7,1\n"
)


def test_lengths_alone_become_random_tokens_and_the_scale_is_told(tmp_path):
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
    requests = build(tmp_path / "t", jsonl(*rows), load={"spread_ticks": "even"}, page_size=16, format="mooncake")
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
    told = "Shall I compare thee\nto a summer's day?\nThou art more lovely\n"
    assert tokenizer.decode(list(second.prompt_token_ids)) == told
    assert shared_tokens(first, second) == len(first.prompt_token_ids)
    assert second.max_tokens == len(tokenizer.encode("and more temperate.").ids) and first.prompt is None
    sent = build(tmp_path / "t", load=CLOSED, send_text=True)
    assert [r.prompt for r in sent] == ["Shall I compare thee\n", told, "Rough winds do shake\n"]
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
        tmp_path / "a", jsonl(*agent), load=CLOSED | {"build": {"concurrency": 1, "max_model_len": 60}}, sessions=True
    )
    assert [(r.session, r.turn) for r in cut] == [(0, 0)]
    with pytest.raises(ValueError, match="none of the trace's 4 requests fits max_model_len 5"):
        build(tmp_path / "t", load=CLOSED | {"build": {"concurrency": 1, "max_model_len": 5}})
    with pytest.raises(ValueError, match="would cut texts"):
        build(tmp_path / "t", load=CLOSED, length_scale=0.5)


def test_a_trace_may_have_a_text_here_and_a_length_there(tmp_path):
    rows = [{"timestamp": 0, "text_input": "one two"}, {"timestamp": 5, "input_length": 30}]
    rows += [{"timestamp": 6, "payload": {"prompt": [7, 8]}}]
    requests = build(tmp_path / "t", jsonl(*rows), output_tokens=2, send_text=True)
    assert [r.prompt for r in requests] == ["one two", None, None]
    assert lengths(requests)[1:] == [30, 2] and requests[2].prompt_token_ids == (7, 8)
    assert len(set(requests[1].prompt_token_ids)) > 20


def test_outputs_that_nobody_told_are_the_workloads(tmp_path):
    text = jsonl({"prompt": "one two three", "output_tokens": 9}, {"prompt": [700, 701], "output_tokens": -1})
    requests = build(tmp_path / "t", text, load=CLOSED, output_tokens=33)
    assert [r.max_tokens for r in requests] == [9, 33] and requests[1].prompt_token_ids == (700, 701)
    assert requests[0].session is None
    with pytest.raises(ValueError, match=r"output of 1 of 2 requests; .* load\.prompts\.output_tokens"):
        build(tmp_path / "t", load=CLOSED)
    with pytest.raises(ValueError, match="token id 9000, but the model's vocabulary ends before 8192"):
        build(tmp_path / "t", jsonl({"prompt": [9000]}), load=CLOSED, output_tokens=3)


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
        ({"sessions": True}, "does not say which requests are one"),
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


def test_texts_that_begin_alike_are_primed_and_others_are_refused(tmp_path):
    rows = [
        {"prompt": "You are a poet who answers in verse. " * 5 + end, "output_tokens": 4} for end in ("Why?", "No!")
    ]
    primed = CLOSED | {"cache_state": "primed"}
    requests = build(tmp_path / "t", jsonl(*rows, {"prompt": "Else", "output_tokens": 4}), load=primed)
    shared = shared_tokens(*requests[:2])
    assert [r.prefix_tokens for r in requests] == [shared, shared, 0] and shared > 30
    assert distinct_prefixes(requests) == [requests[0].prompt_token_ids[:shared]]
    # What only turns of one session have in common is nobody else's: nothing to prime.
    with pytest.raises(ValueError, match="nothing to prime: no two of the 2 prompts begin alike"):
        build(tmp_path / "s", json.dumps(TALKS[:1]), load=primed)
    with pytest.raises(ValueError, match="nothing to prime"):
        build(tmp_path / "a", AZURE, load=primed)
