"""Files written so that a crash leaves the old one or the new one, and JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError


def write_json(path: Path, data: Any) -> None:
    """Atomically: a reader, or a run after a crash, sees the old file or the new one. NaN becomes null."""
    write_text(path, json.dumps(_plain(data), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Atomically, like ``write_json``. OSError names ``path``, and leaves nothing half written behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> Any:
    """Raises UsageError when the file is missing or is not JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"there is no {path}: give the folder of a run, such as results/mixed/<time>") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON: {error}") from None


def _plain(value: Any) -> Any:
    """JSON types only: numpy scalars, paths and tuples converted, NaN and infinities to null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [_plain(v) for v in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    return str(value)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
