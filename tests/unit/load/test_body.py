"""A request's bytes on the wire: what a server takes, the key, and a history of its own answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvbench.load.client import Address
from kvbench.load.completion import Completion
from kvbench.load.endpoints import Dialect
from kvbench.load.launch import takes_priority
from kvbench.load.samples import Sample, with_history
from kvbench.load.spec import LoadSpec, http_request
from kvbench.requests.request import RequestSpec
from kvbench.runs.server_info import ServerInfo
from kvbench.targets.presets import PRESETS


def parts(request: RequestSpec, **fields: Any) -> tuple[bytes, dict[str, Any]]:
    base = {"base_url": "http://h:1", "model": "m", "mode": "closed", "concurrency": 1, "requests_file": "r"}
    spec = LoadSpec.model_validate(base | {"out_dir": "o", "timeout_s": 9} | fields)
    head, _, body = http_request(spec, Address("h", 1, "/p"), request).partition(b"\r\n\r\n")
    return head, json.loads(body)


def test_the_request_speaks_the_servers_dialect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_KEY", " secret \n")
    request = RequestSpec(0, "a", (5, 6), None, 3)
    head, body = parts(request)
    assert head.startswith(b"POST /p/v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert b"uthorization" not in head
    assert b"\r\nAuthorization: Bearer secret\r\n" in parts(request, api_key_env="SOME_KEY")[0]
    assert body["prompt"] == [5, 6]
    assert body["stream_options"] == {"include_usage": True}
    assert (body["ignore_eos"], body["return_token_ids"], body["stream"]) == (True, True, True)
    other = {"stream_options": False, "ignore_eos": False, "return_token_ids": False, "endpoint": "chat"}
    head, body = parts(request, dialect=other | {"extra_body": {"min_tokens": 3}})
    assert head.startswith(b"POST /p/v1/chat/completions HTTP/1.1")
    assert body.keys() == {"model", "messages", "max_tokens", "temperature", "stream", "min_tokens"}
    assert b"Connection" not in head and b"\r\nConnection: close" in parts(request, dialect={"keep_alive": False})[0]
    with pytest.raises(ValueError, match="request 0 is a prompt of token ids, which this server does not take"):
        parts(request, dialect={"token_id_prompts": False})
    assert parts(RequestSpec(0, "a", (5,), "five", 3), dialect={"token_id_prompts": False})[1]["prompt"] == "five"


@pytest.mark.parametrize(
    ("answers", "sent"),
    [
        ({}, {"temperature": 0.7}),
        ({"n": 4}, {"n": 4, "temperature": 0.7}),
        ({"n": 2, "best_of": 2}, {"n": 2, "temperature": 0.7}),
        ({"best_of": 3}, {"best_of": 3, "temperature": 0.7}),
        ({"n": 2, "beam_width": 2}, {"n": 2, "use_beam_search": True, "temperature": 0.0}),
        ({"beam_width": 4}, {"best_of": 4, "use_beam_search": True, "temperature": 0.0}),
    ],
)
def test_the_body_asks_for_several_answers_in_vllms_names(answers: dict[str, int], sent: dict[str, Any]) -> None:
    _, body = parts(RequestSpec(0, "a", (5, 6), None, 3, **answers), temperature=0.7)
    names = ("n", "best_of", "use_beam_search", "temperature")
    assert {name: body[name] for name in names if name in body} == sent


@pytest.mark.parametrize(
    ("preset", "answers", "word"),
    [
        ("vllm", {"n": 4}, None),
        ("vllm", {"n": 4, "beam_width": 4}, None),
        ("vllm", {"n": 2, "beam_width": 4}, "n must be 4"),
        ("vllm", {"n": 2, "best_of": 4}, "best_of"),
        ("sglang", {"n": 4}, None),
        ("sglang", {"beam_width": 4}, "beam_width"),
        ("llamacpp", {"n": 2}, "no n"),
        ("tgi", {"n": 1, "best_of": None, "beam_width": None}, None),
        ("transformers", {"n": 2, "best_of": 4}, "no n and no best_of"),
    ],
)
def test_a_preset_says_which_answers_its_server_cannot_give(
    preset: str, answers: dict[str, int], word: str | None
) -> None:
    why = PRESETS[preset].dialect.refusal(answers)
    assert why is None if word is None else word in why
    assert Dialect().refusal(answers) is None


@pytest.mark.parametrize(
    ("settings", "info", "sent"),
    [
        ({"scheduling_policy": "priority"}, None, True),
        ({"scheduling_policy": "fcfs"}, None, False),
        ({}, None, False),
        ({"target": "http://x"}, None, True),
        ({"target": "http://x"}, {"engine": {"scheduling_policy": "fcfs"}}, False),
    ],
)
def test_the_body_has_the_priority_only_where_the_server_takes_it(settings, info, sent):
    takes = takes_priority(settings, ServerInfo.read(info or {}))
    sent_with = (RequestSpec(0, "a", (5, 6), "two words", 3, priority=p) for p in (7, 0))
    urgent, plain = (parts(request, send_priority=takes) for request in sent_with)
    assert urgent[1].pop("priority", None) == (7 if sent else None)
    assert urgent[1] == plain[1] and plain[1]["prompt"] == "two words"  # as text though its ids are known


def test_history_is_spliced_where_the_server_told_it() -> None:
    first = RequestSpec(0, "a", (1, 2), None, 3, session=0)
    second = RequestSpec(1, "a", (1, 2, 70, 71, 72, 5, 6), None, 2, session=0, turn=1, new_tokens=2)
    third = RequestSpec(2, "a", (*second.prompt_token_ids, 80, 81, 9), None, 1, session=0, turn=2, new_tokens=1)

    def answered(request: RequestSpec, ids: list[int], told: int) -> Sample:
        return Sample(request, 0, 0.0, 0.0, 1.0, Completion(token_ids=ids, output_tokens=told))

    short = with_history(second, first, answered(first, [7], 1))  # it stopped early
    assert short.prompt_token_ids == (1, 2, 7, 5, 6)
    assert with_history(third, second, answered(short, [8, 8], 2)).prompt_token_ids == (1, 2, 7, 5, 6, 8, 8, 9)
    assert with_history(third, second, answered(short, [8], 2)).prompt_token_ids == (1, 2, 7, 5, 6, 80, 81, 9)
    assert with_history(second, first, answered(first, [], 3)).prompt_token_ids == second.prompt_token_ids
