"""What a workload's arrivals and sessions become: requests drawn before the run, and their bytes on the wire."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvbench.load.client import Address
from kvbench.load.completion import Completion
from kvbench.load.http import http_request
from kvbench.load.samples import Sample, with_history
from kvbench.load.spec import LoadSpec
from kvbench.requests.build import build_requests
from kvbench.requests.conversations import draw_thinks, draw_turns
from kvbench.requests.request import RequestList, RequestSpec, conversations, read_requests, write_requests
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.prompts_section import Think, Turns

PROMPTS = {
    "kind": "synthetic",
    "shared_prefix": {"tokens": 20, "share": 0.5, "families": 2},
    "classes": [
        {"name": "chat", "share": 0.75, "prompt_tokens": [8, 30], "output_tokens": [4, 9]},
        {"name": "long", "share": 0.25, "prompt_tokens": 60, "output_tokens": 12, "priority": 2},
    ],
}
SESSIONS = {"turns": [2, 5], "think_s": [0.5, 2.0], "user_tokens": [3, 7]}


def drawn(rate: float | None = 2.0, users: int | None = None, seed: int = 5, **load: Any) -> RequestList:
    config = LoadConfig.model_validate({"mode": "open", "prompts": PROMPTS} | load)
    return build_requests(config, vocab_size=500, max_model_len=400, seed=seed, rate=rate, concurrency=users)


def test_every_turn_holds_the_whole_conversation_before_it() -> None:
    requests = drawn(request_rate=2.0, sessions=SESSIONS | {"num_sessions": 40})
    talks = conversations(requests)
    assert len(talks) == 40
    assert [r.index for r in requests] == list(range(len(requests)))
    assert Counter(talk[0].cls for talk in talks) == {"chat": 30, "long": 10}
    assert sum(talk[0].prefix_tokens == 20 for talk in talks) == 20
    assert Counter(len(talk) for talk in talks).keys() == {2, 3, 4, 5}
    for talk in talks:
        assert len({(r.session, r.cls, r.priority, r.prefix_tokens) for r in talk}) == 1
        assert talk[0].think_s == 0
        for before, after in itertools.pairwise(talk):
            new = len(after.prompt_token_ids) - len(before.prompt_token_ids) - before.max_tokens
            assert 3 <= new <= 7
            assert after.prompt_token_ids[: len(before.prompt_token_ids)] == before.prompt_token_ids
            assert 0.5 <= after.think_s <= 2.0
            assert after.arrival_s is None
    starts = [talk[0].arrival_s for talk in talks]
    assert starts == sorted(starts)
    assert all(r.new_tokens == 0 for r in requests)
    assert requests.notes["sessions"] == 40


def test_actual_history_says_how_many_tokens_are_new() -> None:
    nine = SESSIONS | {"num_sessions": 9}
    recorded, actual = (drawn(request_rate=2.0, sessions=nine | {"history": kind}) for kind in ("recorded", "actual"))
    assert [r.prompt_token_ids for r in actual] == [r.prompt_token_ids for r in recorded]
    for talk in conversations(actual):
        assert talk[0].new_tokens == 0
        for before, after in itertools.pairwise(talk):
            assert after.new_tokens == len(after.prompt_token_ids) - len(before.prompt_token_ids) - before.max_tokens


def test_sessions_are_repeatable_and_survive_the_file(tmp_path: Any) -> None:
    load = {"request_rate": 2.0, "sessions": SESSIONS | {"num_sessions": 6, "history": "actual"}}
    assert drawn(**load) == drawn(**load) != drawn(seed=6, **load)
    write_requests(tmp_path / "r.jsonl", drawn(**load))
    assert read_requests(tmp_path / "r.jsonl") == drawn(**load)
    closed = drawn(None, 3, mode="closed", concurrency=3, sessions=SESSIONS | {"num_sessions": 6})
    assert all(r.arrival_s is None for r in closed)


def test_a_conversation_too_long_is_refused_or_scaled() -> None:
    many = SESSIONS | {"num_sessions": 4, "turns": 40}
    with pytest.raises(ValueError, match="more than max_model_len 400"):
        drawn(request_rate=2.0, sessions=many)
    fitted = drawn(request_rate=2.0, sessions=many, prompts=PROMPTS | {"length_scale": "auto"})
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in fitted) <= 400
    assert fitted.notes["length_scale"] < 1


def test_turns_and_think_times_are_of_their_distributions() -> None:
    rng = np.random.default_rng(1)
    assert Counter(draw_turns(Turns.model_validate([2, 5]), 400, rng).tolist()) == dict.fromkeys(range(2, 6), 100)
    even = draw_thinks(Think.model_validate([1.0, 3.0]), 500, rng)
    assert stats.kstest(even, stats.uniform(1, 2).cdf).pvalue > 0.99  # even quantiles fit better than any sample
    waits = draw_thinks(Think.model_validate({"exponential": 2.0}), 500, rng)
    assert stats.kstest(waits, stats.expon(scale=2).cdf).pvalue > 0.99
    assert draw_thinks(Think.model_validate(0.25), 3, rng).tolist() == [0.25] * 3


def test_history_is_spliced_where_the_server_told_it() -> None:
    first = RequestSpec(0, "a", (1, 2), None, 3, session=0)
    second = RequestSpec(1, "a", (1, 2, 70, 71, 72, 5, 6), None, 2, session=0, turn=1, new_tokens=2)
    third = RequestSpec(2, "a", (*second.prompt_token_ids, 80, 81, 9), None, 1, session=0, turn=2, new_tokens=1)

    def answered(request: RequestSpec, ids: list[int], told: int) -> Sample:
        return Sample(request, 0, 0.0, 0.0, 1.0, Completion(token_ids=ids, output_tokens=told))

    short = with_history(second, first, answered(first, [7], 1))  # it stopped early
    assert short.prompt_token_ids == (1, 2, 7, 5, 6)
    assert with_history(third, second, answered(short, [8, 8], 2)).prompt_token_ids == (1, 2, 7, 5, 6, 8, 8, 9)
    assert with_history(third, second, answered(short, [8], 2)).prompt_token_ids == (1, 2, 7, 5, 6, 80, 81, 9)
    assert with_history(second, first, answered(first, [], 3)).prompt_token_ids == second.prompt_token_ids


def test_time_says_how_many_requests_there_are() -> None:
    timed = drawn(request_rate=2.0, duration_s=50)
    assert timed[-1].arrival_s < 50
    assert abs(len(timed) - 100) < 40
    talks = drawn(request_rate=2.0, duration_s=20, sessions=SESSIONS)
    assert max(t[0].arrival_s for t in conversations(talks)) < 20
    steps = [{"rate": 2, "seconds": 10}, {"rate": 6, "seconds": 10}]
    stepped = drawn(None, arrivals="step", steps=steps)
    assert stepped.notes["plateaus"] == [[0, 10, 2], [10, 20, 6]]
    late = sum(r.arrival_s >= 10 for r in stepped)
    assert late > 1.5 * (len(stepped) - late)


def test_ramp_all_at_once_and_gamma() -> None:
    ramp = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    whole = drawn(None, num_requests=100, **ramp)
    last = whole[-1].arrival_s  # 5 requests/s in the mean: the ramp is over after 20 s
    assert whole.notes["plateaus"] == ([] if last <= 20 else [[20, last, 9]])
    held = drawn(None, duration_s=30, ramp_up_s=10, **ramp)
    assert held.notes["plateaus"] == [[10, 30, 9]]
    assert {r.arrival_s for r in drawn(math.inf, request_rate="inf", num_requests=9)} == {0.0}
    bursts = [r.arrival_s for r in drawn(request_rate=2.0, num_requests=500, arrivals="gamma", burstiness=0.2)]
    gaps = np.diff(bursts)
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(0.2), rel=0.2)


def spec(**fields: Any) -> LoadSpec:
    base = {"base_url": "http://h:1", "model": "m", "mode": "closed", "concurrency": 1, "requests_file": "r"}
    return LoadSpec.model_validate(base | {"out_dir": "o", "timeout_s": 9} | fields)


def parts(request: RequestSpec, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    head, _, body = http_request(spec(**fields), Address("h", 1, "/p"), request).partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_the_request_speaks_the_servers_dialect() -> None:
    request = RequestSpec(0, "a", (5, 6), None, 3)
    head, body = parts(request)
    assert head.startswith(b"POST /p/v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"uthorization" not in head
    assert body["prompt"] == [5, 6]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["return_token_ids"], body["stream"]) == (True, True, True)
    other = {"stream_options": False, "ignore_eos": False, "return_token_ids": False, "endpoint": "/generate"}
    head, body = parts(request, dialect=other | {"extra_body": {"min_tokens": 3}})
    assert head.startswith(b"POST /p/generate HTTP/1.1")
    assert body.keys() == {"model", "prompt", "max_tokens", "temperature", "stream", "min_tokens"}
    with pytest.raises(ValueError, match="request 0 is a prompt of token ids, which this server does not take"):
        parts(request, dialect={"token_id_prompts": False})
    assert parts(RequestSpec(0, "a", (5,), "five", 3), dialect={"token_id_prompts": False})[1]["prompt"] == "five"


def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    request = RequestSpec(0, "a", (5, 6), None, 3)
    monkeypatch.setenv("SOME_KEY", " secret \n")
    assert b"\r\nAuthorization: Bearer secret\r\n" in parts(request, api_key_env="SOME_KEY")[0]
    for bad, words in (("", "holds no key"), ("a\rb", "line break"), ("a\x7fb", "no HTTP header can")):
        monkeypatch.setenv("SOME_KEY", bad)
        with pytest.raises(ValueError, match=words) as caught:
            parts(request, api_key_env="SOME_KEY")
        assert not bad or bad not in str(caught.value)
