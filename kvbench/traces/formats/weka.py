"""Sessions of agents with page ids, one a file: WEKA's kv-cache-tester.

``block_size``, ``requests`` with ``t`` [s from the session's start], ``in, out, hash_ids`` (full pages only) and
``think_time`` [s]; sub-agents nested, their ``t`` counted from when they were called. Page ids are local to the file.
A sub-agent's requests are a session of their own: it works beside the one that called it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvbench.traces.model import MOST_TOKENS, UNKNOWN, Trace
from kvbench.traces.page_size import PageSize
from kvbench.traces.rows import Rows
from kvbench.traces.source import Row, Source, seconds, short, tokens

_Place = tuple[str, Row, float, str]  # where, the request, when, which (sub-)agent


def is_weka(source: Source) -> bool:
    return source.container == "object" and isinstance(source.first.get("requests"), list)


def read_weka(sources: list[Source], page_size: int | None) -> Trace:
    """Sessions of several files share no clock: they come one after another, without times. Raises ValueError."""
    told = {_block_size(source) for source in sources}
    if len(told) > 1:
        raise ValueError(
            f"the sessions' block sizes differ ({', '.join(map(str, sorted(told, key=str)))}): give one kind"
        )
    rows = Rows(PageSize(page_size, told.pop()))
    for number, source in enumerate(sources):
        for where, row, time, agent in _requests(source, source.first["requests"], "requests", 0.0, ""):
            try:
                rows.add(
                    tokens(row, "in"),
                    tokens(row, "out", UNKNOWN),
                    time_s=time,
                    page_ids=row.get("hash_ids"),
                    scope=number,
                    session=(number, agent),
                    think_s=seconds(row, "think_time"),
                )
            except ValueError as error:
                raise source.error(where, error) from None
    return rows.trace("weka", sources[0].path, same_clock=len(sources) == 1)


def _block_size(source: Source) -> int | None:
    size = source.first.get("block_size")
    if size is not None and (type(size) is not int or not 0 < size <= MOST_TOKENS):
        raise ValueError(f"{source.path}: block_size {short(size)} is not a number of tokens: mend it")
    return size


def _requests(source: Source, requests: list[Any], where: str, start: float, agent: str) -> Iterator[_Place]:
    for index, row in enumerate(requests):
        place = f"{where}[{index}]"
        if not isinstance(row, dict):
            raise source.error(place, f"{short(row)} is not a request: mend or remove it")
        try:
            time = seconds(row, "t")
        except ValueError:
            time = None
        if time is None:
            raise source.error(place, f"t {short(row.get('t'))} is not a time in seconds: mend it")
        if row.get("type") != "subagent":
            yield place, row, start + time, agent
        elif isinstance(row.get("requests"), list):
            yield from _requests(source, row["requests"], f"{place}.requests", start + time, place)
        else:
            raise source.error(place, "a sub-agent without a list of requests: mend or remove it")
