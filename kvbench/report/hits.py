"""The hit-rate ledger: what a prefix cache could have hit, what it did hit, and where the rest was lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from kvbench.common import text as words
from kvbench.report.tables import Column, Table, Value, cell_table, identity_columns
from kvbench.requests.cache_simulation import CacheSimulation, endless_hits, shared_tokens
from kvbench.requests.request import distinct_prefixes, read_requests
from kvbench.requests.served import COLUMNS, served_requests
from kvbench.runs.model import MeasuredCell, Repeat, Run, number
from kvbench.workload.settings import effective

MOST_BYTES = 64 << 20  # of a file of prompts
NOTHING = 0.0005  # of the prompt tokens: a smaller gap is not worth a word


@dataclass(frozen=True)
class Gap:
    """What lies between two steps of the ledger. ``tokens`` > 0: so many are lost there, < 0: gained."""

    name: str
    tokens: float
    why: str


@dataclass(frozen=True)
class HitLedger:
    """Prompt tokens found in the prefix cache, in all repeats of a cell that could be simulated (else in all).

    None: not known. From step to step a cache comes nearer to the one measured:
    ``shared``: another request begins with them too. An endless cache that has seen the whole load hits them.
    ``endless``: an endless cache hits them that starts as the workload declares (cold, or primed with the shared
    prefixes), with the requests in the order measured.
    ``whole_pages``: the same, in whole pages.
    ``best``: the same, with as many pages as there were, evicted in the best order.
    ``lru``: the same, with the least recently used page evicted first.
    ``counted``: the server counted them. ``told``: it told the successful requests so, in all (``cached_tokens``).
    ``reason``: why steps are missing.
    """

    cell: MeasuredCell
    prompt_tokens: float
    counted: float | None
    told: float | None
    shared: float | None = None
    endless: float | None = None
    whole_pages: float | None = None
    best: float | None = None
    lru: float | None = None
    reason: str = ""

    def share(self, tokens: float | None) -> float | None:
        """Of the prompt tokens, 0 to 1."""
        return tokens / self.prompt_tokens if tokens is not None and self.prompt_tokens else None

    @property
    def hit(self) -> float | None:
        """The larger count, as validity takes it."""
        return max((count for count in (self.counted, self.told) if count is not None), default=None)

    @property
    def simulated(self) -> float | None:
        """The last step that is known: nearest to what was measured."""
        known = (self.lru, self.whole_pages, self.endless)
        return next((tokens for tokens in known if tokens is not None), None)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """From ``shared`` to ``told``, where both sides are known."""
        every = (
            ("cold start", self.shared, self.endless, "computed for the first time, or before the first one was ready"),
            ("page rounding", self.endless, self.whole_pages, "only whole pages are found"),
            ("capacity", self.whole_pages, self.best, "evicted for lack of room, in the best order"),
            ("eviction order", self.best, self.lru, "LRU evicted them before their next use"),
            ("unexplained", self.simulated, self.hit, "between this simulation and the server's own count"),
            ("not told", self.counted, self.told, "preempted requests look up again, failed ones are told nothing"),
        )
        return tuple(
            Gap(name, more - less, why) for name, more, less, why in every if more is not None and less is not None
        )

    @property
    def largest_gap(self) -> Gap | None:
        """Of those that matter, between what is shared and what the server counted."""
        every = [g for g in self.gaps if g.name != "not told" and abs(g.tokens) >= NOTHING * self.prompt_tokens]
        return max(every, key=lambda gap: abs(gap.tokens), default=None)


def hit_ledgers(run: Run) -> list[HitLedger]:
    """Of the cells with prefix caching, in table order: the highest load first."""
    return [_ledger(run, cell) for cell in run.by_load if _caches(cell)]


def hit_table(run: Run) -> Table:
    """Shares of the prompt tokens, a row a cell; what is lost on the way stands small."""
    found = {ledger.cell.cell_id: ledger for ledger in hit_ledgers(run)}

    def column(key: str, title: str, hint: str, steps: Sequence[str], gaps: Sequence[str] = ()) -> Column:
        def value(cell: MeasuredCell) -> Value:
            ledger = found[cell.cell_id]
            tokens = next((known for step in steps if (known := getattr(ledger, step)) is not None), None)
            if tokens is None:
                return Value("–")
            lost = [_signed(ledger, gap) for gap in ledger.gaps if gap.name in gaps]
            return Value(words.percent(ledger.share(tokens)), ledger.share(tokens), "\n".join(filter(None, lost)))

        return Column(key, title, hint, value)

    def prompt_tokens(cell: MeasuredCell) -> Value:
        ledger = found[cell.cell_id]
        return Value(words.count(ledger.prompt_tokens), ledger.prompt_tokens, ledger.reason)

    every = [
        *identity_columns(),
        Column("prompt_tokens", "prompt tokens", "all repeats; small: why something is not simulated", prompt_tokens),
        column("shared", "shared at all", "another request begins with them too", ("shared",)),
        column(
            "endless", "endless cache", "starts as declared; whole pages, in the order measured",
            ("whole_pages", "endless"), ("cold start", "page rounding"),
        ),
        column("best", "same capacity, best order", "the page needed last goes first", ("best",), ("capacity",)),
        column("lru", "same capacity, LRU", "the least recently used page is evicted", ("lru",), ("eviction order",)),
        column("counted", "server counted", "the server's own counter", ("counted",), ("unexplained",)),
        column("told", "requests told", "cached_tokens of successful requests", ("told",), ("not told",)),
    ]  # fmt: skip
    cells = [cell for cell in run.by_load if cell.cell_id in found]
    return cell_table(every, cells, {"configuration", "load", "prompt_tokens"})


def hit_sentences(run: Run) -> list[str]:
    """A sentence a cell: what was hit of what is shared, and the largest gap between the two."""
    return [sentence for ledger in hit_ledgers(run) if (sentence := _sentence(ledger))]


def _sentence(ledger: HitLedger) -> str:
    if ledger.hit is None:
        return ""
    hit, who = words.percent(ledger.share(ledger.hit)), f"{ledger.cell.marked_name}, {ledger.cell.load.short}"
    if ledger.shared is None:
        return f"{who}: {hit} of prompt tokens hit; {ledger.reason}."
    text = f"{who}: {hit} of prompt tokens hit, {words.percent(ledger.share(ledger.shared))} shared"
    gap = ledger.largest_gap
    if gap is None:
        return f"{text}; nothing is lost."
    return f"{text}; largest gap: {_signed(ledger, gap)}."


def _signed(ledger: HitLedger, gap: Gap) -> str:
    """``−1.1 % cold start``; empty for a gap too small for a word."""
    share = ledger.share(gap.tokens) or 0.0
    if abs(share) < NOTHING:
        return ""
    return f"{'−' if share > 0 else '+'}{words.percent(abs(share))} {gap.name}"


def _caches(cell: MeasuredCell) -> bool:
    ours = cell.is_paged and bool(effective(cell.settings, "enable_prefix_caching"))
    return ours or bool(cell.counter("prefix_cache_queries_total") or cell.count("total_cached_tokens"))


@dataclass(frozen=True)
class _Source:
    """Files and figures that the simulation of one repeat goes by. ``written`` [ns]: when the files were."""

    prompts: Path
    rows: Path
    written: tuple[int, ...]
    repeat: int
    primed: bool
    page_size: int | None
    num_pages: int | None
    step_tokens: int | None


@dataclass(frozen=True)
class _Simulated:
    """The steps of one repeat, as in ``HitLedger``."""

    prompt_tokens: int
    shared: int
    endless: int
    whole_pages: int | None = None
    best: int | None = None
    lru: int | None = None


def _ledger(run: Run, cell: MeasuredCell) -> HitLedger:
    found: dict[int, _Simulated] = {}
    reasons: list[str] = []
    for repeat in cell.repeats:
        source = _source(run, cell, repeat)
        outcome = source if isinstance(source, str) else _simulate(source)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            found[repeat.repeat] = outcome
    repeats = [r for r in cell.repeats if r.repeat in found or not found]
    done = list(found.values())

    def total(step: str) -> float | None:
        values = [getattr(one, step) for one in done]
        return sum(values) if values and None not in values else None

    reason = reasons[0] if not done else ""
    if done and total("lru") is None:
        reason = "the server does not tell its capacity"
    elif done and reasons:
        reason = f"{len(done)} of {len(cell.repeats)} repeats: {reasons[0]}"
    elif done and "steady" in run.cache_state:
        reason = "the cache was not emptied before the load: what it held then is unexplained"
    sent = total("prompt_tokens")
    return HitLedger(
        cell,
        sent if sent is not None else _sum(number(r.metrics.get("total_input_tokens")) for r in repeats) or 0.0,
        _sum(number(_counted(r)) for r in repeats),
        _sum(number(r.metrics.get("total_cached_tokens")) for r in repeats),
        *map(total, ("shared", "endless", "whole_pages", "best", "lru")),
        reason=reason,
    )


def _source(run: Run, cell: MeasuredCell, repeat: Repeat) -> _Source | str:
    """What a repeat is simulated from, or why it cannot be."""
    digest = repeat.requests_sha256[:8]
    stored = sorted((run.folder / "requests").glob(f"*-{repeat.repeat}-{digest}.jsonl")) if digest.isalnum() else []
    rows = cell.folder / "requests.parquet"
    if not stored:
        return "the prompts are not stored"
    if not rows.is_file():
        return "the raw samples are not stored"
    if stored[0].stat().st_size > MOST_BYTES:
        return f"the file of prompts is larger than {words.data_size(MOST_BYTES)}"
    settings = cell.settings
    known = effective if cell.is_paged else _given  # the defaults are those of the built-in engine
    split = known(settings, "enable_chunked_prefill") is not False
    budget = number(known(settings, "max_num_batched_tokens")) if split else None
    sizes = [number(cell.capacity.get(name)) for name in ("page_size", "num_pages")]
    if sizes[0] is None:
        sizes[0] = number(known(settings, "page_size"))
    return _Source(
        stored[0],
        rows,
        tuple(path.stat().st_mtime_ns for path in (stored[0], rows)),
        repeat.repeat,
        repeat.cache.get("state", run.cache_state) in ("primed", "steady"),
        *(None if value is None or value < 1 else int(value) for value in (*sizes, budget)),
    )


@functools.lru_cache(maxsize=256)  # of a run; table, sentences and figure ask for the same, which takes a second
def _simulate(source: _Source) -> _Simulated | str:
    """The steps of one repeat, or why there are none."""
    try:
        requests = read_requests(source.prompts)
    except (OSError, ValueError):
        return "the stored prompts cannot be read"
    if any(r.prompt is not None or r.prompt_token_ids is None for r in requests):
        return "prompts were sent as text, so their token ids are not known"
    if any(r.width > 1 for r in requests):
        return "requests of several sequences are not simulated"
    served = served_requests(requests, _rows(source), source.step_tokens)
    primed = distinct_prefixes(requests) if source.primed else []
    found = _Simulated(
        sum(len(one.prompt) for one in served), sum(shared_tokens(served, primed)), sum(endless_hits(served, primed))
    )
    if source.page_size is None:
        return found
    cache = CacheSimulation(served, source.page_size, primed)
    whole_pages, best, lru = sum(cache.hits()), None, None
    if source.num_pages is not None:
        lru = sum(cache.hits(source.num_pages))
        best = max(lru, sum(cache.hits(source.num_pages, best=True)))
    return dataclasses.replace(found, whole_pages=whole_pages, best=best, lru=lru)


def _rows(source: _Source) -> pd.DataFrame:
    """requests.parquet of one repeat, with the columns that the simulation reads."""
    file = pq.ParquetFile(source.rows)
    columns = [name for name in (*COLUMNS, "repeat") if name in file.schema_arrow.names]
    rows = file.read(columns=columns).to_pandas()
    return rows[rows["repeat"] == source.repeat] if "repeat" in rows else rows


def _sum(values: Iterable[float | None]) -> float | None:
    """None where one is not known, or there is none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _counted(repeat: Repeat) -> Any:
    """The server's own count; ``hits`` in runs from before answers were counted too."""
    return repeat.cache.get("counted", repeat.cache.get("hits", repeat.server.get("prefix_cache_hits_total")))


def _given(settings: Mapping[str, Any], name: str) -> Any:
    return settings.get(name)
