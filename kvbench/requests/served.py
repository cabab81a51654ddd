"""When a server admitted, computed and ended each request of a load, from what the client measured. Pure functions.

An engine works in steps, and in a step each running request gets tokens once. So the chunks of all requests together
tell the steps apart, and all times here are numbers of steps, from 1: unlike the client's clock they do not depend on
which of two streams of one step is read first.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.requests.cache_simulation import Ids, ServedRequest
from kvbench.requests.request import RequestSpec, continued, conversations

if TYPE_CHECKING:
    import pandas as pd

Row = Mapping[str, Any]  # of requests.parquet
_SILENCE_S = 0.003  # the chunks of one step came 0.1 ms apart on 2 busy cores, and 99.9 % of them within 3 ms
COLUMNS = ("index", "ts", "first", "chunk_times", "cached_tokens", "output_tokens", "output_token_ids")


def served_requests(
    requests: Sequence[RequestSpec], rows: pd.DataFrame, step_tokens: int | None = None
) -> list[ServedRequest]:
    """The requests that got a token, in the order in which they were sent.

    Args:
        requests: as drawn, with token ids.
        rows: their ``COLUMNS`` of requests.parquet, of one repeat.
        step_tokens: how many tokens the engine computes in a step at most; None: not known, or a prompt is never split.
    """
    known = {int(row["index"]): row for row in rows.sort_values("ts").to_dict("records") if len(_chunks(row))}
    prompts = prompts_sent(requests, known)
    every = [row for index, row in known.items() if index in prompts]
    lengths = [len(prompts[int(row["index"])]) for row in every]
    steps = _steps([_chunks(row) for row in every], [row["ts"] for row in every])
    computed = [length - _count(row.get("cached_tokens")) for row, length in zip(every, lengths, strict=True)]
    prefills = _prefills(steps, [row["ts"] for row in every], computed, step_tokens)
    found = []
    for row, prefill, first, last in zip(every, prefills, steps.first, steps.last, strict=True):
        prompt, count = prompts[int(row["index"])], max(1, _count(row.get("output_tokens")))
        ended = last if last > first or count == 1 else first + 0.5  # all of it in one chunk
        there = itertools.accumulate(prefill.values(), initial=_count(row.get("cached_tokens")))
        chunks = tuple(zip(prefill, itertools.islice(there, 1, None), strict=True))[:-1]
        found.append(ServedRequest(prompt, min(prefill) - 1, first, ended, answer(row) or (), count, chunks))
    return found


def prompts_sent(requests: Sequence[RequestSpec], rows: Mapping[int, Row]) -> dict[int, Ids]:
    """Token ids of the prompts as they were sent, by index: later turns hold the server's own answers.

    ``rows``: of requests.parquet, by index; a turn after one without a row was not sent.
    """
    found: dict[int, Ids] = {}
    for turns in conversations(requests):
        before: RequestSpec | None = None
        for turn in turns:
            if turn.index not in rows:
                break
            ids = turn.prompt_token_ids or ()
            if before is not None and turn.new_tokens:
                ids = continued(turn, before, found[before.index], answer(rows[before.index]))
            found[turn.index] = ids
            before = turn
    return found


def answer(row: Row) -> Ids | None:
    """The token ids of a request's output; None where the server did not return all of them."""
    ids = row.get("output_token_ids")
    if ids is None or isinstance(ids, float) or not len(ids) or len(ids) != _count(row.get("output_tokens")):
        return None
    return tuple(np.asarray(ids).tolist())


def _count(value: Any) -> int:
    return 0 if value is None or math.isnan(value) else int(value)


def _chunks(row: Row) -> np.ndarray:
    """When chunks with tokens arrived [s]; empty where none did. float64 [chunks]"""
    times = row.get("chunk_times")
    if times is not None and not isinstance(times, float) and len(times):
        return np.asarray(times, dtype=float)
    first = row.get("first")
    return np.empty(0) if first is None or math.isnan(first) else np.array([first], dtype=float)


@dataclass(frozen=True)
class _Steps:
    """By number, from 1; 0 stands for the time before the load.

    ``began`` [s]: when a step had begun: the first token of the one before arrived. [steps + 1]

    ``decodes``: requests that got a token which is not their first. [steps + 1]
    ``first``, ``last``: the steps of each request's first and last token. [requests]
    """

    began: list[float]
    decodes: list[int]
    first: list[int]
    last: list[int]


def _steps(chunks: Sequence[np.ndarray], sent: Sequence[float]) -> _Steps:
    """Two chunks of one request are of two steps; so are a chunk and the first one of a request sent after it.

    Where other chunks arrived between the two, the steps are parted at the longest silence. A long silence always
    parts two steps: that of prompts only, or one whose requests all ended in it, has no chunks of the same requests
    around it.
    """
    times = np.concatenate([np.empty(0), *chunks])
    order = np.argsort(times, kind="stable")
    owners = np.repeat(np.arange(len(chunks)), [len(each) for each in chunks])[order].tolist()
    times, gaps = times[order].tolist(), np.diff(times[order], prepend=-math.inf).tolist()
    starts = [0]  # of each step: its first chunk
    latest = [-1] * len(chunks)  # chunk of each request
    for at, owner in enumerate(owners):
        before = latest[owner] if latest[owner] >= 0 else bisect_right(times, sent[owner], starts[-1], at) - 1
        if before >= starts[-1]:
            starts.append(max(range(before + 1, at + 1), key=gaps.__getitem__))
        elif at and gaps[at] >= _SILENCE_S:
            starts.append(at)
        latest[owner] = at
    step_of = np.repeat(np.arange(1, len(starts) + 1), np.diff([*starts, len(times)])).tolist()
    first, last = [0] * len(chunks), [0] * len(chunks)
    decodes = [0] * (len(starts) + 1)
    for step, owner in zip(step_of, owners, strict=True):
        decodes[step] += first[owner] > 0
        first[owner], last[owner] = first[owner] or step, step
    began = [-math.inf, -math.inf, *(times[start] for start in starts[:-1])]
    return _Steps(began[: len(starts) + 1], decodes, first, last)


def _prefills(
    steps: _Steps, sent: Sequence[float], tokens: Sequence[int], step_tokens: int | None
) -> list[dict[int, int]]:
    """How many tokens of each prompt each step computed, from that of its admission on. [requests]

    ``tokens``: how many of each prompt were computed. First come, first served: what the decodes leave of a step is
    spent on the prompts in order. The last part of a prompt is computed in the step of its first token. The prompt
    begins as early as that allows, but after the request was sent. It begins in the step that ran when it was sent only
    if it would otherwise not be done in time.
    """
    if step_tokens is None:
        return [{step: count} for step, count in zip(steps.first, tokens, strict=True)]
    left = [max(0, step_tokens - decodes) for decodes in steps.decodes]
    found: list[dict[int, int]] = [{}] * len(sent)
    latest = 1
    for request in sorted(range(len(sent)), key=lambda r: (steps.first[r], sent[r])):
        start = end = steps.first[request]
        need, before = tokens[request], 0  # before ``end``
        next_one = bisect_left(steps.began, sent[request])
        running = bisect_right(steps.began, sent[request]) - 1
        while start > max(latest, running):
            too_late = before + left[end] < need
            if not too_late and (start <= next_one or before + left[start - 1] >= need):
                break
            start -= 1
            before += left[start]
        while start < end and not left[start]:
            start += 1
        latest = start
        spent = found[request] = {}
        for step in range(start, end + 1):
            spent[step] = min(left[step], need)
            left[step] -= spent[step]
            need -= spent[step]
    return found
