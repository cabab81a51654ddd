"""Atomic writes: a crash leaves the old file or the new one. JSON, tars, and whether a folder can be written."""

from __future__ import annotations

import io
import json
import math
import os
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbench.common.errors import UsageError
from kvbench.common.parsing import parse_json
from kvbench.common.secrets import hide_keys


def write_json(path: Path, data: Any) -> None:
    """Writes JSON atomically; NaN and infinities become null."""
    write_text(path, json.dumps(_plain(data), indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes text atomically, without API keys; makes the folder if it is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with write_atomically(path) as scratch:
        scratch.write_text(hide_keys(text), encoding="utf-8")


def as_stored(data: Any) -> Any:
    """Returns the data as `read_json` would read them after `write_json`."""
    return json.loads(hide_keys(json.dumps(_plain(data), allow_nan=False)))


def check_output_dir(path: Path, option: str = "--output-dir") -> None:
    """Raises UsageError, which names ``option``, when ``path`` is no folder that can be written or made.

    Leaves nothing behind.
    """
    try:
        folder = next(at for at in (path, *path.absolute().parents) if at.is_symlink() or at.exists())
    except OSError as error:  # such as a name that is too long
        raise UsageError(f"{path} cannot be written ({error.strerror}): give another {option}") from None
    if why := why_unwritable(folder):
        raise UsageError(f"{path} cannot be written ({folder}: {why}): give another {option}")


def why_unwritable(folder: Path) -> str | None:
    """Returns why no file can be written in ``folder``; None when one can."""
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        return error.strerror
    return None


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Gives a file beside ``path`` to write; it replaces ``path`` when the block ends well and is removed otherwise.

    An OSError names ``path``.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield scratch
        flush(scratch)
        scratch.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Puts the file's bytes on the disk: a crash could otherwise keep the name and lose the bytes."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_json(path: Path, what_to_do: str = "") -> Any:
    """Raises UsageError when the file is missing, or is not JSON: then ``what_to_do`` is added."""
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"there is no {path}: give the folder of a run, such as results/mixed/<time>") from None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read as JSON: {why}{what_to_do and f'; {what_to_do}'}") from None


def pack(root: Path, paths: Sequence[Path]) -> bytes:
    """Makes a compressed tar of the files and folders at ``paths``, with names from ``root`` on."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in paths:
            archive.add(path, str(path.relative_to(root)))
    return buffer.getvalue()


def unpack(files: bytes, folder: Path) -> None:
    """Puts the files of ``pack`` into ``folder``, and nothing anywhere else."""
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        archive.extractall(folder, filter="data")


def _plain(value: Any) -> Any:
    """Converts records, numpy scalars, paths and tuples to JSON types, NaN and infinities to null."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if hasattr(value, "to_json"):  # a record
        return _plain(value.to_json())
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
