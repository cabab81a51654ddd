"""A quirk is forgiven to the server that has it, and to nobody else."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError

from kvbench.common.schema import explain
from kvbench.load.completion import judge
from kvbench.load.http import OPENAI, Dialect
from kvbench.targets.presets import PRESETS

TRANSFORMERS = PRESETS["transformers"].dialect
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(text="", finish=None, usage=None, ids=None):
    choice = {"index": 0, "text": text} | ({"finish_reason": finish} if finish else {})
    body = {"choices": [choice | ({"token_ids": ids} if ids else {})], "object": "text_completion"}
    return f"data: {json.dumps(body | ({'usage': usage} if usage else {}))}\n\n"


def judged(events, dialect, max_tokens=3):
    """The outcome of a stream, one chunk of the transfer coding a read."""
    chunks = [f"{len(e.encode()):x}\r\n{e}\r\n".encode() for e in events]
    reads = [HEAD, *chunks, b"0\r\n\r\n"]
    return judge([float(i) for i in range(len(reads))], reads, max_tokens, dialect=dialect)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
# As transformers serve 5.23 streams: usage in the last chunk, whose text is empty, and no [DONE].
RECORDED = [event("2107"), event(" 2107"), event(" 2107"), event("", "length", USAGE)]


def test_a_stream_of_transformers_serve_succeeds_under_its_preset_only():
    outcome = judged(RECORDED, TRANSFORMERS)
    assert outcome.ok and (outcome.prompt_tokens, outcome.output_tokens) == (7, 3)
    assert outcome.chunk_times == [1.0, 2.0, 3.0] and outcome.text == "2107 2107 2107"
    assert judged(RECORDED, OPENAI).error_kind == "no_done"
    assert judged([*RECORDED, "data: [DONE]\n\n"], TRANSFORMERS).ok


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        (RECORDED[:3], "no_finish_reason"),
        ([*RECORDED[:2], event("", "length", USAGE | {"completion_tokens": 1})], "usage_mismatch"),
        ([*RECORDED[:3], event("", "length")], "no_usage"),
        ([*RECORDED[:3], event("", "length", USAGE | {"completion_tokens": 4})], "usage_mismatch"),  # over max_tokens
    ],
)
def test_the_other_signs_of_success_are_still_asked_of_it(events, kind):
    assert judged(events, TRANSFORMERS).error_kind == kind


def test_a_server_without_usage_is_counted_by_its_ids_else_by_its_chunks():
    silent = Dialect(usage=False)
    ids = [event("a", ids=[1, 2]), event("b", "length", ids=[3]), "data: [DONE]\n\n"]
    assert judged(ids, silent).output_tokens == 3
    plain = [event("a"), event("b", "length"), "data: [DONE]\n\n"]
    assert judged(plain, silent).output_tokens == 2
    assert judged(plain, OPENAI).error_kind == "no_usage"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"endpoint": "v1/completions"}, "endpoint 'v1/completions' is no path"),
        ({"extra_body": {"prompt": "x"}}, "extra_body cannot set 'prompt'"),
        ({"done_markers": False}, "did you mean `done_marker`?"),
        ({"usage": "no"}, "'no' is not true or false"),
    ],
)
def test_a_dialect_that_cannot_be_meant(fields, sentence):
    with pytest.raises(ValidationError) as error:
        Dialect.model_validate(fields)
    assert sentence in " ".join(explain(error.value, "dialect"))
