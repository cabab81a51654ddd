"""``kvbench trace describe`` and ``kvbench cache-sim``: what a trace holds, and what a prefix cache would hit on it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from kvbench.common.console import make_table, print_plain, print_table
from kvbench.common.errors import as_usage_error
from kvbench.trace_analysis import describe
from kvbench.trace_analysis.cache_sim import cache_dict, cache_facts, cache_table, parse_pages, simulate
from kvbench.trace_analysis.sentences import say
from kvbench.traces.model import file_names
from kvbench.traces.read import read_page_ids, read_trace
from kvbench_engine.model.spec import find_model

_TEXT_PAGE = 16  # tokens a page of texts


def describe_command(
    files: tuple[Path, ...],
    *,
    name: str,
    page_size: int | None,
    tokenizer: str | None,
    pages: tuple[str, ...],
    kv_bytes_per_token: int | None,
    as_json: bool,
    plot: Path | None,
) -> int:
    """Runs ``kvbench trace describe``. Raises UsageError."""
    with as_usage_error():
        capacities = parse_pages(pages)
        with Console(stderr=True).status("reading"):
            trace = read_trace(files, name, page_size)
            if tokenizer is not None:
                from kvbench.traces.tokenizer import load_tokenizer, tokenised

                if trace.prompts is None:
                    raise ValueError(say("refused.no_texts", tokenizer=tokenizer, file=files[0]))
                trace = tokenised(trace, load_tokenizer(tokenizer), page_size or _TEXT_PAGE)
            if page_size is not None and trace.page_ids is None:
                raise ValueError(say("refused.no_page_ids", size=page_size, file=files[0]))
            description = describe.describe(files, trace, capacities, kv_bytes_per_token)
            given = {"--pages": pages, "--kv-bytes-per-token": kv_bytes_per_token}
            if description.cache is None and (useless := [flag for flag, value in given.items() if value]):
                raise ValueError(say("refused.no_cache", option=useless[0], reason=description.why_no_cache))
    if plot is not None:
        from kvbench.trace_analysis.page import page

        plot.write_text(page(description), encoding="utf-8")
    if as_json:
        print(json.dumps(describe.as_dict(description), indent=2))
        return 0
    console = Console()
    for line in describe.about(description):
        print_plain(console, line)
    print_table(console, make_table(describe.LENGTH_HEADS, describe.length_rows(description)))
    for line in describe.facts(description):
        print_plain(console, line)
    if description.cache is not None:
        print_table(console, make_table(*cache_table(description.cache), numbers_from=0))
    if plot is not None:
        print_plain(console, f"figures: {plot}")
    return 0


def cache_sim_command(
    trace: tuple[Path, ...],
    *,
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
    """Runs ``kvbench cache-sim`` without tiers. Raises UsageError."""
    with as_usage_error():
        bytes_per_token = _bytes_per_token(kv_bytes_per_token, model, kv_cache_dtype)
        sizes = parse_pages(pages)
        read = read_page_ids(trace, format, page_size)
        with Console(stderr=True).status(f"replaying {len(read):,} requests"):
            result = simulate(read, sizes, warm_up, bytes_per_token)
    title = say("cache.title", names=file_names(trace))
    if html is not None:
        from kvbench.trace_analysis.page import cache_figure

        html.write_text(cache_figure(result, title).figure.to_html(include_plotlyjs=True), encoding="utf-8")
    if as_json:
        print(json.dumps({"trace": file_names(trace), **cache_dict(result)}, indent=2))
    else:
        heads, rows = cache_table(result)
        print_cache(title, heads, rows, cache_facts(result), html, numbers_from=0)
    return 0


def print_cache(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    lines: Sequence[str],
    html: Path | None,
    numbers_from: int,
) -> None:
    """Prints a simulated cache: title, table, sentences, and where its figure is."""
    console = Console()
    print_plain(console, title)
    print_table(console, make_table(heads, rows, numbers_from=numbers_from))
    for line in lines:
        print_plain(console, line)
    if html:
        print_plain(console, f"figure: {html}")


def _bytes_per_token(given: int | None, model: str | None, kv_cache_dtype: str | None) -> int | None:
    if given is not None and (model or kv_cache_dtype):
        raise ValueError(say("refused.two_sizes"))
    if model is None:
        if kv_cache_dtype:
            raise ValueError(say("refused.no_model", dtype=kv_cache_dtype))
        return given
    spec = find_model(model, "dummy")
    return spec.kv_shape(spec.default_dtype).slot_bytes(kv_cache_dtype or "auto")
