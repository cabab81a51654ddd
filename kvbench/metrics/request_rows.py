"""What the rows of requests.parquet say of each request: latencies, gaps, chunks. Pure functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MS = 1000.0
SESSION_BROKEN = "session_broken"  # the error kind of a turn that was not sent because an earlier one failed


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Per-request ttft_ms, ttft_send_ms, tpot_ms, e2el_ms [ms] of the rows given (NaN: undefined)."""
    import pandas as pd

    begin = np.array([t[0] if len(t) else np.nan for t in map(times_of, requests["chunk_times"])], dtype=float)
    last = requests["last"].to_numpy(dtype=float)
    tokens = requests["output_tokens"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (last - begin) / (tokens - 1), np.nan)
    first, t0 = requests["first"].to_numpy(dtype=float), requests["t0"].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "ttft_ms": (first - t0) * MS,
            "ttft_send_ms": (first - requests["ts"].to_numpy(dtype=float)) * MS,
            "tpot_ms": tpot * MS,
            "e2el_ms": (last - t0) * MS,
        },
        index=requests.index,
    )


def inter_token_latencies(requests: pd.DataFrame) -> np.ndarray:
    """All gaps [ms] between token-carrying chunks of the rows given, pooled. [gaps] float64"""
    gaps = [np.diff(t) for t in map(times_of, requests["chunk_times"]) if len(t) > 1]
    return np.concatenate(gaps) * MS if gaps else np.empty(0)


def chunk_weights(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Arrival time [s] and tokens of every chunk: ``([chunks], [chunks])`` float64.

    Known counts are used (``chunk_tokens``); otherwise a request's output tokens are shared out evenly over
    its chunks, so that a chunk of several tokens is neither one token nor lost.
    """
    times, weights = [], []
    known = requests["chunk_tokens"] if "chunk_tokens" in requests else [None] * len(requests)
    for row_times, row_tokens, total in zip(requests["chunk_times"], known, requests["output_tokens"], strict=True):
        t = times_of(row_times)
        if not len(t):
            continue
        times.append(t)
        if row_tokens is not None and len(row_tokens) == len(t):
            weights.append(np.asarray(row_tokens, dtype=float))
        else:
            weights.append(np.full(len(t), float(total) / len(t)))
    if not times:
        return np.empty(0), np.empty(0)
    return np.concatenate(times), np.concatenate(weights)


def multi_token_chunks(requests: pd.DataFrame) -> int:
    """Chunks that carried more than one token; where counts are unknown, tokens beyond one a chunk."""
    count = 0
    known = requests["chunk_tokens"] if "chunk_tokens" in requests else [None] * len(requests)
    for times, tokens, total in zip(requests["chunk_times"], known, requests["output_tokens"], strict=True):
        if tokens is not None and len(tokens) == len(times_of(times)):
            count += int((np.asarray(tokens) > 1).sum())
        else:
            count += max(0, int(total) - len(times_of(times)))
    return count


def longest_gaps(requests: pd.DataFrame) -> np.ndarray:
    """Longest gap [ms] between token-carrying chunks of each row (NaN: it has no two). float64 [requests]"""
    gaps = [np.diff(t).max() if len(t) > 1 else np.nan for t in map(times_of, requests["chunk_times"])]
    return np.asarray(gaps, dtype=float) * MS


def sessions_of(requests: pd.DataFrame) -> np.ndarray | None:
    """The session of each row (NaN: of none); None when there are no sessions. float64 [requests]"""
    if "session" not in requests or not requests["session"].notna().any():
        return None
    return requests["session"].to_numpy(dtype=float)


def unsent(requests: pd.DataFrame) -> pd.Series:
    """Which rows are turns that were never sent, as one before them failed. bool [requests]"""
    return requests["error_kind"] == SESSION_BROKEN


def successful(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["ok"].astype(bool)]


def ends_of(requests: pd.DataFrame) -> np.ndarray:
    """When each request left the server's hands [s]: its end, or its last chunk where no end is stored."""
    last = requests["last"].to_numpy(dtype=float)
    if "end" not in requests:
        return last
    end = requests["end"].to_numpy(dtype=float)
    return np.where(np.isfinite(end), end, last)


def times_of(value: Any) -> np.ndarray:
    return np.empty(0) if value is None else np.asarray(value, dtype=float)
