"""Requests drawn before the run: repeatable, exact in their shares, shared where they say so."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from kvbench.requests.build import build_requests
from kvbench.requests.draw import draw_lengths, largest_remainder, random_tokens
from kvbench.requests.request import RequestList, RequestSpec, distinct_prefixes, read_requests, write_requests
from kvbench.workload.load_section import Length, LoadConfig

ROOT = Path(__file__).resolve().parents[3]
CLASSES = [
    {"name": "chat", "share": 0.5, "prompt_tokens": [16, 64], "output_tokens": [4, 9]},
    {"name": "question", "share": 0.35, "prompt_tokens": 100, "output_tokens": 5},
    {"name": "document", "share": 0.15, "prompt_tokens": [300, 400], "output_tokens": 6},
]


def mix(**changes: object) -> LoadConfig:
    prompts = {
        "kind": "synthetic",
        "shared_prefix": {"tokens": 40, "share": 0.5, "families": 3},
        "classes": CLASSES,
    }
    base = {"mode": "closed", "concurrency": [2, 8], "num_requests": 60, "prompts": prompts}
    return LoadConfig.model_validate(base | changes)


def build(load: LoadConfig, **changes: object) -> RequestList:
    return build_requests(
        load, **({"vocab_size": 8192, "max_model_len": 1024, "seed": 5, "repeat": 0, "concurrency": 2} | changes)
    )


def test_same_seed_same_requests() -> None:
    assert build(mix()) == build(mix())


@pytest.mark.parametrize("change", [{"seed": 6}, {"repeat": 1}, {"concurrency": 8}])
def test_other_seed_repeat_or_load_shares_no_content(change: dict) -> None:
    ours, theirs = build(mix()), build(mix(), **change)
    first = {r.prompt_token_ids[:16] for r in ours}
    assert not first & {r.prompt_token_ids[:16] for r in theirs}


def test_every_repeat_has_the_same_mix_of_lengths() -> None:
    def lengths(repeat: int) -> Counter:
        return Counter((r.cls, len(r.prompt_token_ids) - r.prefix_tokens) for r in build(mix(), repeat=repeat))

    assert lengths(0) == lengths(1) == lengths(2)


def test_shares_are_exact_and_the_order_is_shuffled() -> None:
    requests = build(mix())
    assert Counter(r.cls for r in requests) == {"chat": 30, "question": 21, "document": 9}
    assert sum(r.prefix_tokens > 0 for r in requests) == 30
    assert [r.cls for r in requests] != sorted(r.cls for r in requests)
    shared = Counter(r.cls for r in requests if r.prefix_tokens)
    assert all(abs(shared[c] - n / 2) < 1 for c, n in {"chat": 30, "question": 21, "document": 9}.items())


def test_shared_prefix_is_really_shared_and_nothing_else_is() -> None:
    requests = build(mix())
    prefixes = distinct_prefixes(requests)
    assert len(prefixes) == 3
    assert all(len(p) == 40 for p in prefixes)
    families = Counter(r.prompt_token_ids[:40] for r in requests if r.prefix_tokens)
    assert set(families) == set(prefixes)
    assert max(families.values()) - min(families.values()) <= 1
    bodies = [r.prompt_token_ids[r.prefix_tokens :][:16] for r in requests]
    assert len(set(bodies)) == len(bodies)


def test_prefixes_of_several_lengths_share_out_the_prompts() -> None:
    groups = [
        {"tokens": 40, "share": 0.5, "families": 3},
        {"tokens": 8, "share": 0.3},
        {"tokens": 64, "share": 0.1, "families": 2},
    ]
    requests = build(mix(prompts={"kind": "synthetic", "shared_prefix": groups, "classes": CLASSES}))
    assert Counter(r.prefix_tokens for r in requests) == {40: 30, 8: 18, 64: 6, 0: 6}
    families = Counter((r.prefix_tokens, r.prompt_token_ids[: r.prefix_tokens]) for r in requests if r.prefix_tokens)
    assert sorted((length, uses) for (length, _), uses in families.items()) == [
        (8, 18), (40, 10), (40, 10), (40, 10), (64, 3), (64, 3),
    ]  # fmt: skip
    for cls, total in {"chat": 30, "question": 21, "document": 9}.items():
        had = Counter(r.prefix_tokens for r in requests if r.cls == cls)
        assert all(abs(had[g["tokens"]] - g["share"] * total) < 1.01 for g in groups)
    one = build(mix(prompts={"kind": "synthetic", "shared_prefix": groups[:1], "classes": CLASSES}))
    assert one == build(mix())  # a list of one is that one


def test_shares_of_prefixes_that_fill_everything_leave_nobody_out() -> None:
    groups = [{"tokens": 5 + i, "share": share} for i, share in enumerate((1 / 3, 1 / 3, 1 / 3))]
    for number in (8, 20, 61):
        requests = build(
            mix(prompts={"kind": "synthetic", "shared_prefix": groups, "classes": CLASSES}, num_requests=number)
        )
        had = Counter(r.prefix_tokens for r in requests)
        assert had[0] == 0 and all(abs(had[g["tokens"]] - number / 3) < 1 for g in groups)


@pytest.mark.parametrize("load", [{}, {"mode": "open", "concurrency": None, "request_rate": 4.0}])
def test_priorities_follow_the_class_and_change_nothing_else(load: dict, tmp_path: Path) -> None:
    at = {"concurrency": None, "rate": 4.0} if load else {}
    classes = [item | {"priority": i} for i, item in enumerate(CLASSES)]
    urgent = build(mix(**load, prompts={"kind": "synthetic", "classes": classes}), **at)
    plain = build(mix(**load, prompts={"kind": "synthetic", "classes": CLASSES}), **at)
    assert {(r.cls, r.priority) for r in urgent} == {("chat", 0), ("question", 1), ("document", 2)}
    assert [dataclasses.replace(r, priority=0) for r in urgent] == plain
    write_requests(tmp_path / "r.jsonl", urgent)
    assert read_requests(tmp_path / "r.jsonl") == urgent


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
    assert drawn.min() >= 7
    assert drawn.max() <= 7930


def test_auto_scale_fits_the_model_and_is_reported() -> None:
    wide = [{"name": "a", "share": 1.0, "prompt_tokens": [100, 5000], "output_tokens": [10, 1000]}]
    load = mix(prompts={"kind": "synthetic", "classes": wide, "length_scale": "auto"})
    requests = build(load)
    assert max(len(r.prompt_token_ids) + r.max_tokens for r in requests) <= 1024
    assert requests.notes["length_scale"] == pytest.approx(1024 / 6000)


def test_request_that_cannot_fit_is_refused_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"max_model_len 256"):
        build(mix(), max_model_len=256)


def test_stored_requests_come_back(tmp_path: Path) -> None:
    requests = RequestList(build(mix()), {"scale": 0.5})
    write_requests(tmp_path / "r.jsonl", requests)
    again = read_requests(tmp_path / "r.jsonl")
    assert again == requests
    assert again.notes == {"scale": 0.5}
    (tmp_path / "r.jsonl").write_text('{"index": 1}\n')
    with pytest.raises(ValueError, match="line 1"):
        read_requests(tmp_path / "r.jsonl")


def test_equal_token_ids_are_one_object_and_negative_ones_none(tmp_path: Path) -> None:
    """A long trace has 10^8 tokens, of 36 bytes each as ints of their own."""
    large = 1 << 20  # larger than any vocabulary: kept as it is
    rows = [(70_000, 1000, 70_000, 0), (1000, 70_000), (large, 5), ()]
    write_requests(tmp_path / "r.jsonl", [RequestSpec(i, "a", ids, None, 1) for i, ids in enumerate(rows)])
    read = [r.prompt_token_ids for r in read_requests(tmp_path / "r.jsonl")]
    assert read == rows
    assert read[0][0] is read[0][2] is read[1][1]
    drawn = random_tokens(50_000, 40_000, np.random.default_rng(0))
    assert len({id(token) for token in drawn}) == len(set(drawn)) < 40_000
    (tmp_path / "r.jsonl").write_text('{"index": 0, "prompt_token_ids": [5, -1], "max_tokens": 1}\n')
    with pytest.raises(ValueError, match=r"line 1 is not a request \(token id -1 is negative\)"):
        read_requests(tmp_path / "r.jsonl")


def sonnets(**changes: object) -> LoadConfig:
    prompts = {
        "kind": "text",
        "file": "workloads/text/sonnets.txt",
        "prompt_tokens": [50, 80],
        "output_tokens": 8,
        "shared_prefix_lines": 4,
    }
    return mix(num_requests=12, prompts=prompts | changes)


def test_text_prompts_are_the_text() -> None:
    requests = build(sonnets())
    tokenizer = Tokenizer.from_file(str(ROOT / "engine/tokenizer/bpe8k/tokenizer.json"))
    lines = (ROOT / "workloads/text/sonnets.txt").read_text().splitlines()
    assert len(distinct_prefixes(requests)) == 1
    shared = tokenizer.decode(list(distinct_prefixes(requests)[0])).splitlines()
    assert len(shared) == 4
    assert "\n".join(shared) in "\n".join(line for line in lines if line)
    for request in requests:
        body = tokenizer.decode(list(request.prompt_token_ids[request.prefix_tokens :])).splitlines()
        assert all(line in lines for line in body[:-1])  # the last line is cut
        assert 50 <= len(request.prompt_token_ids) - request.prefix_tokens <= 80


def test_prompts_sent_as_text_keep_their_ids_for_the_checks(tmp_path: Path) -> None:
    load = sonnets(send_text=True)
    requests, plain = build(load), build(sonnets())
    tokenizer = Tokenizer.from_file(str(ROOT / "engine/tokenizer/bpe8k/tokenizer.json"))
    assert [r.prompt_token_ids for r in requests] == [r.prompt_token_ids for r in plain]
    assert all(r.prompt == tokenizer.decode(list(r.prompt_token_ids)) for r in requests)
    assert distinct_prefixes(requests) == distinct_prefixes(plain) != []
    write_requests(tmp_path / "r.jsonl", requests)
    assert read_requests(tmp_path / "r.jsonl") == requests
    with pytest.raises(ValueError, match="more than max_model_len 90"):
        build(load, max_model_len=90)


def test_text_needs_a_vocabulary_that_holds_it() -> None:
    for size in (1000, 128256):  # the shipped tokenizer is the model's own only where it is as large
        with pytest.raises(ValueError, match=rf"8192 ids but the model {size}.*load\.prompts\.tokenizer"):
            build(sonnets(), vocab_size=size)
    chosen = sonnets(tokenizer="engine/tokenizer/bpe8k")
    with pytest.raises(ValueError, match="8192 ids but the model only 1000"):
        build(chosen, vocab_size=1000)
    assert build(chosen, vocab_size=128256) == build(sonnets())
    with pytest.raises(ValueError, match=r"nowhere\.txt does not exist"):
        build(sonnets(file="nowhere.txt"))


def test_open_loop_requests_carry_their_arrivals() -> None:
    load = mix(mode="open", concurrency=None, request_rate=[2.0, 4.0])
    slow, again = (build(load, concurrency=None, rate=2.0) for _ in range(2))
    fast = build(load, concurrency=None, rate=4.0)
    assert slow == again
    times = [r.arrival_s for r in slow]
    assert times == sorted(times)
    assert times[0] == 0
    assert times[-1] > fast[-1].arrival_s
    assert all(r.arrival_s is None for r in build(mix()))
