"""``kvbench trace describe`` and ``kvbench cache-sim``: what a trace holds, and what a prefix cache would hit on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import UsageError
from kvbench.trace_analysis import describe, text
from kvbench.trace_analysis.cache_sim import Simulation, parse_pages, simulate
from kvbench.traces.model import file_names
from kvbench.traces.read import read_page_ids, read_trace


def describe_command(
    *,
    files: tuple[Path, ...],
    name: str,
    page_size: int | None,
    tokenizer: str | None,
    pages: tuple[str, ...],
    kv_bytes_per_token: int | None,
    as_json: bool,
    plot: Path | None,
) -> int:
    """Raises UsageError."""
    try:
        capacities = parse_pages(pages) if pages else None
        with Console(stderr=True).status("reading"):
            trace = read_trace(files, name, page_size)
            if tokenizer is not None:
                from kvbench.traces.tokenizer import load_tokenizer, tokenised

                if trace.prompts is None:
                    raise ValueError(f"--tokenizer {tokenizer!r} has nothing to count: {files[0]} has no texts")
                trace = tokenised(trace, load_tokenizer(tokenizer), page_size or 16)
            if page_size is not None and trace.page_ids is None:
                raise ValueError(f"--page-size {page_size} has no meaning: {files[0]} has no page ids")
            found = describe.describe(files, trace, capacities, kv_bytes_per_token)
            given = {"--pages": pages, "--kv-bytes-per-token": kv_bytes_per_token}
            if found.cache is None and (useless := [flag for flag, value in given.items() if value]):
                raise ValueError(f"{useless[0]} has no meaning: {found.why_no_cache}; leave it out")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if plot is not None:
        from kvbench.trace_analysis.page import page

        plot.write_text(page(found), encoding="utf-8")
    if as_json:
        print(json.dumps(describe.as_dict(found), indent=2))
        return 0
    console = Console()
    for line in text.about(found):
        print_plain(console, line)
    print_table(console, make_table(text.LENGTH_HEADS, text.length_rows(found)))
    for line in text.facts(found):
        print_plain(console, line)
    if found.cache is not None:
        print_table(console, make_table(*text.cache_table(found.cache), numbers_from=0))
    if plot is not None:
        print_plain(console, f"figures: {plot}")
    return 0


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
        capacities = parse_pages(pages) if pages else None
        read = read_page_ids(trace, format, page_size)
        with Console(stderr=True).status(f"replaying {len(read):,} requests"):
            result = simulate(read, capacities, warm_up, bytes_per_token)
    except ValueError as error:
        raise UsageError(str(error)) from None
    title = f"{file_names(trace)}: prefix-cache hit rate against capacity"
    if html is not None:
        from kvbench.trace_analysis.page import cache_figure

        figure = cache_figure(result, title).figure
        html.write_text(figure.to_html(include_plotlyjs=True), encoding="utf-8")
    if as_json:
        print(json.dumps({"trace": file_names(trace), **_as_dict(result)}, indent=2))
        return 0
    console = Console()
    print_plain(console, title)
    print_table(console, make_table(*text.cache_table(result), numbers_from=0))
    for line in text.cache_facts(result):
        print_plain(console, line)
    if html is not None:
        print_plain(console, f"figure: {html}")
    return 0


def _bytes_per_token(given: int | None, model: str | None, kv_cache_dtype: str | None) -> int | None:
    from engine.model.spec import find_model

    if given is not None and (model or kv_cache_dtype):
        raise ValueError("--kv-bytes-per-token says what --model would: give one of them")
    if model is None:
        if kv_cache_dtype:
            raise ValueError(f"--kv-cache-dtype {kv_cache_dtype!r} needs --model, whose KV it is the format of")
        return given
    spec = find_model(model, "dummy")
    return spec.kv_shape(spec.default_dtype).slot_bytes(kv_cache_dtype or "auto")


def _as_dict(result: Simulation) -> dict[str, Any]:
    """What ``cache-sim --json`` prints beside the name."""
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
