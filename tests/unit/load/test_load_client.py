"""The streaming client against a server with known faults and known send times."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable

import pytest

from kvbench.load.client import Address, StreamingClient, Timeouts
from tests.support.loads import stamps_of
from tests.support.raw_server import raw_server, read_request

Exchange = Callable[..., list[list[dict]]]

KINDS = {
    "truncate": "truncated",
    "http500": "http_error",
    "http400": "http_error",
    "malformed_json": "malformed",
    "malformed_sse": "malformed",
    "bad_chunk": "malformed",
    "not_http": "malformed",
    "no_done": "no_done",
    "no_usage": "no_usage",
    "no_finish": "no_finish_reason",
    "wrong_usage": "usage_mismatch",
    "error_event": "server_error",
}


@pytest.fixture(scope="module")
def faulty(exchange: Exchange) -> dict[str, dict]:
    """One outcome per fault."""
    jobs = [{"model": f"mock?fault={f}", "prompt": [i, 7], "max_tokens": 6} for i, f in enumerate(KINDS)]
    return {fault: outcomes[0] for fault, outcomes in zip(KINDS, exchange(jobs), strict=True)}


@pytest.mark.parametrize("fault", KINDS)
def test_fault_is_a_failure_of_its_kind(faulty: dict[str, dict], fault: str) -> None:
    outcome = faulty[fault]
    assert not outcome["ok"]
    assert outcome["error_kind"] == KINDS[fault]
    assert outcome["error"]


def test_failure_tells_what_the_server_said(faulty: dict[str, dict]) -> None:
    assert faulty["http400"]["http_status"] == 400
    assert "the mock was told to fail" in faulty["http400"]["error"]
    assert "out of mock" in faulty["error_event"]["error"]
    assert len(faulty["truncate"]["chunk_times"]) == 3  # what came before the break is kept


def test_timeouts_are_told_apart_and_bounded(exchange: Exchange) -> None:
    limits = {"first_byte": 0.3, "idle": 0.4, "total": 5.0}
    jobs = [
        {"model": "mock?fault=silent", "prompt": [1], "max_tokens": 4, "timeouts": limits},
        {"model": "mock?fault=stall", "prompt": [2], "max_tokens": 4, "timeouts": limits},
        {
            "model": "mock?itl_ms=50",
            "prompt": [3],
            "max_tokens": 100,
            "timeouts": {"first_byte": 2.0, "idle": 2.0, "total": 0.5},
        },
    ]
    silent, stalled, slow = (outcomes[0] for outcomes in exchange(jobs))
    assert [o["error_kind"] for o in (silent, stalled, slow)] == ["timeout"] * 3
    assert "no byte came" in silent["error"]
    assert "nothing more came" in stalled["error"]
    assert "not done within" in slow["error"]
    assert all(o["end"] - o["ts"] < 4 for o in (silent, stalled, slow))
    assert slow["chunk_times"]  # a stream that is alive is ended by the total limit only


def test_idle_is_counted_from_the_newest_byte(exchange: Exchange) -> None:
    """A stream without a long gap may take longer than that limit; one that stalls is ended by it and no other."""
    limits = {"first_byte": 20.0, "idle": 1.0, "total": 30.0}
    jobs = [
        {"model": "mock?itl_ms=50", "prompt": [4], "max_tokens": 40, "timeouts": limits},
        {"model": "mock?fault=stall", "prompt": [5], "max_tokens": 4, "timeouts": limits},
    ]
    long, stalled = (outcomes[0] for outcomes in exchange(jobs))
    assert long["ok"], long["error"]
    assert long["end"] - long["ts"] > 1.9
    assert stalled["error_kind"] == "timeout" and "nothing more came for 1 s" in stalled["error"]
    assert stalled["end"] - stalled["ts"] < 15


def test_refused_connection(exchange: Exchange) -> None:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{reserved.getsockname()[1]}"  # bound, but nobody listens
        outcome = exchange([{"model": "mock", "prompt": [1], "max_tokens": 2}], url=url)[0][0]
    assert outcome["error_kind"] == "refused"


def test_success_carries_everything(exchange: Exchange, mock_url: str) -> None:
    job = {"model": "mock?fault=role_first&ttft_ms=30&cached_tokens=3", "prompt": [11, 12, 13], "max_tokens": 9}
    outcome = exchange([job])[0][0]
    assert outcome["ok"], outcome["error"]
    assert (outcome["prompt_tokens"], outcome["output_tokens"], outcome["cached_tokens"]) == (3, 9, 3)
    assert outcome["token_ids"] == list(range(9))
    assert outcome["chunk_tokens"] == [1] * 9
    assert outcome["text"] == "".join(f" w{k}" for k in range(9))
    assert outcome["finish_reason"] == "length"
    stamp = stamps_of(mock_url)[11, 12, 13]
    assert stamp["body"]["stream_options"] == {"include_usage": True}
    # The empty first chunk came at once; the first token did not.
    assert outcome["first"] >= stamp["sends"][0] >= stamp["received"] + 0.03


def test_times_lie_between_the_servers_stamps(exchange: Exchange, mock_url: str) -> None:
    """Each stamp is after its own send. With 40 ms between sends, it is also before the one after next."""
    jobs = [{"model": "mock?ttft_ms=60&itl_ms=40", "prompt": [70, i], "max_tokens": 12} for i in range(4)]
    for i, (outcome,) in enumerate(exchange(jobs)):
        sends = stamps_of(mock_url)[70, i]["sends"]
        times = outcome["chunk_times"]
        assert len(times) == len(sends) == 12
        assert all(t >= s for t, s in zip(times, sends, strict=True))
        late = sum(t > after for t, after in zip(times[:-2], sends[2:], strict=True))
        assert late <= 2  # a machine that is stolen from may pause; stamps taken at the end would all be late


def test_framing_does_not_change_what_is_read(exchange: Exchange) -> None:
    jobs = [
        {"model": f"mock?fault={fault}", "prompt": [80, i], "max_tokens": 8}
        for i, fault in enumerate(("", "drip", "crlf", "no_ids"))
    ]
    plain, drip, crlf, no_ids = (outcomes[0] for outcomes in exchange(jobs))
    for outcome in (plain, drip, crlf, no_ids):
        assert outcome["ok"], outcome["error"]
        assert outcome["text"] == plain["text"]
        assert len(outcome["chunk_times"]) == 8
        assert outcome["chunk_times"] == sorted(outcome["chunk_times"])
    assert drip["reads"] > plain["reads"]
    assert no_ids["chunk_tokens"] is None


def test_chunks_of_several_tokens_and_writes_of_several_chunks(exchange: Exchange) -> None:
    jobs = [
        {"model": "mock?tokens_per_chunk=3", "prompt": [90, 0], "max_tokens": 8},
        {"model": "mock?tokens_per_chunk=3", "prompt": [90, 1], "max_tokens": 8, "return_token_ids": False},
        {"model": "mock?events_per_write=4&itl_ms=10", "prompt": [90, 2], "max_tokens": 8},
    ]
    several, unknown, burst = (outcomes[0] for outcomes in exchange(jobs))
    assert several["ok"]
    assert several["chunk_tokens"] == [3, 3, 2]
    assert unknown["ok"]
    assert unknown["chunk_tokens"] is None
    assert len(unknown["chunk_times"]) == 3
    assert burst["ok"]
    assert len(set(burst["chunk_times"])) == 2  # two writes of four events, as the server's stamps say:
    assert burst["coalesced"] == 0  # what was sent together may be read together


def test_kept_connection_that_the_server_closed_is_opened_again(exchange: Exchange, mock_url: str) -> None:
    jobs = [
        {"model": "mock?fault=close_after", "prompt": [95], "max_tokens": 3, "repeat": 3, "gap_s": 0.2},
        {"model": "mock", "prompt": [96], "max_tokens": 3, "repeat": 3},
        {"model": "mock?fault=trailers", "prompt": [97], "max_tokens": 3, "repeat": 3},
        {"model": "mock?fault=early_hints", "prompt": [98], "max_tokens": 3, "repeat": 3},
        {"model": "mock?fault=close_delimited", "prompt": [99], "max_tokens": 3, "repeat": 3},
    ]
    reopened = []
    for outcomes in exchange(jobs):
        assert [o["ok"] for o in outcomes] == [True] * 3, outcomes
        assert [o["token_ids"] for o in outcomes] == [[0, 1, 2]] * 3
        reopened.append([o["reopened"] for o in outcomes])
    # A connection whose end was announced (the last job) is not kept, so none is found closed.
    assert reopened == [[False, True, True]] + [[False] * 3] * 4


def test_connection_opened_beforehand_and_closed_unused_is_opened_again() -> None:
    """An open loop opens connections that it may need minutes later; a server or a proxy may not keep them so long."""
    answers = iter([False, True])

    def serve(connection: socket.socket) -> None:
        if next(answers):
            read_request(connection)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    limits = Timeouts(connect=5.0, first_byte=5.0, idle=5.0, total=5.0)
    with raw_server(serve) as port:
        client = StreamingClient(Address("127.0.0.1", port, ""), limits)
        client.connect()
        time.sleep(0.3)
        raw = client.exchange(b"POST / HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n")
        client.close()
    assert (raw.error_kind, raw.reopened) == (None, True)


def test_a_failed_request_is_not_sent_again(exchange: Exchange, mock_url: str) -> None:
    faults = ("http500", "truncate", "malformed_json", "not_http")
    exchange([{"model": f"mock?fault={f}", "prompt": [100, i], "max_tokens": 4} for i, f in enumerate(faults)])
    with urllib.request.urlopen(mock_url + "/stamps", timeout=10) as answer:
        sent = [stamp["prompt"] for stamp in json.load(answer)]
    assert [sent.count([100, i]) for i in range(len(faults))] == [1] * len(faults)


def test_what_the_server_drops_after_working_on_it_is_a_failure_and_not_sent_again(
    exchange: Exchange, mock_url: str
) -> None:
    """On a kept connection this looks like one that was closed while idle, but for the time that it took."""
    job = {"model": "mock?ttft_ms=50&fault=drop", "max_tokens": 3}
    outcomes = exchange([{"prompt": [102], **job}, {"prompt": [103], "connected": True, **job}])
    for (outcome,) in outcomes:
        assert (outcome["error_kind"], outcome["reopened"]) == ("dropped", False)
        assert "closed without a response" in outcome["error"]
    with urllib.request.urlopen(mock_url + "/stamps", timeout=10) as answer:
        sent = [stamp["prompt"] for stamp in json.load(answer)]
    assert sent.count([102]) == sent.count([103]) == 1


def test_a_request_that_crossed_with_the_connections_end_is_sent_again_once() -> None:
    """The server closes an idle connection just as the request is on its way: it cannot have worked on it."""
    got: list[bytes] = []

    def serve(connection: socket.socket) -> None:
        request = read_request(connection)
        got.append(request)
        if got.count(request) > 1:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    limits = Timeouts(connect=5.0, first_byte=5.0, idle=5.0, total=5.0)
    outcomes = []
    with raw_server(serve) as port:
        for number in range(10):  # a machine that stands still makes the end seem late, which is a failure
            client = StreamingClient(Address("127.0.0.1", port, ""), limits)
            client.connect()
            raw = client.exchange(b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n" % number)
            client.close()
            outcomes.append((raw.error_kind, raw.reopened))
            if raw.reopened:
                break
    assert outcomes == [("dropped", False)] * (len(outcomes) - 1) + [(None, True)]
    assert len(got) == len(outcomes) + 1


def test_a_server_that_does_not_read_ends_the_send(exchange: Exchange) -> None:
    with raw_server(lambda connection: time.sleep(1.0)) as port:
        limits = {"first_byte": 5, "idle": 5, "total": 0.5}
        job = {"model": "mock", "prompt": [7] * 3_000_000, "max_tokens": 2, "timeouts": limits}
        outcome = exchange([job], url=f"http://127.0.0.1:{port}")[0][0]
    assert outcome["error_kind"] == "timeout"
    assert "could not be sent in time" in outcome["error"]
