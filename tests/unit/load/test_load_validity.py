"""When a load may be believed: timestamp error from the server's stamps, coalescing, CPU, slip."""

from __future__ import annotations

import json

import pytest

from kvbench.load.completion import Completion, judge
from kvbench.load.probe import client_report, invalid_reasons, stamp_errors
from kvbench.load.requests import RequestSpec
from kvbench.load.samples import Sample


def sample(sent: list[float], received: list[float], **more) -> Sample:
    request = RequestSpec(0, "chat", (1, 2, 3), None, len(sent), None, 0)
    done = Completion(chunk_times=received, sent_times=sent, **more)
    return Sample(request, 0, 0.0, 0.0, received[-1], done)


def reasons(samples, *, lags=(), cpu_s=0.1, wall_s=10.0, mode="closed") -> str:
    return " ".join(invalid_reasons(client_report(samples, list(lags), cpu_s, wall_s, mode), 0))


def test_error_is_receipt_minus_the_servers_stamp():
    got = stamp_errors([sample([1.0, 1.5], [1.0002, 1.5004]), sample([2.0], [2.001])])
    assert list(got) == pytest.approx([0.0002, 0.0004, 0.001])


def test_stamps_of_another_clock_or_of_some_chunks_only_prove_nothing():
    assert stamp_errors([sample([5.0], [4.0])]) is None, "received before it was sent"
    assert stamp_errors([sample([5.0], [90000.0])]) is None
    assert stamp_errors([sample([], [4.0])]) is None
    assert stamp_errors([sample([1.0, 2.0], [1.1, 2.1]), sample([1.0], [1.1, 2.1])]) is None


def late(by: float, count: int = 300) -> Sample:
    sent = [0.02 * i for i in range(count)]
    return sample(sent, [t + by for t in sent])


def test_a_late_client_is_invalid_and_a_machine_that_stood_still_is_not():
    stalls = [0.0001] * 900 + [0.040] * 100  # the probe saw the whole machine stop
    assert reasons([late(0.0002)], lags=stalls) == ""
    assert "timestamps lagged: p99 3.00 ms, the limit is 1.00 ms" in reasons([late(0.003)], lags=[0.0] * 1000)
    assert "timestamps lagged: p99 40.00 ms" in reasons([sample([], [0.1, 0.2])], lags=stalls), "no stamps: the probe"


def test_with_the_kernels_stamps_a_late_loop_does_not_make_them_late():
    """Nobody else stamps: then the loop's lateness matters only where chunks could be read together."""
    chunks = [sample([], [0.02 * i for i in range(300)])]

    def said(lag: float) -> str:
        return " ".join(invalid_reasons(client_report(chunks, [lag] * 1000, 0.1, 10.0, "closed", True), 0))

    figures = client_report(chunks, [0.005] * 1000, 0.1, 10.0, "closed", True)
    assert (figures["lag_source"], figures["lag_p99_ms"]) == ("kernel stamps", None)
    assert figures["loop_lag_p99_ms"] == pytest.approx(5.0)
    assert said(0.005) == ""
    assert "so late to read (p99 12.00 ms)" in said(0.012) and "the limit is 10.00 ms" in said(0.012)
    assert client_report([late(0.0002)], [0.5], 0.1, 10.0, "closed", True)["lag_source"] == "server stamps"


def test_the_limit_grows_with_the_itl():
    slow = [0.2 * i for i in range(300)]
    assert reasons([sample(slow, [t + 0.003 for t in slow])]) == ""  # 2 % of 200 ms


def test_cpu_slip_and_coalescing_invalidate():
    assert "used 80% of a core" in reasons([late(0.0)], cpu_s=8.0)
    slipped = Sample(late(0.0).request, 0, 0.0, 0.02, 1.0, Completion())
    assert "arrivals slipped: p99 20.00 ms" in reasons([slipped], mode="open")
    assert "sent apart" in reasons([sample([0.0, 0.1], [0.2, 0.2], coalesced=1)])
    assert reasons([sample([0.0, 0.1], [0.0, 0.1], coalesced=0)]) == ""


def stream(sent: list[float]) -> bytes:
    """A whole response, one event a stamp, then usage and [DONE]."""
    events = [
        {"choices": [{"text": "a", "token_ids": [1], "finish_reason": None}], "kvbench": {"sent": t}} for t in sent
    ]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(sent)}})
    body = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events) + b"data: [DONE]\n\n"
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(("sent", "coalesced"), [([1.0, 1.02, 1.04], 2), ([1.0, 1.0001, 1.0002], 0)])
def test_chunks_in_one_read_count_only_if_the_server_sent_them_apart(sent, coalesced):
    outcome = judge([1.05], [stream(sent)], max_tokens=3)
    assert outcome.ok, outcome.error
    assert outcome.sent_times == sent
    assert outcome.coalesced == coalesced


def arrival(t0: float, ts: float, queued_s: float = 0.0) -> Sample:
    return Sample(RequestSpec(0, "a", (1,), None, 1, t0), 0, t0, ts, ts + 1.0, Completion(), queued_s)


def test_requests_due_at_once_leave_one_after_the_other_and_that_is_no_slip():
    burst = [arrival(0.0, 40e-6 * i) for i in range(400)]  # the last one leaves after 16 ms
    assert reasons(burst, mode="open") == ""
    slow = [arrival(0.0, 80e-6 * i) for i in range(400)]
    assert "arrivals slipped: p99 11.8" in reasons(slow, mode="open")  # 30 us more than allowed for each of 396
    spaced = [arrival(0.01 * i, 0.01 * i + 0.006) for i in range(400)]
    assert "arrivals slipped: p99 6.00 ms beyond 50 us" in reasons(spaced, mode="open")
    assert reasons(spaced, mode="closed") == ""


def test_a_wait_for_a_place_is_no_slip():
    assert reasons([arrival(0.0, 0.5 * i, 0.5 * i) for i in range(20)], mode="open") == ""
    assert "arrivals slipped" in reasons([arrival(0.0, 0.5 * i + 0.007, 0.5 * i) for i in range(20)], mode="open")
    broken = Sample(RequestSpec(1, "a", (1,), None, 1), 0, 9.0, 9.0, 9.0, Completion(error_kind="session_broken"))
    late_ones = [arrival(float(i), i + 0.02) for i in range(2)]
    assert "arrivals slipped" in reasons([*late_ones, *[broken] * 400], mode="open"), "never sent, so never on time"
