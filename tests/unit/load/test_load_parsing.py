"""Parsing of finished streams: framing, events, arrival times of tokens."""

from __future__ import annotations

import json

import pytest

from kvbench.load.completion import Completion, judge
from kvbench.load.sse import MalformedStream, dechunk, events, parse_head

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(text: str, ids: list[int] | None = None, finish: str | None = None) -> bytes:
    choice: dict = {"index": 0, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def ending(tokens: int) -> bytes:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
    return chunk(b"data: " + json.dumps(usage).encode() + b"\n\n" + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def judged(*reads: bytes, max_tokens: int = 8) -> Completion:
    """The outcome when read k arrived at time k."""
    return judge([float(k) for k in range(len(reads))], list(reads), max_tokens)


def test_a_token_is_stamped_by_the_read_that_completed_it() -> None:
    first, second = chunk(token(" a", [1])), chunk(token(" b", [2], "length"))
    out = judged(HEAD, first[:10], first[10:] + second[:5], second[5:], ending(2))
    assert out.ok, out.error
    assert out.chunk_times == [2.0, 3.0]
    assert out.coalesced == 0


def test_every_split_of_the_bytes_gives_the_same_tokens() -> None:
    whole = HEAD + chunk(token(" a", [1])) + chunk(token(" ü", [2, 3]) + token("", [4], "stop")) + ending(4)
    for cut in range(1, len(whole)):
        out = judged(whole[:cut], whole[cut:])
        assert out.ok, (cut, out.error)
        assert out.text == " a ü"
        assert out.token_ids == [1, 2, 3, 4]
        assert out.chunk_tokens == [1, 2, 1]


def test_token_whose_text_is_held_back_counts_but_is_no_first_content() -> None:
    out = judged(HEAD, chunk(token("", [195])), chunk(token("ü", [188])), chunk(token("", None, "stop")) + ending(2))
    assert out.chunk_times == [1.0, 2.0]
    assert out.first == 2.0
    # The last, empty chunk carries no ids; the two before do. Ids are known for all chunks that carry tokens.
    assert out.chunk_tokens == [1, 1]
    assert out.ok


def test_output_without_any_text_still_has_a_first_token() -> None:
    out = judged(HEAD, chunk(token("", [195])), chunk(token("", [196], "length")) + ending(2))
    assert out.ok
    assert out.first == 1.0


@pytest.mark.parametrize(
    ("told", "max_tokens", "ids", "kind"),
    [
        (2, 8, True, None),
        (3, 8, True, "usage_mismatch"),
        (1, 8, True, "usage_mismatch"),
        (2, 1, True, "usage_mismatch"),
        (2, 8, False, None),
        (3, 8, False, None),  # without ids, a chunk may have carried two tokens
        (1, 8, False, "usage_mismatch"),
    ],
)
def test_usage_must_match_what_was_streamed(told: int, max_tokens: int, ids: bool, kind: str | None) -> None:
    events_ = token(" a", [1] if ids else None) + token(" b", [2] if ids else None, "length")
    assert judged(HEAD + chunk(events_) + ending(told), max_tokens=max_tokens).error_kind == kind


def test_usage_without_content_is_a_mismatch() -> None:
    out = judged(HEAD + chunk(token("", None, "length")) + ending(5))
    assert out.error_kind == "usage_mismatch"
    nothing = judged(HEAD + chunk(token("", None, "stop")) + ending(0))  # the model stopped at once
    assert nothing.ok
    assert nothing.first is None


def test_transport_failure_wins_over_what_is_missing_because_of_it() -> None:
    out = judge([0.0], [HEAD + chunk(token(" a", [1]))], 8, "timeout", "nothing more came")
    assert out.error_kind == "timeout"
    assert out.chunk_times == [0.0]


def test_chunked_body_knows_when_it_is_whole() -> None:
    whole = b"5\r\nhello\r\n1;ext=1\r\n!\r\n0\r\n\r\n"
    assert dechunk(whole, 0).data == b"hello!"
    assert dechunk(whole, 0).complete
    assert not any(dechunk(whole[:n], 0).complete for n in range(len(whole)))
    body = dechunk(whole, 0)
    assert bytes(whole[body.wire_offset(i)] for i in range(6)) == b"hello!"
    with pytest.raises(MalformedStream, match="not hexadecimal"):
        dechunk(b"zz\r\n", 0)
    with pytest.raises(MalformedStream, match="longer than its size"):
        dechunk(b"2\r\nhello\r\n", 0)


def test_events_follow_the_standard() -> None:
    body = b": comment\n\ndata: a\ndata: b\n\nevent: x\nid: 3\ndata:c\r\n\r\ndata: rest"
    found, rest = events(body)
    assert [data for data, _ in found] == [b"a\nb", b"c"]
    assert rest == b"data: rest"
    assert [position for _, position in found] == [body.index(b"event"), body.index(b"data: rest")]
    with pytest.raises(MalformedStream, match="not a field"):
        events(b"hello world\n\n")


def test_heads() -> None:
    assert parse_head(b"HTTP/1.1 200 O") is None
    head = parse_head(b"HTTP/1.1 404 Not Found\r\nContent-Length: 12\r\nConnection: close\r\n\r\n")
    assert head is not None
    assert (head.status, head.length, head.chunked, head.close) == (404, 12, False, True)
    with pytest.raises(MalformedStream, match="does not begin with HTTP"):
        parse_head(b"SSH-2.0")
