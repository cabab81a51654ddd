"""What a server says of its models in /v1/models, checked before anything relies on it."""

from __future__ import annotations

from typing import Any

from kvbench.common.text import shorten


def check_models(answer: Any) -> None:
    """Raises ValueError for an answer of /v1/models without models. Many servers have -1 or nothing for a size."""
    rows = answer.get("data") if isinstance(answer, dict) else None
    _require("data", rows, "a list of models", isinstance(rows, list) and rows != [])
    for number, row in enumerate(rows):
        _require(f"data.{number}", row, "a mapping", isinstance(row, dict))
        name = row.get("id")
        is_name = isinstance(name, str) and 0 < len(name) <= 1000 and name.isprintable()
        _require(f"data.{number}.id", name, "a string of 1 to 1,000 characters that can be printed", is_name)


def _require(place: str, value: Any, kind: str, is_right: bool) -> None:
    if not is_right:
        raise ValueError(f"{place}: {shorten(repr(value), 300)} is not {kind}")
