"""n, best_of and beam search over HTTP: one request of the engine, several choices of the answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvbench_engine.sequence import Sequence
from tests.support.fake_engine import branching, fake_engine
from tests.support.http_server import RunningServer, running_server, shipped_tokenizer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Go"}]


def likely(seq: Sequence) -> float:
    """Sibling 2 is the most likely, then 3, then 1, then 0."""
    return {2: -0.1, 3: -0.2, 1: -0.3, 0: -0.4}[seq.index]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    engine = fake_engine(branching, max_num_seqs=8)
    engine.executor.logprob = likely
    with running_server(engine) as running:
        yield running


def ask(server: RunningServer, path: str = COMPLETIONS, **fields: Any) -> Any:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": [5, 6, 7]}
    reply = server.post(path, {**prompt, "max_tokens": 3, "return_token_ids": True, **fields})
    assert reply.status == 200, reply.body
    return reply.json


def ids(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


SAID = [[100, 101, 102], [100, 201, 202], [100, 301, 302], [100, 401, 402]]  # by sibling


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_n_choices_are_forks_of_one_prompt(server: RunningServer, path: str) -> None:
    before = server.metrics()
    answer = ask(server, path, n=4)
    assert ids(answer) == SAID
    assert answer["usage"]["completion_tokens"] == 12
    after = server.wait_for(num_requests_running=0, kv_pages_owned=0)
    assert after["forks_total"] - before["forks_total"] == 3
    prompts = after["prompt_tokens_total"] - before["prompt_tokens_total"]
    assert prompts == answer["usage"]["prompt_tokens"]  # computed once
    length = "request_success_total{finished_reason=length}"
    assert after[length] - before[length] == 4
    assert after["time_to_first_token_seconds_count"] - before["time_to_first_token_seconds_count"] == 4


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_streamed_choices_carry_their_index_to_the_end(server: RunningServer, path: str) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": [5]}
    options = {"include_usage": True}
    body = {**prompt, "n": 3, "max_tokens": 3, "stream": True, "return_token_ids": True, "stream_options": options}
    said: dict[int, list[int]] = {0: [], 1: [], 2: []}
    ended = []
    *events, last = server.post(path, body).events
    for event in events:
        (choice,) = event["choices"]
        said[choice["index"]] += choice["token_ids"]
        ended += [choice["index"]] if choice["finish_reason"] == "length" else []
    assert said == dict(enumerate(SAID[:3]))
    assert sorted(ended) == [0, 1, 2]
    assert last["usage"]["completion_tokens"] == 9


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_its_choice_only(stream: bool) -> None:
    tokenizer = shipped_tokenizer()
    text = tokenizer.decode([202, 203])  # what sibling 1 says at its third and fourth token
    assert all(text not in tokenizer.decode([100, *range(101 + k, 120 + k)]) for k in (0, 200))
    with running_server(fake_engine(branching, step_s=0.002)) as server:
        body = {"prompt": [5], "max_tokens": 40, "n": 3, "stop": text, "stream": stream, "return_token_ids": True}
        reply = server.post(COMPLETIONS, body)
        answers = [event["choices"][0] for event in reply.events] if stream else reply.json["choices"]
        said: dict[int, list[int]] = {0: [], 1: [], 2: []}
        reasons = {}
        for choice in answers:
            said[choice["index"]] += choice["token_ids"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = (choice["finish_reason"], choice.get("stop_reason"))
        assert reasons == {0: ("length", None), 1: ("stop", text), 2: ("length", None)}
        assert (len(said[0]), said[1], len(said[2])) == (40, [100, 201, 202, 203], 40)
        server.wait_for(num_requests_running=0, kv_pages_owned=0)
        assert server.engine.stats().finished == {"length": 2, "stop": 1}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_best_of_returns_the_most_likely_and_charges_for_all(server: RunningServer, path: str) -> None:
    answer = ask(server, path, n=2, best_of=4)
    assert ids(answer) == [SAID[2], SAID[3]]
    assert answer["usage"]["completion_tokens"] == 12
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "fields", [{"n": 2, "best_of": 4}, {"use_beam_search": True, "n": 3}], ids=["best_of", "beams"]
)
def test_what_is_chosen_at_the_end_is_streamed_then_a_choice_an_event(
    server: RunningServer, path: str, fields: dict[str, Any]
) -> None:
    whole = ask(server, path, **fields)
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": [5, 6, 7]}
    streamed = {"max_tokens": 3, "return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
    *events, last = server.post(path, {**prompt, **streamed, **fields}).events
    choices = [choice for event in events for choice in event["choices"]]
    assert [choice["index"] for choice in choices] == list(range(fields["n"]))
    assert [choice["token_ids"] for choice in choices] == ids(whole)
    assert len({tuple(tokens) for tokens in ids(whole)}) == fields["n"] and all(len(own) == 3 for own in ids(whole))
    assert {choice["finish_reason"] for choice in choices} == {"length"}
    assert last["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    server.wait_for(num_requests_running=0, kv_pages_owned=0)


def test_beams_come_best_first(server: RunningServer) -> None:
    """The k-th best continuation of every beam has a log probability of -(k + 1): sums give the order."""
    answer = ask(server, use_beam_search=True, n=2, best_of=3, max_tokens=1)
    assert ids(answer) == [[100], [101]]
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "param", "numbers"),
    [
        ({"n": 9}, "n", ("9", "8")),
        ({"n": 2, "best_of": 12}, "best_of", ("12", "8")),
        ({"use_beam_search": True, "n": 100}, "n", ("100", "8")),
        ({"priority": -3}, "priority", ("-3",)),
        ({"priority": 3}, "priority", ("3", "--scheduling-policy")),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers(
    server: RunningServer, path: str, fields: dict[str, Any], param: str, numbers: tuple[str, ...]
) -> None:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": [5]}
    reply = server.post(path, {**prompt, **fields})
    assert (reply.status, reply.error["param"]) == (422, param)
    assert all(number in reply.error["message"] for number in numbers), reply.error["message"]


def test_more_beams_than_tokens_are_refused() -> None:
    with running_server(fake_engine(vocab_size=4)) as server:
        reply = server.post(COMPLETIONS, {"prompt": [1], "use_beam_search": True, "n": 5})
        assert reply.status == 422 and "5 beams" in reply.error["message"] and "4" in reply.error["message"]


def test_a_length_penalty_that_leaves_all_bounds_is_refused(server: RunningServer) -> None:
    reply = server.post(COMPLETIONS, {"prompt": [5], "max_tokens": 900, "use_beam_search": True, "length_penalty": 1e9})
    assert reply.status == 400 and "length_penalty cannot be 1000000000.0" in reply.error["message"]
