"""The hit-rate ledger: what a prefix cache could have hit, what it did hit, and where the rest was lost."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import pyarrow.parquet as pq
from plotly.subplots import make_subplots

from kvbench.common import text as words
from kvbench.report.style import GREY, Drawing, LineStyle, finish, hatch, safe
from kvbench.report.tables import Column, Part, ReportTable, Section, Value, cell_table, identity_columns
from kvbench.requests.cache_simulation import COLUMNS, CacheReplay, endless_hits, served_requests, shared_tokens
from kvbench.requests.request import distinct_prefixes, read_requests
from kvbench.runs.model import MeasuredCell, Repeat, Run, number
from kvbench.workload.settings import effective

MOST_BYTES = 64 << 20  # of a file of prompts
NOTHING = 0.0005  # of the prompt tokens: a smaller gap is not worth a word
HITS_NOTE = "Shares of the prompt tokens. Each gap is that to the column before; simulated from the prompts sent."
_MOST_PANELS = 6
_LOST = "#D55E00"
_PATTERNS = {"level": "", "lost": "/", "unexplained": "."}


@dataclass(frozen=True)
class Gap:
    """The gap between two steps of the ledger. ``tokens`` > 0: so many are lost there, < 0: gained."""

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
        """The share of the prompt tokens, 0 to 1."""
        return tokens / self.prompt_tokens if tokens is not None and self.prompt_tokens else None

    def percent(self, tokens: float | None) -> str:
        return words.percent(self.share(tokens))

    @property
    def hit(self) -> float | None:
        """The larger count, as validity takes it."""
        return max((count for count in (self.counted, self.told) if count is not None), default=None)

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """The gaps from ``shared`` to ``told``, where both sides are known."""
        simulated = next((tokens for tokens in (self.lru, self.whole_pages, self.endless) if tokens is not None), None)
        every = (
            ("cold start", self.shared, self.endless, "computed for the first time, or before the first one was ready"),
            ("page rounding", self.endless, self.whole_pages, "only whole pages are found"),
            ("capacity", self.whole_pages, self.best, "evicted for lack of room, in the best order"),
            ("eviction order", self.best, self.lru, "LRU evicted them before their next use"),
            ("unexplained", simulated, self.hit, "between this simulation and the server's own count"),
            ("not told", self.counted, self.told, "preempted requests look up again, failed ones are told nothing"),
        )
        return tuple(
            Gap(name, more - less, why) for name, more, less, why in every if more is not None and less is not None
        )

    @property
    def largest_gap(self) -> Gap | None:
        """The largest gap that matters between what is shared and what the server counted."""
        every = [g for g in self.gaps if g.name != "not told" and abs(g.tokens) >= NOTHING * self.prompt_tokens]
        return max(every, key=lambda gap: abs(gap.tokens), default=None)

    def signed(self, gap: Gap) -> str:
        """``−1.1 % cold start``; empty for a gap too small for a word."""
        share = self.share(gap.tokens) or 0.0
        return "" if abs(share) < NOTHING else f"{'−' if share > 0 else '+'}{words.percent(abs(share))} {gap.name}"

    @property
    def sentence(self) -> str:
        """A sentence on hits, shared tokens and the largest gap between them; empty where no count is known."""
        if self.hit is None:
            return ""
        text = f"{self.cell.marked_name}, {self.cell.load.short}: {self.percent(self.hit)} of prompt tokens hit"
        if self.shared is None:
            return f"{text}; {self.reason}."
        gap = self.largest_gap
        lost = f"largest gap: {self.signed(gap)}" if gap else "nothing is lost"
        return f"{text}, {self.percent(self.shared)} shared; {lost}."


def hit_ledgers(run: Run, cells: Sequence[MeasuredCell]) -> list[HitLedger]:
    """The ledger of each of these cells that has prefix caching."""
    return [_ledger(run, cell) for cell in cells if _caches(cell)]


def hit_parts(run: Run, cells: Sequence[MeasuredCell], look: Mapping[str, LineStyle]) -> Iterator[Part]:
    """The chapter on hits: sentences, the figure and the table, in the order of ``cells``."""
    ledgers = hit_ledgers(run, cells)
    yield from (ledger.sentence for ledger in ledgers)
    yield hit_drawing(ledgers, look)
    yield Section("hits", "From what is shared to what was hit", hit_table(ledgers), HITS_NOTE)


def hit_table(listed: Sequence[HitLedger]) -> ReportTable:
    """Shares of the prompt tokens, a row a cell; what is lost on the way stands small."""
    ledgers = {ledger.cell.cell_id: ledger for ledger in listed}

    def column(key: str, title: str, hint: str, steps: Sequence[str], gaps: Sequence[str] = ()) -> Column:
        def value(cell: MeasuredCell) -> Value:
            ledger = ledgers[cell.cell_id]
            tokens = next((known for step in steps if (known := getattr(ledger, step)) is not None), None)
            if tokens is None:
                return Value("–")
            lost = [ledger.signed(gap) for gap in ledger.gaps if gap.name in gaps]
            return Value(ledger.percent(tokens), ledger.share(tokens), "\n".join(filter(None, lost)))

        return Column(key, title, hint, value)

    def prompt_tokens(cell: MeasuredCell) -> Value:
        ledger = ledgers[cell.cell_id]
        return Value(words.count(ledger.prompt_tokens), ledger.prompt_tokens, ledger.reason)

    endless = "starts as declared; whole pages, in the order measured"
    gaps = ("cold start", "page rounding")
    every = [
        *identity_columns(),
        Column("prompt_tokens", "prompt tokens", "all repeats; small: why something is not simulated", prompt_tokens),
        column("shared", "shared at all", "another request begins with them too", ["shared"]),
        column("endless", "endless cache", endless, ["whole_pages", "endless"], gaps),
        column("best", "same capacity, best order", "the page needed last goes first", ["best"], ["capacity"]),
        column("lru", "same capacity, LRU", "the least recently used page is evicted", ["lru"], ["eviction order"]),
        column("counted", "server counted", "the server's own counter", ["counted"], ["unexplained"]),
        column("told", "requests told", "cached_tokens of successful requests", ["told"], ["not told"]),
    ]
    cells = [ledger.cell for ledger in listed]
    return cell_table(every, cells, {"configuration", "load", "prompt_tokens"})


# --- From the stored files to the ledger ---


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


def _caches(cell: MeasuredCell) -> bool:
    ours = cell.is_paged and bool(effective(cell.settings, "enable_prefix_caching"))
    return ours or bool(cell.counter("prefix_cache_queries_total") or cell.count("total_cached_tokens"))


def _ledger(run: Run, cell: MeasuredCell) -> HitLedger:
    simulated: dict[int, _Simulated] = {}
    reasons: list[str] = []
    for repeat in cell.repeats:
        source = _source(run, cell, repeat)
        outcome = source if isinstance(source, str) else _simulate(source)
        if isinstance(outcome, str):
            reasons.append(outcome)
        else:
            simulated[repeat.repeat] = outcome
    repeats = [r for r in cell.repeats if r.repeat in simulated or not simulated]
    totals = {
        field.name: _sum(getattr(one, field.name) for one in simulated.values())
        for field in dataclasses.fields(_Simulated)
    }
    sent = totals.pop("prompt_tokens")
    if sent is None:
        sent = _sum(number(r.metrics.total_input_tokens) for r in repeats) or 0.0
    reason = reasons[0] if reasons and not simulated else ""
    if simulated and totals["lru"] is None:
        reason = "the server does not tell its capacity"
    elif simulated and reasons:
        reason = f"{len(simulated)} of {len(cell.repeats)} repeats: {reasons[0]}"
    elif simulated and "steady" in run.cache_state:
        reason = "the cache was not emptied before the load: what it held then is unexplained"
    counted = _sum(number(_counted(r)) for r in repeats)
    told = _sum(number(r.metrics.total_cached_tokens) for r in repeats)
    return HitLedger(cell, sent, counted, told, **totals, reason=reason)


def _source(run: Run, cell: MeasuredCell, repeat: Repeat) -> _SimulationInput | str:
    """The files and figures that a repeat is simulated from, or why it cannot be."""
    digest = (repeat.requests_sha256 or "")[:8]
    stored = sorted((run.folder / "requests").glob(f"*-{repeat.repeat}-{digest}.jsonl")) if digest.isalnum() else []
    rows = cell.folder / "requests.parquet"
    if not stored:
        return "the prompts are not stored"
    if not rows.is_file():
        return "the raw samples are not stored"
    if stored[0].stat().st_size > MOST_BYTES:
        return f"the file of prompts is larger than {words.data_size(MOST_BYTES)}"

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
        _positive(setting("max_num_batched_tokens")) if split else None,
    )


def _positive(value: Any) -> int | None:
    known = number(value)
    return None if known is None or known < 1 else int(known)


@functools.lru_cache(maxsize=256)  # of a run; `kvbench view` asks again, and it takes a second
def _simulate(source: _SimulationInput) -> _Simulated | str:
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
    sent = sum(len(one.prompt) for one in served)
    steps = _Simulated(sent, sum(shared_tokens(served, primed)), sum(endless_hits(served, primed)))
    if source.page_size is None:
        return steps
    cache = CacheReplay(served, source.page_size, primed)
    whole_pages, best, lru = sum(cache.hits()), None, None
    if source.num_pages is not None:
        lru = sum(cache.hits(source.num_pages))
        best = max(lru, sum(cache.hits(source.num_pages, best=True)))
    return dataclasses.replace(steps, whole_pages=whole_pages, best=best, lru=lru)


def _rows(source: _SimulationInput) -> pd.DataFrame:
    """requests.parquet of one repeat, with the columns that the simulation reads."""
    file = pq.ParquetFile(source.rows)
    columns = [name for name in (*COLUMNS, "repeat") if name in file.schema_arrow.names]
    rows = file.read(columns=columns).to_pandas()
    return rows[rows["repeat"] == source.repeat] if "repeat" in rows else rows


def _sum(values: Iterable[float | None]) -> float | None:
    """None where one is not known, or there is none."""
    known = list(values)
    return sum(value for value in known if value is not None) if known and None not in known else None


def _counted(repeat: Repeat) -> float | None:
    """The server's own count; ``hits`` in runs from before answers were counted too."""
    cache = repeat.prefix_cache
    for name in ("counted", "hits"):
        if name in cache.model_fields_set:
            return getattr(cache, name)
    return repeat.server.get("prefix_cache_hits_total")


# --- The figure ---


def hit_frame(ledgers: Sequence[HitLedger]) -> pd.DataFrame:
    """A row a bar, from above; of the cells that were simulated.

    ``cell``: its id; ``title``, ``configuration``: its names; ``step``: the bar's name
    ``kind``: "level" (tokens hit), "lost", or "unexplained" (of either sign)
    ``low``, ``high``: the bar's ends, percent of the prompt tokens
    ``tokens``, ``change``: the bar's length, in tokens and in percent of the prompt tokens, of a gap with its sign
    ``why``: what explains it
    """
    rows = [bar for ledger in ledgers if ledger.shared is not None for bar in _bars(ledger)]
    columns = ["cell", "title", "configuration", "step", "kind", "low", "high", "tokens", "change", "why"]
    return pd.DataFrame(rows, columns=columns)


def _bars(ledger: HitLedger) -> Iterator[tuple[object, ...]]:
    cell, at = ledger.cell, ledger.shared or 0.0

    def bar(step: str, kind: str, low: float, high: float, change: float, why: str) -> tuple[object, ...]:
        low, high, share = (100 * (ledger.share(tokens) or 0.0) for tokens in (low, high, change))
        title = f"{cell.marked_name} · {cell.load.short}"
        return (cell.cell_id, title, cell.name, step, kind, low, high, change, share, why)

    yield bar("shared at all", "level", 0.0, at, at, "another request begins with them too")
    for gap in ledger.gaps:
        if gap.name != "not told":
            kind = "unexplained" if gap.name == "unexplained" else "lost"
            yield bar(gap.name, kind, *sorted((at, at - gap.tokens)), -gap.tokens, gap.why)
            at -= gap.tokens
    for step, tokens in (("server counted", ledger.counted), ("requests told", ledger.told)):
        if tokens is not None:
            yield bar(step, "level", 0.0, tokens, tokens, "")


def hit_figure(bars: pd.DataFrame, look: Mapping[str, LineStyle]) -> go.Figure:
    """A panel a cell: tokens hit in the configuration's colour, what is lost hatched, what is unexplained dotted."""
    panels = list(bars.groupby("cell", sort=False))
    counts = [len(panel) for _, panel in panels]
    height = 70 + sum(44 + 26 * count for count in counts)
    figure = make_subplots(
        rows=len(panels),
        cols=1,
        shared_xaxes=True,
        subplot_titles=[safe(one["title"].iloc[0]) for _, one in panels],
        row_heights=counts,
        vertical_spacing=min(0.9 / max(1, len(panels) - 1), 44 / height),
    )
    for row, (_, panel) in enumerate(panels, start=1):
        colours = {"level": look[panel["configuration"].iloc[0]].colour, "lost": _LOST, "unexplained": GREY}
        texts = [_text(kind, change / 100) for kind, change in zip(panel["kind"], panel["change"], strict=True)]
        figure.add_bar(
            y=panel["step"],
            base=panel["low"].astype("float32").round(3),
            x=(panel["high"] - panel["low"]).astype("float32").round(3),
            orientation="h",
            marker={"color": panel["kind"].map(colours), "pattern": hatch(panel["kind"].map(_PATTERNS))},
            text=texts,
            textposition="outside",
            cliponaxis=False,
            hovertext=[
                f"{step}: {text} of the prompt tokens ({tokens:,.0f} tokens)" + (f"<br>{why}" if why else "")
                for step, text, tokens, why in zip(panel["step"], texts, panel["tokens"], panel["why"], strict=True)
            ],
            hoverinfo="text",
            row=row,
            col=1,
        )
    figure.update_annotations(font={"size": 13})
    figure.update_xaxes(range=[0, max(1.0, float(bars["high"].max()) * 1.12)], ticksuffix=" %")
    figure.update_xaxes(title_text="share of the prompt tokens", row=len(panels))
    figure.update_yaxes(autorange="reversed", showgrid=False)
    finish(figure, height, legend=False)
    return figure.update_layout(margin_t=40, bargap=0.25)


def _text(kind: str, change: float) -> str:
    """24 %; −1.1 % and +0.4 % for a gap."""
    if abs(change) < NOTHING:
        return "0 %"
    sign = "" if kind == "level" else "−" if change < 0 else "+"
    return sign + words.percent(abs(change))


def hit_drawing(ledgers: Sequence[HitLedger], look: Mapping[str, LineStyle]) -> Drawing | None:
    """The figure for the page; None where nothing was simulated."""
    bars = hit_frame(ledgers)
    shown = list(dict.fromkeys(bars["cell"]))
    if not shown:
        return None
    more = f" The table has {len(shown) - _MOST_PANELS} more." if len(shown) > _MOST_PANELS else ""
    caption = (
        "From what requests have in common to what the server counted, over all repeats; hatched: lost on the way, "
        f"by simulation of the prompts sent.{more}"
    )
    title = _title(next(ledger for ledger in ledgers if ledger.cell.cell_id == shown[0]))
    figure = hit_figure(bars[bars["cell"].isin(shown[:_MOST_PANELS])], look)
    return Drawing("hits", title, caption, figure, 560)


def _title(ledger: HitLedger) -> str:
    """The shares of the cell with the highest load."""
    if ledger.hit is None:
        return f"{ledger.percent(ledger.endless)} of prompt tokens could be hit by an endless cache"
    text = f"{ledger.percent(ledger.hit)} of prompt tokens hit, {ledger.percent(ledger.shared)} shared"
    if gap := ledger.largest_gap:
        text += f"; largest gap: {gap.name}"
    return f"{text} ({ledger.cell.doubt})" if ledger.cell.doubt else text
