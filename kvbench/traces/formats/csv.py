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

from collections.abc import Callable
from functools import partial

import numpy as np
import pandas as pd

from kvbench.traces.model import Trace, count_turns, find_tick
from kvbench.traces.rows import Source, TraceFormat

_COLUMNS = {  # time, prompt and output
    "azure": ("TIMESTAMP", "ContextTokens", "GeneratedTokens"),
    "burstgpt": ("Timestamp", "Request tokens", "Response tokens"),
    "vidur": ("arrived_at", "num_prefill_tokens", "num_decode_tokens"),
    "guidellm": ("timestamp", "input_length", "output_length"),
}
_FAILED = "failed requests (Response tokens 0)"


def fits(name: str) -> Callable[[Source], bool]:
    """Tests whether a file is a CSV file with the columns of the format; vidur's may lack the time."""
    columns = set(_COLUMNS[name][name == "vidur" :])
    return lambda source: source.container == "csv" and columns <= set(source.columns)


def read(name: str, sources: list[Source], page_size: int | None) -> Trace:
    """Reads one file of the format ``name``. Raises ValueError."""
    if len(sources) > 1:
        raise ValueError(f"{len(sources)} files are given, and this format is read one file at a time: give one")
    source = sources[0]
    time, *lengths = _COLUMNS[name]
    timed = name != "vidur" or time in source.columns
    extra = [key for key in ("Session ID", "Elapsed time") if name == "burstgpt" and key in source.columns]
    table = source.table((*([time] if timed else []), *lengths, *extra))
    prompt, output = (source.numbers(table, column) for column in lengths)
    seconds = elapsed = sessions = None
    if name == "azure":
        seconds = _seconds(source, table, time)
    elif timed:
        seconds = source.numbers(table, time, whole=False)
    if "Session ID" in extra:
        sessions = table["Session ID"].str.strip().to_numpy()
    if "Elapsed time" in extra:
        elapsed = source.numbers(table, "Elapsed time", whole=False, empty=True)
    order = np.arange(len(prompt)) if seconds is None else np.argsort(seconds, kind="stable")
    left_out = {}
    if name == "burstgpt" and (failed := int((output == 0).sum())):
        if failed == len(output):
            raise ValueError(f"{source.path} has no request to send: {failed:,} {_FAILED}")
        order = order[output[order] > 0]
        left_out = {_FAILED: failed}
    arrival = None if seconds is None else seconds[order] - seconds[order[0]]
    session = turn = think = None
    if sessions is not None and (sessions[order] != "").any():
        keys = pd.Series(np.where(sessions == "", [f"\0{i}" for i in range(len(sessions))], sessions)[order])
        session = pd.factorize(keys)[0].astype(np.int64)
        turn = count_turns(session)
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
        left_out=left_out,
    )


def _seconds(source: Source, table: pd.DataFrame, column: str) -> np.ndarray:
    """Azure's timestamps after the first one. float64 [requests]"""
    times = pd.to_datetime(table[column], utc=True, format="ISO8601", errors="coerce")
    if times.isna().any():
        row = int(np.flatnonzero(times.isna())[0])
        raise source.row_error(row + 1, f"{column} {table[column].iloc[row]!r} is not a time: mend it")
    stamps = times.dt.tz_convert(None).to_numpy().astype("datetime64[ns]").astype(np.int64)
    return (stamps - stamps.min()) / 1e9


FORMATS = tuple(
    TraceFormat(name, "CSV: " + ", ".join(_COLUMNS[name][name == "vidur" :]), fits(name), partial(read, name))
    for name in ("azure", "burstgpt", "vidur")
)
