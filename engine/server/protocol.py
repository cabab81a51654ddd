"""Request bodies: pydantic models in strict mode.

Strict: ``"5"`` is not a number and ``1`` is not ``true``. ``null`` is the default everywhere. An unknown field is
ignored, as by other OpenAI-compatible servers, unless it would change the answer (``UNSUPPORTED``): then it is refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from engine.server.errors import from_validation, invalid, unprocessable

MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 64  # each one costs a comparison a token, and one more candidate a beam
MAX_SALT_CHARACTERS = 1024

# Options the engine does not have, with the values that change nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "chat_template": (None,),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "include_stop_str_in_output": (None, False),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "min_p": (None, 0),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "presence_penalty": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
}

_BAD = "invalid_value"
Prompt = str | list[int] | list[str] | list[list[int]]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    model: str | None = None


class StreamOptions(BaseModel):
    """``include_usage``: a last chunk with the usage; ``continuous_usage_stats``: the usage so far in every chunk."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(_Body):
    """What completions and chat completions have in common.

    ``n`` choices come back. ``best_of``: so many are generated and the n with the best mean log probability a token
    come back, best first; all of them count in the usage. ``use_beam_search``: ``best_of`` beams (left out: n),
    searched as transformers does, of which the n best come back and count. Candidates are compared by all their
    tokens, so neither can go with stop strings, and a stream has an event for each choice at the end.
    ``priority``: 0 goes first, under the priority policy. ``cache_salt``: cached prefixes are shared only between
    requests of the same salt. The names are vLLM's.
    """

    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=MAX_STOP_TOKEN_IDS)
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
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None
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
        """Whether only the best of several sequences are returned, at the end."""
        return bool(self.use_beam_search) or self.width > self.choices_per_prompt

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def token_limit(self) -> int | None:
        """``max_completion_tokens`` is OpenAI's newer name and wins."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def refuse_unsupported(self) -> None:
        for name, value in (self.model_extra or {}).items():
            neutral = UNSUPPORTED.get(name)
            if neutral is not None and not any(_same(value, allowed) for allowed in neutral):
                raise unprocessable(f"{name} is not supported by this server: leave it out", name, "unsupported")
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options is only allowed when stream is true", "stream_options", _BAD)
        self._check_choosing()

    def _check_choosing(self) -> None:
        """Refuse (400 or 422) options that do not go with best_of or beam search, and those that need beam search."""
        n = self.choices_per_prompt
        if self.best_of is not None and self.best_of < n:
            raise invalid(f"best_of {self.best_of} is less than n {n}: raise best_of or lower n", "best_of", _BAD)
        name = "beam search" if self.use_beam_search else f"best_of {self.best_of} with n {n}"
        if self.chooses and self.stops:
            sentence = f"{name} compares candidates by their tokens and knows no stop strings"
            raise unprocessable(f"{sentence}: use stop_token_ids, or cut the text yourself", "stop", "unsupported")
        if self.use_beam_search:
            self._refuse_sampling()
            return
        for option, value, default in (
            ("length_penalty", self.length_penalty, 1.0),
            ("early_stopping", self.early_stopping, False),
        ):
            if value not in (None, default):
                sentence = f"{option} {value!r} is for beam search only: set use_beam_search to true or leave it out"
                raise unprocessable(sentence, option, "unsupported")

    def _refuse_sampling(self) -> None:
        for option, value, neutral in (
            ("temperature", self.temperature, (None, 0)),
            ("top_p", self.top_p, (None, 1)),
            ("top_k", self.top_k, (None, -1, 0)),
        ):
            if value not in neutral:
                sentence = f"{option} {value} cannot go with beam search, which samples nothing: leave {option} out"
                raise unprocessable(sentence, option, "unsupported")


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    add_special_tokens: bool | None = None


class ContentPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """One message; further fields (name, tool_call_id ...) reach the chat template as they are."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Annotated[str, Field(min_length=1)]
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, Any]:
        """With the text parts joined, as a chat template wants it."""
        content = self.content or ""
        if not isinstance(content, str):
            for part in content:
                if part.type != "text" or part.text is None:
                    raise unprocessable(
                        f"a content part of type {part.type!r} is not supported by this server: send text parts",
                        "messages",
                        "unsupported",
                    )
            content = "\n".join(part.text or "" for part in content)
        return {**(self.model_extra or {}), "role": self.role, "content": content}


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class TokenizeBody(_Body):
    """POST /tokenize: a prompt, or the messages of a chat."""

    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class DetokenizeBody(_Body):
    """POST /detokenize."""

    tokens: list[int]


Body = TypeVar("Body", bound=_Body)


def parse(model: type[Body], raw: bytes) -> Body:
    """``raw`` as ``model``.

    Raises:
        APIError: 400, with the first thing that is wrong.
    """
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        raise from_validation(error) from None


def _same(value: Any, allowed: Any) -> bool:
    """Equality in which 0 is not False."""
    return isinstance(value, bool) == isinstance(allowed, bool) and value == allowed
