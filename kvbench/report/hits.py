"""The hit-rate ledger: what a prefix cache could have hit, what it did hit, and where the rest was lost."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq

from kvbench.common import text as words
from kvbench.report import tables
from kvbench.report.tables import NONE, Column, Part, ReportTable, Section, Value
from kvbench.report.wording import say
from kvbench.requests.cache_simulation import COLUMNS, CacheReplay, endless_hits, served_requests, shared_tokens
from kvbench.requests.request import distinct_prefixes, read_requests
from kvbench.runs.model import MeasuredCell, Repeat, Run, number
from kvbench.workload.settings import effective

MOST_BYTES = 64 << 20  # of a file of prompts
NOTHING = 0.0005  # of the prompt tokens: a smaller gap is not worth a word
NOT_TOLD, UNEXPLAINED = "not told", "unexplained"
_GAPS = (  # name, the step above it, the step below it; why: ``hits.gap`` in the file of sentences
    ("cold start", "shared", "endless"),
    ("page rounding", "endless", "whole_pages"),
    ("capacity", "whole_pages", "best"),
    ("eviction order", "best", "lru"),
    (UNEXPLAINED, "simulated", "hit"),
    (NOT_TOLD, "counted", "told"),
)
_COLUMNS = (  # key, title, steps of which the first that is known is shown, gaps that are lost before it
    ("shared", "shared at all", ("shared",), ()),
    ("endless", "endless cache", ("whole_pages", "endless"), ("cold start", "page rounding")),
    ("best", "same capacity, best order", ("best",), ("capacity",)),
    ("lru", "same capacity, LRU", ("lru",), ("eviction order",)),
    ("counted", "server counted", ("counted",), (UNEXPLAINED,)),
    ("told", "requests told", ("told",), (NOT_TOLD,)),
)


@dataclass(frozen=True)
class Gap:
    """The gap between two steps of the ledger. ``tokens`` > 0: so many are lost there, < 0: gained."""

    name: str
    tokens: float


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
        """Returns the share of the prompt tokens, 0 to 1."""
        return tokens / self.prompt_tokens if tokens is not None and self.prompt_tokens else None

    def percent(self, tokens: float | None) -> str:
        return words.percent(self.share(tokens))

    def first(self, steps: Iterable[str]) -> float | None:
        """Returns the first of these steps that is known."""
        return next((tokens for step in steps if (tokens := getattr(self, step)) is not None), None)

    @property
    def hit(self) -> float | None:
        """The larger count, as validity takes it."""
        return max((count for count in (self.counted, self.told) if count is not None), default=None)

    @property
    def simulated(self) -> float | None:
        """The last step before the counts."""
        return self.first(("lru", "whole_pages", "endless"))

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The gaps from ``shared`` to ``told``, where both sides are known."""
        steps = ((name, getattr(self, above), getattr(self, below)) for name, above, below in _GAPS)
        return tuple(Gap(name, more - less) for name, more, less in steps if None not in (more, less))

    @property
    def largest_gap(self) -> Gap | None:
        """The largest gap that matters between what is shared and what the server counted."""
        gaps = [gap for gap in self.gaps if gap.name != NOT_TOLD and abs(gap.tokens) >= NOTHING * self.prompt_tokens]
        return max(gaps, key=lambda gap: abs(gap.tokens), default=None)

    def signed(self, gap: Gap) -> str:
        """``−1.1 % cold start``; empty for a gap too small for a word."""
        share = self.share(gap.tokens) or 0.0
        return "" if abs(share) < NOTHING else f"{signed_percent(-share)} {gap.name}"

    @property
    def sentence(self) -> str:
        """A sentence on hits, shared tokens and the largest gap between them; empty where no count is known."""
        if self.hit is None:
            return ""
        values = {"name": self.cell.marked_name, "load": self.cell.load.short, "hit": self.percent(self.hit)}
        if self.shared is None:
            return say("hits.not_simulated", reason=self.reason, **values)
        lost = self.largest_gap and self.signed(self.largest_gap)
        return say("hits.ledger", bool(lost), shared=self.percent(self.shared), gap=lost, **values)


def signed_percent(share: float) -> str:
    """Writes `+0.4 %` or `−1.1 %`; `0 %` for a share that is too small to mention."""
    if abs(share) < NOTHING:
        return "0 %"
    return ("+" if share > 0 else "−") + words.percent(abs(share))


def hit_parts(run: Run, cells: Sequence[MeasuredCell]) -> Iterator[Part]:
    """The chapter on hits: sentences and the table, in the order of ``cells``."""
    ledgers = hit_ledgers(run, cells)
    yield from (ledger.sentence for ledger in ledgers)
    yield Section("hits", "From what is shared to what was hit", hit_table(ledgers), say("hits.note"))


def hit_table(listed: Sequence[HitLedger]) -> ReportTable:
    """Shares of the prompt tokens, a row a cell; what is lost on the way stands small."""
    ledgers = {ledger.cell.cell_id: ledger for ledger in listed}

    def prompt_tokens(cell: MeasuredCell) -> Value:
        ledger = ledgers[cell.cell_id]
        return tables.entry(ledger.prompt_tokens, words.count(ledger.prompt_tokens), ledger.reason)

    def step_column(key: str, title: str, steps: Sequence[str], gaps: Sequence[str]) -> Column:
        def value(cell: MeasuredCell) -> Value:
            ledger = ledgers[cell.cell_id]
            tokens = ledger.first(steps)
            if tokens is None:
                return NONE
            lost = (ledger.signed(gap) for gap in ledger.gaps if gap.name in gaps)
            return tables.entry(ledger.share(tokens), ledger.percent(tokens), *lost)

        return tables.column(key, title, value)

    columns = [
        *tables.identity_columns(),
        tables.column("prompt_tokens", "prompt tokens", prompt_tokens),
        *(step_column(*row) for row in _COLUMNS),
    ]
    return tables.cell_table(columns, [ledger.cell for ledger in listed], ("configuration", "load", "prompt_tokens"))


# --- From the stored files to the ledger ---


class _NotSimulated(Exception):
    """Says why a repeat cannot be simulated."""


@dataclass(frozen=True)
class _SimulationInput:
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


def hit_ledgers(run: Run, cells: Sequence[MeasuredCell]) -> list[HitLedger]:
    """Returns the ledger of each of these cells that has prefix caching."""
    return [_ledger(run, cell) for cell in cells if _caches(cell)]


def _caches(cell: MeasuredCell) -> bool:
    ours = cell.is_paged and bool(effective(cell.settings, "enable_prefix_caching"))
    return ours or bool(cell.counter("prefix_cache_queries_total") or cell.count("total_cached_tokens"))


def _ledger(run: Run, cell: MeasuredCell) -> HitLedger:
    simulated: dict[int, _Simulated] = {}
    reasons: list[str] = []
    for repeat in cell.repeats:
        try:
            simulated[repeat.repeat] = _simulate(_source(run, cell, repeat))
        except _NotSimulated as reason:
            reasons.append(str(reason))
    repeats = [repeat for repeat in cell.repeats if repeat.repeat in simulated or not simulated]
    totals = {step: _sum(getattr(one, step) for one in simulated.values()) for step in _Simulated.__dataclass_fields__}
    sent = totals.pop("prompt_tokens")
    if sent is None:
        sent = _sum(number(repeat.metrics.total_input_tokens) for repeat in repeats) or 0.0
    counted = _sum(number(_counted(repeat)) for repeat in repeats)
    told_in_answers = _sum(number(repeat.metrics.total_cached_tokens) for repeat in repeats)
    reason = "".join(reasons[:1])
    if simulated and totals["lru"] is None:
        reason = say("hits.no_capacity")
    elif simulated and reasons:
        reason = say("hits.some_repeats", some=len(simulated), every=len(cell.repeats), reason=reason)
    elif simulated and "steady" in run.cache_state:
        reason = say("hits.not_emptied")
    return HitLedger(cell, sent, counted, told_in_answers, **totals, reason=reason)


def _source(run: Run, cell: MeasuredCell, repeat: Repeat) -> _SimulationInput:
    """The files and figures that a repeat is simulated from. Raises _NotSimulated, with why it cannot be."""
    digest = (repeat.requests_sha256 or "")[:8]
    stored = sorted((run.folder / "requests").glob(f"*-{repeat.repeat}-{digest}.jsonl")) if digest.isalnum() else []
    rows = cell.folder / "requests.parquet"
    if not stored:
        raise _NotSimulated(say("hits.no_prompts"))
    if not rows.is_file():
        raise _NotSimulated(say("hits.no_samples"))
    if stored[0].stat().st_size > MOST_BYTES:
        raise _NotSimulated(say("hits.too_large", most=words.data_size(MOST_BYTES)))

    def setting(name: str) -> Any:  # the defaults are those of the built-in engine
        return effective(cell.settings, name) if cell.is_paged else cell.settings.get(name)

    split = setting("enable_chunked_prefill") is not False
    page_size = cell.capacity.page_size
    return _SimulationInput(
        stored[0],
        rows,
        tuple(path.stat().st_mtime_ns for path in (stored[0], rows)),
        repeat.repeat,
        (repeat.prefix_cache.state or run.cache_state) in ("primed", "steady"),
        _positive(setting("page_size") if page_size is None else page_size),
        _positive(cell.capacity.num_pages),
        _positive(setting("max_num_batched_tokens") if split else None),
    )


def _positive(value: Any) -> int | None:
    size = number(value)
    return None if size is None or size < 1 else int(size)


@functools.lru_cache(maxsize=256)  # of a run; `kvbench view` asks again, and it takes a second
def _simulate(source: _SimulationInput) -> _Simulated:
    """Computes the steps of one repeat. Raises _NotSimulated, with why there are none."""
    try:
        requests = read_requests(source.prompts)
    except (OSError, ValueError):
        raise _NotSimulated(say("hits.unreadable")) from None
    if any(request.prompt is not None or request.prompt_token_ids is None for request in requests):
        raise _NotSimulated(say("hits.text"))
    if any(request.width > 1 for request in requests):
        raise _NotSimulated(say("hits.several"))
    served = served_requests(requests, _rows(source), source.step_tokens)
    primed = distinct_prefixes(requests) if source.primed else []
    sent = sum(len(request.prompt) for request in served)
    steps = _Simulated(sent, sum(shared_tokens(served, primed)), sum(endless_hits(served, primed)))
    if source.page_size is None:
        return steps
    cache = CacheReplay(served, source.page_size, primed)
    steps = replace(steps, whole_pages=sum(cache.hits()))
    if source.num_pages is None:
        return steps
    lru = sum(cache.hits(source.num_pages))
    return replace(steps, lru=lru, best=max(lru, sum(cache.hits(source.num_pages, best=True))))


def _rows(source: _SimulationInput) -> pd.DataFrame:
    """requests.parquet of one repeat, with the columns that the simulation reads."""
    file = pq.ParquetFile(source.rows)
    columns = [name for name in (*COLUMNS, "repeat") if name in file.schema_arrow.names]
    rows = file.read(columns=columns).to_pandas()
    return rows[rows["repeat"] == source.repeat] if "repeat" in rows else rows


def _sum(values: Iterable[float | None]) -> float | None:
    """Adds up; None where one is not known, or there is none."""
    listed = list(values)
    return sum(value for value in listed if value is not None) if listed and None not in listed else None


def _counted(repeat: Repeat) -> float | None:
    """Returns the server's own count; ``hits`` in runs from before answers were counted too."""
    cache = repeat.prefix_cache
    for name in ("counted", "hits"):
        if name in cache.model_fields_set:
            return getattr(cache, name)
    return repeat.server.get("prefix_cache_hits_total")
