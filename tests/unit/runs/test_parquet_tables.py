"""Parquet files of a run folder that hold something else than they should are refused with a sentence."""

from __future__ import annotations

import pandas as pd
import pytest

from kvbench.common.errors import UsageError
from kvbench.runs.folder import read_table

ROWS = pd.DataFrame({"ok": [True], "t0": [0.0], "ts": [0.0], "class": ["a"], "chunk_times": [[0.1]], "text": [None]})


def test_a_file_that_is_not_there_has_no_rows(tmp_path):
    assert read_table(tmp_path / "requests.parquet").empty


def test_requests_may_lack_columns_that_came_later(tmp_path):
    ROWS.to_parquet(tmp_path / "requests.parquet")
    assert len(read_table(tmp_path / "requests.parquet")) == 1


@pytest.mark.parametrize(
    ("file", "column", "values", "why"),
    [
        ("requests.parquet", "ok", None, "no column 'ok'"),
        ("requests.parquet", "class", [["a"]], "column 'class' is of list"),
        ("requests.parquet", "chunk_times", [0.1], "column 'chunk_times' is of double"),
        ("requests.parquet", "t0", ["soon"], "column 't0' is of"),
        ("server.parquet", "t", ["soon"], "column 't' is of"),
    ],
)
def test_columns_of_another_kind_are_refused(tmp_path, file, column, values, why):
    rows = ROWS if file == "requests.parquet" else pd.DataFrame({"t": [0.5]})
    changed = rows.drop(columns=column) if values is None else rows.assign(**{column: values})
    changed.to_parquet(tmp_path / file)
    with pytest.raises(UsageError, match=why):
        read_table(tmp_path / file)
