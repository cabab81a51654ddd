"""Open loop on time whatever the server does, the cap on requests in flight, conversations turn by turn."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from kvbench.requests.request import RequestSpec
from tests.support.loads import LoadRunner, stamps_of

MOCK = "mock?ttft_ms=30&itl_ms=10"
TAKES_S = 0.07  # the first of 5 tokens after 30 ms, 10 ms to each next one


def singles(tag: int, arrivals: list[float]) -> list[RequestSpec]:
    """One request of 5 tokens an arrival; nobody else sends [tag, i]."""
    return [RequestSpec(i, "a", (tag, i), None, 5, arrival) for i, arrival in enumerate(arrivals)]


def conversations(
    tag: int, sessions: int, turns: int, arrivals: list[float] | None = None, new_tokens: bool = False
) -> list[RequestSpec]:
    """Turn k's prompt is [tag, session, 100 + k] behind all of turn k - 1 and an answer of five times 90."""
    found: list[RequestSpec] = []
    for session in range(sessions):
        ids: tuple[int, ...] = ()
        for turn in range(turns):
            ids += (tag, session, 100 + turn)
            more = {"session": session, "turn": turn, "think_s": 0.03 * turn}
            more |= {"new_tokens": 3 if turn and new_tokens else 0}
            arrival = arrivals[session] if arrivals and not turn else None
            found.append(RequestSpec(len(found), "a", ids, None, 5, arrival, **more))
            ids += (90,) * 5
    return found


def by_turn(samples: pd.DataFrame) -> dict[tuple[int, int], pd.Series]:
    return {(int(row["session"]), int(row["turn"])): row for _, row in samples.iterrows()}


def test_a_hung_server_does_not_hold_up_the_arrivals(loads: LoadRunner) -> None:
    """It reads every request and answers none: all of them must have come before the first has timed out.

    As it still answers /health, it counts as too slow, not as gone: that is a result.
    """
    arrivals = np.sort(np.random.default_rng(0).uniform(0, 0.3, 60)).tolist()
    sent = singles(701, arrivals)
    result = loads.run(sent, mode="open", concurrency=None, model="mock?fault=silent", timeout_s=2)
    stamps = stamps_of(loads.url)
    zero = result.load["zero_perf_counter"]
    received = np.array([stamps[r.prompt_token_ids]["received"] for r in sent]) - zero
    assert (received >= arrivals).all()
    assert received.max() < 2.0
    assert result.code == 0 and not result.load["incomplete"]
    assert result.samples["error_kind"].tolist() == ["timeout"] * 60
    assert result.samples["t0"].tolist() == pytest.approx(arrivals, abs=1e-6)


def test_cap_queues_in_the_client_and_tells_how_long(loads: LoadRunner) -> None:
    """12 requests at 0 with 3 places: four rounds, first come, first served."""
    result = loads.run(singles(702, [0.0] * 12), mode="open", concurrency=None, max_concurrency=3, model=MOCK)
    samples = result.samples
    assert samples["ok"].all()
    assert result.load["max_in_flight"] == result.load["max_concurrency"] == 3
    assert samples["t0"].tolist() == pytest.approx([0.0] * 12, abs=1e-6)
    assert (samples["queued_s"][:3] == 0).all()
    waited = samples["ts"] - samples["t0"]
    assert (waited[9:] > 3 * TAKES_S * 0.99).all()
    assert (samples["queued_s"][9:] > waited[9:] - 0.05).all()
    assert (samples["queued_s"] <= samples["ts"] - samples["t0"] + 1e-9).all()
    assert samples["ts"].is_monotonic_increasing
    assert (samples["first"] - samples["t0"] > samples["queued_s"] + 0.029).all()
    begin, end = result.load["target_start_s"], result.load["target_end_s"]
    assert end - begin > 3 * TAKES_S  # all at once under a cap: steady while all places were taken
    stamps = stamps_of(loads.url)
    spans = [(stamps[702, i]["received"], stamps[702, i]["sends"][-1]) for i in range(12)]
    assert max(sum(a <= moment < b for a, b in spans) for moment, _ in spans) == 3


def test_open_loop_conversations_follow_their_answers(loads: LoadRunner) -> None:
    sent = conversations(703, sessions=4, turns=3, arrivals=[0.0, 0.01, 0.02, 0.03])
    result = loads.run(sent, mode="open", concurrency=None, model=MOCK)
    assert result.samples["ok"].all(), result.stderr
    rows, stamps = by_turn(result.samples), stamps_of(loads.url)
    assert result.load["max_in_flight"] == 4
    late = []
    for request in sent:
        row = rows[request.session, request.turn]
        assert row["prompt_tokens"] == 3 + 8 * request.turn
        if request.turn:
            due = rows[request.session, request.turn - 1]["end"] + request.think_s
            late.append(row["t0"] - due)
            answered = stamps[sent[request.index - 1].prompt_token_ids]["sends"][-1]
            assert stamps[request.prompt_token_ids]["received"] >= answered + request.think_s
        else:
            assert row["t0"] == pytest.approx(request.arrival_s, abs=1e-6)
        assert row["ts"] >= row["t0"]
    assert min(late) >= -1e-6
    assert np.median(late) <= 1e-6  # later only where reading the answer took longer than thinking


def test_closed_loop_users_hold_one_conversation_each(loads: LoadRunner) -> None:
    sent = conversations(704, sessions=4, turns=2)
    result = loads.run(sent, concurrency=2, model=MOCK)
    assert result.samples["ok"].all(), result.stderr
    rows = by_turn(result.samples)
    spans = [(rows[s, 0]["ts"], rows[s, 1]["end"]) for s in range(4)]
    assert max(sum(a <= moment < b for a, b in spans) for moment, _ in spans) == 2
    assert all(rows[s, 0]["user"] == rows[s, 1]["user"] for s in range(4))
    assert all(rows[s, 1]["ts"] - rows[s, 0]["end"] >= 0.03 - 1e-6 for s in range(4))
    assert result.samples["t0"].equals(result.samples["ts"])
    stops = sorted(end for _, end in spans)
    window = (result.load["target_start_s"], result.load["target_end_s"])
    assert window == pytest.approx((max(spans[0][0], spans[1][0]), stops[-2]), abs=1e-6)


@pytest.mark.parametrize("knows", [True, False])
def test_actual_history_holds_the_servers_answers(loads: LoadRunner, knows: bool) -> None:
    """The mock answers 0 1 2 3 4. Without its ids the drawn answer stays, and load.json says so."""
    tag = 705 + knows
    sent = conversations(tag, sessions=2, turns=3, new_tokens=True)
    result = loads.run(sent, concurrency=2, model=MOCK if knows else MOCK + "&fault=no_ids")
    assert result.samples["ok"].all(), result.stderr
    answer = (0, 1, 2, 3, 4) if knows else (90,) * 5
    seen = {prompt for prompt in stamps_of(loads.url) if prompt[0] == tag}
    for session in range(2):
        first = (tag, session, 100)
        second = first + answer + (tag, session, 101)
        assert {first, second, second + answer + (tag, session, 102)} <= seen
    assert len(seen) == 6
    said = result.load["notes"].get("history")
    assert said is None if knows else said.startswith("history: actual") and "4 of 4" in said


def test_a_failed_turn_ends_its_session_and_nothing_is_lost(loads: LoadRunner) -> None:
    sent = conversations(707, sessions=3, turns=3, arrivals=[0.0, 0.0, 0.0])
    result = loads.run(sent, mode="open", concurrency=None, model="mock?fault=http500")
    assert result.code == 0, result.stderr
    assert result.samples["error_kind"].value_counts().to_dict() == {"session_broken": 6, "http_error": 3}
    assert "turn 1 of session 0 failed (http_error)" in result.samples["error"][2]
    assert (result.load["completed"], result.load["failed"], result.load["incomplete"]) == (0, 3, False)
    assert [r for r in stamps_of(loads.url) if r[0] == 707] == [(707, 0, 100), (707, 1, 100), (707, 2, 100)]
    assert result.load["locust"] == {"num_requests": 9, "num_failures": 9}
