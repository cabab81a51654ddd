"""Thoughts and tool calls within an answer's text, apart from what it says, however the text comes in pieces.

    <think>thought</think>text<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>

``AnswerParts`` splits the text at the tags, which are no part of the answer. A stream sends each ``Delta`` as it comes;
a whole answer is the delta of its whole text. The names of fields and options are vLLM's.
"""

from __future__ import annotations

import json
import re
import uuid
from collections import deque
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii as quote
from typing import Any, NamedTuple

from engine.server.detokenizer import StopStrings, TextDecoder

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"
TAGS = (THINK, END_THINK, CALL, END_CALL)
HEADER_CHARACTERS = 256  # of a call whose arguments are streamed, up to these
# Anything else, such as arguments before the name, is read when the call is complete.
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\\x00-\x1f]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')


class CallDelta(NamedTuple):
    """What is new of one tool call. ``id`` and ``name``: in its first delta; ``arguments``: JSON or a piece of it."""

    index: int
    id: str | None
    name: str | None
    arguments: str

    def fields(self) -> dict[str, Any]:
        """Those of a call in OpenAI's format, but for the index."""
        if self.id is None:
            return {"function": {"arguments": self.arguments}}
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Delta(NamedTuple):
    """What is new of an answer: thoughts, then text, then tool calls."""

    reasoning: str
    content: str
    calls: tuple[CallDelta, ...]

    def fields(self) -> str:
        """The JSON of a streamed delta, without its braces; empty content where there is nothing yet."""
        said = ['"reasoning":' + quote(self.reasoning)] if self.reasoning else []
        if self.content or not (said or self.calls):
            said.append('"content":' + quote(self.content))
        if self.calls:
            calls = [{"index": call.index, **call.fields()} for call in self.calls]
            said.append('"tool_calls":' + json.dumps(calls, separators=(",", ":")))
        return ",".join(said)

    def message(self) -> dict[str, Any]:
        """The message of a whole answer."""
        said: dict[str, Any] = {"role": "assistant", "content": self.content or None}
        if self.reasoning:
            said["reasoning"] = self.reasoning
        if self.calls:
            said["tool_calls"] = [call.fields() for call in self.calls]
        return said


class _Call:
    """Reads the text between the tags of one call: a JSON object with name and arguments.

    It is a call once its name and the brace of its arguments are there, and from then on ``push`` returns these.
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
        """The arguments of a call whose name was not known before; what was held, without a name, where it is none."""
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
    """Splits the text of one answer into deltas and counts the tokens of its thoughts.

    ``reasoning``, ``tools``: whether thoughts and calls are looked for. ``thinking``: the prompt has opened a thought.
    ``show_reasoning`` False: thoughts are counted and left out. A call within a thought is part of the thought. Space
    after a call is no text. What is no call is text, with its tags.
    """

    def __init__(self, reasoning: bool, tools: bool, thinking: bool = False, show_reasoning: bool = True):
        self.reasoning_tokens = 0
        self.num_calls = 0
        self._show_reasoning = show_reasoning
        self._text_tags = ((THINK,) if reasoning else ()) + ((CALL,) if tools else ())
        self._thinking = thinking
        self._call: _Call | None = None
        self._after_call = False  # with nothing but space since
        self._tags = self._find_tags()
        self._starts: deque[int] = deque()  # of the tokens whose text is to be split, in characters
        self._read = self._split = 0  # characters of all tokens, and of them those that have been split
        self._reasoning, self._content, self._calls = "", "", dict[int, CallDelta]()  # of the delta in the making

    def add_token(self, length: int) -> None:
        """Take note of a token of so many characters. It is one of thoughts where its first character is."""
        self._starts.append(self._read)
        self._read += length

    def push(self, text: str, final: bool = False) -> Delta:
        """What ``text`` adds. Text that may begin a tag is held back; ``final``: no text will follow."""
        self._reasoning, self._content, self._calls = "", "", {}
        self._add(self._tags.push(text, final))
        while (tag := self._tags.matched) is not None:
            text = self._tags.rest
            self._pass(tag)
            self._add(self._tags.push(text, final))
        if final and self._call is not None:
            self._end_call("")
        return Delta(self._reasoning, self._content, tuple(self._calls.values()))

    def _find_tags(self) -> StopStrings:
        if self._call is not None:
            return StopStrings((END_CALL,))
        return StopStrings((THINK, END_THINK) if self._thinking else self._text_tags)

    def _add(self, text: str) -> None:
        """Add text between tags."""
        self._settle(len(text), self._thinking)
        if self._call is not None:
            unknown = self._call.name is None
            arguments = self._call.push(text)
            if self._call.name is not None:
                self._add_call(self._call.name if unknown else None, arguments)
        elif not self._thinking:
            text = text.lstrip() if self._after_call else text
            self._after_call = self._after_call and not text
            self._content += text
        elif self._show_reasoning:
            self._reasoning += text

    def _pass(self, tag: str) -> None:
        """Go on behind a tag."""
        self._settle(len(tag), False)
        self._after_call = False
        if self._call is not None:
            self._end_call(tag)
        elif tag == CALL:
            self._call = _Call()
        else:
            self._thinking = tag == THINK
        self._tags = self._find_tags()

    def _end_call(self, tag: str) -> None:
        call, self._call = self._call, None
        assert call is not None
        if call.name is None:
            arguments = call.end()
            if call.name is None:
                self._content += CALL + arguments + tag
                return
            self._add_call(call.name, arguments)
        self._after_call = True

    def _add_call(self, name: str | None, arguments: str) -> None:
        """Add a call, or to the last one where ``name`` is None."""
        if name is not None:
            new = CallDelta(self.num_calls, f"chatcmpl-tool-{uuid.uuid4().hex}", name, arguments)
            self.num_calls += 1
        elif arguments:
            new = CallDelta(self.num_calls - 1, None, None, arguments)
            if (before := self._calls.get(new.index)) is not None:
                new = before._replace(arguments=before.arguments + arguments)
        else:
            return
        self._calls[new.index] = new

    def _settle(self, length: int, thought: bool) -> None:
        """Count the tokens that begin in the next ``length`` characters."""
        self._split += length
        while self._starts and self._starts[0] < self._split:
            self._starts.popleft()
            self.reasoning_tokens += thought


class TokenByToken:
    """A decoder that tells ``AnswerParts`` of each token."""

    def __init__(self, decoder: TextDecoder, parts: AnswerParts):
        self._decoder = decoder
        self._parts = parts

    def push(self, ids: Iterable[int]) -> str:
        texts = [self._decoder.push((token,)) for token in ids]
        for text in texts:
            self._parts.add_token(len(text))
        return "".join(texts)

    def flush(self) -> str:
        return self._decoder.flush()
