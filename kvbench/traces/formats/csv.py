"""CSV files of times and lengths: Azure, BurstGPT, vidur, GuideLLM.

- azure: ``TIMESTAMP,ContextTokens,GeneratedTokens`` (2023 and 2024; Patel et al., "Splitwise", ISCA 2024). Timestamps
  have seven decimals and sometimes "+00:00"; the last line may lack its newline.
- burstgpt: ``Timestamp`` [s], ``Request tokens, Response tokens``, and from version 3 ``Session ID`` (none for calls of
  the API) and ``Elapsed time`` [s] (where it is empty, the next turn comes without a think time), read by name.
  ``Response tokens`` 0 is a request that failed: left out.
- vidur: ``num_prefill_tokens,num_decode_tokens`` and, in some, ``arrived_at`` [s].
- guidellm: ``timestamp`` [s], ``input_length,output_length``.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvbench.traces.model import Trace, find_tick
from kvbench.traces.source import Source

AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
BURSTGPT = ("Timestamp", "Request tokens", "Response tokens")
VIDUR = ("num_prefill_tokens", "num_decode_tokens")
GUIDELLM = ("timestamp", "input_length", "output_length")
_FAILED = "failed requests (Response tokens 0)"


def has(source: Source, names: tuple[str, ...]) -> bool:
    """Whether it is a CSV file with these columns."""
    return source.container == "csv" and set(names) <= set(source.columns)


def read_azure(source: Source) -> Trace:
    """Raises ValueError."""
    table = source.table(AZURE)
    times = pd.to_datetime(table["TIMESTAMP"], utc=True, format="ISO8601", errors="coerce")
    if times.isna().any():
        row = int(np.flatnonzero(times.isna())[0])
        raise source.error(source.line(row + 1), f"TIMESTAMP {table['TIMESTAMP'].iloc[row]!r} is not a time: mend it")
    stamps = times.dt.tz_convert(None).to_numpy().astype("datetime64[ns]").astype(np.int64)
    seconds = (stamps - stamps.min()) / 1e9
    return _trace("azure", seconds, *(source.numbers(table, name) for name in AZURE[1:]))


def read_vidur(source: Source) -> Trace:
    """Raises ValueError."""
    timed = "arrived_at" in source.columns
    table = source.table((*VIDUR, "arrived_at") if timed else VIDUR)
    times = source.numbers(table, "arrived_at", whole=False) if timed else None
    return _trace("vidur", times, *(source.numbers(table, name) for name in VIDUR))


def read_guidellm_table(source: Source) -> Trace:
    """Raises ValueError."""
    table = source.table(GUIDELLM)
    times = source.numbers(table, GUIDELLM[0], whole=False)
    return _trace("guidellm", times, *(source.numbers(table, name) for name in GUIDELLM[1:]))


def read_burstgpt(source: Source) -> Trace:
    """Raises ValueError."""
    extra = tuple(name for name in ("Session ID", "Elapsed time") if name in source.columns)
    table = source.table((*BURSTGPT, *extra))
    times = source.numbers(table, "Timestamp", whole=False)
    prompt, output = (source.numbers(table, name) for name in BURSTGPT[1:])
    answered = output > 0
    if not answered.any():
        raise ValueError(f"{source.path} has no request to send: {len(output):,} {_FAILED}")
    elapsed = source.numbers(table, "Elapsed time", whole=False, empty=True) if "Elapsed time" in extra else None
    keys = table["Session ID"].str.strip().to_numpy() if "Session ID" in extra else None
    return _trace(
        "burstgpt",
        times[answered],
        prompt[answered],
        output[answered],
        sessions=None if keys is None else keys[answered],
        elapsed=None if elapsed is None else elapsed[answered],
        left_out={_FAILED: int((~answered).sum())} if not answered.all() else {},
    )


def _trace(
    name: str,
    times: np.ndarray | None,
    prompt: np.ndarray,
    output: np.ndarray,
    *,
    sessions: np.ndarray | None = None,
    elapsed: np.ndarray | None = None,
    left_out: dict[str, int] | None = None,
) -> Trace:
    order = np.arange(len(prompt)) if times is None else np.argsort(times, kind="stable")
    arrival = None if times is None else times[order] - times[order[0]]
    session = turn = think = None
    if sessions is not None and (sessions != "").any():
        keys = pd.Series(np.where(sessions == "", [f"\0{i}" for i in range(len(sessions))], sessions)[order])
        session = pd.factorize(keys)[0].astype(np.int64)
        turn = keys.groupby(session).cumcount().to_numpy(dtype=np.int64)
        if elapsed is not None and arrival is not None:
            ends = pd.Series(arrival + elapsed[order]).groupby(session).shift(1)
            think = np.maximum(0.0, np.nan_to_num(arrival - ends.to_numpy()))
    return Trace(
        name,
        prompt[order],
        output[order],
        arrival_s=arrival,
        session=session,
        turn=turn,
        think_s=think,
        tick_s=None if arrival is None else find_tick(arrival),
        left_out=left_out or {},
    )
