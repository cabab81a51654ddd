"""The hand-made JSON of events is JSON, whatever the text; however they are written, tokens keep their order."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvbench_engine.async_engine import AsyncEngine
from kvbench_engine.sequence import Request, SamplingParams
from kvbench_engine.server.choices import Choice, Piece
from kvbench_engine.server.detokenizer import SilentDecoder
from kvbench_engine.server.generation import Generation, ServerState
from kvbench_engine.server.http import DirectWriter
from kvbench_engine.server.metrics import ServerMetrics
from kvbench_engine.server.protocol import CompletionBody, parse
from kvbench_engine.server.streaming import DIRECT, DONE, EventFormat, EventStream
from tests.support.fake_engine import branching, fake_engine
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


def ids_by_choice(parts: list[bytes]) -> list[list[int]]:
    """The tokens of two choices, in the order in which they were sent."""
    ids: list[list[int]] = [[], []]
    assert parts.pop() == DONE
    for part in parts:
        for choice in parsed(part)["choices"]:
            ids[choice["index"]] += choice["token_ids"]
    return ids


class AnswerRecorder:
    """An ASGI server that writes at once when ``ready`` says so, and whose ``send`` waits ``turns`` of the loop."""

    def __init__(self, ready: Callable[[], bool], turns: int = 0, fails_at: int = -1):
        self.ready, self.turns, self.fails_at = ready, turns, fails_at
        self.parts: list[bytes] = []
        self.written = 0

    def write(self, part: bytes) -> None:
        if self.written == self.fails_at:
            raise OSError("no buffer space")
        self.written += 1
        self.parts.append(part)

    async def send(self, message: Any) -> None:
        for _ in range(self.turns):
            await asyncio.sleep(0)
        self.parts += [message["body"]] if message.get("body") else []

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def answer(self, engine: AsyncEngine, **fields: Any) -> None:
        """Stream two choices of 60 tokens each."""
        state = ServerState(engine, shipped_tokenizer(), METRICS, "m", frozenset(), 0)
        sent = {"prompt": [5, 6], "n": 2, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, **fields}
        generation = await Generation.start(state, parse(CompletionBody, json.dumps(sent).encode()), [[5, 6]], None)
        stream = EventStream(generation, EventFormat(HEAD, False, token_ids=True), False)
        await stream({"extensions": {DIRECT: self}}, self.receive, self.send)


async def with_engine(use: Callable[[AsyncEngine], Awaitable[None]]) -> None:
    engine = AsyncEngine(fake_engine(branching, step_s=0.0005))  # time for the reader to wait for the next token
    await engine.start()
    try:
        async with asyncio.timeout(30):
            await use(engine)
    finally:
        assert await engine.shutdown(5)


WHOLE = [[100, *range(101, 160)], [100, *range(201, 260)]]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 99), share=st.sampled_from([0.0, 0.5, 1.0]), turns=st.integers(0, 40))
def test_tokens_written_at_once_and_by_the_task_keep_their_order(seed: int, share: float, turns: int) -> None:
    chance = random.Random(seed)
    recorder = AnswerRecorder(lambda: chance.random() < share, turns)
    asyncio.run(with_engine(recorder.answer))
    assert ids_by_choice(recorder.parts) == WHOLE
    assert share or not recorder.written
    assert recorder.written or turns or share < 1


def test_a_token_that_may_complete_a_stop_string_goes_by_the_task() -> None:
    recorder = AnswerRecorder(lambda: True)
    asyncio.run(with_engine(lambda engine: recorder.answer(engine, stop=["never said"])))
    assert ids_by_choice(recorder.parts) == WHOLE and not recorder.written


def test_a_part_is_written_at_once_only_into_an_open_answer_that_its_client_reads() -> None:
    written: list[bytes] = []
    open_ = {"disconnected": False, "response_complete": False, "response_started": True, "chunked_encoding": True}

    def writer(paused: bool = False, closing: bool = False, **changes: bool | None) -> DirectWriter:
        transport = SimpleNamespace(is_closing=lambda: closing, write=written.append)
        flow = SimpleNamespace(write_paused=paused)
        return DirectWriter(SimpleNamespace(transport=transport, flow=flow, **{**open_, **changes}))

    assert writer().ready()
    for changes in (
        {"paused": True}, {"closing": True}, {"disconnected": True}, {"response_complete": True},
        {"response_started": False}, {"chunked_encoding": False}, {"chunked_encoding": None},
    ):  # fmt: skip
        assert not writer(**changes).ready(), changes
    writer().write(b"x" * 20)
    assert written == [b"14\r\n" + b"x" * 20 + b"\r\n"]


def test_an_error_of_writing_at_once_ends_its_own_stream_alone() -> None:
    good, bad = AnswerRecorder(lambda: True), AnswerRecorder(lambda: True, fails_at=3)

    async def both(engine: AsyncEngine) -> None:
        results = await asyncio.gather(good.answer(engine), bad.answer(engine), return_exceptions=True)
        assert results[0] is None and isinstance(results[1], OSError)
        assert (await engine.stats()).num_requests_running == 0

    asyncio.run(with_engine(both))
    assert ids_by_choice(good.parts) == WHOLE and bad.written == 3
