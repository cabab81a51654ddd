"""Records: typed contents of the JSON files of a run folder, with one reader and one writer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from kvbench.common.errors import UsageError
from kvbench.common.files import read_json, write_json
from kvbench.common.text import shorten

Number = int | float
"""A number that stays whole where it was stored whole."""
_MOST_SHOWN = 64  # characters of a value in a message


class Record(BaseModel):
    """A frozen record. Keys that its class does not have are left out when it is read; NaN and infinities are refused.

    ``FORMAT``: the version in the file's ``format``; a file of another version is refused, and one without a version
    unless ``MAY_LACK_FORMAT``: older versions wrote such files.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)
    FORMAT: ClassVar[int | str | None] = None
    MAY_LACK_FORMAT: ClassVar[bool] = False

    @classmethod
    def parse(cls, data: Any) -> Self:
        """Returns the record of plain JSON data. Raises ValueError with the first field that does not fit."""
        if cls.FORMAT is not None and isinstance(data, dict):
            written = data.get("format", cls.FORMAT if cls.MAY_LACK_FORMAT else None)
            if written != cls.FORMAT:
                raise ValueError(f"format is {written!r}, and this kvbench reads {cls.FORMAT!r}")
        try:
            return cls.model_validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            field = ".".join(map(str, first["loc"])) or "the whole"
            reason = first["msg"].removeprefix("Value error, ")
            raise ValueError(
                f"{field} is {shorten(repr(first['input']), _MOST_SHOWN)}: {reason[:1].lower()}{reason[1:]}"
            ) from None

    def to_json(self) -> dict[str, Any]:
        """Returns the fields that were set, as plain data for a file."""
        stored = {} if self.FORMAT is None else {"format": self.FORMAT}
        return stored | self.model_dump(exclude_unset=True)

    def fields(self) -> dict[str, Any]:
        """Returns the fields that were set, by name."""
        names = (*type(self).model_fields, *(self.model_extra or ()))
        return {name: getattr(self, name) for name in names if name in self.model_fields_set}


R = TypeVar("R", bound=Record)


def read_record(kind: type[R], path: Path, what_to_do: str = "") -> R:
    """Reads a file as a record of ``kind``. Raises UsageError: what is wrong with it, and ``what_to_do``."""
    try:
        data = read_json(path)
    except UsageError as error:
        raise UsageError(f"{error}{what_to_do and f'; {what_to_do}'}") from None
    return record_of(kind, data, path, what_to_do)


def record_of(kind: type[R], data: Any, path: Path, what_to_do: str = "") -> R:
    """Returns the record of a file's data. Raises UsageError: which field does not fit, and ``what_to_do``."""
    try:
        return kind.parse(data)
    except ValueError as error:
        raise UsageError(f"{path} cannot be read: {error}{what_to_do and f'; {what_to_do}'}") from None


def write_record(path: Path, record: Record) -> None:
    """Writes a record atomically."""
    write_json(path, record.to_json())
