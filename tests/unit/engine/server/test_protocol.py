"""What bodies are taken, and in which words the others are refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbench_engine.server.errors import APIError
from kvbench_engine.server.protocol import ChatBody, CompletionBody, parse

MESSAGES = [{"role": "user", "content": "hi"}]


def refusal(fields: Any, model: type = CompletionBody) -> APIError:
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    with pytest.raises(APIError) as caught:
        parse(model, raw)
    return caught.value


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["a", "b"], [[1, 2], [3]]])
def test_the_four_forms_of_a_prompt_arrive_as_they_are(prompt: Any) -> None:
    assert parse(CompletionBody, json.dumps({"prompt": prompt}).encode()).prompt == prompt


def test_null_stands_for_the_default() -> None:
    names = [name for name in CompletionBody.model_fields if name != "prompt"]
    body = parse(CompletionBody, json.dumps({"prompt": "a", **dict.fromkeys(names)}).encode())
    assert (body.stops, body.choices_per_prompt, body.token_limit) == ((), 1, None)
    assert parse(CompletionBody, b'{"prompt": "a", "stop": "x"}').stops == ("x",)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, True]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "temperature": -0.1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "top_k": -2}, "top_k"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "a", "use_beam_search": "yes"}, "use_beam_search"),
        ({"prompt": "a", "use_beam_search": True, "early_stopping": "soon"}, "early_stopping"),
        ({"prompt": "a", "priority": 2**64}, "priority"),
        ({"prompt": "a", "cache_salt": ""}, "cache_salt"),
        ({"prompt": "a", "seed": 2**64}, "seed"),
        ({"prompt": "a", "stop": ["ok", ""]}, "stop"),
        ({"prompt": "a", "stream": "yes"}, "stream"),
        ({"prompt": "a", "stream": True, "stream_options": []}, "stream_options"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "a", "model": 3}, "model"),
    ],
)
def test_wrong_values_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(fields)
    assert (error.status, error.param) == (400, param)
    assert param.split(".")[0] in error.message


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"null", b"[]", b'"text"', b"5", b"{'prompt': 1}", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}',
     b'{"prompt":"a","temperature":NaN}', b'{"prompt":"a","temperature":Infinity}', b"[" * 100_000],
)  # fmt: skip
def test_what_is_not_an_object_in_json_is_refused(raw: bytes) -> None:
    assert refusal(raw).status == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
def test_wrong_chats_are_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(fields, ChatBody)
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"use_beam_search": True, "stop": "x"}, "stop", "stop_token_ids"),
        ({"best_of": 2, "stop": ["x"]}, "stop", "stop_token_ids"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature", "0.7"),
        ({"use_beam_search": True, "top_p": 0.5}, "top_p", "0.5"),
        ({"length_penalty": 1.5}, "length_penalty", "use_beam_search"),
        ({"early_stopping": True}, "early_stopping", "use_beam_search"),
        ({"min_tokens": 5, "max_tokens": 9}, "min_tokens", "ignore_eos"),
        ({"min_tokens": 5, "ignore_eos": True}, "min_tokens", "max_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "max_tokens": 4}, "min_tokens", "max_tokens"),
        ({"min_tokens": 5, "ignore_eos": True, "max_tokens": 5, "stop": "x"}, "min_tokens", "stop"),
        ({"min_tokens": 5, "ignore_eos": True, "max_tokens": 5, "stop_token_ids": [1]}, "min_tokens", "stop"),
    ],
)
def test_options_that_would_be_ignored_are_refused(fields: dict[str, Any], param: str, says: str) -> None:
    error = refusal({"prompt": "a", **fields})
    assert (error.status, error.param, error.code) == (400, param, "unsupported")
    assert says in error.message


@pytest.mark.parametrize(
    ("fields", "n", "width", "chooses"),
    [
        ({"n": 3}, 3, 3, False),
        ({"n": 2, "best_of": 2, "stream": True, "stop": "x"}, 2, 2, False),
        ({"n": 2, "best_of": 5}, 2, 5, True),
        ({"use_beam_search": True, "n": 3, "temperature": 0, "top_p": 1, "top_k": -1}, 3, 3, True),
        ({"use_beam_search": True, "best_of": 4, "length_penalty": 0.5, "early_stopping": "never"}, 1, 4, True),
        ({"use_beam_search": False, "length_penalty": 1, "early_stopping": False}, 1, 1, False),
    ],
)
def test_how_many_run_and_how_many_come_back(fields: dict[str, Any], n: int, width: int, chooses: bool) -> None:
    body = parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())
    assert (body.choices_per_prompt, body.width, body.chooses) == (n, width, chooses)


def test_text_parts_are_joined_and_others_refused() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    body = parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": parts, "name": "n"}]}).encode())
    assert body.messages[0].plain() == {"role": "user", "content": "one\ntwo", "name": "n"}
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    body = parse(ChatBody, json.dumps({"messages": [{"role": "user", "content": image}]}).encode())
    with pytest.raises(APIError, match="image_url"):
        body.messages[0].plain()
