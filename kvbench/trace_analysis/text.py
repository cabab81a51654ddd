"""A trace's description and its hit rates in sentences and tables, for the terminal and the page."""

from __future__ import annotations

from kvbench.common.text import format_bytes
from kvbench.trace_analysis.cache_sim import Point, Simulation
from kvbench.trace_analysis.describe import Description
from kvbench.traces.model import file_names

_PERCENTILES = ("p50", "p90", "p99", "max", "mean", "min")
LENGTH_HEADS = ("", *_PERCENTILES, "total")


def facts(found: Description) -> list[str]:
    """Sentences on arrivals, sessions, memory and prefixes, and on what the trace does not tell."""
    return [*_arrivals(found), *_sessions(found), *_memory(found), *_prefixes(found)]


def about(found: Description) -> list[str]:
    """The name, size and format of the trace, and what was left out of it."""
    trace = found.trace
    lines = [f"{file_names(found.paths)}: {len(trace):,} request{'s' * (len(trace) != 1)}, format {trace.format}."]
    if trace.page_size is not None:
        lines.append(f"Pages of {trace.page_size} tokens ({trace.page_size_from}).")
    return lines + [f"Left out: {count:,} {why}." for why, count in trace.left_out.items()]


def _arrivals(found: Description) -> tuple[str, ...]:
    arrivals, trace = found.arrivals, found.trace
    if arrivals is None:
        return ("Arrivals: the trace has no times to tell a rate from.",)
    fano = ", ".join(f"{w} s {'unknown' if f is None else f'{f:.2f}'}" for w, f in arrivals.fano.items())
    peak = "" if arrivals.peak_rate_10s is None else f", at most {arrivals.peak_rate_10s:.1f}/s over 10 s"
    lines = [
        f"Arrivals: {arrivals.rate:.3f} requests/s over {arrivals.span_s:,.1f} s{peak}.",
        f"Burstiness: cv of the gaps {arrivals.cv:.2f}, Fano factor in windows of {fano} (1 is Poisson).",
    ]
    if trace.tick_s is not None:
        lines.append(
            f"The clock ticks every {trace.tick_s:g} s: {arrivals.zero_gap_share:.0%} of the gaps are 0, so cv and "
            "the Fano factor of short windows describe the clock (load.spread_ticks spreads the arrivals)."
        )
    return tuple(lines)


def _sessions(found: Description) -> tuple[str, ...]:
    sessions = found.sessions
    if sessions is None:
        return ()
    turns, think = sessions.turns, sessions.think_s
    line = f"Sessions: {sessions.count:,}, of {turns.p50:g} turns (median; at most {turns.max:g})"
    if think is not None:
        line += f", {think.p50:g} s of thinking between them (median; p90 {think.p90:.1f} s)"
    return (line + ".",)


def _memory(found: Description) -> tuple[str, ...]:
    memory = found.memory
    if memory is None:
        return ("Memory: prompt or output tokens are not known.",)
    waste = ", ".join(f"{share:.2%} of pages of {size}" for size, share in memory.waste.items())
    fits = ", ".join(f"{size:,}: {share:.1%}" for size, share in memory.share_up_to.items())
    return (
        f"Memory: reserved for the longest request ({memory.total.max:,.0f} tokens), {memory.reserve_max_util:.1%} of "
        f"it would be used; for the p99 ({memory.total.p99:,.0f}), {memory.reserve_p99_filled:.1%}.",
        f"Unused at the end: {waste}.",
        f"Requests of at most so many tokens: {fits}.",
    )


def _prefixes(found: Description) -> tuple[str, ...]:
    if found.cache is None:
        return (f"Prefix cache: {found.why_no_cache}.",)
    ceiling = found.cache.ceiling
    rates = ceiling.rates
    full = "" if rates.full_pages is None else f", {rates.full_pages:.2%} of full pages"
    return (
        f"Ideal prefix cache (endless, cold): {rates.pages:.2%} of pages, {rates.tokens:.2%} of tokens{full}; "
        f"{rates.requests:.1%} of requests hit something, the median request {rates.median_request:.1%} of its tokens.",
        f"{ceiling.run.num_pages:,} of {int(found.trace.pages.sum()):,} pages are distinct: {ceiling.num_tokens:,} "
        "tokens keep everything.",
    )


def length_rows(found: Description) -> list[tuple[str, ...]]:
    """One row for each kind of length, under ``LENGTH_HEADS``."""
    rows = []
    for name, spread in found.lengths.items():
        figures = (_number(getattr(spread, head)) for head in _PERCENTILES)
        rows.append((name.replace("_", " "), *figures, f"{found.columns[name].sum():,}"))
    return rows


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}"


def cache_table(result: Simulation) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: hit rate against capacity; the last row has no limit."""
    points = [*result.points, result.ceiling]
    best = result.ceiling.rates.pages
    columns = {
        "pages": [*(f"{p.run.num_pages:,}" for p in result.points), "infinite"],
        "tokens": [*(f"{p.num_tokens:,}" for p in result.points), ""],
        "KV": [*map(kv_size, result.points), ""],
        "hits, pages": [f"{p.rates.pages:.2%}" for p in points],
        "hits, tokens": [f"{p.rates.tokens:.2%}" for p in points],
        "of ideal": [f"{p.rates.pages / best:.2%}" if best else "-" for p in points],
        "evicted": [f"{p.run.evictions:,}" for p in points],
        "cut*": [f"{p.run.num_cut:,}" for p in points],
    }
    if result.bytes_per_token is None:
        del columns["KV"]
    if not any(p.run.num_cut for p in result.points):
        del columns["cut*"]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def kv_size(point: Point) -> str:
    """Bytes of KV; empty where those of a token are not known."""
    return "" if point.num_bytes is None else format_bytes(point.num_bytes)


def cache_facts(result: Simulation) -> list[str]:
    """The sentences below the table of ``cache-sim``."""
    trace, ceiling = result.trace, result.ceiling
    size = f", {kv_size(ceiling)}" if kv_size(ceiling) else ""
    counted = f"; the first {result.warm_up:,} warm the cache and are not counted" if result.warm_up else ""
    cut = "* requests longer than the pool: their first pages only are looked up and kept; an engine refuses them."
    return [
        f"{len(trace):,} requests of {int(trace.prompt_tokens.sum()):,} prompt tokens, {int(trace.pages.sum()):,} "
        f"pages of {trace.page_size} tokens, one request after another{counted}.",
        f"Format {trace.format}; page size {trace.page_size_from}.",
        f"{ceiling.run.num_pages:,} pages ({ceiling.num_tokens:,} tokens{size}) keep everything: the ideal.",
        *([cut] if any(point.run.num_cut for point in result.points) else []),
        f"Replayed {result.replayed_pages:,} pages in {result.seconds:.2f} s.",
    ]
