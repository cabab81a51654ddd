"""What a workload's arrivals and sessions become: requests drawn before the run."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from scipy import stats

from kvbench.requests.build import build_requests
from kvbench.requests.conversations import draw_thinks, draw_turns
from kvbench.requests.request import RequestList, conversations, read_requests, write_requests
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
    assert starts == sorted(starts) and requests.notes["sessions"] == 40
    assert all(r.new_tokens == 0 for r in requests)


def test_actual_history_says_how_many_tokens_are_new(tmp_path: Any) -> None:
    nine = SESSIONS | {"num_sessions": 9}
    recorded, actual, again, other = (
        drawn(request_rate=2.0, seed=seed, sessions=nine | {"history": kind})
        for kind, seed in (("recorded", 5), ("actual", 5), ("actual", 5), ("actual", 6))
    )
    assert [r.prompt_token_ids for r in actual] == [r.prompt_token_ids for r in recorded]
    for talk in conversations(actual):
        assert talk[0].new_tokens == 0
        for before, after in itertools.pairwise(talk):
            assert after.new_tokens == len(after.prompt_token_ids) - len(before.prompt_token_ids) - before.max_tokens
    assert actual == again != other
    write_requests(tmp_path / "r.jsonl", actual)
    assert read_requests(tmp_path / "r.jsonl") == actual
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
