"""``kvbench cache-sim``: hit rate against capacity, as a table, JSON or a figure."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from engine.config import format_bytes
from kvbench.common.errors import UsageError
from kvbench.trace_analysis.cache_sim import HitRates, Replay, capacities, hit_rates, parse_pages, replay, working_set
from kvbench.traces.model import Trace
from kvbench.traces.read import read_page_ids

_CUT = "requests longer than the pool: their first pages only are looked up and kept; an engine refuses them"


@dataclass(frozen=True)
class Point:
    """One capacity and what it hit. ``num_bytes`` of KV, where the bytes of a token are known."""

    run: Replay
    rates: HitRates
    num_tokens: int
    num_bytes: int | None


@dataclass(frozen=True)
class Simulation:
    """All capacities of one trace, and the cache that never evicts. ``seconds``: of the replays alone."""

    name: str
    trace: Trace
    warm_up: int
    bytes_per_token: int | None
    points: tuple[Point, ...]
    ceiling: Point  # a pool of the working set's size
    seconds: float
    replayed_pages: int


def cache_sim_command(
    *,
    trace: tuple[Path, ...],
    format: str,
    pages: tuple[str, ...],
    page_size: int | None,
    warm_up: int,
    kv_bytes_per_token: int | None,
    model: str | None,
    kv_cache_dtype: str | None,
    as_json: bool,
    html: Path | None,
) -> int:
    """Raises UsageError."""
    try:
        bytes_per_token = _bytes_per_token(kv_bytes_per_token, model, kv_cache_dtype)
        asked = parse_pages(pages) if pages else None
        read = read_page_ids(trace, format, page_size)
        with Console(stderr=True).status(f"replaying {len(read):,} requests"):
            result = simulate(file_names(trace), read, asked, warm_up, bytes_per_token)
    except ValueError as error:
        raise UsageError(str(error)) from None
    if html is not None:
        _write_html(html, result)
    if as_json:
        print(json.dumps(as_dict(result), indent=2))
        return 0
    console = Console()
    _print(console, result)
    if html is not None:
        console.print(f"figure: {html}", highlight=False, markup=False, soft_wrap=True)
    return 0


def file_names(paths: Sequence[Path]) -> str:
    """The first file's name, and how many more there are."""
    return paths[0].name + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")


def simulate(
    name: str, trace: Trace, pages: list[int] | None, warm_up: int = 0, bytes_per_token: int | None = None
) -> Simulation:
    """Replay ``trace`` at each of ``pages`` (None: a ladder up to the working set) and without a limit. ValueError."""
    hit_rates(trace, trace.pages * 0, warm_up)  # something is left to count, before the work
    distinct = working_set(trace)

    def point(run: Replay) -> Point:
        tokens = run.num_pages * trace.page_size
        size = None if bytes_per_token is None else tokens * bytes_per_token
        return Point(run, hit_rates(trace, run.hits, warm_up), tokens, size)

    started = time.perf_counter()
    unlimited = replay(trace, distinct)
    runs = [
        # A pool beyond the working set never evicts: the same hits, without its memory.
        replay(trace, num_pages) if num_pages < distinct else dataclasses.replace(unlimited, num_pages=num_pages)
        for num_pages in pages or capacities(trace, distinct)
    ]
    seconds = time.perf_counter() - started
    return Simulation(
        name=name,
        trace=trace,
        warm_up=warm_up,
        bytes_per_token=bytes_per_token,
        points=tuple(point(run) for run in runs),
        ceiling=point(unlimited),
        seconds=seconds,
        replayed_pages=int(trace.pages.sum()) * (1 + sum(run.num_pages < distinct for run in runs)),
    )


def _bytes_per_token(told: int | None, model: str | None, kv_cache_dtype: str | None) -> int | None:
    from engine.model.spec import find_model

    if told is not None and (model or kv_cache_dtype):
        raise ValueError("--kv-bytes-per-token says what --model would: give one of them")
    if model is None:
        if kv_cache_dtype:
            raise ValueError(f"--kv-cache-dtype {kv_cache_dtype!r} needs --model, whose KV it is the format of")
        return told
    spec = find_model(model, "dummy")
    return spec.kv_shape(spec.default_dtype).slot_bytes(kv_cache_dtype or "auto")


def as_dict(result: Simulation) -> dict[str, Any]:
    """What ``--json`` prints. Rates are shares, 0 to 1."""

    def entry(point: Point) -> dict[str, Any]:
        rates = {f"{key}_hit_rate": value for key, value in dataclasses.asdict(point.rates).items()}
        return {
            "num_pages": point.run.num_pages,
            "num_tokens": point.num_tokens,
            "kv_bytes": point.num_bytes,
            **rates,
            "evicted_pages": point.run.evictions,
            "requests_longer_than_pool": point.run.num_cut,
        }

    trace = result.trace
    return {
        "trace": result.name,
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
        "capacities": [entry(point) for point in result.points],
        "infinite_cache": entry(result.ceiling),
        "replay_seconds": result.seconds,
    }


def _print(console: Console, result: Simulation) -> None:
    trace, ceiling = result.trace, result.ceiling
    sized = result.bytes_per_token is not None
    cut = any(point.run.num_cut for point in result.points)
    table = Table(
        title=Text(f"{result.name}: prefix-cache hit rate against capacity"),
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1),
        collapse_padding=True,
    )
    names = ["pages", "tokens", "KV", "hits,\npages", "hits,\ntokens", "of\nceiling", "pages\nevicted", "cut*"]
    shown = [name for name in names if (sized or name != "KV") and (cut or name != "cut*")]
    for name in shown:
        table.add_column(name, justify="right", overflow="fold")  # a number may be broken, never shortened

    def add(point: Point, pages: str, tokens: str, size: str) -> None:
        share = _percent(point.rates.pages / ceiling.rates.pages) if ceiling.rates.pages else "-"
        cells = [pages, tokens, size, _percent(point.rates.pages), _percent(point.rates.tokens), share]
        cells += [f"{point.run.evictions:,}", f"{point.run.num_cut:,}"]
        table.add_row(*(cell for name, cell in zip(names, cells, strict=True) if name in shown))

    for point in result.points:
        add(point, f"{point.run.num_pages:,}", f"{point.num_tokens:,}", _size(point))
    table.add_section()
    add(ceiling, "infinite", "", "")
    console.print(table)
    needed = f", {_size(ceiling)}" if sized else ""
    counted = f"; the first {result.warm_up:,} warm the cache and are not counted" if result.warm_up else ""
    lines = [
        f"{len(trace):,} requests of {int(trace.prompt_tokens.sum()):,} prompt tokens, {int(trace.pages.sum()):,} "
        f"pages of {trace.page_size} tokens, one request after another{counted}.",
        f"Format {trace.format}; page size {trace.page_size_from}.",
        f"{ceiling.run.num_pages:,} pages ({ceiling.num_tokens:,} tokens{needed}) keep everything: the ceiling.",
        *([f"* {_CUT}."] if cut else []),
        f"Replayed {result.replayed_pages:,} pages in {result.seconds:.2f} s.",
    ]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _write_html(path: Path, result: Simulation) -> None:
    """The curve as one page that needs no network. Raises UsageError."""
    try:
        _figure(result).write_html(path, include_plotlyjs=True, full_html=True)
    except OSError as error:
        raise UsageError(
            f"--html {str(path)!r} cannot be written ({error.strerror or error}): check the path"
        ) from None


def _figure(result: Simulation) -> Any:
    import plotly.graph_objects as go

    from kvbench.report.style import CONTIGUOUS, PAGED, finish, safe

    figure, ceiling = go.Figure(), result.ceiling
    texts = [
        f"{p.run.num_pages:,} pages, {p.num_tokens:,} tokens{f', {_size(p)}' if p.num_bytes else ''}<br>"
        f"{_percent(p.rates.pages)} of pages, {_percent(p.rates.tokens)} of tokens hit<br>"
        f"{p.run.evictions:,} pages evicted, {p.run.num_cut:,} requests longer than the pool"
        for p in result.points
    ]
    for name, colour, dash in (("pages", PAGED, "solid"), ("tokens", CONTIGUOUS, "dot")):
        figure.add_scatter(
            x=[p.run.num_pages for p in result.points],
            y=[getattr(p.rates, name) * 100 for p in result.points],
            mode="lines+markers",
            name=f"hit rate of {name}",
            line={"color": colour, "dash": dash},
            hovertext=texts,
            hoverinfo="text",
        )
    best = ceiling.rates.pages
    figure.add_hline(
        y=best * 100,
        line={"color": "#8A8A8A", "dash": "dash"},
        annotation_text=f"infinite cache: {_percent(best)} of pages ({ceiling.run.num_pages:,} pages)",
        annotation_position="top left",
    )
    figure.update_xaxes(
        title_text=f"capacity (pages of {result.trace.page_size} tokens)",
        type="log",
        tickvals=[digit * 10**power for power in range(13) for digit in (1, 2, 5)],
        tickformat=",",
    )
    figure.update_yaxes(title_text="hit rate, %", rangemode="tozero")
    finish(figure, 480)
    title = f"{safe(result.name)}: prefix-cache hit rate against capacity"
    return figure.update_layout(title={"text": title, "y": 0.93, "yanchor": "top"}, margin={"t": 96, "b": 56})


def _percent(share: float) -> str:
    return f"{share:.2%}".replace("%", " %")


def _size(point: Point) -> str:
    return "" if point.num_bytes is None else format_bytes(point.num_bytes)
