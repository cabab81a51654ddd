"""A server's own sentence, whatever shape its errors have; sentences that differ in numbers and ids are one."""

from __future__ import annotations

import json
import time
import timeit

import pytest

from kvbench.common.server_errors import error_sentence, without_numbers
from kvbench.common.text import shorten
from kvbench.metrics.model import FailureMessage, failed_words, failure_words

FULL = "Context size has been exceeded."
PAGE = b"<html>\n<head><title>x</title><style>p{}</style></head><body><h1>503 Service\nUnavailable</h1>nginx</body>"


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"error": {"message": FULL, "type": "BadRequestError", "param": None, "code": 400}}, FULL),  # OpenAI, vLLM
        ({"error": {"code": 500, "message": FULL, "type": "server_error"}}, FULL),  # llama.cpp
        ({"object": "error", "message": FULL, "type": "BadRequest", "code": 400}, FULL),  # SGLang, older vLLM
        ({"error": "Model is overloaded", "error_type": "overloaded"}, "Model is overloaded"),  # TGI
        ({"detail": "Not Found"}, "Not Found"),  # FastAPI
        ({"detail": [{"type": "missing", "loc": ["body", "model"], "msg": "Field required"}]},
         "body.model: Field required"),
        ({"error": {"code": 500}}, '{"error": {"code": 500}}'),
        ("out of memory", "out of memory"),
        (b"upstream  connect\nerror\x1b[31m\r\n", "upstream connect error [31m"),
        (PAGE, "503 Service Unavailable nginx"),
        (b"<head><title>x<body>502 Bad<br/>Gateway", "x 502 Bad Gateway"),  # no end of the head: nothing is left out
        (b"", ""),
    ],
)  # fmt: skip
def test_the_sentence_is_found_in_each_servers_errors(body: object, sentence: str) -> None:
    assert error_sentence(body if isinstance(body, bytes) else json.dumps(body).encode()) == sentence


@pytest.mark.parametrize("text", ["x" * 5000, "word " * 1000])
def test_a_long_sentence_is_cut_and_its_beginning_kept(text: str) -> None:
    for said, most in ((error_sentence(json.dumps({"error": text}).encode()), 300), (shorten(text, 120), 120)):
        assert most - 6 <= len(said) <= most and said.startswith(text[:100]) and said.endswith(" ...")


@pytest.mark.parametrize("piece", [b"<script", b"<", b"<head>", b"<style></script>", b"</"])
def test_a_page_takes_time_in_proportion_to_its_length(piece: bytes) -> None:
    def taken(body: bytes) -> float:
        return min(timeit.repeat(lambda: error_sentence(body), timer=time.thread_time, number=1, repeat=3))

    assert taken(b"<" + piece * 20_000) < 60 * taken(PAGE.replace(b"nginx", b"nginx " * 2_700)) + 0.01


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("request 7 of 1,024 tokens", "request 12 of 900.5 tokens", True),
        ("cmpl-9f8e7d10 was aborted", "cmpl-01ab34cd was aborted", True),
        ("no room in 3f2c4a6e-0b1d-4c2a-9e4f-aa00bb11cc22", "no room in 9f2c4a6e-1b1d-4c2a-9e4f-aa00bb11cc23", True),
        ("the queue is full", "the cache is full", False),
        ("request 7 is too long", "request 7 is too short", False),
    ],
)
def test_sentences_that_differ_in_numbers_and_ids_are_one(one: str, other: str, same: bool) -> None:
    assert (without_numbers(one) == without_numbers(other)) == same


def test_failures_have_their_count_of_the_requests_sent() -> None:
    one = {"server_error": FailureMessage(message=FULL, requests=32)}
    two = one | {"timeout": FailureMessage(message="late", requests=3)}
    assert failure_words(one, 52) == f'32 of 52: "{FULL}"'
    assert failure_words(two, 52, kinds=True) == f'32 of 52: server_error: "{FULL}", 3 of 52: timeout: "late"'
    assert failed_words(one, 32, 52) == f'32 of 52 requests failed: "{FULL}"'
    assert failed_words(two, 35, 52).startswith(f'35 of 52 requests failed; 32 of 52: "{FULL}", ')
    assert failed_words({}, 2, 52) == "2 of 52 requests failed"
