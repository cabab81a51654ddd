"""Requests drawn before the run: repeatable, exact in their shares, shared where they say so; arrivals and sessions."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tokenizers import Tokenizer

from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.draw import draw_lengths, draw_thinks, draw_turns, largest_remainder, random_tokens
from kvbench.requests.request import (
    RequestList,
    RequestSpec,
    conversations,
    distinct_prefixes,
    read_requests,
    write_requests,
)
from kvbench.workload.load_section import LoadConfig
from kvbench.workload.prompts_section import Length, Think, Turns

ROOT = Path(__file__).resolve().parents[3]
CLASSES = [
    {"name": "chat", "share": 0.5, "prompt_tokens": [16, 64], "output_tokens": [4, 9]},
    {"name": "question", "share": 0.35, "prompt_tokens": 100, "output_tokens": 5},
    {"name": "document", "share": 0.15, "prompt_tokens": [300, 400], "output_tokens": 6},
]
OF_CLASS = {"chat": 30, "question": 21, "document": 9}  # of 60
PREFIX = {"tokens": 40, "share": 0.5, "families": 3}
OPEN = {"mode": "open", "concurrency": None}


def mix(prefix: object = PREFIX, classes: list = CLASSES, scale: object = 1.0, **changes: object) -> LoadConfig:
    prompts = {"kind": "synthetic", "shared_prefix": prefix, "classes": classes, "length_scale": scale}
    base = {"mode": "closed", "concurrency": [2, 8], "num_requests": 60, "prompts": prompts}
    return LoadConfig.model_validate(base | changes)


def build(load: LoadConfig, **changes: object) -> RequestList:
    at = {"concurrency": None} if "rate" in changes else {"concurrency": 2}
    return build_requests(
        LoadDraw(load, **({"vocab_size": 8192, "max_model_len": 1024, "seed": 5, "repeat": 0} | at | changes))
    )


def stored(requests: list[RequestSpec], tmp_path: Path) -> RequestList:
    write_requests(tmp_path / "r.jsonl", requests)
    return read_requests(tmp_path / "r.jsonl")


@pytest.mark.parametrize("change", [{"seed": 6}, {"repeat": 1}, {"concurrency": 8}])
def test_other_seed_repeat_or_load_shares_no_content_but_the_same_mix_of_lengths(change: dict) -> None:
    ours, theirs = build(mix()), build(mix(), **change)
    assert ours == build(mix())
    assert not {r.prompt_token_ids[:16] for r in ours} & {r.prompt_token_ids[:16] for r in theirs}
    lengths = [Counter((r.cls, len(r.prompt_token_ids) - r.prefix_tokens) for r in some) for some in (ours, theirs)]
    assert lengths[0] == lengths[1]


def test_shares_are_exact_and_prefixes_are_really_shared_and_nothing_else_is() -> None:
    requests = build(mix())
    assert Counter(r.cls for r in requests) == OF_CLASS
    assert [r.cls for r in requests] != sorted(r.cls for r in requests)
    shared = Counter(r.cls for r in requests if r.prefix_tokens)
    assert shared.total() == 30 and all(abs(shared[c] - n / 2) < 1 for c, n in OF_CLASS.items())
    prefixes = distinct_prefixes(requests)
    assert [len(p) for p in prefixes] == [40] * 3
    families = Counter(r.prompt_token_ids[:40] for r in requests if r.prefix_tokens)
    assert set(families) == set(prefixes) and max(families.values()) - min(families.values()) <= 1
    bodies = [r.prompt_token_ids[r.prefix_tokens :][:16] for r in requests]
    assert len(set(bodies)) == len(bodies)


def test_prefixes_of_several_lengths_share_out_the_prompts() -> None:
    groups = [PREFIX, {"tokens": 8, "share": 0.3}, {"tokens": 64, "share": 0.1, "families": 2}]
    requests = build(mix(groups))
    assert Counter(r.prefix_tokens for r in requests) == {40: 30, 8: 18, 64: 6, 0: 6}
    families = Counter((r.prefix_tokens, r.prompt_token_ids[: r.prefix_tokens]) for r in requests if r.prefix_tokens)
    assert sorted((length, uses) for (length, _), uses in families.items()) == [
        (8, 18), (40, 10), (40, 10), (40, 10), (64, 3), (64, 3),
    ]  # fmt: skip
    for cls, total in OF_CLASS.items():
        had = Counter(r.prefix_tokens for r in requests if r.cls == cls)
        assert all(abs(had[g["tokens"]] - g["share"] * total) < 1.01 for g in groups)
    assert build(mix([PREFIX])) == build(mix())  # a list of one is that one


@pytest.mark.parametrize("number", [8, 20, 61])
def test_shares_of_prefixes_that_fill_everything_leave_nobody_out(number: int) -> None:
    requests = build(mix([{"tokens": 5 + i, "share": 1 / 3} for i in range(3)], num_requests=number))
    had = Counter(r.prefix_tokens for r in requests)
    assert had[0] == 0 and all(abs(had[5 + i] - number / 3) < 1 for i in range(3))


@pytest.mark.parametrize(("load", "at"), [({}, {}), (OPEN | {"request_rate": 4.0}, {"rate": 4.0})])
def test_priorities_and_answers_follow_the_class_and_change_nothing_else(load: dict, at: dict, tmp_path: Path) -> None:
    answers = [{"n": 4, "priority": 0}, {"n": 2, "best_of": 3, "priority": 1}, {"n": 2, "beam_width": 4, "priority": 2}]
    classes = [item | own for item, own in zip(CLASSES, answers, strict=True)]
    wide, plain = (build(mix(None, of, temperature=1.0, **load), **at) for of in (classes, CLASSES))
    assert {(r.cls, r.priority, r.width, r.chooses) for r in wide} == {
        ("chat", 0, 4, False), ("question", 1, 3, True), ("document", 2, 4, True)
    }  # fmt: skip
    assert {r.cls: r.answers | {"priority": r.priority} for r in wide} == dict(zip(OF_CLASS, answers, strict=True))
    assert [dataclasses.replace(r, n=1, best_of=None, beam_width=None, priority=0) for r in wide] == plain
    assert stored(wide, tmp_path) == wide
    assert not {"n", "best_of", "beam_width"} & {key for r in plain for key in r.to_row()}


def test_largest_remainder_matches_a_hand_count() -> None:
    assert largest_remainder([0.5, 0.35, 0.15], 7) == [4, 2, 1]  # 3.5, 2.45, 1.05: the first has the largest rest
    assert largest_remainder([1 / 3] * 3, 10) == [4, 3, 3]
    assert sum(largest_remainder([0.2, 0.3, 0.5], 101)) == 101


def test_lengths_follow_their_quantiles() -> None:
    rng = np.random.default_rng(0)
    uniform = draw_lengths(Length.model_validate([10, 19]), 1000, rng)
    assert Counter(uniform.tolist()) == dict.fromkeys(range(10, 20), 100)
    wanted = {"min": 7, "p50": 1060, "p90": 2584, "p99": 4118, "max": 7930}
    drawn = draw_lengths(Length.model_validate({"percentiles": wanted}), 20_000, rng)
    got = np.percentile(drawn, [50, 90, 99])
    assert got == pytest.approx([1060, 2584, 4118], rel=0.01)
    assert 7 <= drawn.min() < 20
    assert 7900 < drawn.max() <= 7930


def test_auto_scale_makes_everything_fit_and_without_it_too_long_a_request_is_refused() -> None:
    requests = build(mix(scale="auto"), max_model_len=256)
    assert requests.notes["length_scale"] == pytest.approx((256 - 40) / 406)
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in requests) <= 256
    with pytest.raises(ValueError, match=r"'document'.*max_model_len 256"):
        build(mix(), max_model_len=256)


def test_stored_requests_come_back(tmp_path: Path) -> None:
    requests = RequestList(build(mix()), {"scale": 0.5})
    again = stored(requests, tmp_path)
    assert again == requests and again.notes == {"scale": 0.5}
    for text, words in (
        ('{"index": 1}\n', "line 1"),
        ('{"index": 0, "prompt_token_ids": [5, -1], "max_tokens": 1}\n', "line 1 .*token id -1"),
        ("\n", "no request"),
    ):
        (tmp_path / "r.jsonl").write_text(text)
        with pytest.raises(ValueError, match=words):
            read_requests(tmp_path / "r.jsonl")


def test_equal_token_ids_are_one_object(tmp_path: Path) -> None:
    """A long trace has 10^8 tokens, of 36 bytes each as ints of their own."""
    large = 1 << 20  # larger than any vocabulary: kept as it is
    rows = [(70_000, 1000, 70_000, 0), (1000, 70_000), (large, 5), ()]
    read = [
        r.prompt_token_ids for r in stored([RequestSpec(i, "a", ids, None, 1) for i, ids in enumerate(rows)], tmp_path)
    ]
    assert read == rows and read[0][0] is read[0][2] is read[1][1]
    drawn = random_tokens(50_000, 40_000, np.random.default_rng(0))
    assert len({id(token) for token in drawn}) == len(set(drawn)) < 40_000


def sonnets(**changes: object) -> LoadConfig:
    lengths = {"prompt_tokens": [50, 80], "output_tokens": 8, "shared_prefix_lines": 4}
    return mix(num_requests=12, prompts={"kind": "text", "file": "workloads/text/sonnets.txt"} | lengths | changes)


def test_text_prompts_are_the_text_and_keep_their_ids_when_they_are_sent_as_text(tmp_path: Path) -> None:
    requests, sent = build(sonnets()), build(sonnets(send_text=True))
    tokenizer = Tokenizer.from_file(str(ROOT / "engine/tokenizer/bpe8k/tokenizer.json"))
    lines = (ROOT / "workloads/text/sonnets.txt").read_text().splitlines()
    (prefix,) = distinct_prefixes(requests)
    shared = tokenizer.decode(list(prefix)).splitlines()
    assert len(shared) == 4 and "\n".join(shared) in "\n".join(line for line in lines if line)
    for request, text in zip(requests, sent, strict=True):
        body = tokenizer.decode(list(request.prompt_token_ids[request.prefix_tokens :])).splitlines()
        assert all(line in lines for line in body[:-1])  # the last line is cut
        assert 50 <= len(request.prompt_token_ids) - request.prefix_tokens <= 80
        assert text.prompt_token_ids == request.prompt_token_ids
        assert text.prompt == tokenizer.decode(list(request.prompt_token_ids)) and request.prompt is None
    assert distinct_prefixes(sent) == [prefix] and stored(sent, tmp_path) == sent


def test_text_needs_a_file_and_a_vocabulary_that_holds_it() -> None:
    chosen = {"tokenizer": "engine/tokenizer/bpe8k"}
    for prompts, changes, words in (
        ({}, {"vocab_size": 1000}, r"8192 ids but the model 1000.*load\.prompts\.tokenizer"),
        ({}, {"vocab_size": 128256}, r"8192 ids but the model 128256.*load\.prompts\.tokenizer"),  # not the model's own
        (chosen, {"vocab_size": 1000}, "8192 ids but the model only 1000"),
        ({"tokenizer": "nowhere"}, {}, "nowhere"),
        ({"file": "nowhere.txt"}, {}, r"nowhere\.txt does not exist"),
        ({"file": "/dev/null"}, {}, "/dev/null"),
        ({"shared_prefix_lines": 10**6}, {}, "shared_prefix_lines 1000000"),
        ({"send_text": True}, {"max_model_len": 90}, "max_model_len 90"),
    ):
        with pytest.raises(ValueError, match=words):
            build(sonnets(**prompts), **changes)
    assert build(sonnets(**chosen), vocab_size=128256) == build(sonnets())


def test_open_loop_requests_carry_their_arrivals() -> None:
    load = mix(**OPEN, request_rate=[2.0, 4.0])
    slow, again, fast = (build(load, rate=rate) for rate in (2.0, 2.0, 4.0))
    times = [r.arrival_s for r in slow]
    assert slow == again and times == sorted(times)
    assert times[0] == 0 and times[-1] > fast[-1].arrival_s
    assert all(r.arrival_s is None for r in build(mix()))


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
    return build_requests(LoadDraw(config, vocab_size=500, max_model_len=400, seed=seed, rate=rate, concurrency=users))


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
    assert stored(actual, tmp_path) == actual
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
    assert timed[-1].arrival_s < 50 and abs(len(timed) - 100) < 40
    talks = drawn(request_rate=2.0, duration_s=20, sessions=SESSIONS)
    assert max(t[0].arrival_s for t in conversations(talks)) < 20
    stepped = drawn(None, arrivals="step", steps=[{"rate": 2, "seconds": 10}, {"rate": 6, "seconds": 10}])
    late = sum(r.arrival_s >= 10 for r in stepped)
    assert stepped.notes["plateaus"] == [[0, 10, 2], [10, 20, 6]] and late > 1.5 * (len(stepped) - late)


def test_ramp_all_at_once_and_gamma() -> None:
    ramp = {"arrivals": "ramp", "ramp_up_strategy": "linear", "ramp_up_start_rps": 1, "ramp_up_end_rps": 9}
    whole = drawn(None, num_requests=100, **ramp)
    last = whole[-1].arrival_s  # 5 requests/s in the mean: the ramp is over after 20 s
    assert whole.notes["plateaus"] == ([] if last <= 20 else [[20, last, 9]])
    held = drawn(None, duration_s=30, ramp_up_s=10, **ramp)
    assert held.notes["plateaus"] == [[10, 30, 9]]
    assert {r.arrival_s for r in drawn(math.inf, request_rate="inf", num_requests=9)} == {0.0}
    gaps = np.diff([r.arrival_s for r in drawn(num_requests=500, request_rate=2.0, arrivals="gamma", burstiness=0.2)])
    assert gaps.std() / gaps.mean() == pytest.approx(1 / math.sqrt(0.2), rel=0.2)
