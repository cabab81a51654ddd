"""Warm-up requests that fail are sent again, but not for ever; a server that answers none is not measured."""

from __future__ import annotations

import threading
from itertools import count
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvbench.common.errors import MeasurementError, RefusedError
from kvbench.measure import single_request
from kvbench.measure import warm_up as warming
from kvbench.measure.single_request import ATTEMPTS
from kvbench.measure.warm_up import captured_sizes, warm_up, warm_up_concurrency
from kvbench.requests.request import RequestSpec
from kvbench.runs.results import WarmUpResult
from kvbench.runs.server_info import ServerInfo
from kvbench.workload.design import LoadPoint

ALONE = LoadPoint("c1", "closed", 1, None, 9)


class Server:
    """``answers(n)``: whether attempt n of all (from 1) is answered; each takes ``seconds`` of the fake clock."""

    def __init__(self, answers, seconds=0.0, error=MeasurementError):
        self.answers, self.seconds, self.error = answers, seconds, error
        self.now, self.limits, self.numbers = 0.0, [], count(1)
        self.prompts, self.requests = [], [RequestSpec(i, "a", (1, 2, 3), None, max_tokens=4) for i in range(9)]

    def complete(self, prompt, max_tokens, timeout_s):
        self.limits.append(timeout_s)
        self.prompts.append(prompt)
        self.now += min(self.seconds, timeout_s)
        number = next(self.numbers)
        if not self.answers(number):
            raise self.error(f"refused {number}")

    def subject(self):
        made = self.requests
        load = SimpleNamespace(timeout_s=20.0)
        return SimpleNamespace(
            seed=1, load=load, target=self, requests=lambda *args: made, info=ServerInfo(), settings={},
            check=lambda: None,
        )  # fmt: skip


def facts(warm: WarmUpResult):
    return warm.requests, warm.answered, warm.failures, warm.last, warm.in_flight


@pytest.fixture
def run(monkeypatch):
    def warm(server, requests=1):
        clock = SimpleNamespace(monotonic=lambda: server.now, sleep=lambda s: setattr(server, "now", server.now + s))
        monkeypatch.setattr(warming, "time", clock)
        monkeypatch.setattr(single_request, "time", clock)
        return warm_up(server.subject(), ALONE, requests)

    return warm


def test_one_that_fails_is_sent_again_and_told(run):
    assert facts(run(Server(lambda n: n == 3))) == (1, 1, 2, "refused 2", 1)
    assert facts(run(Server(lambda n: True), 4)) == (4, 4, 0, None, 1)
    assert facts(run(Server(lambda n: False), 0)) == (0, 0, 0, None, 0)


def test_what_was_refused_for_good_is_not_sent_again(run):
    server = Server(lambda n: False, error=RefusedError)
    with pytest.raises(RefusedError, match=r"^the server takes no request of this load: refused 1$"):
        run(server)
    assert len(server.limits) == 1


def test_a_server_that_answers_some_is_measured_and_one_that_answers_none_is_not(run):
    some = run(Server(lambda n: n == ATTEMPTS or n > 3 * ATTEMPTS), 4)  # one after the other or at once
    assert some.failures == 3 * ATTEMPTS - 1 and 2 <= some.answered <= 4
    none = Server(lambda n: False)
    with pytest.raises(MeasurementError, match=rf"answers no .*\({ATTEMPTS} attempts\): refused {ATTEMPTS}$"):
        run(none, 4)
    assert len(none.limits) == ATTEMPTS  # of the first request: the others are not sent


def test_all_attempts_of_a_request_share_its_time_out(run):
    slow = Server(lambda n: False, seconds=15.0)
    with pytest.raises(MeasurementError, match="2 attempts"):
        run(slow)
    assert slow.limits == pytest.approx([20.0, 4.8]) and slow.now <= 20.0


@pytest.mark.parametrize("text", ["今天天气很好我们去公园散步吧" * 20, "a" * 100, "one two three", "same same"])
def test_a_text_that_is_measured_shares_no_beginning_with_its_warm_up(run, text):
    server = Server(lambda n: True)
    server.requests = [RequestSpec(0, "a", None, text, max_tokens=4)]
    run(server)
    (sent,) = server.prompts
    assert sent[0] != text[0] and len(text) < len(sent) < len(text) + 12  # a word longer
    server = Server(lambda n: True)
    server.requests = [RequestSpec(0, "a", tuple(range(50)), None, max_tokens=4)]
    run(server)
    (sent,) = server.prompts
    assert sorted(sent) == list(range(50)) != list(sent)  # tokens in another order


def test_a_server_that_does_not_answer_is_waited_for_no_longer_than_there_is_time(monkeypatch):
    monkeypatch.setattr(warming, "_LOOK_S", 0.01)
    answer = threading.Event()
    subject = Server(lambda n: answer.wait(20.0)).subject()
    subject.check = Mock(side_effect=TimeoutError)
    with pytest.raises(TimeoutError):
        warm_up(subject, ALONE, 1)
    answer.set()


def users(count):
    return LoadPoint(f"c{count}", "closed", count, None, count)


@pytest.mark.parametrize(
    ("most", "sizes"),
    [(1, [1]), (2, [1, 2]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (24, [1, 2, 4, 8, 16, 24]), (25, [24, 25]),
     (256, [240, 248, 256]), (257, [248, 256, 257]), (512, [480, 496, 512])],
)  # fmt: skip
def test_the_sizes_on_the_way_are_those_that_engines_capture(most, sizes):
    assert captured_sizes(most)[-len(sizes) :] == sizes


@pytest.mark.parametrize("longest", [4096, 16])
@pytest.mark.parametrize("text", [None, "今天天气很好我们去公园散步吧" * 20])
def test_as_many_stream_at_once_as_the_load_has_users_and_fall_through_every_size(monkeypatch, text, longest):
    """The barrier opens only for 20 requests in flight; five of them fail, which is counted and ends nothing."""
    measured = [RequestSpec(i, "a", None if text else tuple(range(900)), text, max_tokens=4, n=2) for i in range(9)]
    sent, all_there = [], threading.Barrier(20)

    def stream(target, request, timeout_s):
        sent.append(request)
        if all_there.wait(timeout=20.0) < 5:
            raise MeasurementError("full")

    monkeypatch.setattr(warming, "send_single", stream)
    server = Server(lambda n: True)
    server.requests, server.model = measured * 3, SimpleNamespace(most_tokens=longest)
    setup = server.subject()
    setup.settings = {"max_num_seqs": 20}
    assert facts(warm_up(setup, users(24), 4)) == (24, 19, 5, "full", 20)
    for request in sent:
        given = request.prompt if text else request.prompt_token_ids
        assert request.width == 1 and len(given) == min(32, longest // 2) and given[0] != (text or [0])[0]
    lengths = [request.max_tokens for request in sent]
    in_flight = [sum(length > step for length in lengths) for step in range(max(lengths))]
    if longest == 4096:
        assert sorted(set(in_flight)) == [1, 2, 4, 8, 16, 20] and in_flight.count(16) == 2
    assert max(lengths) <= longest // 2


@pytest.mark.parametrize(
    ("point", "load", "engine", "settings", "most"),
    [
        (users(7), {}, {}, {}, 7),
        (users(40), {}, {}, {}, 30),  # so many requests has the load
        (users(7), {}, {"max_num_seqs": 5}, {"max_num_seqs": 6}, 5),
        (users(7), {}, {}, {"max_num_seqs": 6}, 6),
        (None, {"max_concurrency": 9}, {}, {}, 9),
        (None, {}, {"max_num_seqs": 12}, {}, 12),
        (None, {}, {}, {}, 30),
    ],
)
@pytest.mark.parametrize("width", [1, 3])
def test_what_the_load_and_the_server_take_bounds_the_warm_up(point, load, engine, settings, most, width):
    load = SimpleNamespace(**{"max_concurrency": None, **load})
    setup = SimpleNamespace(info=ServerInfo.read({"engine": engine}), settings=settings, load=load)
    requests = [RequestSpec(i, "a", (1,), None, 4, n=width) for i in range(30)]
    limit = engine.get("max_num_seqs") or settings.get("max_num_seqs") or 512
    found = warm_up_concurrency(setup, point or LoadPoint("r4", "open", None, 4.0, 30), requests)
    assert found == min(most * width, limit)
    assert warm_up_concurrency(setup, users(9999), requests * 400) == limit
