"""How each endpoint writes an answer: its deltas as events, a stream's beginning and end, and a whole answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from kvbench.calibration.mock.deltas import CALL, EMPTY, HIDDEN, REFUSAL, ROLE, TEXT, THOUGHTS, Plan, script
from kvbench.calibration.mock.settings import MockSettings

_FUNCTION, _SIGNATURE = "count_words", "bW9jaw=="  # of a call, and of thoughts
_TOKENS = 16  # of an answer, where the request sets no limit
_ASSISTANT = {"role": "assistant", "content": ""}


class Format:
    """One answer, which an endpoint's own class writes.

    ``limits``: the token limit's names in a request; ``prompts``: those of the prompt's parts, of which the last is
    needed; ``own``: the endpoint's names of the kinds of deltas that it has; ``reasons``: why an answer ended, where it
    reached the limit, came to its end or called a function. ValueError for deltas that the endpoint does not have.
    """

    limits: tuple[str, ...] = ("max_tokens",)
    prompts: tuple[str, ...] = ("messages",)
    own: Mapping[str, str]
    reasons = ("length", "stop", "tool_calls")

    def __init__(self, settings: MockSettings, body: Mapping[str, Any], prompt_tokens: int) -> None:
        most = next((int(body[name]) for name in self.limits if body.get(name)), _TOKENS)
        self.plan = plan = Plan(script(settings.deltas), most, settings.tokens_per_chunk, settings.textless)
        if lacking := [kind for kind, *_ in plan.runs if kind not in (*self.own, EMPTY, HIDDEN)]:
            raise ValueError(f"it has no {lacking[0]} deltas, but {', '.join(self.own)}, {EMPTY} and {HIDDEN}")
        self._prompt_tokens, self._cached = prompt_tokens, settings.cached_tokens
        if "prompt" not in self.prompts:
            self._prompt_tokens += settings.template_tokens
        self._with_ids = bool(body.get("return_token_ids")) and settings.fault != "no_ids"
        self._with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
        limited, stopped, called = self.reasons
        self._reason = called if plan.runs[-1][0] == CALL else limited if plan.limited else stopped
        self._head = {"id": "mock", "model": "mock", "created": int(time.time())}

    def beginning(self) -> list[str]:
        """Events before the first delta."""
        return []

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        """Events of a delta (see ``Plan.deltas``). ``sent``: last fields of the event that has the delta."""
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
        for kind, text, _, _, place in filter(None, self.plan.deltas()):
            if kind not in (ROLE, EMPTY):
                joins = parts and parts[-1][0] == self.own[kind] and not (kind == CALL and place == 0)
                parts.append((self.own[kind], (parts.pop()[1] if joins else "") + text))
        return parts

    def _usage(self) -> dict[str, Any]:
        """The usage as completions and chat tell it."""
        prompt, output = self._prompt_tokens, self.plan.tokens
        return {
            "prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output,
            "prompt_tokens_details": {"cached_tokens": self._cached},
            "completion_tokens_details": {"reasoning_tokens": self.plan.thoughts},
        }  # fmt: skip


def _data(body: Mapping[str, Any], sent: str = "") -> str:
    return f"data: {json.dumps(body)[:-1]}{sent}}}\n\n"


def _typed(body: Mapping[str, Any], sent: str = "") -> str:
    return f"event: {body['type']}\n{_data(body, sent)}"


class Completions(Format):
    """OpenAI's completions. A chunk is formatted by hand, since the load client is calibrated with them."""

    prompts = ("prompt",)
    own = MappingProxyType({TEXT: "text"})

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        finish = "null" if end < self.plan.tokens else f'"{self._reason}"'
        ids = f',"token_ids":{list(range(begin, end))}' if self._with_ids else ""
        return (
            f'data: {{"id":"mock","object":"text_completion","model":"mock","choices":'
            f'[{{"index":0,"text":"{text}","finish_reason":{finish}{ids}}}]{sent}}}\n\n'
        )

    def end(self) -> list[str]:
        tokens, hidden = self.plan.tokens, self.plan.runs[-1][0] == HIDDEN  # then no chunk had the finish_reason
        last = [self.delta(EMPTY, "", tokens, tokens, 0, "")] if hidden else []
        return [*last, _data(self._head | {"choices": [], "usage": self._usage()}), "data: [DONE]\n\n"]

    def whole(self) -> dict[str, Any]:
        text = "".join(text for _, text in self._parts())
        choice = {"index": 0, "text": text, "finish_reason": self._reason, "logprobs": None}
        return self._head | {"object": "text_completion", "choices": [choice], "usage": self._usage()}


class Chat(Format):
    """OpenAI's chat completions; fields for reasoning as DeepSeek and vLLM (two) and OpenRouter name them."""

    limits = ("max_completion_tokens", "max_tokens")
    own = MappingProxyType({kind: kind for kind in (*THOUGHTS, REFUSAL, CALL, ROLE)} | {TEXT: "content"})
    _call = -1  # number of the newest

    def beginning(self) -> list[str]:
        return [] if self.plan.runs[0][0] == ROLE else [self._chunk(_ASSISTANT)]

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        ids = {"token_ids": list(range(begin, end))} if self._with_ids else {}
        if kind == ROLE:
            return self._chunk(_ASSISTANT, sent)
        if kind == CALL:
            self._call += place == 0
            call = _call(self._call, text) if place == 0 else {"function": {"arguments": text}}
            return self._chunk({CALL: [{"index": self._call} | call]}, sent, **ids)
        name = self.own.get(kind, "content")
        return self._chunk({name: _words(name, text)}, sent, **ids)

    def _chunk(self, delta: Mapping[str, Any], sent: str = "", reason: str | None = None, **ids: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, **ids}
        usage = {"usage": None} if self._with_usage else {}
        return _data(self._head | {"object": "chat.completion.chunk", "choices": [choice]} | usage, sent)

    def end(self) -> list[str]:
        usage = self._head | {"object": "chat.completion.chunk", "choices": [], "usage": self._usage()}
        told = [_data(usage)] if self._with_usage else []
        return [self._chunk({}, reason=self._reason), *told, "data: [DONE]\n\n"]

    def whole(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": None, "refusal": None}
        for name, text in self._parts():
            before = message.get(name)
            part = [_call(len(before or ()), text)] if name == CALL else _words(name, text)
            message[name] = part if before is None else before + part
        choice = {"index": 0, "message": message, "finish_reason": self._reason, "logprobs": None}
        return self._head | {"object": "chat.completion", "choices": [choice], "usage": self._usage()}


def _call(number: int, arguments: str) -> dict[str, Any]:
    return {"id": f"call_{number}", "type": "function", "function": {"name": _FUNCTION, "arguments": arguments}}


def _words(name: str, text: str) -> Any:
    return [{"type": "reasoning.text", "text": text, "index": 0}] if name == "reasoning_details" else text


class _Blocks(Format):
    """An answer of typed events, in which consecutive tokens of one kind are a block.

    The endpoint's class writes a block and the events of its beginning, its deltas and its end.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._blocks = list[dict[str, Any]]()  # those that ended
        self._name, self._text = "", ""  # of the open one

    def delta(self, kind: str, text: str, begin: int, end: int, place: int, sent: str) -> str:
        name = (self._name or self.own[TEXT]) if kind == EMPTY else self.own[kind]
        events, called = list[dict[str, Any]](), kind == CALL and place == 0
        if name != self._name or called:
            events = [*self._close(), *self._opened(name)]
            self._name = name
        if text or not called:
            events.append(self._written(name, text))
            self._text += text
        return "".join([_typed(event, sent if event is events[-1] else "") for event in events])

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Ends the open block, if there is one; its last events."""
        if not self._name:
            return []
        block = self._block(self._name, self._text, len(self._blocks), status)
        events = self._closed(self._name, block)
        self._blocks.append(block)
        self._text = ""
        return events

    def _whole_blocks(self) -> list[dict[str, Any]]:
        return [self._block(name, text, number, "completed") for number, (name, text) in enumerate(self._parts())]


class _Item(NamedTuple):
    """An item of the Responses API. ``words``: the field of its text, in its one part (a call has none)."""

    item: Mapping[str, Any]
    part: Mapping[str, Any]
    words: str = "text"
    parts: str = "content"
    event: str = "content_part"  # of a part that is added or done


_ARGUMENTS = "function_call_arguments"
_ITEMS = {
    "output_text": _Item({"type": "message", "role": "assistant"}, {"type": "output_text", "annotations": []}),
    "refusal": _Item({"type": "message", "role": "assistant"}, {"type": "refusal"}, "refusal"),
    "reasoning_text": _Item({"type": "reasoning", "summary": []}, {"type": "reasoning_text"}),
    "reasoning_summary_text": _Item(
        {"type": "reasoning"}, {"type": "summary_text"}, parts="summary", event="reasoning_summary_part"
    ),
    _ARGUMENTS: _Item({"type": "function_call", "name": _FUNCTION}, {}, "arguments"),
}
"""Item by the name of its deltas."""


class Responses(_Blocks):
    """OpenAI's Responses API."""

    limits, prompts = ("max_output_tokens",), ("instructions", "input")
    own = MappingProxyType({
        TEXT: "output_text", REFUSAL: "refusal", CALL: _ARGUMENTS, "reasoning_content": "reasoning_text",
        "reasoning": "reasoning_text", "reasoning_details": "reasoning_summary_text",
    })  # fmt: skip
    reasons = ("incomplete", "completed", "completed")
    _number = -1  # of the newest event

    def beginning(self) -> list[str]:
        answer = self._answer("in_progress", None)
        return [_typed(self._event(kind, response=answer)) for kind in ("created", "in_progress")]

    def end(self) -> list[str]:
        events = self._close(self._reason)
        events.append(self._event(self._reason, response=self._answer(self._reason, self._usage())))
        return [_typed(event) for event in events]

    def whole(self) -> dict[str, Any]:
        self._blocks = self._whole_blocks()
        return self._answer(self._reason, self._usage())

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._number}

    def _block(self, name: str, text: str, number: int, status: str) -> dict[str, Any]:
        item = {"id": f"item_{number}", **_ITEMS[name].item, "status": status}
        if name == _ARGUMENTS:
            return item | {"call_id": f"call_{number}", "arguments": text}
        return item | {_ITEMS[name].parts: [] if status == "in_progress" else [_part(name, text)]}

    def _opened(self, name: str) -> list[dict[str, Any]]:
        number = len(self._blocks)
        item = self._block(name, "", number, "in_progress")
        return [self._event("output_item.added", output_index=number, item=item), *self._part_event(name, "added")]

    def _written(self, name: str, text: str) -> dict[str, Any]:
        logprobs = {"logprobs": []} if name == "output_text" else {}
        return self._event(f"{name}.delta", **self._place(name), delta=text, **logprobs)

    def _closed(self, name: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [
            self._event(f"{name}.done", **self._place(name), **{_ITEMS[name].words: self._text}),
            *self._part_event(name, "done"),
            self._event("output_item.done", output_index=len(self._blocks), item=block),
        ]

    def _part_event(self, name: str, what: str) -> list[dict[str, Any]]:
        if name == _ARGUMENTS:
            return []
        return [self._event(f"{_ITEMS[name].event}.{what}", **self._place(name), part=_part(name, self._text))]

    def _place(self, name: str) -> dict[str, Any]:
        number, index = len(self._blocks), {"content": "content_index", "summary": "summary_index"}
        part = {} if name == _ARGUMENTS else {index[_ITEMS[name].parts]: 0}
        return {"item_id": f"item_{number}", "output_index": number, **part}

    def _usage(self) -> dict[str, Any]:
        prompt, output = self._prompt_tokens, self.plan.tokens
        return {
            "input_tokens": prompt, "output_tokens": output, "total_tokens": prompt + output,
            "input_tokens_details": {"cached_tokens": self._cached},
            "output_tokens_details": {"reasoning_tokens": self.plan.thoughts},
        }  # fmt: skip

    def _answer(self, status: str, usage: Mapping[str, Any] | None) -> dict[str, Any]:
        incomplete = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            "id": "resp_mock", "object": "response", "created_at": self._head["created"], "status": status,
            "model": "mock", "error": None, "incomplete_details": incomplete, "instructions": None, "metadata": {},
            "output": self._blocks, "parallel_tool_calls": True, "tool_choice": "auto", "tools": [],
            "temperature": 1.0, "top_p": 1.0, "usage": usage,
        }  # fmt: skip


def _part(name: str, text: str) -> dict[str, Any]:
    return {**_ITEMS[name].part, _ITEMS[name].words: text}


_DELTAS = {
    "thinking": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "tool_use": ("input_json_delta", "partial_json"),
}
"""Type of a delta and its field, by the type of its block."""


class Messages(_Blocks):
    """Anthropic's messages."""

    prompts = ("system", "messages")
    own = MappingProxyType(dict.fromkeys(THOUGHTS, "thinking") | {TEXT: "text", CALL: "tool_use"})
    reasons = ("max_tokens", "end_turn", "tool_use")

    def beginning(self) -> list[str]:
        message = self._message(None, []) | {"usage": self._counts(1)}
        return [_typed({"type": "message_start", "message": message}), _typed({"type": "ping"})]

    def end(self) -> list[str]:
        stopped = {"stop_reason": self._reason, "stop_sequence": None}
        last = {"type": "message_delta", "delta": stopped, "usage": self._usage()}
        return [_typed(event) for event in (*self._close(), last, {"type": "message_stop"})]

    def whole(self) -> dict[str, Any]:
        return self._message(self._reason, self._whole_blocks()) | {"usage": self._usage()}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        return {"type": f"content_block_{kind}", "index": len(self._blocks), **fields}

    def _block(self, name: str, text: str, number: int, status: str) -> dict[str, Any]:
        if name == "tool_use":
            return {"type": name, "id": f"toolu_{number}", "name": _FUNCTION, "input": json.loads(text or "{}")}
        signature = {"signature": "" if status == "in_progress" else _SIGNATURE} if name == "thinking" else {}
        return {"type": name, name: text, **signature}

    def _opened(self, name: str) -> list[dict[str, Any]]:
        return [self._event("start", content_block=self._block(name, "", len(self._blocks), "in_progress"))]

    def _written(self, name: str, text: str) -> dict[str, Any]:
        kind, field = _DELTAS[name]
        return self._event("delta", delta={"type": kind, field: text})

    def _closed(self, name: str, block: Mapping[str, Any]) -> list[dict[str, Any]]:
        signed = self._event("delta", delta={"type": "signature_delta", "signature": _SIGNATURE})
        return [*([signed] if name == "thinking" else []), self._event("stop")]

    def _message(self, reason: str | None, content: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": "msg_mock", "type": "message", "role": "assistant", "model": "mock", "content": content}
        return head | {"stop_reason": reason, "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        return self._counts(self.plan.tokens) | {"output_tokens_details": {"thinking_tokens": self.plan.thoughts}}

    def _counts(self, output: int) -> dict[str, Any]:
        fresh = self._prompt_tokens - self._cached  # Anthropic counts them apart
        cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": self._cached}
        return {"input_tokens": fresh, **cached, "output_tokens": output}


FORMATS: Mapping[str, type[Format]] = {
    "completions": Completions,
    "chat": Chat,
    "responses": Responses,
    "messages": Messages,
}
"""The class that writes an answer, by the endpoint's name."""
