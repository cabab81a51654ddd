"""``kvbench trace describe``: what a trace holds, as tables, JSON or a page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from kvbench.common.options import Count, Options, OutputFile, argument, option, switch, takes


@click.group()
def trace() -> None:
    """Look at recorded traces of requests."""


@dataclass(frozen=True, kw_only=True)
class DescribeRequest(Options):
    """The request of ``kvbench trace describe``."""

    files: tuple[Path, ...] = argument("FILES")
    name: str = option(
        "The trace's format (default: found by its content).", "--format", default="auto", metavar="NAME"
    )
    page_size: Count | None = option(
        "Tokens a page of the trace's page ids (default: found from the lengths); for texts, tokens a page to cut them "
        "into (default: 16).",
        metavar="TOKENS",
    )
    tokenizer: str | None = option(
        "Count texts in tokens of this tokenizer, and find the beginnings that they share.", metavar="FOLDER"
    )
    pages: tuple[str, ...] = option(
        "Sizes of the prefix cache in pages (default: 1, 2, 5, 10 ...).", default=(), metavar="N[,N...]"
    )
    kv_bytes_per_token: Count | None = option("Show capacities in bytes as well.", metavar="BYTES")
    as_json: bool = switch("Print JSON instead of the tables.", "--json")
    plot: OutputFile | None = option("Write figures as a page, too.", metavar="OUT.html")


@takes(DescribeRequest)
def describe(request: DescribeRequest) -> int:
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
    from kvbench.trace_analysis.commands import describe_command

    return describe_command(**request.values())


trace.add_command(describe)
