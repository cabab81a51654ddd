"""Splits an answer's text into thoughts, tool calls and the rest, in whatever pieces it comes.

    <think>thought</think>text<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>

Fields have vLLM's names. A whole answer is the delta of its whole text.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Iterable
from typing import Any, TypedDict

from kvbench_engine.server.detokenizer import StopStrings, TextDecoder

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)
HEADER_CHARACTERS = 256  # between a call's tag and its arguments; beyond that, arguments come in one piece
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class Delta(TypedDict, total=False):
    """The new part of an answer, in OpenAI's format; empty content where there is nothing."""

    reasoning: str
    content: str
    tool_calls: list[dict[str, Any]]


class _Call:
    """Reads the text between the tags of one call: a JSON object with name and arguments.

    It is a call once its name and the brace of its arguments are there; from then on ``push`` returns these.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._held: list[str] = []  # until the name is known
        self._size = 0  # in characters
        self._depth = 0  # of braces
        self._quoted = self._escaped = self._complete = False

    def push(self, text: str) -> str:
        if self.name is None:
            before = self._size
            self._held.append(text)
            self._size += len(text)
            body = "".join(self._held) if before < HEADER_CHARACTERS else ""
            header = _HEADER.match(body, 0, HEADER_CHARACTERS)
            if header is None:
                return ""
            self.name, text = header[1], body[header.end() :]
        return "" if self._complete else text[: self._length_of_arguments(text)]

    def _length_of_arguments(self, text: str) -> int:
        for at, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = char == "\\", char != '"'
            elif char == '"':
                self._quoted = True
            elif char in "{}":
                self._depth += 1 if char == "{" else -1
                if self._depth == 0:
                    self._complete = True
                    return at + 1
        return len(text)

    def end(self) -> str:
        """The arguments of a call whose name came late; without a name, the text that was held."""
        held = "".join(self._held)
        try:
            call = json.loads(held)
            name, arguments = call["name"], call["arguments"]
        except (ValueError, TypeError, KeyError, RecursionError):
            return held
        if not (isinstance(name, str) and name and name.isprintable() and isinstance(arguments, dict)):
            return held
        self.name = name
        return json.dumps(arguments)


class AnswerParts:
    """A decoder that splits the text of one answer and counts the tokens of its thoughts.

    ``reasoning``, ``tools``: whether thoughts and calls are looked for. ``thinking``: the prompt has opened a thought.
    ``show_reasoning`` False: thoughts are counted and left out. A call within a thought is part of the thought. Space
    after a call is no text. What is no call is text, with its tags.
    """

    def __init__(
        self,
        decoder: TextDecoder,
        *,
        reasoning: bool,
        tools: bool,
        thinking: bool = False,
        show_reasoning: bool = True,
    ):
        self._decoder = decoder
        self.reasoning_tokens = 0
        self.num_calls = 0
        self._text_tags = (THINK,) * reasoning + (CALL,) * tools
        self._thinking = thinking
        self._show_reasoning = show_reasoning
        self._call: _Call | None = None
        self._after_call = False  # a call has ended, with only space behind it
        self._tags = self._find_tags()
        self._starts: deque[int] = deque()  # character offsets of the tokens whose text is not split yet
        self._read = self._split = 0  # characters of all tokens, and of the split ones
        self._delta: Delta = {}

    def push(self, ids: Iterable[int]) -> str:
        """The text of the next tokens. A token counts as a thought's if its first character does."""
        texts = [self._decoder.push((token,)) for token in ids]
        for text in texts:
            self._starts.append(self._read)
            self._read += len(text)
        return "".join(texts)

    def flush(self) -> str:
        return self._decoder.flush()

    def split(self, text: str, final: bool = False) -> Delta:
        """Returns what ``text`` adds. Text that may begin a tag is held back; ``final``: no text will follow."""
        self._delta = {}
        sure = "<" not in text and not self._tags.held
        self._add(text if sure else self._tags.push(text, final))
        while (tag := self._tags.matched) is not None:
            rest = self._tags.rest
            self._pass(tag)
            self._add(self._tags.push(rest, final))
        if final and self._call is not None:
            self._end_call(self._call, "")
        return self._delta or {"content": ""}

    def _find_tags(self) -> StopStrings:
        if self._call is not None:
            return StopStrings((END_CALL,))
        return StopStrings((THINK, END_THINK) if self._thinking else self._text_tags)

    def _add(self, text: str) -> None:
        """Add text between tags."""
        self._count(len(text), self._thinking)
        if self._call is not None:
            unnamed = self._call.name is None
            arguments = self._call.push(text)
            if arguments:
                self._add_call(self._call.name if unnamed else None, arguments)
        elif self._thinking:
            if text and self._show_reasoning:
                self._delta["reasoning"] = self._delta.get("reasoning", "") + text
        elif text := text.lstrip() if self._after_call else text:
            self._after_call = False
            self._delta["content"] = self._delta.get("content", "") + text

    def _pass(self, tag: str) -> None:
        """Go on behind a tag."""
        self._count(len(tag), False)
        if self._call is not None:
            self._end_call(self._call, tag)
        else:
            self._call = _Call() if tag == CALL else None
            self._thinking = tag == THINK
            self._after_call = False
        self._tags = self._find_tags()

    def _end_call(self, call: _Call, tag: str) -> None:
        self._call = None
        if call.name is None:
            arguments = call.end()
            if call.name is None:
                self._delta["content"] = self._delta.get("content", "") + CALL + arguments + tag
                return
            self._add_call(call.name, arguments)
        self._after_call = True

    def _add_call(self, name: str | None, arguments: str) -> None:
        """Add a call, or to the last one where ``name`` is None."""
        calls = self._delta.setdefault("tool_calls", [])
        function = {"arguments": arguments}
        if name is not None:
            call_id, function = f"chatcmpl-tool-{uuid.uuid4().hex}", {"name": name, **function}
            calls.append({"index": self.num_calls, "id": call_id, "type": "function", "function": function})
            self.num_calls += 1
        elif calls:
            calls[-1]["function"]["arguments"] += arguments
        else:
            calls.append({"index": self.num_calls - 1, "function": function})

    def _count(self, length: int, thought: bool) -> None:
        """Count the tokens that begin in the next ``length`` characters."""
        self._split += length
        while self._starts and self._starts[0] < self._split:
            self._starts.popleft()
            self.reasoning_tokens += thought
