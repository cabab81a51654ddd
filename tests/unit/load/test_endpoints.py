"""Streams of chat, Responses and messages as servers send them: times, tokens by kind, and the end, at known moments.

The frames are those of vLLM 0.32, SGLang 0.5.23, llama.cpp b11434, transformers 5.23, OpenAI's and Anthropic's APIs.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvbench.load.completion import Completion, judge
from kvbench.load.endpoints import ENDPOINTS, Dialect
from kvbench.requests.request import RequestSpec
from kvbench.targets.presets import PRESETS

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = "[DONE]"


def frame(body: Any) -> bytes:
    """One event, with the line ``event:`` where the API has typed events."""
    typed = isinstance(body, dict) and isinstance(body.get("type"), str) and not body.get("unnamed")
    name = b"event: " + body["type"].encode() + b"\n" if typed else b""
    return name + b"data: " + (DONE if body == DONE else json.dumps(body)).encode() + b"\n\n"


def pieces_of(frames: list[Any]) -> list[bytes]:
    """Frame k arrives at time k; the head at 0. A list of frames arrives together."""
    groups = [b"".join(map(frame, group if isinstance(group, list) else [group])) for group in frames]
    chunks = [b"%x\r\n%b\r\n" % (len(group), group) for group in groups]
    return [HEAD, *chunks[:-1], chunks[-1] + b"0\r\n\r\n"]


def judged(endpoint: str, frames: list[Any], most: int = 8, n: int = 1, preset: str | None = None) -> Completion:
    dialect = (PRESETS[preset].dialect if preset else Dialect()).at(endpoint)
    pieces = pieces_of(frames)
    return judge([float(k) for k in range(len(pieces))], pieces, most, dialect=dialect, n=n)


def delta(part: dict[str, Any], reason: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": part, "finish_reason": reason, **more}]}


def usage(output: int, prompt: int = 5, **details: Any) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output, **details}}


def thought(count: int) -> dict[str, Any]:
    return {"completion_tokens_details": {"reasoning_tokens": count}}


def call(arguments: str, **more: Any) -> dict[str, Any]:
    return {"tool_calls": [{"index": 0, "function": {"arguments": arguments, **more}}]}


ROLE = delta({"role": "assistant", "content": ""})
EMPTY = {
    "content": "", "reasoning": "", "reasoning_content": None, "reasoning_details": [{"type": "reasoning.text"}],
    "refusal": None, "tool_calls": [{"index": 0, "type": "", "function": {"arguments": ""}}],
}  # fmt: skip
CHAT_STREAMS = {  # frames; times of the tokens; first output, first reasoning; reasoning tokens, text
    "text": ([ROLE, delta({"content": "a"}), delta({"content": "b"}, "length"), usage(2), DONE],
             [2, 3], 2, None, None, "ab"),
    "vllm reasoning": ([[ROLE, delta({"reasoning": "r"})], delta({"reasoning": "s"}), delta({"content": "a"}, "stop"),
                        usage(3, **thought(2)), DONE], [1, 2, 3], 3, 1, 2, "a"),
    "llama.cpp": ([[delta({"role": "assistant", "content": None}), delta({"reasoning_content": "r"})],
                   delta({"content": "a"}), delta({}, "stop"), usage(2), DONE], [1, 2], 2, 1, 1, "a"),
    "openrouter": ([ROLE, delta({"reasoning_details": [{"type": "reasoning.text", "text": "r"}]}),
                    delta({"reasoning_details": [{"type": "reasoning.summary", "summary": "s"}]}),
                    delta({"content": "a", "reasoning_details": []}, "stop"), usage(3), DONE], [2, 3, 4], 4, 2, 2, "a"),
    "encrypted": ([ROLE, delta({"reasoning_details": [{"type": "reasoning.encrypted", "data": "eyJ"}]}),
                   delta({"content": "a"}), delta({"content": "b"}, "stop"), usage(9, **thought(7)), DONE],
                  [3, 4], 3, None, 7, "ab"),
    "mistral": ([delta({"role": "assistant", "content": ""}),
                 delta({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": "r"}]}]}),
                 delta({"content": [{"type": "text", "text": "a"}]}), delta({"content": "b"}, "stop"), usage(3), DONE],
                [2, 3, 4], 3, 2, 1, "ab"),
    "tgi, an end token alone": ([delta({"role": "assistant", "content": ""}, "stop"), usage(1), DONE],
                                [1], 1, None, None, ""),
    "sglang": ([delta({"role": "assistant", "content": "", "reasoning_content": None}),
                delta({"reasoning_content": "r", "content": None}), delta({"reasoning_content": None, "content": "a"}),
                delta({"reasoning_content": None}, "stop"), usage(6, reasoning_tokens=4), DONE], [2, 3], 3, 2, 4, "a"),
    "refusal": ([ROLE, delta({"refusal": "I"}), delta({"refusal": " no"}, "stop"), usage(2), DONE],
                [2, 3], 2, None, None, ""),
    "call": ([ROLE, delta(call("", name="f")), delta(call('{"a"')), delta(call(":1}")), delta({}, "tool_calls"),
              usage(3), DONE], [2, 3, 4], 2, None, None, ""),
    "thought then call": ([ROLE, delta({"reasoning_content": "r"}), delta(call("{}", name="f"), "tool_calls"),
                           usage(2), DONE], [2, 3], 3, 2, 1, ""),
    "only reasoning": ([ROLE, delta({"reasoning": "r"}), delta({"reasoning": "s"}, "length"), usage(2), DONE],
                       [2, 3], None, 2, 2, ""),
    "hidden reasoning": ([ROLE, delta({"content": "a"}), delta({"content": "b"}, "stop"), usage(9, **thought(7)), DONE],
                         [2, 3], 2, None, 7, "ab"),
    "all in the first frame": ([delta({"reasoning": "r", "role": "assistant"}), delta({"content": "a"}, "stop"),
                                usage(2), DONE], [1, 2], 2, 1, 1, "a"),
    "call beside reasoning": ([ROLE, delta({**call("{}"), "reasoning": "r"}, "tool_calls"), usage(2), DONE],
                              [2], 2, None, None, ""),
    "several a frame": ([ROLE, delta({"reasoning": "r s"}), delta({"content": "a b c"}, "stop"), usage(5), DONE],
                        [2, 3], 3, 2, None, "a b c"),
    "role in every frame": ([delta({"role": "assistant", "content": "a"}),
                             delta({"role": "assistant", "content": "b"}, "length"), usage(2), DONE],
                            [1, 2], 1, None, None, "ab"),
    "nothing in each field, a legacy call": ([delta({"role": "assistant", **EMPTY}), delta(EMPTY),
                                              delta({"function_call": {"arguments": "{"}}, "tool_calls"), usage(2),
                                              DONE], [3], 3, None, None, ""),
    "ids": ([ROLE, delta({}, token_ids=[7]), delta({"reasoning": "rs"}, token_ids=[8, 9]),
             delta({"content": "a"}, "stop", token_ids=[10]), usage(4, **thought(1)), DONE], [2, 3, 4], 4, 3, 2, "a"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAT_STREAMS)
def test_each_kind_of_delta_has_its_moment_in_a_chat(name: str) -> None:
    frames, times, first_output, first_reasoning, reasoning, text = CHAT_STREAMS[name]
    out = judged("chat", frames, most=16)
    assert out.ok, out.error
    assert (out.chunk_times, out.first) == (times, times[0])
    assert (out.first_output, out.first_reasoning) == (first_output, first_reasoning)
    assert (out.reasoning_tokens, out.text, out.prompt_tokens) == (reasoning, text, 5)
    assert out.unstreamed_tokens == (7 if name in ("hidden reasoning", "encrypted") else 0)


def test_reasoning_that_is_counted_beside_the_output_is_output_too() -> None:
    thoughts = [delta({"reasoning_content": "r"})] * 5
    frames = [ROLE, *thoughts, delta({"content": "a"}, "stop"), usage(1, **thought(5)), DONE]
    out = judged("chat", frames, most=1)
    assert out.ok and (out.output_tokens, out.reasoning_tokens, out.streamed_tokens) == (6, 5, 6)
    assert judged("chat", [*frames[:-2], usage(2, **thought(5)), DONE], most=1).error_kind == "usage_mismatch"


def test_a_chat_of_transformers_serve_ends_without_a_mark_and_begins_before_the_model() -> None:
    frames = [delta({"role": "assistant"}), delta({"reasoning_content": "r"}), delta({"content": "a"}),
              delta({}, "stop") | {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}]  # fmt: skip
    out = judged("chat", frames, preset="transformers")
    assert out.ok and (out.chunk_times, out.first_output, out.reasoning_tokens) == ([2, 3], 3, 1)
    assert judged("chat", frames).error_kind == "no_done"


def test_an_answer_of_hidden_reasoning_alone_succeeds_without_a_token_that_came() -> None:
    out = judged("chat", [ROLE, delta({}, "length"), usage(4, **thought(4)), DONE])
    assert out.ok and (out.first, out.chunk_times, out.streamed_tokens) == (None, [], 0)
    ids = [ROLE, delta({"content": ""}, token_ids=[7]), delta({"content": ""}, "length", token_ids=[8])]
    out = judged("chat", [*ids, usage(2, **thought(2)), DONE])  # left out of the answer, not out of its chunks
    assert out.ok and (out.chunk_times, out.first, out.first_output) == ([2, 3], 2, None)
    assert judged("chat", [*ids, usage(2, **thought(1)), DONE]).first_output == 2
    assert judged("chat", [ROLE, delta({}, "length"), usage(4, **thought(3)), DONE]).error_kind == "usage_mismatch"


def part(name: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": f"response.{name}.delta", "delta": text, "item_id": "i", "output_index": 0, **more}


def ended(status: str, output: int, event: str = "completed", **more: Any) -> dict[str, Any]:
    details = {"input_tokens_details": {"cached_tokens": 2}, **more.pop("details", {})}
    counts = {"input_tokens": 5, "output_tokens": output, **details}
    return {"type": f"response.{event}", "response": {"status": status, "usage": counts, **more}}


BEGUN = [{"type": f"response.{name}", "response": {"status": "in_progress"}} for name in ("created", "in_progress")]
ADDED = [{"type": "response.output_item.added", "item": {"type": "message"}}, {"type": "response.content_part.added"}]
CUT = {"incomplete_details": {"reason": "max_output_tokens"}}
REASONED = {"details": {"output_tokens_details": {"reasoning_tokens": 1}}}
NAMED = {"type": "response.output_item.added", "item": {"type": "function_call", "name": "f", "arguments": ""}}
RESPONSES = {
    "openai, cut": ([BEGUN, [*ADDED, part("output_text", "a")], part("output_text", "b"),
                     ended("incomplete", 2, "incomplete", **CUT)], [2, 3], 2, None, None, "length"),
    "vllm, cut": ([BEGUN, [*ADDED, part("output_text", "a")], part("output_text", "b"), ended("incomplete", 2, **CUT)],
                  [2, 3], 2, None, None, "length"),
    "llama.cpp, cut": ([[*BEGUN, *ADDED, part("output_text", "a")], part("output_text", "b"), ended("completed", 2)],
                       [1, 2], 1, None, None, "stop"),
    "reasoning": ([BEGUN, part("reasoning_text", "r"), {"type": "response.reasoning_text.done", "text": "r"},
                   part("output_text", "a"), ended("completed", 2, **REASONED)], [2, 4], 4, 2, 1, "stop"),
    "summary": ([BEGUN, part("reasoning_summary_text", "r"), part("output_text", "a"),
                 ended("completed", 2, **REASONED)], [2, 3], 3, 2, 1, "stop"),
    "refusal": ([BEGUN, part("refusal", "no"), ended("completed", 1)], [2], 2, None, None, "stop"),
    "call": ([BEGUN, NAMED, part("function_call_arguments", "{"), part("function_call_arguments", "}"),
              ended("completed", 3)], [2, 3, 4], 2, None, None, "stop"),
    "transformers' whole call": ([BEGUN, NAMED,
                                 {"type": "response.function_call_arguments.done", "arguments": "{}"},
                                 ended("completed", 3)], [2], 2, None, None, "stop"),
    "transformers counts no reasoning": ([BEGUN, part("reasoning_text", "r", unnamed=True),
                                          part("output_text", "a", unnamed=True),
                                          ended("completed", 2, details={"output_tokens_details":
                                                                         {"reasoning_tokens": 0}})],
                                         [2, 3], 3, 2, 1, "stop"),
    "then [DONE]": ([BEGUN, part("output_text", "a"), ended("completed", 1), DONE], [2], 2, None, None, "stop"),
}  # fmt: skip


def check_typed(endpoint: str, stream: tuple, cached: int) -> None:
    frames, times, first_output, first_reasoning, reasoning, reason = stream
    out = judged(endpoint, frames)
    assert out.ok, out.error
    assert (out.chunk_times, out.first_output, out.first_reasoning) == (times, first_output, first_reasoning)
    assert (out.reasoning_tokens, out.finish_reason) == (reasoning, reason)
    assert (out.prompt_tokens, out.cached_tokens) == (5, cached)


@pytest.mark.parametrize("name", RESPONSES)
def test_each_kind_of_delta_has_its_moment_in_a_response(name: str) -> None:
    check_typed("responses", RESPONSES[name], cached=2)


def block(kind: str, text: str) -> dict[str, Any]:
    name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}.get(kind, "x")
    return {"type": "content_block_delta", "index": 0, "delta": {"type": kind, name: text}}


def opened(**counts: int) -> dict[str, Any]:
    return {"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 1, **counts}}}


def closed(reason: str, output: int, **counts: Any) -> list[dict[str, Any]]:
    stop = {"type": "message_delta", "delta": {"stop_reason": reason}, "usage": {"output_tokens": output, **counts}}
    return [{"type": "content_block_stop"}, stop, {"type": "message_stop"}]


PING = {"type": "ping"}
TOOL = {"type": "content_block_start", "content_block": {"type": "tool_use", "name": "f"}}
MESSAGES = {
    "text": ([opened(cache_read_input_tokens=2), PING, block("text_delta", "a"), block("text_delta", "b"),
              closed("max_tokens", 2)], [3, 4], 3, None, None, "length"),
    "thinking": ([opened(cache_read_input_tokens=2), block("thinking_delta", "r"), block("signature_delta", "x"),
                  block("text_delta", "a"), closed("end_turn", 2)], [2, 4], 4, 2, 1, "stop"),
    "call": ([opened(cache_read_input_tokens=1, cache_creation_input_tokens=1), TOOL, block("input_json_delta", "{"),
              block("input_json_delta", "}"), closed("tool_use", 3)], [2, 3, 4], 2, None, None, "tool_calls"),
    "counts at the end": ([opened(), block("text_delta", "a"),
                           closed("stop_sequence", 4, input_tokens=4, cache_read_input_tokens=1,
                                  output_tokens_details={"thinking_tokens": 3})], [2], 2, None, 3, "stop"),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_each_kind_of_delta_has_its_moment_in_a_message(name: str) -> None:
    check_typed("messages", MESSAGES[name], cached=2 if name in ("text", "thinking") else 1)


ALL = {("chat", n): s[0] for n, s in CHAT_STREAMS.items()} | {("responses", n): s[0] for n, s in RESPONSES.items()}
ALL |= {("messages", n): s[0] for n, s in MESSAGES.items()}


@pytest.mark.parametrize("key", ALL, ids=" ".join)
def test_a_stream_that_comes_byte_by_byte_has_the_tokens_of_the_bytes_that_completed_them(key) -> None:
    """Byte k arrives at time k; a token at its frame's last byte."""
    endpoint, frames = key[0], ALL[key]
    pieces = pieces_of(frames)
    whole = b"".join(pieces)
    dialect = Dialect().at(endpoint)
    out = judge([float(k) for k in range(len(whole))], [bytes([byte]) for byte in whole], 16, dialect=dialect)
    known = judge([float(k) for k in range(len(pieces))], pieces, 16, dialect=dialect)
    assert out.ok and (out.text, out.output_tokens, out.reasoning_tokens) == (
        known.text, known.output_tokens, known.reasoning_tokens
    )  # fmt: skip
    ends = {whole.index(b"\n\n", whole.index(body)) + 1 for body in map(frame, flat(frames))}
    assert len(out.chunk_times) == len(known.chunk_times) and set(map(int, out.chunk_times)) <= ends


def flat(frames: list[Any]) -> list[Any]:
    return [body for group in frames for body in (group if isinstance(group, list) else [group])]


FAILURES = [
    ("chat", [ROLE, delta({"content": "a"}), usage(1), DONE], "no_finish_reason"),
    ("chat", [ROLE, delta({"content": "a"}, "stop"), DONE], "no_usage"),
    ("chat", [ROLE, delta({"content": "a"}, "stop"), usage(1)], "no_done"),
    ("chat", [ROLE, delta({"content": 5}, "stop"), usage(1), DONE], "malformed"),
    ("chat", [ROLE, delta({"content": "a"}, "content_filter"), usage(1), DONE], "not_finished"),
    ("chat", [{"choices": [{"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}]}, usage(1), DONE],
     "not_streamed"),
    ("chat", [ROLE, delta({"content": "a"}), {"error": {"message": "died"}}, DONE], "server_error"),
    ("responses", [BEGUN, part("output_text", "a")], "no_finish_reason"),
    ("responses", [BEGUN, part("output_text", "a"), {"type": "response.completed", "response": {}}], "no_usage"),
    ("responses", [BEGUN, part("output_text", "a"),
                   ended("failed", 1, "failed", error={"code": "x", "message": "died"})], "server_error"),
    ("responses", [BEGUN, part("output_text", "a"), {"type": "error", "message": "died"}], "server_error"),
    ("responses", [BEGUN, {"type": "response.output_text.delta", "delta": None}], "malformed"),
    ("responses", [BEGUN, part("output_text", "a"),
                   ended("incomplete", 1, "incomplete", incomplete_details={"reason": "content_filter"})],
     "not_finished"),
    ("responses", [BEGUN, part("output_text", "a"), part("output_text", "b"), ended("completed", 1)], "usage_mismatch"),
    ("messages", [opened(), block("text_delta", "a"), *closed("end_turn", 1)[:2]], "no_done"),
    ("messages", [opened(), block("text_delta", "a"), *closed("pause_turn", 1)], "not_finished"),
    ("messages", [opened(), block("text_delta", "a"), *closed("end_turn", "1")], "malformed"),
    ("messages", [opened(), block("text_delta", "a"), {"type": "error", "error": {"type": "o", "message": "died"}}],
     "server_error"),
    ("messages", [opened(), *closed("end_turn", 1), block("text_delta", "a")], "malformed"),
    ("messages", [opened(), {"type": "content_block_delta", "delta": {"type": []}}, *closed([], 1)],
     "no_finish_reason"),
    ("responses", [BEGUN, {"type": []}, ended("incomplete", 5, incomplete_details={"reason": {}})], "usage_mismatch"),
    ("responses", [BEGUN, part("output_text", "a"), ended(["x"], 1)], "not_finished"),
]  # fmt: skip


@pytest.mark.parametrize(("endpoint", "frames", "kind"), FAILURES)
def test_a_stream_without_a_sign_of_success_is_a_failure(endpoint: str, frames: list[Any], kind: str) -> None:
    out = judged(endpoint, frames)
    assert out.error_kind == kind
    assert kind != "server_error" or "died" in out.error


@pytest.mark.parametrize("name", ["choices", "output", "content"])
@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_whole_answer_in_place_of_a_stream_is_told(endpoint: str, name: str) -> None:
    body = json.dumps({name: []}).encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    out = judge([0.0], [whole], 8, dialect=Dialect().at(endpoint))
    assert (out.error_kind == "not_streamed") == (ENDPOINTS[endpoint].answer == name)


@pytest.mark.full
@pytest.mark.parametrize("endpoint", ["chat", "responses", "messages"])
def test_no_spoilt_stream_raises_and_a_success_has_an_end_and_a_usage(endpoint: str) -> None:
    rng = random.Random(endpoint)
    streams = [b"".join(map(frame, flat(frames))) for (name, _), frames in ALL.items() if name == endpoint]
    values = ("null", "[]", "{}", "-1", '"x"', "1e999", "true", '[{"type": 5}]')
    for _ in range(300):
        body = rng.choice(streams)
        for _ in range(rng.choice((1, 1, 2, 3))):
            begin = rng.randrange(len(body))
            cut = rng.choice((0, 1, 5, 40))
            body = body[:begin] + rng.choice((b"", rng.choice(values).encode(), b"\n\n", b'"')) + body[begin + cut :]
        whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        out = judge([0.0], [whole], 16, dialect=Dialect().at(endpoint))
        assert not out.ok or (out.done and out.output_tokens is not None and out.finish_reason)


TURNS = [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "c"))]


@pytest.mark.parametrize(
    ("endpoint", "history", "field", "sent"),
    [
        ("completions", (), "prompt", "c"),
        ("chat", (), "messages", TURNS[2:]),
        ("chat", ("a", "b"), "messages", TURNS),
        ("responses", (), "input", "c"),
        ("responses", ("a", "b"), "input", [{"type": "message"} | turn for turn in TURNS]),
        ("messages", (), "messages", TURNS[2:]),
    ],
)
def test_the_prompt_stands_in_the_body_as_each_api_has_it(endpoint, history, field, sent) -> None:
    request = RequestSpec(0, "a", (7,), "c", 3, history=history)
    body = Dialect(extra_body={"top_k": 4}).at(endpoint).streamed_body("m", request, 0.0, ignore_eos=True)
    assert body[field] == sent and body["top_k"] == 4 and body["stream"] is True
    limits = {"responses": "max_output_tokens"}
    assert body[limits.get(endpoint, "max_tokens")] == 3
    assert ("stream_options" in body) == (endpoint in ("completions", "chat"))
    assert ("ignore_eos" in body) == (endpoint != "messages")
    assert (body.get("store") is False) == (endpoint == "responses")
    assert RequestSpec.from_row(json.loads(json.dumps(request.to_row()))) == request
