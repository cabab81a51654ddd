"""How each endpoint writes an answer: its deltas as events, a stream's beginning and end, and a whole answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvbench.calibration.mock.deltas import CALL, EMPTY, HIDDEN, REFUSAL, ROLE, TEXT, THOUGHTS, Delta, Plan, script
from kvbench.calibration.mock.settings import MockSettings

_FUNCTION, _SIGNATURE = "count_words", "bW9jaw=="  # of a call, of thoughts
_TOKENS = 16  # of an answer, where the request sets no limit


class Usage(NamedTuple):
    """Tokens of a request. ``cached``: of ``prompt``; ``thoughts``: of ``output``."""

    prompt: int
    cached: int
    output: int
    thoughts: int

    def openai(self) -> dict[str, Any]:
        """The object of completions and chat."""
        return {
            "prompt_tokens": self.prompt, "completion_tokens": self.output, "total_tokens": self.prompt + self.output,
            "prompt_tokens_details": {"cached_tokens": self.cached},
            "completion_tokens_details": {"reasoning_tokens": self.thoughts},
        }  # fmt: skip


class Format:
    """One answer of an endpoint, which a class of its own writes.

    ``limits``: the token limit's names in a request; ``prompts``: those of the prompt's parts, the last is needed;
    ``own``: the endpoint's names of the kinds of deltas that it has; ``reasons``: why the answer ended, where it
    reached the limit, came to its end or called a function. ``sent``: what an event with a delta gets as its last
    fields.
    """

    limits: tuple[str, ...] = ("max_tokens",)
    prompts: tuple[str, ...] = ("messages",)
    own: Mapping[str, str]
    reasons = ("length", "stop", "tool_calls")

    def __init__(self, settings: MockSettings, body: Mapping[str, Any], prompt_tokens: int) -> None:
        """ValueError for a body that the endpoint has no answer to."""
        most = next((int(body[name]) for name in self.limits if body.get(name)), _TOKENS)
        plan = self.plan = Plan(script(settings.deltas), most, settings.tokens_per_chunk, settings.textless)
        if missing := [kind for kind, *_ in plan.runs if kind not in (*self.own, EMPTY, HIDDEN)]:
            raise ValueError(f"it has no {missing[0]} deltas, but {', '.join(self.own)}, {EMPTY} and {HIDDEN}")
        template = settings.template_tokens if "prompt" not in self.prompts else 0
        self._usage = Usage(prompt_tokens + template, settings.cached_tokens, plan.tokens, plan.thoughts)
        self._with_ids = bool(body.get("return_token_ids")) and settings.fault != "no_ids"
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        self._created = int(time.time())
        limited, stopped, called = self.reasons
        self._reason = called if plan.runs[-1][0] == CALL else limited if plan.limited else stopped

    def beginning(self) -> list[str]:
        """Events before the first delta."""
        return []

    def delta(self, delta: Delta, sent: str) -> str:
        """Events of a delta."""
        raise NotImplementedError

    def end(self) -> list[str]:
        """Events after the last delta."""
        raise NotImplementedError

    def whole(self) -> dict[str, Any]:
        """The answer to a request without ``stream``."""
        raise NotImplementedError

    def _parts(self) -> list[tuple[str, str]]:
        """Consecutive deltas of one kind as one text each, with the endpoint's name of the kind."""
        parts = list[tuple[str, str]]()
        for delta in self.plan.deltas():
            if delta is None or delta.kind in (ROLE, EMPTY):
                continue
            kind, begins = self.own[delta.kind], delta.kind == CALL and delta.place == 0
            text = parts.pop()[1] if parts and parts[-1][0] == kind and not begins else ""
            parts.append((kind, text + delta.text))
        return parts


def _data(body: Mapping[str, Any], sent: str = "") -> str:
    return f"data: {json.dumps(body)[:-1]}{sent}}}\n\n"


class Completions(Format):
    """OpenAI's completions. A chunk is formatted by hand, since the load client is calibrated with them."""

    prompts = ("prompt",)
    own = MappingProxyType({TEXT: "text"})

    def delta(self, delta: Delta, sent: str) -> str:
        finish = "null" if delta.end < self.plan.tokens else f'"{self._reason}"'
        ids = f',"token_ids":{list(range(delta.begin, delta.end))}' if self._with_ids else ""
        return (
            f'data: {{"id":"mock","object":"text_completion","model":"mock","choices":'
            f'[{{"index":0,"text":"{delta.text}","finish_reason":{finish}{ids}}}]{sent}}}\n\n'
        )

    def end(self) -> list[str]:
        hidden = self.plan.runs[-1][0] == HIDDEN  # so that no chunk has told the finish_reason
        last = [self.delta(Delta(EMPTY, self.plan.tokens, self.plan.tokens, ""), "")] if hidden else []
        return [*last, _data({"id": "mock", "choices": [], "usage": self._usage.openai()}), "data: [DONE]\n\n"]

    def whole(self) -> dict[str, Any]:
        text = "".join(text for _, text in self._parts())
        choice = {"index": 0, "text": text, "finish_reason": self._reason, "logprobs": None}
        head = {"id": "mock", "object": "text_completion", "created": self._created, "model": "mock"}
        return head | {"choices": [choice], "usage": self._usage.openai()}


class Chat(Format):
    """OpenAI's chat completions; fields for reasoning as DeepSeek and vLLM (two) and OpenRouter name them."""

    limits = ("max_completion_tokens", "max_tokens")
    own = {kind: kind for kind in (*THOUGHTS, REFUSAL, CALL, ROLE)} | {TEXT: "content"}
    _calls = -1  # number of the newest

    def beginning(self) -> list[str]:
        scripted = self.plan.runs[0][0] == ROLE
        return [] if scripted else [self._chunk({"role": "assistant", "content": ""})]

    def delta(self, delta: Delta, sent: str) -> str:
        ids = {"token_ids": list(range(delta.begin, delta.end))} if self._with_ids else {}
        if delta.kind == ROLE:
            return self._chunk({"role": "assistant", "content": ""}, sent)
        if delta.kind == CALL:
            self._calls += delta.place == 0
            call = {"index": self._calls} | _call(self._calls, delta.text, named=delta.place == 0)
            return self._chunk({CALL: [call]}, sent, **ids)
        kind = self.own.get(delta.kind, "content")
        return self._chunk({kind: _words(kind, delta.text)}, sent, **ids)

    def _chunk(self, delta: Mapping[str, Any], sent: str = "", reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **more}
        usage = {"usage": None} if self._with_usage else {}
        return _data(self._head("chat.completion.chunk") | {"choices": [choice]} | usage, sent)

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": "chatcmpl-mock", "object": kind, "created": self._created, "model": "mock"}

    def end(self) -> list[str]:
        usage = self._head("chat.completion.chunk") | {"choices": [], "usage": self._usage.openai()}
        return [
            self._chunk({}, reason=self._reason),
            *([_data(usage)] if self._with_usage else []),
            "data: [DONE]\n\n",
        ]

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for kind, text in self._parts():
            before = message.get(kind)
            part = [_call(len(before or ()), text)] if kind == CALL else _words(kind, text)
            message[kind] = part if before is None else before + part
        choice = {"index": 0, "message": message, "finish_reason": self._reason, "logprobs": None}
        return self._head("chat.completion") | {"choices": [choice], "usage": self._usage.openai()}


def _call(number: int, arguments: str, named: bool = True) -> dict[str, Any]:
    if not named:
        return {"function": {"arguments": arguments}}
    return {
        "id": f"call_{number}", "type": "function", "function": {"name": _FUNCTION, "arguments": arguments},
    }  # fmt: skip


def _words(kind: str, text: str) -> Any:
    if kind != "reasoning_details":
        return text
    return [{"type": "reasoning.text", "text": text, "format": "unknown", "index": 0}]


class _Blocks(Format):
    """An answer of typed events, in which consecutive tokens of one kind are a block that begins and ends."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks = list[dict[str, Any]]()  # those that ended
        self._kind, self._text = "", ""  # of the open one

    def delta(self, delta: Delta, sent: str) -> str:
        kind = (self._kind or self.own[TEXT]) if delta.kind == EMPTY else self.own[delta.kind]
        events, named = [], delta.kind == CALL and delta.place == 0
        if kind != self._kind or named:
            events = [*self._close(), *self._opened(kind)]
            self._kind, self._text = kind, ""
        if delta.text or not named:
            events.append(self._written(kind, delta.text))
            self._text += delta.text
        return "".join([_typed(event, sent if event is events[-1] else "") for event in events])

    def _close(self, limited: bool = False) -> list[dict[str, Any]]:
        """The events that end the open block, if there is one."""
        if not self._kind:
            return []
        block = self._block(self._kind, self._text, "incomplete" if limited else "completed")
        events = self._closed(self._kind, block)
        self._blocks.append(block)
        return events

    def _all_blocks(self) -> list[dict[str, Any]]:
        for kind, text in self._parts():
            self._blocks.append(self._block(kind, text, "completed"))
        return self._blocks

    def _block(self, kind: str, text: str, status: str) -> dict[str, Any]:
        raise NotImplementedError

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def _written(self, kind: str, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _closed(self, kind: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        raise NotImplementedError


def _typed(body: Mapping[str, Any], sent: str = "") -> str:
    return f"event: {body['type']}\n{_data(body, sent)}"


class _Item(NamedTuple):
    """An item of the Responses API. ``item`` without its parts; ``part``: type of its one part; ``words``: its text."""

    item: Mapping[str, Any]
    parts: str = "content"
    part: str = ""
    words: str = "text"
    events: str = "content_part"


_CALL_ITEM = "function_call_arguments"
_ITEMS = {
    "output_text": _Item({"type": "message", "role": "assistant"}, part="output_text"),
    "refusal": _Item({"type": "message", "role": "assistant"}, part="refusal", words="refusal"),
    "reasoning_text": _Item({"type": "reasoning", "summary": []}, part="reasoning_text"),
    "reasoning_summary_text": _Item({"type": "reasoning"}, "summary", "summary_text", events="reasoning_summary_part"),
    _CALL_ITEM: _Item({"type": "function_call", "name": _FUNCTION}, "", words="arguments"),
}
"""Item by the name of its deltas."""


class Responses(_Blocks):
    """OpenAI's Responses API."""

    limits, prompts = ("max_output_tokens",), ("instructions", "input")
    own = dict.fromkeys(THOUGHTS, "reasoning_text") | {
        "reasoning_details": "reasoning_summary_text", TEXT: "output_text", REFUSAL: "refusal", CALL: _CALL_ITEM,
    }  # fmt: skip
    reasons = ("incomplete", "completed", "completed")
    _number = -1

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._number}

    def _block(self, kind: str, text: str, status: str) -> dict[str, Any]:
        row, number = _ITEMS[kind], len(self._blocks)
        item = {"id": f"item_{number}", **row.item, "status": status}
        if kind == _CALL_ITEM:
            return item | {"call_id": f"call_{number}", "arguments": text}
        empty = status == "in_progress"
        return item | {row.parts: [] if empty else [self._part(kind, text)]}

    def _part(self, kind: str, text: str) -> dict[str, Any]:
        annotations = {"annotations": []} if kind == "output_text" else {}
        return {"type": _ITEMS[kind].part, _ITEMS[kind].words: text} | annotations

    def _place(self, kind: str) -> dict[str, Any]:
        """Where the open item and its part are."""
        number = len(self._blocks)
        parts = {"content": {"content_index": 0}, "summary": {"summary_index": 0}}
        return {"item_id": f"item_{number}", "output_index": number} | parts.get(_ITEMS[kind].parts, {})

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        row, number = _ITEMS[kind], len(self._blocks)
        events = [self._event("output_item.added", output_index=number, item=self._block(kind, "", "in_progress"))]
        if row.part:
            events.append(self._event(f"{row.events}.added", **self._place(kind), part=self._part(kind, "")))
        return events

    def _written(self, kind: str, text: str) -> dict[str, Any]:
        logprobs = {"logprobs": []} if kind == "output_text" else {}
        return self._event(f"{kind}.delta", **self._place(kind), delta=text, **logprobs)

    def _closed(self, kind: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        row, place = _ITEMS[kind], self._place(kind)
        events = [self._event(f"{kind}.done", **place, **{row.words: self._text})]
        if row.part:
            events.append(self._event(f"{row.events}.done", **place, part=self._part(kind, self._text)))
        return [*events, self._event("output_item.done", output_index=len(self._blocks), item=block)]

    def beginning(self) -> list[str]:
        answer = self._answer("in_progress")
        return [_typed(self._event(kind, response=answer)) for kind in ("created", "in_progress")]

    def end(self) -> list[str]:
        closed = self._close(limited=self._reason == "incomplete")
        return [_typed(event) for event in (*closed, self._event(self._reason, response=self._answer(self._reason)))]

    def whole(self) -> dict[str, Any]:
        self._all_blocks()
        return self._answer(self._reason)

    def _answer(self, status: str) -> dict[str, Any]:
        prompt, cached, output, thoughts = self._usage
        usage = {
            "input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": thoughts},
        }  # fmt: skip
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": "resp_mock", "object": "response", "created_at": self._created, "status": status, "model": "mock",
            "error": None, "incomplete_details": incomplete, "instructions": None, "metadata": {}, "tools": [],
            "output": self._blocks, "parallel_tool_calls": True, "tool_choice": "auto", "temperature": 1.0,
            "top_p": 1.0, "usage": None if status == "in_progress" else usage,
        }  # fmt: skip


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a delta and its field, by the type of its block."""


class Messages(_Blocks):
    """Anthropic's messages."""

    prompts = ("system", "messages")
    own = dict.fromkeys(THOUGHTS, "thinking") | {TEXT: "text", CALL: "tool_use"}
    reasons = ("max_tokens", "end_turn", "tool_use")

    def _block(self, kind: str, text: str, status: str) -> dict[str, Any]:
        if kind == "tool_use":
            call = {"id": f"toolu_{len(self._blocks)}", "name": _FUNCTION, "input": json.loads(text or "{}")}
            return {"type": kind} | call
        signature = {"signature": "" if status == "in_progress" else _SIGNATURE} if kind == "thinking" else {}
        return {"type": kind, kind: text} | signature

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **fields}

    def _opened(self, kind: str) -> list[dict[str, Any]]:
        return [self._event("start", content_block=self._block(kind, "", "in_progress"))]

    def _written(self, kind: str, text: str) -> dict[str, Any]:
        name, field = _DELTAS[kind]
        return self._event("delta", delta={"type": name, field: text})

    def _closed(self, kind: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        signed = self._event("delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        return [*([signed] if kind == "thinking" else []), self._event("stop")]

    def beginning(self) -> list[str]:
        begun = self._message(None) | {"usage": self._counts(1)}
        del begun["usage"]["output_tokens_details"]
        return [_typed({"type": "message_start", "message": begun}), _typed({"type": "ping"})]

    def end(self) -> list[str]:
        usage = self._counts(self._usage.output)
        stopped = {"stop_reason": self._reason, "stop_sequence": None}
        last = {"type": "message_delta", "delta": stopped, "usage": usage}
        return [_typed(event) for event in (*self._close(), last, {"type": "message_stop"})]

    def whole(self) -> dict[str, Any]:
        return self._message(self._reason) | {"content": self._all_blocks(), "usage": self._counts(self._usage.output)}

    def _message(self, reason: str | None) -> dict[str, Any]:
        return {
            "id": "msg_mock", "type": "message", "role": "assistant", "model": "mock", "content": [],
            "stop_reason": reason, "stop_sequence": None,
        }  # fmt: skip

    def _counts(self, output: int) -> dict[str, Any]:
        prompt, cached, _, thoughts = self._usage
        return {
            "input_tokens": prompt - cached, "cache_creation_input_tokens": 0, "cache_read_input_tokens": cached,
            "output_tokens": output, "output_tokens_details": {"thinking_tokens": thoughts},
        }  # fmt: skip


FORMATS: Mapping[str, type[Format]] = {
    "completions": Completions,
    "chat": Chat,
    "responses": Responses,
    "messages": Messages,
}
"""Format by the endpoint's name."""
