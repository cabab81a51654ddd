"""The hit rate of a prefix cache of N pages on a trace: the engine's own pool and cache, replayed without a model.

Each request does what ``PagedKVManager`` does for a request that runs alone, and ends before the next
begins: the figures describe the cache and not a schedule. In an engine, other requests cannot take pages of running
ones, and pages of the output are cached too.

The engine's cache works on tokens and a trace has page ids, so each page id becomes a page of one token. A token that
belongs to no page ends each request, since the cache leaves at least one token to compute (``PrefixCache.match``).
So a prompt that ends with a full page may hit that page, as published hit rates of traces have it; an engine computes
that page for its last token (``kvbench.requests.prefix_hits`` predicts what an engine can do).

Of a request with more pages than the pool, the first N pages are looked up and kept, as in a plain LRU in which a
prompt's first page is the most recent, and the rest are misses (an engine refuses it).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvbench.common.text import count, format_bytes
from kvbench.trace_analysis.sentences import say
from kvbench.traces.model import Trace
from kvbench_engine.kv.page_pool import PagePool
from kvbench_engine.kv.prefix_cache import PrefixCache
from kvbench_engine.sequence import Request
from kvbench_engine.sequence import Sequence as EngineSequence

_END = 0  # the token that is never matched; any number will do


@dataclass(frozen=True)
class Replay:
    """One pass over a trace. ``hits``: leading pages of each request that were in the cache, int64 [requests]."""

    num_pages: int
    hits: np.ndarray
    evictions: int
    num_cut: int  # requests of more than ``num_pages`` pages


@dataclass(frozen=True)
class HitRates:
    """Shares, 0 to 1.

    pages: hits / pages; tokens: tokens of hit pages / prompt tokens
    full_pages: as ``pages``, of full pages only (an engine caches no others); None if there are none
    requests: requests with a hit; median_request: the median over requests of their share of tokens
    """

    pages: float
    tokens: float
    full_pages: float | None
    requests: float
    median_request: float


@dataclass(frozen=True)
class Point:
    """One capacity and what it hit. ``num_bytes`` of KV, where the bytes of a token are known."""

    run: Replay
    rates: HitRates
    num_tokens: int
    num_bytes: int | None

    @property
    def kv_size(self) -> str:
        """Bytes of KV for people; empty where those of a token are not known."""
        return "" if self.num_bytes is None else format_bytes(self.num_bytes)

    def as_dict(self) -> Mapping[str, float | None]:
        """Returns what ``--json`` prints. Rates are shares, 0 to 1."""
        rates = {f"{key}_hit_rate": value for key, value in dataclasses.asdict(self.rates).items()}
        return {"num_pages": self.run.num_pages, "num_tokens": self.num_tokens, "kv_bytes": self.num_bytes, **rates}


@dataclass(frozen=True)
class HitRateCurve:
    """The hits of one trace at several capacities, and of a cache that never evicts. ``seconds``: of the replays."""

    trace: Trace
    warm_up: int
    bytes_per_token: int | None
    points: tuple[Point, ...]
    ceiling: Point  # a pool of the working set's size
    seconds: float
    replayed_pages: int


def simulate(
    trace: Trace, pages: list[int] | None = None, warm_up: int = 0, bytes_per_token: int | None = None
) -> HitRateCurve:
    """Replays ``trace`` at each of ``pages`` (None: a ladder up to the working set) and without a limit.

    Raises ValueError where no request is left to count.
    """
    hit_rates(trace, trace.pages * 0, warm_up)  # raises at once if no request is left to count
    distinct = working_set(trace)
    started = time.perf_counter()
    unlimited = replay(trace, distinct)
    runs = [
        # A pool beyond the working set never evicts: the same hits, without its memory.
        replay(trace, num_pages) if num_pages < distinct else dataclasses.replace(unlimited, num_pages=num_pages)
        for num_pages in pages or capacities(trace, distinct)
    ]
    seconds = time.perf_counter() - started

    def point(run: Replay) -> Point:
        tokens = run.num_pages * trace.page_size
        size = None if bytes_per_token is None else tokens * bytes_per_token
        return Point(run, hit_rates(trace, run.hits, warm_up), tokens, size)

    replayed = int(trace.pages.sum()) * (1 + sum(run.num_pages < distinct for run in runs))
    points = tuple(map(point, runs))
    return HitRateCurve(trace, warm_up, bytes_per_token, points, point(unlimited), seconds, replayed_pages=replayed)


class PagedPrefixes:
    """The engine's page pool and prefix cache, for requests one after another: ``match``, then ``fill``.

    ``on_evict``: gets the physical pages whose content is dropped. ValueError for no pages.
    """

    def __init__(self, num_pages: int, on_evict: Callable[[list[int]], None] = lambda pages: None) -> None:
        self.num_pages = num_pages
        self.cache = PrefixCache(1, num_pages)
        self._pool = PagePool(num_pages, self._evict)
        self._on_evict = on_evict

    def _evict(self, page: int) -> list[int]:
        lost = self.cache.evict(page)
        self._on_evict([*lost, page])
        return lost

    def match(self, page_ids: Sequence[int]) -> EngineSequence:
        """A sequence of these pages; its ``pages`` are the leading ones that are cached."""
        seq = EngineSequence.of(Request("", (*page_ids, _END)))
        seq.pages = self.cache.match(seq)
        for page in seq.pages:  # all of them before any allocation, which might evict one
            self._pool.share(page)
        return seq

    def fill(self, seq: EngineSequence) -> None:
        """Gives it the rest of its pages, caches all and ends it: ``seq.pages`` are all of its pages then."""
        num_pages = seq.num_tokens - 1  # of one token each, without the last token
        seq.pages += [self._pool.allocate() for _ in range(num_pages - len(seq.pages))]
        self.cache.insert(seq, num_pages, self._pool)
        for page in reversed(seq.pages):
            self._pool.release(page)


def replay(trace: Trace, num_pages: int) -> Replay:
    """Replays the trace through an empty ``PagePool`` of ``num_pages`` and its ``PrefixCache``.

    Raises ValueError for no pages.
    """
    prefixes = PagedPrefixes(num_pages)
    hits = np.zeros(len(trace), dtype=np.int64)
    num_cut = 0
    for index, page_ids in enumerate(trace.page_ids):
        kept = page_ids[:num_pages]
        num_cut += len(kept) < len(page_ids)
        seq = prefixes.match(kept)
        hits[index] = len(seq.pages)
        prefixes.fill(seq)
    return Replay(num_pages, hits, prefixes.cache.evictions, num_cut)


class PrefixNodes(dict[tuple[int, int], int]):
    """Numbers, from 1, of all distinct prefixes of whole pages that were walked: a tree, by parent and page id."""

    def walk(self, page_ids: Sequence[int]) -> list[int]:
        """The node of each page of a prompt."""
        path, node = [], 0
        for page_id in page_ids:
            path.append(node := self.setdefault((node, page_id), len(self) + 1))
        return path


def working_set(trace: Trace) -> int:
    """Pages that a cache needs to keep everything: distinct prefixes of whole pages."""
    nodes = PrefixNodes()
    for page_ids in trace.page_ids:
        nodes.walk(page_ids)
    return len(nodes)


def hit_rates(trace: Trace, hits: np.ndarray, warm_up: int = 0) -> HitRates:
    """Computes hit rates of the requests after the first ``warm_up``. Raises ValueError when these have no page."""
    pages, tokens, hits = trace.pages[warm_up:], trace.prompt_tokens[warm_up:], hits[warm_up:]
    if not pages.sum():
        raise ValueError(say("refused.warm_up", warm_up=warm_up, requests=len(trace)))
    full = tokens // trace.page_size
    hit_tokens = np.minimum(hits * trace.page_size, tokens)
    counted = tokens > 0
    return HitRates(
        pages=float(hits.sum() / pages.sum()),
        tokens=float(hit_tokens.sum() / tokens.sum()),
        full_pages=float(np.minimum(hits, full).sum() / full.sum()) if full.sum() else None,
        requests=float(np.mean(hits > 0)),
        median_request=float(np.median(hit_tokens[counted] / tokens[counted])),
    )


def capacities(trace: Trace, distinct: int) -> list[int]:
    """A ladder of 1, 2, 5, 10 ... from the smallest pool that cuts no request to ``distinct``, that never evicts."""
    longest = int(trace.pages.max())
    steps = [digit * 10**power for power in range(len(str(distinct))) for digit in (1, 2, 5)]
    return sorted({longest, *(n for n in steps if longest < n < distinct), max(longest, distinct)})


def parse_pages(texts: Iterable[str]) -> list[int]:
    """Reads ``["1k,5k", "2M"]`` as 1000, 5000, 2000000: ascending, each once. Raises ValueError for other words."""
    numbers = set()
    for word in (part for text in texts for part in text.split(",")):
        text = word.strip().replace("_", "")
        unit = {"k": 1000, "m": 1_000_000}.get(text[-1:].lower(), 1)
        digits = text if unit == 1 else text[:-1]
        if not (digits.isascii() and digits.isdigit() and len(digits) <= 12) or int(digits) < 1:
            raise ValueError(say("refused.pages", word=word.strip()))
        numbers.add(int(digits) * unit)
    return sorted(numbers)


def cache_table(result: HitRateCurve) -> tuple[list[str], list[list[str]]]:
    """Makes heads and rows: hit rate against capacity; the last row has no limit."""
    points, best, share = [*result.points, result.ceiling], result.ceiling.rates.pages, "{:.2%}".format
    columns = {
        "pages": [*(count(p.run.num_pages) for p in result.points), "infinite"],
        "tokens": [*(count(p.num_tokens) for p in result.points), ""],
        "KV": [*(p.kv_size for p in result.points), ""],
        "hits, pages": [share(p.rates.pages) for p in points],
        "hits, tokens": [share(p.rates.tokens) for p in points],
        "of ideal": [share(p.rates.pages / best) if best else "-" for p in points],
        "evicted": [count(p.run.evictions) for p in points],
        "cut*": [count(p.run.num_cut) for p in points],
    }
    if result.bytes_per_token is None:
        del columns["KV"]
    if not any(p.run.num_cut for p in result.points):
        del columns["cut*"]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def cache_facts(result: HitRateCurve) -> list[str]:
    """Writes the sentences below the table."""
    trace, ideal = result.trace, result.ceiling
    size = say("cache.size", bool(ideal.kv_size), size=ideal.kv_size)
    replayed = say(
        "cache.replayed",
        requests=len(trace),
        prompt_tokens=int(trace.prompt_tokens.sum()),
        pages=int(trace.pages.sum()),
        page_size=trace.page_size,
        warm_up=say("cache.warm_up", result.warm_up > 0, requests=result.warm_up),
    )
    lines = [
        replayed,
        say("cache.source", format=trace.format, source=trace.page_size_from),
        say("cache.everything", pages=ideal.run.num_pages, tokens=ideal.num_tokens, size=size),
        say("cache.cut", any(point.run.num_cut for point in result.points)),
        say("cache.time", pages=result.replayed_pages, seconds=result.seconds),
    ]
    return [line for line in lines if line]


def cache_dict(result: HitRateCurve) -> dict[str, Any]:
    """Returns what ``cache-sim --json`` prints beside the trace's name."""
    trace = result.trace
    entries = [
        {**p.as_dict(), "evicted_pages": p.run.evictions, "requests_longer_than_pool": p.run.num_cut}
        for p in (*result.points, result.ceiling)
    ]
    return {
        "format": trace.format,
        "page_size": trace.page_size,
        "page_size_from": trace.page_size_from,
        "requests": len(trace),
        "warm_up_requests": result.warm_up,
        "pages": int(trace.pages.sum()),
        "prompt_tokens": int(trace.prompt_tokens.sum()),
        "longest_request_pages": int(trace.pages.max()),
        "working_set_pages": result.ceiling.run.num_pages,
        "kv_bytes_per_token": result.bytes_per_token,
        "capacities": entries[:-1],
        "infinite_cache": entries[-1],
        "replay_seconds": result.seconds,
    }
