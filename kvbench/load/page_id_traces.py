"""Traces that say which pages of a prompt are the same as another prompt's: page ids and lengths, no contents.

JSONL, one request a line: ``hash_ids`` and ``input_length``, and ``timestamp`` where there is one (Mooncake, Qin et
al., FAST 2025; Qwen/Bailian; AIPerf's mooncake_trace and vLLM's timed_trace with hash_ids). JSON, one session a file:
``block_size`` and ``requests`` with ``t``, ``in`` and ``hash_ids``, sub-agents nested (WEKA's kv-cache-tester).
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

SOURCES = (
    "Traces with page ids (hash_ids) are Mooncake's (github.com/kvcache-ai/Mooncake, FAST25-release/traces), "
    "Qwen/Bailian's (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) and the agent sessions of "
    "github.com/callanjfox/kv-cache-tester; give one of them"
)
_MOST_TOKENS = 2**40  # of one prompt: anything above is a mistake and not a length


@dataclass(frozen=True)
class PageIdTrace:
    """Requests in order of arrival (the file's order where not every request has a timestamp; ties as in the file).

    ``page_ids``: one array of int64 a request, the trace's own ids (numbers or texts) numbered from 0 as they come
    in the file. ``prompt_tokens`` [requests] int64; a request's last page may be partly filled.
    """

    kind: str  # "jsonl" | "session"
    page_size: int  # tokens
    page_ids: tuple[array, ...]
    prompt_tokens: np.ndarray

    def __len__(self) -> int:
        return len(self.page_ids)

    @property
    def pages(self) -> np.ndarray:
        """Pages of each request. int64 [requests]"""
        return np.array([len(ids) for ids in self.page_ids], dtype=np.int64)


def read_page_ids(path: str | Path, page_size: int | None = None) -> PageIdTrace:
    """Reads a trace with page ids. ``page_size`` in tokens; None: the one that fits every request's length.

    Raises:
        ValueError: a file that is missing, unreadable or without page ids, a bad line (with its number), or lengths
            that no page size, or more than one, can explain.
    """
    path = Path(path)
    try:
        kind, rows, told = _open(path)
        fit = _PageSize(page_size, told)
        return _collect(path, kind, rows, fit)
    except OSError as error:
        raise ValueError(f"the trace {path} cannot be read ({error.strerror or error}): check the path") from None
    except RecursionError:
        raise ValueError(f"the trace {path} nests its sub-agents too deeply: flatten them") from None


def _collect(path: Path, kind: str, rows: Iterator[tuple[str, dict[str, Any]]], fit: _PageSize) -> PageIdTrace:
    numbers: dict[int | str, int] = {}
    times: list[float | None] = []
    page_ids: list[array] = []
    tokens: list[int] = []
    for where, row in rows:
        try:
            ids, length, time = _request(row, kind)
            fit.add(len(ids), length)
        except ValueError as error:
            raise ValueError(f"{path}, {where}: {error}") from None
        page_ids.append(array("q", [numbers.setdefault(i, len(numbers)) for i in ids]))
        tokens.append(length)
        times.append(time)
    if not numbers:
        raise ValueError(f"{path} has no request with a full page: there is nothing to share. {SOURCES}")
    order = range(len(times))
    if None not in times:
        order = sorted(order, key=times.__getitem__)
    return PageIdTrace(
        kind,
        fit.choose(path),
        tuple(page_ids[i] for i in order),
        np.array([tokens[i] for i in order], dtype=np.int64),
    )


class _PageSize:
    """The page sizes under which every request so far has as many pages as the trace says.

    Traces differ in whether the last page has an id when it is partly filled (Mooncake: yes, WEKA: no), or holds the
    first output token (Bailian). So ``n`` ids stand for ``n`` or ``n - 1`` full pages of the prompt.
    """

    def __init__(self, asked: int | None, told: int | None):
        self.given = asked or told
        self.source = "--page-size" if asked else "the trace's block_size"
        self.low, self.high = (self.given, self.given) if self.given else (1, _MOST_TOKENS)

    def add(self, pages: int, tokens: int) -> None:
        """Narrow down. Raises ValueError when nothing is left."""
        low = max(self.low, tokens // (pages + 1) + 1)
        high = min(self.high, tokens // (pages - 1)) if pages > 1 else self.high
        if low <= high:
            self.low, self.high = low, high
            return
        if self.given:
            wanted = -(-tokens // self.given)
            way_out = "leave it out to have it found" if self.source == "--page-size" else "mend or remove the request"
            raise ValueError(
                f"{pages} page ids for {tokens} tokens, but at {self.source} {self.given} there would be {wanted}: "
                + way_out
            )
        raise ValueError(
            f"{pages} page ids for {tokens} tokens, which fits no page size that fits the requests before it "
            f"({self._span()} tokens): mend or remove the request"
        )

    def choose(self, path: Path) -> int:
        """The page size. A range is settled by its only power of two. Raises ValueError when that is not one."""
        powers = [2**k for k in range(_MOST_TOKENS.bit_length()) if self.low <= 2**k <= self.high]
        found = [self.low] if self.low == self.high else powers
        if len(found) == 1:
            return found[0]
        raise ValueError(
            f"the page size of {path} cannot be told from its lengths, which {self._span()} tokens would fit: give it "
            "with --page-size"
        )

    def _span(self) -> str:
        if self.low == self.high:
            return str(self.low)
        return f"{self.low} or more" if self.high == _MOST_TOKENS else f"{self.low} to {self.high}"


def _request(row: dict[str, Any], kind: str) -> tuple[list[int | str], int, float | None]:
    """Page ids, prompt tokens and time of one request. Raises ValueError."""
    length_key, time_key = ("in", "t") if kind == "session" else ("input_length", "timestamp")
    ids, length, time = row.get("hash_ids"), row.get(length_key), row.get(time_key)
    if not isinstance(ids, list):
        raise ValueError(f"no list of page ids in hash_ids ({_short(ids)}): mend or remove the request")
    for i in ids:
        if type(i) is not int and type(i) is not str:
            raise ValueError(f"the page id {_short(i)} is neither a whole number nor a text: mend it")
    if type(length) is not int or not 0 <= length < _MOST_TOKENS:
        raise ValueError(f"{length_key} {_short(length)} is not a number of tokens: mend or remove the request")
    if time is not None and not (type(time) in (int, float) and _finite(time)):
        raise ValueError(f"{time_key} {_short(time)} is not a time: mend it, or leave it out of every request")
    return ids, length, time


def _open(path: Path) -> tuple[str, Iterator[tuple[str, dict[str, Any]]], int | None]:
    """Kind of the trace, its requests each with its place in the file, and the page size that the file states."""
    if not path.exists():
        raise ValueError(f"the trace {path} does not exist: check the path. {SOURCES}")
    lines = _lines(path)
    number, first = next(lines, (0, ""))
    if not first:
        raise ValueError(f"{path} is empty: it has no requests. {SOURCES}")
    row = _parse(first)
    if isinstance(row, dict) and "hash_ids" in row:
        return "jsonl", _jsonl(path), None
    if isinstance(row, dict) and "requests" not in row:
        raise ValueError(
            f"{path} has no page ids: its first request (line {number}) has {', '.join(map(_short, row)) or 'no keys'} "
            f"and no hash_ids, so nobody knows which prompts begin alike. {SOURCES}"
        )
    if isinstance(row, dict) and (second := next(lines, None)):
        raise ValueError(
            f"{path}, line {second[0]}: more after the first session; page ids are local to a session and sessions "
            "share no clock, so give each one a file of its own"
        )
    whole = row if isinstance(row, dict) else _parse(path.read_bytes().decode("utf-8-sig", "replace"))
    if isinstance(whole, dict) and isinstance(whole.get("requests"), list):
        size = whole.get("block_size")
        if size is not None and (type(size) is not int or not 0 < size <= _MOST_TOKENS):
            raise ValueError(f"{path}: block_size {_short(size)} is not a number of tokens: mend it")
        return "session", _session(path, whole["requests"], "requests", 0.0), size
    if row is None and whole is None and first.startswith("{"):
        raise ValueError(f"{path}, line {number}: not JSON ({_short(first)}): mend or remove the line")
    raise ValueError(
        f"{path} has no page ids that can be read: it is neither JSONL with hash_ids in each line nor a JSON session "
        f"with requests (tables of lengths, such as Azure's, and texts do not say which prompts begin alike). {SOURCES}"
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, numbered from 1, in memory one at a time."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            if text := raw.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip():
                yield number, text


def _jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, text in _lines(path):
        row = _parse(text)
        if not isinstance(row, dict):
            raise ValueError(f"{path}, line {number}: not a JSON object ({_short(text)}): mend or remove the line")
        yield f"line {number}", row


def _session(path: Path, rows: list[Any], where: str, start: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """Requests of a session; a sub-agent's count their time from when it was called."""
    for index, row in enumerate(rows):
        place = f"{where}[{index}]"
        if not isinstance(row, dict):
            raise ValueError(f"{path}, {place}: {_short(row)} is not a request: mend or remove it")
        time = row.get("t")
        if type(time) not in (int, float) or not _finite(time):
            raise ValueError(f"{path}, {place}: t {_short(time)} is not a time in seconds: mend it")
        if row.get("type") == "subagent":
            inner = row.get("requests")
            if not isinstance(inner, list):
                raise ValueError(f"{path}, {place}: a sub-agent without a list of requests: mend or remove it")
            yield from _session(path, inner, f"{place}.requests", start + time)
        else:
            yield place, {**row, "t": start + time}


def _parse(text: str) -> Any:
    """The JSON value; None where it is not JSON (too deep, or a number of too many digits, included)."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond what a float holds
        return False


def _short(value: Any) -> str:
    """A value from the file in a sentence, cut."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
