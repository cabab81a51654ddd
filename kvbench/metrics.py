"""Metric definitions, once, as pure functions on raw samples.

The definitions that the README gives under "How to read the report" (client side, in ms, from raw samples):

- ``ttft``      first chunk with non-empty content - t0 (intended start in open loop, send in closed loop)
- ``ttft_send`` the same from the send
- ``e2el``      last chunk - t0
- ``tpot``      (last - first token's chunk) / (output_tokens - 1), output_tokens from the server's usage;
                undefined (left out, not 0) for one token
- ``itl``       every gap between chunks that carry tokens, pooled over requests
- throughput    over the whole run and over the steady window, of successful requests only
- ``goodput``   requests per second of the whole run that met every SLO

The peers differ: vLLM's ``tpot`` divides by the tokenizer's own count, GuideLLM's includes TTFT, and AIPerf's
ITL is a mean per request. Percentiles interpolate linearly between order statistics (Hyndman and Fan 1996,
type 7; NumPy's default). Which counts are enough for one: ``samples_needed``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:  # the load process uses the window only, and starts faster without pandas
    import pandas as pd

QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
CONFIDENCE = 0.99
LATENCIES = ("ttft_ms", "ttft_send_ms", "tpot_ms", "itl_ms", "e2el_ms")
_MS = 1000.0


@lru_cache(maxsize=64)
def samples_needed(quantile: float, confidence: float = CONFIDENCE) -> int:
    """Fewest samples for which a percentile is more than the largest sample or two.

    Smallest n for which, with the given confidence, at least two samples lie above the true quantile, so that
    the second largest sample bounds it from above: P(Binomial(n, 1 - q) <= 1) = q^n + n q^(n-1) (1-q)
    <= 1 - confidence. This is the second-order one-sided tolerance limit of Wilks (Annals of Mathematical
    Statistics 12, 1941): 130 for the 95th and 662 for the 99th percentile at 99 % confidence.
    """
    if not 0 < quantile < 1 or not 0 < confidence < 1:
        raise ValueError(f"quantile {quantile} and confidence {confidence} must lie between 0 and 1.")
    n = 2
    while quantile**n + n * quantile ** (n - 1) * (1 - quantile) > 1 - confidence:
        n += 1
    return n


def distribution(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """mean, std (population), p50..p99, min, max, n, and the percentiles whose n is too small.

    All figures are None when there is no sample.
    """
    data = np.asarray(values, dtype=np.float64)
    names = ["mean", "std", *QUANTILES, "min", "max"]
    if data.size == 0:
        return dict.fromkeys(names) | {"n": 0, "uncertain": list(QUANTILES)}
    points = np.quantile(data, list(QUANTILES.values()), method="linear")
    return {
        "mean": float(data.mean()),
        "std": float(data.std()),
        **{name: float(x) for name, x in zip(QUANTILES, points, strict=True)},
        "min": float(data.min()),
        "max": float(data.max()),
        "n": int(data.size),
        "uncertain": [name for name, q in QUANTILES.items() if data.size < samples_needed(q)],
    }


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Per-request ttft_ms, ttft_send_ms, tpot_ms, e2el_ms [ms] of the rows given (NaN: undefined)."""
    import pandas as pd

    begin = np.array([t[0] if len(t) else np.nan for t in map(_times, requests["chunk_times"])], dtype=float)
    last = requests["last"].to_numpy(dtype=float)
    tokens = requests["output_tokens"].to_numpy(dtype=float)
    with np.errstate(divide="ignore", invalid="ignore"):
        tpot = np.where(tokens > 1, (last - begin) / (tokens - 1), np.nan)
    first, t0 = requests["first"].to_numpy(dtype=float), requests["t0"].to_numpy(dtype=float)
    return pd.DataFrame(
        {
            "ttft_ms": (first - t0) * _MS,
            "ttft_send_ms": (first - requests["ts"].to_numpy(dtype=float)) * _MS,
            "tpot_ms": tpot * _MS,
            "e2el_ms": (last - t0) * _MS,
        },
        index=requests.index,
    )


def inter_token_latencies(requests: pd.DataFrame) -> np.ndarray:
    """All gaps [ms] between token-carrying chunks of the rows given, pooled. [gaps] float64"""
    gaps = [np.diff(t) for t in map(_times, requests["chunk_times"]) if len(t) > 1]
    return np.concatenate(gaps) * _MS if gaps else np.empty(0)


def chunk_weights(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Arrival time [s] and tokens of every chunk: ``([chunks], [chunks])`` float64.

    Known counts are used (``chunk_tokens``); otherwise a request's output tokens are shared out evenly over
    its chunks, so that a chunk of several tokens is neither one token nor lost.
    """
    times, weights = [], []
    known = requests["chunk_tokens"] if "chunk_tokens" in requests else [None] * len(requests)
    for row_times, row_tokens, total in zip(
        requests["chunk_times"], known, requests["output_tokens"], strict=True
    ):
        t = _times(row_times)
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
        if tokens is not None and len(tokens) == len(_times(times)):
            count += int((np.asarray(tokens) > 1).sum())
        else:
            count += max(0, int(total) - len(_times(times)))
    return count


def steady_window(requests: pd.DataFrame, load: Mapping[str, Any]) -> tuple[float, float] | None:
    """First and last moment [s] at the target load, or None when it was never reached.

    Closed loop: from the first moment with ``concurrency`` requests in flight to the last such moment (the
    instants between one request and the same user's next do not end it). Open loop: from the first to the
    last arrival. Requests that failed were in flight too, so all rows count.
    """
    return steady_window_of(
        requests["t0"].to_numpy(dtype=float),
        requests["ts"].to_numpy(dtype=float),
        _ends(requests),
        str(load.get("mode")),
        load.get("concurrency"),
    )


def steady_window_of(
    t0: Sequence[float], ts: Sequence[float], ends: Sequence[float], mode: str, concurrency: int | None
) -> tuple[float, float] | None:
    """``steady_window`` on plain arrays: intended starts, sends and ends [s], each [requests]."""
    if len(t0) == 0:
        return None
    if mode == "open":
        start, end = float(np.min(t0)), float(np.max(t0))
        return (start, end) if end > start else None
    if not concurrency:
        return None
    keep = np.isfinite(np.asarray(ts, dtype=float)) & np.isfinite(np.asarray(ends, dtype=float))
    moments = np.concatenate([np.asarray(ts, dtype=float)[keep], np.asarray(ends, dtype=float)[keep]])
    steps = np.concatenate([np.ones(keep.sum()), -np.ones(keep.sum())])
    order = np.lexsort((-steps, moments))  # at equal times the start comes first: intervals are closed
    at_target = np.flatnonzero(np.cumsum(steps[order]) >= int(concurrency))
    if not at_target.size:
        return None
    begin = float(moments[order][at_target[0]])
    finish = float(moments[order][at_target[-1] + 1])  # the step after the last time at target goes below it
    return (begin, finish) if finish > begin else None


def throughput(
    requests: pd.DataFrame, window: tuple[float, float] | None, prefix: str = ""
) -> dict[str, float | None]:
    """Requests, output tokens and total tokens per second of successful rows inside ``window`` [s].

    An output token counts when its chunk arrives, a prompt when its first token arrives (it has been read
    then), a request when it ends. ``None`` for a window that does not exist.
    """
    names = [f"{prefix}{n}" for n in ("request_throughput", "output_throughput", "total_token_throughput")]
    if window is None or window[1] <= window[0]:
        return dict.fromkeys(names)
    begin, end = window
    good = _successful(requests)
    times, weights = chunk_weights(good)
    output = float(weights[(times > begin) & (times <= end)].sum())
    first = np.array([t[0] if len(t) else np.nan for t in map(_times, good["chunk_times"])], dtype=float)
    read = (first > begin) & (first <= end)
    prompts = float(good["prompt_tokens"].to_numpy(dtype=float)[read].sum())
    done = _ends(good)
    finished = int(((done > begin) & (done <= end)).sum())
    span = end - begin
    return dict(zip(names, (finished / span, output / span, (output + prompts) / span), strict=True))


def goodput(requests: pd.DataFrame, slo: Mapping[str, float | None] | None, duration_s: float) -> float | None:
    """Successful requests per second that met every limit of ``slo`` [ms] (None without an SLO).

    A request of one token has no tpot; a tpot limit does not count against it.
    """
    limits = {k: v for k, v in (slo or {}).items() if v is not None}
    if not limits or duration_s <= 0:
        return None
    values = request_latencies(_successful(requests))
    met = np.ones(len(values), dtype=bool)
    for name, limit in limits.items():
        if name not in values:
            raise ValueError(f"`{name}` is not a known SLO; use one of {', '.join(values.columns)}.")
        column = values[name].to_numpy()
        met &= (column <= limit) | (np.isnan(column) if name == "tpot_ms" else False)
    return float(met.sum() / duration_s)


def latency_summary(requests: pd.DataFrame) -> dict[str, Any]:
    """``{ttft_ms: distribution, ..., per_class: {name: {n, ttft_ms, ...}}}`` of the successful rows."""
    good = _successful(requests)
    out: dict[str, Any] = _latencies(good)
    out["per_class"] = {
        str(name): {"n": len(rows), **_latencies(rows)} for name, rows in good.groupby("class", sort=True)
    }
    return out


def pooled(loads: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """``latency_summary`` over the raw samples of several loads (never an average of percentiles)."""
    import pandas as pd

    frames = [frame for frame in loads if len(frame)]
    if not frames:
        return {name: distribution([]) for name in LATENCIES} | {"per_class": {}}
    return latency_summary(pd.concat(frames, ignore_index=True))


def summarise(
    requests: pd.DataFrame, load: Mapping[str, Any], slo: Mapping[str, float | None] | None = None
) -> dict[str, Any]:
    """All metrics of one load. ``requests``: rows of requests.parquet; ``load``: load.json as a dict.

    Times [s since load start], results in ms and per second; see the module's docstring for definitions.
    """
    good = _successful(requests)
    failed = requests[~requests["ok"].astype(bool)]
    ends = _ends(requests)
    finish = float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0
    begin = float(requests["ts"].min()) if len(requests) else 0.0
    window = steady_window(requests, load)
    duration = finish - begin
    whole = (float(np.nextafter(begin, -np.inf)), finish) if duration > 0 else None
    steady_rows = requests[requests["ts"].between(*window)] if window else requests.iloc[:0]
    return {
        "completed": len(good),
        "failed": len(failed),
        "failure_kinds": {str(k): int(v) for k, v in failed["error_kind"].value_counts().items()},
        "incomplete": bool(load.get("incomplete", False)),
        "duration_s": duration,
        "steady_start_s": window[0] if window else None,
        "steady_end_s": window[1] if window else None,
        **throughput(requests, whole),
        **throughput(requests, window, "steady_"),
        **latency_summary(requests),
        "steady_latency": _latencies(_successful(steady_rows)),
        "total_input_tokens": int(good["prompt_tokens"].sum()),
        "total_cached_tokens": int(good["cached_tokens"].fillna(0).sum()) if "cached_tokens" in good else 0,
        "total_output_tokens": int(good["output_tokens"].sum()),
        "multi_token_chunks": multi_token_chunks(good),
        "goodput": goodput(requests, slo, duration),
        "client": dict(load.get("client") or {}),
    }


def _latencies(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    values = request_latencies(rows)
    out = {name: distribution(values[name].dropna().to_numpy()) for name in values}
    out["itl_ms"] = distribution(inter_token_latencies(rows))
    return {name: out[name] for name in LATENCIES}


def _successful(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["ok"].astype(bool)]


def _ends(requests: pd.DataFrame) -> np.ndarray:
    """When each request left the server's hands [s]: its end, or its last chunk where no end is stored."""
    last = requests["last"].to_numpy(dtype=float)
    if "end" not in requests:
        return last
    end = requests["end"].to_numpy(dtype=float)
    return np.where(np.isfinite(end), end, last)


def _times(value: Any) -> np.ndarray:
    return np.empty(0) if value is None else np.asarray(value, dtype=float)
