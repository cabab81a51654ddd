"""The wire formats of answers by endpoint: deltas as events, a stream's beginning and end, a whole answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from kvbench.calibration.mock.settings import (
    CALL,
    EMPTY,
    HIDDEN,
    REFUSAL,
    ROLE,
    TEXT,
    THOUGHTS,
    AnswerPlan,
    Event,
    MockSettings,
    script,
)
from kvbench.common.parsing import json_at

_FUNCTION, _SIGNATURE = "count_words", "bW9jaw=="  # of calls, and of thoughts
_TOKENS = 16  # of an answer, where the request sets no limit
_ASSISTANT = {"role": "assistant", "content": ""}


class WireFormat:
    """One answer; a class for each endpoint has ``delta``, ``end`` and ``whole`` (which comes after all deltas).

    ``limits``: the token limit's names in a request; ``prompts``: those of the prompt's parts, of which the last is
    needed; ``own``: the endpoint's names of the kinds of deltas that it has; ``reasons``: why an answer ended, where it
    reached the limit, came to its end or called a function. ValueError for deltas that the endpoint does not have.
    """

    limits: tuple[str, ...] = ("max_tokens",)
    prompts: tuple[str, ...] = ("messages",)
    own: Mapping[str, str]
    reasons = ("length", "stop", "tool_calls")

    def __init__(self, settings: MockSettings, body: Event, prompt_tokens: int) -> None:
        most = next((int(body[name]) for name in self.limits if json_at(body, name)), _TOKENS)
        if most < 1:
            raise ValueError(f"{most} is no number of tokens; ask for 1 or more")
        self.plan = plan = AnswerPlan(script(settings.deltas), most, settings.tokens_per_chunk, settings.textless)
        if lacking := [kind for kind, *_ in plan.runs if kind not in (*self.own, EMPTY, HIDDEN)]:
            raise ValueError(f"it has no {lacking[0]} deltas, but {', '.join(self.own)}, {EMPTY} and {HIDDEN}")
        self._tokens = plan.tokens
        self._prompt = prompt_tokens + (0 if "prompt" in self.prompts else settings.template_tokens)
        self._cached = settings.cached_tokens
        self._with_ids = bool(json_at(body, "return_token_ids")) and settings.fault != "no_ids"
        self._with_usage = bool(json_at(body, "stream_options", "include_usage"))
        limited, stopped, called = self.reasons
        self._reason = called if plan.runs[-1][0] == CALL else limited if plan.limited else stopped
        self._head: Event = {"id": "mock", "model": "mock", "created": int(time.time())}

    def beginning(self) -> list[str]:
        """Events before the first delta."""
        return []

    def _usage(self, prompt: str = "prompt", output: str = "completion") -> Event:
        return {
            f"{prompt}_tokens": self._prompt,
            f"{output}_tokens": self.plan.tokens,
            "total_tokens": self._prompt + self.plan.tokens,
            f"{prompt}_tokens_details": {"cached_tokens": self._cached},
            f"{output}_tokens_details": {"reasoning_tokens": self.plan.thoughts},
        }


def _data(body: Event, sent: str = "") -> str:
    """An event of that body, with further fields ``sent``."""
    return f"data: {json.dumps(body)[:-1]}{sent}}}\n\n"


def _typed(body: Event, sent: str = "") -> str:
    return f"event: {body['type']}\n{_data(body, sent)}"


class Completions(WireFormat):
    """OpenAI's completions. A chunk is formatted by hand, since the load client is calibrated with them."""

    prompts = ("prompt",)
    own = MappingProxyType({TEXT: "text"})

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        finish = "null" if end < self._tokens else f'"{self._reason}"'
        ids = f',"token_ids":{list(range(begin, end))}' if self._with_ids else ""
        return (
            f'data: {{"id":"mock","object":"text_completion","model":"mock","choices":'
            f'[{{"index":0,"text":"{text}","finish_reason":{finish}{ids}}}]{sent}}}\n\n'
        )

    def end(self) -> list[str]:
        tokens, hidden = self.plan.tokens, self.plan.runs[-1][0] == HIDDEN  # then no chunk had the finish_reason
        last = [self.delta(EMPTY, "", tokens, tokens, 0, "")] if hidden else []
        return [*last, _data(self._head | {"choices": [], "usage": self._usage()}), "data: [DONE]\n\n"]

    def whole(self) -> Event:
        text = "".join(delta[1] for delta in self.plan.deltas() if delta)
        choice = {"index": 0, "text": text, "finish_reason": self._reason, "logprobs": None}
        return self._head | {"object": "text_completion", "choices": [choice], "usage": self._usage()}


class Chat(WireFormat):
    """OpenAI's chat completions; fields for reasoning as DeepSeek and vLLM (two) and OpenRouter name them."""

    limits = ("max_completion_tokens", "max_tokens")
    own = MappingProxyType({kind: kind for kind in (*THOUGHTS, REFUSAL, CALL, ROLE)} | {TEXT: "content"})

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._message: Event = {"role": "assistant", "content": None, "refusal": None}

    def beginning(self) -> list[str]:
        return [] if self.plan.runs[0][0] == ROLE else [self._chunk(_ASSISTANT)]

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        name = self.own.get(kind, "content")
        value: Any = text
        if kind == ROLE:
            return self._chunk(_ASSISTANT, sent)
        if kind == CALL:
            value = [self._call(text, place == 0)]
        else:
            if kind == "reasoning_details":
                value = [{"type": "reasoning.text", "text": text, "index": 0}]
            self._message[name] = (self._message.get(name) or type(value)()) + value
        ids = {"token_ids": list(range(begin, end))} if self._with_ids else {}
        return self._chunk({name: value}, sent, **ids)

    def _call(self, arguments: str, named: bool) -> Event:
        calls = self._message.setdefault(CALL, [])
        if named:
            function = {"name": _FUNCTION, "arguments": arguments}
            calls.append({"id": f"call_{len(calls)}", "type": "function", "function": function})
            return {"index": len(calls) - 1, **calls[-1]}
        calls[-1]["function"]["arguments"] += arguments
        return {"index": len(calls) - 1, "function": {"arguments": arguments}}

    def _chunk(self, delta: Event, sent: str = "", reason: str | None = None, **ids: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **ids}
        usage = {"usage": None} if self._with_usage else {}
        return _data(self._head | {"object": "chat.completion.chunk", "choices": [choice]} | usage, sent)

    def end(self) -> list[str]:
        usage = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}
        counts = [_data(usage)] if self._with_usage else []
        return [self._chunk({}, reason=self._reason), *counts, "data: [DONE]\n\n"]

    def whole(self) -> Event:
        choice = {"index": 0, "message": self._message, "finish_reason": self._reason, "logprobs": None}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": self._usage()}


class _Blocks(WireFormat):
    """An answer of typed events, in which consecutive tokens of one kind are a block.

    The endpoint's class writes a ``_block`` and the events by which it is ``_opened``, ``_written`` and ``_closed``.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks = list[Event]()  # those that ended
        self._name, self._text = "", ""  # of the open one

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        name = (self._name or self.own[TEXT]) if kind == EMPTY else self.own[kind]
        events, called = list[Event](), kind == CALL and place == 0
        if name != self._name or called:
            events = [*self._close(), *self._opened(name)]
            self._name = name
        if text or not called:
            events.append(self._written(name, text))
            self._text += text
        return "".join([_typed(event, sent if event is events[-1] else "") for event in events])

    def _close(self, status: str = "completed") -> list[Event]:
        """Ends the open block, if there is one; its last events."""
        if not self._name:
            return []
        block = self._block(self._name, self._text, status)
        events = self._closed(self._name, block)
        self._blocks.append(block)
        self._text = ""
        return events


_ARGUMENTS = "function_call_arguments"
_MESSAGE = {"type": "message", "role": "assistant"}
_PARTS = {"content": "content_part", "summary": "reasoning_summary_part"}
_ITEMS: Mapping[str, tuple[Event, str, Event, str]] = {
    "output_text": (_MESSAGE, "content", {"type": "output_text", "annotations": []}, "text"),
    "refusal": (_MESSAGE, "content", {"type": "refusal"}, "refusal"),
    "reasoning_text": ({"type": "reasoning", "summary": []}, "content", {"type": "reasoning_text"}, "text"),
    "reasoning_summary_text": ({"type": "reasoning"}, "summary", {"type": "summary_text"}, "text"),
    _ARGUMENTS: ({"type": "function_call", "name": _FUNCTION}, "", {}, "arguments"),
}
"""A row for each name of deltas: the item, the field of its part, the part, and the field of the text."""


class Responses(_Blocks):
    """OpenAI's Responses API, in which a block is an item of the output."""

    limits, prompts = ("max_output_tokens",), ("instructions", "input")
    own = MappingProxyType(
        dict.fromkeys(THOUGHTS, "reasoning_text")
        | {"reasoning_details": "reasoning_summary_text", TEXT: "output_text", REFUSAL: "refusal", CALL: _ARGUMENTS}
    )
    reasons = ("incomplete", "completed", "completed")
    _number = -1  # of the newest event

    def beginning(self) -> list[str]:
        return [_typed(self._event(kind, response=self._answer("in_progress"))) for kind in ("created", "in_progress")]

    def end(self) -> list[str]:
        events = self._close(self._reason)
        events.append(self._event(self._reason, response=self._answer(self._reason)))
        return [_typed(event) for event in events]

    def whole(self) -> Event:
        self._close(self._reason)
        return self._answer(self._reason)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._number}

    def _place(self, name: str) -> Event:
        """Returns the place of the open item, and of its only part."""
        number, holder = len(self._blocks), _ITEMS[name][1]
        return {"item_id": f"item_{number}", "output_index": number} | ({f"{holder}_index": 0} if holder else {})

    def _part(self, name: str, what: str) -> list[Event]:
        """The event that says ``what`` of the part, with the text until now."""
        _, holder, part, words = _ITEMS[name]
        if holder not in _PARTS:
            return []
        return [self._event(f"{_PARTS[holder]}.{what}", **self._place(name), part=part | {words: self._text})]

    def _block(self, name: str, text: str, status: str) -> Event:
        item, holder, part, words = _ITEMS[name]
        number = len(self._blocks)
        item = {"id": f"item_{number}", "status": status} | item
        if not holder:
            return item | {"call_id": f"call_{number}", words: text}
        return item | {holder: [part | {words: text}] if text else []}

    def _opened(self, name: str) -> list[Event]:
        item = self._block(name, "", "in_progress")
        added = self._event("output_item.added", output_index=len(self._blocks), item=item)
        return [added, *self._part(name, "added")]

    def _written(self, name: str, text: str) -> Event:
        logprobs = {"logprobs": []} if name == "output_text" else {}
        return self._event(f"{name}.delta", **self._place(name), delta=text, **logprobs)

    def _closed(self, name: str, block: Event) -> list[Event]:
        return [
            self._event(f"{name}.done", **self._place(name), **{_ITEMS[name][3]: self._text}),
            *self._part(name, "done"),
            self._event("output_item.done", output_index=len(self._blocks), item=block),
        ]

    def _answer(self, status: str) -> Event:
        head = {"id": "resp_mock", "object": "response", "created_at": self._head["created"], "model": "mock"}
        asked = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "temperature": 1.0, "top_p": 1.0}
        nothing = dict.fromkeys(("error", "instructions", "metadata"))
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        usage = None if status == "in_progress" else self._usage("input", "output")
        result = {"output": self._blocks, "usage": usage, "status": status, "incomplete_details": incomplete}
        return head | asked | nothing | result


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""The type of a delta and its field, by the type of its block."""


class Messages(_Blocks):
    """Anthropic's messages, in which a block is one of the content."""

    prompts = ("system", "messages")
    own = MappingProxyType(dict.fromkeys(THOUGHTS, "thinking") | {TEXT: "text", CALL: "tool_use"})
    reasons = ("max_tokens", "end_turn", "tool_use")

    def beginning(self) -> list[str]:
        return [_typed({"type": "message_start", "message": self._answer(None, 1)}), _typed({"type": "ping"})]

    def end(self) -> list[str]:
        answer = self._answer(self._reason, self.plan.tokens)
        stopped = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        last = {"type": "message_delta", "delta": stopped, "usage": answer["usage"]}
        return [_typed(event) for event in (*self._close(), last, {"type": "message_stop"})]

    def whole(self) -> Event:
        self._close()
        return self._answer(self._reason, self.plan.tokens)

    def _event(self, kind: str, **fields: Any) -> Event:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **fields}

    def _block(self, name: str, text: str, status: str) -> Event:
        if name == "tool_use":
            call = {"id": f"toolu_{len(self._blocks)}", "name": _FUNCTION, "input": json.loads(text or "{}")}
            return {"type": name} | call
        signature = {"signature": _SIGNATURE if text else ""} if name == "thinking" else {}
        return {"type": name, name: text} | signature

    def _opened(self, name: str) -> list[Event]:
        return [self._event("start", content_block=self._block(name, "", "in_progress"))]

    def _written(self, name: str, text: str) -> Event:
        kind, field = _DELTAS[name]
        return self._event("delta", delta={"type": kind, field: text})

    def _closed(self, name: str, block: Event) -> list[Event]:
        signed = self._event("delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        return [*([signed] if name == "thinking" else []), self._event("stop")]

    def _answer(self, reason: str | None, output: int) -> Event:
        head = {"id": "msg_mock", "type": "message", "role": "assistant", "model": "mock", "content": self._blocks}
        cached = {"cache_read_input_tokens": self._cached, "cache_creation_input_tokens": 0}
        usage: Event = {"input_tokens": self._prompt - self._cached, **cached, "output_tokens": output}
        if reason:
            usage["output_tokens_details"] = {"thinking_tokens": self.plan.thoughts}
        return head | {"stop_reason": reason, "stop_sequence": None, "usage": usage}


AnswerFormat = Completions | Chat | Responses | Messages
FORMATS: Mapping[str, type[AnswerFormat]] = {
    "completions": Completions,
    "chat": Chat,
    "responses": Responses,
    "messages": Messages,
}
"""The class that writes an answer, by the endpoint's name."""
