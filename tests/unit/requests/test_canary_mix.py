"""Canaries among a load's requests: how many, where, the others as they were; files and sets that do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter

import pytest

from kvbench.requests import canaries as canary_sets
from kvbench.requests.build import LoadDraw, build_requests
from kvbench.requests.canaries import CanarySet, canaries_of, first_difference, fitting, read_canaries, write_canaries
from kvbench.requests.prefix_hits import predict_hits
from kvbench.requests.request import RequestSpec, conversations, read_requests, write_requests
from kvbench.workload.load_section import LoadConfig
from tests.support.canaries import canary

BEGIN = tuple(range(20, 40))
SET = CanarySet("tiny", ("f00d",), tuple(canary(f"c{i}", (*BEGIN, 50 + i), (60 + i, 7, 8)) for i in range(5)))
CLASSES = [{"name": "a", "prompt_tokens": [4, 60], "output_tokens": [3, 9]}]
PROMPTS = {"kind": "synthetic", "classes": CLASSES, "shared_prefix": {"tokens": 16, "share": 0.5}}
CLOSED = {"concurrency": [4], "num_requests": 36}
OPEN = {"mode": "open", "request_rate": [5], "num_requests": 36}
TALK = {"mode": "open", "request_rate": [5], "sessions": {"num_sessions": 12, "turns": 3}}


def load(share: float | None = 0.25, **changes: object) -> LoadConfig:
    section = {"prompts": PROMPTS, "canaries": None if share is None else {"share": share}, **changes}
    return LoadConfig.model_validate(section)


def build(section: LoadConfig, canaries: CanarySet | None = SET, **changes: object) -> list[RequestSpec]:
    at = {"rate": 5.0} if section.mode == "open" else {"concurrency": 4}
    sizes = {"vocab_size": 8192, "max_model_len": 512, "seed": 1, "repeat": 2}
    return build_requests(LoadDraw(section, canaries=canaries, **sizes, **at, **changes))


@pytest.mark.parametrize("kind", [CLOSED, OPEN, TALK], ids=["closed", "open", "conversations"])
def test_the_other_requests_are_the_same_with_and_without_canaries(kind):
    without, mixed = build(load(None, **kind)), build(load(**kind))
    others = [r for r in mixed if r.canary is None]
    assert [dataclasses.replace(r, index=0) for r in others] == [dataclasses.replace(r, index=0) for r in without]
    assert [r.index for r in mixed] == list(range(48)) and len(without) == 36
    assert mixed == build(load(**kind)) and conversations(mixed)


def test_every_canary_is_sent_before_one_is_sent_again_and_one_in_four_is_forked():
    mine = [r for r in build(load(**CLOSED)) if r.canary]
    assert sorted(Counter(r.canary for r in mine).values()) == [2, 2, 2, 3, 3]
    assert Counter(r.n for r in mine) == {1: 9, 2: 3}
    known = {each.canary_id: each for each in SET.canaries}
    for each in mine:
        one = known[each.canary]
        assert (each.prompt_token_ids, each.expected_token_ids) == (one.prompt_token_ids, one.answer_token_ids)
        assert each.max_tokens == 3 and each.cls == "canary-passkey" and each.prompt is None
    assert len({r.index for r in mine} & set(range(12))) < 12, "they lie together at the beginning"


@pytest.mark.parametrize("kind", [OPEN, TALK], ids=["open", "conversations"])
def test_in_open_loop_each_canary_arrives_with_another_request(kind):
    mixed = build(load(**kind))
    arrivals = {r.arrival_s for r in mixed if r.canary is None and not r.turn}
    assert {r.arrival_s for r in mixed if r.canary} <= arrivals and None not in arrivals


def test_a_small_share_sends_one_and_a_load_without_canaries_none():
    assert sum(r.canary is not None for r in build(load(0.001, **CLOSED))) == 1
    assert not any(r.canary for r in build(load(None, **CLOSED)))
    assert not any(r.canary for r in build(load(**CLOSED), canaries=None))


def test_stored_requests_keep_what_the_answer_should_be(tmp_path):
    made = build(load(**CLOSED))
    write_requests(tmp_path / "r.jsonl", made)
    assert read_requests(tmp_path / "r.jsonl") == made
    assert read_requests(tmp_path / "r.jsonl").notes["canaries"] == {"of": "tiny", "seed": 1, "repeat": 2}


def test_the_possible_prefix_hits_count_what_canaries_share_and_repeat():
    """12 canaries with 16 tokens in common and a full page each: all but the first may find it."""
    none, some = (predict_hits(build(load(s, **CLOSED)), cache_state="cold", page_size=16) for s in (None, 0.25))
    assert some.high - none.high == 11 * 16
    primed = [predict_hits(build(load(s, **CLOSED)), cache_state="primed", page_size=16, total_pages=10**6)
              for s in (None, 0.25)]  # fmt: skip
    assert primed[0].low == primed[1].low > 0


@pytest.mark.parametrize(
    ("changes", "words"), [({"vocab_size": 64}, "token id 64"), ({"max_model_len": 23}, "the shortest has 24 tokens")]
)
def test_a_set_of_another_model_or_one_of_which_nothing_fits_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        fitting(SET, **({"vocab_size": 65, "max_model_len": 24} | changes))
    assert fitting(SET, 65, 24) == SET.canaries


def test_the_file_the_name_of_a_set_or_the_models_own(tmp_path, monkeypatch):
    monkeypatch.setattr(canary_sets, "SHIPPED", tmp_path)
    write_canaries(tmp_path / "tiny.jsonl", SET)
    write_canaries(tmp_path / "mine.x", dataclasses.replace(SET, model="mine"))

    def found(file: str | None, model: str) -> str:
        section = load(**CLOSED)
        named = section.model_copy(update={"canaries": section.canaries.model_copy(update={"file": file})})
        return canaries_of(named, model).model

    assert found(None, "some/where/tiny") == found(None, "tiny") == found("tiny", "other") == "tiny"
    assert found(str(tmp_path / "mine.x"), "tiny") == "mine"
    assert canaries_of(load(None, **CLOSED), "nothing") is None
    for file, model, words in ((None, "huge", "'huge'"), ("gone.jsonl", "tiny", "gone.jsonl")):
        with pytest.raises(ValueError, match=words):
            found(file, model)


@pytest.mark.parametrize("share", [0, 0.51, -1, "a"])
def test_a_share_beyond_a_half_is_refused(share):
    with pytest.raises(ValueError, match="share"):
        load(share, **CLOSED)
    assert load(0.5, **CLOSED).canaries.share == 0.5


def test_a_damaged_file_is_refused(tmp_path):
    path = tmp_path / "c.jsonl"
    write_canaries(path, SET)
    assert read_canaries(path) == SET
    lines = path.read_text().splitlines()
    head = json.dumps(json.loads(lines[0]) | {"format": "kvbench-canaries/9"})
    for broken in (lines[:1], [head, *lines[1:]], [lines[0], lines[1][:-5]], []):
        path.write_text("\n".join(broken))
        with pytest.raises(ValueError, match="canar"):
            read_canaries(path)


@pytest.mark.parametrize(
    ("ids", "text", "position"),
    [
        ([1, 2, 3], "", None), ([1, 2, 3, 9], "", None), ([1, 9, 3], "", 1), ([1, 2], "", 2), ([], "", 0),
        (None, " one two three", None), (None, "one two threescore", None), (None, "one two", 7), (None, "on the", 2),
    ],
)  # fmt: skip
def test_tokens_decide_where_they_are_told_and_texts_elsewhere(ids, text, position):
    found = first_difference((1, 2, 3), "one two three ", ids, text)
    assert (found and found.position) == position
