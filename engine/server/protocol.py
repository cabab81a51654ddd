"""Request bodies: pydantic models in strict mode.

Strict: ``"5"`` is not a number and ``1`` is not ``true``. ``null`` is the default everywhere. Fields that other engines
have are refused or ignored by the tables of ``fields.py``, unknown ones are refused.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Collection
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvbench_engine.server.errors import from_validation, invalid, shown, unsupported
from kvbench_engine.server.fields import NESTED_IGNORED, check_fields, unknown_field

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64  # each one costs a comparison a token, and one more candidate a beam
MAX_SALT_CHARACTERS = 1024
MAX_ITEMS = 16_384  # prompts, messages, or parts of a message: a longer list is refused while the body is read

_BAD = "invalid_value"
_Item = TypeVar("_Item")
# Reading ends at the first wrong item: an error for each of millions takes minutes.
FailFastList = Annotated[list[_Item], Field(fail_fast=True)]
BoundedList = Annotated[list[_Item], Field(max_length=MAX_ITEMS, fail_fast=True)]
Prompt = str | FailFastList[int] | BoundedList[str] | BoundedList[FailFastList[int]]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None

    def check_fields(self) -> None:
        """Refuse fields that the engine does not have and that are not ignored. Raises APIError: 400 or 422."""
        check_fields(self.model_extra or {}, type(self).model_fields)


class StreamOptions(BaseModel):
    """The options of a stream.

    ``include_usage``: a last chunk with the usage. ``continuous_usage_stats``: the usage so far in every chunk.
    """

    model_config = ConfigDict(strict=True, extra="allow")

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """The fields that completions and chat completions have in common.

    ``n`` choices come back. ``best_of``: so many are generated and the n with the best mean log probability a token
    come back, best first; all of them count in the usage. ``use_beam_search``: ``best_of`` beams (left out: n),
    searched as transformers does, of which the n best come back and count. Candidates are compared by all their
    tokens, so neither can go with stop strings, and a stream has an event for each choice at the end.
    ``priority``: 0 goes first, under the priority policy. ``cache_salt``: cached prefixes are shared only between
    requests of the same salt. The names are vLLM's. ``generation_config``: see ``from_generation_config``.
    ``min_tokens``: only where nothing ends an answer before ``max_tokens``, so that it changes nothing.
    """

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: Int64 | None = None
    stop: str | FailFastList[str] | None = None
    stop_token_ids: FailFastList[int] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
    ignore_eos: bool | None = None
    n: int | None = Field(None, ge=1)
    best_of: int | None = Field(None, ge=1)
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    priority: Int64 | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARACTERS)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    generation_config: str | dict[str, Any] | None = None
    kvbench_stamp: bool | None = None
    kvbench_kv_facts: bool | None = None

    @field_validator("stop")
    @classmethod
    def _stops_can_be(cls, value: str | list[str] | None) -> str | list[str] | None:
        if isinstance(value, list) and len(value) > MAX_STOP_STRINGS:
            raise ValueError(f"stop has {len(value)} strings: send at most {MAX_STOP_STRINGS}")
        if value is not None and "" in ([value] if isinstance(value, str) else value):
            raise ValueError("stop has an empty string, which would stop at once: leave it out")
        return value

    @property
    def stops(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def choices_per_prompt(self) -> int:
        return self.n or 1

    @property
    def width(self) -> int:
        """Sequences that run side by side for one prompt: beams, candidates of best_of, or choices."""
        return self.best_of or self.choices_per_prompt

    @property
    def chooses(self) -> bool:
        """Tests whether only the best of several sequences are returned, at the end."""
        return bool(self.use_beam_search) or self.width > self.choices_per_prompt

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """The limit on output tokens; ``max_completion_tokens`` is OpenAI's newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def check_fields(self) -> None:
        super().check_fields()
        if self.stream_options is not None:
            check_nested("stream_options", self.stream_options)
            if not self.stream:
                raise invalid("stream_options is only allowed when stream is true", "stream_options", _BAD)
        self._check_min_tokens()
        self._check_choosing()

    def _check_min_tokens(self) -> None:
        runs_on = self.ignore_eos and not self.stops and not self.stop_token_ids
        if self.min_tokens and not (runs_on and self.token_limit is not None and self.min_tokens <= self.token_limit):
            sentence = f"min_tokens cannot be {self.min_tokens} where something can end the answer before"
            raise unsupported(f"{sentence}: send ignore_eos true, no stop, and a max_tokens as large", "min_tokens")

    def _check_choosing(self) -> None:
        """Refuse (400) options that do not go with best_of or beam search, and those that need beam search."""
        n = self.choices_per_prompt
        if self.best_of is not None and self.best_of < n:
            raise invalid(f"best_of {self.best_of} is less than n {n}: raise best_of or lower n", "best_of", _BAD)
        name = "beam search" if self.use_beam_search else f"best_of {self.best_of} with n {n}"
        if self.chooses and self.stops:
            sentence = f"{name} compares candidates by their tokens and knows no stop strings"
            raise unsupported(f"{sentence}: use stop_token_ids, or cut the text yourself", "stop")
        if self.use_beam_search:
            self._refuse_sampling()
            return
        for option, value, default in (
            ("length_penalty", self.length_penalty, 1.0),
            ("early_stopping", self.early_stopping, False),
        ):
            if value not in (None, default):
                sentence = f"{option} {value!r} is for beam search only: set use_beam_search to true or leave it out"
                raise unsupported(sentence, option)

    def _refuse_sampling(self) -> None:
        for option, value, neutral in (
            ("temperature", self.temperature, (None, 0)),
            ("top_p", self.top_p, (None, 1)),
            ("top_k", self.top_k, (None, -1, 0)),
        ):
            if value not in neutral:
                sentence = f"{option} {value} cannot go with beam search, which samples nothing: leave {option} out"
                raise unsupported(sentence, option)


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None


# Fields of OpenAI's messages, and of the thoughts that other engines return.
MESSAGE_FIELDS = (
    "annotations", "audio", "function_call", "name", "reasoning", "reasoning_content", "refusal", "tool_call_id",
    "tool_calls",
)  # fmt: skip


@functools.cache
def _fields_of(template: str) -> tuple[str, ...]:
    """The fields that messages may have with this chat template: every word of its text."""
    return (*MESSAGE_FIELDS, *dict.fromkeys(re.findall(r"\w+", template)))


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message; further fields reach the chat template as they are: OpenAI's, and those that the template reads."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | BoundedList[ContentPart] | None = None

    def check_fields(self, template: str) -> None:
        """Refuse (422) a field that neither OpenAI's API nor the text of the ``template`` knows."""
        if any(name not in MESSAGE_FIELDS for name in self.model_extra or {}):
            check_nested("messages", self, _fields_of(template))

    def plain(self) -> dict[str, Any]:
        """The message with its text parts joined, as a chat template wants it."""
        content = self.content or ""
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    sentence = f"a content part of type {shown(part.type)} is not supported here: send text parts"
                    raise unsupported(sentence, "messages")
                check_nested("content", part)
            content = "\n".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Messages
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ReasoningChatBody(ChatBody):
    """The body on a server with ``--reasoning-parser``.

    ``include_reasoning`` false: thoughts are counted and left out.
    """

    include_reasoning: bool | None = None
    separate_reasoning: Literal[True] | None = None  # SGLang's
    stream_reasoning: Literal[True] | None = None


class ToolChatBody(ChatBody):
    """The body on a server with ``--tool-call-parser``."""

    tools: BoundedList[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: Literal[True] | None = None
    parse_tool_calls: Literal[True] | None = None  # llama.cpp's

    def check_fields(self) -> None:
        super().check_fields()
        if self.tool_choice not in (None, "auto", "none"):
            sentence = f"tool_choice cannot be {shown(self.tool_choice)}: the model chooses whether to call and what"
            raise unsupported(f'{sentence}; send "auto" or "none"', "tool_choice")
        for tool in self.tools or ():
            function = tool.get("function")
            name = function.get("name") if isinstance(function, dict) else None
            if tool.get("type") != "function" or not isinstance(name, str):
                form = '{"type": "function", "function": {"name": ..., "parameters": ...}}'
                raise invalid(f"tools cannot have {shown(tool)}: each is {form}", "tools", _BAD)


class ReasoningToolChatBody(ReasoningChatBody, ToolChatBody):
    """The body on a server with both parsers."""


# Key: whether the server has a parser of thoughts, and one of tool calls.
CHAT_BODIES: dict[tuple[bool, bool], type[ChatBody]] = {
    (False, False): ChatBody,
    (True, False): ReasoningChatBody,
    (False, True): ToolChatBody,
    (True, True): ReasoningToolChatBody,
}


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or the messages of a chat, with the options of its template."""

    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: FailFastList[int]


Body = TypeVar("Body", bound=_Body)


def parse(model: type[Body], raw: bytes) -> Body:
    """Parse ``raw`` as ``model``, with no field that would be silently ignored.

    Raises:
        APIError: 400 or 422, with the first thing that is wrong.
    """
    try:
        sent = pydantic_core.from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        raise invalid(f"the body is not valid JSON: {error}", code="invalid_json") from None
    try:
        body = model.model_validate(sent)  # not model_validate_json, whose errors copy the whole input several times
        if isinstance(body, GenerationBody) and body.generation_config is not None:
            given = {name: value for name, value in sent.items() if value is not None and name != "generation_config"}
            body = model.model_validate({**from_generation_config(body.generation_config), **given})
    except ValidationError as error:
        raise from_validation(error) from None
    body.check_fields()
    return body


def from_generation_config(config: str | dict[str, Any]) -> dict[str, Any]:
    """Translate the ``generation_config`` of transformers' chat client into fields of a body.

    The body's own fields win.

    Raises:
        APIError: 400 for what is not an object in JSON.
    """
    try:
        given = json.loads(config) if isinstance(config, str) else config
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict):
        raise invalid("generation_config is not a JSON object: send one, or leave it out", "generation_config", _BAD)
    if "generation_config" in given:
        raise invalid(
            "generation_config contains a generation_config: leave the inner one out", "generation_config", _BAD
        )
    fields = {_OF_TRANSFORMERS.get(name, name): value for name, value in given.items() if name != "do_sample"}
    if isinstance(ends := fields.get("stop_token_ids"), int):
        fields["stop_token_ids"] = [ends]
    return fields if given.get("do_sample") else {**fields, "temperature": 0.0}


_OF_TRANSFORMERS = {"max_new_tokens": "max_tokens", "eos_token_id": "stop_token_ids"}


def check_nested(name: str, nested: BaseModel, allowed: Collection[str] = ()) -> None:
    """Refuse (422) a field of an object that is neither its own, nor ``allowed``, nor ignored."""
    own = (*type(nested).model_fields, *allowed)
    for field in nested.model_extra or {}:
        if field not in own and field not in NESTED_IGNORED.get(name, ()):
            raise unknown_field(field, own, name)
