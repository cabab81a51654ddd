"""What ``kvbench trace describe`` finds in a trace: lengths, arrivals, memory, sessions, prefixes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvbench.trace_analysis.cache_sim import Simulation, simulate
from kvbench.traces import stats
from kvbench.traces.model import Trace


@dataclass(frozen=True)
class SessionStats:
    """Conversations: turns of each, and seconds between a turn's end and the next, where the trace tells."""

    count: int
    turns: stats.Spread
    think_s: stats.Spread | None


@dataclass(frozen=True)
class Description:
    """None where the trace does not tell.

    ``lengths``: a spread each of ``prompt_tokens``, ``output_tokens``, ``total_tokens`` (of both), and of texts
    ``prompt_characters`` and ``reply_characters``; ``totals``: their sums.
    """

    paths: tuple[Path, ...]
    trace: Trace
    lengths: dict[str, stats.Spread]
    totals: dict[str, int]
    memory: stats.Memory | None
    arrivals: stats.Arrivals | None
    sessions: SessionStats | None
    cache: Simulation | None
    why_no_cache: str


def describe(
    paths: tuple[Path, ...], trace: Trace, pages: list[int] | None = None, bytes_per_token: int | None = None
) -> Description:
    """Counts everything. ``pages``: capacities to replay (None: a ladder). Raises ValueError."""
    lengths: dict[str, stats.Spread] = {}
    totals: dict[str, int] = {}
    total = stats.total_tokens(trace)
    columns = {
        "prompt_tokens": trace.prompt_tokens[trace.prompt_tokens >= 0],
        "output_tokens": trace.output_tokens[trace.output_tokens >= 0],
        "total_tokens": total,
        "prompt_characters": stats.prompt_characters(trace),
        "reply_characters": stats.reply_characters(trace),
    }
    for name, values in columns.items():
        if len(values):
            lengths[name] = stats.spread(values)
            totals[name] = int(values.sum())
    why = ""
    if trace.page_ids is None:
        why = "the trace has no page ids, and does not say which prompts begin alike"
        if trace.prompts is not None:
            why = "which texts begin alike in tokens takes a tokenizer: give one with --tokenizer"
    elif not trace.pages.sum():
        why = f"no prompt fills a page of {trace.page_size} tokens"
    return Description(
        paths,
        trace,
        lengths,
        totals,
        stats.memory(total) if len(total) else None,
        None if trace.arrival_s is None else stats.arrivals(trace.arrival_s),
        _sessions(trace),
        None if why else simulate(trace, pages, bytes_per_token=bytes_per_token),
        why,
    )


def _sessions(trace: Trace) -> SessionStats | None:
    if trace.session is None or trace.turn is None:
        return None
    thinks = None if trace.think_s is None else trace.think_s[trace.turn > 0]
    return SessionStats(
        len(np.unique(trace.session)),
        stats.spread(np.unique(trace.session, return_counts=True)[1]),
        stats.spread(thinks) if thinks is not None and len(thinks) else None,
    )


def as_dict(found: Description) -> dict[str, Any]:
    """What ``--json`` prints. Rates are shares, 0 to 1; null where the trace does not tell."""
    trace = found.trace
    memory, arrivals, sessions = (
        None if part is None else dataclasses.asdict(part) for part in (found.memory, found.arrivals, found.sessions)
    )
    if memory is not None:
        memory["waste"] = {f"page_{size}": share for size, share in memory["waste"].items()}
        memory["share_up_to"] = {f"{size}_tokens": share for size, share in memory["share_up_to"].items()}
    if arrivals is not None:
        fano = {f"{window}s": value for window, value in arrivals["fano"].items()}
        arrivals |= {"fano": fano, "tick_s": trace.tick_s}
    return {
        "files": [str(path) for path in found.paths],
        "format": trace.format,
        "requests": len(trace),
        "left_out": trace.left_out,
        "page_size": trace.page_size,
        "page_size_from": trace.page_size_from or None,
        "totals": found.totals,
        "lengths": {key: dataclasses.asdict(value) for key, value in found.lengths.items()},
        "memory": memory,
        "arrivals": arrivals,
        "sessions": sessions,
        "prefix_cache": None if found.cache is None else _cache(found.cache),
        "prefix_cache_unknown": found.why_no_cache or None,
    }


def _cache(result: Simulation) -> dict[str, Any]:
    return {
        "pages": int(result.trace.pages.sum()),
        "unique_pages": result.ceiling.run.num_pages,
        "infinite_cache": result.ceiling.as_dict(),
        "capacities": [point.as_dict() for point in result.points],
    }
