"""Sessions of agents with page ids, one a file: WEKA's kv-cache-tester.

``block_size``, ``requests`` with ``t`` [s from the session's start], ``in, out, hash_ids`` (full pages only) and
``think_time`` [s]; sub-agents nested, their ``t`` counted from when they were called. Page ids are local to the file.
A sub-agent's requests are a session of their own: it works beside the one that called it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.traces.model import MOST_TOKENS, UNKNOWN, Trace
from kvbench.traces.rows import PageSize, Rows, Source, TraceFormat, TraceRow, read_rows, seconds, short, tokens


def _read(sources: list[Source], page_size: int | None) -> Trace:
    """Several files share no clock: their sessions come one after another, without times. Raises ValueError."""
    for source in sources:
        size = source.first["block_size"]
        if size is not None and (type(size) is not int or not 0 < size <= MOST_TOKENS):
            raise ValueError(f"{source.path}: block_size {short(size)} is not a number of tokens: mend it")
    sizes = {source.first["block_size"] for source in sources}
    if len(sizes) > 1:
        different = ", ".join(map(str, sorted(sizes, key=str)))
        raise ValueError(f"the sessions' block sizes differ ({different}): give one kind")

    def items(source: Source) -> Iterator[tuple[str, TraceRow]]:
        return _requests(source, source.first["requests"], "requests", 0.0, "")

    return read_rows("weka", sources, _add, PageSize(page_size, sizes.pop()), items, same_clock=len(sources) == 1)


def _add(rows: Rows, row: TraceRow, where: tuple[int, str]) -> None:
    rows.add(
        tokens(row, "in"),
        tokens(row, "out", UNKNOWN),
        time_s=row["t"],
        page_ids=row["hash_ids"],
        scope=where[0],
        session=(where[0], row["agent"]),
        think_s=seconds(row, "think_time"),
    )


def _requests(
    source: Source, requests: list[Any], where: str, start: float, agent: str
) -> Iterator[tuple[str, TraceRow]]:
    """The requests of an agent and of those it called, with ``t`` from the session's start and their ``agent``."""
    for index, row in enumerate(requests):
        place = f"{where}[{index}]"
        if not isinstance(row, dict):
            raise source.error(place, f"{short(row)} is not a request: mend or remove it")
        try:
            time = seconds(row, "t")
        except ValueError:
            time = None
        if time is None:
            raise source.error(place, f"t {short(row['t'])} is not a time in seconds: mend it")
        if row["type"] != "subagent":
            yield place, TraceRow(row, t=start + time, agent=agent)
        elif isinstance(row["requests"], list):
            yield from _requests(source, row["requests"], f"{place}.requests", start + time, place)
        else:
            raise source.error(place, "a sub-agent without a list of requests: mend or remove it")


FORMATS = (
    TraceFormat(
        "weka",
        "JSON, a session a file: block_size, requests",
        lambda source: source.container == "object" and isinstance(source.first["requests"], list),
        _read,
    ),
)
