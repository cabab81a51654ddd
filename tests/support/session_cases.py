"""Cases of tests/unit/load/test_load_session.py, in a process of their own: importing Locust patches all of it.

    python -m tests.support.session_cases

Prints the name of each case that holds; the first that does not ends it.
"""

from __future__ import annotations

import json
import time

import gevent
import pytest
from gevent import monkey

from kvbench.load import process
from kvbench.load.client import RawStream
from kvbench.load.client_figures import read_delays
from kvbench.load.process import Measuring
from kvbench.load.session import InFlightCap, LoadSession, Returned
from kvbench.load.spec import LoadSpec
from kvbench.requests.request import RequestList, RequestSpec

STUCK_S = 0.1
stand_still = monkey.get_original("time", "sleep")  # the whole loop with it


def session_for(requests: list[RequestSpec], mode: str = "open") -> LoadSession:
    fields = {"concurrency": 2} if mode == "closed" else {}
    spec = LoadSpec(
        base_url="http://127.0.0.1:9", model="m", mode=mode, requests_file="r", out_dir="o", timeout_s=9, **fields
    )
    return LoadSession(spec, RequestList(requests))


def answer(tokens: int, at: float) -> RawStream:
    """A whole answer of one read."""
    raw = RawStream(at, at, at, [at])
    events = [{"choices": [{"text": " x", "finish_reason": None, "token_ids": [k]}]} for k in range(tokens)]
    events[-1]["choices"][0]["finish_reason"] = "length"
    events.append({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": tokens}})
    body = b"".join(b"data: %b\n\n" % json.dumps(e).encode() for e in events) + b"data: [DONE]\n\n"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % len(body)
    raw.chunks = [head + body]
    return raw


def case_only_the_wait_for_a_place_is_queue() -> None:
    """The caller comes late, the stream's end is seen late, and the loop stands still when the place is there: all that
    is the client's own slip."""
    cap = InFlightCap(1)
    assert cap.take() == 0.0
    due = time.perf_counter()
    stand_still(STUCK_S)  # the loop
    waiting = gevent.spawn(lambda: (cap.take(), time.perf_counter()))
    gevent.sleep(0)
    asked = time.perf_counter()  # or shortly before
    gevent.sleep(0.02)
    ended = time.perf_counter()
    stand_still(STUCK_S)
    cap.give(ended)
    stand_still(STUCK_S)
    queued_s, sent = waiting.get()
    assert 0 < ended - asked <= queued_s <= ended - due - STUCK_S + 0.005
    assert sent - due - queued_s >= 3 * STUCK_S
    late = gevent.spawn(cap.take)
    gevent.sleep(0)
    cap.give(ended)  # it was free before anyone came
    assert late.get() == 0.0


def two_turns(tokens: int, think_s: float) -> list[RequestSpec]:
    first = RequestSpec(0, "a", (0,), None, tokens, 0.0, session=0)
    return [first, RequestSpec(1, "a", (0, 1), None, tokens, None, session=0, turn=1, think_s=think_s)]


def run_conversation(tokens: int, think_s: float, stuck_s: float) -> list[tuple[float, float, float]]:
    """(due, moment of sending, end of the answer) of two turns; the loop stands still after the first one's end."""
    requests = two_turns(tokens, think_s)
    session, sent = session_for(requests), []

    def send(request: RequestSpec, body: bytes, due: float | None) -> Returned:
        now = time.perf_counter()
        raw = answer(tokens, now)
        sent.append((due, now, raw.end))
        stand_still(stuck_s)
        session.returned += 1
        return Returned(request, 0, due, raw, 0.0, time.perf_counter())

    session.begin()
    talk = gevent.spawn(session.converse, 0, session.pending.popleft(), send, session.zero)
    talk.join()
    talk.get()
    while session.unparsed:
        gevent.sleep(0.005)
    session.close()
    assert all(s.completion.ok for s in session.samples), session.samples[0].completion.error
    delays = read_delays(session.samples)
    assert delays == pytest.approx([max(0.0, sent[1][0] - sent[0][2] - think_s)], abs=1e-9)
    return sent


def case_a_turn_is_due_when_its_answer_can_be_read_and_what_delays_that_is_slip() -> None:
    first, second = run_conversation(tokens=3, think_s=0.0, stuck_s=STUCK_S)
    assert first[2] < second[0] < first[2] + STUCK_S / 2  # three tokens are read in less than a millisecond
    assert second[1] - second[0] > STUCK_S / 2
    first, second = run_conversation(tokens=3000, think_s=0.0, stuck_s=0.0)
    assert second[0] - first[2] > 0.003  # 3,000 take at least a microsecond each
    first, second = run_conversation(tokens=3, think_s=0.3, stuck_s=STUCK_S)
    assert second[0] == pytest.approx(first[2] + 0.3, abs=1e-9)


def case_an_answer_whose_user_is_stopped_while_it_is_read_is_kept() -> None:
    requests = two_turns(3, think_s=9.0)
    session, turns = session_for(requests), [(request, b"") for request in requests]

    def send(request: RequestSpec, body: bytes, due: float | None) -> Returned:
        session.returned += 1
        return Returned(request, 0, 0.0, answer(3, time.perf_counter()), 0.0, time.perf_counter())

    talk = gevent.spawn(session.converse, 0, turns, send, 0.0)
    gevent.sleep(0.001)
    talk.kill()
    assert session.unparsed == 1
    gevent.sleep(0.05)
    session.close()
    assert [s.request.index for s in session.samples] == [0] and session.samples[0].completion.ok


def returned_all(session: LoadSession, count: int) -> None:
    now = time.perf_counter()
    for k in range(count):
        session.returned += 1
        session._queue.put(Returned(RequestSpec(k, "a", (k,), None, 3), 0, now, answer(3, now), 0.0, now))


def case_after_a_stop_parsing_is_given_up_and_a_dead_parser_holds_nobody() -> None:
    session = session_for([RequestSpec(0, "a", (0,), None, 3, 0.0)])
    session._parser.kill()
    returned_all(session, 1)
    with gevent.Timeout(10):
        session.stop()
        Measuring(session).parse_rest()
        session.stopped, process._STALL_MARGIN_S = False, 0.05
        Measuring(session).parse_rest()
    assert session.unparsed == 1


if __name__ == "__main__":
    for name, case in list(globals().items()):
        if name.startswith("case_"):
            case()
            print(name)
