"""The Parquet files of a run folder: requests.parquet, a row a request, and server.parquet, a row a reading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from kvbench.common.errors import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

REQUESTS, GAUGES = "requests.parquet", "server.parquet"
_NEEDED = ("ok", "t0")  # of requests
_TEXTS = ("class", "error_kind", "error", "finish_reason", "canary", "canary_wrong", "text")
_LISTS = ("chunk_times", "chunk_tokens", "chunk_choices", "sent_times", "output_token_ids")


def read_table(path: Path) -> pd.DataFrame:
    """The rows of a file; empty without it. Raises UsageError for a damaged one."""
    if not path.is_file():
        return pd.DataFrame()
    check_table(path)
    try:
        return pd.read_parquet(path)
    except (OSError, ValueError) as error:
        raise UsageError(_damaged(path, str(error))) from None


def check_table(path: Path) -> None:
    """Raises UsageError for a file that is no Parquet, or one of ours with other columns than ours."""
    import pyarrow.parquet as pq

    try:
        schema = pq.read_schema(path)
    except (OSError, ValueError) as error:
        raise UsageError(_damaged(path, str(error))) from None
    if path.name == REQUESTS and (lacking := [name for name in _NEEDED if name not in schema.names]):
        raise UsageError(_damaged(path, f"it has no column {lacking[0]!r}"))
    for column in schema if path.name in (REQUESTS, GAUGES) else ():
        if not _fits(path.name, column):
            raise UsageError(_damaged(path, f"its column {column.name!r} is of {column.type}"))


def _fits(file: str, column: pa.Field) -> bool:
    """Tests whether a column has its kind of values: numbers, but for texts and lists of requests."""
    from pyarrow import types

    if types.is_null(column.type):
        return True
    if file == REQUESTS and column.name in _TEXTS:
        return types.is_string(column.type) or types.is_large_string(column.type) or types.is_dictionary(column.type)
    if file == REQUESTS and column.name in _LISTS:
        return types.is_list(column.type) or types.is_large_list(column.type)
    return types.is_integer(column.type) or types.is_floating(column.type) or types.is_boolean(column.type)


def _damaged(path: Path, why: str) -> str:
    return f"{path} is damaged: {why.splitlines()[0] if why else 'it cannot be read'}"
