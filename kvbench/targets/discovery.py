"""What a server says of itself, checked before anything relies on it: /v1/models and /server_info."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvbench.common.schema import explain

_MOST_TOKENS = 2**31 - 1


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!a} has characters that cannot be printed")
    return name


_Name = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_printable)]
_Size = Annotated[int, Field(ge=0, le=_MOST_TOKENS)] | None
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class _Part(BaseModel):
    """What is not read may be anything."""

    model_config = ConfigDict(strict=True)


class _ModelRow(_Part):
    id: _Name


class Models(_Part):
    """The answer of /v1/models. Its sizes are not checked here: many servers have -1 or nothing for one."""

    data: list[_ModelRow] = Field(min_length=1)


class _Sizes(_Part):
    max_model_len: _Size = None
    vocab_size: _Size = None
    page_size: _Size = None
    capacity_tokens: _Number = None
    kv_bytes: _Number = None


class _Server(_Part):
    notes: list[str] | None = None


class ServerInfo(_Part):
    """The answer of /server_info, as the built-in server has it."""

    engine: _Sizes | None = None
    model: _Sizes | None = None
    capacity: _Sizes | None = None
    server: _Server | None = None
    versions: dict[str, Any] | None = None
    resolved: dict[str, Any] | None = None


def check(kind: type[BaseModel], answer: Any) -> None:
    """Raises ValueError, with the place and the value, for what cannot be an answer of this kind."""
    try:
        kind.model_validate(answer)
    except ValidationError as error:
        raise ValueError(explain(error, "")[0].partition("; write")[0].removesuffix(".")) from None


def is_size(value: Any) -> bool:
    """Whether it is a number of tokens that a server may have."""
    return type(value) is int and 0 < value <= _MOST_TOKENS
