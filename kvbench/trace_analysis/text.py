"""A trace's description in sentences and tables, for the terminal and the page."""

from __future__ import annotations

from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from engine.config import format_bytes
from kvbench.trace_analysis.describe import Description
from kvbench.trace_analysis.hit_curve import Simulation, file_names

HEADS = ("p50", "p90", "p99", "max", "mean", "min")


@dataclass(frozen=True)
class Facts:
    """Sentences about a trace, by subject."""

    about: tuple[str, ...]
    arrivals: tuple[str, ...]
    sessions: tuple[str, ...]
    memory: tuple[str, ...]
    prefixes: tuple[str, ...]


def facts(found: Description) -> Facts:
    """All that can be said; what the trace does not tell is said, too."""
    return Facts(_about(found), _arrivals(found), _sessions(found), _memory(found), _prefixes(found))


def _about(found: Description) -> tuple[str, ...]:
    trace = found.trace
    lines = [f"{file_names(found.paths)}: {len(trace):,} request{'s' * (len(trace) != 1)}, format {trace.format}."]
    if trace.page_size is not None:
        lines.append(f"Pages of {trace.page_size} tokens ({trace.page_size_from}).")
    lines += [f"Left out: {count:,} {why}." for why, count in trace.left_out.items()]
    return tuple(lines)


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
            f"The clock ticks every {trace.tick_s:g} s: {arrivals.zero_gap_share:.0%} of the gaps are nothing, and cv "
            "and the Fano factor of short windows tell of the clock (load.spread_ticks spreads the ticks)."
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
        return ("Memory: prompt and output tokens are not both told.",)
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
    """What it is and its percentiles, mean and total: a row a kind of length."""
    return [
        (name.replace("_", " "), *(_number(getattr(spread, head)) for head in HEADS), f"{found.totals[name]:,}")
        for name, spread in found.lengths.items()
    ]


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.1f}"


def lengths_table(found: Description) -> Table:
    """Percentiles of the lengths."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), collapse_padding=True)
    table.add_column("")
    for head in (*HEADS, "total"):
        table.add_column(head, justify="right", overflow="fold")
    for name, *cells in length_rows(found):
        table.add_row(Text(name), *cells)
    return table


def cache_heads(result: Simulation) -> tuple[str, ...]:
    """The columns of ``cache_rows``."""
    size = ("KV",) if result.bytes_per_token is not None else ()
    return ("capacity, tokens", *size, "hits, pages", "hits, tokens", "of ideal")


def cache_rows(result: Simulation) -> list[tuple[str, ...]]:
    """Capacity, hit rate of pages and of tokens, share of the ideal: a row a capacity."""
    best = result.ceiling.rates.pages
    return [
        (
            f"{point.num_tokens:,}",
            *(() if point.num_bytes is None else (format_bytes(point.num_bytes),)),
            f"{point.rates.pages:.2%}",
            f"{point.rates.tokens:.2%}",
            f"{point.rates.pages / best:.0%}" if best else "-",
        )
        for point in result.points
    ]


def cache_table(result: Simulation) -> Table:
    """Hit rate against capacity, least recently used pages evicted first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for head in cache_heads(result):
        table.add_column(head, justify="right", overflow="fold")
    for row in cache_rows(result):
        table.add_row(*row)
    return table
