"""Streams that are wrong on the wire: one name a fault, each the whole answer to one completion request.

Everything here keeps to a few milliseconds, so that one load can hold all of them. ``KINDS`` says which kind of failure
kvbench must count for each; None: the stream is odd but right, and must succeed.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import signal
from collections.abc import Iterable, Iterator
from typing import Any

from tests.support.fake_engine_server import RESET, Wire

TOKENS = 4
SSE = {"content-type": "text/event-stream"}


def token(k: int, **changes: Any) -> dict[str, Any]:
    choice = {"index": 0, "text": f" w{k}", "finish_reason": "length" if k == TOKENS - 1 else None, "token_ids": [k]}
    return {"id": "c", "object": "text_completion", "choices": [choice | changes]}


def usage(**changes: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": TOKENS} | changes}


def data(event: dict[str, Any] | str) -> bytes:
    return f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n".encode()


def good(*, at: int = TOKENS, instead: Iterable[bytes] = (), tail: bytes | None = None, **u: Any) -> list[bytes]:
    """The events of a right stream, with ``instead`` in the place of token ``at``, and another ending if given."""
    events = [data(token(k)) for k in range(TOKENS)]
    events[at : at + 1] = instead
    return [*events, data(usage(**u)) + data("[DONE]") if tail is None else tail]


def chunked(parts: Iterable[bytes], end: bytes = b"0\r\n\r\n", headers: dict[str, str] = SSE) -> bytes:
    head = "".join(f"{k}: {v}\r\n" for k, v in headers.items())
    body = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)
    return f"HTTP/1.1 200 OK\r\n{head}transfer-encoding: chunked\r\n\r\n".encode() + body + end


def sized(body: bytes, *, length: object = None, status: str = "200 OK", kind: str = "text/event-stream") -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {length}\r\n\r\n".encode() + body


def spoilt(**changes: Any) -> bytes:
    """A stream whose token 1 has other fields."""
    return chunked(good(at=1, instead=[data(token(1, **changes))]))


DONE = data(usage()) + data("[DONE]")
WHOLE = {  # an odd stream that is right: it must succeed
    "plain": chunked(good()),
    "comments": chunked([b": ping\n\n", *good(), b": bye\n\n"]),
    "one_chunk": chunked([b"".join(good())]),
    "split": chunked([bytes([b]) for b in b"".join(good())]),
    "crlf": chunked([part.replace(b"\n", b"\r\n") for part in good()]),
    "bom": chunked([b"\xef\xbb\xbf", *good()]),
    "mixed_ends": chunked([part.replace(b"\n\n", b"\r\n\n") for part in good()]),
    "ping": chunked(good(at=1, instead=[b'event: ping\ndata: {"type": "ping"}\n\n' + data(token(1))])),
    "extension": chunked(good()).replace(b"\r\ndata", b";about=nothing\r\ndata"),
    "content_length": sized(b"".join(good())),
    "odd_type": chunked(good(), headers={"content-type": "text/plain"}),
    "chunked_upper": chunked(good()).replace(b"transfer-encoding: chunked", b"Transfer-Encoding: Chunked"),
    "done_twice": chunked(good(tail=DONE + data("[DONE]"))),
    "unicode": chunked(good(at=1, instead=[data(token(1, text="\u2028\U0001f525\x00"))])),
    "surrogate": spoilt(text="\ud800"),
    "role_first": chunked([data({"choices": [{"index": 0, "text": "", "finish_reason": None}]}), *good()]),
    "trailers": chunked(good(), end=b"0\r\nX-Checksum: 12\r\nX-Served-By: mock\r\n\r\n"),
    "early_hints": b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + chunked(good()),
    "close_delimited": b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + b"".join(good()),
}
BROKEN = {  # (the kinds that may be counted, the bytes)
    "no_json": ("malformed", chunked(good(at=1, instead=[data('{"choices": [')]))),
    "no_object": ("malformed", chunked(good(at=1, instead=[data("[1, 2]")]))),
    "no_field": ("malformed", chunked(good(at=1, instead=[b"this is no event\n\n"]))),
    "not_utf8": ("malformed", chunked(good(at=1, instead=[b'data: {"choices": [{"text": "\xff\xfe"}]}\n\n']))),
    "choice_text": ("malformed", chunked(good(at=1, instead=[data({"choices": ["x"]})]))),
    "choices_number": ("malformed", chunked(good(at=1, instead=[data({"choices": 3})]))),
    "choices_object": ("malformed", chunked(good(at=1, instead=[data({"choices": {"text": "x"}})]))),
    "text_number": ("malformed", spoilt(text=5)),
    "text_list": ("malformed", spoilt(text=["x"])),
    "delta_text": ("malformed", chunked(good(at=1, instead=[data({"choices": [{"delta": "x"}]})]))),
    "ids_text": ("malformed", spoilt(token_ids="12")),
    "ids_number": ("malformed", spoilt(token_ids=3)),
    "ids_words": ("malformed", spoilt(token_ids=["a"])),
    "ids_huge": ("malformed", spoilt(token_ids=[1 << 40])),
    "ids_fraction": ("malformed", spoilt(token_ids=[1.5])),
    "finish_number": ("malformed", spoilt(finish_reason=7)),
    "finish_object": ("malformed", spoilt(finish_reason={"why": "x"})),
    "deep": ("malformed", chunked(good(at=1, instead=[data("[" * 100_000)]))),
    "big_number": (
        "malformed",
        chunked(good(at=1, instead=[data('{"usage": {"prompt_tokens": ' + "9" * 5000 + "}}")])),
    ),
    "usage_text": ("malformed", chunked(good(completion_tokens="many"))),
    "usage_list": ("malformed", chunked(good(tail=data({"choices": [], "usage": [4]}) + data("[DONE]")))),
    "usage_infinite": ("malformed", chunked(good(completion_tokens=float("inf")))),
    "usage_huge": ("usage_mismatch malformed", chunked(good(prompt_tokens=1 << 70))),
    "usage_cached_huge": ("usage_mismatch malformed", chunked(good(prompt_tokens_details={"cached_tokens": 1 << 70}))),
    "usage_cached_more": ("usage_mismatch", chunked(good(prompt_tokens_details={"cached_tokens": 6}))),
    "usage_less": ("usage_mismatch", chunked(good(completion_tokens=TOKENS - 1))),
    "usage_more": ("usage_mismatch", chunked(good(completion_tokens=TOKENS + 1))),
    "usage_none": ("no_usage", chunked(good(tail=data("[DONE]")))),
    "usage_negative": ("usage_mismatch malformed", chunked(good(completion_tokens=-TOKENS))),
    "prompt_negative": ("usage_mismatch malformed", chunked(good(prompt_tokens=-5))),
    "no_done": ("no_done", chunked(good(tail=data(usage())))),
    "after_done": ("malformed", chunked(good(tail=DONE + data(token(0))))),
    "no_finish": ("no_finish_reason", chunked(good(at=TOKENS - 1, instead=[data(token(3, finish_reason=None))]))),
    "error_event": ("server_error", chunked(good(at=1, instead=[data({"error": {"message": "out of pages"}})]))),
    "error_named": ("server_error", chunked(good(tail=b"event: error\ndata: out of pages\n\n" + DONE))),
    "error_json": ("server_error", sized(b'{"error": "out of pages"}', kind="application/json")),
    "gzip": ("malformed", sized(gzip.compress(b"".join(good())), kind="text/event-stream\r\ncontent-encoding: gzip")),
    "resumed": ("not_finished", chunked(good(at=1, instead=[data(token(1, finish_reason="abort"))]))),
    "nothing": ("no_finish_reason", chunked([])),
    "half_event": ("truncated malformed no_done", chunked(good(tail=data(usage()) + b"data: [DO"))),
    "bad_chunk": ("malformed", chunked(good()).replace(b"0\r\n\r\n", b"xyz\r\n\r\n0\r\n\r\n")),
    "negative_chunk": ("malformed", chunked(good(), end=b"-5\r\n\r\n0\r\n\r\n")),
    "long_chunk": ("malformed truncated timeout", chunked(good(), end=b"ffffffffffffffff\r\nxx\r\n0\r\n\r\n")),
    "short_chunk": ("malformed", chunked(good(), end=b"1\r\nabcdef\r\n0\r\n\r\n")),
    "endless_size": ("malformed timeout too_long", chunked(good(), end=b"1" * 70_000 + b"\r\n\r\n0\r\n\r\n")),
    "length_text": ("malformed", sized(b"x", length="many")),
    "length_negative": ("malformed", sized(b"x", length=-1)),
    "length_digits": ("malformed too_long", sized(b"x", length="9" * 5000)),
    "length_more": ("truncated timeout", sized(b"".join(good()), length=100_000)),
    "status_huge": ("http_error malformed", sized(b"{}", status="99999999999999999999 Odd")),
    "status_word": ("malformed", sized(b"{}", status="OK OK")),
    "no_content": ("http_error", b"HTTP/1.1 204 No Content\r\n\r\n"),
    "redirect": ("http_error", sized(b"", status="307 Temporary Redirect\r\nlocation: http://127.0.0.1:9/")),
    "http500": ("http_error", sized(b'{"error": {"message": "under fire"}}', status="500 Fire")),
    "http429": ("http_error", sized(b"slow down", status="429 Too Many", kind="text/plain")),
    "http503_empty": ("http_error", sized(b"", status="503 Away")),
    "html": (  # without connection: close a kept connection may be reset before the next answer
        "malformed",
        sized(b"<h1>Bad gateway</h1>", status="200 OK\r\nconnection: close", kind="text/html"),
    ),
    "json": ("not_streamed", sized(json.dumps(token(3)).encode(), kind="application/json")),
    "not_http": ("malformed", b"\x16\x03\x01\x00 SSH-2.0\r\n\r\n"),
    "long_head": ("malformed too_long no_finish_reason", b"HTTP/1.1 200 OK\r\nx: " + b"a" * 100_000 + b"\r\n\r\n"),
    "no_head": ("truncated malformed", b"HTTP/1.1 200"),
    "trailing": ("timeout malformed truncated", chunked(good(), end=b"0\r\n\r\nstray bytes")),
    "half_stream": ("truncated", chunked(good()[:2], end=b"")),
    "silent_close": ("dropped connection", b""),
    "reset": ("dropped truncated connection", b""),
    "switch": ("malformed", b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n"),
}
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DRIP_S = 0.02
ENDLESS = {  # the kind, how it begins, what follows for ever and how often [s]; 0.5 s and some MiB must be enough of it
    "hang": ("timeout", b"", b"", 9),
    "half_head": ("timeout", HEAD + b"content-le", b"", 9),
    "drip_head": ("timeout", HEAD + b"x-drip: ", b"a", DRIP_S),
    "drip_body": ("timeout", CHUNKED, b"1\r\n:\r\n", DRIP_S),
    "drip_length": ("timeout", HEAD + b"content-type: text/plain\r\ncontent-length: 1000000\r\n\r\n", b"#", DRIP_S),
    "flood": ("too_long", CHUNKED, b"10000\r\n" + b":" * 65536 + b"\r\n", 0),
    "flood_length": ("too_long", HEAD + b"content-length: 1000000000000\r\n\r\n", b"#" * 65536, 0),
}
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
LATE = {  # a right answer, and 20 ms later what nobody has asked for
    "stray": (chunked(good()), b"stray bytes\r\n\r\n"),
    "second_answer": (chunked(good()), chunked(good())),
}
# The server hangs up after these, as it would after an answer it cannot have meant.
CLOSING = (
    "not_http long_head no_head half_stream silent_close trailing long_chunk endless_size length_more length_digits "
    "length_text length_negative switch status_word status_huge close_delimited"
)


def strike(fault: str, status: int = 500) -> Wire:
    """The answer to a request that is not served.

    An answer that promises to keep the connection does: closed later than 5 ms after the next request it would fail
    that one too.
    """
    if fault.startswith("mid_"):
        return Wire(itertools.chain([chunked(good()[:2], end=b""), 0.02], strike(fault[4:], status).pieces))
    if fault in SIGNALS:
        return Wire(_signalled(SIGNALS[fault]))
    if fault == "reset":
        return Wire([RESET])
    if fault == "status":
        body = json.dumps({"error": {"message": f"under fire: {status}"}}).encode()
        return Wire([sized(body, status=f"{status} Fire\r\nconnection: close", kind="application/json")])
    if fault in BROKEN:
        return wire(fault)
    _, begins, piece, pause_s = ENDLESS[fault]
    return Wire(itertools.chain([begins], itertools.cycle([piece, pause_s])))


def _signalled(number: int) -> Iterator[bytes]:
    os.kill(os.getpid(), number)
    yield b""


def wire(name: str) -> Wire:
    """The answer of that name."""
    if name in ENDLESS or name == "reset":
        return strike(name)
    answer, *late = LATE.get(name) or [WHOLE[name] if name in WHOLE else BROKEN[name][1] if name in BROKEN else b""]
    return Wire([answer, *(part for each in late for part in (0.02, each))], keep=name not in CLOSING.split())
