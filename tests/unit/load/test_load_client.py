"""The streaming client against a server with a known schedule: time-outs, kept connections, stamps.

What is wrong on the wire is in tests/integration/test_fire_wire.py, what a finished stream is worth in
test_load_parsing.py.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable

from kvbench.load.client import Address, StreamingClient, Timeouts
from tests.support.loads import stamps_of
from tests.support.scripted_http import scripted_server

Exchange = Callable[..., list[list[dict]]]


def test_timeouts_are_told_apart(exchange: Exchange) -> None:
    """The idle one is counted from the newest byte: a stream without a long gap may take longer than that."""
    limits = {"first_byte": 20.0, "idle": 1.0, "total": 30.0}
    jobs = [
        {"model": "mock?fault=silent", "max_tokens": 4, "timeouts": limits | {"first_byte": 0.3}},
        {"model": "mock?fault=stall", "max_tokens": 4, "timeouts": limits},
        {"model": "mock?itl_ms=50", "max_tokens": 1000, "timeouts": limits | {"total": 0.5}},
        {"model": "mock?itl_ms=50", "max_tokens": 30, "timeouts": limits},
    ]
    silent, stalled, slow, long = (outcomes[0] for outcomes in exchange([{"prompt": [1], **job} for job in jobs]))
    assert [o["error_kind"] for o in (silent, stalled, slow, long)] == ["timeout"] * 3 + [None]
    assert "no byte came" in silent["error"] and "nothing more came" in stalled["error"]
    assert "not done within" in slow["error"] and slow["chunk_times"]
    assert long["end"] - long["ts"] > 1.4


def test_success_carries_everything(exchange: Exchange, mock_url: str) -> None:
    """Each stamp is after its own send. With 40 ms between sends, it is also before the one after next."""
    job = {"model": "mock?ttft_ms=60&itl_ms=40&cached_tokens=3", "prompt": [11, 12, 13], "max_tokens": 9}
    outcome = exchange([job])[0][0]
    assert outcome["ok"], outcome["error"]
    assert (outcome["prompt_tokens"], outcome["output_tokens"], outcome["cached_tokens"]) == (3, 9, 3)
    assert outcome["token_ids"] == list(range(9)) and outcome["chunk_tokens"] == [1] * 9
    assert outcome["text"] == "".join(f" w{k}" for k in range(9)) and outcome["finish_reason"] == "length"
    stamp = stamps_of(mock_url)[11, 12, 13]
    assert stamp["body"]["stream_options"] == {"include_usage": True}
    times, sends = outcome["chunk_times"], stamp["sends"]
    assert len(times) == len(sends) and outcome["first"] == times[0]
    assert all(t >= s for t, s in zip(times, sends, strict=True))
    late = sum(t > after for t, after in zip(times[:-2], sends[2:], strict=True))
    assert late <= 2  # a machine that is stolen from may pause; stamps taken at the end would all be late


def test_tokens_without_text_at_the_end_belong_to_the_answer_whether_their_ids_are_told_or_not(
    exchange: Exchange, mock_url: str
) -> None:
    models = [f"mock?ttft_ms=20&itl_ms=10&textless=3{fault}" for fault in ("", "&fault=no_ids")]
    outcomes = exchange([{"model": model, "prompt": [21, k], "max_tokens": 9} for k, model in enumerate(models)])
    for k, (outcome,) in enumerate(outcomes):
        assert outcome["ok"], outcome["error"]
        assert outcome["text"] == "".join(f" w{k}" for k in range(6)) and outcome["output_tokens"] == 9
        sends = stamps_of(mock_url)[21, k]["sends"]
        assert len(outcome["chunk_times"]) == len(sends) == 9
        assert all(when >= sent for when, sent in zip(outcome["chunk_times"], sends, strict=True))
        assert (outcome["chunk_tokens"] is None) == bool(k)


def test_kept_connection_that_the_server_closed_is_opened_again(exchange: Exchange) -> None:
    jobs = [
        {"model": "mock?fault=close_after", "prompt": [95], "max_tokens": 3, "repeat": 3, "gap_s": 0.2},
        {"model": "mock", "prompt": [96], "max_tokens": 3, "repeat": 3},
    ]
    closed, kept = exchange(jobs)
    assert [o["token_ids"] for o in closed + kept if o["ok"]] == [[0, 1, 2]] * 6
    assert [o["reopened"] for o in closed] == [False, True, True]
    assert [o["reopened"] for o in kept] == [False] * 3


def test_a_failed_request_is_not_sent_again(exchange: Exchange, mock_url: str) -> None:
    """What is dropped on a kept connection looks like one that was closed while idle, but for the time it took."""
    jobs = [{"model": f"mock?ttft_ms=50&fault={f}", "max_tokens": 4} for f in ("http500", "truncate", "drop", "drop")]
    jobs[3]["connected"] = True
    outcomes = exchange([{"prompt": [100, i], **job} for i, job in enumerate(jobs)])
    assert [o["error_kind"] for (o,) in outcomes] == ["http_error", "truncated", "dropped", "dropped"]
    assert not any(o["reopened"] for (o,) in outcomes)
    assert outcomes[0][0]["http_status"] == 500 and "a failure was set" in outcomes[0][0]["error"]
    assert len(outcomes[1][0]["chunk_times"]) == 2  # what came before the break is kept
    with urllib.request.urlopen(mock_url + "/stamps", timeout=10) as answer:
        sent = [stamp["prompt"] for stamp in json.load(answer)]
    assert [sent.count([100, i]) for i in range(4)] == [1] * 4


def test_a_request_that_crossed_with_the_connections_end_is_sent_again_once() -> None:
    """The server closes an idle connection just as the request is on its way: it cannot have worked on it."""

    def script(path: str, body: object) -> object:
        return (200, "ok") if sum(asked[1] == path for asked in server.asked) > 1 else b""

    outcomes = []
    with scripted_server(script) as server:
        for number in range(30):  # a machine that stands still makes the end seem late, which is a failure
            client = StreamingClient(Address.from_url(server.url), Timeouts())
            client.connect()
            raw = client.exchange(b"POST /%d HTTP/1.1\r\nHost: h\r\nContent-Length: 0\r\n\r\n" % number)
            client.close()
            outcomes.append((raw.error_kind, raw.reopened))
            if raw.reopened:
                break
    assert outcomes == [("dropped", False)] * (len(outcomes) - 1) + [(None, True)]
    assert len(server.asked) == len(outcomes) + 1


def test_a_server_that_does_not_read_ends_the_send() -> None:
    with scripted_server({}, begins_after_s=5.0) as server:
        client = StreamingClient(Address.from_url(server.url), Timeouts(total=0.3))
        raw = client.exchange(bytes(64 << 20))
    assert raw.error_kind == "timeout" and "could not be sent in time" in raw.error
