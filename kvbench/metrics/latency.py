"""The metrics of one load, computed from the raw samples of its requests. Pure functions.

The definitions, as in docs/measuring.md (measured by the client, in ms):

- ``ttft``      first token of any kind (text, reasoning, tool call) - t0 (intended start in open loop, send in closed
                loop)
- ``ttft_send`` the same from the send
- ``ttfo``      time to first output: first text or tool call - t0. Not ttft where reasoning comes first, or a token
                whose text is held back; undefined for a request that reasoned to its end (``without_output``)
- ``reasoning`` reasoning time: first output - first chunk of reasoning; undefined where no reasoning was streamed, or
                no output came after it
- ``e2el``      last chunk - t0
- ``tpot``      (last - first token's chunk) / (output_tokens - 1), output_tokens from the server's usage;
                undefined (left out, not 0) for one token, or all tokens in one chunk. Reasoning tokens for which no
                chunk came (``unstreamed_tokens``) were before the first chunk, and are not divided into the time
                after it
- ``itl``       every gap between chunks that carry tokens, pooled over requests
- ``client_queue`` the part of ttft for which a request waited in the client for a place under max_concurrency
- throughput    over the whole run and over the steady window (``steady_window.py``), of successful requests only;
                ``non_reasoning_output_throughput``: as ``non_reasoning_weights`` counts output tokens, where requests
                reasoned
- ``goodput``   requests per second that met every SLO, of the whole run and of the steady window

A request may return several sequences (n > 1, beams). Its ttft is the first token of any of them and its e2el the
last chunk of all; first output and first reasoning are those of any, too. tpot and itl are of each sequence by itself,
with its own tokens; an SLO's limit is for the slowest.
``sequence_ttft`` is the first chunk with a token of each sequence - t0, where there are several. Sequences that are
chosen at the end (best_of, beams) come in one chunk each: they have no tpot and no itl, and ttft is the whole time.
Only tokens that are returned are output.

Other tools differ: GuideLLM's ``tpot`` includes TTFT, ITL of both GuideLLM and AIPerf is a mean per request, and
vLLM's TTFT may be of a chunk with nothing but a role (docs/measuring.md has them side by side). Percentiles
interpolate linearly between order statistics (Hyndman and Fan 1996, type 7; NumPy's default). ``samples_needed``: how
many samples a percentile needs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import TYPE_CHECKING, Any

import numpy as np

from kvbench.common.server_errors import without_numbers
from kvbench.metrics import sequences
from kvbench.metrics.canaries import counted
from kvbench.metrics.sequences import Choices, by_sequence, gaps_within
from kvbench.metrics.steady_window import Plateau, comes_at, steady_state

if TYPE_CHECKING:
    import pandas as pd

    Slo = Mapping[str, float | None] | None
    Window = tuple[float, float] | None

MS = 1000.0
SESSION_BROKEN = "session_broken"  # the error kind of a turn that was not sent because an earlier one failed
QUANTILES = {"p50": 0.50, "p90": 0.90, "p95": 0.95, "p99": 0.99}
CONFIDENCE = 0.99
MIN_STEADY_REQUESTS = 8  # the fewest samples whose extremes enclose the median with 99 % confidence: 2 / 2^n <= 1 %
MIN_STEADY_SHARE = 0.6  # of the requests: in closed loop 2.5 a user, so that a third of those in the window end in it
SEVERAL_TOKENS = 1.1  # tokens a chunk from which on ITL and TPOT visibly differ
LONG_OPEN = 0.03  # of the users' time, for which streams stayed open after their last chunk: more is said
MAX_FAILED_SHARE = 0.01  # of the requests sent: a server that answers fewer does less work
_SERVER_SAID_SO = ("http_error", "server_error")  # kinds of failures
_TOO_MANY = 429
_GATEWAY_ERRORS = (502, 504)  # HTTP: a proxy says them of a server that does not answer
LATENCIES = ("ttft_ms", "ttft_send_ms", "tpot_ms", "itl_ms", "e2el_ms")
_THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
_NON_REASONING = "non_reasoning_output_throughput"


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


def distribution(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """mean, std (population), p50..p99, min, max (None without a sample), n, and the percentiles that need more."""
    data = np.asarray(values, dtype=np.float64)
    if data.size == 0:
        return dict.fromkeys(["mean", "std", *QUANTILES, "min", "max"]) | {"n": 0, "uncertain": list(QUANTILES)}
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


def weighted_distribution(values: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """``distribution`` of samples of which ``counts`` (int64) are equal to each of ``values`` (float64, ascending)."""
    ends = np.cumsum(counts)
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        return distribution([])
    mean = float(np.dot(values, counts)) / total
    at = np.array(list(QUANTILES.values())) * (total - 1)  # type 7: between these two of the sorted samples
    low, high = (values[np.searchsorted(ends, np.floor(at) + step, side="right")] for step in (0, at % 1 > 0))
    points = low + (high - low) * (at % 1)
    return {
        "mean": mean,
        "std": math.sqrt(float(np.dot((values - mean) ** 2, counts)) / total),
        **{name: float(x) for name, x in zip(QUANTILES, points, strict=True)},
        "min": float(values[0]),
        "max": float(values[-1]),
        "n": total,
        "uncertain": [name for name, q in QUANTILES.items() if total < samples_needed(q)],
    }


def _chunk_times(requests: pd.DataFrame) -> list[np.ndarray]:
    """When each request's chunks with tokens arrived [s]. [requests] of float64 [chunks]"""
    return [np.empty(0) if t is None else np.asarray(t, dtype=float) for t in requests["chunk_times"]]


def _chunk_tokens(requests: pd.DataFrame) -> list[np.ndarray | None]:
    """How many tokens each of these chunks had; None where the server did not tell. [requests] of float64 [chunks]"""
    times = _chunk_times(requests)
    known = requests["chunk_tokens"] if "chunk_tokens" in requests else [None] * len(requests)
    return [
        np.asarray(tokens, dtype=float) if tokens is not None and len(tokens) == len(t) else None
        for tokens, t in zip(known, times, strict=True)
    ]


def _choices(stored: Any) -> Choices:
    """``chunk_choices`` of a row; missing where rows of older files are beside it."""
    return None if stored is None or np.ndim(stored) == 0 else stored


def _chunk_choices(requests: pd.DataFrame) -> list[Choices]:
    """Which sequence each chunk belongs to; None for requests of one sequence. [requests]"""
    return [_choices(stored) for stored in requests.get("chunk_choices", [None] * len(requests))]


def times_to_end(request: Mapping[str, Any]) -> np.ndarray:
    """When the chunks of a row's sequence that ended last arrived [s]. float64 [chunks of it]"""
    times = request["chunk_times"]
    return sequences.last_to_end(() if times is None else times, _choices(request.get("chunk_choices")))


def _stored(requests: pd.DataFrame, name: str) -> np.ndarray:
    """A column of numbers; all NaN where an earlier version wrote the file without it. float64 [requests]"""
    return requests[name].to_numpy(dtype=float) if name in requests else np.full(len(requests), np.nan)


def _streamed_tokens(requests: pd.DataFrame) -> np.ndarray:
    """The output tokens of each row that came in chunks. float64 [requests]"""
    return _stored(requests, "output_tokens") - np.nan_to_num(_stored(requests, "unstreamed_tokens"))


def _streams_reasoning(requests: pd.DataFrame) -> np.ndarray:
    """Tests which rows have chunks of reasoning. Bool [requests]"""
    return ~np.isnan(_stored(requests, "first_reasoning"))


def _reasoning_tokens(requests: pd.DataFrame) -> np.ndarray:
    """The reasoning tokens of each row; NaN where not known, or 0 by the usage though some came. float64 [requests]"""
    tokens = _stored(requests, "reasoning_tokens")
    return np.where(_streams_reasoning(requests) & (tokens == 0), np.nan, tokens)


def _reasoned(requests: pd.DataFrame) -> np.ndarray:
    """Tests which rows reasoned, streamed or hidden. Bool [requests]"""
    return _streams_reasoning(requests) | (_reasoning_tokens(requests) > 0)


def _sequence_tpots(requests: pd.DataFrame) -> list[np.ndarray]:
    """The time per output token [s] of each sequence of each request (NaN: undefined). [requests] of [sequences]"""
    totals = _streamed_tokens(requests)
    columns = (_chunk_times(requests), _chunk_choices(requests), _chunk_tokens(requests), totals)
    return [sequences.times_per_output_token(*of) for of in zip(*columns, strict=True)]


def request_latencies(requests: pd.DataFrame) -> pd.DataFrame:
    """ttft_ms, ttft_send_ms, ttfo_ms, reasoning_ms, tpot_ms, e2el_ms of each row (NaN: undefined).

    tpot_ms: of its slowest sequence. ttfo_ms and reasoning_ms are undefined where an earlier version wrote the file.
    """
    import pandas as pd

    columns = ("first", "first_output", "first_reasoning", "last", "t0", "ts")
    first, output, reasoning, last, t0, ts = (_stored(requests, name) for name in columns)
    return pd.DataFrame(
        {
            "ttft_ms": (first - t0) * MS,
            "ttft_send_ms": (first - ts) * MS,
            "ttfo_ms": (output - t0) * MS,
            "reasoning_ms": np.where(output >= reasoning, output - reasoning, np.nan) * MS,
            "tpot_ms": np.array([np.fmax.reduce(own) for own in _sequence_tpots(requests)], dtype=float) * MS,
            "e2el_ms": (last - t0) * MS,
        },
        index=requests.index,
    )


def times_per_output_token(requests: pd.DataFrame) -> np.ndarray:
    """tpot [ms] of every sequence that has one, of all rows together. float64 [sequences]"""
    tpots = np.concatenate([np.empty(0), *_sequence_tpots(requests)])
    return tpots[~np.isnan(tpots)] * MS


def sequence_ttfts(requests: pd.DataFrame) -> np.ndarray:
    """From t0 to the first chunk of each sequence [ms], of the rows with several sequences. float64 [sequences]"""
    rows = zip(_chunk_times(requests), _chunk_choices(requests), requests["t0"], strict=True)
    firsts = [own[0] - t0 for times, choices, t0 in rows if choices is not None for own in by_sequence(times, choices)]
    return np.array(firsts, dtype=float) * MS


def request_gaps(requests: pd.DataFrame) -> list[np.ndarray]:
    """The gaps [s] between chunks with tokens of each row, within its sequences. [requests] of float64 [gaps]"""
    return [gaps_within(*of) for of in zip(_chunk_times(requests), _chunk_choices(requests), strict=True)]


def inter_token_latencies(requests: pd.DataFrame) -> np.ndarray:
    """All gaps [ms] between chunks with tokens, of all rows together. float64 [gaps]"""
    return np.concatenate([np.empty(0), *request_gaps(requests)]) * MS


def _tokens_of_chunks(requests: pd.DataFrame) -> list[np.ndarray]:
    """The tokens of each row's chunks: its output tokens shared out evenly where they are not known. [requests]"""
    rows = zip(_chunk_times(requests), _chunk_tokens(requests), requests["output_tokens"], strict=True)
    return [np.full(len(t), float(total) / max(len(t), 1)) if own is None else own for t, own, total in rows]


def chunk_weights(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Arrival time [s] and tokens of every chunk (``_tokens_of_chunks``): ``([chunks], [chunks])`` float64."""
    empty = np.empty(0)
    return np.concatenate([empty, *_chunk_times(requests)]), np.concatenate([empty, *_tokens_of_chunks(requests)])


def non_reasoning_weights(requests: pd.DataFrame) -> np.ndarray:
    """The tokens of every chunk that are no reasoning, in the order of ``chunk_weights``. float64 [chunks]

    Chunks share the output tokens less the reasoning tokens; where reasoning was streamed, those before the first
    output have none. Where the reasoning tokens are not known, chunks have what they brought.
    """
    left = _stored(requests, "output_tokens") - _reasoning_tokens(requests)
    known = np.where(left < 0, np.nan, left)  # below 0: the server counts reasoning beside its output tokens
    totals = np.where(_streams_reasoning(requests) | ~np.isnan(known), known, _streamed_tokens(requests))
    begins = np.where(_streams_reasoning(requests), _stored(requests, "first_output"), -np.inf)
    weights = [np.empty(0)]
    rows = zip(_chunk_times(requests), _tokens_of_chunks(requests), begins, totals, strict=True)
    for times, tokens, begin, total in rows:
        own = np.where(times >= begin, tokens, 0.0)
        brought = own.sum()
        weights.append(own if np.isnan(total) or not brought else own * (total / brought))
    return np.concatenate(weights)


def _multi_token_chunks(requests: pd.DataFrame) -> int:
    """Chunks with more than one token; where counts are not known, how many more tokens than chunks there are."""
    rows = zip(_chunk_times(requests), _chunk_tokens(requests), _streamed_tokens(requests), strict=True)
    return sum(
        max(0, int(total) - len(times)) if tokens is None else int((tokens > 1).sum()) for times, tokens, total in rows
    )


def _tokens_per_chunk(requests: pd.DataFrame) -> float | None:
    """The mean number of tokens in a chunk that has any, without tokens that no chunk brought; None without chunks."""
    _, weights = chunk_weights(requests.assign(output_tokens=_streamed_tokens(requests)))
    return float(weights.mean()) if len(weights) else None


def _open_after_last(requests: pd.DataFrame) -> dict[str, float | None]:
    """The median time [ms] that a stream stayed open after its last chunk, and its share of the time from the send."""
    open_s, spent_s = (_ends(requests) - requests[name].to_numpy(dtype=float) for name in ("last", "ts"))
    whole = np.isfinite(open_s) & np.isfinite(spent_s)
    total = float(spent_s[whole].sum())
    return {
        "open_after_last_p50_ms": float(np.median(open_s[whole])) * MS if whole.any() else None,
        "open_after_last_share": float(open_s[whole].sum()) / total if total > 0 else None,
    }


def _sessions(requests: pd.DataFrame) -> np.ndarray | None:
    """The session of each row (NaN: of none); None when there are no sessions. float64 [requests]"""
    if "session" not in requests or not requests["session"].notna().any():
        return None
    return requests["session"].to_numpy(dtype=float)


def _successful(requests: pd.DataFrame) -> pd.DataFrame:
    return requests[requests["ok"].astype(bool)]


def _ends(requests: pd.DataFrame) -> np.ndarray:
    """When each request ended [s]: its end, or its last chunk where no end is stored."""
    last = requests["last"].to_numpy(dtype=float)
    if "end" not in requests:
        return last
    end = requests["end"].to_numpy(dtype=float)
    return np.where(np.isfinite(end), end, last)


def _starts(requests: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Intended starts and sends [s]."""
    return requests["t0"].to_numpy(dtype=float), requests["ts"].to_numpy(dtype=float)


def in_steady(requests: pd.DataFrame, window: Window) -> pd.DataFrame:
    """The rows of one load that came within its steady ``window`` [s] (``steady_window.comes_at``).

    A closed loop's window begins with the last request of its first burst, which is not of the steady state.
    """
    if window is None:
        return requests.iloc[:0]
    moments = comes_at(*_starts(requests), _sessions(requests))
    return requests[(moments > window[0]) & (moments <= window[1])]


def has_steady_latency(metrics: Mapping[str, Any]) -> bool:
    """Tests whether enough requests came in a load's steady window, so that its latencies lead.

    A user's last request runs on while fewer and fewer others do: of 48 requests of 32 users, 16 come in the window and
    all end after it, with a third of the others' time per token.
    """
    came = steady_requests(metrics)
    return came >= MIN_STEADY_REQUESTS and came >= MIN_STEADY_SHARE * (metrics.get("completed") or 0)


def steady_requests(metrics: Mapping[str, Any]) -> int:
    """The number of successful requests that came in a load's steady window."""
    return ((metrics.get("steady_latency") or {}).get("ttft_ms") or {}).get("n") or 0


def leading_latencies(metrics: Mapping[str, Any]) -> Mapping[str, Any]:
    """The latencies of a load that tables and decisions take: of the steady window, else of the whole run."""
    return metrics["steady_latency"] if has_steady_latency(metrics) else metrics


def throughput(requests: pd.DataFrame, window: Window) -> dict[str, float | None]:
    """Requests, output tokens and total tokens per second of successful rows inside ``window`` [s].

    Where requests reasoned, also output tokens without reasoning (``non_reasoning_weights``).
    An output token counts when its chunk arrives, a prompt when its first token arrives (the server has read it by
    then), a request by the share of its time in the window. None without a window.
    """
    if window is None or window[1] <= window[0]:
        return dict.fromkeys(_THROUGHPUTS)
    begin, end = window
    good = _successful(requests)

    def inside(times: np.ndarray) -> np.ndarray:
        return (times > begin) & (times <= end)

    times, weights = chunk_weights(good)
    output = float(weights[inside(times)].sum())
    first = np.array([t[0] if len(t) else np.nan for t in _chunk_times(good)], dtype=float)
    prompts = float(good["prompt_tokens"].to_numpy(dtype=float)[inside(first)].sum())
    served, span = float(_shares_inside(good, window).sum()), end - begin
    rates: dict[str, float | None] = {}
    if _reasoned(good).any():
        rates[_NON_REASONING] = float(non_reasoning_weights(good)[inside(times)].sum()) / span
    return dict(zip(_THROUGHPUTS, (served / span, output / span, (output + prompts) / span), strict=True)) | rates


def _shares_inside(requests: pd.DataFrame, window: tuple[float, float]) -> np.ndarray:
    """The share of each request's time, from its send to its end, in ``window`` [s]. float64 [requests]

    Requests of one length end in waves: counted whole where they end, a window that ends with a wave would lose it.
    """
    sends, ends = requests["ts"].to_numpy(dtype=float), _ends(requests)
    inside = np.minimum(ends, window[1]) - np.maximum(sends, window[0])
    return np.clip(inside / np.maximum(ends - sends, np.finfo(float).tiny), 0.0, 1.0)


def _over_slo(good: pd.DataFrame, slo: Slo) -> dict[str, np.ndarray]:
    """By limit of ``slo`` [ms], which successful requests are over it. Bool [requests] each.

    ``itl_ms`` limits a request's longest gap between chunks. A request of one token or one chunk has no tpot and no
    gap; such a limit does not count against it.
    """
    limits = {k: v for k, v in (slo or {}).items() if v is not None}
    if not limits:
        return {}
    longest = [gaps.max() if len(gaps) else np.nan for gaps in request_gaps(good)]
    values = request_latencies(good).assign(itl_ms=np.asarray(longest, dtype=float) * MS)
    columns = {name: values[name].to_numpy() for name in limits}
    return {
        name: ~((column <= limits[name]) | (np.isnan(column) if name in ("tpot_ms", "itl_ms") else False))
        for name, column in columns.items()
    }


def goodput(requests: pd.DataFrame, slo: Slo, window: tuple[float, float]) -> float | None:
    """Successful requests per second in ``window`` [s] that met every limit of ``slo`` [ms] (None without an SLO)."""
    good = _successful(requests)
    over = _over_slo(good, slo)
    if not over or window[1] <= window[0]:
        return None
    met = ~np.any(list(over.values()), axis=0)
    return float(_shares_inside(good, window)[met].sum() / (window[1] - window[0]))


def _in_window(requests: pd.DataFrame, window: Window, slo: Slo) -> dict[str, float | None]:
    """Throughput and goodput inside ``window`` [s], with names that begin with ``steady_``."""
    found = {**throughput(requests, window), "goodput": None}
    if window is not None and window[1] > window[0]:
        found["goodput"] = goodput(requests, slo, window)
    return {f"steady_{name}": value for name, value in found.items()}


def _latencies(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """The distribution of each latency.

    ``client_queue_ms`` only where a request waited under max_concurrency, ``sequence_ttft_ms`` only where one has
    several sequences, ``ttfo_ms`` and ``reasoning_ms`` only where one has them.
    """
    values = request_latencies(rows)
    out = {name: distribution(values[name].dropna().to_numpy()) for name in values}
    out["tpot_ms"] = distribution(times_per_output_token(rows))
    out["itl_ms"] = distribution(inter_token_latencies(rows))
    out = {name: each for name, each in out.items() if name in LATENCIES or each["n"]}
    if len(firsts := sequence_ttfts(rows)):
        out["sequence_ttft_ms"] = distribution(firsts)
    if "queued_s" in rows and (rows["queued_s"] > 0).any():
        out["client_queue_ms"] = distribution(rows["queued_s"].to_numpy(dtype=float) * MS)
    return out


def _with_count(rows: pd.DataFrame) -> dict[str, Any]:
    """Latencies of one group of requests, with its size, and its priority if all have the same."""
    urgency = set(rows["priority"].dropna().astype(int)) if "priority" in rows else set()
    return {"n": len(rows), **({"priority": urgency.pop()} if len(urgency) == 1 else {}), **_latencies(rows)}


def latency_summary(requests: pd.DataFrame) -> dict[str, Any]:
    """``{ttft_ms: distribution, ..., per_class: {name: {n, priority, ttft_ms, ...}}}`` of the successful rows.

    ``per_turn`` (``first``, ``later``) is there where conversations are.
    """
    good = _successful(requests)
    out: dict[str, Any] = _latencies(good)
    out["per_class"] = {str(name): _with_count(rows) for name, rows in good.groupby("class", sort=True)}
    if _sessions(good) is not None:
        first = good["turn"].to_numpy() == 0
        out["per_turn"] = {"first": _with_count(good[first]), "later": _with_count(good[~first])}
    return out


def pooled(loads: Sequence[pd.DataFrame]) -> dict[str, Any]:
    """``latency_summary`` over the raw samples of several loads (never an average of percentiles)."""
    import pandas as pd

    frames = [frame for frame in loads if len(frame)]
    if not frames:
        return {name: distribution([]) for name in LATENCIES} | {"per_class": {}}
    return latency_summary(pd.concat(frames, ignore_index=True))


def summarise(requests: pd.DataFrame, load: Mapping[str, Any], slo: Slo = None) -> dict[str, Any]:
    """All metrics of one load. ``requests``: rows of requests.parquet; ``load``: load.json as a dict.

    Times [s since load start], results in ms and per second; see the module's docstring for definitions. ``failed``
    counts requests that were sent; ``not_sent`` the turns of a conversation after one of its turns had failed.
    ``failure_messages``: by kind; ``refused_by_server``: those of ``failed`` that the server answered with an error of
    its own, ``rejected_by_server``: with one that blames the request. ``without_output``: successful requests that
    reasoned to their end. ``slo_misses``: successful requests over each limit of the SLO, by its name. ``canaries``: as
    ``counted``.
    """
    good = _successful(requests)
    unsent = requests["error_kind"] == SESSION_BROKEN
    failed = requests[~requests["ok"].astype(bool) & ~unsent]
    if "http_status" not in failed:  # samples of an older version
        failed = failed.assign(http_status=np.nan)
    ends = _ends(requests)
    finish = float(np.nanmax(ends)) if np.isfinite(ends).any() else 0.0
    begin = float(requests["ts"].min()) if len(requests) else 0.0
    steady = steady_state(*_starts(requests), ends, load, _sessions(requests))
    duration = finish - begin
    whole = (float(np.nextafter(begin, -np.inf)), finish) if duration > 0 else None
    return {
        "completed": len(good),
        "failed": len(failed),
        "not_sent": int(unsent.sum()),
        "failure_kinds": {str(k): int(v) for k, v in failed["error_kind"].value_counts().items()},
        "failure_messages": most_frequent_failures(zip(failed["error_kind"], _messages(failed), repeat(1))),
        "refused_by_server": int(_refused(failed).sum()),
        "rejected_by_server": int(_rejected(failed).sum()),
        "first_failure": _first_failure(failed),
        "incomplete": bool(load.get("incomplete", False)),
        "first_request_s": begin,
        "duration_s": duration,
        **_bounds(steady.window),
        "steady_note": steady.why,
        **throughput(requests, whole),
        **_in_window(requests, steady.window, slo),
        **latency_summary(requests),
        "steady_latency": _latencies(_successful(in_steady(requests, steady.window))),
        **({"plateaus": [_plateau(requests, p, slo) for p in steady.plateaus]} if steady.plateaus else {}),
        "total_input_tokens": int(good["prompt_tokens"].sum()),
        "total_cached_tokens": _total_cached(good),
        "total_output_tokens": int(good["output_tokens"].sum()),
        "total_reasoning_tokens": _total_reasoning(good),
        "without_output": int((_reasoned(good) & np.isnan(_stored(good, "first_output"))).sum()),
        "multi_token_chunks": _multi_token_chunks(good),
        "unstreamed_tokens": int(good["output_tokens"].sum() - _streamed_tokens(good).sum()),
        "tokens_per_chunk": _tokens_per_chunk(good),
        **_open_after_last(good),
        "goodput": goodput(requests, slo, (begin, finish)),
        "slo_misses": {name: int(over.sum()) for name, over in _over_slo(good, slo).items()},
        "client": dict(load.get("client") or {}),
        **({} if (canaries := counted(requests)) is None else {"canaries": canaries}),
    }


def _total_cached(good: pd.DataFrame) -> int | None:
    """Prompt tokens that requests were told to be cached; None where no request was told."""
    told = good["cached_tokens"].dropna() if "cached_tokens" in good else ()
    return int(told.sum()) if len(told) else None


def _total_reasoning(good: pd.DataFrame) -> int | None:
    """Reasoning tokens; None where the usage of no request tells them, or not of one that streamed some."""
    tokens = _reasoning_tokens(good)
    unknown = np.isnan(tokens)
    return None if unknown.all() or (unknown & _streams_reasoning(good)).any() else int(np.nansum(tokens))


def _messages(failed: pd.DataFrame) -> Iterable[str]:
    return failed["error"].fillna("").astype(str) if "error" in failed else repeat("")


def _refused(failed: pd.DataFrame) -> pd.Series:
    """Which failures are the server's own refusals: errors in the stream, HTTP 429 and 5xx but those of a gateway.

    Other 4xx blame the request, so the load was wrong.
    """
    said_so = failed["error_kind"].isin(_SERVER_SAID_SO)
    return said_so & ~_rejected(failed) & ~failed["http_status"].isin(_GATEWAY_ERRORS)


def _rejected(failed: pd.DataFrame) -> pd.Series:
    """Tests which failures were answered with a status that blames the request."""
    return failed["http_status"].between(400, 499) & (failed["http_status"] != _TOO_MANY)


def most_frequent_failures(failures: Iterable[tuple[str, str, int]]) -> dict[str, dict[str, Any]]:
    """``{kind: {message, requests}}``: the message that most requests got, the most frequent kind first.

    ``failures``: kind, message and requests. Messages that differ in numbers and ids only are one, shown as it came
    first.
    """
    counts: dict[str, dict[str, list[Any]]] = {}
    for kind, message, requests in failures:
        same = counts.setdefault(str(kind), {}).setdefault(without_numbers(message), [message, 0])
        same[1] += int(requests)
    most = {kind: max(found.values(), key=lambda each: each[1]) for kind, found in counts.items()}
    ranked = sorted(most.items(), key=lambda each: -each[1][1])
    return {kind: {"message": message, "requests": requests} for kind, (message, requests) in ranked}


def _first_failure(failed: pd.DataFrame) -> str | None:
    """Kind and text of the failure of the request that was due first."""
    if failed.empty or "error" not in failed:
        return None
    row = failed.loc[failed["t0"].idxmin()]
    return f"{row['error_kind']}: {row['error']}"


def _bounds(window: Window) -> dict[str, float | None]:
    begin, end = window or (None, None)
    return {"steady_start_s": begin, "steady_end_s": end}


def _plateau(requests: pd.DataFrame, plateau: Plateau, slo: Slo) -> dict[str, Any]:
    """What one plateau of a changing rate came to, in its steady part."""
    return {
        "start_s": plateau.start,
        "end_s": plateau.end,
        "request_rate": plateau.rate,
        **_bounds(plateau.window),
        **_in_window(requests, plateau.window, slo),
        **_with_count(_successful(in_steady(requests, plateau.window))),
    }


def too_many_failed(metrics: Mapping[str, Any]) -> bool:
    """Whether more than ``MAX_FAILED_SHARE`` of the requests sent failed; ``metrics``: of ``summarise``."""
    failed, completed = int(metrics.get("failed") or 0), int(metrics.get("completed") or 0)
    return failed > MAX_FAILED_SHARE * (failed + completed)


def is_refusal(metrics: Mapping[str, Any]) -> bool:
    """Whether the server answered a part of the load and refused too much of it by errors of its own.

    If it answered nothing, or too many requests failed in another way, something else is wrong.
    """
    completed, others = metrics.get("completed"), metrics["failed"] - metrics.get("refused_by_server", 0)
    return bool(completed) and too_many_failed(metrics) and not too_many_failed({**metrics, "failed": others})


def goodput_share(metrics: Mapping[str, Any]) -> float | None:
    """Share of all requests sent, failed ones included, that met every SLO; None without an SLO."""
    sent = (metrics.get("completed") or 0) + (metrics.get("failed") or 0)
    rate, duration = metrics.get("goodput"), metrics.get("duration_s")
    return rate * duration / sent if rate is not None and duration and sent else None
