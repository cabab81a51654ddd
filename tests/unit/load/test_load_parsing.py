"""Parsing of finished streams: framing, events, arrival times of tokens, and the quirks that a dialect forgives."""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right

import pytest
from pydantic import ValidationError

from kvbench.common.schema import explain
from kvbench.load.completion import Completion, judge
from kvbench.load.endpoints import OPENAI, Dialect
from kvbench.load.http import MalformedStream, Response, ResponseReader, events
from kvbench.targets.presets import PRESETS

TRANSFORMERS = PRESETS["transformers"].dialect
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def token(
    text: str, ids: list[int] | None = None, finish: str | None = None, index: object = 0, **more: object
) -> bytes:
    choice: dict = {"index": index, "text": text, "finish_reason": finish}
    if ids is not None:
        choice["token_ids"] = ids
    return b"data: " + json.dumps({"choices": [choice], **more}).encode() + b"\n\n"


def ending(tokens: int) -> bytes:
    usage = {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": tokens}}
    return chunk(b"data: " + json.dumps(usage).encode() + b"\n\n" + b"data: [DONE]\n\n") + b"0\r\n\r\n"


def judged(*reads: bytes, max_tokens: int = 8, dialect: Dialect = OPENAI, **answers: int) -> Completion:
    """The outcome when read k arrived at time k."""
    return judge([float(k) for k in range(len(reads))], list(reads), max_tokens, dialect=dialect, **answers)


def test_every_split_of_the_bytes_gives_the_same_tokens() -> None:
    """Interim responses and trailers are no part of the body."""
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    body = chunk(token(" a", [1])) + chunk(token(" ü", [2, 3]) + token("", [4], "stop")) + ending(4)
    whole = early + HEAD + body[:-2] + b"X-Checksum: 0\r\nServer-Timing: total\r\n\r\n"
    for cut in range(1, len(whole)):
        out = judged(whole[:cut], whole[cut:])
        assert out.ok, (cut, out.error)
        assert (out.http_status, out.text, out.token_ids) == (200, " a ü", [1, 2, 3, 4])
        assert out.chunk_tokens == [1, 2, 1]
    assert not Response([whole[:-1]]).complete  # the trailers' end is the response's


def test_token_whose_text_is_held_back_is_the_first_and_the_text_the_first_output() -> None:
    out = judged(HEAD, chunk(token("", [195])), chunk(token("ü", [188])), chunk(token("", None, "stop")) + ending(2))
    assert out.chunk_times == [1.0, 2.0]
    assert (out.first, out.first_output) == (1.0, 2.0)
    # The last, empty chunk carries no ids; the two before do. Ids are known for all chunks that carry tokens.
    assert out.chunk_tokens == [1, 1]
    assert out.ok
    without = judged(HEAD, chunk(token("", [195])), chunk(token("", [196], "length")) + ending(2))
    assert without.ok and without.first == without.first_output == 1.0


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
    told = token("", None, "length", usage={"prompt_tokens": 4, "completion_tokens": 5})
    assert judged(HEAD + chunk(told) + ending(5)).error_kind == "usage_mismatch"
    nothing = judged(HEAD + chunk(token("", None, "stop", detail="no error")) + ending(0))  # the model stopped at once
    assert nothing.ok
    assert nothing.first is None


FULL = "Context size has been exceeded."


ERRORS = [
    'data: {"error": {"message": "%s", "type": "BadRequestError", "code": 400}}',  # vLLM, SGLang, llama.cpp
    'error: {"code": 500, "message": "%s", "type": "server_error"}',  # llama.cpp until September 2025
    'data: {"object": "error", "message": "%s", "type": "BadRequest", "code": 400}',  # older vLLM
    'event: error\ndata: {"error": "%s", "error_type": "generation"}',  # TGI
    'data: {"error": "%s"}',  # transformers serve
    'event: error\ndata: {"message": "%s", "type": "internal", "code": 500}',
    'data: {"message": "%s", "type": "error"}\nevent:error',  # OpenAI's Responses
    'data: {"type": "error", "code": "server_error", "message": "%s"}',
    "event: error\ndata: %s",
    'data: {"detail": "%s"}',
]


@pytest.mark.parametrize("line", ERRORS)
@pytest.mark.parametrize("place", [1, 2, 3, 4, 5])
def test_an_error_within_the_stream_is_the_servers_own_sentence(line: str, place: int) -> None:
    """After the first token, in the middle, after the last, after the usage, and after [DONE]."""
    usage = b"data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 2}}).encode()
    parts = [token("a"), token("b", None, "length"), usage + b"\n\n", b"data: [DONE]\n\n"]
    assert judged(HEAD, *map(chunk, parts), b"0\r\n\r\n").ok
    parts.insert(place - 1, (line % FULL).encode() + b"\n\n")
    out = judged(HEAD, *map(chunk, parts), b"0\r\n\r\n")
    assert (out.error_kind, out.error) == ("server_error", FULL)
    cut = judge([0.0] * 2, [HEAD, chunk(b"".join(parts))], 8, "truncated", "the connection broke")
    assert (cut.error_kind, cut.error) == ("server_error", FULL)


def test_an_error_event_may_be_without_words_and_a_ping_is_nothing() -> None:
    whole = [token("a", None, "length"), ending(1)]
    assert judged(HEAD, chunk(b"event: error\n\n" + whole[0]), whole[1]).error_kind == "server_error"
    for ping in (b": ping\n\n", b'event: ping\ndata: {"type": "ping"}\n\n', b"event: ping\ndata: \n\n"):
        out = judged(HEAD, chunk(ping + whole[0] + ping), whole[1].replace(b"\n\n\r\n", b"\n\n\r\n"))
        assert out.ok and out.chunk_times == [1.0], out.error


@pytest.mark.parametrize(
    ("body", "kind", "sentence"),
    [
        ({"error": {"message": FULL, "code": 503}}, "server_error", FULL),
        ({"object": "error", "message": FULL}, "server_error", FULL),
        ({"detail": FULL}, "server_error", FULL),
        ({"choices": [{"text": "a"}], "usage": {}}, "not_streamed", "one JSON object, though a stream was asked for"),
        ({"status": FULL}, "malformed", "no stream of events"),
        (b'{"response": "a"}\n{"response": "b"}\n', "malformed", "no stream of events"),
        (b"<html><h1>Bad gateway</h1></html>\n\n", "malformed", '"Bad gateway"'),
        (gzip.compress(b"data: [DONE]\n\n", mtime=0), "malformed", "the answer is compressed (gzip)"),
        (b"", "malformed", "the answer is compressed (br)"),
    ],
)
@pytest.mark.parametrize("status", [200, 503])
def test_what_is_no_stream_of_events_is_said_in_one_sentence(
    body: object, kind: str, sentence: str, status: int
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    said = b"Content-Encoding: br\r\n" if "(br)" in sentence else b""
    out = judged(b"HTTP/1.1 %d X\r\n%bContent-Length: %d\r\n\r\n%b" % (status, said, len(data), data))
    assert out.error_kind == (kind if status == 200 else "http_error") and out.error.isprintable()
    assert sentence in out.error or (status != 200 and "compressed" not in sentence)
    assert FULL not in sentence or (status == 200 or out.error == f"HTTP 503: {FULL}")


def words(*texts: str, finish: str | None = "length", **more: object) -> list[bytes]:
    """A chunk a text, each read at a second of its own from 1 on; the last has the finish_reason."""
    return [
        chunk(token(text, None, finish if k == len(texts) else None, **more)) for k, text in enumerate(texts, start=1)
    ]


LAST_CHUNKS = [  # texts; their finish_reason; tokens by the usage; times of the chunks that brought a token
    ("a b c", "length", 3, [1, 2, 3]),  # the usual: each token has text
    ("a b c -", "length", 3, [1, 2, 3]),  # a last chunk with nothing but the finish_reason, however late
    ("a b -", "stop", 3, [1, 2, 3]),  # vLLM: the end token comes with the finish_reason
    ("a b -+-", "stop", 3, [1, 2, 3]),  # llama.cpp: it has a chunk of its own; + is one read of two
    ("a b - -", "stop", 3, [1, 2, 3]),  # where that of the finish_reason comes later
    ("a b - -", "length", 4, [1, 2, 3, 4]),  # half a character that never became a whole one
    ("a - b -", "length", 3, [1, 3]),  # one token without text, and two chunks that may have brought it
    ("a - b -", "length", 4, [1, 2, 3, 4]),
    ("a - b", "length", 3, [1, 2, 3]),
    ("a - - b -", "length", 4, [1, 2, 3, 4]),  # at most one of them is not certain
    ("a - b", "length", 4, [1, 3]),  # several tokens a chunk: nothing tells that this one brought any
    ("a b+-", "length", 3, [1, 2]),  # a held back token came with "b", and the end right after it
    ("a b - - -", "length", 3, [1, 2]),  # one token, and two empty chunks that may have brought it
    ("ab cd -", "length", 6, [1, 2]),  # several tokens a chunk: nothing tells whether the end brought one
    ("ab cd", "length", 6, [1, 2]),
]


@pytest.mark.parametrize(("texts", "finish", "told", "times"), LAST_CHUNKS)
def test_the_last_chunk_is_the_last_that_brought_a_token(texts, finish, told: int, times: list[float]) -> None:
    chunks = iter(words(*("" if text == "-" else text for text in re.split(r"[ +]", texts)), finish=finish))
    out = judged(HEAD, *(b"".join(next(chunks) for _ in read.split("+")) for read in texts.split(" ")), ending(told))
    assert out.ok, out.error
    assert out.chunk_times == times and out.first == 1.0 and out.chunk_tokens is None
    assert out.coalesced == 0


def test_a_usage_in_every_chunk_tells_which_brought_tokens() -> None:
    """As vLLM and SGLang send it with continuous_usage_stats: the last chunk brought none, the one before it did."""

    def run(*counts: int) -> Completion:
        texts = ("a", "bc", "", "")
        reads = [
            chunk(token(text, None, "stop" if k == 3 else None, usage={"prompt_tokens": 4, "completion_tokens": count}))
            for k, (text, count) in enumerate(zip(texts, counts, strict=True))
        ]
        return judged(HEAD, *reads, ending(counts[-1]))

    assert [run(*counts).chunk_times for counts in ((1, 3, 4, 4), (1, 3, 3, 4), (1, 3, 3, 3), (1, 3, 5, 8))] == [
        [1, 2, 3], [1, 2, 4], [1, 2], [1, 2, 3, 4],
    ]  # fmt: skip


def delta(finish: str | None = None, **fields: object) -> bytes:
    """A chunk of a chat."""
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def test_a_role_announces_an_answer_and_brings_no_token() -> None:
    reads = (delta(content="", role="assistant"), delta(content="a"), delta(content="b"))
    reads += (delta("stop", content="", role="assistant"),)
    assert judged(HEAD, *reads, ending(3)).chunk_times == [2, 3, 4]
    assert judged(HEAD, *reads, ending(2)).chunk_times == [2, 3]


def reasoned(total: int, thought: int) -> bytes:
    usage = {"prompt_tokens": 4, "completion_tokens": total, "completion_tokens_details": {"reasoning_tokens": thought}}
    return chunk(b"data: " + json.dumps({"usage": usage}).encode() + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n"


HIDDEN = [  # chunks; output and reasoning tokens by the usage; the first token's time, tokens without a chunk
    (words("a", "b", "c"), 7, 4, 1, 4),  # hidden: the reasoning came without a chunk
    (words("a", "b", "c"), 3, 0, 1, 0),
    (words("ab", "cd"), 8, 4, 1, 4),  # and chunks of two tokens after it
    (words("a", "b", "c"), 3, 4, 1, 4),  # a server that does not count reasoning among the output
    (words("ab<think>", "c", "d</think>"), 6, 4, 1, 0),  # the reasoning is in the text, two tokens a chunk
    (words("", "", "", "a", "b"), 5, 3, 1, 0),  # each of its tokens had a chunk, without text
    (words("", "a", "b"), 6, 4, 2, 4),  # one chunk without text does not tell of four tokens
    ([delta(reasoning="r"), *words("a", "b")[:2]], 8, 6, 1, 5),  # a summary: most of it was not streamed
    ([delta(reasoning="r s"), *words("a b", "c d")[:2]], 8, 4, 1, 0),  # all was, in chunks of several tokens
    ([*[delta(reasoning="r")] * 6, *words("a", "b")[:2]], 5, 3, 1, 0),  # a summary that is longer than what it sums
]


@pytest.mark.parametrize(("reads", "total", "thought", "first", "unstreamed"), HIDDEN)
def test_reasoning_that_is_not_streamed_was_before_the_first_chunk(reads, total, thought, first, unstreamed) -> None:
    out = judged(HEAD, *reads, reasoned(total, thought))
    assert out.ok, out.error
    total += thought if thought > total else 0
    assert (out.first, out.unstreamed_tokens, out.streamed_tokens) == (first, unstreamed, total - unstreamed)


def test_tokens_without_text_at_the_start_are_counted_where_the_usage_has_as_many() -> None:
    out = judged(HEAD, *words("", "", "a", "b"), ending(4))
    assert out.ok and (out.first, out.first_output, out.chunk_times) == (1, 3, [1, 2, 3, 4])
    for usage in (2, 3, 4):  # one alone may announce the answer: TTFT is the same whatever else the usage counts
        announced = judged(HEAD, *words("", "a", "b"), ending(usage))
        assert announced.ok and (announced.first, announced.chunk_times) == (2, [2, 3])
    ended = judged(HEAD, *words("", "a", "b", ""), ending(3))  # so the third is the end token
    assert ended.ok and (ended.first, ended.chunk_times) == (2, [2, 3, 4])
    silent = judged(HEAD, *words("", "", ""), ending(3))
    assert silent.ok and (silent.first, silent.first_output) == (1, 1)


def test_sequences_that_end_without_text_are_told_apart_by_all_their_tokens() -> None:
    def of(number: int, text: str, finish: str | None = None) -> bytes:
        return chunk(token(text, None, finish, number))

    reads = (of(0, "a"), of(1, "b"), of(0, "", "stop"), of(1, "c"), of(1, "", "stop"))
    for told, times, choices in (
        (5, [1, 2, 3, 4, 5], [0, 1, 0, 1, 1]), (4, [1, 2, 4], [0, 1, 1]), (3, [1, 2, 4], [0, 1, 1])
    ):  # fmt: skip
        out = judged(HEAD, *reads, ending(told), n=2)
        assert out.ok and (out.chunk_times, out.chunk_choices) == (times, choices)


@pytest.mark.parametrize("count", [12.0, 12.5, "12", True, -1, 1 << 31, None])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_usage_whose_counts_are_no_whole_numbers_is_malformed_and_named(name: str, count: object) -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 1, name: count}
    out = judged(HEAD, chunk(token("a", None, "stop", usage=usage)) + ending(1))
    assert out.error_kind == "malformed" and name in out.error and str(count) in out.error


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("stop", None), ("length", None), ("eos_token", None)]
    + [(reason, "not_finished") for reason in ("abort", "error", "timeout", "content_filter")],
)
def test_a_stream_that_the_server_gave_up_is_a_failure(reason: str, kind: str | None) -> None:
    """Three of eight tokens, a usage that matches and [DONE]: vLLM ends an aborted request like this."""
    events_ = token(" a", [1]) + token(" b", [2]) + token(" c", [3], reason)
    out = judged(HEAD + chunk(events_) + ending(3))
    assert out.error_kind == kind and out.output_tokens == 3
    assert out.ok or repr(reason) in out.error
    resumed = judged(HEAD + chunk(events_ + token("d", [4], "length")) + ending(4))
    assert resumed.error_kind == kind and (resumed.ok or repr(reason) in resumed.error)
    own = Dialect(finish_reasons=["content_filter"])
    assert judged(HEAD + chunk(events_) + ending(3), dialect=own).ok == (reason == "content_filter")


def test_chunked_body_knows_when_it_is_whole() -> None:
    whole = HEAD + b"5\r\nhello\r\n1;ext=1\r\n!\r\n0\r\n\r\n"
    assert Response([whole]).body == b"hello!"
    assert Response([whole]).complete
    assert not any(Response([whole[:n]]).complete for n in range(len(whole)))
    bytewise = Response([whole[i : i + 1] for i in range(len(whole))])
    assert bytewise.body == b"hello!" and bytewise.complete
    for k in range(6):  # byte k of the body came with the piece in which it lies
        piece = bisect_right(bytewise.ends, k)
        assert whole[piece : piece + 1] == b"hello!"[k : k + 1]


def test_events_follow_the_standard() -> None:
    body = b": comment\n\ndata: a\ndata: b\n\nevent: x\nid: 3\ndata:c\r\n\r\ndata: rest"
    found, rest = events(body)
    assert [(event.data, event.name) for event in found] == [(b"a\nb", b""), (b"c", b"x")]
    assert rest == b"data: rest"
    assert [event.end for event in found] == [body.index(b"event"), body.index(b"data: rest")]
    assert events(b"data: a\n\n: bye") == ([(b"a", 9, b"")], b"")
    with pytest.raises(MalformedStream, match="not a field"):
        events(b"hello world\n\n")


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("blank", ["\n\n", "\r\n\r\n", "\r\r", "\r\n\n", "\n\r\n", "\n\r", "\r\r\n", "\n\n\n"])
def test_lines_end_in_any_way_that_the_standard_allows(blank: str, bom: bytes) -> None:
    line = blank[:2] if blank.startswith("\r\n") else blank[0]
    body = bom + line.join(["data: a", "data: b", f"event: x{blank}: c", f"data: d{blank}"]).encode()
    assert [event.data for event in events(body)[0]] == [b"a\nb", b"d"]
    stream = (token("a") + token("b", None, "length") + ending(2)[4:-9]).replace(b"\n\n", blank.encode())
    stream = stream[: stream.rindex(b"[DONE]") + 6] + blank.encode()
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b%b" % (len(bom + stream), bom, stream)
    for cut in (1, len(whole) // 2, len(whole) - 1):
        out = judged(whole[:cut], whole[cut:])
        assert out.ok and out.text == "ab", out.error


def fed(*pieces: bytes) -> ResponseReader:
    reader = ResponseReader()
    for piece in pieces:
        reader.feed(piece)
    return reader


def test_heads() -> None:
    assert not fed(b"HTTP/1.1 200 O").begun
    reader = fed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\nConnection: close\r\n\r\n")
    assert (reader.status, reader.begun, reader.complete, reader.until_close) == (404, True, False, False)
    reader.feed(b"ab")
    assert reader.complete and not reader.reusable  # the server said that it closes
    for nothing in (b"204 No Content", b"304 Not Modified"):
        assert fed(b"HTTP/1.1 " + nothing + b"\r\nContent-Length: 5\r\n\r\n").complete
    assert fed(b"HTTP/1.1 200 OK\r\n\r\nabc").until_close
    assert not fed(b"HTTP/1.1 200 OK\r\n\r\nabc").complete


@pytest.mark.parametrize("surplus", [b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", b"stray", b"\r\n0\r\n\r\n"])
def test_bytes_after_the_response_are_malformed(surplus: bytes) -> None:
    whole = HEAD + chunk(b"x") + b"0\r\n\r\n"
    assert fed(whole).reusable
    for pieces in ((whole, surplus), (whole + surplus,)):
        with pytest.raises(MalformedStream, match="after the response's end"):
            fed(*pieces)


USAGE = {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}
DONE = b"data: [DONE]\n\n"


def streamed(events_: list[bytes], dialect: Dialect) -> Completion:
    """The outcome of a stream with one event a read, after the head."""
    return judged(HEAD, *map(chunk, events_), b"0\r\n\r\n", max_tokens=3, dialect=dialect)


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (token("", None, "length", usage=USAGE), None),
        (b": bye\n\n", "no_finish_reason"),
        (token("", None, "length", usage=USAGE | {"completion_tokens": 1}), "usage_mismatch"),
        (token("", None, "length", usage=USAGE | {"completion_tokens": 4}), "usage_mismatch"),
        (token("", None, "length"), "no_usage"),
    ],
)
def test_a_stream_of_transformers_serve_needs_no_end_mark_and_every_other_sign(last: bytes, kind: str | None) -> None:
    """As transformers serve 5.23 streams: usage in the last chunk, whose text is empty, and no [DONE]."""
    stream = [*map(token, ("2107", " 2107", " 2107")), last]
    out = streamed(stream, TRANSFORMERS)
    assert out.error_kind == kind and streamed([*stream, DONE], TRANSFORMERS).error_kind == kind
    if kind is None:
        assert (out.prompt_tokens, out.output_tokens, out.text) == (7, 3, "2107 2107 2107")
        assert out.chunk_times == [1.0, 2.0, 3.0] and streamed(stream, OPENAI).error_kind == "no_done"


def test_a_server_without_usage_is_counted_by_its_ids_else_by_its_chunks() -> None:
    silent = Dialect(usage=False)
    assert streamed([token("a", [1, 2]), token("b", [3], "length"), DONE], silent).output_tokens == 3
    plain = [token("a"), token("b", None, "length"), DONE]
    assert streamed(plain, silent).output_tokens == 2
    assert streamed(plain, OPENAI).error_kind == "no_usage"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"endpoint": "v1/completions"}, "'v1/completions'"),
        ({"extra_body": {"prompt": "x"}}, "extra_body cannot set 'prompt'"),
        ({"done_markers": False}, "did you mean `done_marker`?"),
        ({"usage": "no"}, "'no' is not true or false"),
    ],
)
def test_a_dialect_that_cannot_be_meant(fields: dict, sentence: str) -> None:
    with pytest.raises(ValidationError) as error:
        Dialect.model_validate(fields)
    assert sentence in " ".join(explain(error.value, "dialect"))


# Two sequences of three tokens each, one event a read.
TWO = [
    token("a", [1], index=0), token("x", [7], index=1), token("y", [8], index=1), token("b", [2], index=0),
    token("z", [9], "length", index=1), token("c", [3], "stop", index=0),
]  # fmt: skip


def several(events_: list[bytes], told: int, **answers: int) -> Completion:
    return judged(HEAD, *map(chunk, events_), ending(told), max_tokens=3, **answers)


def test_each_chunk_belongs_to_its_choice() -> None:
    out = several(TWO, 6, n=2)
    assert out.ok, out.error
    assert out.chunk_times == [1, 2, 3, 4, 5, 6] and out.chunk_choices == [0, 1, 1, 0, 1, 0]
    assert out.token_ids == [1, 2, 3, 7, 8, 9] and out.text == "abc\nxyz" and out.chunk_tokens == [1] * 6
    assert (out.output_tokens, out.finish_reason, out.first) == (6, "length", 1.0)
    assert several([token("a", [1], "stop")], 1).chunk_choices is None


@pytest.mark.parametrize(
    ("events_", "told", "n", "kind"),
    [
        (TWO[:4] + TWO[5:], 5, 2, "no_finish_reason"),  # of sequence 1
        ([], 0, 2, "no_finish_reason"),
        (TWO, 6, 3, "no_finish_reason"),  # a server that ignores n, or gives fewer
        (TWO, 6, 1, "malformed"),  # more than were asked for
        (TWO, 5, 2, "usage_mismatch"),
        (TWO, 7, 2, "usage_mismatch"),
        ([*TWO[:5], token("c", [3], "abort")], 6, 2, "not_finished"),
        ([token("a", [1], "stop", index=-1)], 1, 2, "malformed"),
        ([token("a", [1], "stop", index="1")], 1, 2, "malformed"),
    ],
)
def test_every_choice_must_end_well(events_: list[bytes], told: int, n: int, kind: str) -> None:
    assert several(events_, told, n=n).error_kind == kind


def test_one_event_may_carry_all_choices_and_their_usage() -> None:
    """As vLLM answers a beam search that was to be streamed: the whole response as one event."""
    choices = [{"index": i, "text": t, "token_ids": [i, 9], "finish_reason": "length"} for i, t in enumerate("ab")]
    whole = {"choices": choices, "usage": {"prompt_tokens": 4, "completion_tokens": 4}}
    body = chunk(b"data: " + json.dumps(whole).encode() + b"\n\ndata: [DONE]\n\n")
    out = judged(HEAD, body, b"0\r\n\r\n", n=2)
    assert out.ok and out.coalesced == 0, out.error
    assert (out.chunk_times, out.chunk_choices, out.chunk_tokens) == ([1.0, 1.0], [0, 1], [2, 2])
    assert out.token_ids == [0, 9, 1, 9]


@pytest.mark.parametrize(
    ("told", "best_of", "kind"),
    [(12, 4, None), (6, 2, None), (13, 4, "usage_mismatch"), (5, 4, "usage_mismatch"), (9, 3, None)],
)
def test_of_best_of_the_usage_counts_all_and_the_output_what_is_returned(
    told: int, best_of: int, kind: str | None
) -> None:
    out = several(TWO, told, n=2, best_of=best_of)
    assert out.error_kind == kind
    assert out.ok is False or out.output_tokens == 6
    unknown = [token("a", None, "length", index=i) for i in (0, 1)]  # which of the tokens were returned
    assert several(unknown, 12, n=2, best_of=4).error_kind == "usage_mismatch"


def test_only_chunks_of_the_same_sequence_are_coalesced_in_a_read() -> None:
    assert judged(HEAD, chunk(TWO[0] + TWO[1]), *map(chunk, TWO[2:]), ending(6), n=2).coalesced == 0
    assert judged(HEAD, chunk(TWO[0] + TWO[1] + TWO[2]), *map(chunk, TWO[3:]), ending(6), n=2).coalesced == 1
