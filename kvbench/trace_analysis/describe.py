"""Describes a trace: lengths, arrivals, memory, sessions and prefixes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.common.text import count, decimal
from kvbench.trace_analysis.cache_sim import HitRateCurve, simulate
from kvbench.trace_analysis.sentences import say
from kvbench.traces.model import Trace, file_names

PAGE_SIZES = (16, 64, 256)
CONTEXTS = (2048, 8192, 32768)
WINDOWS_S = (1, 10, 60)
_LEAST_WINDOWS = 5  # a variance of fewer says nothing


@dataclass(frozen=True)
class Quantiles:
    """Percentiles by linear interpolation."""

    p50: float
    p90: float
    p99: float
    max: float
    mean: float
    min: float


LENGTH_HEADS = ("", *(field.name for field in dataclasses.fields(Quantiles)), "total")


@dataclass(frozen=True)
class MemoryStats:
    """The KV that the requests need, in tokens of prompt + output, and the share of a reservation that they fill.

    reserve_max_util, reserve_p99_filled: filled share when every request gets room for the longest one, or for the
        99th percentile (a longer request fills its room)
    reserve_p99_util: mean length over the 99th percentile, above 1 where a few requests are very long
    waste: page size -> share of the pages' slots that stays empty
    share_up_to: context length -> share of the requests that fit
    """

    total: Quantiles
    reserve_max_util: float
    reserve_p99_util: float
    reserve_p99_filled: float
    waste: Mapping[int, float]
    share_up_to: Mapping[int, float]


@dataclass(frozen=True)
class Arrivals:
    """The times at which requests come; ``rate``: requests over span [1/s].

    cv: standard deviation of the gaps over their mean, 1 for Poisson
    zero_gap_share: share of the gaps that are 0
    fano: window [s] -> variance over mean of the requests in one window, 1 for Poisson whatever the window (Fano 1947);
        None with fewer than 5 whole windows
    peak_rate_10s: requests/s in the busiest whole window of 10 s; None likewise
    """

    span_s: float
    rate: float
    cv: float
    zero_gap_share: float
    fano: Mapping[int, float | None]
    peak_rate_10s: float | None


@dataclass(frozen=True)
class SessionStats:
    """Conversations: their turns, and the seconds between the end of a turn and the next one."""

    count: int
    turns: Quantiles
    think_s: Quantiles | None


@dataclass(frozen=True)
class Description:
    """Everything that is counted; None where the trace does not tell.

    columns: as ``length_columns``; lengths: the spread of each; why_no_cache: why ``cache`` is None
    """

    paths: tuple[Path, ...]
    trace: Trace
    columns: Mapping[str, np.ndarray]
    lengths: Mapping[str, Quantiles]
    memory: MemoryStats | None
    arrivals: Arrivals | None
    sessions: SessionStats | None
    cache: HitRateCurve | None
    why_no_cache: str


def describe(
    paths: tuple[Path, ...], trace: Trace, pages: list[int] | None = None, bytes_per_token: int | None = None
) -> Description:
    """Counts everything. ``pages``: capacities to replay (None: a ladder). Raises ValueError."""
    columns, why = length_columns(trace), ""
    if trace.page_ids is None:
        why = say("prefixes.no_ids", trace.prompts is None)
    elif not trace.pages.sum():
        why = say("prefixes.no_page", size=trace.page_size)
    return Description(
        paths,
        trace,
        columns,
        {name: spread(values) for name, values in columns.items()},
        memory(columns["total_tokens"]) if "total_tokens" in columns else None,
        None if trace.arrival_s is None else arrivals(trace.arrival_s),
        sessions(trace),
        None if why else simulate(trace, pages, bytes_per_token=bytes_per_token),
        why,
    )


def length_columns(trace: Trace) -> dict[str, np.ndarray]:
    """The lengths that the trace tells: tokens, and characters of texts. Each int64 [requests that tell it]."""
    prompt, output = trace.prompt_tokens, trace.output_tokens
    both = (prompt >= 0) & (output >= 0)
    prompts = [p for p in trace.prompts or () if isinstance(p, tuple) and p]
    replies = [reply for reply in trace.replies or () if reply is not None]
    columns = {
        "prompt_tokens": prompt[prompt >= 0],
        "output_tokens": output[output >= 0],
        "total_tokens": prompt[both] + output[both],
        "prompt_characters": np.array([sum(map(len, parts)) for parts in prompts], dtype=np.int64),
        "reply_characters": np.array([len(reply) for reply in replies], dtype=np.int64),
    }
    return {name: values for name, values in columns.items() if len(values)}


def spread(values: Sequence[float] | np.ndarray) -> Quantiles:
    """The percentiles of at least one value."""
    array = np.asarray(values, dtype=np.float64)
    p50, p90, p99 = np.percentile(array, [50, 90, 99])
    return Quantiles(float(p50), float(p90), float(p99), float(array.max()), float(array.mean()), float(array.min()))


def memory(total_tokens: np.ndarray) -> MemoryStats:
    """Computes the need of requests with ``total_tokens`` of prompt + output [requests, at least one]."""
    total = spread(total_tokens)
    needed = float(total_tokens.sum())
    return MemoryStats(
        total,
        _share(total.mean, total.max),
        _share(total.mean, total.p99),
        _share(float(np.minimum(total_tokens, total.p99).mean()), total.p99),
        {size: 1 - needed / float((-(-total_tokens // size) * size).sum() or 1) for size in PAGE_SIZES},
        {size: float(np.mean(total_tokens <= size)) for size in CONTEXTS},
    )


def _share(used: float, reserved: float) -> float:
    return used / reserved if reserved else 1.0


def sessions(trace: Trace) -> SessionStats | None:
    """Counts conversations and their turns; None where the trace has none."""
    if trace.session is None or trace.turn is None:
        return None
    numbers, turns = np.unique(trace.session, return_counts=True)
    think_s, later = None, trace.turn > 0
    if trace.think_s is not None and later.any():
        think_s = spread(trace.think_s[later])
    return SessionStats(len(numbers), spread(turns), think_s)


def arrivals(arrival_s: np.ndarray) -> Arrivals | None:
    """Counts arrivals at times [s] in ascending order, from 0; None when they span nothing."""
    times = arrival_s[~np.isnan(arrival_s)]
    if len(times) < 2 or not times[-1] > 0:
        return None
    gaps, span = np.diff(times), float(times[-1])
    fano: dict[int, float | None] = {}
    peak = None
    for window in WINDOWS_S:
        whole = int(span // window)
        counts = np.bincount((times // window).astype(np.int64), minlength=whole)[:whole]
        fano[window] = float(counts.var() / counts.mean()) if whole >= _LEAST_WINDOWS and counts.any() else None
        if window == 10 and fano[window] is not None:
            peak = float(counts.max() / window)
    return Arrivals(span, len(times) / span, float(gaps.std() / gaps.mean()), float(np.mean(gaps == 0)), fano, peak)


def about(description: Description) -> list[str]:
    """Writes the name, size and format of the trace, and what was left out of it."""
    trace = description.trace
    lines = [say("trace.name", names=file_names(description.paths), n=len(trace), format=trace.format)]
    if trace.page_size is not None:
        lines.append(say("trace.pages", size=trace.page_size, source=trace.page_size_from))
    return lines + [
        say("trace.left_out", requests=requests, reason=reason) for reason, requests in trace.left_out.items()
    ]


def facts(description: Description) -> list[str]:
    """Writes sentences on arrivals, sessions, memory and prefixes, and on what the trace does not tell."""
    lines = _arrival_facts(description.arrivals, description.trace.tick_s)
    if (sessions := description.sessions) is not None:
        think = say("sessions.think", sessions.think_s is not None, think=sessions.think_s)
        lines.append(say("sessions.turns", sessions=sessions.count, turns=sessions.turns, think=think))
    return lines + _memory_facts(description.memory) + _prefix_facts(description)


def _arrival_facts(times: Arrivals | None, tick_s: float | None) -> list[str]:
    if times is None:
        return [say("arrivals.none")]
    peak = say("arrivals.peak", times.peak_rate_10s is not None, rate=times.peak_rate_10s)
    fano = [say("arrivals.fano", f is not None, window=window, value=f) for window, f in times.fano.items()]
    lines = [
        say("arrivals.rate", rate=times.rate, span=times.span_s, peak=peak),
        say("arrivals.bursts", cv=times.cv, fano=", ".join(fano)),
    ]
    if tick_s is not None:
        lines.append(say("arrivals.clock", tick=tick_s, zero=times.zero_gap_share))
    return lines


def _memory_facts(memory: MemoryStats | None) -> list[str]:
    if memory is None:
        return [say("memory.none")]
    unused = [say("memory.unused_of", size=size, share=share) for size, share in memory.waste.items()]
    fits = [say("memory.fits_of", size=size, share=share) for size, share in memory.share_up_to.items()]
    return [
        say("memory.reserved", total=memory.total, longest=memory.reserve_max_util, p99=memory.reserve_p99_filled),
        say("memory.unused", shares=", ".join(unused)),
        say("memory.fits", shares=", ".join(fits)),
    ]


def _prefix_facts(description: Description) -> list[str]:
    if description.cache is None:
        return [say("prefixes.none", reason=description.why_no_cache)]
    ideal, pages = description.cache.ceiling, int(description.trace.pages.sum())
    full = say("prefixes.full", ideal.rates.full_pages is not None, share=ideal.rates.full_pages)
    return [
        say("prefixes.ideal", rates=ideal.rates, full=full),
        say("prefixes.distinct", distinct=ideal.run.num_pages, pages=pages, tokens=ideal.num_tokens),
    ]


def length_rows(description: Description) -> list[tuple[str, ...]]:
    """Makes one row for each kind of length, under ``LENGTH_HEADS``."""
    return [
        (name.replace("_", " "), *map(_number, dataclasses.astuple(length)), count(description.columns[name].sum()))
        for name, length in description.lengths.items()
    ]


def _number(value: float) -> str:
    return count(value) if value >= 1000 or value == int(value) else decimal(value)


def as_dict(description: Description) -> dict[str, Any]:
    """Returns what ``--json`` prints. Rates are shares, 0 to 1; null where the trace does not tell."""
    trace, cache = description.trace, description.cache
    needed, times, talks = (
        None if part is None else dataclasses.asdict(part)
        for part in (description.memory, description.arrivals, description.sessions)
    )
    if needed is not None:
        needed["waste"] = {f"page_{size}": share for size, share in needed["waste"].items()}
        needed["share_up_to"] = {f"{size}_tokens": share for size, share in needed["share_up_to"].items()}
    if times is not None:
        fano = {f"{window}s": value for window, value in times["fano"].items()}
        times |= {"fano": fano, "tick_s": trace.tick_s}
    prefix_cache = None
    if cache is not None:
        prefix_cache = {
            "pages": int(trace.pages.sum()),
            "unique_pages": cache.ceiling.run.num_pages,
            "infinite_cache": cache.ceiling.as_dict(),
            "capacities": [point.as_dict() for point in cache.points],
        }
    return {
        "files": [str(path) for path in description.paths],
        "format": trace.format,
        "requests": len(trace),
        "left_out": trace.left_out,
        "page_size": trace.page_size,
        "page_size_from": trace.page_size_from or None,
        "totals": {name: int(values.sum()) for name, values in description.columns.items()},
        "lengths": {name: dataclasses.asdict(length) for name, length in description.lengths.items()},
        "memory": needed,
        "arrivals": times,
        "sessions": talks,
        "prefix_cache": prefix_cache,
        "prefix_cache_unknown": description.why_no_cache or None,
    }
