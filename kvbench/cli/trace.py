"""``kvbench trace describe``: what a trace holds, as tables, JSON or a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbench.cli.option_types import OutputFile

if TYPE_CHECKING:
    from rich.console import Console

    from kvbench.trace_analysis.describe import Description


@click.group()
def trace() -> None:
    """Look at recorded traces of requests."""


@trace.command()
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--format", "name", default="auto", metavar="NAME", help="The trace's format (default: by its content).")
@click.option(
    "--page-size", type=click.IntRange(1), metavar="TOKENS",
    help="Tokens a page: of the trace's page ids (default: found from the lengths), or for texts (default: 16).",
)  # fmt: skip
@click.option(
    "--tokenizer", metavar="FOLDER", help="Count texts in tokens of this tokenizer, and find what they share."
)
@click.option("--pages", multiple=True, metavar="N[,N...]", help="Capacities of the prefix cache (default: a ladder).")
@click.option("--kv-bytes-per-token", type=click.IntRange(1), metavar="BYTES", help="Show capacities in bytes as well.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the tables.")
@click.option("--plot", type=OutputFile(), metavar="OUT.html", help="Write figures as a page, too.")
def describe(**options: Any) -> int:
    """Show what the trace in FILES holds.

    Lengths, rate, burstiness (cv of the gaps; Fano factor: variance over mean of the requests in windows of 1, 10 and
    60 s, 1 for Poisson), the ideal and the capacity-limited hit rate of a prefix cache, and the share of memory that
    reservations for the longest request would use. No model runs.

    FILES: one trace, or several files of one format that are one trace (sessions of agents, a file each). The format is
    found by the content: mooncake, qwen (Bailian), timed_trace (vLLM), guidellm, weka (kv-cache-tester), azure,
    burstgpt, vidur, servegen (its two files), sharegpt, questions (mt_bench, spec_bench), custom (vLLM), lmcache,
    single_turn and multi_turn (AIPerf).

    \b
    Examples:
      kvbench trace describe conversation_trace.jsonl --plot conversation.html
      kvbench trace describe AzureLLMInferenceTrace_conv.csv --json
      kvbench trace describe ShareGPT.json --tokenizer MODEL_DIR
    \b
    Exit codes: 0 shown, 2 bad input. No files are written but --plot's.
    """
    return describe_command(**options)


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
    from rich.console import Console

    from kvbench.common.errors import UsageError
    from kvbench.trace_analysis.cache_sim import parse_pages
    from kvbench.trace_analysis.describe import as_dict
    from kvbench.trace_analysis.describe import describe as count
    from kvbench.traces.read import read_trace

    try:
        asked = parse_pages(pages) if pages else None
        with Console(stderr=True).status("reading"):
            read = read_trace(files, name, page_size)
            if tokenizer is not None:
                from kvbench.traces.tokenizer import load_tokenizer, tokenised

                if read.prompts is None:
                    raise ValueError(f"--tokenizer {tokenizer!r} has nothing to count: {files[0]} has no texts")
                read = tokenised(read, load_tokenizer(tokenizer), page_size or 16)
            if page_size is not None and read.page_ids is None:
                raise ValueError(f"--page-size {page_size} has no meaning: {files[0]} has no page ids")
            found = count(files, read, asked, kv_bytes_per_token)
            given = {"--pages": pages, "--kv-bytes-per-token": kv_bytes_per_token}
            if found.cache is None and (useless := [flag for flag, value in given.items() if value]):
                raise ValueError(f"{useless[0]} has no meaning: {found.why_no_cache}; leave it out")
    except ValueError as error:
        raise UsageError(str(error)) from None
    if plot is not None:
        _write(plot, found)
    if as_json:
        print(json.dumps(as_dict(found), indent=2))
        return 0
    console = Console()
    _print(console, found)
    if plot is not None:
        console.print(f"figures: {plot}", highlight=False, markup=False, soft_wrap=True)
    return 0


def _write(path: Path, found: Description) -> None:
    from kvbench.common.errors import UsageError
    from kvbench.trace_analysis.page import page

    try:
        path.write_text(page(found), encoding="utf-8")
    except OSError as error:
        raise UsageError(
            f"--plot {str(path)!r} cannot be written ({error.strerror or error}): check the path"
        ) from None


def _print(console: Console, found: Description) -> None:
    from kvbench.trace_analysis.text import cache_table, facts, lengths_table

    def say(line: str) -> None:
        console.print(line, highlight=False, markup=False, soft_wrap=True)

    groups = facts(found)
    for line in groups.about:
        say(line)
    console.print(lengths_table(found))
    for line in (*groups.arrivals, *groups.sessions, *groups.memory, *groups.prefixes):
        say(line)
    if found.cache is not None:
        console.print(cache_table(found.cache))
