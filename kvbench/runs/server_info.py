"""The server's description of itself: /server_info, in the shape of the built-in one's, checked once.

A value that a server does not tell is None, and what it says besides is kept for the manifest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvbench.common.records import Record
from kvbench.common.text import shorten

MOST_TOKENS = 2**31 - 1
ASYNCHRONOUS = "async_scheduling"  # a fact of an engine: it schedules while the device computes


def is_size(value: Any) -> bool:
    """Tests whether it is a number of tokens that a server may have."""
    return type(value) is int and 0 < value <= MOST_TOKENS


def _only(kind: str, is_right: Callable[[Any], bool]) -> BeforeValidator:
    """A check that refuses what is neither missing nor of the ``kind``."""

    def check(value: Any) -> Any:
        if value is not None and not is_right(value):
            raise ValueError(f"{shorten(repr(value), 300)} is not {kind}")
        return tuple(value) if isinstance(value, list) else value  # a strict tuple takes no list

    return BeforeValidator(check)


# A check before has plain data at hand, and a strict reader then takes no list for a tuple.
_AS_TUPLE = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
Flag = Annotated[bool | None, _only("true or false", lambda value: type(value) is bool)]
Name = Annotated[str | None, _only("a string", lambda value: isinstance(value, str))]
Number = Annotated[
    int | float | None, _only("a number from 0 to 2^63", lambda x: type(x) in (int, float) and 0 <= x <= 2**63)
]
Size = Annotated[  # below 1 it tells nothing, as many servers' -1
    int | None,
    AfterValidator(lambda size: size if size and size > 0 else None),
    _only(f"a whole number up to {MOST_TOKENS}", lambda value: type(value) is int and value <= MOST_TOKENS),
]
Facts = Annotated[dict[str, Any], _only("a mapping", lambda value: isinstance(value, dict))]
Strings = Annotated[
    tuple[str, ...],
    _AS_TUPLE,
    _only("a list of strings", lambda x: isinstance(x, list | tuple) and all(isinstance(text, str) for text in x)),
]


class ServerAnswer(Record):
    """A mapping of an answer. Further keys are kept as they are."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _is_mapping(cls, data: Any) -> Any:
        if isinstance(data, cls):
            return data
        if not isinstance(data, dict):
            raise ValueError(f"{shorten(repr(data), 300)} is not a mapping")
        empty = {name for name, field in cls.model_fields.items() if field.default is not None}  # null: not told
        return {name: value for name, value in data.items() if value is not None or name not in empty}

    @classmethod
    def read(cls, answer: Any) -> Self:
        """The facts in ``answer``. Raises ValueError for the first value that cannot be true."""
        try:
            return cls.model_validate(answer)
        except ValidationError as error:
            [first, *_] = error.errors()
            where, text = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Value error, ")
            if first["type"] == "missing":
                text = "it is missing"
            elif first["type"] != "value_error":
                text = f"{shorten(repr(first['input']), 300)} is not what it should be ({text})"
            raise ValueError(f"{where}: {text}" if where else text) from None


class EngineSettings(ServerAnswer):
    """The settings that a server runs with, in EngineConfig's names."""

    page_size: Size = None
    max_model_len: Size = None
    max_num_seqs: Size = None
    max_num_batched_tokens: Size = None
    enable_prefix_caching: Flag = None
    scheduling_policy: Name = None
    kv_cache_dtype: Name = None
    device: Name = None
    dtype: Name = None
    num_threads: Size = None


class ModelAnswer(ServerAnswer):
    """The model that a server has loaded."""

    name: Name = None
    vocab_size: Size = None
    max_model_len: Size = None
    weights_fingerprint: Name = None


class Resolved(ServerAnswer):
    """The settings that a server chose, whatever was asked for. ``bound_cores``: of its threads."""

    device: Name = None
    device_name: Name = None
    dtype: Name = None
    kernel_backend: Name = None
    num_threads: Size = None
    bound_cores: Annotated[tuple[int, ...] | None, _AS_TUPLE] = None


class KVRoom(ServerAnswer):
    """The room of a server's KV cache."""

    page_size: Size = None
    num_pages: Size = None
    windows: Annotated[tuple[int | None, ...] | None, _AS_TUPLE] = None
    capacity_tokens: Number = None
    kv_bytes: Number = None
    budget_bytes: Number = None
    kv_type: Name = None


class OutlierFacts(ServerAnswer):
    """The largest channel of K and of V over the median one, its layer, and K's as it is stored."""

    k: Number = None
    k_layer: Number = None
    k_stored: Number = None
    v: Number = None
    v_layer: Number = None


class ServerFacts(ServerAnswer):
    """The kind and launch command of a server, and what a reader of its figures should know."""

    kind: Name = None
    title: Name = None
    command: Strings = ()
    quirks: Strings = ()
    notes: Strings = ()


class TokenizerInfo(ServerAnswer):
    name: Name = None


class ServerInfo(ServerAnswer):
    """A server's /server_info; empty for a server that has none. ``served_model``: as the client's requests name it."""

    engine: EngineSettings = Field(default_factory=EngineSettings)
    model: ModelAnswer = Field(default_factory=ModelAnswer)
    resolved: Resolved = Field(default_factory=Resolved)
    capacity: KVRoom = Field(default_factory=KVRoom)
    server: ServerFacts = Field(default_factory=ServerFacts)
    tokenizer: TokenizerInfo = Field(default_factory=TokenizerInfo)
    served_model: ModelAnswer = Field(default_factory=ModelAnswer)
    versions: Facts = Field(default_factory=dict)
    kv_outliers: OutlierFacts = Field(default_factory=OutlierFacts)

    def fact(self, section: str, key: str) -> Any:
        """Returns a value of a section; None where the server does not tell it."""
        part = getattr(self, section)
        return part.get(key) if isinstance(part, dict) else getattr(part, key, None)


def _lists_models(value: Any) -> bool:
    return isinstance(value, list) and value != []


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 1000 and value.isprintable()


LenientSize = Annotated[int | None, BeforeValidator(lambda value: value if is_size(value) else None)]


class SlotSizes(ServerAnswer):
    """Sizes as llama.cpp tells them. ``n_ctx``: of a slot, which ``n_ctx_train`` may exceed."""

    n_ctx: LenientSize = None
    n_ctx_train: LenientSize = None
    n_vocab: LenientSize = None


class ModelRow(ServerAnswer):
    """A row of /v1/models. Many servers have -1 or nothing for a size."""

    id: Annotated[str, _only("a string of 1 to 1,000 characters that can be printed", _is_name)] = Field(
        default="", validate_default=True
    )
    owned_by: Any = None
    max_model_len: LenientSize = None
    vocab_size: LenientSize = None
    meta: Annotated[SlotSizes | None, BeforeValidator(lambda value: value if isinstance(value, dict) else None)] = None


class ModelList(ServerAnswer):
    """The answer of /v1/models."""

    data: Annotated[list[ModelRow], _only("a list of models", _lists_models)]


class TokenCount(ServerAnswer):
    """The answer of /tokenize."""

    count: LenientSize = None
