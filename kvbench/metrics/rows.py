"""The columns of requests.parquet as arrays, and the latencies of each row. Pure functions.

Times are in seconds since the load's start, latencies in ms; NaN: undefined. A request with n > 1 or beams returns
several sequences, whose chunks share one stream. A gap between two chunks is one only within a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

MS = 1000.0
Choices = Sequence[int] | np.ndarray | None
"""Which sequence each chunk of a request belongs to; None: the request has one sequence."""


def by_sequence(values: Sequence[float] | np.ndarray, choices: Choices) -> list[np.ndarray]:
    """Splits ``values`` of a request's chunks [chunks] by sequence, in order of their numbers."""
    values = np.asarray(values, dtype=float)
    if choices is None:
        return [values]
    choices = np.asarray(choices)
    return [values[choices == choice] for choice in np.unique(choices)]


def sequence_tpots(
    times: Sequence[float] | np.ndarray, choices: Choices, tokens: Sequence[int] | np.ndarray | None, total: float
) -> np.ndarray:
    """Computes `(last - first chunk) / (tokens - 1)` of each sequence. float64 [sequences]

    NaN for one token, or all tokens in one chunk.

    tokens: of each chunk; None where that is not known: the request's ``total`` is then shared out evenly over them
    """
    if choices is None:
        has_tpot = len(times) > 1 and total > 1
        return np.array([(times[-1] - times[0]) / (total - 1) if has_tpot else np.nan])
    if tokens is None:
        tokens = np.full(len(times), total / max(len(times), 1))
    further = np.array([own.sum() - 1 for own in by_sequence(tokens, choices)])
    spans = np.array([own[-1] - own[0] if len(own) > 1 else np.nan for own in by_sequence(times, choices)])
    return np.divide(spans, further, out=np.full(len(spans), np.nan), where=further > 0)


def gaps_within(times: Sequence[float] | np.ndarray, choices: Choices) -> np.ndarray:
    """The gaps between neighbouring chunks of the same sequence, all sequences together. float64 [gaps]"""
    if choices is None:
        times = np.asarray(times, dtype=float)
        return times[1:] - times[:-1]
    return np.concatenate([np.empty(0), *map(np.diff, by_sequence(times, choices))])


def chunk_times(requests: pd.DataFrame) -> list[np.ndarray]:
    """The arrivals of each request's chunks with tokens [s]. [requests] of float64 [chunks]"""
    return [np.empty(0) if t is None else np.asarray(t, dtype=float) for t in requests["chunk_times"]]


def chunk_tokens(requests: pd.DataFrame) -> list[np.ndarray | None]:
    """The tokens of each of these chunks; None where the server did not tell. [requests] of float64 [chunks]"""
    times = chunk_times(requests)
    stored_tokens = requests["chunk_tokens"] if "chunk_tokens" in requests else [None] * len(requests)
    return [
        np.asarray(tokens, dtype=float) if tokens is not None and len(tokens) == len(t) else None
        for tokens, t in zip(stored_tokens, times, strict=True)
    ]


def choices_of(value: Any) -> Choices:
    """The ``chunk_choices`` of a row; missing where rows of older files are beside it."""
    return None if value is None or np.ndim(value) == 0 else value


def chunk_choices(requests: pd.DataFrame) -> list[Choices]:
    """The sequence of each chunk; None for requests of one sequence. [requests]"""
    return [choices_of(value) for value in requests.get("chunk_choices", [None] * len(requests))]


def times_to_end(request: Mapping[str, Any]) -> np.ndarray:
    """The arrivals of the chunks of a row's sequence that ended last [s]. float64 [chunks of it]"""
    times = request["chunk_times"]
    own = by_sequence(() if times is None else times, choices_of(request.get("chunk_choices")))
    return max(own, key=lambda arrivals: arrivals[-1] if len(arrivals) else -np.inf)


def stored(requests: pd.DataFrame, name: str) -> np.ndarray:
    """A column of numbers; all NaN where an earlier version wrote the file without it. float64 [requests]"""
    return requests[name].to_numpy(dtype=float) if name in requests else np.full(len(requests), np.nan)


def streamed_tokens(requests: pd.DataFrame) -> np.ndarray:
    """The output tokens of each row that came in chunks. float64 [requests]"""
    return stored(requests, "output_tokens") - np.nan_to_num(stored(requests, "unstreamed_tokens"))


def streams_reasoning(requests: pd.DataFrame) -> np.ndarray:
    """Tests which rows have chunks of reasoning. Bool [requests]"""
    return ~np.isnan(stored(requests, "first_reasoning"))


def reasoning_tokens(requests: pd.DataFrame) -> np.ndarray:
    """The reasoning tokens of each row; NaN where not known, or 0 by the usage though some came. float64 [requests]"""
    tokens = stored(requests, "reasoning_tokens")
    return np.where(streams_reasoning(requests) & (tokens == 0), np.nan, tokens)


def reasoned(requests: pd.DataFrame) -> np.ndarray:
    """Tests which rows reasoned, streamed or hidden. Bool [requests]"""
    return streams_reasoning(requests) | (reasoning_tokens(requests) > 0)


def _tpots(requests: pd.DataFrame) -> list[np.ndarray]:
    """The time per output token [s] of each sequence of each request. [requests] of [sequences]"""
    choices = chunk_choices(requests)
    several = any(own is not None for own in choices)  # of one sequence the chunks' own tokens are not needed
    tokens = chunk_tokens(requests) if several else [None] * len(requests)
    columns = (chunk_times(requests), choices, tokens, streamed_tokens(requests))
    return [sequence_tpots(*row) for row in zip(*columns, strict=True)]


def from_start(requests: pd.DataFrame, column: str, since: str = "t0") -> np.ndarray:
    """The time [ms] of each row from one moment to another; NaN where it has one of them not. float64 [requests]"""
    return (stored(requests, column) - stored(requests, since)) * MS


def reasoning_times(requests: pd.DataFrame) -> np.ndarray:
    """First output - first chunk of reasoning [ms] of each row; NaN where no output came after it."""
    passed = from_start(requests, "first_output", "first_reasoning")
    return np.where(passed >= 0, passed, np.nan)


def slowest_tpots(requests: pd.DataFrame) -> np.ndarray:
    """The time per output token [ms] of each row's slowest sequence. float64 [requests]"""
    return np.array([np.fmax.reduce(own) for own in _tpots(requests)], dtype=float) * MS


def longest_gaps(requests: pd.DataFrame) -> np.ndarray:
    """The longest gap [ms] between chunks of each row; NaN where it has none. float64 [requests]"""
    return np.array([gaps.max() if len(gaps) else np.nan for gaps in request_gaps(requests)], dtype=float) * MS


def times_per_output_token(requests: pd.DataFrame) -> np.ndarray:
    """The tpot [ms] of every sequence that has one, over all rows. float64 [sequences]"""
    tpots = np.concatenate([np.empty(0), *_tpots(requests)])
    return tpots[~np.isnan(tpots)] * MS


def sequence_ttfts(requests: pd.DataFrame) -> np.ndarray:
    """The time from t0 to the first chunk of each sequence [ms], of rows with several. float64 [sequences]"""
    rows = zip(chunk_times(requests), chunk_choices(requests), requests["t0"], strict=True)
    firsts = [own[0] - t0 for times, choices, t0 in rows if choices is not None for own in by_sequence(times, choices)]
    return np.array(firsts, dtype=float) * MS


def request_gaps(requests: pd.DataFrame) -> list[np.ndarray]:
    """The gaps [s] between chunks with tokens of each row, within its sequences. [requests] of float64 [gaps]"""
    return [gaps_within(*row) for row in zip(chunk_times(requests), chunk_choices(requests), strict=True)]


def inter_token_latencies(requests: pd.DataFrame) -> np.ndarray:
    """All gaps [ms] between chunks with tokens, of all rows together. float64 [gaps]"""
    return np.concatenate([np.empty(0), *request_gaps(requests)]) * MS


def tokens_of_chunks(requests: pd.DataFrame) -> list[np.ndarray]:
    """The tokens of each row's chunks: its output tokens shared out evenly where they are not known. [requests]"""
    rows = zip(chunk_times(requests), chunk_tokens(requests), requests["output_tokens"], strict=True)
    return [np.full(len(t), float(total) / max(len(t), 1)) if own is None else own for t, own, total in rows]


def chunk_weights(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Arrival time [s] and tokens of every chunk (``tokens_of_chunks``): ``([chunks], [chunks])`` float64."""
    empty = np.empty(0)
    return np.concatenate([empty, *chunk_times(requests)]), np.concatenate([empty, *tokens_of_chunks(requests)])


def non_reasoning_weights(requests: pd.DataFrame) -> np.ndarray:
    """The tokens of every chunk that are no reasoning, in the order of ``chunk_weights``. float64 [chunks]

    Chunks share the output tokens less the reasoning tokens; where reasoning was streamed, those before the first
    output have none. Where the reasoning tokens are not known, chunks have what they brought.
    """
    left = stored(requests, "output_tokens") - reasoning_tokens(requests)
    output = np.where(left < 0, np.nan, left)  # below 0: the server counts reasoning beside its output tokens
    totals = np.where(streams_reasoning(requests) | ~np.isnan(output), output, streamed_tokens(requests))
    begins = np.where(streams_reasoning(requests), stored(requests, "first_output"), -np.inf)
    weights = [np.empty(0)]
    rows = zip(chunk_times(requests), tokens_of_chunks(requests), begins, totals, strict=True)
    for times, tokens, begin, total in rows:
        own = np.where(times >= begin, tokens, 0.0)
        brought = own.sum()
        weights.append(own if np.isnan(total) or not brought else own * (total / brought))
    return np.concatenate(weights)


def sessions(requests: pd.DataFrame) -> np.ndarray | None:
    """The session of each row (NaN: of none); None when there are no sessions. float64 [requests]"""
    if "session" not in requests or not requests["session"].notna().any():
        return None
    return requests["session"].to_numpy(dtype=float)


def successful(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["ok"].astype(bool)]


def ends(requests: pd.DataFrame) -> np.ndarray:
    """The end of each request [s], or its last chunk where no end is stored."""
    end = stored(requests, "end")
    return np.where(np.isfinite(end), end, stored(requests, "last"))


def starts(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Intended starts and sends [s]."""
    return requests["t0"].to_numpy(dtype=float), requests["ts"].to_numpy(dtype=float)


def client_queue(requests: pd.DataFrame) -> np.ndarray:
    """The wait of each row in the client under max_concurrency [ms]; empty where none waited. float64 [requests]"""
    waited = stored(requests, "queued_s")
    return waited * MS if (waited > 0).any() else np.empty(0)
