"""A trace's file: what container it is, by its content, and its rows, in memory one at a time; what a format is."""

from __future__ import annotations

import itertools
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.traces.model import MOST_TOKENS, Trace

_BETWEEN = re.compile(r"[\s,]*")  # the items of an array
Row = dict[str, Any]


@dataclass(frozen=True)
class Source:
    """A file. ``container``: jsonl (an object a line), array (JSON), object (JSON), csv; other: none of them.

    ``first``: its first row, or the object. ``columns``: of a CSV file.
    """

    path: Path
    container: str
    first: Row
    columns: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, Row]]:
        """Each row with its place in the file. Raises ValueError for one that is no JSON object."""
        items = _array(self.path) if self.container == "array" else _lines_of(self.path)
        for where, row in items:
            if not isinstance(row, dict):
                raise self.error(where, f"not a JSON object ({short(row)}): mend or remove it")
            yield where, row

    def has(self, *keys: str) -> bool:
        """Whether it is JSON lines of which the first has all these keys."""
        return self.container == "jsonl" and set(keys) <= self.first.keys()

    def table(self, names: tuple[str, ...]) -> pd.DataFrame:
        """The named columns of a CSV file, as texts. Raises ValueError."""
        missing = [name for name in names if name not in self.columns]
        if missing:
            raise ValueError(
                f"{self.path} has no column {missing[0]}; needed are {', '.join(names)}, there are "
                f"{', '.join(self.columns) or 'none'}"
            )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", pd.errors.ParserWarning)  # a first row longer than the header
                table = pd.read_csv(
                    self.path, dtype=str, keep_default_na=False, index_col=False, encoding="utf-8-sig",
                    skipinitialspace=True,
                )  # fmt: skip
        except (pd.errors.ParserError, pd.errors.ParserWarning, UnicodeDecodeError) as error:
            raise ValueError(f"{self.path} is not a CSV file ({' '.join(str(error).split())}): mend it") from None
        table.columns = table.columns.str.strip()
        table = table[list(names)]
        if table.empty:
            raise ValueError(f"{self.path} has no rows below its header: it has no requests")
        return table

    def numbers(self, table: pd.DataFrame, name: str, *, whole: bool = True, empty: bool = False) -> np.ndarray:
        """A column as int64 numbers of tokens, or (not ``whole``) as finite float64. ValueError with the line.

        ``empty``: cells without a number are there, and are NaN (not with ``whole``).
        """
        values = pd.to_numeric(table[name], errors="coerce").to_numpy(dtype=np.float64)
        bad = ~np.isfinite(values)
        if empty:
            bad &= table[name].str.strip().to_numpy() != ""
        if whole:
            bad |= (values < 0) | (values >= MOST_TOKENS) | (values != np.floor(values))
        if bad.any():
            row = int(np.flatnonzero(bad)[0])
            what = "number of tokens" if whole else "number"
            raise self.error(self.line(row + 1), f"{name} {short(table[name].iloc[row])} is not a {what}: mend it")
        return values.astype(np.int64) if whole else values

    def line(self, number: int) -> str:
        """Where the CSV row of this number stands, the header being 0: blank lines are no rows."""
        return f"line {next(itertools.islice(lines(self.path), number, None))[0]}"

    def error(self, where: str, what: object) -> ValueError:
        """A mistake with its place."""
        return ValueError(f"{self.path}, {where}: {what}")


@dataclass(frozen=True)
class Format:
    """A format: what it looks like in a few words, how to know it, and how to read it (None: no page size is given).

    ``accepts``: files that may be of it when the user names it (None: those that fit).
    """

    name: str
    looks: str
    fits: Callable[[Source], bool]
    read: Callable[[list[Source], int | None], Trace]
    accepts: Callable[[Source], bool] | None = None


def open_source(path: Path) -> Source:
    """Looks at how the file begins. Raises ValueError for a file that is missing or empty, and OSError."""
    if not path.exists():
        raise ValueError(f"the trace {path} does not exist: check the path")
    number, text = next(lines(path), (0, ""))
    if not text:
        raise ValueError(f"{path} is empty: it has no requests")
    first = parse(text)
    if isinstance(first, dict):
        more = next((line for line in lines(path) if line[0] > number), None)
        # One line: an object of its own (a session), unless it is a trace of one request.
        whole = more is None and any(isinstance(first.get(key), list) for key in ("requests", "data"))
        return Source(path, "object" if whole else "jsonl", first)
    if text.startswith("["):
        _, row = next(_array(path), ("", None))
        return Source(path, "array", row if isinstance(row, dict) else {})
    if text.startswith("{"):
        whole_file = parse(path.read_bytes().decode("utf-8-sig", "replace"))
        if isinstance(whole_file, dict):
            return Source(path, "object", whole_file)
        raise ValueError(f"{path}, line {number}: not JSON ({short(text)}): mend or remove the line")
    columns = tuple(name.strip() for name in text.split(","))
    printable = all(name.isprintable() for name in columns)
    return Source(path, "csv" if len(columns) > 1 and printable else "other", {}, columns)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if text := raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip():
                yield number, text


def _lines_of(path: Path) -> Iterator[tuple[str, Any]]:
    for number, text in lines(path):
        row = parse(text)
        yield f"line {number}", text if row is None else row


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a JSON array, decoded one by one: together they are several times their text. Raises ValueError."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    decoder, index, at = json.JSONDecoder(), 0, text.index("[") + 1
    while not text.startswith("]", at := _BETWEEN.match(text, at).end()):  # type: ignore[union-attr]
        index += 1
        begin = at
        try:
            item, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            cut = short(text[begin : begin + 80])
            raise ValueError(f"{path}, item {index}: not JSON ({cut}): mend or remove it") from None
        yield f"item {index}", item


def parse(text: str) -> Any:
    """The JSON value; None where it is not JSON (too deep, or a number of too many digits, included)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def tokens(row: Row, key: str, default: int | None = None) -> int:
    """A number of tokens; ``default`` where there is none (None: it must be there). Raises ValueError."""
    value = row.get(key)
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value < MOST_TOKENS:
        raise ValueError(f"{key} {short(value)} is not a number of tokens: mend or remove the request")
    return value


def seconds(row: Row, key: str, unit: float = 1.0) -> float | None:
    """A time, ``unit`` seconds each; None where there is none. Raises ValueError."""
    value = row.get(key)
    if value is None:
        return None
    if type(value) not in (int, float) or not _finite(value):
        raise ValueError(f"{key} {short(value)} is not a time: mend it, or leave it out of every request")
    return value * unit


def text(row: Row, key: str) -> str:
    """A text. Raises ValueError."""
    value = row.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} {short(value)} is not a text: mend or remove the request")
    return value


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def short(value: Any) -> str:
    """A value from the file in a sentence, cut."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
