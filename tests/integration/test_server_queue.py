"""Who is taken into the queue, in which order, and whose cache pages are whose."""

from __future__ import annotations

import concurrent.futures
from typing import Any

import pytest

from kvbench_engine.sequence import Sequence
from tests.support.fake_engine import counting, fake_engine
from tests.support.http_server import RunningServer, running_server

COMPLETIONS = "/v1/completions"


def occupy(server: RunningServer, waiting: int) -> list[Any]:
    """One request runs without end and ``waiting`` wait behind it."""
    socks = [server.open_request({"prompt": [5], "max_tokens": 1000})]
    server.wait_for(num_requests_running=1)
    for count in range(1, waiting + 1):
        socks.append(server.open_request({"prompt": [6], "max_tokens": 2}))
        server.wait_for(num_requests_waiting=count)
    return socks


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_429_and_leaves_nothing_behind(stream: bool) -> None:
    with running_server(fake_engine(max_num_seqs=1, max_num_waiting=2, step_s=0.005)) as server:
        socks = occupy(server, 1)
        reply = server.post(COMPLETIONS, {"prompt": [[7], [8]], "max_tokens": 2, "stream": stream})
        assert reply.status == 429
        assert int(reply.headers["retry-after"]) >= 1
        assert (reply.error["type"], reply.error["code"]) == ("rate_limit_error", "queue_full")
        assert "max_num_waiting is 2" in reply.error["message"]
        metrics = server.metrics()
        assert metrics["num_requests_waiting"] == 1  # the first of the two prompts is not left in it
        assert metrics["request_failure_total{kind=queue_full}"] == 1
        assert metrics["request_failure_total{kind=refused}"] == 0
        assert metrics["http_requests_total{code=429}"] == 1
        for sock in socks:
            sock.close()
        server.wait_for(num_requests_running=0, num_requests_waiting=0, kv_pages_owned=0)
        assert server.post(COMPLETIONS, {"prompt": [[7], [8]], "max_tokens": 2}).status == 200


def test_more_prompts_than_the_queue_holds_are_refused_for_good() -> None:
    with running_server(fake_engine(max_num_seqs=1, max_num_waiting=2)) as server:
        reply = server.post(COMPLETIONS, {"prompt": [[7], [8], [9], [10]], "max_tokens": 2})
        assert (reply.status, reply.error["code"]) == (422, "too_many_prompts")
        assert reply.error["message"].startswith("4 prompts are more than the 1 that run at once (max_num_seqs)")
        # one may run and two wait: these were only ever too many for a moment
        assert server.post(COMPLETIONS, {"prompt": [[7], [8], [9]], "max_tokens": 2}).status == 200


def test_under_the_priority_policy_the_lowest_number_goes_first() -> None:
    order: list[int] = []

    def noting(seq: Sequence) -> int:
        if seq.request.prompt_token_ids[0] not in order:
            order.append(seq.request.prompt_token_ids[0])
        return counting(seq)

    engine = fake_engine(noting, max_num_seqs=1, scheduling_policy="priority", step_s=0.005)
    with running_server(engine) as server, concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = server.open_request({"prompt": [1], "max_tokens": 1000})
        server.wait_for(num_requests_running=1)
        answers = []
        for waiting, (prompt, priority) in enumerate([(2, 2), (3, 9), (4, 1), (5, 0)]):
            body = {"prompt": [prompt], "max_tokens": 3, "priority": priority}
            if priority == 0:
                break
            answers.append(pool.submit(server.post, COMPLETIONS, body))
            # priority 0 runs: nobody with a higher number may take its place
            server.wait_for(num_requests_waiting=waiting + 1)
        first.close()
        assert [answer.result().status for answer in answers] == [200] * 3
    assert order == [1, 4, 2, 3]


def test_pages_are_shared_under_the_same_salt_only() -> None:
    with running_server(fake_engine(enable_prefix_caching=True)) as server:

        def cached(salt: str | None) -> int:
            body = {"prompt": list(range(1, 65)), "max_tokens": 2, "cache_salt": salt}
            return server.post(COMPLETIONS, body).json["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(None), cached(None)] == [0, 48]
        assert [cached("mine"), cached("yours"), cached("mine"), cached("yours")] == [0, 0, 48, 48]
        assert cached(None) == 48
