"""What a server says of itself, checked before anything relies on it: /v1/models and /server_info."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from kvbench.common.schema import explain

MOST_TOKENS = 2**31 - 1
_LONGEST_NAME = 1000


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{name!a} has characters that cannot be printed")
    return name


_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME), AfterValidator(_printable)]
_Size = Annotated[int, Field(ge=0, le=MOST_TOKENS)] | None
_Number = Annotated[float, Field(ge=0, allow_inf_nan=False)] | None


class _Part(BaseModel):
    """What is not read may be anything."""

    model_config = ConfigDict(strict=True)


class _Listed(_Part):
    id: _Name


class _Models(_Part):
    data: list[_Listed] = Field(min_length=1)


class _Engine(_Part):
    max_model_len: _Size = None
    page_size: _Size = None


class _Model(_Part):
    name: _Name | None = None
    vocab_size: _Size = None
    max_model_len: _Size = None


class _Capacity(_Part):
    page_size: _Size = None
    capacity_tokens: _Number = None
    kv_bytes: _Number = None


class _Server(_Part):
    notes: list[str] | None = None


class _ServerInfo(_Part):
    engine: _Engine | None = None
    model: _Model | None = None
    capacity: _Capacity | None = None
    server: _Server | None = None
    versions: dict[str, Any] | None = None
    resolved: dict[str, Any] | None = None


def check_models(answer: Any) -> None:
    """Raises ValueError, with the place and the value, for what is no list of models."""
    _check(_Models, answer)


def check_server_info(answer: Any) -> None:
    """Raises ValueError, with the place and the value, for sections or sizes that cannot be those of an engine."""
    _check(_ServerInfo, answer)


def _check(model: type[BaseModel], answer: Any) -> None:
    try:
        model.model_validate(answer)
    except ValidationError as error:
        raise ValueError(explain(error, "")[0].partition("; write")[0].removesuffix(".")) from None


def is_size(value: Any) -> bool:
    """Whether it is a number of tokens that a server may have."""
    return type(value) is int and 0 < value <= MOST_TOKENS
