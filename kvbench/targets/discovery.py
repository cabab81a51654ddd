"""What a server says of itself, checked before anything relies on it: /v1/models and /server_info."""

from __future__ import annotations

from typing import Any

from kvbench.common.text import shorten

_MOST_TOKENS = 2**31 - 1
_SIZE = f"a whole number up to {_MOST_TOKENS}"
_KINDS = {
    "a mapping": lambda value: isinstance(value, dict),
    "true or false": lambda value: type(value) is bool,
    "a list of strings": lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
    "a number from 0 to 2^63": lambda value: type(value) in (int, float) and 0 <= value <= 2**63,
    _SIZE: lambda value: type(value) is int and value <= _MOST_TOKENS,
}
_SERVER_INFO = {  # what is read of it, as the built-in server has it; a part stands before what is in it
    **dict.fromkeys(("engine", "model", "capacity", "server", "versions", "resolved"), "a mapping"),
    **dict.fromkeys(("engine.page_size", "engine.max_model_len", "engine.max_num_seqs"), _SIZE),
    **dict.fromkeys(("model.vocab_size", "model.max_model_len", "capacity.page_size"), _SIZE),
    **dict.fromkeys(("capacity.capacity_tokens", "capacity.kv_bytes"), "a number from 0 to 2^63"),
    "engine.enable_prefix_caching": "true or false",
    "server.notes": "a list of strings",
}


def check_models(answer: Any) -> None:
    """Raises ValueError for an answer of /v1/models without models. Many servers have -1 or nothing for a size."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    _require("data", rows, "a list of models", isinstance(rows, list) and rows != [])
    for number, row in enumerate(rows):
        _require(f"data.{number}", row, "a mapping", isinstance(row, dict))
        name = row.get("id")
        is_name = isinstance(name, str) and 0 < len(name) <= 1000 and name.isprintable()
        _require(f"data.{number}.id", name, "a string of 1 to 1,000 characters that can be printed", is_name)


def check_server_info(info: dict[str, Any]) -> None:
    """Raises ValueError for a value that cannot be true, and takes out the sizes below 1, which tell nothing."""
    for place, kind in _SERVER_INFO.items():
        part, _, name = place.rpartition(".")
        values = (info.get(part) or {}) if part else info
        if (value := values.get(name)) is not None:
            _require(place, value, kind, _KINDS[kind](value))
            if kind == _SIZE and value < 1:
                del values[name]


def _require(place: str, value: Any, kind: str, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"{place}: {shorten(repr(value), 300)} is not {kind}")


def is_size(value: Any) -> bool:
    """Tests whether it is a number of tokens that a server may have."""
    return type(value) is int and 0 < value <= _MOST_TOKENS
