"""The ``Trace`` that a file of any format is read into."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from kvbench.common.text import and_more

UNKNOWN = -1  # a number of tokens that the trace does not tell
MOST_TOKENS = 2**40  # of one prompt or output: anything above is a mistake and not a length

Prompt = tuple[str, ...] | array
"""A prompt as the trace has it: token ids, or texts, one for each message of a conversation."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival (ties, and traces without times: in the file's order).

    Attributes:
        format: the reader's name.
        prompt_tokens, output_tokens: int64 [requests]; ``UNKNOWN`` where the trace does not tell.
        arrival_s: float64 [requests], seconds after the first; NaN for a later turn of a session that says only how
            long after the turn before. None: the trace has no times.
        page_ids: one int64 array for each request: the pages of ``page_size`` tokens in its prompt, numbered from 0 in
            the file's order. The last page may be partly filled, and may then have no id.
        page_size_from: how the page size is known.
        session, turn: int64 [requests], from 0; requests of a session follow one another in order of their turns.
        think_s: float64 [requests], seconds between the end of the turn before and this request; None when the trace
            does not tell.
        prompts, replies: the texts, where the trace has them.
        tick_s: the clock's step where timestamps are so coarse that most requests share one.
        left_out: why rows of the file are not here, and how many.
    """

    format: str
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_s: np.ndarray | None = None
    page_ids: tuple[array, ...] | None = None
    page_size: int | None = None
    page_size_from: str = ""
    session: np.ndarray | None = None
    turn: np.ndarray | None = None
    think_s: np.ndarray | None = None
    prompts: tuple[Prompt, ...] | None = None
    replies: tuple[str | None, ...] | None = None
    tick_s: float | None = None
    left_out: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    @property
    def pages(self) -> np.ndarray:
        """Pages with an id of each request. int64 [requests]"""
        return np.array([len(ids) for ids in self.page_ids or ()], dtype=np.int64)

    def take(self, rows: np.ndarray) -> Trace:
        """The requests at ``rows`` (int64), in that order. A session's turns are counted anew from 0."""
        picked = {}
        for column in dataclasses.fields(self):
            values = getattr(self, column.name)
            if isinstance(values, np.ndarray):
                picked[column.name] = values[rows]
            elif isinstance(values, tuple):
                picked[column.name] = tuple(values[i] for i in rows)
        if self.session is not None:
            picked["turn"] = count_turns(picked["session"])
        return dataclasses.replace(self, **picked)


def count_turns(session: np.ndarray) -> np.ndarray:
    """The number of requests of its session before each request. int64 [requests]"""
    import pandas as pd

    return pd.Series(session).groupby(session).cumcount().to_numpy(dtype=np.int64)


def file_names(paths: Sequence[str | Path]) -> str:
    """The first file's name, and how many more there are."""
    return and_more([Path(path).name for path in paths], 1)


def select(
    trace: Trace,
    *,
    start_s: float = 0.0,
    duration_s: float | None = None,
    rate_scale: float = 1.0,
    max_requests: int | None = None,
) -> Trace:
    """The requests of [start_s, start_s + duration_s), re-based to 0 and played ``rate_scale`` times as fast.

    ``start_s`` and ``duration_s`` count from the trace's first request, before ``rate_scale``; a turn without a time
    goes with the turn before it. Think times are scaled too. ValueError when nothing is left, or for a window of a
    trace that has no times.
    """
    if trace.arrival_s is None:
        if start_s or duration_s is not None:
            raise ValueError(
                "the trace has no arrival times, so start_s and duration_s have no meaning; use max_requests."
            )
        part = trace.take(np.arange(len(trace))[:max_requests])
    else:
        end = np.inf if duration_s is None else start_s + duration_s
        times = known_times(trace)
        keep = np.flatnonzero((times >= start_s) & (times < end))[:max_requests]
        if not keep.size:
            raise ValueError(
                f"no request of the trace lies in [{start_s}, {end}) s after its first; it spans 0 to "
                f"{times.max():.1f} s, so choose start_s and duration_s inside that."
            )
        part = trace.take(keep)
        part = dataclasses.replace(part, arrival_s=part.arrival_s - times[keep[0]])
    scaled = {name: getattr(part, name) for name in ("arrival_s", "think_s", "tick_s")}
    return dataclasses.replace(part, **{name: v / rate_scale for name, v in scaled.items() if v is not None})


def known_times(trace: Trace) -> np.ndarray:
    """Returns ``arrival_s``; a turn without a time gets that of the turn before it. float64 [requests]"""
    import pandas as pd

    assert trace.arrival_s is not None
    if trace.session is None:
        return trace.arrival_s
    return pd.Series(trace.arrival_s).groupby(trace.session).ffill().fillna(0.0).to_numpy()


def find_tick(arrival_s: np.ndarray) -> float | None:
    """The clock's step [s] if most requests share a time and the times lie on a grid; None otherwise.

    Some clocks round each tick (Mooncake's 3 s are 2.999, 3 and 3.001 s apart), so gaps may be 1 % off.
    """
    times = np.unique(arrival_s[~np.isnan(arrival_s)])
    if len(times) < 3 or len(times) > len(arrival_s) / 2:
        return None
    gaps = np.diff(times)
    tick = float(np.median(gaps))
    multiples = gaps / tick
    off = np.abs(multiples - np.round(multiples))
    return round(tick, 3) if np.all(multiples > 0.5) and np.mean(off <= 0.01) >= 0.95 else None
