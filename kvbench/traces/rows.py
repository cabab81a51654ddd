"""The means by which every format is read: a trace's file, its container and rows, and the Trace that they become."""

from __future__ import annotations

import itertools
import json
import re
import warnings
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvbench.common.text import and_more
from kvbench.traces.model import MOST_TOKENS, UNKNOWN, Prompt, Trace, count_turns, find_tick

_BETWEEN = re.compile(r"[\s,]*")  # the items of an array
_OPTION = "--page-size"
_MOST_SECONDS = 1e300  # whole numbers in JSON may be larger than a float


class TraceRow(dict[str, Any]):
    """A JSON object of a trace, in which a key that is missing is None."""

    def __missing__(self, key: str) -> None:
        return None


@dataclass(frozen=True)
class Source:
    """A file. ``container``: jsonl (one object a line), array (JSON), object (JSON), csv or other.

    ``first``: its first row, or the object. ``columns``: of a CSV file.
    """

    path: Path
    container: str
    first: TraceRow
    columns: tuple[str, ...] = ()

    def rows(self) -> Iterator[tuple[str, TraceRow]]:
        """Yields each row with its place in the file. Raises ValueError for one that is no JSON object."""
        rows = ((f"line {at}", text if (value := parse(text)) is None else value) for at, text in lines(self.path))
        for where, row in _array(self.path) if self.container == "array" else rows:
            if not isinstance(row, dict):
                raise self.error(where, f"not a JSON object ({short(row)}): mend or remove it")
            yield where, row

    def has(self, *keys: str) -> bool:
        """Tests whether it is JSON lines of which the first has all these keys."""
        return self.container == "jsonl" and set(keys) <= self.first.keys()

    def table(self, names: tuple[str, ...]) -> pd.DataFrame:
        """Returns the named columns of a CSV file that has them, as texts. Raises ValueError."""
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

        ``empty``: empty cells are allowed and become NaN (not with ``whole``).
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
            raise self.row_error(row + 1, f"{name} {short(table[name].iloc[row])} is not a {what}: mend it")
        return values.astype(np.int64) if whole else values

    def row_error(self, number: int, what: str) -> ValueError:
        """A mistake in a CSV row; the header is row 0, and blank lines are no rows."""
        return self.error(f"line {next(itertools.islice(lines(self.path), number, None))[0]}", what)

    def error(self, where: str, what: object) -> ValueError:
        """A mistake with its place."""
        return ValueError(f"{self.path}, {where}: {what}")


@dataclass(frozen=True)
class TraceFormat:
    """A format. ``looks``: its files in a few words. ``fits``: whether a file is of this format, by its content.

    ``accepts``: whether a file may be of it when the user names the format (None: as ``fits``). ``read``: reads files;
    its second argument is the page size, None when it is not given.
    """

    name: str
    looks: str
    fits: Callable[[Source], bool]
    read: Callable[[list[Source], int | None], Trace]
    accepts: Callable[[Source], bool] | None = None


def open_source(path: Path) -> Source:
    """Finds the container from how the file begins. Raises ValueError for a missing or empty file, and OSError."""
    if not path.exists():
        raise ValueError(f"the trace {path} does not exist: check the path")
    number, text = next(lines(path), (0, ""))
    if not text:
        raise ValueError(f"{path} is empty: it has no requests")
    first = parse(text)
    if isinstance(first, dict):
        more = next((line for line in lines(path) if line[0] > number), None)
        # A single line is one whole object (a session) if it holds a list of requests, else a trace of one request.
        whole = more is None and any(isinstance(first[key], list) for key in ("requests", "data"))
        return Source(path, "object" if whole else "jsonl", first)
    if text.startswith("["):
        _, row = next(_array(path), ("", None))
        return Source(path, "array", row if isinstance(row, dict) else TraceRow())
    if text.startswith("{"):
        whole_file = parse(path.read_bytes().decode("utf-8-sig", "replace"))
        if isinstance(whole_file, dict):
            return Source(path, "object", whole_file)
        raise ValueError(f"{path}, line {number}: not JSON ({short(text)}): mend or remove the line")
    columns = tuple(name.strip() for name in text.split(","))
    printable = all(name.isprintable() for name in columns)
    return Source(path, "csv" if len(columns) > 1 and printable else "other", TraceRow(), columns)


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if text := raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip():
                yield number, text


def _array(path: Path) -> Iterator[tuple[str, Any]]:
    """The items of a JSON array, decoded one by one: all at once would take several times the memory. ValueError."""
    text = path.read_text(encoding="utf-8-sig", errors="replace")
    decoder, index, at = json.JSONDecoder(object_hook=TraceRow), 0, text.index("[") + 1
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
    """The JSON value; None for a text that is no JSON or nested too deeply."""
    try:
        return json.loads(text, object_hook=TraceRow)
    except (ValueError, RecursionError):
        return None


def tokens(row: TraceRow, key: str, default: int | None = None) -> int:
    """A number of tokens; ``default`` if it is missing (None: it must be there). Raises ValueError."""
    value = row[key]
    if value is None and default is not None:
        return default
    if type(value) is not int or not 0 <= value < MOST_TOKENS:
        raise ValueError(f"{key} {short(value)} is not a number of tokens: mend or remove the request")
    return value


def seconds(row: TraceRow, key: str, unit: float = 1.0) -> float | None:
    """A time in units of ``unit`` seconds; None if it is missing. Raises ValueError."""
    value = row[key]
    if value is None:
        return None
    if type(value) not in (int, float) or not abs(value) < _MOST_SECONDS:  # NaN is not
        raise ValueError(f"{key} {short(value)} is not a time: mend it, or leave it out of every request")
    return value * unit


def text(row: TraceRow, key: str) -> str:
    """A text. Raises ValueError."""
    value = row[key]
    if not isinstance(value, str):
        raise ValueError(f"{key} {short(value)} is not a text: mend or remove the request")
    return value


def short(value: Any) -> str:
    """A value from the file, cut for a message."""
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


class PageSize:
    """The page sizes with which every request so far has as many pages as the trace says.

    A partly filled last page has an id in some formats (Mooncake) and none in others (WEKA), or holds the first output
    token (Bailian). So ``n`` ids stand for ``n`` or ``n - 1`` full pages of the prompt.

    Args:
        by_user, by_file: the size that the user or the file gives.
        usual: the format's own size, taken if the lengths fit it and others.
    """

    def __init__(self, by_user: int | None, by_file: int | None = None, usual: int | None = None):
        self.given = by_user or by_file
        self.source = _OPTION if by_user else "the trace's block_size"
        self.usual = usual
        self.low, self.high = (self.given, self.given) if self.given else (1, MOST_TOKENS)

    def add(self, pages: int, tokens: int) -> None:
        """Drops the page sizes that do not fit this request. Raises ValueError when none is left."""
        low = max(self.low, tokens // (pages + 1) + 1)
        high = min(self.high, tokens // (pages - 1)) if pages > 1 else self.high
        if low <= high:
            self.low, self.high = low, high
            return
        if self.given:
            way_out = "leave it out to have it found" if self.source == _OPTION else "mend or remove the request"
            raise ValueError(
                f"{pages} page ids for {tokens} tokens, but at {self.source} {self.given} there would be "
                f"{-(-tokens // self.given)}: {way_out}"
            )
        raise ValueError(
            f"{pages} page ids for {tokens} tokens contradict the page size of the requests before it "
            f"({self._span()} tokens): mend or remove the request"
        )

    def choose(self, path: object) -> tuple[int, str]:
        """The page size and how it is known: given, the only one that fits, the format's own, or a power of two.

        Raises ValueError when several sizes are left.
        """
        if self.given:
            return self.given, f"given by {self.source}"
        if self.low == self.high:
            return self.low, "found: the only one that fits every length"
        if self.usual and self.low <= self.usual <= self.high:
            return self.usual, f"the format's own; the lengths would fit {self._span()} tokens"
        powers = [2**k for k in range(MOST_TOKENS.bit_length()) if self.low <= 2**k <= self.high]
        if len(powers) == 1:
            return powers[0], f"guessed: the only power of two among the {self._span()} tokens that the lengths fit"
        raise ValueError(
            f"the page size of {path} cannot be told from its lengths: {self._span()} tokens would fit them. Give it "
            f"with {_OPTION} (in a workload: load.prompts.page_size)"
        )

    def _span(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} or more" if self.high == MOST_TOKENS else f"{self.low} to {self.high}"


class Rows:
    """Collects requests, with the fields of ``Trace``. A session may have any key, a page any number or text as id."""

    def __init__(self, page_size: PageSize | None = None):
        self.page_size = page_size
        self.left_out: Counter[str] = Counter()
        self.places: list[str] = []  # of each request
        self._rows: list[tuple] = []
        self._numbers: dict[Any, int] = {}  # of page ids

    def __len__(self) -> int:
        return len(self._rows)

    def add(
        self,
        prompt_tokens: int = UNKNOWN,
        output_tokens: int = UNKNOWN,
        *,
        time_s: float | None = None,
        page_ids: Any = None,
        scope: int = 0,
        session: Any = None,
        think_s: float | None = None,
        prompt: Prompt | None = None,
        reply: str | None = None,
    ) -> None:
        """Adds a request. ``scope``: number of the file that its page ids belong to. Raises ValueError for bad ids."""
        ids = None
        if self.page_size is not None:
            if not isinstance(page_ids, list):
                raise ValueError(f"no list of page ids in hash_ids ({short(page_ids)}): mend or remove the request")
            for i in page_ids:
                if type(i) is not int and type(i) is not str:
                    raise ValueError(f"the page id {short(i)} is neither a whole number nor a text: mend it")
            self.page_size.add(len(page_ids), prompt_tokens)
            numbers = self._numbers
            ids = array("q", [numbers.setdefault((scope, i), len(numbers)) for i in page_ids])
        time = np.nan if time_s is None else time_s
        think = np.nan if think_s is None else think_s
        self._rows.append((prompt_tokens, output_tokens, time, ids, scope, session, think, prompt, reply))

    def trace(self, name: str, path: object, *, same_clock: bool = True) -> Trace:
        """All requests: in order of time (in a session: of the first turn), without any times in the file's order.

        ``same_clock``: False when times of different files cannot be compared. Raises ValueError when there are no
        requests, only some have a time, or no page size can be found.
        """
        if not self._rows:
            why = "; ".join(f"{count:,} {reason}" for reason, count in self.left_out.items())
            raise ValueError(f"{path} has no request to send{f': {why}' if why else ''}")
        size, size_from = None, ""
        if self.page_size is not None:
            if not self._numbers:
                raise ValueError(f"{path} has no request with a full page: there is nothing to share")
            size, size_from = self.page_size.choose(path)
        prompt_tokens, output_tokens, times, ids, scopes, keys, thinks, prompts, replies = zip(*self._rows, strict=True)
        begin = np.array(times)  # a turn without a time comes with the one before it
        last: dict[Any, float] = {}
        for i, key in enumerate(keys):
            if key is not None:
                begin[i] = last.get(key, np.nan) if np.isnan(begin[i]) else begin[i]
                last[key] = begin[i]
        order, arrival = np.arange(len(begin)), None
        timeless = np.isnan(begin)
        if timeless.any() and not timeless.all():
            raise ValueError(
                f"{path}, {self.places[int(timeless.argmax())]}: no time, though others have one: give it one, or "
                "remove it"
            )
        if not timeless.any():
            order = np.lexsort((begin,) if same_clock else (begin, scopes))
            arrival = np.array(times)[order] - begin[order[0]] if same_clock else None
        session, think = None, None
        if any(key is not None for key in keys):  # numbered as they begin; a request of none is one of its own
            numbers: dict[Any, int] = {}
            owners = [(0, i) if keys[i] is None else (1, keys[i]) for i in order]
            session = np.array([numbers.setdefault(owner, len(numbers)) for owner in owners], dtype=np.int64)
            think = np.array(thinks)[order]
        has_text = any(p is not None for p in prompts)
        return Trace(
            name,
            np.array(prompt_tokens, dtype=np.int64)[order],
            np.array(output_tokens, dtype=np.int64)[order],
            arrival_s=arrival,
            page_ids=tuple(ids[i] for i in order) if self.page_size else None,
            page_size=size,
            page_size_from=size_from,
            session=session,
            turn=None if session is None else count_turns(session),
            think_s=None if think is None or np.isnan(think).all() else np.nan_to_num(think),
            prompts=tuple(prompts[i] or () for i in order) if has_text else None,
            replies=tuple(replies[i] for i in order) if has_text else None,
            tick_s=None if arrival is None else find_tick(arrival),
            left_out=dict(self.left_out),
        )


def read_rows(
    name: str,
    sources: list[Source],
    add: Callable[[Rows, TraceRow, Any], object],
    page_size: PageSize | None = None,
    items: Callable[[Source], Iterable[tuple[str, TraceRow]]] = Source.rows,
    *,
    same_clock: bool = True,
) -> Trace:
    """The trace of several files. ``items``: gives the (place, row) pairs of a file.

    ``add(rows, row, (file's number, place))``: adds the requests of a row. Raises ValueError with the place.
    """
    rows = Rows(page_size)
    for number, source in enumerate(sources):
        for where, row in items(source):
            try:
                add(rows, row, (number, where))
                place = where if len(sources) == 1 else f"{where} of {source.path}"
                rows.places += [place] * (len(rows) - len(rows.places))
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace(name, and_more([source.path for source in sources], 1), same_clock=same_clock)
