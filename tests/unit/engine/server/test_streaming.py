"""The hand-made JSON of events is JSON, whatever the text."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.async_engine import AsyncEngine
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.server.choices import Choice, Piece
from kvbench_engine.server.detokenizer import SilentDecoder
from kvbench_engine.server.generation import Generation, ServerState
from kvbench_engine.server.metrics import ServerMetrics
from kvbench_engine.server.streaming import EventFormat
from tests.support.fake_engine import fake_engine
from tests.support.http_server import shipped_tokenizer

ENGINE = fake_engine()
METRICS = ServerMetrics(ENGINE.config, ENGINE.capacity, ENGINE.stats(), ())
STATE = ServerState(AsyncEngine(ENGINE), shipped_tokenizer(), METRICS, "m", frozenset(), 0)
HEAD = {"id": 'quote " and \u00e9', "object": "x", "created": 1, "model": "back\\slash"}


def one_choice(index: int) -> tuple[Choice, Generation]:
    choice = Choice(index, SilentDecoder(), (), SamplingParams(), 0.0, METRICS)
    return choice, Generation(STATE, [Request("id", (1, 2, 3))], [choice])


def parsed(event: bytes) -> Any:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "an event is one line"
    return json.loads(event[6:])


@settings(max_examples=50)
@given(
    text=st.text(),
    ids=st.lists(st.integers(0, 2**31), max_size=3),
    finish=st.sampled_from([None, "stop", "length"]),
    stop_reason=st.one_of(st.none(), st.text(), st.integers(0, 9)),
    chat=st.booleans(),
    options=st.fixed_dictionaries(
        {name: st.booleans() for name in ("token_ids", "stamp", "include_usage", "continuous_usage")}
    ),
)
def test_events_are_json_with_the_requested_fields(
    text: str, ids: list[int], finish: str | None, stop_reason: Any, chat: bool, options: dict[str, bool]
) -> None:
    choice, generation = one_choice(3)
    choice.stop_reason = stop_reason
    form = EventFormat(HEAD, chat, **options)
    first = parsed(form.event(Piece(choice, text, tuple(ids), finish), generation))
    second = parsed(form.event(Piece(choice, text, tuple(ids), finish), generation))
    for number, event in enumerate((first, second)):
        assert {name: event[name] for name in HEAD} == HEAD
        (answer,) = event["choices"]
        assert answer["index"] == 3
        assert answer["finish_reason"] == finish
        if chat:
            role = {"role": "assistant"} if number == 0 else {}
            assert answer["delta"] == {**role, "content": text}
        else:
            assert answer["text"] == text
        if finish is not None:
            assert answer["stop_reason"] == stop_reason
        assert answer.get("token_ids") == (ids if options["token_ids"] else None)
        assert ("kvbench" in event) == options["stamp"]
        if options["continuous_usage"]:
            assert event["usage"]["prompt_tokens"] == 3
        else:
            assert ("usage" in event) == options["include_usage"]
            assert event.get("usage") is None


def test_the_usage_event_has_no_choices() -> None:
    _, generation = one_choice(0)
    event = parsed(EventFormat(HEAD, False, stamp=True).usage_event(generation))
    assert event["choices"] == []
    assert event["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 0,
        "total_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert event["kvbench"]["sent"] > 0
