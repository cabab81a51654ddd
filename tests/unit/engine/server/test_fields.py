"""Fields that the engine does not have: refused, ignored, or unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvbench_engine.server.errors import APIError
from kvbench_engine.server.fields import IGNORED, REFUSED
from kvbench_engine.server.protocol import ChatBody, ChatMessage, CompletionBody, DetokenizeBody, TokenizeBody, parse

PAGE = Path(__file__).parents[4] / "docs" / "request_fields.md"
MESSAGES = [{"role": "user", "content": "hi"}]
# Fields of one kind of body that the other does not have.
ONLY_CHATS = ("add_special_tokens", "echo")
def chat(**fields: Any) -> ChatBody:
    return parse(ChatBody, json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionBody:
    return parse(CompletionBody, json.dumps({"prompt": "a", **fields}).encode())


def refusal(call: Any, **fields: Any) -> APIError:
    with pytest.raises(APIError) as caught:
        call(**fields)
    return caught.value


NEUTRAL = {
    "bad_words": [], "detokenize": True, "repeat_penalty": 1.0, "mirostat": 0, "typical_p": 1.0, "logit_bias": {},
    "continue_final_message": False, "response_format": {"type": "text"},
}  # fmt: skip


def test_every_refused_field_accepts_its_neutral_values_alone() -> None:
    for name, field in REFUSED.items():
        for neutral in (None, *field.neutral, *([NEUTRAL[name]] if name in NEUTRAL else ())):
            chat(**{name: neutral})
        for endpoint in (chat, completion) if name not in ONLY_CHATS else (chat,):
            error = refusal(endpoint, **{name: {"something": "else"}})
            assert (error.status, error.param, error.code) == (400, name, "unsupported")
            assert error.message.startswith(f'{name} cannot be {{"something": "else"}}')
            assert endpoint is completion or error.message.endswith(field.instead)


def test_zero_is_not_false() -> None:
    assert refusal(completion, logprobs=0).param == "logprobs"  # the log probability of each token, and no others
    assert refusal(completion, return_tokens=0).param == "return_tokens"
    assert refusal(completion, min_p=False).param == "min_p"


def test_what_changes_nothing_is_ignored_whatever_its_value_and_no_field_is_in_two_tables() -> None:
    names = [name for names in IGNORED.values() for name in names]
    for value in (None, 0, True, "x", ["x"], {"x": 1}):
        chat(**dict.fromkeys(names, value))
        completion(**dict.fromkeys(names, value))
    assert len(names) == len(set(names)) and not set(names) & set(REFUSED)
    for body, both in ((ChatBody, set()), (CompletionBody, set(ONLY_CHATS))):
        assert not set(body.model_fields) & set(names)
        assert set(body.model_fields) & set(REFUSED) == both


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("temprature", "temperature"), ("Top_P", "top_p"), ("ignore-eos", "ignore_eos")],
)
@pytest.mark.parametrize("endpoint", [completion, chat])
def test_an_unknown_field_is_refused_with_the_nearest_name(endpoint: Any, name: str, nearest: str) -> None:
    for value in (1, None):
        error = refusal(endpoint, **{name: value})
        assert (error.status, error.param, error.code) == (422, name, "unknown_field")
        assert nearest in error.message


def test_an_unknown_field_like_no_other_is_refused_without_a_guess() -> None:
    for name in ("zzz", "x" * 100_000):
        error = refusal(completion, **{name: 1})
        assert error.status == 422
        assert "leave it out" in error.message
        assert len(error.message) + len(error.param or "") < 250


def test_the_tokenizer_endpoints_refuse_unknown_fields_too() -> None:
    for body, fields in ((TokenizeBody, {"prompt": "a"}), (DetokenizeBody, {"tokens": [1]})):
        with pytest.raises(APIError, match="no field") as caught:
            parse(body, json.dumps({**fields, "modle": "m"}).encode())
        assert (caught.value.status, caught.value.param) == (422, "modle")
    with pytest.raises(APIError, match="chat_template") as caught:
        parse(TokenizeBody, json.dumps({"messages": MESSAGES, "chat_template": "{{ messages }}"}).encode())
    assert caught.value.status == 400


def test_nested_objects_refuse_unknown_fields() -> None:
    error = refusal(completion, stream=True, stream_options={"include_usge": True})
    assert (error.status, error.param) == (422, "stream_options.include_usge")
    assert "'include_usage'" in error.message
    completion(stream=True, stream_options={"include_usage": True, "include_obfuscation": False})
    assert refusal(chat, response_format={"type": "json_object"}).param == "response_format"
    assert refusal(chat, response_format={"type": "text", "strict": True}).param == "response_format"
    part = ChatMessage(role="user", content=[{"type": "text", "text": "a", "txet": "b"}])
    with pytest.raises(APIError, match="'text'") as caught:
        part.plain()
    assert (caught.value.status, caught.value.param) == (422, "content.txet")
    assert ChatMessage(role="user", content=[{"type": "text", "text": "a", "cache_control": {}}]).plain()


def test_fields_of_messages_are_openais_or_those_that_the_template_reads() -> None:
    ChatMessage(role="assistant", content="a", name="n", tool_calls=[], reasoning_content="b").check_fields("")
    with pytest.raises(APIError, match="'content'") as caught:
        ChatMessage(role="user", contnet="a").check_fields("{{ message.content }}")
    assert (caught.value.status, caught.value.param) == (422, "messages.contnet")
    ChatMessage(role="user", content="a", prefix=True).check_fields("{% if message.prefix %}")
    with pytest.raises(APIError):
        ChatMessage(role="user", content="a", prefix=True).check_fields("{% if message.prefixes %}")


@pytest.mark.parametrize(
    ("config", "body", "expected"),
    [
        ({"do_sample": True, "max_new_tokens": 256}, {}, (256, None, None)),
        ({"max_new_tokens": 7, "temperature": 0.5, "top_k": 50}, {}, (7, 0.0, 50)),
        ({"do_sample": True, "temperature": 0.5}, {"temperature": 0.25, "max_tokens": 3}, (3, 0.25, None)),
        ({"do_sample": True, "temperature": 0.5, "repetition_penalty": 1.0}, {"temperature": None}, (None, 0.5, None)),
    ],
)
def test_a_generation_config_of_transformers_is_obeyed(config: Any, body: Any, expected: Any) -> None:
    for form in (config, json.dumps(config)):
        read = chat(generation_config=form, **body)
        assert (read.token_limit, read.temperature, read.top_k) == expected
    for ends in (5, [5]):
        assert chat(generation_config={**config, "eos_token_id": ends}, **body).stop_token_ids == [5]


@pytest.mark.parametrize(
    ("config", "status", "param"),
    [
        ("{", 400, "generation_config"),
        ("[]", 400, "generation_config"),
        ("[" * 100_000, 400, "generation_config"),
        ({"max_new_tokens": "5"}, 400, "max_tokens"),
        ({"repetition_penalty": 1.5}, 400, "repetition_penalty"),
        ({"num_beams": 4}, 400, "num_beams"),
        ({"generation_config": {"top_k": 1}}, 400, "generation_config"),
        ({"temprature": 1}, 422, "temprature"),
    ],
)
def test_a_generation_config_is_refused_like_the_fields_it_stands_for(config: Any, status: int, param: str) -> None:
    error = refusal(chat, generation_config=config)
    assert (error.status, error.param) == (status, param)


def test_the_documentation_names_every_field() -> None:
    text = PAGE.read_text()
    names = [*REFUSED, *(name for names in IGNORED.values() for name in names)]
    assert [name for name in names if f"`{name}`" not in text] == []
