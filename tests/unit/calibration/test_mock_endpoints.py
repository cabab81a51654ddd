"""The mock server's endpoints: official clients read its scripted deltas, which come at known moments."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import anthropic
import httpx
import numpy as np
import openai
import pytest

from kvbench.calibration.mock.settings import AnswerPlan, script
from kvbench.load.endpoints import PATHS
from tests.support.loads import own_mock

PROMPT = "four words of text"
MESSAGES = [{"role": "user", "content": PROMPT}]
TEMPLATE = 3
TTFT_MS, ITL_MS = 20, 4
MODEL = f"mock?ttft_ms={TTFT_MS}&itl_ms={ITL_MS}&cached_tokens=2&deltas="
EVERY = "reasoning_content:3,hidden:2,empty,held:2,text:4,refusal:2,tool_calls:4,tool_calls:2"  # 20 tokens
NO_REFUSAL = EVERY.replace("refusal:2,", "")
SAID, CALLED = " w8 w8 w8 w9 w10 w11", {"words": " w15 w16 w17"}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_mock("--template-tokens", str(TEMPLATE), "--api-key-env", "MOCK_KEY", MOCK_KEY="none") as (_, address):
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=10) as made:
        yield made


@pytest.fixture
def claude(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=10) as made:
        yield made


def post(url: str, path: str, **body: object) -> bytes:
    headers = {"x-kvbench-stamp": "1", "x-api-key": "none"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read()


def body_of(endpoint: str, max_tokens: int, **fields: object) -> dict[str, object]:
    limit = "max_output_tokens" if endpoint == "responses" else "max_tokens"
    prompt = {"completions": {"prompt": PROMPT}, "responses": {"input": PROMPT}}
    return {"stream": True, limit: max_tokens, **prompt.get(endpoint, {"messages": MESSAGES}), **fields}


def events_of(stream: bytes) -> list[dict]:
    blocks = [block.partition("data: ")[2] for block in stream.decode().split("\n\n")]
    return [json.loads(data) for data in blocks if data and data != "[DONE]"]


def get(url: str, key: str = "Bearer none", name: str = "Authorization") -> httpx.Response:
    return httpx.get(url, headers={name: key})


def newest_stamp(url: str) -> dict:
    return get(f"{url}/stamps").json()[-1]


def test_a_key_may_come_in_either_header(url: str) -> None:
    for name, key in (("Authorization", "Bearer none"), ("x-api-key", "none")):
        assert [get(f"{url}/v1/models", sent, name).status_code for sent in (key, f"{key}r")] == [200, 401]


def test_chat_streams_every_kind_of_delta(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL + EVERY, messages=MESSAGES, max_completion_tokens=99, stream=True, stream_options=options
        )
    )
    first, *middle, finish, last = chunks
    assert (first.choices[0].delta.role, first.choices[0].delta.content) == ("assistant", "")
    deltas = [chunk.choices[0].delta for chunk in middle]
    assert [delta.model_extra.get("reasoning_content") for delta in deltas[:4]] == [" w0", " w1", " w2", None]
    assert [delta.content for delta in deltas[3:8]] == ["", " w8 w8 w8", " w9", " w10", " w11"]
    assert [delta.refusal for delta in deltas[8:10]] == [" w12", " w13"]
    calls = [delta.tool_calls[0] for delta in deltas[10:]]
    assert [(call.index, call.id, call.function.name) for call in calls if call.id] == [
        (0, "call_0", "count_words"), (1, "call_1", "count_words"),
    ]  # fmt: skip
    for index, arguments in enumerate((CALLED, {"words": " w19"})):
        assert json.loads("".join(call.function.arguments for call in calls if call.index == index)) == arguments
    assert {chunk.choices[0].finish_reason for chunk in (first, *middle)} == {None}
    assert finish.choices[0].finish_reason == "tool_calls"
    usage = last.usage
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (4 + TEMPLATE, 2)
    assert (usage.completion_tokens, usage.completion_tokens_details.reasoning_tokens) == (20, 5)


def test_whole_answers_hold_what_is_streamed(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    chat = client.chat.completions.create(model=MODEL + EVERY, messages=MESSAGES, max_tokens=99)
    message = chat.choices[0].message
    assert (message.content, message.refusal) == (SAID, " w12 w13")
    assert message.model_extra["reasoning_content"] == " w0 w1 w2"
    assert [json.loads(call.function.arguments) for call in message.tool_calls] == [CALLED, {"words": " w19"}]
    assert (chat.choices[0].finish_reason, chat.usage.completion_tokens) == ("tool_calls", 20)

    answer = client.responses.create(model=MODEL + EVERY, input=MESSAGES, instructions="be brief", max_output_tokens=12)
    reasoning, said = answer.output
    assert (reasoning.content[0].text, answer.output_text, said.type) == (" w0 w1 w2", SAID, "message")
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (answer.usage.input_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (6 + TEMPLATE, 5)

    reply = claude.messages.create(model=MODEL + NO_REFUSAL, messages=MESSAGES, system="be brief", max_tokens=99)
    thinking, said, called, again = reply.content
    assert (thinking.thinking, said.text, again.input) == (" w0 w1 w2", SAID, {"words": " w17"})
    assert (called.input, reply.stop_reason) == ({"words": " w13 w14 w15"}, "tool_use")
    assert (reply.usage.input_tokens, reply.usage.cache_read_input_tokens) == (6 + TEMPLATE - 2, 2)

    plain = client.completions.create(model="mock?deltas=text:2,held:2,text", prompt=PROMPT, max_tokens=6)
    assert (plain.choices[0].text, plain.choices[0].finish_reason) == (" w0 w1 w4 w4 w4 w5", "length")
    assert (plain.usage.prompt_tokens, plain.usage.completion_tokens) == (4, 6)


def test_responses_streams_every_kind_of_delta(client: openai.OpenAI) -> None:
    kinds = EVERY.replace("hidden:2", "reasoning_details:2")
    with client.responses.stream(model=MODEL + kinds, input=PROMPT, max_output_tokens=99) as stream:  # it checks, too
        events = [event for event in stream if hasattr(event, "sequence_number")]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    texts: dict[str, list[str]] = {}
    for event in events:
        if event.type.endswith(".delta"):
            texts.setdefault(event.type.split(".")[1], []).append(event.delta)
    assert texts["reasoning_text"] == [" w0", " w1", " w2"]
    assert texts["reasoning_summary_text"] == [" w3", " w4", ""]  # an empty delta is of the item that is open
    assert texts["output_text"] == [" w8 w8 w8", " w9", " w10", " w11"]
    assert texts["refusal"] == [" w12", " w13"]
    assert json.loads("".join(texts["function_call_arguments"][:3])) == CALLED
    done = [(event.type.split(".")[1], event.text) for event in events if event.type.endswith("text.done")]
    assert done == [("reasoning_text", " w0 w1 w2"), ("reasoning_summary_text", " w3 w4"), ("output_text", SAID)]
    answer = events[-1].response
    assert (events[-1].type, answer.output_text) == ("response.completed", SAID)
    assert [item.type for item in answer.output] == ["reasoning"] * 2 + ["message"] * 2 + ["function_call"] * 2
    assert answer.usage.input_tokens_details.cached_tokens == 2
    cut = list(client.responses.create(model=MODEL + "text", input=PROMPT, max_output_tokens=3, stream=True))
    assert [event.sequence_number for event in cut] == [*range(len(cut))]
    assert (cut[-1].type, cut[-1].response.output[0].status) == ("response.incomplete", "incomplete")


def test_messages_stream_every_kind_of_delta(claude: anthropic.Anthropic) -> None:
    with claude.messages.stream(model=MODEL + NO_REFUSAL, messages=MESSAGES, max_tokens=99) as stream:
        events = list(stream)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta"] * 4 + ["signature_delta"] + ["text_delta"] * 4 + ["input_json_delta"] * 4
    message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (message.content[0].thinking, message.content[1].text) == (" w0 w1 w2", SAID)
    assert message.content[2].input == {"words": " w13 w14 w15"}
    assert (message.stop_reason, message.usage.output_tokens) == ("tool_use", 18)
    assert message.usage.output_tokens_details.thinking_tokens == 5
    with claude.messages.stream(model=MODEL + "text:9", messages=MESSAGES, max_tokens=99) as ended:
        assert ended.get_final_message().stop_reason == "end_turn"


ALL, THINKING = tuple(PATHS), ("chat", "responses", "messages")


@pytest.mark.parametrize(
    ("endpoint", "deltas", "moments"),
    [
        (endpoint, deltas, moments)
        for endpoints, deltas, moments in (
            (ALL, "text", [0, 1, 2, 3, 4, 5]),
            (ALL, "hidden:2,text", [2, 3, 4, 5]),
            (ALL, "held:2,text:2,empty,text", [2, 3, 4, 5]),
            (ALL, "text:2,hidden", [0, 1]),
            (THINKING, "reasoning:2,hidden,tool_calls", [0, 1, 3, 4, 5]),
            (THINKING, "reasoning_content:2,reasoning_details:3,text", [0, 1, 2, 3, 4, 5]),
            (("chat", "responses"), "refusal", [0, 1, 2, 3, 4, 5]),
            (("chat",), "text:2,role,text", [0, 1, 2, 3, 4, 5, 6]),
        )
        for endpoint in endpoints
    ],
)
def test_deltas_go_out_at_their_moments(url: str, endpoint: str, deltas: str, moments: list[int]) -> None:
    body = body_of(endpoint, 6, model=MODEL + deltas)
    stamped = [
        event["kvbench"]["sent"] for event in events_of(post(url, PATHS[endpoint], **body)) if "kvbench" in event
    ]
    stamp = newest_stamp(url)
    assert stamped == pytest.approx(stamp["sends"], abs=1e-6)
    assert stamp["due"] == pytest.approx(stamp["received"] + (TTFT_MS + ITL_MS * np.array(moments)) / 1000, abs=1e-6)
    assert min(np.array(stamp["sends"]) - stamp["due"]) >= 0
    assert sum(chunks for _, chunks in stamp["kinds"]) == len(moments)
    assert (stamp["prompt"], stamp["body"]["model"]) == (PROMPT, MODEL + deltas)


@pytest.mark.parametrize(
    ("endpoint", "deltas", "fields", "words"),
    [
        ("completions", "text,reasoning", {}, "no reasoning"), ("completions", "tool_calls", {}, "no tool_calls"),
        ("messages", "refusal", {}, "no refusal deltas"), ("responses", "role,text", {}, "no role deltas"),
        ("chat", "text", {"max_tokens": -1}, "-1"), ("chat", "text", {"max_tokens": "many"}, "many"),
        ("chat", "text", {"messages": 5}, "int"), ("responses", "text", {"input": [[1]]}, "list"),
    ],
)  # fmt: skip
def test_what_an_endpoint_has_no_answer_to_is_refused(url, endpoint, deltas, fields, words) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        post(url, PATHS[endpoint], **body_of(endpoint, 6, model=f"mock?deltas={deltas}") | fields)
    assert words in json.loads(refused.value.read())["error"]["message"]


def test_a_plan_ends_with_the_limit_or_with_the_script() -> None:
    plan = AnswerPlan(script("reasoning:8,text"), 8)
    assert (plan.tokens, plan.thoughts, plan.limited, plan.kinds) == (8, 8, True, [("reasoning", 8)])
    assert AnswerPlan(script("reasoning:8,text"), 9).kinds == [("reasoning", 8), ("text", 1)]
    counted = AnswerPlan(script("hidden:2,text:4"), 7, per_chunk=2)
    assert (counted.tokens, counted.thoughts, counted.limited, counted.moments) == (6, 2, False, 3)
    assert [delta and delta[2:4] for delta in counted.deltas()] == [None, (2, 4), (4, 6)]
    held = AnswerPlan(script("text:1,held:3,text:2"), 3)  # what is held back at the end comes with the last token
    assert [delta and delta[2:4] for delta in held.deltas()] == [(0, 1), None, (1, 3)]


def test_a_split_write_is_the_same_stream_in_pieces(url: str) -> None:
    def read(split: int) -> tuple[bytes, int]:
        payload = json.dumps(body_of("chat", 3, model=f"mock?split={split}")).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nx-api-key: none\r\nContent-Length: {len(payload)}\r\n\r\n"
        data, reads = b"", 0
        with socket.create_connection(tuple(url.rpartition("/")[2].split(":")), timeout=10) as stream:
            stream.sendall(head.encode() + payload)
            while not data.endswith(b"\r\n0\r\n\r\n"):
                data, reads = data + stream.recv(65536), reads + 1
        return re.sub(rb'"created": \d+', b"", data), reads

    (whole, reads), (halved, _) = read(0), read(150)
    assert whole == halved
    for _ in range(20):  # the kernel joins the 1,000 pieces for a reader that is late on a busy machine
        bytewise, pieces = read(1)
        assert bytewise == whole
        if pieces > 2 * reads:
            break
    else:
        pytest.fail(f"{pieces} pieces in the last of 20 reads")
    event = events_of(post(url, PATHS["chat"], **body_of("chat", 1, model="mock?split=1")))[1]
    assert newest_stamp(url)["sends"][0] > event["kvbench"]["sent"]  # the last piece's moment


def test_tokenize_counts_words_and_the_template(url: str) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "two words"}, {"type": "image_url"}]}]
    for body, count in (({"prompt": PROMPT}, 4), ({"messages": MESSAGES}, 4 + TEMPLATE), ({"messages": parts}, 5)):
        answer = json.loads(post(url, "/tokenize", model="mock", **body))
        assert (answer["count"], len(answer["tokens"])) == (count, count)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(url, "/tokenize", model="mock")


@pytest.mark.parametrize(
    ("deltas", "words"),
    [
        ("thoughts:3", "thoughts"), ("text:0", "'0'"), ("text:", "''"), ("text,held", "must follow"),
        ("held:2,hidden:2,text", "must follow"), ("held,empty,text", "must follow"),
    ],
)  # fmt: skip
def test_an_impossible_script_is_refused_for_one_request(url, deltas, words) -> None:
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        post(url, PATHS["chat"], **body_of("chat", 4, model=f"mock?deltas={deltas}"))
    assert words in json.loads(refused.value.read())["error"]["message"]
