"""Requests at each limit and beyond, clients that leave or speak an older HTTP, and bodies that nobody would send."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import http.client
import itertools
import json
import random
import re
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from kvbench_engine.config import EngineConfig
from kvbench_engine.model.spec import ModelInfo
from kvbench_engine.server.app import MAX_BODY_BYTES, body_limit
from kvbench_engine.server.chat import RESERVED_OPTIONS
from kvbench_engine.server.errors import APIError
from kvbench_engine.server.tokenizer import ServerTokenizer, load_tokenizer
from tests.support.fake_engine import branching, fake_engine
from tests.support.http_server import RunningServer, running_server, shipped_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMIT = body_limit(1024)
LONG = "a" * 1001


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    tokenizer = dataclasses.replace(shipped_tokenizer(), max_characters=1000)
    with running_server(fake_engine(branching, enable_prefix_caching=True), tokenizer) as running:
        yield running


def test_the_longest_text_that_may_pass_is_all_tokens_of_the_longest_kind() -> None:
    tokenizer = load_tokenizer(EngineConfig(max_model_len=256), ModelInfo("m", 8192, 1024, (0,), None))
    assert tokenizer.max_characters == 256 * max(map(len, tokenizer.backend.get_vocab(with_added_tokens=True)))
    with pytest.raises(APIError, match=f"has {tokenizer.max_characters + 1} characters"):
        tokenizer.encode("a" * (tokenizer.max_characters + 1))


def padded(size: int) -> bytes:
    return b'{"prompt": [5], "max_tokens": 1}'.ljust(size)


@pytest.mark.parametrize(
    ("path", "at", "beyond", "status"),
    [
        (COMPLETIONS, {"prompt": [5] * 1000, "max_tokens": 24}, {"prompt": [5] * 1000, "max_tokens": 25}, 400),
        (COMPLETIONS, {"prompt": [8191]}, {"prompt": [8192]}, 400),
        (COMPLETIONS, {"prompt": [5], "n": 64}, {"prompt": [5], "n": 65}, 422),
        (COMPLETIONS, {"prompt": [[5]] * 1024}, {"prompt": [[5]] * 1025}, 422),
        (COMPLETIONS, {"prompt": ["a"] * 512, "n": 2}, {"prompt": ["a"] * 513, "n": 2}, 422),
        (COMPLETIONS, {"prompt": [5], "stop": ["x"] * 16}, {"prompt": [5], "stop": ["x"] * 17}, 400),
        (COMPLETIONS, {"prompt": [5], "stop_token_ids": [1] * 64}, {"prompt": [5], "stop_token_ids": [1] * 65}, 400),
        (COMPLETIONS, {"prompt": [5], "cache_salt": "x" * 1024}, {"prompt": [5], "cache_salt": "x" * 1025}, 400),
        (COMPLETIONS, padded(LIMIT), padded(LIMIT + 1), 413),
        (COMPLETIONS, padded(LIMIT), padded(MAX_BODY_BYTES), 413),
        ("/detokenize", {"tokens": [5] * 1024}, {"tokens": [5] * 1025}, 400),
    ],
)
def test_what_is_at_a_limit_is_served_and_what_is_beyond_is_refused(server, path, at, beyond, status) -> None:
    default = {"max_tokens": 1} if path == COMPLETIONS else {}
    replies = [server.post(path, body if isinstance(body, bytes) else {**default, **body}) for body in (at, beyond)]
    assert [reply.status for reply in replies] == [200, status]
    if isinstance(at, dict) and "max_tokens" in at:
        assert replies[0].json["usage"]["completion_tokens"] == at["max_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        (COMPLETIONS, {"prompt": [LONG], "n": 65}, "too_many_sequences"),
        (COMPLETIONS, {"prompt": [LONG] * 1025}, "too_many_choices"),
        (COMPLETIONS, b'{"prompt":[' + b'"a",' * 500_000 + b'"a"]}', "too_many"),
        (CHAT, b'{"messages":[' + b'{"role":"user"},' * 100_000 + b'{"role":"user"}]}', "too_many"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}] * 20_000}]}, "too_many"),
        ("/tokenize", {"messages": [{"role": "user"}] * 20_000}, "too_many"),
        ("/detokenize", b'{"tokens":[' + b'"",' * 500_000 + b"5]}", "invalid_value"),
        *((CHAT, {"messages": [{"role": "user"}], "chat_template_kwargs": {n: 5}}, None) for n in RESERVED_OPTIONS),
    ],
    ids=itertools.count(),
)
def test_counts_and_names_are_checked_before_anything_is_encoded(server, path, body, code) -> None:
    """Each text of 1,001 characters is too long as well, which its encoding finds."""
    reply = server.post(path, body)
    assert (reply.status in (400, 422), reply.error["code"]) == (True, code)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": ["a" * 100] * 300}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 300}),
        ("/tokenize", {"prompt": "a" * 30_000}),
    ],
)
def test_the_server_answers_others_while_a_long_text_is_encoded(path: str, body: dict[str, Any]) -> None:
    began, end = threading.Event(), threading.Event()

    class Slow:
        def encode(self, text: str, add_special_tokens: bool) -> Any:
            began.set()
            assert end.wait(30)
            return shipped_tokenizer().backend.encode("a")

    tokenizer = ServerTokenizer("slow", Slow(), vocabulary=shipped_tokenizer().vocabulary)
    with running_server(fake_engine(), tokenizer) as server, concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, path, body)
        assert began.wait(30)
        health = server.get("/health").status
        end.set()
        assert (health, answer.result().status) == (200, 200)


def test_a_prompt_s_cached_tokens_count_once_however_many_choices(server: RunningServer) -> None:
    body = {"prompt": [[1] * 40, [2] * 50], "n": 4, "max_tokens": 3}
    for cached in (0, 32 + 48):
        usage = server.post(COMPLETIONS, body).json["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": cached}
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (90, 2 * 4 * 3)


# Connections.


def raw_request(server: RunningServer, body: dict[str, Any], version: str, times: int = 1) -> socket.socket:
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=30)
    head = f"POST {COMPLETIONS} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(raw)}\r\n\r\n"
    sock.sendall((head.encode() + raw) * times)
    return sock


@pytest.mark.parametrize(("version", "half_closed"), [("1.0", False), ("1.1", True)])
@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_and_old_connections_get_the_whole_answer(stream: bool, version: str, half_closed: bool) -> None:
    body = {"prompt": [5], "max_tokens": 20, "stream": stream}
    with running_server(fake_engine(step_s=0.015)) as server, raw_request(server, body, version) as sock:
        if half_closed:
            sock.shutdown(socket.SHUT_WR)
        answer = http.client.HTTPResponse(sock)
        answer.begin()
        text = answer.read()
        assert answer.getheader("transfer-encoding") == ("chunked" if stream and version == "1.1" else None)
        events = [line for line in text.splitlines() if line.startswith(b"data: ")]
        assert len(events) == 21 and events[-1] == b"data: [DONE]" if stream else json.loads(text)["usage"]
        assert sock.recv(1) == b"" if half_closed or version == "1.0" else True, "nothing more can come, and it is open"
        server.wait_for(**{"http_requests_total{code=200}": 1, "request_failure_total{kind=disconnect}": 0})


def test_a_client_that_reads_late_gets_every_token_in_order() -> None:
    """Events for which the connection has no room wait, and other streams go on."""
    with running_server(fake_engine(branching, vocab_size=1 << 20)) as server:
        body = {"prompt": [5], "max_tokens": 1000, "n": 16, "stream": True, "return_token_ids": True}
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.settimeout(30)
            sock.connect(("127.0.0.1", server.port))
            raw = json.dumps(body).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(raw)
            sock.sendall(head + raw)
            server.wait_for(generation_tokens_total=16_000)
            assert server.post(COMPLETIONS, {"prompt": [6], "max_tokens": 5}).status == 200
            answer = http.client.HTTPResponse(sock)
            answer.begin()
            events = answer.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    ids: dict[int, list[int]] = {}
    for event in events[:-2]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            ids.setdefault(choice["index"], []).extend(choice["token_ids"])
    assert ids == {index: [100, *(100 + 100 * index + at for at in range(1, 1000))] for index in range(16)}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_of_http_1_0_that_ends_its_side_has_left(stream: bool) -> None:
    with running_server(fake_engine(step_s=0.02)) as server:
        sock = raw_request(server, {"prompt": [5], "max_tokens": 1000, "stream": stream}, "1.0")
        server.wait_for(num_requests_running=1)
        sock.close()
        metrics = server.wait_for(**{"http_requests_total{code=499}": 1, "num_requests_running": 0})
        assert metrics["generation_tokens_total"] < 1000


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_the_queue_is_gone_from_it(stream: bool, reset: bool) -> None:
    with running_server(fake_engine(max_num_seqs=1, step_s=0.05)) as server:
        first = server.open_request({"prompt": [5], "max_tokens": 1000})
        server.wait_for(num_requests_running=1)
        second = server.open_request({"prompt": [6], "max_tokens": 1000, "stream": stream})
        server.wait_for(num_requests_waiting=1)
        assert not stream or second.recv(65536)  # what is not read makes a reset of any end
        second.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", reset, 0))
        second.close()
        metrics = server.wait_for(num_requests_waiting=0)
        assert (metrics["num_requests_running"], metrics["request_success_total{finished_reason=length}"]) == (1, 0)
        first.close()
        server.wait_for(**{"http_requests_total{code=499}": 2, "kv_pages_owned": 0})


def test_clients_that_leave_before_the_head_of_their_answer_are_no_errors() -> None:
    """Of two requests on the connection the second hears of it, which has not begun."""
    with running_server(fake_engine(step_s=0.02)) as server:
        sock = raw_request(server, {"prompt": [5], "max_tokens": 1000, "stream": True}, "1.1", times=2)
        server.wait_for(num_requests_running=1)
        sock.close()
        metrics = server.wait_for(**{"http_requests_total{code=499}": 1, "num_requests_running": 0})
        assert metrics["http_requests_total{code=500}"] == 0
        assert metrics["generation_tokens_total"] < 1000


def test_every_reference_of_the_description_resolves(server: RunningServer) -> None:
    document = server.get("/openapi.json").json
    references = set(re.findall(r'"\$ref": ?"([^"]+)"', json.dumps(document)))
    assert "#/components/schemas/ChatBody" in references
    for reference in references:
        target: Any = document
        for key in reference.removeprefix("#/").split("/"):
            target = target[key]


# Bodies that nobody would send.

ODD: list[Any] = [None, True, 0, -1, 2**63, 1e300, "", "\u0000", "a" * 3000, [], {}, [[[]]], {"self": 1},
                  ["\U0001f980"] * 2000]  # fmt: skip
KEYS = ["prompt", "messages", "tokens", "max_tokens", "n", "stop", "stream", "chat_template_kwargs", "role", "content",
        "text", "stream_options", "generation_config", "echo", "best_of", "logit_bias", "self", ""]  # fmt: skip
PLAIN = {
    COMPLETIONS: {"prompt": ["a", "b"], "max_tokens": 2, "stream": True, "stream_options": {}},
    CHAT: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 2, "stop": ["x"]},
    "/tokenize": {"messages": [{"role": "user", "content": "a"}], "chat_template_kwargs": {"tools": []}},
    "/detokenize": {"tokens": [1, 2, 3]},
}


def changed(value: Any, rng: random.Random) -> Any:
    """``value`` with one part changed, somewhere within."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice([*ODD, value])
    if isinstance(value, dict):
        key = rng.choice([*value, *value, rng.choice(KEYS)])
        return {**value, key: changed(value.get(key), rng)}
    place = rng.randrange(len(value))
    return [*value[:place], changed(value[place], rng), *value[place + 1 :][:3] * rng.choice([1, 1, 3000])]


def damaged(raw: bytes, rng: random.Random) -> bytes:
    """``raw`` cut, with one part repeated, or with one byte changed."""
    start = rng.randrange(len(raw))
    end = start + rng.randrange(200)
    part = rng.choice([b"", raw[start:end] * rng.choice([2, 3000]), bytes([rng.randrange(256)])])
    return (raw[:start] + part + raw[end:])[:LIMIT]


@pytest.mark.full
def test_no_body_of_500_stops_the_server(server: RunningServer) -> None:
    rng = random.Random(41)
    for number in range(500):
        path = rng.choice(list(PLAIN))
        body = PLAIN[path]
        for _ in range(rng.randint(1, 3)):
            body = changed(body, rng)
        raw = json.dumps(body).encode()
        reply = server.post(path, damaged(raw, rng) if number % 4 == 0 and len(raw) > 1 else raw)
        assert reply.status in (200, 400, 404, 413, 422), (path, raw[:300], reply.body)
        if reply.status != 200:
            assert 0 < len(reply.error["message"]) < 1000, (path, raw[:300])
    metrics = server.wait_for(num_requests_running=0, num_requests_waiting=0, kv_pages_owned=0)
    assert metrics["http_requests_total{code=500}"] == 0
    assert server.get("/health").status == 200
