"""Statistics of a trace's lengths and arrivals, as pure functions. Prefixes: ``trace_analysis/cache_sim.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvbench.traces.model import Trace

PAGE_SIZES = (16, 64, 256)
CONTEXTS = (2048, 8192, 32768)
WINDOWS_S = (1, 10, 60)
_LEAST_WINDOWS = 5  # below, a variance says nothing


@dataclass(frozen=True)
class Spread:
    """Percentiles by linear interpolation."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float
    min: float


@dataclass(frozen=True)
class Memory:
    """What prompt + output need of KV, in tokens, and what ways to give it to them leave unused.

    ``reserve_max_util``, ``reserve_p99_filled``: share of a reservation that holds tokens at the end, when all requests
    are given room for the longest, or for the 99th percentile, of longer ones what fits in. ``reserve_p99_util``: mean
    over the 99th percentile, which a few long requests bring above 1. ``waste``: share of the slots of pages of so many
    tokens that stays empty at the end. ``share_up_to``: requests of at most so many tokens.
    """

    total: Spread
    reserve_max_util: float
    reserve_p99_util: float
    reserve_p99_filled: float
    waste: dict[int, float]
    share_up_to: dict[int, float]


@dataclass(frozen=True)
class Arrivals:
    """``rate``: requests over span, per second. ``cv``: standard deviation of the gaps over their mean, 1 for Poisson.

    ``zero_gap_share``: gaps of nothing. ``fano``: variance over mean of the requests counted in windows of so many
    seconds, 1 for Poisson whatever the window (Fano 1947); None with fewer than 5 whole windows. ``peak_rate_10s``:
    the busiest of the whole 10 s windows, requests/s; None likewise.
    """

    span_s: float
    rate: float
    cv: float
    zero_gap_share: float
    fano: dict[int, float | None]
    peak_rate_10s: float | None


def spread(values: Sequence[float] | np.ndarray) -> Spread:
    """ValueError for no values."""
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise ValueError("there are no values to take percentiles of")
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return Spread(float(p50), float(p90), float(p99), float(array.max()), float(array.mean()), float(array.min()))


def memory(total_tokens: np.ndarray) -> Memory:
    """``total_tokens`` [requests]: prompt + output. ValueError for none."""
    total = spread(total_tokens)
    needed = float(total_tokens.sum())
    return Memory(
        total,
        total.mean / total.max if total.max else 1.0,
        total.mean / total.p99 if total.p99 else 1.0,
        float(np.minimum(total_tokens, total.p99).mean()) / total.p99 if total.p99 else 1.0,
        {size: 1 - needed / float((-(-total_tokens // size) * size).sum() or 1) for size in PAGE_SIZES},
        {size: float(np.mean(total_tokens <= size)) for size in CONTEXTS},
    )


def arrivals(arrival_s: np.ndarray) -> Arrivals | None:
    """Of times [s] in ascending order, from 0; None when they span nothing."""
    times = arrival_s[~np.isnan(arrival_s)]
    if len(times) < 2 or not times[-1] > 0:
        return None
    gaps = np.diff(times)
    fano: dict[int, float | None] = {}
    peak = None
    for window in WINDOWS_S:
        counts = _counts(times, window)
        fano[window] = float(counts.var() / counts.mean()) if len(counts) >= _LEAST_WINDOWS and counts.any() else None
        if window == 10 and fano[window] is not None:
            peak = float(counts.max() / window)
    span = float(times[-1])
    return Arrivals(span, len(times) / span, float(gaps.std() / gaps.mean()), float(np.mean(gaps == 0)), fano, peak)


def _counts(times: np.ndarray, window: float) -> np.ndarray:
    """Requests in each whole window. int64 [windows]"""
    whole = int(times[-1] // window)
    return np.bincount((times // window).astype(np.int64), minlength=whole)[:whole]


def total_tokens(trace: Trace) -> np.ndarray:
    """Prompt + output of the requests of which both are known. int64 [such requests]"""
    known = (trace.prompt_tokens >= 0) & (trace.output_tokens >= 0)
    return trace.prompt_tokens[known] + trace.output_tokens[known]


def prompt_characters(trace: Trace) -> np.ndarray:
    """Characters of each prompt that is a text. int64 [such requests]"""
    texts = [p for p in trace.prompts or () if isinstance(p, tuple) and p]
    return np.array([sum(map(len, parts)) for parts in texts], dtype=np.int64)


def reply_characters(trace: Trace) -> np.ndarray:
    """Characters of each reply that is known. int64 [such requests]"""
    return np.array([len(reply) for reply in trace.replies or () if reply is not None], dtype=np.int64)
