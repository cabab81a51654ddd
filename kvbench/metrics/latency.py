"""The metrics of one load, computed from the raw samples of its requests. Pure functions; see definitions.py.

Percentiles interpolate linearly between order statistics (Hyndman and Fan 1996, type 7; NumPy's default).
``samples_needed``: how many samples a percentile needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.common.server_errors import without_numbers
from kvbench.metrics import definitions, rows
from kvbench.metrics.canaries import counted
from kvbench.metrics.definitions import InWindow, over_slo
from kvbench.metrics.model import (
    EMPTY,
    Distribution,
    FailureMessage,
    GroupLatencies,
    LoadMetrics,
    LoadOutcome,
    Plateau,
    PooledLatencies,
)
from kvbench.metrics.rows import MS
from kvbench.metrics.steady_window import comes_at, steady_state

if TYPE_CHECKING:
    import pandas as pd

    from kvbench.metrics import steady_window

    Slo = Mapping[str, float | None] | None
    Window = tuple[float, float] | None

SESSION_BROKEN = "session_broken"  # the error kind of a turn that was not sent because an earlier one failed
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
CONFIDENCE = 0.99
SEVERAL_TOKENS = 1.1  # tokens a chunk from which on ITL and TPOT visibly differ
LONG_OPEN = 0.03  # of the users' time, for which streams stayed open after their last chunk: more is said
_SERVER_SAID_SO = ("http_error", "server_error")  # kinds of failures
_TOO_MANY = 429
_GATEWAY_ERRORS = (502, 504)  # HTTP: a proxy says them of a server that does not answer


@lru_cache(maxsize=64)
def samples_needed(quantile: float, confidence: float = CONFIDENCE) -> int:
    """The fewest samples of which, with the given confidence, at least two lie above the true quantile.

    With fewer, a percentile is little more than the largest sample or two. Smallest n with P(Binomial(n, 1 - q) <= 1)
    = q^n + n q^(n-1) (1-q) <= 1 - confidence, the second-order one-sided tolerance limit of Wilks (Annals of
    Mathematical Statistics 12, 1941): 130 for the 95th and 662 for the 99th percentile at 99 % confidence.
    """
    n = 2
    while quantile**n + n * quantile ** (n - 1) * (1 - quantile) > 1 - confidence:
        n += 1
    return n


SAMPLES_NEEDED = f"p90 needs {samples_needed(0.9)}, p95 {samples_needed(0.95)}, p99 {samples_needed(0.99)}"


def distribution(values: Sequence[float] | np.ndarray) -> Distribution:
    """The distribution of samples; ``EMPTY`` without one."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        return EMPTY
    points = np.quantile(data, list(QUANTILES.values()), method="linear")
    return _distribution(data.mean(), data.std(), points, data.min(), data.max(), data.size)


def weighted_distribution(values: np.ndarray, counts: np.ndarray) -> Distribution:
    """The distribution of samples of which ``counts`` (int64) are equal to each of ``values`` (float64, ascending)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return EMPTY
    mean = float(np.dot(values, counts)) / total
    at = np.array(list(QUANTILES.values())) * (total - 1)  # type 7: between these two of the sorted samples
    low, high = (values[np.searchsorted(ends, np.floor(at) + step, side="right")] for step in (0, at % 1 > 0))
    std = math.sqrt(float(np.dot((values - mean) ** 2, counts)) / total)
    return _distribution(mean, std, low + (high - low) * (at % 1), values[0], values[-1], total)


def _distribution(mean: float, std: float, points: np.ndarray, least: float, most: float, n: int) -> Distribution:
    return Distribution(
        mean=float(mean),
        std=float(std),
        **dict(zip(QUANTILES, map(float, points), strict=True)),
        min=float(least),
        max=float(most),
        n=n,
        uncertain=tuple(name for name, q in QUANTILES.items() if n < samples_needed(q)),
    )


def _token_counts(good: pd.DataFrame) -> dict[str, float | None]:
    """The tokens and chunks of successful rows; None where no request, or not each that reasoned, was told them."""
    streamed, reasoning = rows.streamed_tokens(good), rows.reasoning_tokens(good)
    cached = good["cached_tokens"].dropna() if "cached_tokens" in good else ()
    untold = np.isnan(reasoning)
    knows_reasoning = not untold.all() and not (untold & rows.streams_reasoning(good)).any()
    several = 0  # chunks of more than one token; where those are not known, tokens beyond one a chunk
    for times, tokens, total in zip(rows.chunk_times(good), rows.chunk_tokens(good), streamed, strict=True):
        several += max(0, int(total) - len(times)) if tokens is None else int((tokens > 1).sum())
    _, weights = rows.chunk_weights(good.assign(output_tokens=streamed))
    return {
        "total_input_tokens": int(good["prompt_tokens"].sum()),
        "total_cached_tokens": int(cached.sum()) if len(cached) else None,
        "total_output_tokens": int(good["output_tokens"].sum()),
        "total_reasoning_tokens": int(np.nansum(reasoning)) if knows_reasoning else None,
        "without_output": int((rows.reasoned(good) & np.isnan(rows.stored(good, "first_output"))).sum()),
        "multi_token_chunks": several,
        "unstreamed_tokens": int(good["output_tokens"].sum() - streamed.sum()),
        "tokens_per_chunk": float(weights.mean()) if len(weights) else None,
    }


def _open_after_last(requests: pd.DataFrame) -> dict[str, float | None]:
    """The median time [ms] that streams stayed open after their last chunk, and its share of the whole request."""
    open_s, spent_s = (rows.ends(requests) - rows.stored(requests, name) for name in ("last", "ts"))
    whole = np.isfinite(open_s) & np.isfinite(spent_s)
    total = float(spent_s[whole].sum())
    return {
        "open_after_last_p50_ms": float(np.median(open_s[whole])) * MS if whole.any() else None,
        "open_after_last_share": float(open_s[whole].sum()) / total if total > 0 else None,
    }


def in_steady(requests: pd.DataFrame, window: Window) -> pd.DataFrame:
    """The rows of one load that came within its steady ``window`` [s] (``steady_window.comes_at``).

    A closed loop's window begins with the last request of its first burst, which is not of the steady state.
    """
    if window is None:
        return requests.iloc[:0]
    moments = comes_at(*rows.starts(requests), rows.sessions(requests))
    return requests[(moments > window[0]) & (moments <= window[1])]


def _refused(failed: pd.DataFrame) -> pd.Series:
    """Tests which failures are the server's own: errors in the stream, HTTP 429 and 5xx but those of a gateway."""
    said_so = failed["error_kind"].isin(_SERVER_SAID_SO)
    return said_so & ~_rejected(failed) & ~failed["http_status"].isin(_GATEWAY_ERRORS)


def _rejected(failed: pd.DataFrame) -> pd.Series:
    return failed["http_status"].between(400, 499) & (failed["http_status"] != _TOO_MANY)


def _bounds(window: Window) -> dict[str, float | None]:
    begin, end = window or (None, None)
    return {"steady_start_s": begin, "steady_end_s": end}


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """Every latency that a single request has [ms], one row a request (NaN: undefined)."""
    import pandas as pd

    values = {metric.path: metric.of_request(requests) for metric in definitions.latencies() if metric.of_request}
    return pd.DataFrame(values, index=requests.index)


def throughput(requests: pd.DataFrame, window: Window, slo: Slo = None, prefix: str = "") -> dict[str, float | None]:
    """Every rate of successful rows in ``window`` [s], under its name after ``prefix``; None without a window."""
    empty = window is None or window[1] <= window[0]
    inside = None if empty else InWindow(rows.successful(requests), *window, slo)
    values = {metric: metric.rate(inside) if inside and metric.rate else None for metric in definitions.rates()}
    return {f"{prefix}{metric.path}": rate for metric, rate in values.items() if metric.always or rate is not None}


def _latencies(good: pd.DataFrame) -> dict[str, Distribution]:
    """The distribution of each latency of successful rows; of those that need not be there, with a sample."""
    values = {metric: np.asarray(metric.samples(good)) for metric in definitions.latencies() if metric.samples}
    spread = {metric: distribution(samples[~np.isnan(samples)]) for metric, samples in values.items()}
    return {metric.path: latencies for metric, latencies in spread.items() if metric.always or latencies.n}


def _group(good: pd.DataFrame) -> GroupLatencies:
    urgency = set(good["priority"].dropna().astype(int)) if "priority" in good else set()
    priority = {"priority": urgency.pop()} if len(urgency) == 1 else {}
    return GroupLatencies(n=len(good), **priority, **_latencies(good))


def _pooled_latencies(good: pd.DataFrame) -> dict[str, Any]:
    """The latencies of successful rows, of each class, and of first and later turns where conversations are."""
    groups = {"per_class": {str(name): _group(part) for name, part in good.groupby("class", sort=True)}}
    if rows.sessions(good) is not None:
        first = good["turn"].to_numpy() == 0
        groups["per_turn"] = {"first": _group(good[first]), "later": _group(good[~first])}
    return _latencies(good) | groups


def pooled(loads: Sequence[pd.DataFrame], steady: Sequence[pd.DataFrame] | None = None) -> PooledLatencies:
    """Latencies over the raw samples of several loads; ``steady``: their rows in steady windows."""
    import pandas as pd

    frames = [frame for frame in loads if len(frame)]
    if not frames:
        empty = {metric.path: EMPTY for metric in definitions.latencies() if metric.always}
        latencies: dict[str, Any] = {**empty, "per_class": {}}
    else:
        latencies = _pooled_latencies(rows.successful(pd.concat(frames, ignore_index=True)))
    return PooledLatencies(**latencies, **({} if steady is None else {"steady_latency": pooled(steady)}))


def summarise(requests: pd.DataFrame, load: LoadOutcome | Mapping[str, Any], slo: Slo = None) -> LoadMetrics:
    """Computes all metrics of one load. ``requests``: rows of requests.parquet; ``load``: load.json."""
    load = LoadOutcome.model_validate(load)
    good = rows.successful(requests)
    unsent = requests["error_kind"] == SESSION_BROKEN
    failed = requests[~requests["ok"].astype(bool) & ~unsent]
    if "http_status" not in failed:  # samples of an older version
        failed = failed.assign(http_status=np.nan)
    messages, first = repeat(""), None
    if "error" in failed and len(failed):
        messages, due = failed["error"].fillna("").astype(str), failed.loc[failed["t0"].idxmin()]
        first = f"{due['error_kind']}: {due['error']}"
    ends = rows.ends(requests)
    finish = float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0
    begin = float(requests["ts"].min()) if len(requests) else 0.0
    steady = steady_state(*rows.starts(requests), ends, load, rows.sessions(requests))
    duration = finish - begin
    whole = (float(np.nextafter(begin, -np.inf)), finish) if duration > 0 else None
    plateaus = tuple(_plateau(requests, plateau, slo) for plateau in steady.plateaus)
    canaries = counted(requests)
    return LoadMetrics(
        completed=len(good),
        failed=len(failed),
        not_sent=int(unsent.sum()),
        failure_kinds={str(k): int(v) for k, v in failed["error_kind"].value_counts().items()},
        failure_messages=most_frequent_failures(zip(failed["error_kind"], messages, repeat(1))),
        refused_by_server=int(_refused(failed).sum()),
        rejected_by_server=int(_rejected(failed).sum()),
        first_failure=first,
        incomplete=load.incomplete,
        first_request_s=begin,
        duration_s=duration,
        **_bounds(steady.window),
        steady_note=steady.why,
        **throughput(good, whole, slo),
        **throughput(good, steady.window, slo, definitions.STEADY),
        **_pooled_latencies(good),
        steady_latency=PooledLatencies(**_latencies(rows.successful(in_steady(requests, steady.window)))),
        **({"plateaus": plateaus} if plateaus else {}),
        **_token_counts(good),
        **_open_after_last(good),
        slo_misses={name: int(over.sum()) for name, over in over_slo(good, slo).items()},
        client=load.client,
        **({} if canaries is None else {"canaries": canaries}),
    )


def _plateau(requests: pd.DataFrame, plateau: steady_window.RatePlateau, slo: Slo) -> Plateau:
    group = _group(rows.successful(in_steady(requests, plateau.window)))
    return Plateau(
        start_s=plateau.start,
        end_s=plateau.end,
        request_rate=plateau.rate,
        **_bounds(plateau.window),
        **throughput(requests, plateau.window, slo, definitions.STEADY),
        **{name: getattr(group, name) for name in group.model_fields_set},
    )


def most_frequent_failures(failures: Iterable[tuple[str, str, int]]) -> dict[str, FailureMessage]:
    """The message that most requests with each kind of failure got, the most frequent kind first.

    ``failures``: kind, message and requests. Messages that differ in numbers and ids only are one, shown as it came
    first.
    """
    counts: dict[str, dict[str, list[Any]]] = {}
    for kind, message, requests in failures:
        same = counts.setdefault(str(kind), {}).setdefault(without_numbers(message), [message, 0])
        same[1] += int(requests)
    most = {kind: max(messages.values(), key=lambda entry: entry[1]) for kind, messages in counts.items()}
    ranked = sorted(most.items(), key=lambda entry: -entry[1][1])
    return {kind: FailureMessage(message=message, requests=requests) for kind, (message, requests) in ranked}
