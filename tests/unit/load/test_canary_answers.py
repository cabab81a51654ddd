"""A canary on the wire and back: how it is asked for, when its answer is wrong, what is kept of that."""

from __future__ import annotations

import dataclasses
import json

import pytest

from kvbench.load.completion import Completion, judge
from kvbench.load.multi.merge import ClockMap, Reading, samples_from_bytes, samples_to_bytes
from kvbench.load.samples import KV_FACTS, Sample, write_wrong_answers, wrong_answers, wrong_words
from kvbench.requests.canaries import as_request
from kvbench.requests.request import RequestSpec
from tests.support.canaries import canary
from tests.unit.load.test_body import parts

ONE = canary("copy-1", (5, 6, 7), (8, 9, 3), kind="copy")
FACTS = {
    "request_id": "abc", "first_step": 3, "last_step": 9, "pages": [4, 1], "page_size": 4, "cached_tokens": 4,
    "preemptions": 1, "recomputed_tokens": 2, "swapped_pages": 0, "forked": False,
}  # fmt: skip
NOTES = {"canaries": {"of": "tiny", "seed": 5, "repeat": 2}}


def sample(ids=(8, 9, 3), text="", answers=1, index=4, **fields) -> Sample:
    request = as_request(ONE, index, answers=answers)
    done = Completion(token_ids=list(ids), text=text, output_tokens=len(ids), **fields)
    return Sample(request, 0, 0.0, 0.1, 1.0, done)


def kept(path, *samples, notes=NOTES):
    write_wrong_answers(path / "w.jsonl", [(s.request, s.completion) for s in samples], notes)
    return [json.loads(line) for line in (path / "w.jsonl").read_text().splitlines()]


def test_a_canary_is_asked_for_greedily_to_its_end_and_for_its_kv_and_other_requests_are_not():
    how = {"temperature": 0.7, "ignore_eos": False}
    head, body = parts(as_request(ONE, 0), **how)
    assert (body["temperature"], body["ignore_eos"], body["prompt"], body["max_tokens"]) == (0.0, True, [5, 6, 7], 3)
    assert b"\r\nx-kvbench-kv-facts: 1\r\n" in head and "n" not in body
    assert b"\r\nAccept-Encoding: identity\r\n" in head
    assert parts(as_request(ONE, 0, answers=2), **how)[1]["n"] == 2
    head, body = parts(RequestSpec(0, "a", (5, 6, 7), None, 3), **how)
    assert (body["temperature"], body["ignore_eos"]) == (0.7, False) and b"kv-facts" not in head
    assert "ignore_eos" not in parts(as_request(ONE, 0), dialect={"ignore_eos": False})[1]


@pytest.mark.parametrize(
    ("got", "wrong"),
    [
        (sample(), []),
        (sample((8, 4, 3)), [(0, 1)]),
        (sample((8, 9)), [(0, 0)]),  # cut short: not all ids are known, and the text is another
        (sample((8, 9, 3, 8, 9, 3), answers=2), []),
        (sample((8, 9, 3, 8, 9, 4), answers=2), [(1, 2)]),
        (sample((1, 9, 3, 8, 9, 4), answers=2), [(0, 0), (1, 2)]),
        (sample((), "8 9 3"), []),
        (sample((), "8 9 4"), [(0, 4)]),
        (sample((8, 4, 3), error_kind="timeout"), []),  # failed, and so neither right nor wrong
        (dataclasses.replace(sample((1, 1, 1)), request=RequestSpec(0, "a", (5,), None, 3)), []),
    ],
)
def test_which_answers_are_wrong_and_from_where_on(got, wrong):
    found = [(number, each.position) for number, each in wrong_answers(got.request, got.completion)]
    assert found == wrong
    row = got.to_row(0.0)
    assert bool(row["canary_wrong"]) == bool(wrong) and row["ok"] == got.completion.ok
    assert row["canary"] == got.request.canary and row["canary_wrong"] == wrong_words(got.request, got.completion)


def test_what_is_kept_of_a_wrong_answer(tmp_path):
    told = [(1, json.dumps(FACTS | {"page_size": 16})), (0, json.dumps(FACTS))]
    first, second = kept(tmp_path, sample((8, 1, 3, 8, 9, 4), answers=2, index=9, kv_facts=told), sample())
    assert {name: first[name] for name in KV_FACTS} == FACTS and second["page_size"] == 16
    assert (first["canary"], first["kind"], first["index"], first["prompt_tokens"]) == ("copy-1", "copy", 9, 3)
    assert (first["answer"], first["position"], first["by"]) == (0, 1, "tokens")
    assert (first["expected_token_ids"], first["got_token_ids"]) == ([8, 9, 3], [8, 1, 3])
    assert (second["answer"], second["position"], second["got_token_ids"]) == (1, 2, [8, 9, 4])
    assert (first["seed"], first["repeat"]) == (5, 2)


def test_other_servers_tell_nothing_of_their_kv_and_right_answers_leave_no_file(tmp_path):
    (row,) = kept(tmp_path, sample((), "8 no"), notes={})
    assert all(row[name] is None for name in (*KV_FACTS, "seed", "repeat", "got_token_ids")) and row["got"] == "8 no"
    right = sample()
    write_wrong_answers(tmp_path / "none.jsonl", [(right.request, right.completion)], NOTES)
    assert not (tmp_path / "none.jsonl").exists()


def events(*choices: dict) -> list[bytes]:
    usage = {"usage": {"prompt_tokens": 3, "completion_tokens": 3}, "choices": []}
    told = [*({"choices": [each]} for each in choices), usage]
    body = b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in told) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    return [head + body]


@pytest.mark.parametrize(("facts", "known"), [(FACTS, FACTS), ("no", None), (None, None), ({"pages": 10**40}, ...)])
def test_the_facts_come_in_the_last_event_and_survive_the_way_from_a_worker(facts, known):
    choice = {"index": 0, "text": "x", "token_ids": [8, 9, 3], "finish_reason": "length", "kv_facts": facts}
    done = judge([1.0], events(choice), 3)
    assert done.ok, done.error
    one = dataclasses.replace(sample(), completion=done)
    same = ClockMap((Reading(0.0, 0.0, 1e-4),), True)
    (back,) = samples_from_bytes(samples_to_bytes([one]), same, {4: one.request})
    if known is None:
        assert not back.completion.kv_facts
    else:
        ((number, text),) = back.completion.kv_facts
        assert number == 0 and json.loads(text) == facts
