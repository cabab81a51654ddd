"""Thoughts and tool calls of chats, read by OpenAI's client."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from kvbench_engine.config import EngineConfig
from kvbench_engine.server.tokenizer import SHIPPED, load_tokenizer
from tests.support.fake_engine import fake_engine, saying
from tests.support.http_server import RunningServer, openai_client, running_server, shipped_tokenizer

PARSERS = {"reasoning_parser": "qwen3", "tool_call_parser": "hermes"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
ASK = [{"role": "user", "content": "Look it up."}]
THOUGHT, TEXT, ARGUMENTS = "I must look \U0001f980.", "Wait. ", ['{"what": "a \\"}\\" b"}', "{}"]
CALLS = [f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>\n' for arguments in ARGUMENTS]
ANSWER = f"{THOUGHT}</think>{TEXT}{''.join(CALLS)}"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}{{ tools | tojson }}"
    "<|assistant|>{% if enable_thinking is not false %}<think>\n{% endif %}"
)


def tokens(text: str) -> tuple[int, ...]:
    return tuple(shipped_tokenizer().encode(text))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Says ANSWER, whose tags are several tokens each, and then the end-of-text token."""
    folder = tmp_path_factory.mktemp("tokenizer") / "thinker"
    shutil.copytree(SHIPPED, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    engine = fake_engine(saying(*tokens(ANSWER), 0))
    tokenizer = load_tokenizer(EngineConfig("fake", tokenizer=str(folder)), engine.model_info)
    with running_server(engine, tokenizer, **PARSERS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai_client(server) as made:
        yield made


def said(message: Any) -> tuple[Any, Any, list[tuple[str, str]]]:
    """Reasoning, content, and name and arguments of the calls."""
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    return getattr(message, "reasoning", None), message.content or None, calls


EXPECTED = (THOUGHT, TEXT, [("look", arguments) for arguments in ARGUMENTS])
UNTHOUGHT = (None, f"{THOUGHT}</think>{TEXT}", EXPECTED[2])
UNCALLED = (THOUGHT, TEXT + "".join(CALLS), [])
ENDED = len(tokens(f"{THOUGHT}</think>"))
NUM_THOUGHTS = ENDED - len(tokens("</think>"))


@pytest.mark.parametrize(
    ("options", "expected", "finish", "count"),
    [
        ({}, EXPECTED, "tool_calls", NUM_THOUGHTS),
        ({"chat_template_kwargs": {"enable_thinking": False}}, UNTHOUGHT, "tool_calls", 0),
        ({"include_reasoning": False}, (None, *EXPECTED[1:]), "tool_calls", NUM_THOUGHTS),
        ({"tool_choice": "none"}, UNCALLED, "stop", NUM_THOUGHTS),
        ({"stop": ["ait."]}, (THOUGHT, "W", []), "stop", NUM_THOUGHTS),
        ({"stop": ['what": "a']}, (THOUGHT, TEXT, [("look", '{"')]), "tool_calls", NUM_THOUGHTS),
        ({"stop": [".</think>"]}, (THOUGHT[:-1], None, []), "stop", NUM_THOUGHTS - 1),
        ({"max_tokens": ENDED - 1}, (THOUGHT + "</think", None, []), "length", ENDED - 1),
        ({"max_tokens": len(tokens(ANSWER))}, EXPECTED, "length", NUM_THOUGHTS),
    ],
)
def test_whole_answers_and_what_the_client_makes_of_streams(
    client: openai.OpenAI, options: dict, expected: tuple, finish: str, count: int
) -> None:
    body = {"model": "fake", "messages": ASK, "extra_body": {"tools": TOOLS, **options}}
    whole = client.chat.completions.create(**body, n=2)
    with client.chat.completions.stream(**body, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:  # of every server
            final = error.completion
    for choice in (*whole.choices, *final.choices):
        assert (said(choice.message), choice.finish_reason) == (expected, finish)
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls or ()}) == 2 * len(
        expected[2]
    )
    done = [(event.name, event.arguments) for event in events if event.type == "tool_calls.function.arguments.done"]
    assert done == expected[2]
    counts = [answer.usage.completion_tokens_details.reasoning_tokens for answer in (whole, final)]
    assert counts == [2 * count, count]


def test_a_stream_has_one_event_a_token(server: RunningServer) -> None:
    body = {"messages": ASK, "tools": TOOLS, "stream": True, "return_token_ids": True, "kvbench_stamp": True}
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    events = server.post("/v1/chat/completions", body).events
    usage = events.pop()["usage"]
    choices = [event["choices"][0] for event in events]
    assert [choice["token_ids"] for choice in choices] == [[i] for i in (*tokens(ANSWER), 0)]
    assert [choice["finish_reason"] for choice in choices] == [None] * len(tokens(ANSWER)) + ["tool_calls"]
    assert all(choice["delta"] and choice["logprobs"] is None for choice in choices)
    assert choices[0]["delta"]["role"] == "assistant"
    assert sum("tool_calls" in choice["delta"] for choice in choices) > 4, "arguments come in pieces"
    counts = [event["usage"]["completion_tokens_details"]["reasoning_tokens"] for event in events]
    assert counts == sorted(counts)
    assert counts[-1] == usage["completion_tokens_details"]["reasoning_tokens"] == NUM_THOUGHTS
    assert all(event["kvbench"]["sent"] > 0 for event in events)


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"tool_choice": "required"}, "unsupported"),
        ({"tools": [{"type": "function", "function": {}}]}, "invalid_value"),
        ({"tools": "look"}, "invalid_value"),
        ({"parallel_tool_calls": False}, "invalid_value"),
        ({"separate_reasoning": False}, "invalid_value"),
    ],
)
def test_what_is_refused(server: RunningServer, fields: dict, code: str) -> None:
    reply = server.post("/v1/chat/completions", {"messages": ASK, "tools": TOOLS, **fields})
    (name,) = fields
    described = server.get("/openapi.json").json
    content = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
    assert name in described["components"]["schemas"][content["schema"]["$ref"].rpartition("/")[2]]["properties"]
    assert (reply.status, reply.error["param"].partition(".")[0], reply.error["code"]) == (400, name, code)


def test_without_the_options_nothing_is_split_and_tools_are_refused() -> None:
    with running_server(fake_engine(saying(*tokens(ANSWER), 0)), tool_call_parser="hermes") as server:
        refused = server.post("/v1/chat/completions", {"messages": ASK, "tools": TOOLS})
        assert (refused.error["param"], "--tokenizer" in refused.error["message"]) == ("tools", True)
    with running_server(fake_engine(saying(*tokens(ANSWER), 0))) as server:
        for name, value in (("tools", TOOLS), ("tool_choice", "required"), ("include_reasoning", False)):
            refused = server.post("/v1/chat/completions", {"messages": ASK, name: value})
            assert (refused.status, refused.error["param"], refused.error["code"]) == (400, name, "unsupported")
        answer = server.post("/v1/chat/completions", {"messages": ASK}).json
        assert answer["choices"][0]["message"] == {"role": "assistant", "content": ANSWER}
        assert "completion_tokens_details" not in answer["usage"]
        assert "tools" not in server.get("/openapi.json").json["components"]["schemas"]["ChatBody"]["properties"]


def test_tags_that_are_special_tokens_are_found_and_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / "special"
    shutil.copytree(SHIPPED, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    backend.save(str(folder / "tokenizer.json"))
    engine = fake_engine(saying(*backend.encode(ANSWER).ids, 0), vocab_size=8196)
    tokenizer = load_tokenizer(EngineConfig("fake", tokenizer=str(folder)), engine.model_info)
    with running_server(engine, tokenizer, **PARSERS) as server, openai_client(server) as client:
        body = {"model": "fake", "messages": ASK, "extra_body": {"tools": TOOLS}}
        with client.chat.completions.stream(**body) as stream:
            final = stream.get_final_completion()
        whole = client.chat.completions.create(**body)
    for answer in (whole, final):
        assert said(answer.choices[0].message) == EXPECTED
    thoughts = len(backend.encode(THOUGHT).ids)
    assert whole.usage.completion_tokens_details.reasoning_tokens == thoughts
