"""300 spoilt answers from one seed: each is judged in time, and is a success only if it has what one must have."""

from __future__ import annotations

import gzip
import http.client
import io
import json
import random
import re
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvbench.load.completion import judge
from kvbench.load.endpoints import OPENAI
from tests.support.fire_wire import TOKENS, WHOLE, chunked, data, sized, token, usage
from tests.support.scripted_http import scripted_server

pytestmark = pytest.mark.full
COUNT, MOST_S = 300, 1.0
CHAT = [{"role": "assistant"}, {"reasoning": "r"}, {"content": "", "role": "assistant"}, {"content": "a"}]
CHAT += [{"content": "b"}, {"tool_calls": [{"function": {"arguments": "{"}}]}, {}]
DELTAS = [data({"choices": [{"delta": d, "finish_reason": None if d else "tool_calls"}]}) for d in CHAT]
END = [data(usage()), data("[DONE]")]
STREAMS = [
    [*(data(token(k)) for k in range(TOKENS)), *END],
    [*(data(token(k, token_ids=None)) for k in range(TOKENS)), *END],
    [*DELTAS, *END],
    [data(json.dumps(token(TOKENS - 1) | usage(completion_tokens=1))), data("[DONE]")],
]
PIECES = [
    b"\n\n", b"\r\n\r", b"\r", b"\xef\xbb\xbf", b"\xff\x00", b"null", b"-1", b"1e999", b"9" * 5000, b"[" * 5000, b'"',
    b"event: error\ndata: x\n\n", b"event: error\n", b"event: ping\n", b"event: error\n\n", b'"error": {"code": 5}, ',
    b'"finish_reason": "abort", ', b'"finish_reason": "stop", ', data("[DONE]"), data({"detail": "x"}), data("{}"),
    data({"choices": [{"text": "more", "finish_reason": "length"}]}), data(usage(completion_tokens=3)), data(usage()),
    gzip.compress(b"data: [DONE]\n\n"), b"Content-Encoding: br\r\n", b"<p", b": comment\n", b"data: ", b"0\r\n\r\n",
]  # fmt: skip


def spoilt(whole: bytes, rng: random.Random) -> bytes:
    """Some bytes less, more, twice or other."""
    made = bytearray(whole)
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        begin = rng.choice([*(m.start() for m in re.finditer(rb"data: |\"|\d", made)), rng.randrange(len(made) + 1)])
        end = begin + rng.choice((0, 0, 1, 3, 40))
        made[begin:end] = rng.choice((b"", rng.choice(PIECES), bytes(made[begin:end]) * 2, rng.randbytes(1)))
    return bytes(made)


def answer(number: int) -> bytes:
    rng = random.Random(number)
    if number % 3 == 0:
        return spoilt(rng.choice(list(WHOLE.values())), rng)
    parts = list(rng.choice(STREAMS))
    for _ in range(rng.choice((0, 0, 1, 2))):
        parts.insert(rng.randrange(len(parts) + 1), rng.choice([*parts, *PIECES]))
    return rng.choice((sized, lambda body: chunked([body])))(spoilt(b"".join(parts), rng))


def may_succeed(wire: bytes) -> bool:
    """The definition of success, with the standard library alone: an end, no error, tokens that match.

    It raises what the standard library raises where something is broken.
    """
    response = http.client.HTTPResponse(SimpleNamespace(makefile=lambda mode: io.BytesIO(wire)))
    response.begin()
    while response.status == 103:
        response.headers = None  # begin() would return at once
        response.begin()
    body = response.read().decode(errors="replace").removeprefix("\ufeff")
    blocks = re.split(r"(?:\r\n|\n|\r(?!\n)){2,}", body)
    fields = [[line.partition(":")[::2] for line in re.split(r"\r\n|\n|\r", block)] for block in blocks]
    if any(name == "error" or (name == "event" and value.strip() == "error") for own in fields for name, value in own):
        return False
    fields = [own for own in fields if ("event", " ping") not in own]
    said = ["\n".join(value.removeprefix(" ") for name, value in own if name == "data") for own in fields]
    told = [json.loads(text) for text in said if text and text != "[DONE]"]
    choices = [choice for event in told for choice in event.get("choices") or ()]
    reasons = {choice["finish_reason"] for choice in choices if choice.get("finish_reason")}
    count = [event["usage"] for event in told if event.get("usage")][-1]["completion_tokens"]
    ids = sum(len(choice.get("token_ids") or ()) for choice in choices)
    speaking = [c for c in choices if c.get("text") or (c.get("delta") or {}).get("content")]
    told_all = all(choice.get("token_ids") is not None for choice in speaking)
    return (
        (response.status, response.headers.get("Content-Encoding", "")) == (200, "")
        and "[DONE]" in said
        and not any(event.get("error") or event.get("detail") or event.get("type") == "error" for event in told)
        and bool(reasons) and reasons <= set(OPENAI.finish_reasons)
        and 0 <= count <= 2 * TOKENS and len(speaking) <= count and (ids == count or not told_all)
    )  # fmt: skip


def test_a_spoilt_answer_is_judged_in_time_and_never_a_success_that_it_is_not() -> None:
    successes = 0
    for number in range(COUNT):
        wire, rng = answer(number), random.Random(-number)
        cuts = sorted(rng.randrange(len(wire) + 1) for _ in range(rng.choice((0, 1, 5, 200))))
        pieces = [wire[a:b] for a, b in zip([0, *cuts], [*cuts, len(wire)], strict=True)]
        begun = time.process_time()
        out = judge([float(k) for k in range(len(pieces))], pieces, 2 * TOKENS)
        assert time.process_time() - begun < MOST_S, (number, wire)
        assert out.ok or (out.error and out.error.isprintable()), (number, wire)
        if out.ok:
            assert may_succeed(wire), (number, wire)
        successes += out.ok
    assert COUNT / 10 < successes < COUNT / 2  # neither is everything refused, nor nothing spoilt


def test_the_client_ends_every_spoilt_exchange(exchange: Callable[..., list[list[dict]]]) -> None:
    """The same answers over connections that the server closes."""

    limits = dict.fromkeys(("connect", "first_byte", "idle", "total"), 50)
    with scripted_server(lambda path, body: answer(body["prompt"][0])) as server:
        jobs = [{"model": "m", "prompt": [k], "max_tokens": 2 * TOKENS, "timeouts": limits} for k in range(COUNT)]
        done = [outcome for (outcome,) in exchange(jobs, url=server.url)]
    for number, outcome in enumerate(done):
        assert outcome["ok"] or (outcome["error"] and outcome["error_kind"] not in ("timeout", "refused")), number
        assert not outcome["ok"] or may_succeed(answer(number)), number
