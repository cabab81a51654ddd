"""Changes a frozen record in place, for tests that build one case from another."""

from __future__ import annotations

from typing import Any

from kvbench.common.records import Record


def put(record: Record, **values: Any) -> None:
    """Sets fields of a record, as if it had been read with them."""
    _become(record, {**record.fields(), **values})


def take(record: Record, name: str) -> Any:
    """Removes a field of a record, as if its file had none, and returns its value."""
    fields = record.fields()
    value = fields.pop(name)
    _become(record, fields)
    return value


def _become(record: Record, fields: dict[str, Any]) -> None:
    other = type(record).model_validate(fields)
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__"):
        object.__setattr__(record, name, getattr(other, name))
